"""The hand-written operators against their plain formulas in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from orchestra.model.kernels import products, rms_norm, rotate, swiglu
from orchestra.model.loss import IGNORED_TARGET, cross_entropy_sum
from orchestra.sizes.memory.loss_memory import chunk_tokens, logit_bytes

DOUBLE = torch.float64


def drawn(*shape: int, dtype: torch.dtype = DOUBLE) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


def test_rms_norm_equals_torchs_with_gradients() -> None:
    x, weight = drawn(3, 5, 8), drawn(8)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), F.rms_norm(x, (8,), weight, 1e-5))
    assert torch.autograd.gradcheck(lambda a, b: rms_norm(a, b, 1e-5), (x, weight))


def test_rms_norm_keeps_its_statistics_in_fp32_for_bf16() -> None:
    x = (drawn(4, 64).detach() * 100).to(torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    exact = F.rms_norm(x.double(), (64,), weight.double(), 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, rtol=2**-8, atol=0)


def test_swiglu_gradient() -> None:
    gate, up = drawn(4, 6), drawn(4, 6)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, (gate, up))


def test_rotation_keeps_lengths_and_has_the_right_gradient() -> None:
    x, angles = drawn(2, 3, 2, 4), torch.rand(3, 1, 2, dtype=DOUBLE)
    cos = angles.cos().repeat(1, 1, 2)
    rotated = rotate(x, cos, angles.sin())
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.autograd.gradcheck(lambda a: rotate(a, cos, angles.sin()), (x,))


def test_products_gradient() -> None:
    x, first, second = drawn(2, 3, 4), drawn(5, 4), drawn(2, 4)
    for ours, weight in zip(products(x, [first, second]), (first, second), strict=True):
        torch.testing.assert_close(ours, x @ weight.t())
    assert torch.autograd.gradcheck(lambda x, *weights: products(x, weights), (x, first, second))


def test_loss_in_chunks_equals_the_plain_loss_with_gradients() -> None:
    hidden, weight = drawn(11, 4), drawn(7, 4)
    target = torch.randint(0, 7, (11,))
    target[3] = IGNORED_TARGET
    # As one writes it, with all logits at once.
    logits = hidden @ weight.t()
    of_tokens = F.cross_entropy(logits, target, ignore_index=IGNORED_TARGET, reduction="none")
    for chunk in (1, 4, 11, 50):
        kept = torch.full_like(of_tokens, torch.nan)
        found = cross_entropy_sum(hidden, weight, target, scale=0.3, chunk=chunk, token_losses=kept)
        torch.testing.assert_close(found, 0.3 * of_tokens.sum())
        torch.testing.assert_close(kept, of_tokens.detach())
    assert torch.autograd.gradcheck(
        lambda a, b: cross_entropy_sum(a, b, target, scale=0.3, chunk=4), (hidden, weight)
    )


def test_loss_survives_logits_that_overflow_a_plain_exponential() -> None:
    hidden = torch.full((2, 1), 300.0)
    weight = torch.tensor([[1.0], [0.0], [-1.0]])
    loss = cross_entropy_sum(hidden, weight, torch.tensor([1, 2]))
    torch.testing.assert_close(loss, torch.tensor(900.0))


class LargestTensor(torch.overrides.TorchFunctionMode):
    """Remembers the most elements that any operator's result had."""

    numel = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_full_logits_never_exist() -> None:
    tokens, vocab, chunk = 512, 300, 32
    hidden, weight = drawn(tokens, 16, dtype=torch.float32), drawn(vocab, 16, dtype=torch.float32)
    with LargestTensor() as seen:
        cross_entropy_sum(hidden, weight, torch.randint(0, vocab, (tokens,)), chunk=chunk)
    assert max(chunk * vocab, tokens * 16) <= seen.numel < tokens * vocab // 4


def test_chunk_size_follows_the_vocabulary() -> None:
    assert chunk_tokens(10_000, 128_256, 4, on_gpu=False) == 256
    assert chunk_tokens(10_000, 8192, 4, on_gpu=False) == 512
    assert chunk_tokens(100, 272, 4, on_gpu=False) == 100
    assert chunk_tokens(16_384, 128_256, 2, on_gpu=True) == 8192
    assert chunk_tokens(9_000, 128_256, 2, on_gpu=True) == 4608, "as equal as tiles allow"
    eager = logit_bytes(2, is_compiled=False)
    assert chunk_tokens(16_384, 128_256, eager, on_gpu=True) == 2816
