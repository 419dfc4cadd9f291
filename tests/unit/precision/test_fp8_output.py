"""The output matrix's products in fp8: the loss and its gradients beside the same arithmetic in fp32."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from conf.schema import Family, PrecisionName, Scaling
from orchestra.model.logits import EAGER, CompiledPasses, LogitsPasses
from orchestra.model.loss import IGNORED_TARGET, MakeProducts, PlainProducts, cross_entropy_sum
from orchestra.precision.fp8 import BACKWARD, FORWARD, attach_rounded, round_weight_, rounded
from orchestra.precision.fp8_output import Fp8OutputProducts
from tests.support.inductor_bytes import counted_bytes
from tests.support.torch_features import EACH_SCALING, NEEDS_ROW_PRODUCTS
from tests.unit.precision.test_fp8 import MODEL, config_of, losses, wide

TOKENS, HIDDEN, WORDS = 96, 32, 1008
SHARE = 0.25


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    # Words that differ much in size.
    sizes = torch.logspace(-2, 0, WORDS).unsqueeze(1)
    weight = (torch.randn(WORDS, HIDDEN, generator=generator) * sizes).bfloat16()
    target = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    target[5] = IGNORED_TARGET
    return hidden, weight, target


def computed(
    products: MakeProducts, chunk: int | None, passes: LogitsPasses = EAGER, *, keeps: Scaling | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and both gradients; `keeps`: with the rounded matrix attached."""
    hidden, weight, target = inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    if keeps is not None:
        attach_rounded(weight, keeps)
        with torch.no_grad():
            round_weight_(weight, keeps)
    loss = cross_entropy_sum(
        hidden, weight, target, scale=SHARE, chunk=chunk, passes=passes, products=products
    )
    torch.autograd.backward(loss)
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def emulated(scaling: Scaling) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same in fp32, of the rounded factors; the logits' gradient has one scale."""
    hidden, weight, target = inputs()

    def by_rows(matrix: Tensor) -> Tensor:
        return wide(rounded(matrix, FORWARD, scaling))

    def by_columns(matrix: Tensor) -> Tensor:
        return by_rows(matrix.t().contiguous()).t()

    logits = (by_rows(hidden) @ by_rows(weight).t()).bfloat16().float()
    is_taken = target != IGNORED_TARGET
    at_target = torch.nn.functional.one_hot(target.clamp(min=0), WORDS)
    gradient = (logits.softmax(1) - at_target) * is_taken.unsqueeze(1)
    limit = torch.finfo(BACKWARD).max
    gradient = (gradient * limit).to(BACKWARD).float() * (SHARE / limit)
    loss = torch.nn.functional.cross_entropy(logits, target, reduction="sum") * SHARE
    return loss, gradient @ by_columns(weight), gradient.t() @ by_columns(hidden)


@pytest.mark.parametrize("scaling", EACH_SCALING)
@pytest.mark.parametrize("chunk", [None, 32, 64])
@pytest.mark.parametrize("passes", [EAGER, CompiledPasses()], ids=["eager", "compiled"])
def test_loss_and_gradients_are_those_of_the_rounded_factors(
    scaling: Scaling, chunk: int | None, passes: LogitsPasses, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is compiled gives these numbers too: the test of its bytes compares them.
    torch.compiler.set_stance("force_eager")
    monkeypatch.setattr("orchestra.precision.fp8_output.FP8_WORDS", 100)
    # In chunks, scales for the columns of the hidden states are those of a chunk.
    tolerance = 0.1 if scaling is Scaling.row and chunk is not None else 2**-7
    try:
        found = computed(partial(Fp8OutputProducts, scaling), chunk, passes)
    finally:
        torch.compiler.set_stance("default")
    for ours, exact in zip(found, emulated(scaling), strict=True):
        assert float((ours.float() - exact).norm()) <= tolerance * float(exact.norm())


@pytest.mark.parametrize("scaling", EACH_SCALING)
def test_a_matrix_that_is_kept_rounded_gives_the_same_bits(scaling: Scaling) -> None:
    products = partial(Fp8OutputProducts, scaling)
    for ours, expected in zip(computed(products, 48, keeps=scaling), computed(products, 48), strict=True):
        assert torch.equal(ours, expected)


@NEEDS_ROW_PRODUCTS
def test_it_is_near_products_in_16_bits() -> None:
    found, plain = computed(partial(Fp8OutputProducts, Scaling.row), 48), computed(PlainProducts, 48)
    assert float(found[0]) == pytest.approx(float(plain[0]), rel=0.01)
    for ours, expected in zip(found[1:], plain[1:], strict=True):
        # Gradients have two digits, and what is subtracted in the hidden states' takes some of them.
        assert 0 < float((ours - expected).float().norm()) < 0.15 * float(expected.float().norm())


def test_the_pass_that_computes_a_logits_gradient_writes_it_in_fp8() -> None:
    logits = torch.randn(TOKENS, WORDS).bfloat16()
    index, factor = torch.zeros(TOKENS, dtype=torch.int64), torch.full((TOKENS,), torch.finfo(BACKWARD).max)
    eager = EAGER.statistics(logits.clone(), index)
    expected = EAGER.gradient(eager, index, factor / eager.sums, factor, BACKWARD)
    with counted_bytes() as counted:
        passes = CompiledPasses()
        found = passes.statistics(logits, index)
        counted()
        gradient = passes.gradient(found, index, factor / found.sums, factor, BACKWARD)
        # Read in 16 bits, and written in 8, which torch 2.13 counts as read too and 2.11 does not.
        num_bytes = counted()
        assert any(0 <= num_bytes - times * logits.nbytes <= 48 * TOKENS for times in (1.5, 2))
    assert gradient.dtype is BACKWARD
    off = (gradient.float() - expected.float()).abs()
    # Here and there a number is rounded to its neighbour.
    assert float((off > 0).float().mean()) < 0.01
    assert bool((off <= 0.25 * expected.float().abs()).all())


@pytest.mark.parametrize(
    ("scaling", "is_tied"),
    [(Scaling.tensor, True), pytest.param(Scaling.row, False, marks=NEEDS_ROW_PRODUCTS)],
)
def test_losses_of_a_model_follow_those_of_bf16(scaling: Scaling, is_tied: bool) -> None:
    model = replace(MODEL, family=Family.llama, tie_word_embeddings=is_tied)
    expected = losses(config_of(PrecisionName.bf16, model))
    inside = losses(config_of(PrecisionName.fp8, model, fp8_scaling=scaling))
    found = losses(config_of(PrecisionName.fp8, model, fp8_scaling=scaling, fp8_output=True))
    assert found == pytest.approx(expected, rel=0.01)
    assert found != inside
