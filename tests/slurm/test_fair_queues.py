"""Runs that begin after others (`submit --after`), and what `submit` says of cost, account and start."""

from __future__ import annotations

import json

import pytest
from sites import HELD, TINY, Site, SubmittedRun

from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow

ONE_RANK = "cluster.gpus_per_node=1"


def submit_after(cluster: Site, before: str, name: str, *words: str) -> SubmittedRun:
    small = (*TINY, ONE_RANK, "train.steps=2", "cluster.time_limit=10", *words)
    facts = json.loads(
        cluster.orchestra("submit", *small, f"run.name={name}", "--after", before, "--json").stdout
    )
    assert facts["after"]["awaited"] == [before]
    return SubmittedRun(cluster, RunDir(cluster.runs / name), str(facts["job"]))


def resumed(cluster: Site, name: str, *words: str) -> str:
    return str(json.loads(cluster.orchestra("resume", name, *words, "--json").stdout)["job"])


@pytest.mark.timeout(300)
def test_a_follower_waits_while_the_other_run_is_chained_stopped_and_resumed(cluster: Site) -> None:
    slow = "recovery.inject=[{at_step: 1, rank: all, fault: slow, seconds: 0.2, attempt: all}]"
    # Slurm calls the job of a stopped run COMPLETED then, which says nothing of the run.
    words = (ONE_RANK, "train.steps=1000", slow, "cluster.requeue=chain", "cluster.stop_exit_code=0")
    first = cluster.submit_run("ahead", *words)
    second = submit_after(cluster, "ahead", "behind")
    assert second.status()["cause"] == "waits until ahead is done"
    gpus = ("cluster.device=cuda", "cluster.nodes=2", "cluster.time_limit=30")
    told = cluster.orchestra("submit", *TINY, *gpus, "--after", "behi", "--dry-run").stderr
    assert f"# after   behind (job {second.job})" in told
    assert "# cost    2 GPU-hours for 2 nodes × 2 GPUs × 0:30:00" in told
    # Accounts are kept here, but priority/basic does not look at them.
    assert (
        "# share   not known: this cluster keeps no accounts of users, or does not schedule by them" in told
    )

    first.wait_for_step(2)
    cluster.run("scancel", "--signal=USR2", first.job)
    # The follower's job begins when the first one is over, sees that the run goes on, and leaves its place to
    # another.
    moved = second.wait_for_event("waits_on")
    chained = first.events("requeued")[0]["job"]
    assert (moved["instead_of"], moved["behind"], moved["after"]) == (second.job, [chained], ["ahead"])
    # It is resumed while its follower waits for something else too.
    cluster.run("scontrol", "hold", moved["job"])
    first.wait_for_attempt(1)
    said = cluster.orchestra("cancel", "ahead").stdout
    assert "behind begins after ahead and, unless that goes on or is done by then" in said
    assert cluster.ended(chained) == "COMPLETED"
    third = resumed(cluster, "ahead", f"train.steps={first.step() + 2}", "--accept-jump")
    cluster.run("scontrol", "release", moved["job"])
    second.wait(lambda: len(second.events("waits_on")) == 2, "it waits for the resumed run")
    last = second.events("waits_on")[-1]
    assert (last["instead_of"], last["behind"], second.attempt()) == (moved["job"], [third], -1)

    second.assert_job_ends("COMPLETED", "0:0", last["job"])
    assert [cluster.job_state(job) for job in (second.job, moved["job"])] == ["COMPLETED", "COMPLETED"]
    assert second.steps() == [1, 2]
    (start,) = second.events("attempt_started")
    assert (start["job"], start["attempt"]) == (last["job"], 0)
    assert start["time"] > first.events("finished")[-1]["time"]


def test_what_follows_a_run_that_failed_does_not_train_and_says_why(cluster: Site) -> None:
    nan = ("train.on_nonfinite=stop", "recovery.inject=[{at_step: 2, rank: 1, fault: nan}]")
    failing = cluster.submit_run("failing", ONE_RANK, "cluster.nodes=2", "train.steps=20", *nan)
    # So soon an end is believed here.
    soon = ("recovery.agent_timeout_s=5", "recovery.heartbeat_timeout_s=6")
    follower = submit_after(cluster, "failing", "follower", *soon)
    failing.assert_job_ends("FAILED", "93:0")
    state = failing.status()
    assert (state["state"], state["code"]) == ("failed", 93)
    follower.assert_job_ends("FAILED", "93:0")
    why = " ".join(cluster.orchestra("why", "follower").stdout.split())
    assert "it begins after failing, which failed (exit code 93: NonFiniteError)" in why
    assert "`orchestra resume failing` first, then `orchestra resume follower`" in why
    assert (failing.step() > 0, follower.attempt()) == (True, -1)
    cluster.refused(2, "after failing: it failed", "resume", "follower")
    waits = resumed(cluster, "failing", HELD)
    again = resumed(cluster, "follower")
    assert f"Dependency=afterany:{waits}" in cluster.run("scontrol", "show", "job", again).stdout
