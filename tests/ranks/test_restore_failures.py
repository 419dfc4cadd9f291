"""Restoring from what is damaged, or with ranks that are missing: found by all ranks alike, never taken."""

from __future__ import annotations

import errno
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
import torch.distributed as dist
from pool import RankPool

from checkpointing.checkpoint_errors import (
    CheckpointError,
    MismatchError,
    MissingRanksError,
    NoCheckpointError,
    StorageError,
)
from checkpointing.manifest import Manifest, decode
from checkpointing.restore import MODES, restore
from checkpointing.shards import whole
from checkpointing.storage.local import LocalStorage

pytestmark = pytest.mark.ranks

Ranks = Callable[[int], RankPool]
WORLD = 3
OLD, NEW = 5, 10


@pytest.fixture
def place(ranks: Ranks, tmp_path: Path) -> Path:
    """Return a place with two checkpoints of three ranks."""
    states = {OLD: layouts.state(OLD), NEW: layouts.state(NEW)}
    ranks(WORLD).run(layouts.save, world=WORLD, place=tmp_path, layout="mixture", states=states)
    return tmp_path


@dataclass(frozen=True)
class Outcome:
    """What one rank got: a step with its reasons for skipping, or an error."""

    step: int | None
    skipped: tuple[tuple[int, str], ...]
    is_right: bool
    error: str = ""
    kind: str = ""


class FailingStorage(LocalStorage):
    """A folder of which one rank cannot read one file."""

    def __init__(self, folder: Path, failing: str | None) -> None:
        super().__init__(folder)
        self._failing = failing

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        if self._failing is not None and self._failing in path:
            raise StorageError(f"{path}: {os.strerror(errno.EIO)}")
        super().read_into(path, begin, buffer)


def attempt(
    rank: int,
    world: int,
    place: Path,
    topic: str,
    how: str = "broadcast",
    step: int | None = None,
    failing: dict[int, str] | None = None,
) -> Outcome:
    """Restore onto whole replicas and say what came of it."""
    storage = FailingStorage(place, (failing or {}).get(rank))
    mine = layouts.shards(layouts.state(), "replicated", rank, world, is_filled=False)
    peers = layouts.peers(rank, world, f"{topic}/{place}")
    try:
        found = restore(storage, peers, dist.group.WORLD, lambda _: mine, how=how, step=step)
    except CheckpointError as error:
        skipped = tuple(error.skipped) if isinstance(error, NoCheckpointError) else ()
        return Outcome(None, skipped, False, str(error), type(error).__name__)
    if found is None:
        return Outcome(None, (), False)
    whole = layouts.state(found.step)
    return Outcome(found.step, tuple(found.skipped), all(layouts.is_equal(it, whole) for it in mine))


def files(place: Path, step: int) -> list[Path]:
    return sorted((place / f"step-{step:08d}").glob("*.safetensors"))


def flip_a_bit(place: Path) -> str:
    """Flip one bit of a chunk; return the tensor it belongs to."""
    manifest = decode((place / f"step-{NEW:08d}" / "manifest.json").read_bytes())
    chunk = manifest.tensors["matrix"].chunks[-1]
    file = place / f"step-{NEW:08d}" / chunk.file
    content = bytearray(file.read_bytes())
    content[chunk.begin + chunk.num_bytes - 1] ^= 0x10
    file.write_bytes(content)
    return f"{chunk.file}: matrix: "


def truncate(place: Path) -> str:
    file = files(place, NEW)[1]
    file.write_bytes(file.read_bytes()[:-1])
    return file.name


def lengthen(place: Path) -> str:
    file = files(place, NEW)[1]
    file.write_bytes(file.read_bytes() + b"\0")
    return file.name


def delete(place: Path) -> str:
    file = files(place, NEW)[2]
    file.unlink()
    return file.name


def take_from_the_older(place: Path) -> str:
    """Put the older checkpoint's file in place: same size, same header, same tensors."""
    old, new = files(place, OLD)[0], files(place, NEW)[0]
    assert old.stat().st_size == new.stat().st_size
    new.write_bytes(old.read_bytes())
    return new.name


def put_a_pickle(place: Path) -> str:
    """Put a pickle that would make a file, of the right size."""
    file = files(place, NEW)[0]
    content = pickle.dumps(_Bomb(place / "exploded"))
    file.write_bytes(content.ljust(file.stat().st_size, b"\0"))
    return file.name


class _Bomb:
    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self._target,))


def edit_the_manifest(place: Path) -> str:
    file = place / f"step-{NEW:08d}" / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b'"generation": 0', b'"generation": 1'))
    return "manifest.json"


def take_the_older_manifest(place: Path) -> str:
    old, new = (place / f"step-{step:08d}" / "manifest.json" for step in (OLD, NEW))
    new.write_bytes(old.read_bytes())
    return "manifest.json"


DAMAGES = [
    *(flip_a_bit, truncate, lengthen, delete, take_from_the_older, put_a_pickle),
    *(edit_the_manifest, take_the_older_manifest),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda it: it.__name__)
def test_all_ranks_walk_back_from_a_damage_with_the_same_reason(
    ranks: Ranks, place: Path, damage: Callable[[Path], str]
) -> None:
    named = damage(place)
    outcomes = ranks(WORLD).run(attempt, world=WORLD, place=place, topic="damage")
    assert len(set(outcomes)) == 1
    assert outcomes[0].step == OLD
    assert outcomes[0].is_right
    assert [step for step, _ in outcomes[0].skipped] == [NEW]
    assert named in outcomes[0].skipped[0][1]
    assert not (place / "exploded").exists()


@pytest.mark.parametrize("how", MODES)
def test_a_flipped_bit_is_found_in_every_mode(ranks: Ranks, place: Path, how: str) -> None:
    named = flip_a_bit(place)
    settings = {"place": place, "topic": how, "how": how}
    outcomes = ranks(WORLD).run(attempt, world=WORLD, **settings)
    assert [it.step for it in outcomes] == [OLD] * WORLD
    assert all(it.is_right and named in it.skipped[0][1] for it in outcomes)


def test_what_one_rank_cannot_read_sends_all_back(ranks: Ranks, place: Path) -> None:
    failing = {1: f"step-{NEW:08d}/"}
    outcomes = ranks(WORLD).run(attempt, world=WORLD, place=place, topic="eio", how="direct", failing=failing)
    assert len(set(outcomes)) == 1
    assert outcomes[0].step == OLD
    assert os.strerror(errno.EIO) in outcomes[0].skipped[0][1]


def test_with_none_intact_every_reason_is_told(ranks: Ranks, place: Path) -> None:
    named = flip_a_bit(place), files(place, OLD)[0]
    named[1].unlink()
    outcomes = ranks(WORLD).run(attempt, world=WORLD, place=place, topic="none")
    assert len(set(outcomes)) == 1
    assert outcomes[0].kind == "NoCheckpointError"
    assert [step for step, _ in outcomes[0].skipped] == [NEW, OLD]
    assert named[0] in outcomes[0].error
    assert named[1].name in outcomes[0].error


def test_a_place_without_checkpoints_gives_nothing(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / ".step-00000004.g000-00.tmp").mkdir()
    outcomes = ranks(2).run(attempt, world=2, place=tmp_path, topic="empty")
    assert outcomes == [Outcome(None, (), False)] * 2


def test_a_given_step_is_taken_or_nothing(ranks: Ranks, place: Path) -> None:
    outcomes = ranks(WORLD).run(attempt, world=WORLD, place=place, topic="given", step=OLD)
    assert [(it.step, it.is_right) for it in outcomes] == [(OLD, True)] * WORLD
    outcomes = ranks(WORLD).run(attempt, world=WORLD, place=place, topic="absent", step=7)
    assert {it.kind for it in outcomes} == {"NoCheckpointError"}
    assert all("step 7" in it.error and "5, 10" in it.error for it in outcomes)
    flip_a_bit(place)
    outcomes = ranks(WORLD).run(attempt, world=WORLD, place=place, topic="broken", step=NEW)
    assert {it.kind for it in outcomes} == {"NoCheckpointError"}


def test_a_place_that_cannot_be_listed_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "place").write_text("a file")
    outcomes = ranks(2).run(attempt, world=2, place=tmp_path / "place", topic="unreachable")
    assert {it.kind for it in outcomes} == {"StorageError"}


def attempt_without(rank: int, world: int, place: Path, missing: int) -> tuple[list[int], str]:
    """Let one rank stay away; return whom the others miss."""
    if rank == missing:
        return [], ""
    peers = layouts.peers(rank, world, f"missing/{missing}/{place}", limit_s=0.5)
    with pytest.raises(MissingRanksError) as caught:
        restore(LocalStorage(place), peers, dist.group.WORLD, lambda _: [])
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_rank_is_named_within_the_limit(ranks: Ranks, tmp_path: Path, missing: int) -> None:
    results = ranks(WORLD).run(attempt_without, world=WORLD, place=tmp_path, missing=missing)
    for rank, (ranks_missed, message) in enumerate(results):
        if rank != missing:
            assert ranks_missed == [missing]
            assert f"rank {missing}" in message


def attempt_refused(rank: int, world: int, place: Path, own: bool) -> str:
    """Let one rank's user refuse the checkpoint, by this package's error or an error of its own."""

    def wanted(manifest: Manifest) -> list[Any]:
        if rank == 1:
            raise RuntimeError("no such model") if own else MismatchError("another model")
        return []

    peers = layouts.peers(rank, world, f"refused/{own}/{place}")
    with pytest.raises((RuntimeError, MismatchError)) as caught:
        restore(LocalStorage(place), peers, dist.group.WORLD, wanted)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_user_that_refuses_stops_all_ranks_and_is_no_damage(ranks: Ranks, place: Path) -> None:
    told = ranks(WORLD).run(attempt_refused, world=WORLD, place=place, own=False)
    others = "MismatchError: rank 1: another model"
    assert told == [others, "MismatchError: another model", others]
    told = ranks(WORLD).run(attempt_refused, world=WORLD, place=place, own=True)
    others = "MismatchError: rank 1: no such model"
    assert told == [others, "RuntimeError: no such model", others]


def attempt_with_a_death(rank: int, world: int, place: Path, victim: int) -> str:
    """Kill one rank when half of its chunks are read; return what the others say."""
    blocks = {f"block{index}": torch.zeros(400_000) for index in range(20)}
    layouts.save(rank, world, place, "replicated", {1: blocks})

    def kill(phase: str, step: int) -> None:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    peers = layouts.peers(rank, world, "death", limit_s=5.0)
    mine = [whole(name, tensor) for name, tensor in blocks.items()]
    with pytest.raises(CheckpointError) as caught:
        restore(LocalStorage(place), peers, dist.group.WORLD, lambda _: mine, at_phase=kill)
    return str(caught.value)


def test_a_rank_that_dies_while_restoring_is_noticed_by_the_others(tmp_path: Path) -> None:
    pool = RankPool(WORLD)
    settings = {"world": WORLD, "place": tmp_path, "victim": 1}
    try:
        with pytest.raises(EOFError):
            pool.run(attempt_with_a_death, **settings)
        assert "rank" in pool._received(2)
    finally:
        pool.close()
