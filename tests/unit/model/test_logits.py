"""The compiled passes over logits: the numbers of the eager ones, and how often they touch the logits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from orchestra.model.logits import EAGER, CompiledPasses, LogitsPasses
from orchestra.model.loss import IGNORED_TARGET, cross_entropy_sum
from tests.support.inductor_bytes import counted_bytes

TOKENS, HIDDEN, WORDS = 96, 16, 1000


@pytest.fixture(scope="module")
def compiled() -> Iterator[CompiledPasses]:
    torch.compiler.reset()
    yield CompiledPasses()
    torch.compiler.reset()


def loss_and_gradients(dtype: torch.dtype, passes: LogitsPasses) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(0, WORDS, (TOKENS,), generator=generator)
    target[5] = IGNORED_TARGET
    # The last chunk is shorter.
    loss = cross_entropy_sum(hidden, weight, target, scale=0.25, chunk=40, passes=passes)
    torch.autograd.backward(loss)
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_give_the_loss_and_the_gradients_of_eager_ones(
    compiled: CompiledPasses, dtype: torch.dtype
) -> None:
    # Both round the gradient of a logit once.
    tolerance = 1e-6 if dtype is torch.float32 else 2**-8
    for ours, expected in zip(
        loss_and_gradients(dtype, compiled), loss_and_gradients(dtype, EAGER), strict=True
    ):
        torch.testing.assert_close(
            ours, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )


def test_logits_are_read_twice_and_their_gradient_is_written_once() -> None:
    with counted_bytes() as counted:
        passes, logits = CompiledPasses(), torch.randn(TOKENS, WORDS).bfloat16()
        size, numbers = logits.nbytes, 8 * TOKENS
        index, factor = torch.zeros(TOKENS, dtype=torch.int64), torch.ones(TOKENS)
        found = passes.statistics(logits, index)
        assert size <= counted() <= size + 4 * numbers
        gradient = passes.gradient(found, index, factor, factor, logits.dtype)
        assert gradient.data_ptr() == logits.data_ptr()
        assert 2 * size <= counted() <= 2 * size + 4 * numbers


def test_words_that_are_left_out_count_nothing_in_compiled_passes_too(compiled: CompiledPasses) -> None:
    logits = torch.randn(4, 2048, generator=torch.Generator().manual_seed(1))
    logits[:, :1024] = -torch.inf
    index = torch.full((4,), 1500)
    found = compiled.statistics(logits, index)
    exact = logits.double().logsumexp(dim=1)
    torch.testing.assert_close((found.sums.log() + found.largest).double(), exact, rtol=1e-5, atol=1e-5)
