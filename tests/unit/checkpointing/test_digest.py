"""The digest of a tensor: the same for every cut, another one for every change of its content."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_boxes import cut_into

from checkpointing.box import Box
from checkpointing.integrity import shard_digest as part_digest_module
from checkpointing.integrity.checksums import combined, state_digest, written
from checkpointing.integrity.shard_digest import part_digest

# Bytes per element, and a dtype that has them.
WIDTHS = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}
SHAPE = (37, 13)


def random_words(width: int, shape: tuple[int, ...] = SHAPE, seed: int = 0) -> np.ndarray:
    count = int(np.prod(shape)) * width
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8).view(f"<u{width}").reshape(shape)


def digest_of(values: np.ndarray, box: Box | None = None) -> int:
    return part_digest(values.tobytes(), WIDTHS[values.itemsize], box or Box.whole(values.shape))


def digest_of_cells(values: np.ndarray, rows: list[int], columns: list[int]) -> int:
    """Return the digest that the cells of a grid with these inner borders make up."""
    cells = cut_into(values.shape, rows, columns)
    return combined(digest_of(values[box.within(Box.whole(values.shape))], box) for box in cells)


@pytest.mark.parametrize("width", WIDTHS)
@given(
    rows=st.lists(st.integers(0, 37), max_size=4),
    columns=st.lists(st.integers(0, 13), max_size=4),
    at_once=st.sampled_from([1, 7, 100, 1 << 16]),
)
def test_a_digest_does_not_depend_on_the_cut(
    width: int, rows: list[int], columns: list[int], at_once: int
) -> None:
    values = random_words(width)
    whole = digest_of(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part_digest_module, "_ELEMENTS_AT_ONCE", at_once)
        assert digest_of_cells(values, rows, columns) == whole


def test_indices_beyond_the_weight_tables_cut_the_same() -> None:
    values = random_words(1, (3, 20_000))
    assert digest_of_cells(values, [1], [4095, 4096, 4097, 12_345]) == digest_of(values)
    tall = random_words(2, (20_000, 3))
    assert digest_of_cells(tall, [4095, 4096, 8191, 19_999], [1]) == digest_of(tall)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_flipped_bit_changes_the_digest(width: int) -> None:
    values = random_words(width, (5, 3))
    content = bytearray(values.tobytes())
    whole = digest_of(values)
    for index, bit in itertools.product(range(len(content)), range(8)):
        content[index] ^= 1 << bit
        assert part_digest(content, WIDTHS[width], Box.whole((5, 3))) != whole
        content[index] ^= 1 << bit


@pytest.mark.parametrize("width", WIDTHS)
def test_swapped_elements_rows_and_columns_change_the_digest(width: int) -> None:
    values = random_words(width, (6, 5))
    whole = digest_of(values)
    for first, second in itertools.combinations(range(30), 2):
        swapped = values.reshape(-1).copy()
        swapped[[first, second]] = swapped[[second, first]]
        if not np.array_equal(swapped, values.reshape(-1)):
            assert digest_of(swapped.reshape(6, 5)) != whole
    assert digest_of(values[::-1]) != whole
    assert digest_of(values[:, ::-1]) != whole
    assert digest_of(values.T.reshape(6, 5)) != whole


def test_elements_that_differ_in_their_sign_alone_cannot_be_swapped_unseen() -> None:
    values = np.array([1.5, -1.5, 0.0, -0.0], dtype=np.float32)
    digests = {
        part_digest(values[list(order)].tobytes(), "F32", Box.whole((4,)))
        for order in itertools.permutations(range(4))
    }
    assert len(digests) == 24


def test_a_part_of_zeros_in_another_place_is_the_same_and_of_others_is_not() -> None:
    ones = np.ones((2, 2), dtype=np.uint32)
    assert digest_of(ones, Box((0, 0), (2, 2))) != digest_of(ones, Box((0, 2), (2, 2)))
    assert digest_of(ones, Box((0, 0), (2, 2))) != digest_of(ones, Box((2, 0), (2, 2)))
    assert digest_of(ones * 0, Box((0, 0), (2, 2))) == digest_of(ones * 0, Box((2, 0), (2, 2))) == 0


def test_scalars_and_empty_parts_have_digests_written_with_leading_zeros() -> None:
    assert part_digest(b"\x01\x00\x00\x00\x00\x00\x00\x00", "I64", Box((), ())) != 0
    assert part_digest(b"", "F32", Box((3, 0), (0, 13))) == 0
    assert part_digest(b"", "I64", Box((0,), (0,))) == 0
    assert combined([]) == 0
    assert written(0xAB) == "00000000000000ab"


def test_random_tensors_have_different_digests_in_both_halves() -> None:
    digests = [digest_of(random_words(4, (4, 4), seed)) for seed in range(1000)]
    assert len({value >> 32 for value in digests}) == len({value & 0xFFFFFFFF for value in digests}) == 1000


def test_a_state_digest_depends_on_names_shapes_and_dtypes_and_not_on_the_order() -> None:
    first, second = ("a", "F32", (2, 3), "0" * 16), ("b", "F32", (2, 3), "1" * 16)
    other_states = [
        [first],
        [first, ("c", *second[1:])],
        [first, ("b", "I32", *second[2:])],
        [first, ("b", "F32", (3, 2), "1" * 16)],
        [first, ("b", "F32", (2, 3), "2" * 16)],
    ]
    expected = state_digest([first, second])
    assert state_digest([second, first]) == expected
    assert all(state_digest(other) != expected for other in other_states)
