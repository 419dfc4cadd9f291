"""Agents look at their nodes before each attempt: a spare steps in for one that is not fit to train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestra.config.compose import compose
from orchestra.config.machine import Situation, signature
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir
from orchestra.submit.new_run import RunRequest, planned_run, prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("local_agents.py")
NUM_NODES = 3
TIMEOUT_S = 240.0


def train(folder: Path, *overrides: str, environments: dict[int, dict[str, str]]) -> tuple[RunDir, list[str]]:
    """Train on two of three nodes of this machine to the end; return the run and what the agents said."""
    words = ["cluster=slurm", "cluster.nodes=2", "cluster.spare_nodes=1", "cluster.device=cpu"]
    words += ["cluster.gpus_per_node=1", "train.steps=3", "run.name=mine", f"run.dir={folder}", *overrides]
    config = compose(words, Situation("submit")).config
    request = RunRequest(config, signature(config), words)
    run = prepare(request, planned_run(request, 0.0))
    root = str(Path(__file__).parents[2])
    agents = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(run.path), str(node), str(NUM_NODES)],
            env={**os.environ, "PYTHONPATH": root, **environments.get(node, {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(NUM_NODES)
    ]
    try:
        said = [it.communicate(timeout=TIMEOUT_S)[0] for it in agents]
    finally:
        for it in agents:
            it.kill()
    assert [it.returncode for it in agents] == [0] * NUM_NODES, said
    return run, said


def of_kind(run: RunDir, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run) if event["event"] == name]


def test_a_spare_takes_the_place_of_a_node_that_found_itself_unfit(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    run, said = train(tmp_path / "runs", environments={0: {"TMPDIR": missing}})
    (started,) = of_kind(run, "attempt_started")
    assert started["hosts"] == ["node2", "node3"]
    (checked,) = of_kind(run, "node_checked")
    assert checked["unfit"] == {"node1": f"{missing} is no folder here"}
    assert (checked["nodes"], checked["looked"], checked["left_out"]) == (3, 3, ["node1"])
    assert f"node1: {missing} is no folder here (left out)" in said[0]
    assert of_kind(run, "finished")


def test_a_node_that_became_unfit_in_an_attempt_has_no_part_in_the_next(tmp_path: Path) -> None:
    place = tmp_path / "scratch"
    place.mkdir()
    losing = {"TMPDIR": str(place), "LOSE_TMPDIR": "1"}
    fault = "recovery.inject=[{at_step: 2, rank: 0, fault: sigkill}]"
    run, _ = train(tmp_path / "runs", fault, environments={1: losing})
    first, second = of_kind(run, "attempt_started")
    assert first["hosts"] == ["node1", "node2"]
    assert second["hosts"] == ["node1", "node3"]
    (decided,) = of_kind(run, "restarting")
    assert (decided["decision"], decided["exclude"]) == ("replace", ["node2"])
    assert f"node2 cannot train: {place} is no folder here" in decided["reason"]
    (replaced,) = of_kind(run, "node_replaced")
    assert (replaced["host"], replaced["by_host"]) == ("node2", "node3")
    assert of_kind(run, "finished")
