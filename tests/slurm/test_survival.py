"""However a run ends, no process of it is left on any host; Slurm's own failures do not touch training."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from sites import Site, wait_until
from test_submit import PACE, ended, named, orchestra, said, state_of, submitted
from wandb_records import recorded_rows

from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow

# For ever, as far as a test is concerned.
LONG = ("train.steps=1000000", "checkpoint.every_steps=50", PACE)
# A host's own first process and its daemon.
OF_THE_HOST = ("slurm.cluster.host", "slurmd -D")


def at_work(cluster: Site) -> dict[str, dict[int, str]]:
    """Return the processes of jobs on each node that has any, by the machine's numbers."""
    found = {}
    for node in cluster.layout.nodes:
        processes = cluster.processes_on(node).items()
        busy = {pid: line for pid, line in processes if line and not any(own in line for own in OF_THE_HOST)}
        if busy:
            found[node] = busy
    return found


def hosts_with(cluster: Site, words: str) -> set[str]:
    """Return the nodes on which a process has these words on its command line."""
    return {host for host, busy in at_work(cluster).items() if any(words in line for line in busy.values())}


def wait_until_clean(cluster: Site) -> None:
    """Wait until no node has a process of any job; ranks have ten seconds when they are ended."""
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not at_work(cluster), "no process of a job is left", within_s=30)
    assert at_work(cluster) == {}


def num_steps(run: RunDir) -> int:
    return int(max((row["step"] for row in read_metrics(run)), default=0))


def wait_for_steps(run: RunDir, count: int) -> None:
    """Wait until so many more steps are trained than now."""
    goal = num_steps(run) + count
    wait_until(lambda: num_steps(run) >= goal, f"{run.name} trains {count} steps")


@contextlib.contextmanager
def silent_controller(cluster: Site) -> Iterator[None]:
    """Stop slurmctld as a hanging file server would stop it: its port is open and nothing answers."""
    (pid,) = [pid for pid, line in cluster.processes_on("controller").items() if "slurmctld" in line]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_silent_controller_and_requeue_and_a_signal_to_one_agent(cluster: Site) -> None:
    """One run of three nodes: Slurm goes silent, then starts it again, then one agent is told to stop."""
    run, job = submitted(cluster, "survivor", "cluster.nodes=3", "cluster.gpus_per_node=1", *LONG)
    wait_until(lambda: num_steps(run) > 2, "the run trains")
    for words in ("torch.distributed.run", "orchestra.agents", "orchestra.train"):
        assert len(hosts_with(cluster, words)) == 3, at_work(cluster)
    first = {pid for busy in at_work(cluster).values() for pid in busy}

    with silent_controller(cluster):
        told = orchestra(cluster, "status", "survivor")
        assert "note: squeue" in told.stderr
        assert "running" in told.stdout
        wait_for_steps(run, 20)
    wait_until(lambda: cluster.job_state(job) == "RUNNING", "the controller answers")
    assert "note:" not in orchestra(cluster, "status", "survivor").stderr
    assert [event["attempt"] for event in named(run, "attempt_started")] == [0]

    cluster.run("scontrol", "requeue", job)
    wait_until(
        lambda: not first & {pid for busy in at_work(cluster).values() for pid in busy}, "all are gone"
    )
    wait_until(lambda: cluster.job_state(job) == "PENDING", "the job waits")
    cluster.devcluster("exec", "controller", "--", "scontrol", "update", f"JobId={job}", "StartTime=now")
    wait_until(lambda: len(named(run, "attempt_started")) == 2, "the second attempt starts")
    wait_for_steps(run, 3)
    assert not first & {pid for busy in at_work(cluster).values() for pid in busy}

    agents = {
        host: pid
        for host, busy in at_work(cluster).items()
        for pid, line in busy.items()
        if "orchestra.agents" in line and "srun" not in line
    }
    os.kill(agents[max(agents)], signal.SIGTERM)
    wait_until_clean(cluster)
    assert state_of(cluster, "survivor")["state"] == "stopped", said(run)


def test_scancel_and_orchestra_cancel_leave_no_process(cluster: Site) -> None:
    """Two runs share two nodes: one is ended by Slurm and the other trains on, until it is ended by us."""
    overrides = ("cluster.nodes=2", "cluster.gpus_per_node=1", *LONG)
    (by_slurm, first_job), (by_us, second_job) = (
        submitted(cluster, name, *overrides) for name in ("by-slurm", "by-us")
    )
    for run in (by_slurm, by_us):
        wait_until(lambda run=run: num_steps(run) > 2, f"{run.name} trains")  # type: ignore[misc]
        assert len(hosts_with(cluster, str(run.path))) == 2
    cluster.run("scancel", first_job)
    assert ended(cluster, first_job) == "CANCELLED"
    wait_until(lambda: not hosts_with(cluster, str(by_slurm.path)), "no process of it is left", within_s=30)
    wait_for_steps(by_us, 3)
    orchestra(cluster, "cancel", "by-us")
    assert ended(cluster, second_job) == "FAILED", said(by_us)
    wait_until_clean(cluster)
    state = state_of(cluster, "by-us")
    assert (state["state"], state["checkpoint_step"]) == ("stopped", num_steps(by_us)), said(by_us)
    assert state_of(cluster, "by-slurm")["state"] in ("stopped", "cancelled"), said(by_slurm)


def test_run_without_accounting_trains_and_its_wandb_run_is_read_back(site_without_accounting: Site) -> None:
    site = site_without_accounting
    assert "disabled" in site.run("sacct", check=False).stderr
    overrides = ("cluster.nodes=2", "cluster.gpus_per_node=1", "train.steps=4", "wandb.mode=offline")
    # On a busy machine wandb takes long before it writes anything.
    run, job = submitted(site, "unaccounted", *overrides, "wandb.finish_timeout_s=90")
    assert ended(site, job) == "COMPLETED", said(run)
    wait_until(lambda: not at_work(site), "no process of the job is left", within_s=30)
    state = state_of(site, "unaccounted")
    assert (state["state"], state["step"]) == ("finished", 4)
    assert [event["cause"] for event in named(run, "wandb_failed")] == []
    (file,) = run.wandb.glob("offline-run-*/*.wandb")
    kept, rows = recorded_rows(file), read_metrics(run)
    assert [row["step"] for row in kept] == [1, 2, 3, 4]
    assert [row["loss"] for row in kept] == [row["loss"] for row in rows]
