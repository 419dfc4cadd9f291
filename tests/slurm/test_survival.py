"""However a run ends, no process of it is left on any host; Slurm's own failures do not touch training."""

from __future__ import annotations

import os
import signal

import pytest
from sites import ENDLESS, Site, wait_until
from wandb_records import recorded_rows

from orchestra.run.metrics_file import read_metrics
from tests.support import listening

pytestmark = pytest.mark.slow

LONG = (*ENDLESS, "cluster.gpus_per_node=1", "checkpoint.every_steps=50")


def test_silent_controller_and_a_signal_to_one_agent(cluster: Site) -> None:
    """One run of two nodes: Slurm goes silent and comes back, then one agent is told to stop."""
    run = cluster.submit_run("survivor", "cluster.nodes=2", *LONG)
    run.wait_for_step(3)
    for words in ("launchers.bound_torchrun", "orchestra.agents", "orchestra.train"):
        assert len(cluster.nodes_with(words)) == 2, cluster.busy_nodes()
    ours = [pid for busy in cluster.busy_nodes().values() for pid, line in busy.items() if "srun" not in line]
    heard = {address for pid in ours for address in listening.addresses(pid).values()}
    # torchrun, rank 0's store, ring and gloo: each at its node's own address. srun itself listens at all.
    assert len(heard) == 2, heard
    assert "*" not in heard

    with cluster.silent_controller():
        status = cluster.orchestra("status", "survivor")
        assert "note: squeue" in status.stderr
        assert "running" in status.stdout
        run.wait_for_steps(20)
    wait_until(lambda: cluster.job_state(run.job) == "RUNNING", "the controller answers")
    assert "note:" not in cluster.orchestra("status", "survivor").stderr
    assert [event["attempt"] for event in run.events("attempt_started")] == [0]

    os.kill(run.agent_pid(max(run.hosts())), signal.SIGTERM)
    cluster.wait_until_clean()
    assert run.status()["state"] == "stopped", run.logs()


def test_scancel_and_orchestra_cancel_leave_no_process(cluster: Site) -> None:
    """Two runs share two nodes: one is ended by Slurm and the other trains on, until it is ended by us."""
    by_slurm, by_us = (cluster.submit_run(name, "cluster.nodes=2", *LONG) for name in ("by-slurm", "by-us"))
    for run in (by_slurm, by_us):
        run.wait_for_step(3)
        assert len(cluster.nodes_with(str(run.dir.path))) == 2
    cluster.run("scancel", by_slurm.job)
    by_slurm.assert_job_ends("CANCELLED")
    path = str(by_slurm.dir.path)
    wait_until(lambda: not cluster.nodes_with(path), "no process of it is left", within_s=30)
    by_us.wait_for_steps(3)
    cluster.orchestra("cancel", "by-us")
    by_us.assert_job_ends("FAILED")
    cluster.wait_until_clean()
    state = by_us.status()
    assert (state["state"], state["checkpoint_step"]) == ("stopped", by_us.step()), by_us.logs()
    assert by_slurm.status()["state"] in ("stopped", "cancelled"), by_slurm.logs()


def test_run_without_accounting_trains_and_its_wandb_run_is_read_back(site_without_accounting: Site) -> None:
    site = site_without_accounting
    assert "disabled" in site.run("sacct", check=False).stderr
    overrides = ("cluster.nodes=2", "cluster.gpus_per_node=1", "train.steps=4", "wandb.mode=offline")
    # On a busy machine wandb takes long before it writes anything.
    run = site.submit_run("unaccounted", *overrides, "wandb.finish_timeout_s=90")
    run.assert_job_ends("COMPLETED")
    site.wait_until_clean()
    state = run.status()
    assert (state["state"], state["step"]) == ("finished", 4)
    assert [event["cause"] for event in run.events("wandb_failed")] == []
    (file,) = run.dir.wandb.glob("offline-run-*/*.wandb")
    kept, rows = recorded_rows(file), read_metrics(run.dir)
    assert [row["step"] for row in kept] == [1, 2, 3, 4]
    assert [row["loss"] for row in kept] == [row["loss"] for row in rows]
