"""Runs that go on by themselves after a time limit, a preemption and a warning that came too early, or by
`orchestra resume`: as a new job, once, or in the foreground. And jobs that must not train a run.
"""

from __future__ import annotations

import json

import pytest
from matrix_oracle import losses
from sites import ENDLESS, HELD, TINY, Site, SubmittedRun, wait_until

from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir
from slurm.cluster.hosts import start_ticks

pytestmark = pytest.mark.slow

# In the first start of the job the second node comes too late for anything.
LATE = """#!/bin/sh
test "$SLURM_NODEID" = 0 || test "${SLURM_RESTART_COUNT:-0}" -gt 0 || sleep 600
exec "$@"
"""


def at_work(cluster: Site) -> set[tuple[int, int | None]]:
    """Return the processes of jobs, each by its number and its start: numbers come again."""
    return {(pid, start_ticks(pid)) for processes in cluster.busy_nodes().values() for pid in processes}


@pytest.mark.timeout(360)
def test_a_run_survives_its_time_limit_bit_for_bit(cluster: Site) -> None:
    limited = ("cluster.nodes=3", "cluster.time_limit=2", "recovery.stop_timeout_s=5")
    # One slow rank, so that the limit comes in the midst whatever the machine's speed: no job of two minutes
    # has time for so many steps of two seconds.
    slow = "recovery.inject=[{at_step: 5, rank: 1, fault: slow, seconds: 2, steps: 100000}]"
    run = cluster.submit_run("limited", "train.steps=100", *limited, slow)
    run.wait_for_step(3)
    first = at_work(cluster)
    # The same layout of six ranks, uninterrupted, while Slurm counts.
    words = ("run.name=whole", "train.steps=100", "cluster.gpus_per_node=6")
    with cluster.start_orchestra("run", *TINY, *words) as uninterrupted:
        run.wait_for_event("requeued", 110)
        # A slow machine would reach the same limit again.
        cluster.start_again_now(run.job, "TimeLimit=30")
        run.wait_for_attempt(1)
        assert not first & at_work(cluster)
        _, errors = uninterrupted.communicate()
    assert uninterrupted.returncode == 0, errors
    run.assert_job_ends("COMPLETED")
    (event,) = run.events("requeued")
    assert (event["how"], event["reason"], event["job"]) == ("requeue", "time_limit", run.job)
    starts = [(start["attempt"], start["job"], start["job_start"]) for start in run.events("attempt_started")]
    assert starts == [(0, run.job, 0), (1, run.job, 1)]
    (restored,) = run.events("restored")
    assert 2 < restored["step"] < 100
    assert losses(run.dir) == losses(RunDir(cluster.runs / "whole"))
    assert run.status()["attempts"] == 2


def test_a_chained_job_goes_on_and_the_older_one_may_not_train_beside_it(cluster: Site) -> None:
    run = cluster.submit_run("chained", *ENDLESS, "cluster.requeue=chain")
    # Else it could not be started again by hand.
    cluster.run("scontrol", "update", f"JobId={run.job}", "Requeue=1")
    run.wait_for_step(1)
    cluster.run("scancel", "--signal=USR2", run.job)
    run.assert_job_ends("FAILED", "75:0")
    (event,) = run.events("requeued")
    second = event["job"]
    assert (event["how"], event["after"], second != run.job) == ("chain", run.job, True)
    run.wait_for_steps(1)
    cluster.run("scontrol", "requeue", run.job)
    cluster.start_again_now(run.job)
    run.assert_job_ends("FAILED", "93:0")
    (log,) = run.dir.job_logs.glob(f"{run.job}_0_log.out")
    run.wait(lambda: f"job {second} was submitted for it later" in log.read_text(), "its log says why")
    state = run.status()
    assert (state["state"], state["attempts"], state["job"]) == ("running", 2, second)


def test_preempted_and_requeued_by_hand_it_goes_on_until_it_is_cancelled(cluster: Site) -> None:
    share = "cluster.slurm_extra={nodelist: node1, exclusive: true}"
    run = cluster.submit_run("preempted", *ENDLESS, share, "cluster.stop_exit_code=0")
    run.wait_for_step(1)
    urgent = ("--partition=urgent", "--nodelist=node1", "--exclusive", "--wrap=sleep 2", "--output=/dev/null")
    cluster.submit(*urgent)
    wait_until(lambda: cluster.job_state(run.job) == "PENDING", "the job is in the queue again")
    before = run.step()
    cluster.start_again_now(run.job)
    (event,) = run.events("requeued")
    assert (event["how"], event["reason"]) == ("requeue", "preempted"), run.logs()
    run.wait_for_steps(1)
    assert run.events("restored")[-1]["step"] == before

    first = at_work(cluster)
    cluster.run("scontrol", "requeue", run.job)
    cluster.start_again_now(run.job)
    run.wait_for_attempt(2)
    run.wait_for_steps(1)
    assert not first & at_work(cluster)
    assert [start["job_start"] for start in run.events("attempt_started")] == [0, 1, 2]

    cluster.orchestra("cancel", "preempted")
    run.assert_job_ends("COMPLETED", "0:0")
    state = run.status()
    assert (state["state"], state["code"]) == ("stopped", 75)
    assert [event["reason"] for event in run.events("requeued")] == ["preempted", "requeued in Slurm"]


@pytest.mark.timeout(240)
def test_a_cancelled_run_whose_job_slurm_starts_again_does_not_train(cluster: Site) -> None:
    run = cluster.submit_run("cancelled-and-requeued", *ENDLESS)
    run.wait_for_step(1)
    cluster.orchestra("cancel", "cancelled-and-requeued")
    cluster.run("scontrol", "requeue", run.job)
    cluster.start_again_now(run.job)
    run.assert_job_ends("FAILED", "75:0")
    assert [start["attempt"] for start in run.events("attempt_started")] == [0]
    state = run.status()
    assert (state["state"], "was cancelled" in state["cause"]) == ("stopped", True)


@pytest.mark.timeout(150)
def test_a_warning_before_the_first_attempt_puts_the_job_back_into_the_queue(cluster: Site) -> None:
    script = cluster.shared / "late.sh"
    script.write_text(LATE)
    script.chmod(0o755)
    shape = ("cluster.nodes=2", "cluster.gpus_per_node=1", "train.steps=5")
    run = cluster.submit_run("too-late", *shape, f"cluster.container.prefix={script}")
    member = run.dir.control / f"job-{run.job}.start-0" / "member-000.json"
    run.wait(member.exists, "the first node waits for the other one")
    cluster.run("scancel", "--signal=USR2", run.job)
    requeued = run.wait_for_event("requeued")
    cluster.start_again_now(run.job)
    run.assert_job_ends("COMPLETED")
    assert (requeued["how"], requeued["reason"]) == ("requeue", "time_limit")
    assert len(run.events("requeued")) == 1
    (start,) = run.events("attempt_started")
    assert (start["attempt"], start["job_start"]) == (0, 1)
    assert run.status()["state"] == "finished"


@pytest.mark.timeout(240)
def test_a_cancelled_run_goes_on_as_a_new_job_on_another_number_of_nodes(cluster: Site) -> None:
    run = cluster.submit_run("again", *ENDLESS, "cluster.nodes=2", "checkpoint.every_steps=1000")
    cluster.refused(2, "", "resume", "again")
    run.wait_for_step(1)
    cluster.orchestra("cancel", "again")
    run.assert_job_ends("FAILED")
    step = run.step()
    script = cluster.orchestra("resume", "again", "cluster.nodes=1", "--dry-run").stdout
    assert "#SBATCH --nodes=1\n" in script
    assert read_config(run.dir.config).cluster.nodes == 2

    goes_on = ("resume", "again", "cluster.nodes=1", f"train.steps={step + 5}", "--accept-jump", HELD)
    facts = json.loads(cluster.orchestra(*goes_on, "--json").stdout)
    second = facts["job"]
    assert (facts["attempt"], facts["checkpoint_step"]) == (1, step)
    assert run.status()["state"] == "queued"
    cluster.refused(2, f"job {second} waits", "resume", "again")
    assert read_config(run.dir.config_of_attempt(0)).cluster.nodes == 2

    cluster.run("scontrol", "release", second)
    run.assert_job_ends("COMPLETED", job=second)
    assert [start["nodes"] for start in run.events("attempt_started")] == [2, 1]
    assert run.events("restored")[-1]["step"] == step
    assert run.steps() == list(range(1, step + 6))
    assert "is finished" in cluster.orchestra("resume", "again").stdout

    here = ("cluster=local", "cluster.gpus_per_node=1", "cluster.device=cpu", f"train.steps={step + 7}")
    cluster.orchestra("resume", "again", *here)
    assert run.step() == step + 7
    jobs = json.loads(run.dir.record.read_text())["jobs"]
    assert [job["id"] for job in jobs] == [run.job, second]


def test_a_run_of_this_machine_goes_on_in_a_job_and_never_without_slurms_word(cluster: Site) -> None:
    run = SubmittedRun(cluster, cluster.train_here("local", "train.steps=2"), job="")
    cpu = ("cluster=slurm", "cluster.device=cpu", "cluster.gpus_per_node=2", HELD)
    facts = json.loads(
        cluster.orchestra("resume", "local", "train.steps=4", "--accept-jump", *cpu, "--json").stdout
    )
    before = run.dir.record.read_text()
    cluster.refused(1, "nothing was done", "resume", "local", **cluster.unreachable_controller())
    assert run.dir.record.read_text() == before

    # Taken out of the queue before it began.
    cluster.run("scancel", facts["job"])
    wait_until(lambda: cluster.job_state(facts["job"]) == "CANCELLED", "the job is cancelled")
    again = cluster.orchestra("resume", "local", "cluster.slurm_extra.hold=false", "--json").stdout
    run.assert_job_ends("COMPLETED", job=json.loads(again)["job"])
    assert run.step() == 4
