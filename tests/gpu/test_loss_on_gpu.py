"""The compiled loss on a GPU: eager's numbers, and no second copy of the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from orchestra.model.logits import EAGER, CompiledPasses, LogitsPasses
from orchestra.model.loss import cross_entropy_sum

TOKENS, HIDDEN, WORDS, CHUNK = 4096, 256, 32_000, 2048
LOGITS_BYTES = 2 * CHUNK * WORDS


def loss_gradients_and_peak(passes: LogitsPasses) -> tuple[list[Tensor], int]:
    generator = torch.Generator("cuda").manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(WORDS, HIDDEN, generator=generator, device="cuda") / 16).bfloat16().requires_grad_()
    target = torch.randint(0, WORDS, (TOKENS,), generator=generator, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = cross_entropy_sum(hidden, weight, target, scale=1.0 / TOKENS, chunk=CHUNK, passes=passes)
    torch.autograd.backward(loss)
    assert hidden.grad is not None
    assert weight.grad is not None
    return [loss.detach(), hidden.grad, weight.grad], torch.cuda.max_memory_allocated() - before


def test_the_compiled_loss_is_the_eager_one_without_a_copy_of_the_logits() -> None:
    passes = CompiledPasses()
    # The compiler's own trials stay out of the peak.
    loss_gradients_and_peak(passes)
    ours, peak = loss_gradients_and_peak(passes)
    expected, eager_peak = loss_gradients_and_peak(EAGER)
    for mine, eager in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, eager, rtol=2**-7, atol=2**-7 * float(eager.abs().max()))
    # Beside the logits: gradients of the hidden states and of the matrix (in fp32, then in bf16).
    others = 2 * TOKENS * HIDDEN + 6 * WORDS * HIDDEN
    assert peak <= 1.05 * (LOGITS_BYTES + others)
    assert eager_peak >= 2 * LOGITS_BYTES
