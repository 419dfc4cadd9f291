"""The compiled passes over logits: the numbers of the eager ones, and how often they touch the logits."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor import compile_fx, config, metrics

from orchestra.model.logits import EAGER, CompiledPasses, LogitsPasses
from orchestra.model.loss import IGNORED_TARGET, cross_entropy_sum

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


def test_logits_are_read_twice_and_their_gradient_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the compiler counts the bytes that its own kernels read and write, where it logs them."""
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "level", logging.INFO)
    monkeypatch.setattr(compile_fx.inductor_metrics_log, "_cache", {})
    # What comes out of a cache is not counted.
    monkeypatch.setattr(config, "force_disable_caches", True)
    torch.compiler.reset()
    passes, logits = CompiledPasses(), torch.randn(TOKENS, WORDS).bfloat16()
    size, numbers = logits.nbytes, 8 * TOKENS
    index, factor = torch.zeros(TOKENS, dtype=torch.int64), torch.ones(TOKENS)
    metrics.reset()
    found = passes.statistics(logits, index)
    assert size <= metrics.num_bytes_accessed <= size + 4 * numbers
    metrics.reset()
    gradient = passes.gradient(found, index, factor, factor, logits.dtype)
    assert gradient.data_ptr() == logits.data_ptr()
    assert 2 * size <= metrics.num_bytes_accessed <= 2 * size + 4 * numbers
    torch.compiler.reset()
