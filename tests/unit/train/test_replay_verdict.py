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
    settled,
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
    found = differences(own, second, layout, None)
    return settled(found, own, second, third, layout, None)


@pytest.mark.parametrize(("dp", "tp"), list(product((2, 3, 4, 5), (1, 2))))
def test_ranks_that_compute_alike_differ_nowhere(dp: int, tp: int) -> None:
    assert judged(dp, tp, set()) == []


@pytest.mark.parametrize(("dp", "tp"), list(product((3, 4, 7), (1, 2))))
def test_of_three_ranks_the_one_that_differs_is_named_whichever_it_is(dp: int, tp: int) -> None:
    for broken in range(dp * tp):
        found = judged(dp, tp, {broken})
        assert len(found) == 2
        assert {it.broken for it in found} == {broken}


def test_of_two_ranks_nobody_is_named() -> None:
    found = judged(2, 1, {1})
    assert [(it.rank, it.by, it.broken) for it in found] == [(0, 1, None), (1, 0, None)]


def test_three_different_results_name_nobody() -> None:
    assert {it.broken for it in judged(3, 1, {0, 1, 2})} == {None}


def test_a_single_wrong_bit_of_a_rank_that_is_else_sound_is_its_own() -> None:
    layout = Layout(dp=4)
    own = [right(0), wrong(1, 1), right(2), right(3)]
    second = [right((rank - SECOND) % 4) for rank in range(4)]
    third = [right((rank - THIRD) % 4) for rank in range(4)]
    found = settled(differences(own, second, layout, None), own, second, third, layout, None)
    assert found == [DifferingMicroBatch(1, 2, 1)]


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


def test_a_digest_tells_where_a_number_stands_and_of_which_tensor() -> None:
    values = torch.arange(5.0)
    assert int(digest(values, 0)) != int(digest(values.flip(0), 0))
    assert int(digest(values, 0)) != int(digest(values, 1))
    matrix = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert int(digest(matrix.t(), 0)) == int(digest(matrix.t().contiguous(), 0))


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
