"""The plan of a restore: each byte once, by one that wants it, evenly shared, the same on all ranks."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpointing.box import ITEM_BYTES, Box, contiguous_parts
from checkpointing.checkpoint_errors import MismatchError
from checkpointing.manifest import Chunk, Tensor
from checkpointing.read_plan import (
    NamedChunk,
    Transfer,
    Want,
    busiest_sets,
    check_fit,
    declaration,
    declared,
    read_plan,
)

MIB = 1 << 20
Wanted = dict[int, list[tuple[str, Box]]]


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
            offsets = [draw(st.integers(0, size)) for size in shapes[name][1]]
            ends = [
                draw(st.integers(begin, size)) for begin, size in zip(offsets, shapes[name][1], strict=True)
            ]
            shape = tuple(end - begin for begin, end in zip(offsets, ends, strict=True))
            wanted[rank].append((name, Box(tuple(offsets), shape)))
    return tensors, wanted


def ranks_that_want(name: str, chunk: Chunk, wanted: Wanted) -> set[int]:
    """Return them by comparing with every box."""
    return {
        rank
        for rank, boxes in wanted.items()
        if any(other == name and chunk.box.overlap(box) is not None for other, box in boxes)
    }


@given(situations())
@settings(max_examples=300, deadline=None)
def test_each_wanted_chunk_is_read_once_by_one_that_wants_it_and_reaches_exactly_those(
    situation: tuple[dict[str, Tensor], Wanted],
) -> None:
    tensors, wanted = situation
    plan = read_plan(tensors, wanted)
    found = {(part.name, part.chunk): transfer for transfer in plan for part in transfer.parts}
    assert len(found) == sum(len(transfer.parts) for transfer in plan)
    expected = {
        (name, chunk): ranks
        for name, tensor in tensors.items()
        for chunk in tensor.chunks
        if (ranks := ranks_that_want(name, chunk, wanted))
    }
    assert {key: set(transfer.members) for key, transfer in found.items()} == expected
    for transfer in plan:
        assert transfer.reader in transfer.members
        assert list(transfer.members) == sorted(set(transfer.members))


@given(situations(), st.integers(0, 4))
@settings(max_examples=100, deadline=None)
def test_a_given_reader_reads_all_and_is_a_member(
    situation: tuple[dict[str, Tensor], Wanted], reader: int
) -> None:
    tensors, wanted = situation
    for transfer in read_plan(tensors, wanted, reader=reader):
        assert transfer.reader == reader
        others = set().union(*(ranks_that_want(it.name, it.chunk, wanted) for it in transfer.parts))
        assert set(transfer.members) == others | {reader}


@given(situations())
@settings(max_examples=200, deadline=None)
def test_what_travels_together_lies_together_and_stays_aligned(
    situation: tuple[dict[str, Tensor], Wanted],
) -> None:
    for transfer in read_plan(*situation):
        end = transfer.begin
        for part in transfer.parts:
            assert part.chunk.file == transfer.file
            assert part.chunk.begin == end
            assert (part.chunk.begin - transfer.begin) % ITEM_BYTES[part.dtype] == 0
            end += part.chunk.num_bytes
        assert transfer.num_bytes == end - transfer.begin


@given(situations(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
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
def test_replicas_share_the_bytes_evenly_and_start_together(world: int) -> None:
    tensors = model(num_layers=4 * world)
    everything = [(name, Box.whole(tensor.shape)) for name, tensor in tensors.items()]
    plan = read_plan(tensors, dict.fromkeys(range(world), everything))
    loads = bytes_read(plan)
    assert sum(loads.values()) == sum(tensor.num_bytes for tensor in tensors.values())
    assert max(loads.values()) <= 1.05 * sum(loads.values()) / world
    assert {transfer.reader for transfer in plan[:world]} == set(range(world))


def test_what_only_one_rank_wants_counts_in_its_share() -> None:
    tensors = model()
    names = sorted(tensors)
    private = {rank: [(name, Box.whole(tensors[name].shape)) for name in names[:12]] for rank in [0]}
    shared = [(name, Box.whole(tensors[name].shape)) for name in names[12:]]
    wanted = {rank: private.get(rank, []) + shared for rank in range(2)}
    loads = bytes_read(read_plan(tensors, wanted))
    assert abs(loads[0] - loads[1]) <= 0.1 * sum(loads.values())


def test_small_neighbours_become_one_read_and_large_chunks_stay_alone() -> None:
    shapes = {f"bias{number}": ("F32", (256,)) for number in range(200)} | {"matrix": ("F32", (1024, 1024))}
    tensors = tensors_of(shapes, MIB)
    everything = [(name, Box.whole(tensor.shape)) for name, tensor in tensors.items()]
    plan = read_plan(tensors, {0: everything, 1: everything})
    assert sorted(len(transfer.parts) for transfer in plan) == [1, 100, 100]


def test_chunks_without_checksum_are_cut_so_that_buffers_stay_small() -> None:
    box = Box.whole((3, 12 * MIB))
    chunk = Chunk(box, "a.safetensors", 64, box.num_elements * 4, "")
    plan = read_plan({"huge": Tensor("F32", box.shape, "0" * 16, (chunk,))}, {0: [("huge", box)]})
    assert max(transfer.num_bytes for transfer in plan) <= 32 * MIB
    assert sum(transfer.num_bytes for transfer in plan) == chunk.num_bytes
    pieces = [transfer.parts[0].chunk for transfer in plan]
    assert [piece.begin for piece in pieces] == sorted(piece.begin for piece in pieces)
    assert pieces[0].begin == 64
    assert sum(math.prod(piece.box.shape) for piece in pieces) == box.num_elements


def test_groups_are_for_sets_of_some_ranks_that_move_most() -> None:
    def transfer(members: tuple[int, ...], num_elements: int) -> Transfer:
        chunk = Chunk(Box.whole((num_elements,)), "a.safetensors", 0, num_elements, "0" * 16)
        return Transfer((NamedChunk("it", "U8", chunk),), members[0], members)

    some = [transfer((0, 1, 2), 5), transfer((1, 2, 3), 4), transfer((0, 1, 2), 1), transfer((0, 2, 3), 9)]
    others = [transfer((0, 1), 99), transfer((3,), 99), transfer((0, 1, 2, 3), 99)]
    assert busiest_sets(some + others, 4) == [(0, 2, 3), (0, 1, 2), (1, 2, 3)]
    many = [transfer((0, 1, last), last) for last in range(2, 40)]
    assert busiest_sets(many, 50) == [(0, 1, last) for last in range(39, 23, -1)]


def test_wants_survive_the_way_to_the_other_ranks() -> None:
    wants = [Want("a", "F32", (4, 6), Box((0, 2), (4, 3))), Want("b", "I64", (), Box((), ()))]
    assert declared(declaration(wants)) == [("a", Box((0, 2), (4, 3))), ("b", Box((), ()))]


@pytest.mark.parametrize(
    ("want", "words"),
    [
        (Want("b", "F32", (4,), Box.whole((4,))), ["b", "no such tensor"]),
        (Want("a", "BF16", (4,), Box.whole((4,))), ["a", "F32 [4]", "BF16 [4]"]),
        (Want("a", "F32", (5,), Box.whole((5,))), ["a", "F32 [4]", "F32 [5]"]),
    ],
)
def test_what_does_not_fit_is_named_with_both(want: Want, words: list[str]) -> None:
    tensors = tensors_of({"a": ("F32", (4,))}, 4)
    check_fit(tensors, [Want("a", "F32", (4,), Box((1,), (2,)))])
    with pytest.raises(MismatchError) as caught:
        check_fit(tensors, [want])
    assert all(word in str(caught.value) for word in words)
