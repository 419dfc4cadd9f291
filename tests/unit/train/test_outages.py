"""A storage that fails for a while, at the last save and at the begin of an attempt, on one rank."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from one_rank_attempts import STEPS, Attempt, begun, config_of, events, steps_of

from checkpointing import catalog, outages
from checkpointing.checkpoint_errors import StorageError
from checkpointing.saving import retention
from checkpointing.storage import open_storage
from checkpointing.storage.local import LocalStorage
from conf.schema import Config, WhenBusy
from orchestra.errors import StorageOutageError, UnsavedError
from orchestra.run import run_lineage
from orchestra.run.events import EventWriter
from orchestra.run.paths import RunDir
from orchestra.run.record import fallback_place
from orchestra.train import checkpoints
from orchestra.train.watch.inject_faults import Faults
from tests.support.waiting import eventually


def with_fallback(path: Path, **checkpoint: Any) -> Config:
    settings = {"last_save_patience_s": 0.0, "fallback_dir": str(path / "second"), "async_save": False}
    return config_of(**{**settings, **checkpoint})


def fallback_of(path: Path) -> Path:
    place = fallback_place(RunDir(path / "run"), str(path / "second"))
    assert place is not None
    return Path(place)


def steps_in_fallback(path: Path) -> list[int]:
    return catalog.committed_steps(open_storage(fallback_of(path)))


class Full(Faults):
    """The run's own place takes nothing any more, and where `everywhere` no other does."""

    def __init__(self, number: int = errno.ENOSPC, *, everywhere: bool = False) -> None:
        super().__init__([], 0, 0)
        self.number, self.left = number, 10**6 if everywhere else 2

    def strike(self, phase: str, step: int) -> None:
        if (phase, step) == ("mid_file", STEPS) and self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_the_last_save_goes_to_the_fallback_and_the_next_attempt_goes_on_from_there(
    tmp_path: Path, number: int
) -> None:
    config = with_fallback(tmp_path)
    begun(tmp_path / "run", 0, config, saves=(5, 10), faults=Full(number)).save(STEPS)
    assert (steps_of(tmp_path / "run"), steps_in_fallback(tmp_path)) == ([5, 10], [STEPS])
    committed = events(tmp_path / "run", "checkpoint_committed")
    assert [event.get("fallback") for event in committed] == [None, None, str(fallback_of(tmp_path))]

    longer = replace(config, train=replace(config.train, steps=STEPS + 20))
    again = Attempt(tmp_path / "run", 1, longer)
    assert again.checkpoints.begin().step == STEPS
    assert again.holds(STEPS)
    (event,) = events(tmp_path / "run", "restored")
    assert (event["fallback"], event["skipped"]) == (str(fallback_of(tmp_path)), [])
    # keep_last=3 counts both places.
    for step, here, there in ((25, [10, 25], [20]), (30, [25, 30], [20]), (35, [25, 30, 35], [])):
        again.save(step)
        assert (steps_of(tmp_path / "run"), steps_in_fallback(tmp_path)) == (here, there)


def test_where_no_place_takes_the_last_save_both_are_named(tmp_path: Path) -> None:
    attempt = begun(tmp_path / "run", 0, with_fallback(tmp_path), faults=Full(everywhere=True))
    with pytest.raises(UnsavedError, match=r"nor in checkpoint.fallback_dir: .*No space.*repair") as caught:
        attempt.save(STEPS)
    assert f"{tmp_path / 'run' / 'checkpoints'} or {fallback_of(tmp_path)}" in str(caught.value)
    assert steps_in_fallback(tmp_path) == []


written = EventWriter.write


class Stalling(Faults):
    """The run directory, the run's own place in it, stands still from `phase` of a save on, until `goes_on`
    is set.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, phase: str, step: int) -> None:
        super().__init__([], 0, 0)
        self.goes_on, self.has_stalled, self.folder = threading.Event(), threading.Event(), str(folder)
        self.phase, self.step = phase, step
        for name in ("create", "put", "names", "size", "sizes", "remove"):
            monkeypatch.setattr(LocalStorage, name, self._stalling(getattr(LocalStorage, name)))
        for where, name in ((checkpoints, "newer_attempt"), (run_lineage, "newer_attempt")):
            monkeypatch.setattr(where, name, self._stalling(getattr(where, name)))
        monkeypatch.setattr(EventWriter, "write", self._stalling(EventWriter.write))
        monkeypatch.setattr("orchestra.train.state._EVENT_S", 0.1)
        monkeypatch.setattr("orchestra.train.checkpoints._SHORTEST_WAIT_S", 0.3)

    def _stalling(self, act: Any) -> Any:
        def stalling(of: Any, *others: Any, **named: Any) -> Any:
            place = of.place if isinstance(of, LocalStorage) else self.folder
            if self.has_stalled.is_set() and place.startswith(self.folder):
                self.goes_on.wait()
            return act(of, *others, **named)

        return stalling

    def strike(self, phase: str, step: int) -> None:
        if (phase, step) == (self.phase, self.step) and not self.has_stalled.is_set():
            self.has_stalled.set()
            self.goes_on.wait()


@pytest.mark.parametrize("step", [10, STEPS])
@pytest.mark.parametrize("when_busy", WhenBusy)
def test_a_place_that_stands_still_does_not_keep_the_last_save_from_the_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, when_busy: WhenBusy
) -> None:
    run = tmp_path / "run"
    faults = Stalling(monkeypatch, run, "mid_file", step)
    # One of the rhythm, in the background, or the last one itself.
    attempt = begun(run, 0, with_fallback(tmp_path, async_save=True, when_busy=when_busy), faults=faults)
    attempt.save(10)
    assert step == STEPS or faults.has_stalled.wait(10)
    began = time.monotonic()
    attempt.save(STEPS, is_last=True, left_s=lambda: 15.0)
    assert time.monotonic() - began < 10
    assert steps_in_fallback(tmp_path) == [STEPS]
    faults.goes_on.set()
    again = begun(run, 1, with_fallback(tmp_path))
    assert again.holds(STEPS)


def test_a_place_that_stands_still_after_the_commit_does_not_undo_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Stalling(monkeypatch, tmp_path / "run", "before_prune", STEPS)
    attempt = begun(tmp_path / "run", 0, with_fallback(tmp_path), faults=faults)
    monkeypatch.setattr("checkpointing.saving.save._SETTLING_S", 0.2)
    attempt.save(STEPS, is_last=True, left_s=lambda: 15.0)
    assert steps_in_fallback(tmp_path) == []
    faults.goes_on.set()
    assert steps_of(tmp_path / "run") == [STEPS]


def test_runs_of_one_name_never_share_a_folder_of_the_fallback(tmp_path: Path) -> None:
    config = with_fallback(tmp_path)
    for parent in ("one", "other"):
        run = tmp_path / parent / "run"
        run.mkdir(parents=True)
        (run / "run.json").write_text(f'{{"name": "run", "wandb_id": "id-of-{parent}"}}')
        begun(run, 0, config, faults=Full()).save(STEPS)
    assert sorted(path.name for path in (tmp_path / "second").iterdir()) == [
        "run-id-of-one",
        "run-id-of-other",
    ]


def test_a_fallback_that_cannot_be_written_is_told_before_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "second").write_text("in the way")
    attempt = begun(tmp_path / "run", 0, with_fallback(tmp_path))
    assert eventually(lambda: events(tmp_path / "run", "fallback_unusable"), limit_s=20)
    (event,) = events(tmp_path / "run", "fallback_unusable")
    assert event["place"] == str(fallback_of(tmp_path))
    assert "Not a directory" in event["why"]
    (tmp_path / "second").unlink()
    assert attempt.checkpoints.checkpointer.fallback_problem(1) is None
    assert "are free, a checkpoint takes" in str(attempt.checkpoints.checkpointer.fallback_problem(10**18))
    # Nothing is left of the probe.
    assert not fallback_of(tmp_path).exists()


# The begin of an attempt.


class Outage:
    """Whatever is read under a folder fails with `number`, `times` times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, times: int) -> None:
        self.left, self.folder, self.number = times, str(folder), number
        for name in ("get", "read_into", "names", "sizes"):
            monkeypatch.setattr(LocalStorage, name, self._failing(getattr(LocalStorage, name)))
        monkeypatch.setattr(outages, "_FIRST_PAUSE_S", 0.01)

    def _failing(self, act: Any) -> Any:
        def failing(storage: LocalStorage, path: str = "", *others: Any) -> Any:
            if self.left and f"{storage.place}/{path}".startswith(self.folder):
                self.left -= 1
                try:
                    raise OSError(self.number, os.strerror(self.number))
                except OSError as error:
                    raise StorageError(f"{path}: {error.strerror}") from error
            return act(storage, path, *others)

        return failing


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_an_outage_that_passes_is_waited_for_and_the_newest_checkpoint_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    config = config_of(async_save=False, restore_patience_s=20.0)
    begun(tmp_path / "run", 0, config, saves=(5, 10))
    place = tmp_path / "run" / "checkpoints"
    # At first nothing can be listed, then the newest manifest cannot be read, then its tensors.
    for number_of_attempt, (where, times) in enumerate(
        [("", 3), ("step-00000010/man", 4), ("step-00000010/0", 3)]
    ):
        with monkeypatch.context() as patch:
            outage = Outage(patch, place / where if where else place, number, times)
            beats: list[int] = []
            again = Attempt(tmp_path / "run", 1 + number_of_attempt, config)
            begin = again.checkpoints.begin(lambda: beats.append(1))  # noqa: B023
            assert (begin.step, outage.left) == (10, 0), where
        assert again.holds(10)
        assert len(beats) > 2
    waits, restored = (events(tmp_path / "run", name) for name in ("restore_waits", "restored"))
    assert [event["attempt"] for event in waits] == [1, 2, 3]
    assert all(os.strerror(number) in event["why"] for event in waits)
    assert [event["skipped"] for event in restored] == [[], [], []]


def test_an_outage_that_stays_is_told_as_one_and_nothing_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(async_save=False, restore_patience_s=0.3)
    begun(tmp_path / "run", 0, config, saves=(5, 10))
    Outage(monkeypatch, tmp_path / "run" / "checkpoints" / "step-00000010/0", errno.ESTALE, 10**6)
    with pytest.raises(StorageOutageError, match=r"did not answer for .*Stale file handle.*Nothing says"):
        begun(tmp_path / "run", 1, config)
    assert events(tmp_path / "run", "restored") == []


def test_a_device_that_lost_one_checkpoint_costs_only_that_one_after_the_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(async_save=False, restore_patience_s=0.3)
    begun(tmp_path / "run", 0, config, saves=(5, 10))
    outage = Outage(monkeypatch, tmp_path / "run" / "checkpoints" / "step-00000010/0", errno.EIO, 10**6)
    assert begun(tmp_path / "run", 1, config).holds(5)
    (event,) = events(tmp_path / "run", "restored")
    assert "Input/output error" in event["skipped"][0]["reason"]
    outage.folder = str(tmp_path)
    with pytest.raises(StorageOutageError, match="Input/output error"):
        begun(tmp_path / "run", 2, config)


@pytest.mark.parametrize("where", ["man", "0"])
def test_a_checkpoint_that_may_not_be_read_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """An attempt that went on from an older one would leave it off the line."""
    config = config_of(async_save=False, restore_patience_s=0.3)
    begun(tmp_path / "run", 0, config, saves=(5, 10))
    Outage(monkeypatch, tmp_path / "run" / "checkpoints" / f"step-00000010/{where}", errno.EACCES, 10**6)
    with pytest.raises(StorageError, match=r"step-00000010/.*: Permission denied"):
        begun(tmp_path / "run", 1, config)
    assert events(tmp_path / "run", "restored") == []


def test_a_folder_that_is_not_there_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    config = config_of(async_save=False, restore_patience_s=20.0)
    begun(tmp_path / "run", 0, config, saves=(5, 10))
    place, away = tmp_path / "run" / "checkpoints", tmp_path / "away"
    place.rename(away)
    back = threading.Timer(0.5, lambda: away.rename(place))
    back.start()
    assert begun(tmp_path / "run", 1, config).holds(10)
    back.join()
    (event,) = events(tmp_path / "run", "restore_waits")
    assert "nothing is there, though step 10 was committed" in event["why"]


def test_one_of_two_places_is_enough_where_the_other_one_is_damaged_or_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_fallback(tmp_path)
    begun(tmp_path / "run", 0, config, saves=(5, 10))
    own, second = tmp_path / "run" / "checkpoints", fallback_of(tmp_path)
    shutil.copytree(own / "step-00000010", second / "step-00000010")
    next((own / "step-00000010").glob("*.safetensors")).unlink()
    assert begun(tmp_path / "run", 1, config).holds(10)
    (event,) = events(tmp_path / "run", "restored")
    assert event["fallback"] == str(second)
    shutil.copytree(second / "step-00000010", own / "step-00000010", dirs_exist_ok=True)
    faults = Stalling(monkeypatch, second, "", 0)
    for where in (checkpoints, run_lineage):
        monkeypatch.setattr(where, "newer_attempt", lambda *_: None)
    monkeypatch.setattr(EventWriter, "write", written)
    monkeypatch.setattr(outages, "_LISTING_S", 0.2)
    faults.has_stalled.set()
    try:
        assert begun(tmp_path / "run", 2, config).holds(10)
    finally:
        faults.goes_on.set()


def test_a_place_that_is_not_mounted_is_waited_for_though_the_newest_lies_in_the_fallback(
    tmp_path: Path,
) -> None:
    """An attempt that went on beside it would write onto the bare mount point, and be lost with it."""
    disk, away = tmp_path / "disk", tmp_path / "away"
    config = with_fallback(tmp_path, dir=str(disk / "own"), restore_patience_s=0.3)
    first = begun(tmp_path / "run", 0, config, saves=(5, 10), faults=Full())
    first.save(STEPS)
    first.checkpoints.close()
    assert steps_in_fallback(tmp_path) == [STEPS]
    disk.rename(away)
    disk.mkdir()
    longer = replace(config, train=replace(config.train, steps=STEPS + 10))
    with pytest.raises(StorageOutageError, match="nothing is there, though checkpoints were committed"):
        Attempt(tmp_path / "run", 1, longer).checkpoints.begin()
    assert list(disk.iterdir()) == []
    disk.rmdir()
    away.rename(disk)
    begun(tmp_path / "run", 2, longer).checkpoints.close()
    assert events(tmp_path / "run", "restored")[-1]["step"] == STEPS


def test_older_checkpoints_make_room_where_the_newest_lies_in_the_fallback(tmp_path: Path) -> None:
    config = with_fallback(tmp_path, keep_last=1)
    first = begun(tmp_path / "run", 0, config, saves=(10,), faults=Full())
    first.save(STEPS)
    first.checkpoints.close()
    own, fallback = open_storage(tmp_path / "run" / "checkpoints"), open_storage(fallback_of(tmp_path))
    assert (catalog.committed_steps(own), catalog.committed_steps(fallback)) == ([10], [STEPS])
    policy, lineage = (
        retention.RetentionPolicy(keep_last=1),
        run_lineage.read_lineage(RunDir(tmp_path / "run")),
    )
    size = sum(own.sizes("step-00000010").values())
    assert retention.removable_bytes(own, policy, lineage, fallback) == size > 0
    assert retention.removable_bytes(own, policy, lineage) == 0
    # What a rank left there that was killed while it wrote is removed by the next attempt.
    draft = fallback_of(tmp_path) / ".step-00000030.g000-04.tmp"
    draft.mkdir()
    begun(tmp_path / "run", 1, replace(config, train=replace(config.train, steps=40))).checkpoints.close()
    assert not draft.exists()


def test_the_patience_begins_anew_once_a_checkpoint_could_be_offered() -> None:
    patience = outages.OutagePatience(0.1)
    assert patience.lasts("away")
    time.sleep(0.15)
    assert not patience.lasts("away")
    patience.end_outage()
    assert (patience.waited_s, patience.lasts("away again")) == (0.0, True)


def test_a_fallback_that_is_away_is_missed_only_where_the_newest_lies_there(tmp_path: Path) -> None:
    config = with_fallback(tmp_path, restore_patience_s=0.3)
    begun(tmp_path / "run", 0, config, saves=(5, 10), faults=Full()).save(STEPS)
    shutil.move(tmp_path / "second", tmp_path / "away")
    (tmp_path / "second").touch()
    longer = replace(config, train=replace(config.train, steps=STEPS + 20))
    with pytest.raises(StorageOutageError, match=r"second.*nothing is there, though step 20|Not a directory"):
        begun(tmp_path / "run", 1, longer)
    (tmp_path / "second").unlink()
    with pytest.raises(StorageOutageError, match="nothing is there, though step 20 was committed"):
        begun(tmp_path / "run", 2, longer)
    shutil.move(tmp_path / "away", tmp_path / "second")
    begun(tmp_path / "run", 3, longer).save(25)
    shutil.move(tmp_path / "second", tmp_path / "away")
    (tmp_path / "second").touch()
    assert begun(tmp_path / "run", 4, longer).holds(25)
    (event,) = events(tmp_path / "run", "fallback_unreachable")
    assert "Not a directory" in event["why"]
