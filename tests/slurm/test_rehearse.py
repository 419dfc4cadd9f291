"""`orchestra rehearse` as an ordinary user on a cluster of several hosts: an agent and a node are lost in
turn, and what answered is told.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from sites import ROOT, Site
from test_submit import named, orchestra, submitted

from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow

# Submitted and never started: a rehearsal needs nothing but the frozen configuration.
WAITS = "cluster.slurm_extra.begin=now+1hour"
QUICK = ("recovery.agent_timeout_s=5", "recovery.backoff_s=0.1", "cluster.gpus_per_node=1")
FAULTS = ("--fault", "agent_kill", "--fault", "node_down")


def left_at_once(cluster: Site, *words: str) -> None:
    """Run the command, and press Ctrl-C as soon as it does nothing any more but wait."""
    process = subprocess.Popen(
        (sys.executable, "-m", "orchestra", *words),
        cwd=cluster.shared,
        env={**cluster.environment, "PYTHONPATH": str(ROOT)},
        user=cluster.user.pw_uid,
        group=cluster.user.pw_gid,
        extra_groups=[],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert any("Ctrl-C ends the waiting" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, "waits on and judges" in said) == (130, True), said


@pytest.mark.timeout(240)
def test_a_run_that_waits_in_the_queue_is_rehearsed_beside_it(cluster: Site) -> None:
    run, _ = submitted(cluster, "precious", *QUICK, "cluster.nodes=2", "cluster.spare_nodes=1", WAITS)
    words = ("rehearse", "preci", "cluster.slurm_extra.begin=now", *FAULTS)
    planned = orchestra(cluster, *words, "--dry-run").stdout
    assert "node_down at rank 1" in planned
    assert "#SBATCH --nodes=3" in planned
    hurt = RunDir(run.path.with_name("rehearsal-precious-1-faults"))
    left_at_once(cluster, *words)
    # The jobs go on, and whoever comes back waits for them.
    command = (sys.executable, "-m", "orchestra", "rehearse", hurt.name, "--json")
    done = cluster.run(*command, check=False, timeout_s=200, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    told = [(it["fault"], it["decision"], it["rule"], it["passed"]) for it in found["faults"]]
    assert told == [
        ("agent_kill", "restart", "start_again", True),
        ("node_down", "replace", "node_is_gone", True),
    ]
    assert all(it["passed"] for it in found["checks"]), found["checks"]
    assert len(named(hurt, "fault_injected")) == 2
    assert named(run, "attempt_started") == []
    again = orchestra(cluster, "rehearse", hurt.name)
    assert "precious comes back from what was rehearsed" in again.stdout
