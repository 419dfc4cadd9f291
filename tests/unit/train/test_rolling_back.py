"""Where a run goes back to, what it leaves out, and that nothing after that is ever restored again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from one_rank_attempts import SIZE, Attempt, begun, config_of, events, steps_of

from conf.schema import Config, RecoveryConfig, RollBackConfig
from orchestra.errors import RollBackError
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir
from orchestra.run.rollback import BROKEN_DEVICE, SPIKE, BadSteps, Stretch
from orchestra.run.run_lineage import lineage_of, newest_checkpoint
from orchestra.sizes.topology import BatchRamp, RampStage
from orchestra.train.starting_point import target

BATCHES = BatchRamp((RampStage(1, 0, SIZE),))

SPIKED = BadSteps(18, 18, SPIKE, "step 18: the loss rose")


def config(steps_before: int = 1, skip_steps: int = 1, **checkpoint: Any) -> Config:
    roll_back = RollBackConfig(steps_before=steps_before, skip_steps=skip_steps)
    chosen = config_of(async_save=False, keep_last=5, **checkpoint)
    return replace(chosen, recovery=RecoveryConfig(roll_back=roll_back))


def rolled_back(path: Path, chosen: Config, bad: BadSteps = SPIKED) -> dict[str, Any]:
    attempt = begun(path, 0, chosen, (5, 10, 15))
    error = attempt.checkpoints.roll_back(bad, bad.last * SIZE, BATCHES)
    assert isinstance(error, RollBackError)
    assert error.exit_code == 1
    (event,) = events(path, "roll_back")
    return event


@pytest.mark.parametrize(
    ("committed", "first_bad", "steps_before", "expected"),
    [
        ([5, 10, 15], 18, 1, 15),
        ([5, 10, 15], 18, 3, 15),
        ([5, 10, 15], 18, 4, 10),
        ([5, 10, 15], 18, 100, 5),
        ([5, 10, 15], 15, 1, 10),
        ([5, 10, 15], 5, 1, 0),
        ([], 18, 1, 0),
    ],
)
def test_a_run_goes_back_to_the_newest_checkpoint_that_is_old_enough_else_the_oldest(
    committed: list[int], first_bad: int, steps_before: int, expected: int
) -> None:
    assert target(committed, first_bad, steps_before) == expected


@pytest.mark.parametrize(
    ("steps_before", "skip_steps", "to", "data_steps"),
    [(1, 1, 15, [16, 18]), (1, 10, 15, [16, 25]), (6, 3, 10, [11, 18]), (100, 20, 5, [6, 25])],
)
def test_the_data_from_there_on_is_left_out_and_always_that_of_the_bad_step(
    tmp_path: Path, steps_before: int, skip_steps: int, to: int, data_steps: list[int]
) -> None:
    event = rolled_back(tmp_path / "run", config(steps_before, skip_steps))
    first, last = data_steps
    assert (event["to"], event["data_steps"]) == (to, data_steps)
    assert event["left_out"] == [[(first - 1) * SIZE, last * SIZE]]
    assert (event["step"], event["first_bad"], event["cause"]) == (18, 18, SPIKE)


def test_the_next_attempt_begins_there_and_what_was_saved_after_it_counts_no_more(tmp_path: Path) -> None:
    path, chosen = tmp_path / "run", config(steps_before=6)
    rolled_back(path, chosen)
    recorded = read_events(RunDir(path))
    assert newest_checkpoint(recorded) == 10
    # What attempt 0 has copied after step 10 is no history of the next attempt.
    assert not lineage_of(recorded).is_on_line(11, 0)
    second = Attempt(path, 1, chosen)
    begin = second.checkpoints.begin()
    assert (begin.step, begin.samples, begin.left_out) == (10, 10 * SIZE, (Stretch(10 * SIZE, 18 * SIZE),))
    assert second.holds(10)
    assert steps_of(path) == [5, 10]
    (restored,) = events(path, "restored")
    assert restored["later_checkpoints"] == [[15, 0]]
    (passed,) = restored["skipped"]
    assert passed == {"step": 15, "reason": "written by attempt 0, before the run went back to step 10"}
    # Saved anew, the other one stays under another name.
    second.save(15)
    assert steps_of(path) == [5, 10, 15]
    (manifest,) = (path / "checkpoints").glob("step-00000015.kept-*/manifest.json")
    assert json.loads(manifest.read_text())["attempt"] == 0
    newer = json.loads((path / "checkpoints" / "step-00000015" / "manifest.json").read_text())
    assert (newer["attempt"], newer["base"]) == (1, {"step": 10, "attempt": 0})
    third = Attempt(path, 2, chosen)
    assert third.checkpoints.begin().step == 15
    assert steps_of(path) == [5, 10, 15]


def test_retention_keeps_what_was_saved_since(tmp_path: Path) -> None:
    path = tmp_path / "run"
    rolled_back(path, config(steps_before=100))
    begun(path, 1, config_of(async_save=False, keep_last=1), (10,))
    assert steps_of(path) == [10]


def test_what_is_left_out_adds_up_and_is_in_every_later_checkpoint(tmp_path: Path) -> None:
    path, chosen = tmp_path / "run", config(steps_before=6)
    rolled_back(path, chosen)
    second = begun(path, 1, chosen, (15,))
    # After step 15 its data stands 8 steps further on.
    second.checkpoints.roll_back(BadSteps(17, 17, SPIKE, "again"), 25 * SIZE, BATCHES)
    third = Attempt(path, 2, chosen)
    begin = third.checkpoints.begin()
    assert begin.step == 10
    assert begin.left_out[0] == Stretch(10 * SIZE, 25 * SIZE)
    third.save(15)
    for file in (path / "events").iterdir():
        file.unlink()
    assert Attempt(path, 3, chosen).checkpoints.begin().left_out == begin.left_out


def test_without_a_checkpoint_before_the_spike_it_begins_anew(tmp_path: Path) -> None:
    path, chosen = tmp_path / "run", config()
    event = rolled_back(path, chosen, BadSteps(4, 16, SPIKE, "steps 4 to 16"))
    assert (event["to"], event["data_steps"]) == (0, [1, 16])
    begin = Attempt(path, 1, chosen).checkpoints.begin()
    assert (begin.step, begin.samples, begin.left_out) == (0, 0, (Stretch(0, 16 * SIZE),))
    assert steps_of(path) == []
    assert events(path, "restored")[-1]["reason"] == "it was rolled back"


@pytest.mark.parametrize(
    ("first_bad", "steps_before", "to"),
    # A device that is broken for longer costs no more than what is kept.
    [(11, 100, 10), (3, 1, 5)],
)
def test_a_run_goes_back_before_a_broken_device_was_seen_without_leaving_data_out(
    tmp_path: Path, first_bad: int, steps_before: int, to: int
) -> None:
    path, chosen = tmp_path / "run", config(steps_before)
    bad = BadSteps(first_bad, 18, BROKEN_DEVICE, "rank 1 is broken", leaves_out=False)
    event = rolled_back(path, chosen, bad)
    assert (event["to"], event["left_out"], event["data_steps"]) == (to, [], None)
    assert Attempt(path, 1, chosen).checkpoints.begin().left_out == ()


def test_a_damaged_checkpoint_is_not_chosen(tmp_path: Path) -> None:
    path, chosen = tmp_path / "run", config(steps_before=6)
    attempt = begun(path, 0, chosen, (5, 10, 15))
    (path / "checkpoints" / "step-00000010" / "manifest.json").write_text("{")
    attempt.checkpoints.roll_back(SPIKED, 18 * SIZE, BATCHES)
    assert events(path, "roll_back")[0]["to"] == 5
