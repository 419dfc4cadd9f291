"""Who is broken, from what several ranks made of the same micro-batch: every case, played through."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from orchestra.sizes.topology import Layout
from orchestra.train.watch.inject_faults import flip_bit
from orchestra.train.watch.replay import (
    SECOND,
    THIRD,
    ComputedMicroBatch,
    DifferingMicroBatch,
    agree,
    differences,
    digest,
    partner,
)


def right(coordinate: int) -> ComputedMicroBatch:
    return ComputedMicroBatch(f"{coordinate:016x}", 2.0 + coordinate, 1.0)


def wrong(rank: int, coordinate: int) -> ComputedMicroBatch:
    return ComputedMicroBatch(f"wrong {rank} {coordinate}", 9.0, 9.0)


def judged(dp: int, tp: int, broken: set[int]) -> list[DifferingMicroBatch]:
    """Play a replay in which some ranks compute everything wrongly, each in a way of its own."""
    layout = Layout(dp=dp, tp=tp)

    def computed(rank: int, shift: int) -> ComputedMicroBatch:
        coordinate = (layout.coordinates(rank).dp - shift) % dp
        return wrong(rank, coordinate) if rank in broken else right(coordinate)

    own, second, third = ([computed(rank, shift) for rank in range(dp * tp)] for shift in (0, SECOND, THIRD))
    return differences(own, second, third, layout, None)


@pytest.mark.parametrize(("dp", "tp"), list(product((2, 3, 4, 5, 7), (1, 2))))
def test_the_rank_that_differs_is_named_where_there_is_a_third_one_to_say(dp: int, tp: int) -> None:
    assert judged(dp, tp, set()) == []
    for broken in range(dp * tp):
        found = judged(dp, tp, {broken})
        assert len(found) == 2
        assert {difference.broken for difference in found} == {broken if dp > 2 else None}


def test_of_two_ranks_or_of_three_different_results_nobody_is_named() -> None:
    assert judged(2, 1, {1}) == [DifferingMicroBatch(0, 1), DifferingMicroBatch(1, 0)]
    assert {difference.broken for difference in judged(3, 1, {0, 1, 2})} == {None}


def test_a_single_wrong_bit_of_a_rank_that_is_else_sound_is_its_own() -> None:
    layout = Layout(dp=4)
    own = [right(0), wrong(1, 1), right(2), right(3)]
    second = [right((rank - SECOND) % 4) for rank in range(4)]
    third = [right((rank - THIRD) % 4) for rank in range(4)]
    assert differences(own, second, None, layout, None) == [DifferingMicroBatch(1, 2)]
    assert differences(own, second, third, layout, None) == [DifferingMicroBatch(1, 2, 1)]


def test_partners_hold_the_same_part_of_the_model() -> None:
    layout = Layout(dp=3, tp=2)
    for rank in range(6):
        for shift in (SECOND, THIRD):
            other = partner(layout, rank, shift)
            assert other is not None
            assert layout.coordinates(other).tp == layout.coordinates(rank).tp
            assert layout.coordinates(other).dp == (layout.coordinates(rank).dp + shift) % 3
    assert partner(Layout(dp=2), 0, THIRD) is None


@pytest.mark.parametrize(
    ("loss", "norm", "tolerance", "same"),
    [
        (2.0, 1.0, None, False),
        (2.0 + 1e-4, 1.0, 1e-3, True),
        (2.0, 1.0 + 1e-4, 1e-3, True),
        (2.1, 1.0, 1e-3, False),
        (2.0, 1.1, 1e-3, False),
        (float("nan"), 1.0, 1e-3, False),
    ],
)
def test_a_tolerance_is_relative_and_of_loss_and_norm(
    loss: float, norm: float, tolerance: float | None, same: bool
) -> None:
    assert agree(ComputedMicroBatch("a", 2.0, 1.0), ComputedMicroBatch("b", loss, norm), tolerance) is same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    values = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, size = int(digest(values, 3)), 8 * values.element_size()
    for place, bit in product((0, 1, 17, 36), range(size)):
        other = values.clone()
        view = other.view(torch.int32 if size == 32 else torch.int16)
        mask = 1 << bit
        view[place] ^= mask - (1 << size) if bit == size - 1 else mask
        assert int(digest(other, 3)) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_planned_flip_changes_one_bit_of_one_number(dtype: torch.dtype) -> None:
    gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(2)).to(dtype)
    kind = torch.int32 if dtype is torch.float32 else torch.int16
    flipped = flip_bit(gradient)
    changed = (flipped.view(kind) ^ gradient.view(kind)).view(-1).tolist()
    assert bin(changed[0]).count("1") == 1
    assert not any(changed[1:])


def test_the_digest_is_the_sum_that_it_says_over_several_chunks() -> None:
    values = torch.randn(150_001, generator=torch.Generator().manual_seed(3))
    bits = values.view(torch.int32).tolist()
    # splitmix64's increment, times odd numbers.
    total = sum(value * (2 * place + 1) * 0x9E3779B97F4A7C15 for place, value in enumerate(bits))
    assert int(digest(values, 7)) % 2**64 == total * 15 % 2**64
    # Memory in another order is no other tensor.
    matrix = values[:24].view(4, 6).t()
    assert int(digest(matrix, 0)) == int(digest(matrix.contiguous(), 0))
