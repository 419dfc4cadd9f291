"""Saving: whole or not at all, the training never stopped, and every rank told. Ranks are threads here: a
save uses no collective, and each has a connection of its own to a real store.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from test_peers import peers_of
from torch import Tensor

from checkpointing import catalog
from checkpointing.box import Box
from checkpointing.checkpoint_errors import MismatchError, SaveFailedError, StorageError
from checkpointing.checksums import combined, written
from checkpointing.options import Options, no_fault
from checkpointing.save import Saver
from checkpointing.shard_digest import part_digest
from checkpointing.shards import Shard, as_bytes, whole
from checkpointing.storage import WritableFile
from checkpointing.storage.local import LocalStorage
from checkpointing.verify import verify

OPTIONS = Options(layout={"dp": 2}, limit_s=20.0)


@dataclass
class Ranks:
    """One saver for each rank, and what each was told."""

    savers: list[Saver]
    events: list[list[tuple[str, Mapping[str, Any]]]]
    pool: ThreadPoolExecutor = field(repr=False)

    def each(self, call: Callable[[int, Saver], Any]) -> list[Any]:
        """Call on all ranks at once and return what each gave."""
        calls = [self.pool.submit(call, rank, saver) for rank, saver in enumerate(self.savers)]
        return [one.result(60) for one in calls]

    def save(self, step: int, shards: Sequence[Sequence[Shard]], **state: Any) -> list[bool]:
        return self.each(lambda rank, saver: saver.save(step, shards[rank], state))

    def wait(self) -> None:
        self.each(lambda _, saver: saver.wait())

    def told(self, rank: int, name: str) -> list[Mapping[str, Any]]:
        return [evidence for event, evidence in self.events[rank] if event == name]


def ranks_on(
    storage: Any,
    world_size: int = 2,
    options: Options = OPTIONS,
    at_phase: Callable[[int, str, int], None] | None = None,
) -> Ranks:
    events: list[list[tuple[str, Mapping[str, Any]]]] = [[] for _ in range(world_size)]
    savers = []
    for rank, peers in enumerate(peers_of(world_size, options.limit_s)):

        def tell(name: str, evidence: Mapping[str, Any], rank: int = rank) -> None:
            events[rank].append((name, evidence))

        def phase(name: str, step: int, rank: int = rank) -> None:
            if at_phase is not None:
                at_phase(rank, name, step)

        savers.append(Saver(storage, peers, options, tell, phase if at_phase else no_fault))
    return Ranks(savers, events, ThreadPoolExecutor(world_size))


def state(world_size: int = 2, seed: int = 0) -> list[list[Shard]]:
    """Return shards by rank: one replicated tensor, one cut by rows (37 of them), a scalar, a 16-bit one."""
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(300, 7, generator=generator)
    rows = torch.randn(37, 13, generator=generator)
    half = torch.randn(5, generator=generator).bfloat16()
    cuts = [37 * rank // world_size for rank in range(world_size + 1)]
    return [
        [
            whole("shared", shared.clone()),
            Shard("rows", (37, 13), (cuts[rank], 0), rows[cuts[rank] : cuts[rank + 1]].clone()),
            whole("scalar", torch.tensor(seed)),
            whole("half", half.clone()),
        ]
        for rank in range(world_size)
    ]


def read(folder: Path, step: int) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by safetensors' own reader."""
    tensors = {}
    for file in sorted((folder / f"step-{step:08d}").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors.update({key: opened.get_tensor(key) for key in opened.keys()})  # noqa: SIM118  not a mapping
    return tensors


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_save_holds_every_element_once_and_any_reader_opens_it(place: Path, world_size: int) -> None:
    ranks, shards = ranks_on(LocalStorage(place), world_size), state(world_size)
    assert all(ranks.save(7, shards, samples=112))
    ranks.wait()
    found = read(place, 7)
    pieces = sorted(key for key in found if key.startswith("rows"))
    torch.testing.assert_close(found["shared"], shards[0][0].tensor, rtol=0, atol=0)
    assert sum(found[key].numel() for key in pieces) == 37 * 13
    manifest = catalog.read_manifest(LocalStorage(place), 7)
    assert manifest.state == {"samples": 112}
    assert manifest.layout == {"dp": 2}
    assert verify(LocalStorage(place), 7).damages == ()
    assert sorted(item.name for item in place.iterdir()) == ["step-00000007"]


def test_the_stored_digest_is_that_of_the_whole_tensor_whatever_the_cut(place: Path) -> None:
    for world_size in (1, 2, 3):
        ranks = ranks_on(LocalStorage(place), world_size)
        ranks.save(world_size, state(world_size))
        ranks.wait()
    manifests = [catalog.read_manifest(LocalStorage(place), step) for step in (1, 2, 3)]
    assert len({manifest.state_digest for manifest in manifests}) == 1
    rows = torch.cat([shards[1].tensor for shards in state(3)])
    expected = part_digest(bytes(as_bytes(rows).numpy()), "F32", Box.whole((37, 13)))
    assert manifests[2].tensors["rows"].digest == written(combined([expected]))


def test_what_changes_after_save_returned_is_not_in_the_checkpoint(place: Path) -> None:
    begun = threading.Event()

    def hold(_rank: int, name: str, _step: int) -> None:
        if name == "mid_file":
            begun.wait(20)

    ranks, shards = ranks_on(LocalStorage(place), at_phase=hold), state()
    ranks.save(1, shards)
    for shard in shards[0] + shards[1]:
        shard.tensor.zero_()
    begun.set()
    ranks.wait()
    torch.testing.assert_close(read(place, 1)["shared"], state()[0][0].tensor, rtol=0, atol=0)


def test_a_busy_save_is_skipped_by_all_with_a_count_or_waited_for(place: Path) -> None:
    go_on = threading.Event()

    def hold(rank: int, name: str, step: int) -> None:
        if name == "before_vote" and rank == 1 and step == 1:
            go_on.wait(20)

    ranks, shards = ranks_on(LocalStorage(place), at_phase=hold), state()
    assert ranks.save(1, shards) == [True, True]
    assert ranks.save(2, shards) == [False, False]
    assert ranks.save(3, shards) == [False, False]
    assert [it["count"] for it in ranks.told(0, "checkpoint_skipped")] == [1, 2]
    go_on.set()
    ranks.wait()
    _until_free(ranks, 4, shards)
    ranks.wait()
    assert catalog.committed_steps(LocalStorage(place)) == [1, 4]

    waiting = ranks_on(LocalStorage(place), options=replace(OPTIONS, when_busy="wait"))
    assert waiting.save(5, shards) == waiting.save(6, shards) == [True, True]
    waiting.wait()
    assert catalog.committed_steps(LocalStorage(place)) == [4, 5, 6]


def _until_free(ranks: Ranks, step: int, shards: Sequence[Sequence[Shard]]) -> None:
    """Save as soon as the save before is over on all ranks (a moment after the commit)."""
    deadline = time.monotonic() + 20
    while not all(ranks.save(step, shards)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FailingFile:
    """A file on a disk that is full from the first byte on."""

    def write(self, _content: memoryview) -> None:
        raise StorageError("No space left on device")

    def commit(self) -> None:
        """Nothing was written."""

    def discard(self) -> None:
        """Nothing is held."""


class FullDisk(LocalStorage):
    """A local folder that refuses one file as long as `is_full`."""

    is_full = True

    def create(self, path: str, num_bytes: int) -> WritableFile:
        return FailingFile() if self.is_full and "00001-00" in path else super().create(path, num_bytes)


def test_a_failed_save_is_told_on_all_ranks_leaves_nothing_and_the_next_works(place: Path) -> None:
    storage = FullDisk(place)
    ranks, shards = ranks_on(storage), state()
    assert ranks.save(1, shards) == [True, True]
    for saver in ranks.savers:
        with pytest.raises(
            SaveFailedError, match=r"step 1 was not committed: rank 1: No space left on device"
        ):
            saver.wait()
    for rank in (0, 1):
        assert ranks.told(rank, "checkpoint_failed") == [
            {"step": 1, "reasons": {"1": "No space left on device"}}
        ]
    assert storage.names() == []
    storage.is_full = False
    _until_free(ranks, 2, shards)
    ranks.wait()
    assert catalog.committed_steps(storage) == [2]


@pytest.mark.slow
def test_a_rank_that_stalls_is_named_after_the_limit_and_its_files_do_not_stay(place: Path) -> None:
    thaw = threading.Event()

    def stall(rank: int, name: str, step: int) -> None:
        if (rank, name, step) == (1, "mid_file", 1):
            thaw.wait(30)

    ranks, shards = (
        ranks_on(LocalStorage(place), options=replace(OPTIONS, limit_s=0.5), at_phase=stall),
        state(),
    )
    ranks.save(1, shards)
    with pytest.raises(SaveFailedError, match=r"rank 1: save/1: no answer|rank 1: save/0: no answer"):
        ranks.savers[0].wait()
    assert ranks.save(2, shards) == [False, False]
    thaw.set()
    with pytest.raises(SaveFailedError):
        ranks.savers[1].wait()
    _until_free(ranks, 3, shards)
    ranks.wait()
    assert sorted(item.name for item in place.iterdir()) == ["step-00000003"]


def test_a_file_that_shrank_before_the_commit_keeps_the_checkpoint_from_being(place: Path) -> None:
    def cut_short(rank: int, name: str, _step: int) -> None:
        if (rank, name) == (1, "before_vote"):
            (file,) = place.glob(".step-*/00001-00.safetensors")
            with file.open("r+b") as opened:
                opened.truncate(100)

    ranks = ranks_on(LocalStorage(place), at_phase=cut_short)
    ranks.save(1, state())
    with pytest.raises(SaveFailedError, match="has 100 bytes on storage"):
        ranks.savers[0].wait()
    assert catalog.committed_steps(LocalStorage(place)) == []


def test_ranks_that_hold_different_states_are_refused_before_anything_is_written(place: Path) -> None:
    ranks = ranks_on(LocalStorage(place))
    shards = [[whole("w", torch.zeros(3))], [whole("w", torch.zeros(4))]]
    with pytest.raises(MismatchError, match=r"w: rank 0 has F32 \[3\], rank 1 has F32 \[4\]"):
        ranks.each(lambda rank, saver: saver.prepare(shards[rank]))
    assert not place.exists()


def test_old_checkpoints_are_removed_after_the_new_one_is_committed(place: Path) -> None:
    options = replace(OPTIONS, keep_last=2, keep_every_steps=4, when_busy="wait")
    ranks, shards = ranks_on(LocalStorage(place), options=options), state()
    for step in range(1, 8):
        ranks.save(step, shards)
    ranks.wait()
    assert catalog.committed_steps(LocalStorage(place)) == [4, 6, 7]


def test_a_checkpoint_that_was_found_damaged_pushes_no_intact_one_out(place: Path) -> None:
    options = replace(OPTIONS, keep_last=1, when_busy="wait")
    storage = LocalStorage(place)
    for step in (20, 30):
        other = ranks_on(storage, options=replace(options, keep_last=9))
        other.save(step, state())
        other.wait()
    ranks = ranks_on(storage, options=options)
    for saver in ranks.savers:
        saver.distrust([30])
    ranks.save(25, state())
    ranks.wait()
    assert catalog.committed_steps(storage) == [25, 30]
    ranks.save(30, state())
    ranks.wait()
    assert catalog.committed_steps(storage) == [30]


def test_a_step_that_is_saved_again_replaces_the_older_one(place: Path) -> None:
    storage = LocalStorage(place)
    for generation in (0, 1):
        ranks = ranks_on(storage, options=replace(OPTIONS, generation=generation))
        ranks.save(3, state(seed=generation))
        ranks.wait()
    assert catalog.read_manifest(storage, 3).generation == 1
    assert verify(storage, 3).damages == ()
    assert storage.names() == ["step-00000003"]
