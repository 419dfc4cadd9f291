"""Which job may train a run: the newest, and none beside another that lives."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_slurm import FakeSlurm

from launchers.slurm.this_job import JobTask
from orchestra.agents import rival_jobs
from orchestra.agents.rival_jobs import refusal
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir
from orchestra.submit.claims import take_next

TASK = JobTask("12", 0, 0, 2, "node1", None)
GONE = "slurm_load_jobs error: Invalid job id specified"


class Jobs(FakeSlurm):
    """A stand-in for `scontrol show job`: what it says of each job."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        known = f'for job; do :; done\ncat "{folder}/$job" && exit 0\ncat "{folder}/otherwise" >&2\nexit 1'
        self.put("scontrol", known)
        self.otherwise(GONE)

    def otherwise(self, words: str) -> None:
        (self.folder / "otherwise").write_text(words)

    def put_job(self, job: str, state: str, token: str = "orchestra:x") -> None:
        (self.folder / job).write_text(f"JobId={job} JobState={state} Reason=None Comment={token}\n")


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    monkeypatch.setattr(rival_jobs, "_POLL_S", 0.02)
    monkeypatch.setattr(rival_jobs, "_COMPLETING_S", 0.1)
    return Jobs(fake_slurm.folder)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "mine")
    run.control.mkdir(parents=True)
    return run


def recorded(run: RunDir, *jobs: str | None, task: int | None = None, cluster: str | None = None) -> None:
    others = {"task": task, "cluster": cluster}
    entries = [{"token": f"orchestra:{number}", "id": job, **others} for number, job in enumerate(jobs)]
    run.record.write_text(json.dumps({"jobs": entries}))


def began(
    run: RunDir, attempt: int, job: str | None = None, *, code: int | None = None, cluster: str | None = None
) -> EventWriter:
    events = EventWriter(run, node_writer(attempt, 0), attempt)
    facts = {} if job is None else {"job": job, "cluster": cluster}
    events.write("attempt_started", node=0, pid=1, **facts)
    if code is not None:
        events.write("failed", node=0, code=code)
    return events


def test_the_newest_job_trains_and_so_does_its_next_start(run: RunDir, slurm: Jobs) -> None:
    recorded(run, "11", "12")
    assert refusal(run, TASK) is None
    began(run, 0, "12")
    assert refusal(run, replace(TASK, restart=1)) is None


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "REQUEUE_HOLD"])
def test_an_older_job_steps_back_for_the_newest(run: RunDir, slurm: Jobs, state: str) -> None:
    recorded(run, "12", "15")
    slurm.put_job("15", state)
    words = refusal(run, replace(TASK, restart=1))
    assert words is not None
    assert "job 12 (start 1) does not train mine: job 15 was submitted for it later" in words


def test_an_older_job_never_trains_again_even_where_the_newest_is_over(run: RunDir, slurm: Jobs) -> None:
    recorded(run, "12", "15")
    slurm.put_job("15", "CANCELLED")
    assert "job 15 was submitted for it later" in str(refusal(run, TASK))
    recorded(run, "12", "16")
    assert "job 16" in str(refusal(run, TASK)), "Slurm has forgotten it"


def test_a_later_job_that_slurm_may_never_have_had_keeps_nobody_away(run: RunDir, slurm: Jobs) -> None:
    recorded(run, "12", None)
    assert refusal(run, TASK, quiet_s=0.1) is None


def test_the_same_number_on_another_cluster_is_another_job(run: RunDir, slurm: Jobs) -> None:
    here = replace(TASK, cluster="here")
    recorded(run, "12", cluster="there")
    assert "job 12 on cluster there was submitted for it later" in str(refusal(run, here))
    recorded(run, "12", cluster="Here")
    assert refusal(run, here) is None
    slurm.put_job("12", "RUNNING", "orchestra:0")
    recorded(run, "12", cluster="there")
    assert refusal(run, here) is None, "its token says that clusters work together here"


@pytest.mark.parametrize("cluster", ["there", "here", None])
def test_an_attempt_of_a_job_that_slurm_does_not_know_is_watched(
    run: RunDir, slurm: Jobs, cluster: str | None
) -> None:
    here = replace(TASK, cluster="here")
    recorded(run, "12")
    began(run, 0, "77", cluster=cluster)
    assert refusal(run, here, quiet_s=0.1) is None
    timer = threading.Timer(0.2, run.metrics.write_text, ("{}\n",))
    timer.start()
    assert "leads attempt 0" in str(refusal(run, here, quiet_s=30))
    timer.join()


def test_a_forgotten_job_whose_files_are_long_still_is_not_waited_for(run: RunDir, slurm: Jobs) -> None:
    recorded(run, "12")
    began(run, 0, "77")
    long_ago = time.time() - 3600
    for file in run.events.iterdir():
        os.utime(file, (long_ago, long_ago))
    assert refusal(run, TASK, quiet_s=3600) is None


def test_a_job_may_start_before_its_number_is_recorded(run: RunDir, slurm: Jobs) -> None:
    recorded(run, "11", None)
    slurm.put_job("12", "RUNNING", "orchestra:1")
    assert refusal(run, TASK, quiet_s=0.1) is None


def test_a_task_of_an_array_is_known_by_its_token_and_its_number(run: RunDir, slurm: Jobs) -> None:
    recorded(run, None, task=3)
    slurm.put_job("20_3", "RUNNING", "orchestra:0")
    assert refusal(run, replace(TASK, job="20_3")) is None
    recorded(run, "20", "21", task=3)
    slurm.put_job("21_3", "RUNNING")
    assert "job 21_3" in str(refusal(run, replace(TASK, job="20_3")))
    assert refusal(run, replace(TASK, job="21_3")) is None


def test_an_attempt_of_another_job_that_runs_is_left_alone(run: RunDir, slurm: Jobs) -> None:
    recorded(run, "12")
    began(run, 3, "9")
    slurm.put_job("9", "RUNNING")
    assert "job 9 trains it, attempt 3" in str(refusal(run, TASK))
    slurm.put_job("9", "NODE_FAIL")
    assert refusal(run, TASK) is None
    began(run, 4, "10", code=75)
    slurm.put_job("10", "RUNNING")
    assert refusal(run, TASK) is None, "its verdict stands"


@pytest.mark.parametrize("leader", ["9", None])
def test_where_nobody_can_say_growing_files_do(run: RunDir, slurm: Jobs, leader: str | None) -> None:
    recorded(run, "12")
    slurm.otherwise("slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    began(run, 0, leader)
    assert refusal(run, TASK, quiet_s=0.1) is None
    timer = threading.Timer(0.2, run.metrics.write_text, ("{}\n",))
    timer.start()
    assert "and the run's files grow" in str(refusal(run, TASK, quiet_s=30))
    timer.join()


def test_a_claim_of_somebody_who_said_nothing_yet_is_waited_for(run: RunDir, slurm: Jobs) -> None:
    recorded(run, "12")
    take_next(run)
    assert refusal(run, TASK, quiet_s=0.1) is None
    timer = threading.Timer(0.2, began, (run, 0))
    timer.start()
    assert "attempt 0 was claimed by another process" in str(refusal(run, TASK, quiet_s=30))
    timer.join()
