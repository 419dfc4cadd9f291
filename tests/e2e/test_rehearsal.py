"""A real rehearsal on this machine, and what its judge says of runs that were tampered with afterwards."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TINY, events_of, eventually, orchestra, processes_of, start

from orchestra.rehearsal.judge import judged
from orchestra.rehearsal.prepare_rehearsal import RehearsalPair, read_pair
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir

FAULTS = ("--fault", "sigkill@8:0", "--fault", "exception@20:1", "--steps", "30")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run that was trained for a step."""
    folder = tmp_path_factory.mktemp("rehearsals")
    done = orchestra(folder, "run", *TINY, "run.name=first", "train.steps=1", "optim.warmup_steps=1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def rehearsed(folder: Path) -> dict[str, object]:
    """Return what a rehearsal of it printed as JSON."""
    done = orchestra(folder, "rehearse", "first", *FAULTS, "--json", limit_s=200)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def pair_of(folder: Path) -> RehearsalPair:
    pair = read_pair(RunDir(folder / "runs" / "rehearsal-first-1-faults"))
    assert pair is not None
    return pair


def test_a_run_comes_back_from_what_is_rehearsed(folder: Path, rehearsed: dict[str, object]) -> None:
    faults = rehearsed["faults"]
    assert isinstance(faults, list)
    told = [(it["fault"], it["step"], it["rank"], it["decision"], it["passed"]) for it in faults]
    assert told == [("sigkill", 8, 0, "restart", True), ("exception", 20, 1, "restart", True)]
    for it in faults:
        assert sum(it["stretches"].values()) == pytest.approx(it["seconds"])
    assert rehearsed["passed"] is True
    checks = rehearsed["checks"]
    assert isinstance(checks, list)
    assert all(it["passed"] for it in checks), checks
    pair = pair_of(folder)
    whole, hurt = (read_config(it.config) for it in (pair.undisturbed, pair.hurt))
    assert (whole.recovery.inject, len(hurt.recovery.inject)) == ([], 2)
    assert (whole.train, whole.data, whole.model) == (hurt.train, hurt.data, hurt.model)
    assert [len(events_of(it, "attempt_started")) for it in (pair.undisturbed, pair.hurt)] == [1, 3]
    assert processes_of(pair.hurt) == []


def test_the_run_itself_is_left_as_it_was(folder: Path, rehearsed: dict[str, object]) -> None:
    run = RunDir(folder / "runs" / "first")
    assert not run.rehearsal.exists()
    assert len(events_of(run, "attempt_started")) == 1
    (state,) = json.loads(orchestra(folder, "status", "first", "--json").stdout)
    assert (state["state"], state["step"]) == ("finished", 1)


def test_a_rehearsal_is_judged_again_and_read_by_people(folder: Path, rehearsed: dict[str, object]) -> None:
    done = orchestra(folder, "rehearse", "rehearsal-first-1-faults")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sigkill@8" in done.stdout
    assert "start_again" in done.stdout
    assert "first comes back from what was rehearsed" in done.stdout
    refused = orchestra(folder, "rehearse", "rehearsal-first-1-faults", "--steps", "9")
    assert (refused.returncode, "rehearse anew" in refused.stderr) == (2, True)


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
    file = max(newest.glob("*.safetensors"), key=lambda it: it.stat().st_size)
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
    ("harm", "said"),
    [
        (lose_a_row, "no step is missing"),
        (train_a_sample_twice, "each sample was trained exactly once"),
        (flip_a_byte, "the newest checkpoint is intact"),
        (take_another_state, "the final state is the undisturbed run's, bit for bit"),
        (fail_at_last, "the hurt run finished"),
        (forget_a_fault, None),
    ],
)
def test_what_is_wrong_with_the_end_is_found_and_told_what_to_do(
    folder: Path,
    rehearsed: dict[str, object],
    tmp_path: Path,
    harm: Callable[[RunDir], None],
    said: str | None,
) -> None:
    pair = pair_of(folder)
    copies = [
        shutil.copytree(it.path, tmp_path / it.name, symlinks=True) for it in (pair.undisturbed, pair.hurt)
    ]
    harm(RunDir(copies[1]))
    found = judged(RehearsalPair("first", *map(RunDir, copies)))
    assert (found.is_passed, found.code) == (False, 1)
    wrong = [it for it in found.checks if it.is_true is False]
    if said is None:
        assert ([it.is_passed for it in found.recoveries], wrong) == ([True, False], [])
    else:
        assert said in [it.claim for it in wrong]
        assert all(it.advice for it in wrong)


def test_a_dry_run_starts_nothing_and_what_cannot_be_is_refused(folder: Path) -> None:
    before = sorted((folder / "runs").iterdir())
    done = orchestra(folder, "rehearse", "fir", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "hang at rank 1" in done.stdout
    for words, told in (
        (("--fault", "node_down@3"), "only node"),
        (("train.steps=9",), "--steps"),
        (("run.name=other",), "named after RUN"),
        (("cluster.no_such=1",), "no_such"),
    ):
        refused = orchestra(folder, "rehearse", "first", *words)
        assert refused.returncode == 2, refused.stdout
        assert told in refused.stderr
    assert sorted((folder / "runs").iterdir()) == before


def test_ctrl_c_breaks_a_rehearsal_off_and_leaves_nothing_running(folder: Path) -> None:
    process = start(folder, "rehearse", "first", "--steps", "100000", "--fault", "sigkill@50000:0")
    runs = folder / "runs"

    def trains() -> bool:
        found = sorted(runs.glob("rehearsal-first-*-undisturbed"))
        return (
            len(found) > 0
            and found[-1].name != "rehearsal-first-1-undisturbed"
            and bool(events_of(RunDir(found[-1]), "training_started"))
        )

    assert eventually(trains, 90)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "broken off" in err
    assert processes_of(RunDir(sorted(runs.glob("rehearsal-first-*-undisturbed"))[-1])) == []
