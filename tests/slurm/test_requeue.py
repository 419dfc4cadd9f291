"""Runs that go on by themselves behind a time limit and a preemption, and jobs that must not train a run."""

from __future__ import annotations

import sys

import pytest
from sites import ROOT, Site, wait_until
from test_submit import PACE, TINY, ended, exit_code, named, orchestra, said, state_of, submitted

from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow

ENDLESS = ("train.steps=1000000", PACE)


def trains_behind(run: RunDir, step: int) -> None:
    """Wait until a run has trained steps after `step`."""
    wait_until(
        lambda: any(row["step"] > step for row in read_metrics(run)), f"{run.name} trains: {said(run)}"
    )


def last_step(run: RunDir) -> int:
    return int(list(read_metrics(run))[-1]["step"])


def starts_now(cluster: Site, job: str) -> None:
    """Wait until a job was put back into the queue, and spare it the time that Slurm holds it there."""
    wait_until(lambda: cluster.job_state(job) == "PENDING", f"job {job} is in the queue again")
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now", check=False)


@pytest.mark.timeout(240)
def test_a_run_survives_its_time_limit_bit_for_bit(cluster: Site) -> None:
    limited = ("cluster.nodes=3", "cluster.time_limit=2", "recovery.stop_timeout_s=5")
    # One slow rank, so that the limit comes in the midst whatever the machine's speed.
    slow = "recovery.inject=[{at_step: 5, rank: 1, fault: slow, seconds: 2, steps: 100000}]"
    run, job = submitted(cluster, "limited", "train.steps=300", *limited, slow)
    trains_behind(run, 2)
    # The same layout of six ranks, uninterrupted, while Slurm counts.
    here = ("run", *TINY, "run.name=whole", "train.steps=300", "cluster.gpus_per_node=6")
    words = (sys.executable, "-m", "orchestra", *here)
    cluster.run(*words, timeout_s=120, PYTHONPATH=str(ROOT))
    wait_until(lambda: named(run, "requeued"), f"the limit ends the attempt: {said(run)}")
    starts_now(cluster, job)
    assert ended(cluster, job) == "COMPLETED", said(run)
    (event,) = named(run, "requeued")
    assert (event["how"], event["reason"], event["job"]) == ("requeue", "time_limit", job)
    starts = named(run, "attempt_started")
    assert [(start["attempt"], start["job"], start["job_start"]) for start in starts] == [
        (0, job, 0),
        (1, job, 1),
    ]
    (restored,) = named(run, "restored")
    assert 2 < restored["step"] < 300
    whole = RunDir(run.path.with_name("whole"))
    losses = [[(row["step"], row["loss"]) for row in read_metrics(it)] for it in (run, whole)]
    assert losses[0] == losses[1]
    assert state_of(cluster, "limited")["attempts"] == 2


def test_a_chained_job_goes_on_and_the_older_one_may_not_train_beside_it(cluster: Site) -> None:
    run, first = submitted(cluster, "chained", *ENDLESS, "cluster.requeue=chain")
    # Else it could not be started again by hand.
    cluster.run("scontrol", "update", f"JobId={first}", "Requeue=1")
    trains_behind(run, 0)
    cluster.run("scancel", "--signal=USR2", first)
    assert ended(cluster, first) == "FAILED", said(run)
    assert exit_code(cluster, first) == "75:0"
    (event,) = named(run, "requeued")
    second = event["job"]
    assert (event["how"], event["after"], second != first) == ("chain", first, True)
    trains_behind(run, last_step(run))
    cluster.run("scontrol", "requeue", first)
    starts_now(cluster, first)
    assert ended(cluster, first) == "FAILED"
    assert exit_code(cluster, first) == "93:0"
    (log,) = run.job_logs.glob(f"{first}_0_log.out")
    wait_until(lambda: f"job {second} was submitted for it later" in log.read_text(), "its log says why")
    state = state_of(cluster, "chained")
    assert (state["state"], state["attempts"], state["job"]) == ("running", 2, second)


def test_preempted_and_requeued_by_hand_it_goes_on_until_it_is_cancelled(cluster: Site) -> None:
    where = "cluster.slurm_extra={nodelist: node1, exclusive: true}"
    run, job = submitted(cluster, "preempted", *ENDLESS, where)
    trains_behind(run, 0)
    urgent = ("--partition=urgent", "--nodelist=node1", "--exclusive", "--wrap=sleep 2", "--output=/dev/null")
    cluster.submit(*urgent)
    starts_now(cluster, job)
    (event,) = named(run, "requeued")
    assert (event["how"], event["reason"]) == ("requeue", "preempted"), said(run)
    before = last_step(run)
    trains_behind(run, before)
    assert named(run, "restored")[-1]["step"] == before

    cluster.run("scontrol", "requeue", job)
    starts_now(cluster, job)
    wait_until(lambda: len(named(run, "attempt_started")) == 3, "the third attempt starts")
    trains_behind(run, last_step(run))
    assert [start["job_start"] for start in named(run, "attempt_started")] == [0, 1, 2]

    orchestra(cluster, "cancel", "preempted")
    assert ended(cluster, job) == "FAILED", said(run)
    assert exit_code(cluster, job) == "75:0"
    assert state_of(cluster, "preempted")["state"] == "stopped"
    assert [event["reason"] for event in named(run, "requeued")] == ["preempted", "requeued in Slurm"]
