"""A run on a single node leaves its state in a spare's memory, which goes on from it when the node dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, TINY, events_of

from launchers.memory_store.store import folders_of
from orchestra.agents.node_check.own_check import copies_name
from orchestra.config.compose import compose
from orchestra.config.machine import Situation, signature
from orchestra.submit.new_run import RunRequest, planned_run, prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).with_name("local_agents.py")
LAST_STEP, FAULT_STEP = 20, 12


def test_a_lost_nodes_steps_come_from_the_spares_memory(tmp_path: Path) -> None:
    words = [*TINY, "cluster=slurm", "cluster.nodes=1", "cluster.spare_nodes=1", "cluster.gpus_per_node=2"]
    words += [f"train.steps={LAST_STEP}", "run.name=mine", f"run.dir={tmp_path}", "cluster.device=cpu"]
    # No checkpoint before the end: what is gone on from is in memory alone.
    words += ["checkpoint.every_steps=1000", "recovery.memory_copy_every_steps=1"]
    # A copy takes its time to the spare: with steps of 10 ms it may be several steps old on a busy machine.
    slow = "{at_step: 1, rank: all, fault: slow, seconds: 0.1}"
    words += [f"recovery.inject=[{slow}, {{at_step: {FAULT_STEP}, rank: 0, fault: node_down}}]"]
    config = compose(words, Situation("submit")).config
    request = RunRequest(config, signature(config), words)
    run = prepare(request, planned_run(request, 0.0))
    agents = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(run.path), str(node), "2"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    own = folders_of(copies_name(run))
    try:
        said = [it.communicate(timeout=240)[0] for it in agents]
    finally:
        for it in agents:
            it.kill()
        for folder in own.parent.glob(f"{own.name}*"):
            shutil.rmtree(folder)
    assert [it.returncode for it in agents] == [-signal.SIGKILL, 0], said
    first, second = events_of(run, "attempt_started")
    assert (first["hosts"], second["hosts"]) == (["node1"], ["node2"])
    (restored,) = {(it["source"], it["step"]) for it in events_of(run, "restored", 1)}
    assert restored[0] == "memory"
    # A copy is made while the next step is trained: the newest whole one may be of the step before.
    assert FAULT_STEP - restored[1] <= 2
    assert events_of(run, "finished", 1)
