"""Ranks, agents and nodes are killed, the first node too; the run ends with the uninterrupted run's numbers.

Each fault follows an event of the run, never a clock. The oracle is the same for all: the losses and the last
checkpoint of a run on one host that nothing happened to, each sample once, no process left, no job left.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest
from matrix_oracle import losses, samples
from sites import ROOT, Site, wait_until
from test_submit import TINY, named, orchestra, said, state_of, submitted
from test_survival import num_steps, wait_for_steps, wait_until_clean

from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow

LENGTH = ("train.steps=400", "checkpoint.every_steps=10", "data.ledger=true", "cluster.gpus_per_node=1")
QUICK = ("recovery.agent_timeout_s=5", "recovery.backoff_s=0.1")
# So that the first attempt is not over before it is hurt, however fast the machine is.
PACE = "recovery.inject=[{at_step: 1, rank: 0, fault: slow, seconds: 0.1}]"


def reference(cluster: Site, name: str, ranks: int) -> RunDir:
    """Train the same run on one host without a fault."""
    here = ("run", *TINY, *LENGTH, f"run.name={name}", f"cluster.gpus_per_node={ranks}")
    cluster.run(sys.executable, "-m", "orchestra", *here, timeout_s=150, PYTHONPATH=str(ROOT))
    return RunDir(cluster.shared / "runs" / name)


def digest(cluster: Site, run: RunDir) -> str:
    """Return the digest of the state in the last checkpoint."""
    listed = json.loads(orchestra(cluster, "checkpoint", "ls", run.name, "--json").stdout)
    return str(max(listed, key=lambda it: it["step"])["state_digest"])


def process_on(cluster: Site, host: str, words: str) -> int:
    """Return the youngest process on a host that has these words on its command line."""
    return max(pid for pid, line in cluster.processes_on(host).items() if words in line)


def trains_again(run: RunDir, attempt: int) -> None:
    """Wait until an attempt has made a new step."""
    begun = f"attempt {attempt} begins: {said(run)}"
    wait_until(lambda: any(it["attempt"] == attempt for it in named(run, "training_started")), begun, 60)
    wait_for_steps(run, 3)


def hosts_of(run: RunDir, attempt: int) -> list[str]:
    (start,) = (it for it in named(run, "attempt_started") if it["attempt"] == attempt)
    return list(start["hosts"])


def assert_as_if_nothing_had_happened(cluster: Site, run: RunDir, whole: RunDir) -> None:
    wait_until(lambda: named(run, "finished") or state_of(cluster, run.name)["state"] == "failed", "it ends")
    assert state_of(cluster, run.name)["state"] == "finished", said(run)
    assert losses(run) == losses(whole)
    assert digest(cluster, run) == digest(cluster, whole)
    assert samples(run) == samples(whole)
    wait_until_clean(cluster)
    wait_until(lambda: not cluster.run("squeue", "--noheader").stdout.strip(), "no job is left")


@pytest.mark.timeout(300)
def test_rank_agent_and_first_node_are_lost_one_after_another(cluster: Site) -> None:
    nodes = ("cluster.nodes=3", "cluster.spare_nodes=1")
    run, _ = submitted(cluster, "hunted", *LENGTH, *QUICK, PACE, *nodes)
    wait_until(lambda: num_steps(run) > 12, f"it trains: {said(run)}")
    first = hosts_of(run, 0)
    os.kill(process_on(cluster, first[1], "orchestra.train"), signal.SIGKILL)
    trains_again(run, 1)
    assert hosts_of(run, 1) == first

    warm = process_on(cluster, first[2], "launchers.fork_server.server")
    os.kill(process_on(cluster, first[2], "orchestra.agents"), signal.SIGKILL)
    trains_again(run, 2)
    assert hosts_of(run, 2) == first
    # The next agent's ranks are forked from what the dead one's were.
    assert process_on(cluster, first[2], "launchers.fork_server.server") == warm

    cluster.devcluster("fail-node", first[0])
    trains_again(run, 3)
    (replaced,) = named(run, "node_replaced")
    assert replaced["host"] == first[0]
    assert hosts_of(run, 3) == [replaced["by_host"], *first[1:]]
    assert_as_if_nothing_had_happened(cluster, run, reference(cluster, "whole-of-three", 3))


@pytest.mark.timeout(300)
def test_without_a_spare_it_shrinks_or_goes_on_in_another_job(cluster: Site) -> None:
    shrinking, _ = submitted(
        cluster, "shrinking", *LENGTH, *QUICK, PACE, "cluster.nodes=2", "recovery.min_nodes=1"
    )
    moving, job = submitted(cluster, "moving", *LENGTH, *QUICK, PACE, "cluster.nodes=2")
    for run in (shrinking, moving):
        wait_until(lambda run=run: num_steps(run) > 12, f"{run.name} trains: {said(run)}")  # type: ignore[misc]
    gone = [hosts_of(run, 0)[1] for run in (shrinking, moving)]
    for host in dict.fromkeys(gone):
        cluster.devcluster("fail-node", host)
    trains_again(shrinking, 1)
    assert hosts_of(shrinking, 1) == hosts_of(shrinking, 0)[:1]
    wait_until(lambda: named(moving, "requeued"), f"it goes on in another job: {said(moving)}")
    (requeued,) = named(moving, "requeued")
    assert (requeued["how"], requeued["after"], requeued["exclude"]) == ("chain", job, [gone[1]])
    trains_again(moving, 1)
    assert gone[1] not in hosts_of(moving, 1)
    assert_as_if_nothing_had_happened(cluster, moving, reference(cluster, "whole-of-two", 2))
    wait_until(lambda: state_of(cluster, "shrinking")["state"] == "finished", said(shrinking))
    assert samples(shrinking) == samples(RunDir(cluster.shared / "runs" / "whole-of-two"))
