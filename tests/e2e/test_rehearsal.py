"""A real rehearsal on this machine, and what its judge says of runs that were tampered with afterwards."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, events_of, orchestra, processes_of, run_of, start, state_of, train

from orchestra.rehearsal.judge import judged
from orchestra.rehearsal.prepare_rehearsal import RehearsalPair, read_pair
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir

FAULTS = ("--fault", "sigkill@8:0", "--fault", "exception@20:1", "--steps", "30")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that was trained for a step."""
    folder = tmp_path_factory.mktemp("rehearsals")
    train(folder, "first", *TINY, "train.steps=1", "optim.warmup_steps=1")
    return folder


@pytest.fixture(scope="module")
def rehearsed(folder: Path) -> dict[str, Any]:
    """Return what a rehearsal of it printed as JSON."""
    found = json.loads(orchestra(folder, "rehearse", "first", *FAULTS, "--json", limit_s=200).stdout)
    assert isinstance(found, dict)
    return found


def pair_of(folder: Path) -> RehearsalPair:
    pair = read_pair(run_of(folder, "rehearsal-first-1-faults"))
    assert pair is not None
    return pair


def test_a_run_comes_back_from_what_is_rehearsed(folder: Path, rehearsed: dict[str, Any]) -> None:
    faults, keys = rehearsed["faults"], ("fault", "step", "rank", "decision", "passed")
    outcomes = [tuple(fault[key] for key in keys) for fault in faults]
    assert outcomes == [("sigkill", 8, 0, "restart", True), ("exception", 20, 1, "restart", True)]
    for fault in faults:
        assert sum(fault["stretches"].values()) == pytest.approx(fault["seconds"])
    assert rehearsed["passed"] is True
    assert all(check["passed"] for check in rehearsed["checks"]), rehearsed["checks"]
    pair = pair_of(folder)
    whole, with_faults = (read_config(run.config) for run in (pair.undisturbed, pair.with_faults))
    assert (whole.recovery.inject, len(with_faults.recovery.inject)) == ([], 2)
    assert (whole.train, whole.data, whole.model) == (with_faults.train, with_faults.data, with_faults.model)
    assert [len(events_of(run, "attempt_started")) for run in (pair.undisturbed, pair.with_faults)] == [1, 3]
    assert processes_of(pair.with_faults) == []
    # The run itself is left as it was.
    run = run_of(folder, "first")
    assert not run.rehearsal.exists()
    assert len(events_of(run, "attempt_started")) == 1
    state = state_of(folder, "first")
    assert (state["state"], state["step"]) == ("finished", 1)


def test_a_rehearsal_is_judged_again_and_read_by_people(folder: Path, rehearsed: dict[str, Any]) -> None:
    done = orchestra(folder, "rehearse", "rehearsal-first-1-faults")
    for words in ("sigkill@8", "start_again", "first comes back from what was rehearsed"):
        assert words in done.stdout
    refused = orchestra(folder, "rehearse", "rehearsal-first-1-faults", "--steps", "9", code=2)
    assert "is itself a rehearsal" in " ".join(refused.stderr.split())


def lose_a_row(run: RunDir) -> None:
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:-1]))


def train_a_sample_twice(run: RunDir) -> None:
    ledger = run.samples / "rank-00001.jsonl"
    last = json.loads(ledger.read_text().splitlines()[-1])
    last["sample_ids"][0][0] += 1
    with ledger.open("a") as file:
        file.write(json.dumps({**last, "attempt": 2}) + "\n")


def flip_a_byte(run: RunDir) -> None:
    newest = max(run.checkpoints.glob("step-*"))
    file = max(newest.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def take_another_state(run: RunDir) -> None:
    shutil.rmtree(max(run.checkpoints.glob("step-*")))


def forget_a_fault(run: RunDir) -> None:
    for file in run.events.iterdir():
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(line for line in lines if '"fault":"exception"' not in line))


def fail_at_last(run: RunDir) -> None:
    for file in run.events.iterdir():
        file.write_text(
            file.read_text().replace('"event":"finished"', '"event":"failed"').replace('"code":0', '"code":1')
        )


@pytest.mark.parametrize(
    ("harm", "claim"),
    [
        (lose_a_row, "no step is missing"),
        (train_a_sample_twice, "each sample was trained exactly once"),
        (flip_a_byte, "the newest checkpoint is intact"),
        (take_another_state, "the final state is the undisturbed run's, bit for bit"),
        (fail_at_last, "the run with faults finished"),
        (forget_a_fault, None),
    ],
)
def test_what_is_wrong_with_the_end_is_found_and_told_what_to_do(
    folder: Path,
    rehearsed: dict[str, Any],
    tmp_path: Path,
    harm: Callable[[RunDir], None],
    claim: str | None,
) -> None:
    pair = pair_of(folder)
    undisturbed, with_faults = (
        RunDir(shutil.copytree(run.path, tmp_path / run.name, symlinks=True))
        for run in (pair.undisturbed, pair.with_faults)
    )
    harm(with_faults)
    found = judged(RehearsalPair("first", undisturbed, with_faults))
    assert (found.is_passed, found.code) == (False, 1)
    wrong = [check for check in found.checks if check.is_true is False]
    if claim is None:
        assert ([recovery.is_passed for recovery in found.recoveries], wrong) == ([True, False], [])
    else:
        assert claim in [check.claim for check in wrong]
        assert all(check.advice for check in wrong)


def test_ctrl_c_breaks_a_rehearsal_off_and_leaves_nothing_running(
    folder: Path, rehearsed: dict[str, Any]
) -> None:
    words = ("rehearse", "first", "--steps", "100000", "--fault", "sigkill@50000:0")
    started = start(folder, "rehearsal-first-2-undisturbed", *words)
    started.wait_for(lambda: events_of(started.run, "training_started"))
    started.process.send_signal(signal.SIGINT)
    _, err = started.end(75)
    assert "the rehearsal was interrupted" in err
