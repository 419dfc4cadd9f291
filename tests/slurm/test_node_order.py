"""On a cluster with a switch tree, neighbouring ranks are under one leaf, and no number depends on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from matrix_oracle import losses
from sites import Site

pytestmark = pytest.mark.slow

WHERE = {"leaf1": ["node1", "node3"], "leaf2": ["node2", "node4"]}


@pytest.mark.timeout(300)
def test_ranks_are_laid_out_by_leaf_and_the_losses_are_those_of_slurms_order(
    new_site: Callable[..., Site],
) -> None:
    site = new_site("--nodes", "4", "--gpus", "0", "--no-accounting", "--topology", "tree")
    given = (
        "cluster.nodes=4",
        "cluster.gpus_per_node=1",
        "parallelism.pp=2",
        "model.num_hidden_layers=2",
        "train.steps=3",
    )
    ordered = site.submit_run("ordered", *given, "cluster.max_switches=2", "cluster.max_switches_wait=1m")
    assert "#SBATCH --switches=2@0:01:00\n" in ordered.dir.batch_script.read_text()
    ordered.wait_until_finished()
    (event,) = ordered.events("nodes_ordered")
    assert (event["by"], event["hosts"]) == ("topology", ["node1", "node3", "node2", "node4"])
    assert event["leaves"] == {f"spine.{leaf}": hosts for leaf, hosts in WHERE.items()}
    assert len(set(event["interfaces"].values())) >= 1
    assert None not in event["interfaces"].values()
    # The ranks themselves say where they ran: each pipeline stage under one leaf.
    ran = {record["rank"]: record["host"] for record in ordered.events() if "rank" in record}
    assert [ran[rank] for rank in range(4)] == event["hosts"]
    log = next(ordered.dir.job_logs.glob("*_0_log.out")).read_text()
    assert "2 under spine.leaf1, 2 under spine.leaf2" in log

    scheduler = site.submit_run("by-slurm", *given, "cluster.node_order=scheduler")
    scheduler.wait_until_finished()
    (event,) = scheduler.events("nodes_ordered")
    assert (event["by"], event["hosts"]) == ("scheduler", ["node1", "node2", "node3", "node4"])
    assert losses(scheduler.dir) == losses(ordered.dir)

    doctor = site.orchestra("doctor", check=False).stdout
    assert "2 leaf switches of 2 nodes" in doctor
    gpus = ("cluster=slurm", "cluster.nodes=4", "cluster.hardware=h100", "cluster.gpus_per_node=8")
    planned = site.orchestra("plan", *gpus, check=False)
    assert "leaves  2 leaf switches of 2 nodes, of which 4 nodes need 2" in planned.stdout
    refused = site.orchestra("submit", *given, "cluster.segment=2", check=False)
    assert refused.returncode == 2
    assert "sbatch of this cluster has no --segment" in refused.stderr
    block = site.devcluster("up", "--topology", "block", check=False)
    assert (block.returncode, "topology_block.so" in block.stderr) == (2, True)
