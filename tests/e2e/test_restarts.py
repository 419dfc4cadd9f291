"""A run in the foreground goes on by itself when ranks die or hang, as if nothing had happened, and never for
ever."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from commands import (
    TINY,
    events_of,
    eventually,
    newest_manifest,
    orchestra,
    processes_of,
    start,
    trained_digest,
    trained_rows,
)

from orchestra.run.paths import RunDir

STEPS = ("train.steps=40", "checkpoint.every_steps=5", "checkpoint.async_save=false", "data.ledger=true")
# In attempt 1 the faults come behind the step that attempt 0 was killed at, so that there is progress.
FAULTS = (
    "recovery.inject=["
    "{at_step: 12, rank: 1, fault: sigkill},"
    "{attempt: 1, at_step: 22, rank: 0, fault: sigstop},"
    "{attempt: 2, at_step: 33, rank: 1, fault: exception}]"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("restarts")


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunDir:
    done = orchestra(folder, "run", "run.name=alone", *TINY, *STEPS)
    assert done.returncode == 0, done.stdout + done.stderr
    return RunDir(folder / "runs" / "alone")


@pytest.mark.parametrize("copies", ["null", "1"])
def test_a_killed_a_stopped_and_a_failing_rank_cost_nothing_but_time(
    folder: Path, alone: RunDir, copies: str
) -> None:
    name = f"copies-{copies}"
    words = ("run", f"run.name={name}", *TINY, *STEPS, FAULTS, f"recovery.memory_copy_every_steps={copies}")
    done = orchestra(folder, *words, limit_s=200)
    run = RunDir(folder / "runs" / name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert trained_rows(run) == trained_rows(alone)
    ours, theirs = newest_manifest(run.checkpoints), newest_manifest(alone.checkpoints)
    assert trained_digest(ours) == trained_digest(theirs)
    restored = [event for attempt in range(1, 4) for event in events_of(run, "restored", attempt)]
    lost = [12 - restored[0]["step"], 22 - restored[1]["step"], 33 - restored[2]["step"]]
    if copies == "1":
        # A copy is made while the next step is trained: the newest whole one may be of the step before.
        assert max(lost) <= 2
        assert restored[2]["source"] == "memory"
    else:
        assert ({it["source"] for it in restored}, lost) == ({"checkpoint"}, [2, 2, 3])
    (hang,) = events_of(run, "hang_detected", 1)
    assert (hang["rank"], hang["state"]) == (0, "T")
    assert processes_of(run) == []
    (state,) = json.loads(orchestra(folder, "status", name, "--json").stdout)
    assert (state["state"], state["attempts"]) == ("finished", 4)
    told = orchestra(folder, "why", name).stdout
    assert told.count("restarted") == 3


def test_the_same_error_at_the_same_step_ends_the_run_with_93(folder: Path) -> None:
    fault = "recovery.inject=[{attempt: all, at_step: 7, rank: 1, fault: exception}]"
    done = orchestra(folder, "run", "run.name=bad", *TINY, *STEPS, fault)
    run = RunDir(folder / "runs" / "bad")
    assert done.returncode == 93, done.stdout + done.stderr
    assert "bad data or code" in done.stdout + done.stderr
    (state,) = json.loads(orchestra(folder, "status", "bad", "--json").stdout)
    assert (state["state"], state["code"], state["attempts"]) == ("failed", 93, 2)
    assert processes_of(run) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_in_the_wait_between_two_attempts_ends_the_run_in_its_own_way(
    folder: Path, number: signal.Signals, code: int
) -> None:
    name = f"waits-for-{number.name}"
    fault = "recovery.inject=[{attempt: all, at_step: 3, rank: 1}]"
    process = start(folder, "run", f"run.name={name}", *TINY, *STEPS, fault, "recovery.backoff_s=600")
    run = RunDir(folder / "runs" / name)
    assert eventually(lambda: bool(events_of(run, "restarting", 1)), 90)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    (state,) = json.loads(orchestra(folder, "status", name, "--json").stdout)
    assert (state["code"], state["attempts"]) == (code, 2)
    assert processes_of(run) == []
