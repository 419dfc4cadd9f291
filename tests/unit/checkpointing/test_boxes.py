"""Boxes, compared with what numpy's indexing says of the same elements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.box import Box, contiguous_parts, overlapping

SHAPE = (5, 4, 3)


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int] = SHAPE) -> Box:
    """Draw a box inside `shape`, also an empty one."""
    spans = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))


def cut_into(shape: Sequence[int], rows: list[int], columns: list[int]) -> list[Box]:
    """Return the cells of a grid with these inner borders."""
    vertical, horizontal = (
        itertools.pairwise([0, *sorted(cuts), end]) for cuts, end in zip((rows, columns), shape, strict=True)
    )
    return [
        Box((top, left), (bottom - top, right - left))
        for (top, bottom), (left, right) in itertools.product(vertical, horizontal)
    ]


def elements(box: Box, shape: Sequence[int] = SHAPE) -> set[int]:
    """Return the flat indices of a box's elements in a tensor of `shape`."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return set(numbers[box.within(Box.whole(shape))].reshape(-1).tolist())


@given(first=boxes(), second=boxes())
def test_an_overlap_holds_exactly_the_elements_that_both_hold(first: Box, second: Box) -> None:
    shared = first.overlap(second)
    assert (elements(shared) if shared else set()) == elements(first) & elements(second)


@given(outer=boxes(), inner=boxes())
def test_an_index_within_a_box_finds_the_same_elements(outer: Box, inner: Box) -> None:
    shared = inner.overlap(outer)
    if shared is not None:
        whole = np.arange(60).reshape(SHAPE)
        local = whole[outer.within(Box.whole(SHAPE))]
        np.testing.assert_array_equal(local[shared.within(outer)], whole[shared.within(Box.whole(SHAPE))])


@given(box=boxes(), limit=st.integers(1, 70))
def test_contiguous_parts_follow_each_other_in_memory_and_keep_the_limit(box: Box, limit: int) -> None:
    memory = np.arange(box.num_elements).reshape(box.shape)
    found: list[int] = []
    for part in contiguous_parts(box, limit):
        assert part.num_elements <= limit
        found += memory[part.within(box)].reshape(-1).tolist()
    assert found == list(range(box.num_elements))


@given(some=st.lists(boxes(), max_size=6))
def test_boxes_that_share_an_element_are_found(some: list[Box]) -> None:
    pair = overlapping(some)
    held = [elements(box) for box in some]
    is_shared = any(held[i] & held[j] for i in range(len(some)) for j in range(i))
    assert (pair is not None) == is_shared
    if pair is not None:
        assert elements(pair[0]) & elements(pair[1])


def test_a_scalar_is_one_element_and_two_of_them_overlap() -> None:
    scalar = Box((), ())
    assert scalar.num_elements == 1
    assert scalar.overlap(scalar) == scalar
    assert overlapping([scalar]) is None
    assert overlapping([scalar, scalar]) == (scalar, scalar)
    assert list(contiguous_parts(scalar, 1)) == [scalar]


@pytest.mark.parametrize(
    ("box", "is_inside"),
    [
        (Box((0, 0, 0), SHAPE), True),
        (Box((5, 4, 3), (0, 0, 0)), True),
        (Box((1, 0, 0), SHAPE), False),
        (Box((-1, 0, 0), (1, 1, 1)), False),
        (Box((0, 0, 0), (1, -1, 1)), False),
        (Box((0, 0), (1, 1)), False),
    ],
)
def test_a_box_is_inside_only_with_all_its_elements_and_dims(box: Box, is_inside: bool) -> None:
    assert box.is_inside(SHAPE) == is_inside
