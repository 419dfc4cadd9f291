"""Embedding and loss over a vocabulary that is cut over ranks, against the single-device ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import RankPool
from torch import Tensor, nn

from orchestra.model.loss import IGNORED_TARGET, cross_entropy_sum
from orchestra.parallel.marks import Traffic
from orchestra.parallel.tensor.cuts import Cut, even_cut
from orchestra.parallel.tensor.parallel_layers import CutEmbedding
from orchestra.parallel.tensor.tensor_collectives import TensorGroup, tensor_group
from orchestra.parallel.tensor.vocabulary_loss import CutLoss

pytestmark = pytest.mark.ranks

NUM_TOKENS, WIDTH, RANKS = 24, 8, 3
# What three ranks share unevenly, evenly, and so that the last has nothing.
VOCABULARIES = (11, 12, 4)


def inputs(vocab_size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, WIDTH, generator=generator, dtype=torch.float64)
    target = torch.randint(0, vocab_size, (NUM_TOKENS,), generator=generator)
    target[3], target[10:14] = IGNORED_TARGET, IGNORED_TARGET
    return hidden.to(dtype), weight.to(dtype), target


def group_of(*, is_sequence_parallel: bool = False) -> TensorGroup:
    assert dist.group.WORLD is not None
    return tensor_group(dist.group.WORLD, Traffic(), is_sequence_parallel=is_sequence_parallel)


def part_of(weight: Tensor, words: Cut) -> Tensor:
    """Return this rank's rows; its padding holds numbers that would spoil everything."""
    padding = weight.new_full((words.padded - words.size, weight.shape[1]), 1e4)
    return torch.cat([weight[words.begin : words.begin + words.size], padding])


def losses(rank: int, chunk: int | None, sequence_parallel: bool, factor: float) -> list[Any]:
    """Return loss, gradient of the hidden states and gradient of the output matrix for each vocabulary."""
    group, results = group_of(is_sequence_parallel=sequence_parallel), []
    for vocab_size in VOCABULARIES:
        hidden, weight, target = inputs(vocab_size)
        words = even_cut(0, vocab_size, RANKS, rank)
        mine = part_of(weight, words).requires_grad_()
        part = hidden.chunk(RANKS)[rank] if sequence_parallel else hidden
        part = part.clone().requires_grad_()
        loss = CutLoss(words, group)(part, mine, target, scale=0.25, chunk=chunk)
        torch.autograd.backward(loss * factor)
        assert part.grad is not None
        assert mine.grad is not None
        assert not mine.grad[words.size :].any()
        results.append((loss.detach(), part.grad, mine.grad[: words.size]))
    return results


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 7, NUM_TOKENS])
def test_loss_and_gradients_are_those_of_one_device(
    ranks: Callable[[int], RankPool], chunk: int | None, sequence_parallel: bool, factor: float
) -> None:
    results = ranks(RANKS).run(losses, chunk=chunk, sequence_parallel=sequence_parallel, factor=factor)
    for number, vocab_size in enumerate(VOCABULARIES):
        hidden, weight, target = inputs(vocab_size)
        hidden.requires_grad_(), weight.requires_grad_()
        expected = cross_entropy_sum(hidden, weight, target, scale=0.25)
        torch.autograd.backward(expected * factor)
        found = [result[number] for result in results]
        grad_hidden = torch.cat([it[1] for it in found]) if sequence_parallel else found[0][1]
        grad_weight = torch.cat([it[2] for it in found])
        assert all(torch.equal(it[0], found[0][0]) for it in found)
        torch.testing.assert_close(found[0][0], expected.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(grad_hidden, hidden.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad_weight, weight.grad, rtol=1e-10, atol=1e-12)


def special_losses(rank: int) -> dict[str, Any]:
    group = group_of()
    hidden, weight, target = inputs(11)
    words = even_cut(0, 11, RANKS, rank)
    loss = CutLoss(words, group)
    mine = part_of(weight, words)
    nothing = torch.full_like(target, IGNORED_TARGET)
    with_hidden = hidden.clone().requires_grad_()
    of_nothing = loss(with_hidden, mine, nothing)
    torch.autograd.backward(of_nothing)
    assert with_hidden.grad is not None
    far = hidden.clone()
    far[0] *= 1e6
    with torch.no_grad():
        looked_at = loss(hidden, mine, target)
    narrow_hidden, narrow_weight, _ = inputs(11, torch.bfloat16)
    return {
        "nothing": (float(of_nothing.detach()), float(with_hidden.grad.abs().sum())),
        "looked at": float(looked_at),
        "far": float(loss(far, mine, target)),
        "bf16": float(loss(narrow_hidden, part_of(narrow_weight, words), target)),
    }


def test_special_cases_are_those_of_one_device(ranks: Callable[[int], RankPool]) -> None:
    hidden, weight, target = inputs(11)
    far = hidden.clone()
    far[0] *= 1e6
    for found in ranks(RANKS).run(special_losses):
        assert found["nothing"] == (0.0, 0.0)
        assert found["looked at"] == pytest.approx(float(cross_entropy_sum(hidden, weight, target)))
        assert found["far"] == pytest.approx(float(cross_entropy_sum(far, weight, target)))
        narrow_hidden, narrow_weight, _ = inputs(11, torch.bfloat16)
        narrow = cross_entropy_sum(narrow_hidden, narrow_weight, target)
        assert found["bf16"] == pytest.approx(float(narrow), rel=1e-3)


def embedded(rank: int, sequence_parallel: bool) -> list[tuple[Tensor, Tensor]]:
    """Return the embedded tokens, or this rank's, and the gradient of this rank's words."""
    group, results = group_of(is_sequence_parallel=sequence_parallel), []
    for vocab_size in VOCABULARIES:
        _, weight, _ = inputs(vocab_size)
        words = even_cut(0, vocab_size, RANKS, rank)
        embedding = nn.Embedding(words.padded, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            embedding.weight.copy_(part_of(weight, words))
        tokens = torch.arange(NUM_TOKENS).view(2, -1) * 5 % vocab_size
        out = CutEmbedding(embedding, words, group)(tokens)
        torch.autograd.backward(out.square().sum())
        assert embedding.weight.grad is not None
        results.append((out.detach(), embedding.weight.grad[: words.size]))
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_embedded_tokens_have_the_very_bits_of_one_device(
    ranks: Callable[[int], RankPool], sequence_parallel: bool
) -> None:
    results = ranks(RANKS).run(embedded, sequence_parallel=sequence_parallel)
    for number, vocab_size in enumerate(VOCABULARIES):
        _, weight, _ = inputs(vocab_size)
        weight.requires_grad_()
        tokens = torch.arange(NUM_TOKENS).view(2, -1) * 5 % vocab_size
        expected = F.embedding(tokens, weight)
        torch.autograd.backward(expected.square().sum())
        found = [result[number] for result in results]
        parts = [out for out, _ in found]
        whole = torch.cat([part.flatten(0, 1) for part in parts]) if sequence_parallel else parts[0]
        assert torch.equal(whole.view_as(expected), expected.detach())
        torch.testing.assert_close(torch.cat([grad for _, grad in found]), weight.grad)
