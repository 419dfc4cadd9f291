"""srun fails, before the agents have come or while they train: the run goes on, and ends as it must."""

from __future__ import annotations

import os
import signal

import pytest
from sites import Site, wait_until
from test_submit import ended, named, said, state_of, submitted

from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_noticed", [False, True], ids=["unnoticed", "noticed"])
def test_a_node_lost_before_the_step_began_costs_the_run_one_job(cluster: Site, is_noticed: bool) -> None:
    # The set-up lines are what a job does between its nodes' allocation and its step.
    late = ("cluster.nodes=2", "cluster.gpus_per_node=1", "cluster.setup=[sleep 8]", "train.steps=10")
    name = "noticed" if is_noticed else "unnoticed"
    run, job = submitted(cluster, name, *late)
    is_on = lambda: cluster.run("squeue", "--noheader", "--jobs", job, "--states", "R").stdout.strip()  # noqa: E731
    wait_until(is_on, "the job runs")
    listed = cluster.run("squeue", "--noheader", "--jobs", job, "--format=%N").stdout.strip()
    hosts = cluster.run("scontrol", "show", "hostnames", listed).stdout.split()
    cluster.devcluster("fail-node", hosts[1])
    if is_noticed:
        # As Slurm does after SlurmdTimeout: the job no longer has it when srun asks for the step.
        words = (f"nodename={hosts[1]}", "state=down", "reason=lost")
        cluster.devcluster("exec", "controller", "--", "scontrol", "update", *words)
    wait_until(lambda: named(run, "requeued"), f"it goes on in another job: {said(run)}", 120)
    (requeued,) = named(run, "requeued")
    assert (requeued["rule"], requeued["after"], requeued["exclude"]) == ("step_not_started", job, [hosts[1]])
    wait_until(lambda: state_of(cluster, name)["state"] == "finished", said(run), 120)
    (started,) = named(run, "attempt_started")
    assert hosts[1] not in started["hosts"]
    assert (started["job"], started["attempt"]) == (requeued["job"], 0)


def training(cluster: Site, name: str, *overrides: str) -> tuple[RunDir, str, list[str]]:
    """Return a run over two nodes that trains, its job and its hosts; its first attempt takes its time."""
    length = ("train.steps=150", "checkpoint.every_steps=20", "cluster.nodes=2", "cluster.gpus_per_node=1")
    slow = "recovery.inject=[{at_step: 1, rank: 0, fault: slow, seconds: 0.1}]"
    run, job = submitted(cluster, name, *length, slow, *overrides)
    wait_until(lambda: named(run, "checkpoint_committed"), f"it trains: {said(run)}")
    (started,) = named(run, "attempt_started")
    return run, job, started["hosts"]


@pytest.mark.timeout(240)
def test_an_srun_that_is_killed_ends_nothing(cluster: Site) -> None:
    run, job, hosts = training(cluster, "without-srun")
    sruns = [pid for pid, line in cluster.processes_on(hosts[0]).items() if line.startswith("srun ")]
    for pid in sruns:
        os.kill(pid, signal.SIGKILL)
    assert sruns
    wait_until(lambda: named(run, "finished"), f"it finishes: {said(run)}", 120)
    assert ended(cluster, job) == "COMPLETED", said(run)
    assert len(named(run, "attempt_started")) == 1


@pytest.mark.timeout(300)
def test_a_node_that_boots_again_at_once_costs_the_run_one_job(cluster: Site) -> None:
    """srun then gives the step up on all nodes, `--no-kill` or not."""
    run, job, hosts = training(cluster, "rebooted", "cluster.spare_nodes=1")
    cluster.devcluster("fail-node", hosts[1])
    cluster.devcluster("heal-node", hosts[1])
    wait_until(lambda: named(run, "finished"), f"it finishes: {said(run)}", 200)
    (requeued,) = named(run, "requeued")
    assert (requeued["rule"], requeued["after"]) == ("step_lost", job)
    wait_until(lambda: state_of(cluster, "rebooted")["state"] == "finished", said(run))
