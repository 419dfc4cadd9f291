"""A torchrun that no longer does anything holds neither its node nor the run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commands import TINY, events_of, eventually, processes_of, start, trained_rows

from launchers import processes
from orchestra.run.paths import RunDir

# Long enough to be stopped in the midst of it, and over soon.
STEPS = ("train.steps=300", "checkpoint.every_steps=50")


def torchrun_of(run: RunDir) -> processes.Process:
    (found,) = processes.with_words("torch.distributed.run", str(run.path))
    return found


def ranks_of(run: RunDir) -> list[processes.Process]:
    others = {torchrun_of(run), *processes.with_words("-S", str(run.path))}
    return [it for it in processes.with_words("orchestra.train", str(run.path)) if it not in others]


@pytest.mark.parametrize("warm", ["true", "false"])
def test_ranks_that_finish_under_a_stopped_torchrun_end_the_run_well(tmp_path: Path, warm: str) -> None:
    words = ("run", "run.name=unheard", *TINY, *STEPS, f"recovery.warm_start={warm}")
    process = start(tmp_path, *words)
    run = RunDir(tmp_path / "runs" / "unheard")
    assert eventually(lambda: len(trained_rows(run)) > 2, 90)
    os.kill(torchrun_of(run).pid, signal.SIGSTOP)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    assert "torchrun is ended: all its ranks ended" in out + err
    assert trained_rows(run)[-1][0] == 300
    assert events_of(run, "attempt_started", 1) == []
    assert processes_of(run) == []


def test_a_rank_killed_under_a_stopped_torchrun_is_followed_by_another_attempt(tmp_path: Path) -> None:
    process = start(tmp_path, "run", "run.name=deaf", *TINY, *STEPS, "cluster.gpus_per_node=1")
    run = RunDir(tmp_path / "runs" / "deaf")
    assert eventually(lambda: len(trained_rows(run)) > 2, 90)
    (rank,) = ranks_of(run)
    os.kill(torchrun_of(run).pid, signal.SIGSTOP)
    os.kill(rank.pid, signal.SIGKILL)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, out + err
    assert len(events_of(run, "attempt_started", 1)) == 1
    assert processes_of(run) == []
