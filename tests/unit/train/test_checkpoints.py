"""The rules of checkpoint.* on one rank and a real folder: when a run saves, what it refuses and survives."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from one_rank_attempts import STEPS, Attempt, begun, config_of, context_of, events, steps_of

from checkpointing import catalog
from checkpointing.checkpointer import Checkpointer
from checkpointing.lineage import Base
from conf.schema import BatchStage, RunConfig, WhenBusy
from orchestra.errors import TrainingError, UnusableCheckpointError
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir
from orchestra.sizes import save_interval
from orchestra.sizes.topology import batch_ramp
from orchestra.sizes.training_shape import checkpoint_bytes
from orchestra.train import checkpoints
from orchestra.train.checkpoints import SaveRhythm, fenced
from orchestra.train.memory import host_memory
from orchestra.train.metrics import Totals
from orchestra.train.state import Position
from orchestra.train.watch.inject_faults import Faults


def test_a_save_is_due_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "run", 0, config_of(steps=12))
    assert [step for step in range(1, 13) if attempt.checkpoints.is_due(step)] == [5, 10, 12]
    assert events(tmp_path / "run", "save_interval") == []
    never = Attempt(tmp_path / "other", 0, config_of(steps=12, every_steps=None))
    assert never.checkpoints.begin() == Position()
    assert not any(never.checkpoints.is_due(step) for step in range(1, 13))
    assert not never.checkpoints.is_due(7, is_last=True)
    assert not (tmp_path / "other" / "checkpoints").exists()


@pytest.mark.parametrize("async_save", [True, False])
def test_the_next_attempt_continues_after_the_newest_checkpoint(tmp_path: Path, async_save: bool) -> None:
    first = Attempt(tmp_path / "run", 0, config_of(async_save=async_save, when_busy=WhenBusy.wait))
    assert first.checkpoints.begin() == Position()
    for step in (5, 10, STEPS):
        first.save(step)
    second = Attempt(tmp_path / "run", 1, config_of())
    begin = second.checkpoints.begin()
    assert (begin.step, begin.samples, begin.score) == (STEPS, STEPS * 16, 1.0 / STEPS)
    assert begin.totals == Totals(1.0, STEPS * 128, 0.5)
    assert second.holds(STEPS)
    (event,) = events(tmp_path / "run", "restored")
    assert (event["step"], event["skipped"], event["generation"]) == (STEPS, [], 0)
    assert event["bytes_read"] > 0
    assert [event["step"] for event in events(tmp_path / "run", "checkpoint_committed")] == [5, 10, STEPS]


def test_the_last_save_of_an_attempt_that_stops_early_is_committed_when_it_returns(tmp_path: Path) -> None:
    attempt = begun(tmp_path / "run", 0, config_of(async_save=True), (5,))
    assert attempt.checkpoints.is_due(7, is_last=True)
    attempt.save(7, is_last=True)
    assert steps_of(tmp_path / "run") == [5, 7]
    assert events(tmp_path / "run", "checkpoint_skipped") == []


def test_losses_of_another_metric_are_not_what_the_best_are_compared_by(tmp_path: Path) -> None:
    config = config_of(async_save=False, keep_last=1, keep_best=1)
    first = begun(tmp_path, 0, config)
    first.save(5, score=0.1)
    first.save(10, score=0.5)
    assert steps_of(tmp_path) == [5, 10]
    second = begun(tmp_path, 1, replace(config, run=RunConfig(metric="eval/wiki/loss")))
    second.save(15, score=0.9)
    second.save(20, score=1.0)
    assert steps_of(tmp_path) == [15, 20]


def test_losses_on_other_data_are_not_what_the_best_are_compared_by_and_an_event_says_so(
    tmp_path: Path,
) -> None:
    config = config_of(async_save=False, keep_last=1, keep_best=1)
    config = replace(config, run=RunConfig(metric="eval/held_out/loss"))
    first = begun(tmp_path, 0, config)
    first.save(5, score=0.1)
    first.save(10, score=0.5)
    # The same evaluation goes on being compared.
    again = begun(tmp_path, 1, config)
    assert events(tmp_path, "best_begins_anew") == []
    again.save(15, score=0.4)
    assert steps_of(tmp_path) == [5, 15]
    other = begun(tmp_path, 2, replace(config, eval=replace(config.eval, steps=1)))
    (event,) = events(tmp_path, "best_begins_anew")
    assert event["step"] == 15
    assert event["saved"] != event["now"]
    other.save(20, score=0.9)
    other.save(25, score=1.0)
    assert steps_of(tmp_path) == [20, 25]


def test_a_place_of_another_run_is_refused_with_and_without_checkpoints(tmp_path: Path) -> None:
    settings = config_of(dir=str(tmp_path / "shared"), async_save=False)
    first = begun(tmp_path / "first", 0, settings)
    with pytest.raises(UnusableCheckpointError, match=r"belongs to another run .*id-of-first"):
        begun(tmp_path / "second", 0, settings)
    first.save(5)
    with pytest.raises(UnusableCheckpointError, match=r"newest: step 5.*orchestra resume"):
        begun(tmp_path / "second", 0, settings)
    with pytest.raises(UnusableCheckpointError, match=r"id-of-first, this run's is id-of-second"):
        begun(tmp_path / "second", 1, settings)


def test_only_a_run_that_has_saved_nothing_begins_anew_and_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    begun(run)
    second = begun(run, 1)
    (event,) = events(run, "restored")
    assert (event["step"], event["reason"]) == (0, "no checkpoint was committed yet")
    second.save(5)
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UnusableCheckpointError, match=r"a checkpoint of step 5.*holds none"):
        begun(run, 2)


def test_a_damaged_checkpoint_is_passed_over_with_its_reason(tmp_path: Path) -> None:
    begun(tmp_path / "run", saves=(5, 10, 15))
    folders = {step: tmp_path / "run" / "checkpoints" / catalog.step_name(step) for step in (5, 10, 15)}
    (folders[15] / "manifest.json").unlink()

    def flip_a_bit(step: int) -> str:
        (file,) = folders[step].glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
        return file.name

    reasons = {15: "manifest is not there any more", 10: flip_a_bit(10)}
    attempt = begun(tmp_path / "run", 1)
    assert attempt.holds(5)
    (event,) = events(tmp_path / "run", "restored")
    assert (event["step"], [skipped["step"] for skipped in event["skipped"]]) == (5, [15, 10])
    for skipped in event["skipped"]:
        assert reasons[skipped["step"]] in skipped["reason"]
    flip_a_bit(5)
    with pytest.raises(UnusableCheckpointError, match="step 5"):
        begun(tmp_path / "run", 1)


def test_what_an_attempt_publishes_after_the_next_one_has_begun_is_never_restored(tmp_path: Path) -> None:
    run = tmp_path / "run"
    frozen = begun(run, saves=(5, 10))
    second = begun(run, 1)
    # Nothing has told it that it was replaced: it goes on in the midst of its save.
    frozen.save(15)
    assert frozen.checkpoints.checkpointer.base == Base(0)
    words = "written by attempt 0 after attempt 1 had begun at step 10"
    third = begun(run, 2)
    assert third.holds(10)
    restored = events(run, "restored")[-1]
    assert (restored["step"], restored["skipped"]) == (10, [{"step": 15, "reason": words}])
    third.save(15)
    assert begun(run, 3).holds(15)
    assert [step.name for step in sorted((run / "checkpoints").iterdir())][-1] == "step-00000015"
    assert second.checkpoints.checkpointer.committed_steps() == [5, 10, 15]
    assert events(run, "checkpoint_failed") == []
    # And none of a newer attempt is ever replaced.
    frozen.save(15)
    (failed,) = events(run, "checkpoint_failed")
    assert "attempt 2 has saved step 15 already" in failed["reasons"]["0"]
    assert begun(run, 4).holds(15)


def test_a_checkpoint_of_another_model_is_refused_by_its_keys(tmp_path: Path) -> None:
    begun(tmp_path / "run", saves=(5,))
    # Its tensors have the same shapes.
    other = replace(config_of().model, num_attention_heads=1, num_key_value_heads=1)
    with pytest.raises(UnusableCheckpointError, match=r"model\.num_attention_heads=2"):
        begun(tmp_path / "run", 1, replace(config_of(), model=other))


def test_a_failed_save_is_an_event_and_the_next_one_works(tmp_path: Path) -> None:
    attempt = begun(tmp_path / "run")
    place = tmp_path / "run" / "checkpoints"
    shutil.rmtree(place, ignore_errors=True)
    place.write_text("in the way")
    attempt.save(5)
    (event,) = events(tmp_path / "run", "checkpoint_failed")
    assert (event["step"], event["rank"]) == (5, 0)
    assert list(event["reasons"]) == ["0"]
    place.unlink()
    attempt.save(10)
    assert steps_of(tmp_path / "run") == [10]


class Failing(Faults):
    """The first writes of the last step fail."""

    def __init__(self, times: int) -> None:
        super().__init__([], 0, 0)
        self._left = times

    def strike(self, phase: str, step: int) -> None:
        if (phase, step) == ("mid_file", STEPS) and self._left:
            self._left -= 1
            raise OSError(5, "Input/output error")


def test_the_last_save_is_tried_again_once_and_then_the_run_fails_clearly(tmp_path: Path) -> None:
    impatient = config_of(last_save_patience_s=0.0)
    begun(tmp_path / "once", 0, impatient, faults=Failing(times=1)).save(STEPS)
    assert steps_of(tmp_path / "once") == [STEPS]
    assert len(events(tmp_path / "once", "checkpoint_failed")) == 1
    attempt = begun(tmp_path / "twice", 0, impatient, faults=Failing(times=2))
    with pytest.raises(TrainingError, match=r"step 20 was trained, but .* Input/output error.*resume twice"):
        attempt.save(STEPS)
    assert steps_of(tmp_path / "twice") == []


def test_the_last_save_is_tried_as_long_as_the_patience_lasts_and_its_state_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_FIRST_PAUSE_S", 0.01)
    attempt = begun(tmp_path / "run", 0, config_of(), faults=Failing(times=5))
    tries: list[int] = []
    attempt.save(STEPS, goes_on=lambda: tries.append(len(tries)))
    assert (steps_of(tmp_path / "run"), len(tries)) == ([STEPS], 6)
    (event,) = events(tmp_path / "run", "last_save_waits")
    assert (event["step"], event["patience_s"]) == (STEPS, 600.0)
    assert "Input/output error" in event["why"]
    again = begun(tmp_path / "run", 1)
    assert again.holds(STEPS)


def test_ranks_that_were_asked_to_stop_give_up_before_they_are_killed(tmp_path: Path) -> None:
    attempt = begun(tmp_path / "run", 0, config_of(), faults=Failing(times=2))
    with pytest.raises(TrainingError, match="tried 2 times"):
        attempt.save(STEPS, is_last=True, left_s=lambda: 14.0)


class Full(Faults):
    """The first write of step 15 finds no room."""

    def strike(self, phase: str, step: int) -> None:
        if (phase, step) == ("mid_file", 15):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_removes_first_what_would_go_anyway(tmp_path: Path) -> None:
    config = config_of(async_save=False, keep_last=2)
    attempt = begun(tmp_path / "run", 0, config, saves=(5, 10), faults=Full([], 0, 0))
    attempt.save(15)
    assert steps_of(tmp_path / "run") == [10]
    (event,) = events(tmp_path / "run", "checkpoint_room_made")
    assert (event["step"], event["removed"]) == (15, [5])
    attempt.save(16)
    assert steps_of(tmp_path / "run") == [10, 16]


def test_a_full_disk_never_costs_the_only_checkpoint(tmp_path: Path) -> None:
    config = config_of(async_save=False, keep_last=1)
    begun(tmp_path / "run", 0, config, saves=(10,), faults=Full([], 0, 0)).save(15)
    assert steps_of(tmp_path / "run") == [10]
    assert events(tmp_path / "run", "checkpoint_room_made") == []


def test_failed_saves_in_a_row_are_counted_until_one_is_committed(tmp_path: Path) -> None:
    attempt = begun(tmp_path / "run")
    health = attempt.checkpoints.health
    assert health.failed_in_a_row is None
    place = tmp_path / "run" / "checkpoints"
    shutil.rmtree(place, ignore_errors=True)
    place.write_text("in the way")
    for step in (5, 10):
        attempt.save(step)
    assert health.failed_in_a_row == 2
    place.unlink()
    attempt.save(15)
    assert health.failed_in_a_row == 0


def test_what_a_save_needs_is_known_and_checked_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path / "run", 0, config_of())
    (needs,) = events(tmp_path / "run", "checkpoint_needs")
    assert 0 < needs["checkpoint_bytes"] <= needs["staging_bytes"] < needs["free_storage_bytes"]
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 1000)
    with pytest.raises(TrainingError, match="of host memory on this node"):
        begun(tmp_path / "other", 0, config_of())


def test_storage_without_room_is_an_error_and_with_room_for_few_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    prepare = Checkpointer.prepare
    monkeypatch.setattr(
        Checkpointer,
        "prepare",
        lambda self, shards: replace(prepare(self, shards), free_storage_bytes=free),
    )
    with pytest.raises(TrainingError, match="0 bytes are free there"):
        begun(tmp_path / "none", 0, config_of())
    free = 10**6
    begun(tmp_path / "little", 0, config_of(keep_last=50))
    (event,) = events(tmp_path / "little", "checkpoint_space_low")
    assert event["missing_bytes"] == 51 * event["checkpoint_bytes"] - 10**6


def test_an_event_that_cannot_be_written_takes_no_checkpoint_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt = begun(tmp_path / "run")

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(JsonLinesWriter, "write", failing)
    attempt.save(5)
    assert steps_of(tmp_path / "run") == [5]
    said = capfd.readouterr().err
    assert "event checkpoint_started" in said
    assert "event checkpoint_committed" in said


def test_a_later_attempt_saves_as_often_as_the_times_of_earlier_ones_say(tmp_path: Path) -> None:
    device_hours = 1.0

    def begun_rhythm(attempt: int, steps: int = 10_000) -> SaveRhythm:
        config = config_of(steps, every_steps=save_interval.AUTO)
        context = context_of(tmp_path, attempt, config)
        rhythm = SaveRhythm(context, checkpoint_bytes(config), device_hours, batch_ramp(config.train))
        rhythm.begin(10)
        return rhythm

    first = EventWriter(RunDir(tmp_path), "rank", 0)
    first.write("checkpoint_started", step=10, blocked_s=8.0)
    first.write("checkpoint_committed", step=10)
    rows = [{"step": step, "time": float(step), "step_time_s": 2.0} for step in range(1, 11)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    begun_rhythm(1)
    (decided,) = events(tmp_path, "save_interval")
    assert (decided["source"], decided["step_time_s"], decided["stall_s"]) == ("measured", 2.0, 8.0)
    expected = save_interval.chosen(2.0, 8.0, save_interval.mttf_s(1, device_hours)).every_steps
    assert decided["every_steps"] == expected
    # The interval is no longer than the run.
    shorter = begun_rhythm(2, steps=expected - 1)
    assert [step for step in range(11, expected) if shorter.is_due(step)] == [expected - 1]


def test_saves_lie_as_far_apart_in_seconds_in_each_batch_of_a_ramp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes a second for each sequence of its batch, of which there are 1, 4 and 16."""
    sizes, begins = (1, 4, 16), (0, 1000, 3000)
    base = config_of(100_000, every_steps=save_interval.AUTO)
    stages = [BatchStage(8 * tokens, 8 * size) for tokens, size in zip((0, 1000, 9000), sizes, strict=True)]
    config = replace(base, train=replace(base.train, batch_ramp=stages))
    ramp, clock = batch_ramp(config.train), [0.0]
    assert tuple(stage.first_step - 1 for stage in ramp.stages) == begins
    monkeypatch.setattr(checkpoints.time, "perf_counter", lambda: clock[0])

    def saves(attempt: int, begin: int, end: int, blocked_s: float = 0.0) -> list[float]:
        """Return the seconds at which an attempt saves, each time for so long."""
        rhythm = SaveRhythm(context_of(tmp_path, attempt, config), checkpoint_bytes(config), 0.05, ramp)
        rhythm.begin(begin)
        seconds = []
        for step in range(begin + 1, end):
            clock[0] += ramp.at(step).global_batch_size
            if rhythm.is_due(step):
                seconds.append(clock[0])
                clock[0] += blocked_s
        return seconds

    def expected(size: int) -> int:
        share = checkpoint_bytes(config)
        stall_s, mttf_s = save_interval.assumed_stall_s(share), save_interval.mttf_s(1, 0.05)
        return save_interval.chosen(float(size), stall_s, mttf_s).every_steps

    seconds = saves(0, 0, 4000)
    gaps = {after - before for before, after in itertools.pairwise(seconds)}
    # None but the two over the begin of a batch are other than the interval in whole steps.
    interval_s = expected(1)
    assert max(gaps) <= 2 * interval_s
    assert len(seconds) == pytest.approx(clock[0] / interval_s, rel=0.1)
    decided = [(event["step_time_s"], event["every_steps"]) for event in events(tmp_path, "save_interval")]
    assert decided == [(float(size), expected(size)) for size in sizes]
    # A later attempt that begins in a batch goes by rows of another one.
    rows = [{"step": step, "time": 1.0, "step_time_s": 4.0} for step in range(2980, 3001)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    saves(1, 3000, 3001)
    assert events(tmp_path, "save_interval")[-1]["step_time_s"] == 16.0
    # Saves between the steps that are timed are none of their time.
    saves(2, 990, 1100, blocked_s=1000.0)
    assert events(tmp_path, "save_interval")[-1]["step_time_s"] == 4.0


class ProcessEndedError(Exception):
    """Stands for the end of this process, which takes all of its threads."""


@pytest.mark.parametrize(
    ("claims", "is_begun", "is_void"),
    [((), True, False), ((2, 3), True, False), ((3, 4), True, True), ((3, 4), False, False)],
)
def test_a_rank_ends_before_it_publishes_when_a_newer_attempt_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, claims: tuple[int, ...], is_begun: bool, is_void: bool
) -> None:
    def end_process(code: int) -> None:
        raise ProcessEndedError(code)

    # Only this call ends a process from whatever thread: an error would end the saving thread alone.
    monkeypatch.setattr(os, "_exit", end_process)
    run = RunDir(tmp_path / "run")
    for path in (run.control, run.events):
        path.mkdir(parents=True)
    for attempt in claims:
        run.claim(attempt).write_text("{}")
        if is_begun:
            EventWriter(run, f"node-{attempt}", attempt).write("attempt_started")
    passed: list[str] = []
    look = fenced(run, 3, EventWriter(run, "rank", 3), lambda phase, _: passed.append(phase))
    kept_local, published = ["staging", "mid_file", "before_vote"], ["before_manifest", "before_prune"]
    for phase in kept_local + published:
        ends_here = is_void and phase in published
        with pytest.raises(ProcessEndedError, match=r"^1$") if ends_here else nullcontext():
            look(phase, 10)
    assert passed == (kept_local if is_void else kept_local + published)
    ends = [event for event in read_events(run) if event["event"] == "fenced"]
    expected = [(4, phase) for phase in published] if is_void else []
    assert [(event["newest"], event["phase"]) for event in ends] == expected
