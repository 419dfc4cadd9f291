"""How parameters lie in units and ranges, and how flat ranges become boxes: each element once."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from orchestra.parallel.places import TensorPlace, boxes, global_index, parts_of
from orchestra.parallel.zero.buffers import ALIGNMENT, in_blocks, in_buckets, lay_out, slots

SIZES = [("embed_tokens.weight", 5 * 31), ("layers.0.norm.weight", 31), ("layers.0.up.weight", 31 * 64)]
SIZES += [("layers.1.norm.weight", 31), ("layers.1.up.weight", 31 * 64), ("norm.weight", 31), ("lm_head", 1)]


@pytest.mark.parametrize("num_ranges", [1, 2, 3, 4, 7])
def test_every_element_of_every_parameter_is_owned_once_and_all_begins_aligned(num_ranges: int) -> None:
    layout = lay_out(SIZES, num_ranges)
    assert layout.size == num_ranges * layout.range_size
    for member, (name, size) in zip(layout.members, SIZES, strict=True):
        assert (member.name, member.size) == (name, size)
        owned = [element for index in range(num_ranges) for element in range(*layout.part_of(member, index))]
        assert owned == list(range(size))
        for index in range(num_ranges):
            start, stop = layout.part_of(member, index)
            begin, end = layout.range_of(index)
            assert start == stop or begin <= member.begin + start < member.begin + stop <= end
    assert layout.range_size % ALIGNMENT == 0
    assert all(member.begin % ALIGNMENT == 0 for member in layout.members)
    for first, second in itertools.pairwise(layout.members):
        assert first.begin + first.size <= second.begin < first.begin + first.size + ALIGNMENT
    gaps = layout.size - sum(size for _, size in SIZES)
    assert gaps < ALIGNMENT * (len(SIZES) + num_ranges)


def test_buckets_are_filled_from_behind_and_no_smaller_than_asked_for() -> None:
    buckets = in_buckets(SIZES, 100)
    assert [entry for bucket in buckets for entry in bucket] == SIZES[::-1]
    assert all(sum(size for _, size in bucket) >= 100 for bucket in buckets[:-1])
    assert in_buckets(SIZES, 0) == [[entry] for entry in reversed(SIZES)]
    assert in_buckets([], 100) == []


def test_blocks_are_the_layers_and_what_stands_around_them() -> None:
    names = [[name for name, _ in block] for block in in_blocks(SIZES)]
    assert [len(block) for block in names] == [1, 2, 2, 2]
    assert names[0] == ["embed_tokens.weight"]
    assert names[-1] == ["norm.weight", "lm_head"]


def test_neighbouring_blocks_never_share_a_buffer() -> None:
    units = [lay_out(block, 2) for block in in_blocks(SIZES)]
    for order in (units, units[::-1]):
        shared, separate = slots(order, share_ends=True), slots(order, share_ends=False)
        for numbers in (shared, separate):
            assert all(first != second for first, second in itertools.pairwise(numbers))
        assert shared[0] == shared[-1]
        assert separate[0] != separate[-1]


@pytest.mark.parametrize("shape", [(), (11,), (5, 7), (1, 9), (9, 1), (3, 4, 5)])
def test_boxes_of_a_flat_range_hold_its_elements_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    size = numbers.numel()
    for start, stop in itertools.combinations_with_replacement(range(size + 1), 2):
        found = boxes(shape, start, stop)
        assert len(found) <= max(1, 2 * len(shape) - 1)
        elements: list[int] = []
        for offsets, sizes in found:
            box = numbers[tuple(slice(at, at + length) for at, length in zip(offsets, sizes, strict=True))]
            assert box.shape == torch.Size(sizes)
            elements += box.flatten().tolist()
        assert elements == list(range(start, stop))


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_a_cut_and_padded_parameter_are_its_elements_without_the_padding(seed: int) -> None:
    dice = random.Random(seed)
    rows, columns = dice.randint(1, 9), dice.randint(1, 9)
    place = TensorPlace(
        shape=(rows + 4, columns + 3),
        offsets=(dice.randint(0, 4), dice.randint(0, 3)),
        local=(rows, columns),
        padded=(rows + dice.randint(0, 3), columns + dice.randint(0, 2)),
    )
    whole = torch.arange(math.prod(place.shape), dtype=torch.float32).view(place.shape)
    memory = torch.full(place.padded, -1.0)
    (top, left) = place.offsets
    memory[:rows, :columns] = whole[top : top + rows, left : left + columns]
    found = torch.full(place.shape, torch.nan)
    cuts = sorted(dice.randint(0, memory.numel()) for _ in range(3))
    for start, stop in itertools.pairwise([0, *cuts, memory.numel()]):
        for part in parts_of(memory.view(-1)[start:stop], place, start):
            (first, second), (height, width) = part.offsets, part.tensor.shape
            target = found[first : first + height, second : second + width]
            assert bool(torch.isnan(target).all())
            target.copy_(part.tensor)
            part.tensor.fill_(-2.0)  # views: what is written reaches the memory
    expected = torch.full(place.shape, torch.nan)
    expected[top : top + rows, left : left + columns] = whole[top : top + rows, left : left + columns]
    assert torch.equal(found.nan_to_num(-7), expected.nan_to_num(-7))
    assert bool((memory[:rows, :columns] == -2).all())
    assert int((memory == -1).sum()) == memory.numel() - rows * columns


@pytest.mark.parametrize("seed", range(10))
def test_parts_of_rows_that_are_no_neighbours_lie_where_these_are(seed: int) -> None:
    dice = random.Random(seed)
    rows = tuple(dice.sample(range(9), dice.randint(1, 6)))
    place = TensorPlace(
        shape=(9, 5, 4),
        offsets=(0, 2, 0),
        local=(len(rows), 3, 4),
        padded=(len(rows) + dice.randint(0, 1), 3, 4),
        rows=rows,
    )
    whole = torch.arange(math.prod(place.shape), dtype=torch.float32).view(place.shape)
    memory = torch.full(place.padded, -1.0)
    memory[: len(rows)] = whole[list(rows), 2:]
    cuts = sorted(dice.randint(0, memory.numel()) for _ in range(3))
    num_elements = 0
    for start, stop in itertools.pairwise([0, *cuts, memory.numel()]):
        flat = memory.view(-1)[start:stop]
        for part in parts_of(flat, place, start):
            box = tuple(
                slice(at, at + length) for at, length in zip(part.offsets, part.tensor.shape, strict=True)
            )
            assert torch.equal(part.tensor, whole[box])
            num_elements += part.tensor.numel()
        index = global_index(place, start, stop, memory.device)
        counted = flat >= 0
        assert torch.equal(whole.view(-1)[index[counted]], flat[counted])
    assert num_elements == len(rows) * 12
