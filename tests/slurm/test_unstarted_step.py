"""A node is lost while Slurm starts a job's step: srun gives the step up, and the run goes on without it."""

from __future__ import annotations

import pytest
from sites import Site, wait_until
from test_submit import named, said, state_of, submitted

pytestmark = pytest.mark.slow


@pytest.mark.timeout(240)
@pytest.mark.parametrize("is_noticed", [False, True], ids=["unnoticed", "noticed"])
def test_a_node_lost_before_the_step_began_costs_the_run_one_job(cluster: Site, is_noticed: bool) -> None:
    # The set-up lines are what a job does between its nodes' allocation and its step.
    late = ("cluster.nodes=2", "cluster.setup=[sleep 8]", "train.steps=10")
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
