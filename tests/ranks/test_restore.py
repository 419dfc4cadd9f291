"""Restoring on other numbers of ranks and other layouts: the same bits, each read once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS, Case
from pool import RankPool

from checkpointing.box import Box
from checkpointing.catalog import read_manifest, step_name
from checkpointing.checkpoint_errors import MismatchError
from checkpointing.manifest import Manifest
from checkpointing.restore import MODES, fetch, restore
from checkpointing.shard_digest import part_digest
from checkpointing.shards import Shard, as_bytes, whole
from checkpointing.storage.local import LocalStorage

pytestmark = pytest.mark.ranks

Ranks = Callable[[int], RankPool]


@pytest.fixture(scope="module")
def saved(_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the state saved by 1, 2, 3 and 4 ranks in every layout."""
    folder = tmp_path_factory.mktemp("saved")
    worlds = (1, 2, 3, 4)
    for world in worlds:
        # All are started before the first is waited for.
        if world not in _pools or _pools[world].is_broken:
            _pools[world] = RankPool(world)
    for world in worlds:
        _pools[world].run(layouts.save_all, world=world, folder=folder)
    return folder


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_layout_restores_on_any_other_bit_for_bit(ranks: Ranks, saved: Path, world: int) -> None:
    cases = [
        Case(saved / str(writers) / layout, LAYOUTS[(index + writers + offset) % len(LAYOUTS)], how)
        for writers in (1, 2, 3, 4)
        for index, layout in enumerate(LAYOUTS)
        for offset, how in enumerate(MODES)
    ]
    state = layouts.state()
    results = ranks(world).run(layouts.restore_all, world=world, cases=cases, topic=f"matrix/{saved}")
    for number, case in enumerate(cases):
        of_ranks = [result[number] for result in results]
        assert [it["wrong"] for it in of_ranks] == [[]] * world, case
        assert {layouts.digest_of(of_ranks, state)} == {it["state_digest"] for it in of_ranks}, case
        assert [it["said"] for it in of_ranks] == [it["read"] for it in of_ranks], case
        if case.how != "direct":
            assert sum(it["read"] for it in of_ranks) == of_ranks[0]["size"], case
        if case.how == "rank0":
            assert all(it["read"] == 0 for it in of_ranks[1:]), case
        # Only rank 0 lists checkpoints and reads the manifest.
        for it in of_ranks[1:]:
            assert set(it["calls"]) <= {"read_into"}, case


def restored_blocks(rank: int, world: int, place: Path, how: str) -> tuple[int, int]:
    """Restore a replicated state of many blocks; return the bytes that this rank read, and of the whole."""
    blocks = {f"block{index}": torch.arange(250_000 + index, dtype=torch.float32) for index in range(40)}
    layouts.save(rank, world, place, "replicated", {1: blocks})
    empty = [whole(name, torch.zeros_like(tensor)) for name, tensor in blocks.items()]
    storage = layouts.CountingStorage(place)
    peers = layouts.peers(rank, world, f"blocks/{place}")
    assert restore(storage, peers, dist.group.WORLD, lambda _: empty, how=how) is not None
    assert all(torch.equal(shard.tensor, blocks[shard.name]) for shard in empty)
    return storage.bytes_read, sum(tensor.nbytes for tensor in blocks.values())


def test_replicas_share_the_reading_evenly(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(4).run(restored_blocks, world=4, place=tmp_path, how="broadcast")
    size = results[0][1]
    assert sum(read for read, _ in results) == size
    assert max(read for read, _ in results) <= 1.05 * size / 4


def test_direct_mode_reads_all_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(restored_blocks, world=2, place=tmp_path, how="direct")
    assert [read for read, _ in results] == [size for _, size in results]


def restored_tied(rank: int, world: int, place: Path) -> bool:
    """Save one memory under two names and restore it into one memory."""
    tied = torch.arange(481, dtype=torch.float32).reshape(37, 13)
    layouts.save(rank, world, place, "replicated", {1: {"embedding": tied, "head": tied}})
    memory = torch.zeros(37, 13)
    peers = layouts.peers(rank, world, f"tied/{place}")
    both = [whole("embedding", memory), whole("head", memory)]
    restore(LocalStorage(place), peers, dist.group.WORLD, lambda _: both)
    return torch.equal(memory, tied)


def test_tied_tensors_are_restored_into_their_one_memory(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2).run(restored_tied, world=2, place=tmp_path) == [True, True]


def restored_parameter(rank: int, world: int, place: Path) -> tuple[bool, list[int]]:
    """Restore into a parameter that requires gradients, twice in one process, and note the phase."""
    weights = {"weight": torch.randn(37, 13, generator=torch.Generator().manual_seed(3))}
    layouts.save(rank, world, place, "rows", {8: weights})
    parameter = torch.nn.Parameter(torch.zeros(37, 13))
    peers = layouts.peers(rank, world, f"parameter/{place}")
    steps: list[int] = []
    for _ in range(2):
        parameter.data.zero_()
        found = restore(
            LocalStorage(place),
            peers,
            dist.group.WORLD,
            lambda _: [whole("weight", parameter)],
            at_phase=lambda phase, step: steps.append(step) if phase == "restore" else None,
        )
        assert found is not None
        assert found.state == {"step": 8}
    return torch.equal(parameter, weights["weight"]), steps


def test_a_parameter_is_filled_in_place_and_each_rank_tells_its_phase_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(3).run(restored_parameter, world=3, place=tmp_path) == [(True, [8, 8])] * 3


def fetched_unverified(rank: int, world: int, place: Path) -> tuple[bool, int]:
    """Fetch chunks without checksums, from a manifest made here, as of somebody else's files."""
    original = torch.arange(2000, dtype=torch.int64).reshape(40, 50)
    layouts.save(rank, world, place, "rows", {1: {"table": original}})

    def without_checksums(manifest: Manifest) -> Manifest:
        for tensor in manifest.tensors.values():
            for chunk in tensor.chunks:
                object.__setattr__(chunk, "checksum", "")
        return manifest

    manifest = without_checksums(read_manifest(LocalStorage(place), 1))
    mine = Shard("table", (40, 50), (0, rank * 20), torch.zeros(40, 20, dtype=torch.int64))
    peers = layouts.peers(rank, world, f"fetch/{place}")
    storage, group = LocalStorage(place), dist.group.WORLD
    read = fetch(storage, step_name(1), manifest, [mine], peers, group, how="broadcast", topic="it")
    return torch.equal(mine.tensor, original[:, rank * 20 : rank * 20 + 20]), read


def test_chunks_without_checksum_are_fetched_too(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(fetched_unverified, world=2, place=tmp_path)
    assert [is_right for is_right, _ in results] == [True, True]
    assert sum(read for _, read in results) == 40 * 50 * 8


def mismatch(rank: int, world: int, place: Path, wanted: Any, only_rank: int | None = None) -> str:
    """Return what is said to a rank when a tensor is wanted that is not in the checkpoint."""
    shards = [wanted] if only_rank in (None, rank) else []
    with pytest.raises(MismatchError) as caught:
        restore(
            LocalStorage(place),
            layouts.peers(rank, world, f"mismatch/{place}/{wanted.name}/{only_rank}"),
            dist.group.WORLD,
            lambda _: shards,
        )
    return str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (whole("head", torch.zeros(2)), ("head", "no such tensor")),
        (whole("bias", torch.zeros(14)), ("bias", "F32 [13]", "F32 [14]")),
        (whole("bias", torch.zeros(13, dtype=torch.bfloat16)), ("bias", "F32 [13]", "BF16 [13]")),
    ],
    ids=["missing", "shape", "dtype"],
)
def test_what_does_not_fit_is_named_on_all_ranks(
    ranks: Ranks, saved: Path, wanted: Shard, words: tuple[str, ...]
) -> None:
    place = saved / "2" / "rows"
    for message in ranks(2).run(mismatch, world=2, place=place, wanted=wanted):
        assert all(word in message for word in words), message
    told = ranks(2).run(mismatch, world=2, place=place, wanted=wanted, only_rank=1)
    assert told[0] == f"rank 1: {told[1]}"


def test_the_bits_of_the_state_are_such_that_arithmetic_would_change_them() -> None:
    matrix = layouts.state()["matrix"]
    summed = matrix + torch.zeros_like(matrix)
    assert not torch.equal(as_bytes(summed), as_bytes(matrix))
    content = as_bytes(matrix).numpy().tobytes()
    assert part_digest(content, "F32", Box.whole((37, 13)))
