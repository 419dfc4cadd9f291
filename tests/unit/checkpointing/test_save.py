"""Saving: whole or not at all, the training never stopped, and every rank told. Ranks are threads here: a
save uses no collective, and each has a connection of its own to a real store.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from support.waiting import eventually
from test_peers import peers_of
from torch import Tensor

from checkpointing import catalog
from checkpointing.checkpoint_errors import MismatchError, SaveFailedError, StorageError
from checkpointing.checkpointer import Checkpointer
from checkpointing.integrity.checksums import combined, written
from checkpointing.integrity.shard_digest import part_digest
from checkpointing.options import Options, no_event, no_fault
from checkpointing.peers import Peers
from checkpointing.saving import staging
from checkpointing.saving.save import Saver
from checkpointing.shards import Shard, as_bytes, whole
from checkpointing.storage import WritableFile
from checkpointing.storage.local import LocalStorage
from checkpointing.verify import verify

OPTIONS = Options(layout={"dp": 2}, limit_s=20.0, when_busy="skip")


@dataclass
class Ranks:
    """One saver for each rank, and what each was told."""

    savers: list[Saver]
    events: list[list[tuple[str, Mapping[str, Any]]]]
    pool: ThreadPoolExecutor = field(repr=False)

    def each(self, call: Callable[[int, Saver], Any]) -> list[Any]:
        """Call on all ranks at once and return what each gave."""
        calls = [self.pool.submit(call, rank, saver) for rank, saver in enumerate(self.savers)]
        return [future.result(60) for future in calls]

    def save(self, step: int, shards: Sequence[Sequence[Shard]], **state: Any) -> list[bool]:
        return self.each(lambda rank, saver: saver.save(step, shards[rank], state))

    def save_whole(self, step: int, shards: Sequence[Sequence[Shard]], **state: Any) -> None:
        """Save and wait for the commit."""
        assert all(self.save(step, shards, **state))
        self.wait()

    def save_when_free(self, step: int, shards: Sequence[Sequence[Shard]]) -> None:
        """Save as soon as the save before is over on all ranks (a moment after the commit), and wait."""
        assert eventually(lambda: all(self.save(step, shards)), limit_s=20)
        self.wait()

    def wait(self) -> None:
        self.each(lambda _, saver: saver.wait())

    def evidence_of(self, rank: int, name: str) -> list[Mapping[str, Any]]:
        return [evidence for event, evidence in self.events[rank] if event == name]


def ranks_on(
    storage: Any,
    world_size: int = 2,
    options: Options = OPTIONS,
    at_phase: Callable[[int, str, int], None] = lambda *_: None,
) -> Ranks:
    events: list[list[tuple[str, Mapping[str, Any]]]] = [[] for _ in range(world_size)]
    savers = []
    for rank, peers in enumerate(peers_of(world_size, options.limit_s)):

        def tell(name: str, evidence: Mapping[str, Any], rank: int = rank) -> None:
            events[rank].append((name, evidence))

        savers.append(Saver(storage, peers, options, tell, partial(at_phase, rank)))
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
    storage, shards = LocalStorage(place), state(world_size)
    ranks_on(storage, world_size).save_whole(7, shards, samples=112)
    tensors = read(place, 7)
    torch.testing.assert_close(tensors["shared"], shards[0][0].tensor, rtol=0, atol=0)
    assert sum(tensor.numel() for key, tensor in tensors.items() if key.startswith("rows")) == 37 * 13
    manifest = catalog.read_manifest(storage, 7)
    assert (manifest.state, manifest.layout) == ({"samples": 112}, {"dp": 2})
    # The digest is that of the whole tensor, whatever the cut.
    for shard in state(world_size=1)[0]:
        expected = part_digest(bytes(as_bytes(shard.tensor).numpy()), shard.piece.dtype, shard.box)
        assert manifest.tensors[shard.name].digest == written(combined([expected]))
    assert verify(storage, 7).damages == ()
    assert storage.names() == ["step-00000007"]


def test_the_state_is_that_of_the_save_and_keys_that_json_would_change_are_refused(tmp_path: Path) -> None:
    shards = [whole("weights", torch.ones(4))]
    saver = Checkpointer(str(tmp_path), Peers.alone(), Options())
    losses: dict[str, Any] = {"of": [1.0]}
    saver.save(1, shards, {"losses": losses})
    losses["of"].append(0.5)
    saver.wait()
    assert catalog.read_manifest(LocalStorage(tmp_path), 1).state == {"losses": {"of": [1.0]}}
    saver.save(2, shards, {"per_bucket": [{10: 0.25}]})
    with pytest.raises(SaveFailedError, match=r"step 2 .*the state has the key 10; JSON's keys are text"):
        saver.wait()


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


def test_a_busy_save_is_skipped_by_all_with_a_count_or_waited_for_and_old_ones_go(place: Path) -> None:
    go_on = threading.Event()

    def hold(rank: int, name: str, step: int) -> None:
        if name == "before_vote" and rank == 1 and step == 1:
            go_on.wait(20)

    ranks, shards = ranks_on(LocalStorage(place), at_phase=hold), state()
    assert ranks.save(1, shards) == [True, True]
    assert ranks.save(2, shards) == [False, False]
    assert ranks.save(3, shards) == [False, False]
    assert [evidence["count"] for evidence in ranks.evidence_of(0, "checkpoint_skipped")] == [1, 2]
    go_on.set()
    ranks.wait()
    ranks.save_when_free(4, shards)
    assert catalog.committed_steps(LocalStorage(place)) == [1, 4]

    options = replace(OPTIONS, when_busy="wait", keep_last=2, keep_every_steps=4)
    waiting = ranks_on(LocalStorage(place), options=options)
    for step in range(5, 8):
        assert waiting.save(step, shards) == [True, True]
    waiting.wait()
    assert catalog.committed_steps(LocalStorage(place)) == [4, 6, 7]


class FullDisk(LocalStorage):
    """A local folder that refuses the bytes of one file as long as `is_full`."""

    is_full = True

    def create(self, path: str, num_bytes: int) -> WritableFile:
        file = super().create(path, num_bytes)
        if self.is_full and "00001-00" in path:
            file.write = Mock(side_effect=StorageError("No space left on device"))  # type: ignore[method-assign]
        return file


def test_other_shards_than_before_fail_a_save(place: Path) -> None:
    """They would be written under each other's names, or rounded to another type."""
    x, y = whole("x", torch.zeros(3)), whole("y", torch.ones(3))
    saver = Checkpointer(str(place), Peers.alone(), OPTIONS)
    for step, shards in enumerate(
        ([x, y], [y, x], [replace(x, tensor=x.tensor.double()), y], [x, y]), start=1
    ):
        saver.save(step, shards, {})
        if step in (1, 4):
            saver.wait()
        else:
            with pytest.raises(SaveFailedError, match="the shards that it was given first"):
                saver.wait()
    assert catalog.committed_steps(LocalStorage(place)) == [1, 4]


def test_a_state_without_tensors_and_one_number_with_any_stride_are_saved(place: Path) -> None:
    number = torch.arange(6.0).view(2, 3)[:, 1][1:]
    assert number.stride() == (3,)
    assert torch.equal(as_bytes(number).view(torch.float32), number)
    saver = Checkpointer(str(place), Peers.alone(), OPTIONS)
    saver.prepare([])
    saver.save(1, [], {"step": 1})
    saver.wait()
    assert catalog.read_manifest(LocalStorage(place), 1).state == {"step": 1}


def test_shards_that_change_places_between_saves_are_written_where_they_are_then(place: Path) -> None:
    is_free = threading.Event()

    def hold(_rank: int, name: str, _step: int) -> None:
        if name == "mid_file":
            is_free.wait(20)

    storage = LocalStorage(place)
    ranks, shards = ranks_on(storage, at_phase=hold), state()
    ranks.save(1, shards)
    ranks.each(lambda _, saver: saver.plan_anew())
    # What the ranks have trades places; the save under way still follows the plan that it began with.
    traded = [
        [mine if mine.name != "rows" else theirs for mine, theirs in zip(own, other, strict=True)]
        for own, other in (shards, shards[::-1])
    ]
    assert ranks.save(2, traded) == [False, False]
    is_free.set()
    ranks.wait()
    ranks.save_when_free(3, traded)
    first, last = (catalog.read_manifest(storage, step) for step in (1, 3))
    assert {name: tensor.digest for name, tensor in last.tensors.items()} == {
        name: tensor.digest for name, tensor in first.tensors.items()
    }
    files = [{chunk.box: chunk.file for chunk in found.tensors["rows"].chunks} for found in (first, last)]
    assert files[0].keys() == files[1].keys()
    assert all(file[-16:] != files[1][box][-16:] for box, file in files[0].items())
    assert all(verify(storage, step).damages == () for step in (1, 3))


def cut_at(place: int) -> list[list[Shard]]:
    """Return the shards of two ranks that share one tensor, larger than pages are."""
    whole_tensor = torch.arange(4000.0)
    return [
        [Shard("long", (4000,), (0,), whole_tensor[:place].clone())],
        [Shard("long", (4000,), (place,), whole_tensor[place:].clone())],
    ]


def test_memory_that_cannot_be_had_fails_a_save_and_not_the_training(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ranks_on(LocalStorage(place))
    ranks.save_whole(1, cut_at(1000))
    ranks.each(lambda _, saver: saver.plan_anew())
    with monkeypatch.context() as without_memory:
        without_memory.setattr(staging, "aligned_memory", Mock(side_effect=MemoryError("no memory")))
        for step in (2, 3):
            # Rank 1 has enough.
            assert eventually(lambda step=step: all(ranks.save(step, cut_at(3000))), limit_s=20)
            for saver in ranks.savers:
                with pytest.raises(SaveFailedError, match="rank 0: staging failed: no memory"):
                    saver.wait()
    ranks.save_when_free(4, cut_at(3000))
    assert catalog.committed_steps(LocalStorage(place)) == [1, 4]


def test_memory_that_suffices_is_used_again_for_other_shards(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, ranks = LocalStorage(place), ranks_on(LocalStorage(place))
    ranks.save_whole(1, cut_at(3000))
    ranks.each(lambda _, saver: saver.plan_anew())
    ranks.save_when_free(2, cut_at(1000))
    monkeypatch.setattr(staging, "aligned_memory", Mock(side_effect=MemoryError("no memory")))
    for step, at in ((3, 3000), (4, 1000)):
        ranks.each(lambda _, saver: saver.plan_anew())
        ranks.save_when_free(step, cut_at(at))
        assert verify(storage, step).damages == ()
        assert torch.equal(torch.cat([*read(place, step).values()]).sort().values, torch.arange(4000.0))


def test_a_failed_save_is_told_on_all_ranks_leaves_nothing_and_the_next_works(place: Path) -> None:
    storage = FullDisk(place)
    ranks, shards = ranks_on(storage), state()
    assert ranks.save(1, shards) == [True, True]
    for saver in ranks.savers:
        with pytest.raises(SaveFailedError, match="1 was not committed: rank 1: No space left on device"):
            saver.wait()
    failure = {"step": 1, "reasons": {"1": "No space left on device"}}
    assert ranks.evidence_of(0, "checkpoint_failed") == ranks.evidence_of(1, "checkpoint_failed") == [failure]
    assert storage.names() == []
    storage.is_full = False
    ranks.save_when_free(2, shards)
    assert catalog.committed_steps(storage) == [2]


def test_a_rank_that_loses_the_store_takes_nothing_from_a_checkpoint_that_is_being_committed(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_for_rank_1(rank: int, name: str, _step: int) -> None:
        if (rank, name) == (0, "before_manifest"):
            with pytest.raises(SaveFailedError, match="the store is gone"):
                ranks.savers[1].wait()

    await_answer = Peers.await_answer

    def lose(peers: Peers, topic: str, *limit_s: float) -> Any:
        if not re.fullmatch(r"saver/\d+/\d+", topic):
            return await_answer(peers, topic, *limit_s)
        raise ConnectionError("the store is gone")

    monkeypatch.setattr(Peers, "await_answer", lose)
    storage = LocalStorage(place)
    ranks = ranks_on(storage, at_phase=wait_for_rank_1)
    ranks.save(1, state())
    ranks.savers[0].wait()
    assert verify(storage, 1).is_intact


@pytest.mark.slow
def test_a_rank_that_stalls_is_named_after_the_limit_and_its_files_do_not_stay(place: Path) -> None:
    thaw = threading.Event()

    def stall(rank: int, name: str, step: int) -> None:
        if (rank, name, step) == (1, "mid_file", 1):
            thaw.wait(30)

    ranks = ranks_on(LocalStorage(place), options=replace(OPTIONS, limit_s=0.5), at_phase=stall)
    shards = state()
    ranks.save(1, shards)
    with pytest.raises(SaveFailedError, match=r"rank 1: saver/1/[01]: no answer"):
        ranks.savers[0].wait()
    assert ranks.save(2, shards) == [False, False]
    thaw.set()
    with pytest.raises(SaveFailedError):
        ranks.savers[1].wait()
    ranks.save_when_free(3, shards)
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


def test_a_checkpoint_that_was_found_damaged_pushes_no_intact_one_out(place: Path) -> None:
    options = replace(OPTIONS, keep_last=1, when_busy="wait")
    storage = LocalStorage(place)
    for step in (20, 30):
        ranks_on(storage, options=replace(options, keep_last=9)).save_whole(step, state())
    ranks = ranks_on(storage, options=options)
    for saver in ranks.savers:
        saver.distrust([30])
    ranks.save_whole(25, state())
    assert catalog.committed_steps(storage) == [25, 30]
    ranks.save_whole(30, state())
    assert catalog.committed_steps(storage) == [30]


def test_two_that_share_their_peers_learn_of_their_own_saves(tmp_path: Path) -> None:
    """As a loop with two models has them: a save of each is under way at once."""

    def fail(*_: object) -> None:
        raise StorageError("no space left")

    def loop(peers: Peers) -> list[bool]:
        shards = state()[peers.rank]
        places = [LocalStorage(tmp_path / name) for name in "ab"]
        first, second = (Saver(place, peers, OPTIONS, no_event, no_fault) for place in places)
        if peers.is_coordinator:
            places[1].put = fail  # type: ignore[method-assign]
        told = []
        for step in (1, 2):
            for saver in (first, second):
                saver.save(step, shards, {})
            for saver in (first, second):
                try:
                    saver.wait()
                    told.append(True)
                except SaveFailedError as error:
                    told.append("no space left" not in str(error))
        return told

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(loop, peers_of(2))) == [[True, False] * 2] * 2
    assert catalog.committed_steps(LocalStorage(tmp_path / "a")) == [1, 2]
