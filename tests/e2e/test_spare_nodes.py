"""A spare steps in for a node that is not fit to train, that computed wrongly, or that died: then it goes on
from the copies of the state in its own memory.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from commands import TINY, events_of
from local_agents import prepared, train_on_nodes
from support.fake_slurm import FakeSlurm

from launchers.memory_store.store import folders_of
from orchestra.agents.node_check.own_check import copies_name
from orchestra.run.paths import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def train(folder: Path, *overrides: str, environments: dict[int, dict[str, str]]) -> tuple[RunDir, list[str]]:
    """Train on two of three nodes to the end; return the run and what the agents printed."""
    nodes = ("cluster.nodes=2", "cluster.spare_nodes=1", "cluster.gpus_per_node=1", "train.steps=3")
    run = prepared(folder, *TINY, *nodes, *overrides)
    return run, train_on_nodes(run, 3, environments, codes=[0, 0, 0])


def test_a_spare_takes_the_place_of_a_node_that_found_itself_unfit(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    run, printed = train(tmp_path / "runs", environments={0: {"TMPDIR": missing}})
    (started,) = events_of(run, "attempt_started")
    assert started["hosts"] == ["node2", "node3"]
    (checked,) = events_of(run, "node_checked")
    assert checked["unfit"] == {"node1": f"{missing} is no folder here"}
    assert (checked["nodes"], checked["looked"], checked["left_out"]) == (3, 3, ["node1"])
    assert f"node1: {missing} is no folder here (left out)" in printed[0]
    assert events_of(run, "finished")


def test_a_node_whose_device_broke_in_an_attempt_has_no_part_in_the_next(tmp_path: Path) -> None:
    """And the error is not the first of two: the same one at the same step twice is a bug."""
    # One device of two is gone after the first look.
    smi = FakeSlurm(tmp_path / "bin")
    device = "echo 0, 81559, 4, 0, No, No, No, Not Active, 16, 16"
    smi.put("nvidia-smi", f"{device}; mkdir {smi.folder}/first && {device}; exit 0")
    broken = {"NUM_GPUS": "2", "PATH": f"{smi.folder}:{os.environ['PATH']}"}
    at = "at_step: 2, rank: 0, fault: exception"
    faults = f"recovery.inject=[{{{at}}}, {{{at}, attempt: 1}}]"
    run, _ = train(tmp_path / "runs", faults, "recovery.max_restarts=1", environments={1: broken})
    (unfit,) = events_of(run, "node_unfit")
    words = "nvidia-smi shows 1 devices, 2 are needed"
    assert (unfit["host"], unfit["cause"], unfit["device"]) == ("node2", words, True)
    (replaced,) = events_of(run, "node_replaced")
    assert (replaced["host"], replaced["by_host"]) == ("node2", "node3")
    restarts = events_of(run, "restarting")
    assert f"node2 cannot train: {words}" in restarts[0]["reason"]
    decided = [(it["decision"], it["charged"], it["exclude"]) for it in restarts]
    assert decided == [("replace", False, ["node2"]), ("restart", True, [])]
    hosts = [event["hosts"] for event in events_of(run, "attempt_started")]
    assert hosts == [["node1", "node2"], ["node1", "node3"], ["node1", "node3"]]
    assert events_of(run, "finished")


def test_a_spare_takes_the_place_of_a_node_that_computed_wrongly(tmp_path: Path) -> None:
    overrides = (
        *("cluster.gpus_per_node=2", "train.steps=12"),
        # Saved in the background, step 6 would be passed over while step 3 is still being written.
        *("checkpoint.every_steps=3", "checkpoint.async_save=false"),
        "recovery.replay_every_steps=3",
        "recovery.inject=[{at_step: 9, rank: 3, fault: flip}]",
    )
    run, _ = train(tmp_path / "runs", *overrides, environments={})
    hosts = [event["hosts"] for event in events_of(run, "attempt_started")]
    assert hosts == [["node1", "node2"], ["node1", "node3"]]
    (decided,) = events_of(run, "restarting")
    assert (decided["decision"], decided["rule"]) == ("replace", "broken_device")
    # A failure that somebody planned puts no host on the cluster's list.
    assert (decided["exclude"], decided["listed"]) == (["node2"], [])
    (restored,) = events_of(run, "restored")
    assert restored["step"] == 6
    assert events_of(run, "finished")


def test_a_lost_nodes_steps_come_from_the_spares_memory(tmp_path: Path) -> None:
    # A copy takes its time to the spare: with steps of 10 ms it may be several steps old on a busy machine.
    slow = "{at_step: 9, rank: all, fault: slow, seconds: 1, steps: 3}"
    run = prepared(
        tmp_path,
        *TINY,
        *("cluster.nodes=1", "cluster.spare_nodes=1", "cluster.gpus_per_node=2", "train.steps=20"),
        "recovery.agent_timeout_s=5",
        # No checkpoint before the end: what is gone on from is in memory alone.
        *("checkpoint.every_steps=1000", "recovery.memory_copy_every_steps=1"),
        f"recovery.inject=[{slow}, {{at_step: 12, rank: 0, fault: node_down}}]",
    )
    own = folders_of(copies_name(run))
    try:
        train_on_nodes(run, 2, {}, codes=[-signal.SIGKILL, 0])
    finally:
        for folder in own.parent.glob(f"{own.name}*"):
            shutil.rmtree(folder)
    hosts = [event["hosts"] for event in events_of(run, "attempt_started")]
    assert hosts == [["node1"], ["node2"]]
    (restored,) = {(event["source"], event["step"]) for event in events_of(run, "restored", 1)}
    assert restored[0] == "memory"
    # A copy is made while the next step is trained: the newest whole one may be of the step before.
    assert 12 - restored[1] <= 2
    assert events_of(run, "finished", 1)
