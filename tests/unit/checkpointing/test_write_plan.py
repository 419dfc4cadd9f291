"""Who writes what: each element once, shared evenly, and clear words where the shards do not fit together."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.box import Box, overlapping
from checkpointing.checkpoint_errors import MismatchError
from checkpointing.save import images
from checkpointing.write_plan import TensorPiece, declaration, declared, write_plan

MIB = 1 << 20


def piece(name: str, shape: tuple[int, ...], box: Box | None = None, dtype: str = "F32") -> TensorPiece:
    return TensorPiece(name, box or Box.whole(shape), dtype, shape)


def cut_into(shape: tuple[int, int], rows: list[int], columns: list[int]) -> list[Box]:
    """Return the cells of a grid with these inner borders."""
    spans = [
        list(itertools.pairwise([0, *sorted(cuts), end]))
        for cuts, end in zip((rows, columns), shape, strict=True)
    ]
    return [
        Box((top, left), (bottom - top, right - left)) for top, bottom in spans[0] for left, right in spans[1]
    ]


@given(
    world_size=st.integers(1, 5),
    rows=st.lists(st.integers(0, 37), max_size=4),
    columns=st.lists(st.integers(0, 13), max_size=3),
    data=st.data(),
)
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    world_size: int, rows: list[int], columns: list[int], data: st.DataObject
) -> None:
    held: list[list[TensorPiece]] = [[] for _ in range(world_size)]
    for box in cut_into((37, 13), rows, columns):
        for rank in data.draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
            held[rank].append(piece("odd", (37, 13), box))
    plan = write_plan(held)
    written = [part.box for parts in plan for part in parts]
    assert sum(box.num_elements for box in written) == 37 * 13
    assert overlapping(written) is None
    for parts, own in zip(plan, held, strict=True):
        assert all(any(part.box.overlap(mine.box) == part.box for mine in own) for part in parts)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_replicas_share_the_bytes_within_a_tenth(world_size: int) -> None:
    state = [piece(f"layer.{index}", (1024, 1024)) for index in range(13)] + [
        piece("embedding", (50_000, 1024))
    ]
    loads = [sum(part.num_bytes for part in parts) for parts in write_plan([state] * world_size)]
    assert max(loads) <= 1.1 * sum(loads) / world_size


def test_what_only_one_rank_holds_is_counted_before_replicas_are_shared() -> None:
    replicated = [piece(f"shared.{index}", (1024, 1024)) for index in range(8)]
    own = piece("own", (8 * 1024, 1024))
    loads = [sum(part.num_bytes for part in parts) for parts in write_plan([[*replicated, own], replicated])]
    assert loads == [32 * MIB, 32 * MIB]


def test_overlapping_replica_groups_keep_their_loads_right() -> None:
    groups = {"left": (0, 1), "right": (1, 2), "all": (0, 1, 2)}
    held: list[list[TensorPiece]] = [[], [], []]
    for name, ranks in groups.items():
        for rank in ranks:
            held[rank] += [piece(f"{name}.{index}", (1024, 1024)) for index in range(12)]
    loads = [sum(part.num_bytes for part in parts) for parts in write_plan(held)]
    assert max(loads) - min(loads) <= 4 * MIB


def test_a_plan_is_the_same_after_a_trip_through_json() -> None:
    pieces = [piece("a", (3, 4), Box((1, 0), (2, 4))), piece("scalar", ()), piece("empty", (0, 4))]
    assert declared(json.loads(json.dumps(declaration(pieces)))) == pieces


def test_a_gap_is_named() -> None:
    with pytest.raises(MismatchError, match=r"w: all shards together hold 8 of the 12 elements of \[3, 4\]"):
        write_plan([[piece("w", (3, 4), Box((0, 0), (2, 4)))]])


def test_overlapping_shards_are_named() -> None:
    first, second = Box((0, 0), (2, 4)), Box((1, 0), (2, 4))
    with pytest.raises(MismatchError, match=r"w: the shards \[0:2,0:4\] and \[1:3,0:4\] overlap"):
        write_plan([[piece("w", (3, 4), first)], [piece("w", (3, 4), second)]])


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    with pytest.raises(MismatchError, match=r"w: rank 0 has F32 \[3\], rank 1 has BF16 \[3\]"):
        write_plan([[piece("w", (3,))], [piece("w", (3,), dtype="BF16")]])


def test_empty_and_scalar_tensors_are_part_of_the_plan() -> None:
    plan = write_plan(
        [
            [piece("scalar", ()), piece("empty", (0, 4)), piece("shard", (4,), Box((4,), (0,)))],
            [piece("shard", (4,))],
        ]
    )
    assert sorted(part.name for parts in plan for part in parts) == ["empty", "scalar", "shard"]


def test_images_are_aligned_and_without_gaps() -> None:
    mixed = [
        piece("bytes", (7,), dtype="U8"),
        piece("half", (3,), dtype="BF16"),
        piece("long", (1,), dtype="I64"),
    ]
    (image,) = images(mixed, rank=3)
    assert image.name == "00003-00.safetensors"
    assert len(image.header) % 4096 == 0
    assert [part.name for part in image.pieces] == ["long", "half", "bytes"]
    ends = [begin + part.num_bytes for part, begin in zip(image.pieces, image.begins, strict=True)]
    assert [len(image.header), *ends] == [*image.begins, image.num_bytes]


def test_a_rank_with_nothing_to_write_has_no_file() -> None:
    assert images([], rank=0) == []
