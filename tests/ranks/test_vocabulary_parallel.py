"""Embedding and loss over a vocabulary that is cut over ranks, against the single-device ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import Ranks
from torch import Tensor, nn

from orchestra.model.logits import EAGER, CompiledPasses
from orchestra.model.loss import IGNORED_TARGET, cross_entropy_sum
from orchestra.parallel.marks import Traffic
from orchestra.parallel.places import Cut, even_cut
from orchestra.parallel.tensor.tensor_collectives import TensorGroup, tensor_group
from orchestra.parallel.tensor.vocabulary import CutEmbedding, CutLoss

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


def losses(rank: int, world: int, chunk: int | None, sequence_parallel: bool, factor: float) -> list[Any]:
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
    ranks: Ranks, chunk: int | None, sequence_parallel: bool, factor: float
) -> None:
    results = ranks(RANKS).run(losses, chunk=chunk, sequence_parallel=sequence_parallel, factor=factor)
    for number, vocab_size in enumerate(VOCABULARIES):
        hidden, weight, target = inputs(vocab_size)
        hidden.requires_grad_(), weight.requires_grad_()
        expected = cross_entropy_sum(hidden, weight, target, scale=0.25)
        torch.autograd.backward(expected * factor)
        of_ranks, grads_hidden, grads_weight = zip(*(result[number] for result in results), strict=True)
        grad_hidden = torch.cat(grads_hidden) if sequence_parallel else grads_hidden[0]
        grad_weight = torch.cat(grads_weight)
        assert all(torch.equal(loss, of_ranks[0]) for loss in of_ranks)
        torch.testing.assert_close(of_ranks[0], expected.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(grad_hidden, hidden.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(grad_weight, weight.grad, rtol=1e-10, atol=1e-12)


def special_inputs() -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    hidden, weight, target = inputs(11)
    far = hidden.clone()
    far[0] *= 1e6
    narrow_hidden, narrow_weight, _ = inputs(11, torch.bfloat16)
    return {
        "nothing": (hidden, weight, torch.full_like(target, IGNORED_TARGET)),
        "far": (far, weight, target),
        "bf16": (narrow_hidden, narrow_weight, target),
    }


def special_losses(rank: int, world: int, is_compiled: bool) -> list[tuple[float, Tensor | None]]:
    """Return the loss and the gradient of the hidden states for each special case."""
    words, group, found = even_cut(0, 11, RANKS, rank), group_of(), []
    # What is compiled gives these numbers too: tests/unit/model/test_logits.py.
    torch.compiler.set_stance("force_eager")
    passes = CompiledPasses() if is_compiled else EAGER
    for hidden, weight, target in special_inputs().values():
        mine, loss = part_of(weight, words), CutLoss(words, group)
        of_tokens = loss(hidden.requires_grad_(), mine, target, chunk=7, passes=passes)
        torch.autograd.backward(of_tokens)
        with torch.no_grad():
            assert torch.equal(loss(hidden, mine, target, chunk=7, passes=passes), of_tokens)
        found.append((float(of_tokens.detach()), hidden.grad))
    return found


@pytest.mark.parametrize("is_compiled", [False, True])
def test_special_cases_are_those_of_one_device(ranks: Ranks, is_compiled: bool) -> None:
    results = ranks(RANKS).run(special_losses, is_compiled=is_compiled)
    for number, (name, (hidden, weight, target)) in enumerate(special_inputs().items()):
        expected = cross_entropy_sum(hidden.requires_grad_(), weight, target)
        torch.autograd.backward(expected)
        tolerance = 1e-2 if name == "bf16" else 1e-6
        for found, gradient in (result[number] for result in results):
            assert found == pytest.approx(float(expected.detach()), rel=0.1 * tolerance), name
            torch.testing.assert_close(gradient, hidden.grad, rtol=tolerance, atol=tolerance)


def embedded(rank: int, world: int, sequence_parallel: bool) -> list[tuple[Tensor, Tensor]]:
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
def test_embedded_tokens_have_the_very_bits_of_one_device(ranks: Ranks, sequence_parallel: bool) -> None:
    results = ranks(RANKS).run(embedded, sequence_parallel=sequence_parallel)
    for number, vocab_size in enumerate(VOCABULARIES):
        _, weight, _ = inputs(vocab_size)
        weight.requires_grad_()
        tokens = torch.arange(NUM_TOKENS).view(2, -1) * 5 % vocab_size
        expected = F.embedding(tokens, weight)
        torch.autograd.backward(expected.square().sum())
        parts, gradients = zip(*(result[number] for result in results), strict=True)
        whole = torch.cat([part.flatten(0, 1) for part in parts]) if sequence_parallel else parts[0]
        assert torch.equal(whole.view_as(expected), expected.detach())
        torch.testing.assert_close(torch.cat(gradients), weight.grad)
