"""Restoring on other numbers of ranks and other layouts: the same bits, each read once.

And from what is damaged, or with ranks that are missing: found by all ranks alike, never taken.
"""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import layouts
import pytest
import torch
import torch.distributed as dist
from layouts import LAYOUTS
from pool import RankPool, Ranks

from checkpointing import manifest
from checkpointing.box import Box
from checkpointing.catalog import read_manifest
from checkpointing.checkpoint_errors import (
    CheckpointError,
    MismatchError,
    MissingRanksError,
    NoCheckpointError,
    StorageError,
)
from checkpointing.manifest import Manifest, decode
from checkpointing.plans import TensorPiece, read_plan
from checkpointing.restore import MODES, Places, restore
from checkpointing.shards import Shard, whole
from checkpointing.storage.local import LocalStorage
from checkpointing.transfer import Routes
from checkpointing.verify import verify


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the state saved by 1, 2, 3 and 4 ranks in every layout."""
    folder = tmp_path_factory.mktemp("saved")
    # All are started before the first is waited for.
    for pool in [ranks(world) for world in (1, 2, 3, 4)]:
        for layout in LAYOUTS:
            place = folder / str(pool.size) / layout
            pool.run(layouts.save, place=place, layout=layout, states={1: layouts.state()})
    return folder


def test_every_layout_saves_the_same_intact_state(saved: Path) -> None:
    storages = [LocalStorage(place) for place in saved.glob("*/*")]
    assert len(storages) == 4 * len(LAYOUTS)
    assert all(verify(storage, 1).is_intact for storage in storages)
    assert len({read_manifest(storage, 1).state_digest for storage in storages}) == 1


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_layout_restores_on_any_other_bit_for_bit(ranks: Ranks, saved: Path, world: int) -> None:
    for writers, (index, layout), (offset, how) in itertools.product(
        (1, 2, 3, 4), enumerate(LAYOUTS), enumerate(MODES)
    ):
        onto = LAYOUTS[(index + writers + offset) % len(LAYOUTS)]
        case = {"place": saved / str(writers) / layout, "layout": onto, "how": how}
        of_ranks = ranks(world).run(layouts.restore_state, **case)
        assert [found["wrong"] for found in of_ranks] == [[]] * world, case
        assert [found["reported"] for found in of_ranks] == [found["read"] for found in of_ranks], case
        if how != "direct":
            assert sum(found["read"] for found in of_ranks) == of_ranks[0]["size"], case
        if how == "rank0":
            assert all(found["read"] == 0 for found in of_ranks[1:]), case
        # Only rank 0 lists checkpoints and reads the manifest.
        for found in of_ranks[1:]:
            assert found["asked"] <= {"read_into"}, case


def restored_blocks(rank: int, world: int, place: Path, how: str) -> tuple[int, int]:
    """Restore a replicated state of many blocks; return the bytes that this rank read, and of the whole."""
    blocks = {f"block{index}": torch.arange(250_000 + index, dtype=torch.float32) for index in range(40)}
    layouts.save(rank, world, place, "replicated", {1: blocks})
    empty = [whole(name, torch.zeros_like(tensor)) for name, tensor in blocks.items()]
    storage = layouts.watched(place)
    layouts.restored(rank, world, place, "blocks", lambda _: empty, storage=storage, how=how)
    assert all(torch.equal(shard.tensor, blocks[shard.name]) for shard in empty)
    return layouts.bytes_read(storage), sum(tensor.nbytes for tensor in blocks.values())


def test_replicas_share_the_reading_evenly_but_in_direct_mode(ranks: Ranks, tmp_path: Path) -> None:
    shared = ranks(4).run(restored_blocks, place=tmp_path / "shared", how="broadcast")
    size = shared[0][1]
    assert sum(read for read, _ in shared) == size
    assert max(read for read, _ in shared) <= 1.05 * size / 4
    assert ranks(2).run(restored_blocks, place=tmp_path / "direct", how="direct") == [(size, size)] * 2


def restored_in_place(rank: int, world: int, place: Path) -> tuple[bool, list[int]]:
    """Restore one memory that was saved under two names into a parameter with two names that requires
    gradients, twice in one process; return whether it is right, and the steps of the phase that was told.
    """
    tied = torch.randn(37, 13, generator=torch.Generator().manual_seed(3))
    layouts.save(rank, world, place, "rows", {8: {"embedding": tied, "head": tied}})
    parameter = torch.nn.Parameter(torch.zeros(37, 13))
    both = [whole("embedding", parameter), whole("head", parameter)]
    among, steps = layouts.peers(rank, world, f"in place/{place}"), []

    def at_phase(phase: str, step: int) -> None:
        if phase == "restore":
            steps.append(step)

    for _ in range(2):
        parameter.data.zero_()
        found = restore(
            Places([LocalStorage(place)]), among, dist.group.WORLD, lambda _: both, at_phase=at_phase
        )
        assert found is not None
        assert found.state == {"step": 8}
    return torch.equal(parameter, tied), steps


def test_a_tied_parameter_is_filled_in_place_and_each_rank_tells_its_phase_once(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(3).run(restored_in_place, place=tmp_path) == [(True, [8, 8])] * 3


def mismatch(rank: int, world: int, place: Path, wanted: Any, only_rank: int | None = None) -> str:
    """Return what is said to a rank when a tensor is wanted that is not in the checkpoint."""
    shards = [wanted] if only_rank in (None, rank) else []
    topic = f"mismatch/{wanted.name}/{wanted.shape}/{wanted.dtype}/{only_rank}"
    with pytest.raises(MismatchError) as caught:
        layouts.restored(rank, world, place, topic, lambda _: shards)
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
    for message in ranks(2).run(mismatch, place=place, wanted=wanted):
        assert all(word in message for word in words), message
    told = ranks(2).run(mismatch, place=place, wanted=wanted, only_rank=1)
    assert told[0] == f"rank 1: {told[1]}"


# What is damaged, and ranks that are missing.

WORLD = 3
OLD, NEW = 5, 10


@pytest.fixture
def place(ranks: Ranks, tmp_path: Path) -> Path:
    """Return a place with two checkpoints of three ranks."""
    states = {OLD: layouts.state(OLD), NEW: layouts.state(NEW)}
    ranks(WORLD).run(layouts.save, place=tmp_path, layout="mixture", states=states)
    return tmp_path


@dataclass(frozen=True)
class Outcome:
    """What one rank got: a step with its reasons for skipping, or an error."""

    step: int | None = None
    skipped: tuple[tuple[int, str], ...] = ()
    is_right: bool = False
    error: str = ""


class Unreadable(LocalStorage):
    """A folder in which the newer checkpoint's tensors cannot be read."""

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        if f"step-{NEW:08d}/" in path:
            raise StorageError(f"{path}: {os.strerror(errno.EIO)}")
        super().read_into(path, begin, buffer)


class Away(LocalStorage):
    """A folder that does not answer the first `times` reads of the newer checkpoint's tensors."""

    def __init__(self, place: Path, times: int) -> None:
        super().__init__(place)
        self.times = times

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        if f"step-{NEW:08d}/0" in path and self.times:
            self.times -= 1
            raise StorageError(f"{path}: not now") from TimeoutError()
        super().read_into(path, begin, buffer)


class Noisy(LocalStorage):
    """A folder behind a network that changes a byte of the newer checkpoint once: of its manifest, and of
    its tensors.
    """

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.is_clean = {"manifest": False, "tensors": False}

    def get(self, path: str) -> bytes:
        content = bytearray(super().get(path))
        if path.endswith(f"step-{NEW:08d}/manifest.json") and not self.is_clean["manifest"]:
            self.is_clean["manifest"] = True
            content[len(content) // 2] ^= 0x10
        return bytes(content)

    def read_into(self, path: str, begin: int, buffer: memoryview) -> None:
        super().read_into(path, begin, buffer)
        if f"step-{NEW:08d}/0" in path and not self.is_clean["tensors"]:
            self.is_clean["tensors"] = True
            buffer[0] ^= 0x10


def attempt_through_noise(rank: int, world: int, place: Path, how: str) -> tuple[Any, ...]:
    """Restore onto whole replicas where each rank's storage is noisy; say what came of it."""
    mine = layouts.shards(layouts.state(), "replicated", rank, world, is_filled=False)
    storage = Noisy(place)
    found = layouts.restored(rank, world, place, f"noise {how}", lambda _: mine, storage=storage, how=how)
    assert found is not None
    whole = layouts.state(found.step)
    is_right = all(layouts.is_equal(shard, whole) for shard in mine)
    return found.step, found.skipped, is_right, tuple(found.read_twice), storage.is_clean


def attempt(
    rank: int,
    world: int,
    place: Path,
    topic: str,
    failing_rank: int | None = None,
    times: int | None = None,
    **options: Any,
) -> Outcome:
    """Restore onto whole replicas and say what came of it. `failing_rank`: of which the storage fails; with
    `times` it does not answer so often.
    """
    failing = Unreadable(place) if times is None else Away(place, times)
    storage = failing if rank == failing_rank else None
    mine = layouts.shards(layouts.state(), "replicated", rank, world, is_filled=False)
    try:
        found = layouts.restored(rank, world, place, topic, lambda _: mine, storage=storage, **options)
    except CheckpointError as error:
        skipped = tuple(error.skipped) if isinstance(error, NoCheckpointError) else ()
        return Outcome(skipped=skipped, error=f"{type(error).__name__}: {error}")
    if found is None:
        return Outcome()
    whole = layouts.state(found.step)
    return Outcome(found.step, tuple(found.skipped), all(layouts.is_equal(shard, whole) for shard in mine))


def files(place: Path, step: int) -> list[Path]:
    return sorted((place / f"step-{step:08d}").glob("*.safetensors"))


def manifest_of(place: Path, step: int) -> Path:
    return place / f"step-{step:08d}" / "manifest.json"


def flip_a_bit(place: Path) -> str:
    """Flip one bit of a chunk; return the tensor it belongs to."""
    chunk = decode(manifest_of(place, NEW).read_bytes()).tensors["matrix"].chunks[-1]
    file = manifest_of(place, NEW).with_name(chunk.file)
    content = bytearray(file.read_bytes())
    content[chunk.begin + chunk.num_bytes - 1] ^= 0x10
    file.write_bytes(content)
    return f"{chunk.file}: matrix: "


def change(file: Path, edit: Callable[[bytes], bytes]) -> str:
    """Let a file have the edited content; return its name."""
    file.write_bytes(edit(file.read_bytes()))
    return file.name


def truncate(place: Path) -> str:
    return change(files(place, NEW)[1], lambda content: content[:-1])


def lengthen(place: Path) -> str:
    return change(files(place, NEW)[1], lambda content: content + b"\0")


def delete(place: Path) -> str:
    file = files(place, NEW)[2]
    file.unlink()
    return file.name


def take_from_the_older(place: Path) -> str:
    """Put the older checkpoint's file in place: same size, same header, same tensors."""
    old, new = files(place, OLD)[0], files(place, NEW)[0]
    assert old.stat().st_size == new.stat().st_size
    return change(new, lambda _: old.read_bytes())


def put_a_pickle(place: Path) -> str:
    """Put a pickle of the right size that would make a file, as is seen here."""
    content = pickle.dumps(_Bomb(place / "exploded"))
    pickle.loads(content.ljust(1000, b"\0"))
    (place / "exploded").unlink()
    return change(files(place, NEW)[0], lambda intact: content.ljust(len(intact), b"\0"))


class _Bomb:
    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return (Path.touch, (self._target,))


def edit_the_manifest(place: Path) -> str:
    change(manifest_of(place, NEW), lambda intact: intact.replace(b'"generation": 0', b'"generation": 1'))
    return "edited or damaged"


def take_the_older_manifest(place: Path) -> str:
    change(manifest_of(place, NEW), lambda _: manifest_of(place, OLD).read_bytes())
    return f"step {OLD}"


DAMAGES = [
    *(flip_a_bit, truncate, lengthen, delete, take_from_the_older, put_a_pickle),
    *(edit_the_manifest, take_the_older_manifest),
]


@pytest.mark.parametrize(
    ("damage", "how"),
    [*((damage, "broadcast") for damage in DAMAGES), (flip_a_bit, "rank0"), (flip_a_bit, "direct")],
    ids=lambda case: case if isinstance(case, str) else case.__name__,
)
def test_all_ranks_walk_back_from_a_damage_with_the_same_reason(
    ranks: Ranks, place: Path, damage: Callable[[Path], str], how: str
) -> None:
    named = damage(place)
    outcomes = ranks(WORLD).run(attempt, place=place, topic="damage", how=how)
    assert len(set(outcomes)) == 1
    assert (outcomes[0].step, outcomes[0].is_right) == (OLD, True)
    ((skipped, reason),) = outcomes[0].skipped
    assert skipped == NEW
    assert named in reason
    assert not (place / "exploded").exists()


@pytest.mark.parametrize("how", ["broadcast", "direct"])
def test_bytes_that_a_network_changed_are_read_once_more_and_told(
    ranks: Ranks, place: Path, how: str
) -> None:
    outcomes = ranks(WORLD).run(attempt_through_noise, place=place, how=how)
    for rank, (step, skipped, is_right, read_twice, is_clean) in enumerate(outcomes):
        assert (step, skipped, is_right) == (NEW, [], True)
        assert is_clean == {"manifest": rank == 0, "tensors": True}
        assert read_twice == outcomes[0][3]
        assert [words.partition(":")[0] for words in read_twice] == ["rank 0", "rank 1", "rank 2"]
        assert all("has the checksum" in words for words in read_twice)


def test_what_one_rank_cannot_read_sends_all_back(ranks: Ranks, place: Path) -> None:
    outcomes = ranks(WORLD).run(attempt, place=place, topic="eio", how="direct", failing_rank=1)
    assert len(set(outcomes)) == 1
    assert outcomes[0].step == OLD
    assert os.strerror(errno.EIO) in outcomes[0].skipped[0][1]


def test_all_ranks_wait_for_the_storage_of_one(ranks: Ranks, place: Path) -> None:
    options: dict[str, Any] = {"place": place, "how": "direct", "failing_rank": 1}
    outcomes = ranks(WORLD).run(attempt, topic="passes", times=1, patience_s=20.0, **options)
    assert outcomes == [Outcome(NEW, (), is_right=True)] * WORLD
    outcomes = ranks(WORLD).run(attempt, topic="stays", times=10**6, patience_s=0.5, **options)
    assert len(set(outcomes)) == 1
    assert re.match(r"UnreachableError: the storage did not answer for .* s: .*not now", outcomes[0].error)
    # What another rank finds damaged is not waited for.
    flip_a_bit(place)
    outcomes = ranks(WORLD).run(attempt, topic="damaged", times=1, patience_s=20.0, **options)
    assert outcomes[0].step == OLD


def test_with_none_intact_every_reason_is_told(ranks: Ranks, place: Path) -> None:
    named = flip_a_bit(place), files(place, OLD)[0]
    named[1].unlink()
    outcomes = ranks(WORLD).run(attempt, place=place, topic="none")
    assert len(set(outcomes)) == 1
    assert outcomes[0].error.startswith("NoCheckpointError: ")
    assert [step for step, _ in outcomes[0].skipped] == [NEW, OLD]
    assert named[0] in outcomes[0].error
    assert named[1].name in outcomes[0].error


def test_a_place_without_checkpoints_gives_nothing_and_one_that_cannot_be_listed_an_error(
    ranks: Ranks, tmp_path: Path
) -> None:
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / ".step-00000004.g000-00.tmp").mkdir()
    assert ranks(2).run(attempt, place=tmp_path, topic="empty") == [Outcome()] * 2
    (tmp_path / "file").touch()
    outcomes = ranks(2).run(attempt, place=tmp_path / "file", topic="unreachable")
    assert all(outcome.error.startswith("StorageError: ") for outcome in outcomes)


def test_a_given_step_is_taken_or_nothing(ranks: Ranks, place: Path) -> None:
    outcomes = ranks(WORLD).run(attempt, place=place, topic="given", step=OLD)
    assert outcomes == [Outcome(OLD, (), is_right=True)] * WORLD
    outcomes = ranks(WORLD).run(attempt, place=place, topic="absent", step=7)
    assert all(outcome.error.startswith("NoCheckpointError: ") for outcome in outcomes)
    assert all("step 7; there are: 5, 10" in outcome.error for outcome in outcomes)
    flip_a_bit(place)
    outcomes = ranks(WORLD).run(attempt, place=place, topic="broken", step=NEW)
    assert all(outcome.error.startswith("NoCheckpointError: ") for outcome in outcomes)


def attempt_without(rank: int, world: int, place: Path, missing: int) -> tuple[list[int], str]:
    """Let one rank stay away; return whom the others miss. They begin together: the limit is short."""
    dist.barrier()
    if rank == missing:
        return [], ""
    with pytest.raises(MissingRanksError) as caught:
        layouts.restored(rank, world, place, f"missing/{missing}", lambda _: [], limit_s=0.5)
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_rank_is_named_within_the_limit(ranks: Ranks, tmp_path: Path, missing: int) -> None:
    results = ranks(WORLD).run(attempt_without, place=tmp_path, missing=missing)
    del results[missing]
    for ranks_missed, message in results:
        assert ranks_missed == [missing]
        assert f"rank {missing}" in message


def attempt_refused(rank: int, world: int, place: Path, own: bool) -> str:
    """Let one rank's user refuse the checkpoint, by this package's error or an error of its own."""

    def wanted(manifest: Manifest) -> list[Any]:
        if rank == 1:
            raise RuntimeError("no such model") if own else MismatchError("another model")
        return []

    with pytest.raises((RuntimeError, MismatchError)) as caught:
        layouts.restored(rank, world, place, f"refused/{own}", wanted)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("own", "words"), [(False, "MismatchError: another model"), (True, "RuntimeError: no such model")]
)
def test_a_user_that_refuses_stops_all_ranks_and_is_no_damage(
    ranks: Ranks, place: Path, own: bool, words: str
) -> None:
    to_others = f"MismatchError: rank 1: {words.partition(': ')[2]}"
    assert ranks(WORLD).run(attempt_refused, place=place, own=own) == [to_others, words, to_others]


def attempt_with_a_death(rank: int, world: int, place: Path, victim: int) -> str:
    """Kill one rank when half of its chunks are read; return what the others say."""
    blocks = {f"block{index}": torch.zeros(400_000) for index in range(20)}
    layouts.save(rank, world, place, "replicated", {1: blocks})

    def kill(phase: str, step: int) -> None:
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    mine = [whole(name, tensor) for name, tensor in blocks.items()]
    with pytest.raises(CheckpointError) as caught:
        layouts.restored(rank, world, place, "death", lambda _: mine, limit_s=5.0, at_phase=kill)
    return str(caught.value)


def test_a_rank_that_dies_while_restoring_is_noticed_by_the_others(tmp_path: Path) -> None:
    pool = RankPool(WORLD)
    try:
        with pytest.raises(EOFError):
            pool.run(attempt_with_a_death, place=tmp_path, victim=1)
        assert "rank" in pool._received(2)
    finally:
        pool.close()


def received_in_a_part(rank: int, world: int) -> tuple[int, ...]:
    """Bring bytes to three ranks of a part of the job, of which the last one is about other things, twice."""
    part = dist.new_group(list(range(world)), use_local_synchronization=True)
    # Ranks have different numbers of groups, by which torch calls those that a part of them makes.
    own = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    if rank == world - 1:
        for group in (part, *own):
            dist.destroy_process_group(group)
        return ()
    piece = TensorPiece("w", Box.whole((3,)), "U8", (3,))
    tensors = {"w": manifest.Tensor("U8", (3,), "", (manifest.Chunk(piece.box, "file", 0, 3, ""),))}
    (transfer,) = read_plan(tensors, {of: [piece] for of in range(world - 1)})
    for _ in range(2):
        routes = Routes([transfer], part)
        memory = torch.full((3,), rank + 1, dtype=torch.uint8)
        for work in routes.post(transfer, memory):
            work.wait()
        routes.close()
    for group in (part, *own):
        dist.destroy_process_group(group)
    return (transfer.reader, *memory.tolist())


def test_a_part_of_the_job_s_ranks_restores_without_the_others_and_again(ranks: Ranks) -> None:
    """As pipeline stages do that have a path and a group each."""
    *of_part, of_other = ranks(4).run(received_in_a_part)
    reader = of_part[0][0]
    assert of_part == [(reader, *[reader + 1] * 3)] * 3
    assert of_other == ()
