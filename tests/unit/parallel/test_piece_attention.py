"""Attention of a piece over all keys up to its end is a part of attention over the whole sequence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from orchestra.model.documents import document_mask
from orchestra.parallel.context.piece_attention import (
    masked,
    masked_backward,
    piece_backward,
    piece_forward,
)
from orchestra.parallel.context.sequence_parts import HeadAndTail, by_rank, in_order

BATCH, SEQUENCE, HEADS, WIDTH = 2, 24, 6, 8


def whole_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
@pytest.mark.parametrize("with_documents", [False, True])
def test_pieces_are_parts_of_whole_attention_by_either_way(num_kv_heads: int, with_documents: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(num_heads: int) -> Tensor:
        shape = (BATCH, SEQUENCE, num_heads, WIDTH)
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = random(HEADS), random(num_kv_heads), random(num_kv_heads)
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    # Documents of 1, 2 and 21 places, and of 24.
    bounds = torch.tensor([0, 1, 3, 24, 48] if with_documents else [0, 24, 48], dtype=torch.int32)
    whole_mask = document_mask(bounds, tokens, torch.float64, torch.arange(SEQUENCE))
    expected = whole_attention(q, k, v, whole_mask)
    for number in range(6):
        rows, end = slice(4 * number, 4 * number + 4), 4 * number + 4
        mask = whole_mask[:, :, rows, :end] if with_documents else None
        inputs = [each.detach() for each in (q[:, rows], k[:, :end], v[:, :end])]
        grad = torch.randn(expected[:, rows].shape, generator=generator, dtype=torch.float64)
        grads = torch.autograd.grad(expected[:, rows], (q, k, v), grad, retain_graph=True)
        grads_expected = (grads[0][:, rows], grads[1][:, :end], grads[2][:, :end])
        out, sums = piece_forward(*inputs, mask)
        added = (torch.ones_like(inputs[1]), torch.ones_like(inputs[2]))
        grad_q = piece_backward(grad, *inputs, out, sums, mask, added)
        by_hand = (grad_q, added[0] - 1, added[1] - 1)
        for found in (out, masked(*inputs, mask)):
            torch.testing.assert_close(found, expected[:, rows])
        for gradients in (by_hand, masked_backward(grad, *inputs, mask)):
            torch.testing.assert_close(gradients, grads_expected)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_parts_of_all_ranks_make_up_the_whole_and_know_their_places(degree: int) -> None:
    whole = torch.arange(2 * 12 * 5).view(2, 12, 5)
    ranks = [HeadAndTail(degree, index) for index in range(degree)]
    parts = torch.stack([part.cut(whole) for part in ranks])
    assert torch.equal(by_rank(whole, degree), parts)
    assert torch.equal(in_order(parts), whole)
    for part, of_rank in zip(ranks, parts, strict=True):
        assert torch.equal(whole[:, part.places(12 // degree, whole.device)], of_rank)
    # Keys that the queries of each rank see.
    assert len({int((part.places(12 // degree, whole.device) + 1).sum()) for part in ranks}) == 1
