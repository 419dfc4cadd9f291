"""What many tests of the agents begin with: a run, and a cluster of stand-ins on which it is a job."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_in_slurm import Slurm, record
from support.fake_slurm import FakeSlurm

from launchers.slurm import sbatch, this_job
from orchestra.agents import rival_jobs, slurm_job, srun_failed
from orchestra.run.paths import RunDir
from orchestra.submit import job_record


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    for module in (sbatch, job_record):
        monkeypatch.setattr(module, "_LOOK_AGAIN_S", (0.0, 0.0))
    monkeypatch.setattr(slurm_job, "_RELEASE_PAUSE_S", 0.0)
    monkeypatch.setattr(this_job, "_PAUSE_S", 0.0)
    monkeypatch.setattr(srun_failed, "_LOOK_S", 0.3)
    monkeypatch.setattr(rival_jobs, "_POLL_S", 0.02)
    monkeypatch.setattr(rival_jobs, "_COMPLETING_S", 0.1)
    return Slurm(fake_slurm.folder)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "mine")
    run.control.mkdir(parents=True)
    record(run)
    return run
