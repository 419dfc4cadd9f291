"""Products of experts in fp8 against the same arithmetic in fp32, and what torch's kernel is called with. Its
kernel runs on Hopper GPUs alone; torch checks its arguments anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from conf.schema import Scaling
from orchestra.model.weight_gradients import LaterGradients, WeightGradient, attach
from orchestra.precision import fp8_experts
from orchestra.precision.fp8 import FORWARD, Rounded, attach_rounded, attached, round_weight_, rounded
from orchestra.precision.fp8_experts import Fp8GroupedProducts
from tests.support.called_operators import num_called
from tests.support.torch_features import NEEDS_ROW_PRODUCTS

INPUTS, OUTPUTS = 32, 48
# An expert with none, one with a whole block of rows and one with more; the last three rows are nobody's.
COUNTS = (5, 0, 16, 23)
ROWS = sum(COUNTS) + 3


def numbers(seed: int, *shape: int) -> Tensor:
    """bf16 numbers whose rows differ much in size."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 2, shape[-2])[:, None]
    return (torch.randn(shape, generator=generator) * sizes).to(torch.bfloat16)


def wide(matrix: Tensor) -> Tensor:
    """Return what a matrix is when it is rounded by rows."""
    found = rounded(matrix.contiguous(), FORWARD, Scaling.row)
    return found.values.float() * found.scale


def emulated(rows: Tensor, weights: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """Return products and all gradients of the rounded factors, computed in fp32, expert by expert; on the
    device of the factors, whose own arithmetic finds their scales.
    """
    outs = [torch.zeros(ROWS, OUTPUTS, device=rows.device) for _ in weights]
    grad_rows = torch.zeros(ROWS, INPUTS, device=rows.device)
    grad_weights = [torch.zeros(weight.shape, device=rows.device) for weight in weights]
    begin = 0
    for expert, count in enumerate(COUNTS):
        own = slice(begin, begin + count)
        begin += count
        for number, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            if count:
                outs[number][own] = wide(rows[own]) @ wide(weight[expert]).t()
                grad_rows[own] += wide(grad[own]) @ wide(weight[expert].t()).t()
                grad_weights[number][expert] = wide(grad[own].t()) @ wide(rows[own].t()).t()
    return [*outs, grad_rows, *grad_weights]


def factors(device: str = "cpu") -> tuple[Tensor, list[Tensor], list[Tensor]]:
    rows = numbers(1, ROWS, INPUTS)
    rows[sum(COUNTS) :] = torch.nan
    rows = rows.to(device).requires_grad_()
    weights = [numbers(seed, len(COUNTS), OUTPUTS, INPUTS).to(device).requires_grad_() for seed in (2, 3)]
    grads = [numbers(seed, ROWS, OUTPUTS).to(device) for seed in (4, 5)]
    for grad in grads:
        # Of what is nobody's nothing must come in.
        grad[sum(COUNTS) :] = torch.nan
    return rows, weights, grads


def found_of(products: Fp8GroupedProducts, *, is_kept: bool = False, device: str = "cpu") -> list[Tensor]:
    """Return products and gradients, on the CPU."""
    rows, weights, grads = factors(device)
    for weight in weights if is_kept else []:
        attach_rounded(weight, Scaling.row)
        with torch.no_grad():
            round_weight_(weight, Scaling.row)
    outs = products(rows, torch.tensor(COUNTS, device=device), *weights)
    found = [*outs, *torch.autograd.grad(outs, [rows, *weights], grads)]
    for made in found[:3]:
        # What is nobody's means nothing.
        made.detach()[sum(COUNTS) :] = 0
    return [made.detach().cpu() for made in found]


@NEEDS_ROW_PRODUCTS
@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_of_weights_are_made_when_they_are_taken(is_compiled: bool) -> None:
    """A schedule may take them later: what is multiplied before are the gradients of rows."""
    rows, weights, grads = factors()
    memory = [torch.zeros(weight.shape, dtype=torch.bfloat16) for weight in weights]
    later = LaterGradients()
    takers = [WeightGradient(lambda into=into: (into, False), lambda: None, later) for into in memory]
    for weight, taker in zip(weights, takers, strict=True):
        attach(weight, taker)
    products = Fp8GroupedProducts(has_kernel=False)
    multiply = torch.compile(products, backend="aot_eager") if is_compiled else products

    def num_in_backward() -> int:
        outs = multiply(rows, torch.tensor(COUNTS), *weights)
        name = "orchestra::grouped_fp8_products"
        return num_called(name, lambda: torch.autograd.backward(outs, grads))

    num_in_backward()  # what is compiled calls it too
    assert num_in_backward() == 4
    at_once = [into.clone() for into in memory]
    for into in memory:
        into.zero_()
    later.is_open = True
    assert num_in_backward() == 2
    assert not any(into.any() for into in memory)
    for take in later.kept():
        take()
    for into, expected in zip(memory, at_once, strict=True):
        assert into.any()
        assert torch.equal(into, expected)


def assert_near(made: Tensor, exact: Tensor) -> None:
    """Each row is right to the digits of bf16, small ones too."""
    off = (made.float() - exact.float()).norm(dim=-1)
    assert bool((off <= 2**-8 * exact.float().norm(dim=-1)).all())


@NEEDS_ROW_PRODUCTS
def test_products_and_gradients_are_those_of_the_rounded_factors() -> None:
    rows, weights, grads = factors()
    expected = emulated(rows.detach(), [weight.detach() for weight in weights], grads)
    found = found_of(Fp8GroupedProducts(has_kernel=False))
    for made, exact in zip(found, expected, strict=True):
        assert made.dtype == torch.bfloat16
        assert_near(made, exact)
    # Of the expert without a row.
    assert all(bool((gradient[1] == 0).all()) for gradient in found[3:])


@NEEDS_ROW_PRODUCTS
def test_scales_begin_where_kernels_may_read_several_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scaled, places = torch._scaled_mm, []

    def noting(*factors: Tensor, scale_a: Tensor, scale_b: Tensor, **options: object) -> Tensor:
        places.extend((scale_a.data_ptr(), scale_b.data_ptr()))
        return scaled(*factors, scale_a=scale_a, scale_b=scale_b, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "_scaled_mm", noting)
    found_of(Fp8GroupedProducts(has_kernel=False))
    # 16 bytes, where rows of an expert begin at any number. Two weights: 3 experts with rows in both passes
    # by rows, 4 in the one that sums along them.
    assert len(places) == 2 * 2 * (2 * 3 + 4)
    assert all(place % 16 == 0 for place in places)


@NEEDS_ROW_PRODUCTS
def test_kept_weights_give_the_bits_of_weights_rounded_at_each_use() -> None:
    products = Fp8GroupedProducts(has_kernel=False)
    for kept, anew in zip(found_of(products, is_kept=True), found_of(products), strict=True):
        assert torch.equal(kept, anew)


@NEEDS_ROW_PRODUCTS
def test_without_any_row_gradients_are_zero() -> None:
    weight = numbers(2, len(COUNTS), OUTPUTS, INPUTS).requires_grad_()
    rows = torch.zeros(0, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    (out,) = Fp8GroupedProducts(has_kernel=False)(rows, torch.zeros(len(COUNTS), dtype=torch.int64), weight)
    assert out.shape == (0, OUTPUTS)
    of_rows, of_weight = torch.autograd.grad(out.sum(), [rows, weight])
    assert of_rows.shape == (0, INPUTS)
    assert torch.equal(of_weight, torch.zeros_like(weight))


@pytest.fixture
def no_cached_graphs() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()
    counters.clear()


@NEEDS_ROW_PRODUCTS
@pytest.mark.usefixtures("no_cached_graphs")
def test_rounding_is_compiled_by_itself_once_for_all_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_experts, "_compiled", functools.cache(graphs_alone))
    products = Fp8GroupedProducts(has_kernel=False, is_compiled=True)
    for is_kept in (True, False):
        expected = found_of(Fp8GroupedProducts(has_kernel=False), is_kept=is_kept)
        for made, exact in zip(found_of(products, is_kept=is_kept), expected, strict=True):
            assert torch.equal(made, exact)
    # By rows, by columns, and weights as they are and transposed.
    assert counters["stats"]["unique_graphs"] == 4
    for counts in ((7, 9, 0, 2), (0, 0, 40, 5), (1, 1, 1, 1)):
        rows = numbers(1, sum(counts), INPUTS).requires_grad_()
        (out,) = products(rows, torch.tensor(counts), numbers(2, len(counts), OUTPUTS, INPUTS))
        out.backward(numbers(6, *out.shape))
    assert counters["stats"]["unique_graphs"] == 4


def graphs_alone(rounding: Callable[..., Rounded]) -> Callable[..., Rounded]:
    compiled: Callable[..., Rounded] = torch.compile(rounding, dynamic=True, backend="aot_eager")
    return compiled


def kernel(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offs: Tensor, **options: object
) -> Tensor:
    """Return what torch documents of its kernel, after its own checks of the arguments."""
    arguments = [each.to("meta") for each in (left, right, left_scale, right_scale, offs)]
    shape = torch.ops.aten._scaled_grouped_mm(*arguments, **options).shape
    out = torch.full(shape, torch.nan)
    begin = 0
    for group, end in enumerate(offs.tolist()):
        if right.dim() == 3:
            scale = left_scale[begin:end, None] * right_scale[group]
            out[begin:end] = left[begin:end].float() @ right[group].float() * scale
        else:
            # Groups begin where TMA can read, at multiples of 16 bytes.
            assert begin % 16 == 0
            scales = left_scale.view(len(offs), -1, 1)[group] * right_scale.view(len(offs), -1)[group]
            out[group] = left[:, begin:end].float() @ right[begin:end].float() * scales
        begin = end
    return out.to(torch.bfloat16)


def test_the_kernel_of_hopper_is_called_as_torch_wants_and_does_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, weights, grads = factors()
    expected = emulated(rows.detach(), [weight.detach() for weight in weights], grads)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", kernel)
    for is_kept in (False, True):
        found = found_of(Fp8GroupedProducts(has_kernel=True), is_kept=is_kept)
        for made, exact in zip(found, expected, strict=True):
            assert_near(made, exact)


def test_stacked_weights_are_rounded_as_each_by_itself() -> None:
    stack = numbers(2, 3, OUTPUTS, INPUTS)
    attach_rounded(stack, Scaling.row)
    round_weight_(stack, Scaling.row)
    by_rows, by_columns = Rounded(*attached([stack])[:2]), Rounded(*attached([stack])[2:])
    for expert, matrix in enumerate(stack):
        for whole, one in ((by_rows, matrix), (by_columns, matrix.t().contiguous())):
            alone = rounded(one, FORWARD, Scaling.row)
            assert torch.equal(whole.values[expert].float(), alone.values.float())
            assert torch.equal(whole.scale[expert], alone.scale)
