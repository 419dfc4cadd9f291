"""Who writes and who reads what: each element once, shared evenly, and clear words where parts do not fit."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_boxes import boxes, cut_into

from checkpointing.box import ITEM_BYTES, Box, contiguous_parts, overlapping
from checkpointing.checkpoint_errors import MismatchError
from checkpointing.manifest import Chunk, Tensor
from checkpointing.plans import (
    NamedChunk,
    TensorPiece,
    Transfer,
    busiest_sets,
    images,
    read_plan,
    write_plan,
)

MIB = 1 << 20
Wanted = dict[int, list[TensorPiece]]


def piece(name: str, shape: tuple[int, ...], box: Box | None = None, dtype: str = "F32") -> TensorPiece:
    return TensorPiece(name, box or Box.whole(shape), dtype, shape)


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


def bytes_written(held: list[list[TensorPiece]]) -> list[int]:
    return [sum(part.num_bytes for part in parts) for parts in write_plan(held)]


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_replicas_share_the_bytes_within_a_tenth(world_size: int) -> None:
    layers = [piece(f"layer.{index}", (1024, 1024)) for index in range(13)]
    state = [*layers, piece("embedding", (50_000, 1024))]
    loads = bytes_written([state] * world_size)
    assert max(loads) <= 1.1 * sum(loads) / world_size


def test_what_only_one_rank_holds_is_counted_before_replicas_are_shared() -> None:
    replicated = [piece(f"shared.{index}", (1024, 1024)) for index in range(8)]
    own = piece("own", (8 * 1024, 1024))
    assert bytes_written([[*replicated, own], replicated]) == [32 * MIB, 32 * MIB]


def test_overlapping_replica_groups_keep_their_loads_right() -> None:
    groups = {"left": (0, 1), "right": (1, 2), "all": (0, 1, 2)}
    held: list[list[TensorPiece]] = [[], [], []]
    for name, ranks in groups.items():
        for rank in ranks:
            held[rank] += [piece(f"{name}.{index}", (1024, 1024)) for index in range(12)]
    loads = bytes_written(held)
    assert max(loads) - min(loads) <= 4 * MIB


TOP, BOTTOM = Box((0, 0), (2, 4)), Box((1, 0), (2, 4))


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([piece("w", (3, 4), TOP)], r"w: all shards together hold 8 of the 12 elements of \[3, 4\]"),
        ([piece("w", (3, 4), TOP), piece("w", (3, 4), BOTTOM)], r"w: .*\[0:2,0:4\] and \[1:3,0:4\] overlap"),
        ([piece("w", (3,)), piece("w", (3,), dtype="BF16")], r"w: rank 0 has F32 \[3\], rank 1 has BF16"),
    ],
)
def test_shards_that_do_not_make_up_a_tensor_are_named(held: list[TensorPiece], words: str) -> None:
    with pytest.raises(MismatchError, match=words):
        write_plan([[part] for part in held])


def test_images_are_aligned_and_without_gaps() -> None:
    mixed = (("bytes", 7, "U8"), ("half", 3, "BF16"), ("long", 1, "I64"))
    (image,) = images([piece(name, (size,), dtype=dtype) for name, size, dtype in mixed], rank=3)
    assert image.name == "00003-00.safetensors"
    assert len(image.header) % 4096 == 0
    assert [part.name for part in image.pieces] == ["long", "half", "bytes"]
    ends = [begin + part.num_bytes for part, begin in zip(image.pieces, image.begins, strict=True)]
    assert [len(image.header), *ends] == [*image.begins, image.num_bytes]
    assert images([], rank=3) == []


# Who reads what.


def all_of(tensors: dict[str, Tensor]) -> list[TensorPiece]:
    return [piece(name, tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()]


def tensors_of(shapes: dict[str, tuple[str, tuple[int, ...]]], max_elements: int) -> dict[str, Tensor]:
    """Return a manifest's tensors, cut to chunks that lie behind each other in two files in turn."""
    ends = Counter[str]()
    tensors = {}
    for number, (name, (dtype, shape)) in enumerate(shapes.items()):
        chunks = []
        file = f"{number % 2}.safetensors"
        for box in contiguous_parts(Box.whole(shape), max_elements):
            num_bytes = box.num_elements * ITEM_BYTES[dtype]
            chunks.append(Chunk(box, file, ends[file], num_bytes, "0" * 16))
            ends[file] += num_bytes
        tensors[name] = Tensor(dtype, shape, "0" * 16, tuple(chunks))
    return tensors


@st.composite
def situations(draw: st.DrawFn) -> tuple[dict[str, Tensor], Wanted]:
    """Draw tensors in chunks, and for each of some ranks any boxes of any of them."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(["F32", "BF16", "I64", "U8"]))
        shapes[f"tensor{number}"] = (dtype, tuple(draw(st.lists(st.integers(0, 7), max_size=3))))
    tensors = tensors_of(shapes, draw(st.integers(1, 20)))
    wanted: Wanted = {}
    for rank in range(draw(st.integers(1, 5))):
        wanted[rank] = []
        for name in draw(st.lists(st.sampled_from(sorted(shapes)), max_size=4)):
            dtype, shape = shapes[name]
            wanted[rank].append(piece(name, shape, draw(boxes(shape)), dtype))
    return tensors, wanted


def ranks_that_want(name: str, chunk: Chunk, wanted: Wanted) -> set[int]:
    """Return them by comparing with every box."""
    return {
        rank
        for rank, pieces in wanted.items()
        if any(piece.name == name and chunk.box.overlap(piece.box) is not None for piece in pieces)
    }


@given(situations(), st.none() | st.integers(0, 4))
@settings(max_examples=400)
def test_each_wanted_chunk_is_read_once_and_reaches_exactly_those_that_want_it(
    situation: tuple[dict[str, Tensor], Wanted], reader: int | None
) -> None:
    tensors, wanted = situation
    plan = read_plan(tensors, wanted, reader=reader)
    found = {(part.name, part.chunk): transfer for transfer in plan for part in transfer.parts}
    assert len(found) == sum(len(transfer.parts) for transfer in plan)
    # A given reader is a member, whatever it wants itself.
    expected = {
        (name, chunk): ranks if reader is None else ranks | {reader}
        for name, tensor in tensors.items()
        for chunk in tensor.chunks
        if (ranks := ranks_that_want(name, chunk, wanted))
    }
    assert {key: set(transfer.members) for key, transfer in found.items()} == expected
    for transfer in plan:
        assert transfer.reader in (transfer.members if reader is None else [reader])
        assert list(transfer.members) == sorted(set(transfer.members))
        # What travels together lies together, and stays aligned.
        end = transfer.begin
        for part in transfer.parts:
            assert (part.chunk.file, part.chunk.begin) == (transfer.file, end)
            assert (part.chunk.begin - transfer.begin) % ITEM_BYTES[part.dtype] == 0
            end = part.chunk.end
        assert transfer.num_bytes == end - transfer.begin


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=100)
def test_the_plan_does_not_depend_on_the_order_of_what_is_told(
    situation: tuple[dict[str, Tensor], Wanted], shuffler: random.Random
) -> None:
    tensors, wanted = situation
    names, ranks = list(tensors), list(wanted)
    shuffler.shuffle(names)
    shuffler.shuffle(ranks)
    shuffled = {rank: shuffler.sample(wanted[rank], len(wanted[rank])) for rank in ranks}
    assert read_plan({name: tensors[name] for name in names}, shuffled) == read_plan(tensors, wanted)


def bytes_read(plan: list[Transfer]) -> Counter[int]:
    loads = Counter[int]()
    for transfer in plan:
        loads[transfer.reader] += transfer.num_bytes
    return loads


def model(num_layers: int = 12) -> dict[str, Tensor]:
    """Return tensors of a small Llama: matrices of some MiB and small norms."""
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"embedding": ("F32", (8000, 1024))}
    for layer in range(num_layers):
        shapes[f"{layer}.attention"] = ("F32", (1024, 1024))
        shapes[f"{layer}.mlp"] = ("F32", (2816, 1024))
        shapes[f"{layer}.norm"] = ("F32", (1024,))
    return tensors_of(shapes, 2 * MIB)


@pytest.mark.parametrize("world", [2, 4, 8, 64])
def test_readers_share_the_bytes_evenly_and_start_together(world: int) -> None:
    tensors = model(num_layers=4 * world)
    plan = read_plan(tensors, dict.fromkeys(range(world), all_of(tensors)))
    loads = bytes_read(plan)
    assert sum(loads.values()) == sum(tensor.num_bytes for tensor in tensors.values())
    assert max(loads.values()) <= 1.05 * sum(loads.values()) / world
    assert {transfer.reader for transfer in plan[:world]} == set(range(world))


def test_what_only_one_rank_wants_counts_in_its_share() -> None:
    tensors = model()
    everything = sorted(all_of(tensors))
    loads = bytes_read(read_plan(tensors, {0: everything, 1: everything[12:]}))
    assert abs(loads[0] - loads[1]) <= 0.1 * sum(loads.values())


def test_small_neighbours_become_one_read_and_large_chunks_stay_alone() -> None:
    shapes = {f"bias{number}": ("F32", (256,)) for number in range(200)} | {"matrix": ("F32", (1024, 1024))}
    tensors = tensors_of(shapes, MIB)
    plan = read_plan(tensors, dict.fromkeys((0, 1), all_of(tensors)))
    assert sorted(len(transfer.parts) for transfer in plan) == [1, 100, 100]


def test_chunks_without_checksum_are_cut_so_that_buffers_stay_small() -> None:
    box = Box.whole((3, 12 * MIB))
    chunk = Chunk(box, "a.safetensors", 64, box.num_elements * 4, "")
    tensors = {"huge": Tensor("F32", box.shape, "0" * 16, (chunk,))}
    plan = read_plan(tensors, {0: all_of(tensors)})
    assert max(transfer.num_bytes for transfer in plan) <= 32 * MIB
    assert sum(transfer.num_bytes for transfer in plan) == chunk.num_bytes
    pieces = [transfer.parts[0].chunk for transfer in plan]
    assert [piece.begin for piece in pieces] == sorted(piece.begin for piece in pieces)
    assert pieces[0].begin == 64
    assert sum(math.prod(piece.box.shape) for piece in pieces) == box.num_elements


def test_groups_are_for_sets_of_some_ranks_that_move_most() -> None:
    def transfer(members: tuple[int, ...], num_elements: int) -> Transfer:
        chunk = Chunk(Box.whole((num_elements,)), "a.safetensors", 0, num_elements, "0" * 16)
        return Transfer((NamedChunk("w", "U8", chunk),), members[0], members)

    some = [transfer((0, 1, 2), 5), transfer((1, 2, 3), 4), transfer((0, 1, 2), 1), transfer((0, 2, 3), 9)]
    others = [transfer((0, 1), 99), transfer((3,), 99), transfer((0, 1, 2, 3), 99)]
    assert busiest_sets(some + others, 4) == [(0, 2, 3), (0, 1, 2), (1, 2, 3)]
    many = [transfer((0, 1, last), last) for last in range(2, 40)]
    assert busiest_sets(many, 50) == [(0, 1, last) for last in range(39, 23, -1)]
