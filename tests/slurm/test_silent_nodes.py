"""A rank that hangs where all nodes wait for each other is found when steps have taught how long is too long,
and not by the outer limit alone.
"""

from __future__ import annotations

import pytest
from sites import Site, wait_until
from test_submit import ended, named, said, submitted

from orchestra.run.metrics_file import read_metrics

pytestmark = pytest.mark.slow

HANG = "recovery.inject=[{at_step: 20, rank: 1, fault: hang, phase: reduce}]"


@pytest.mark.timeout(150)
def test_a_rank_that_hangs_in_a_collective_is_found_before_the_outer_limit(cluster: Site) -> None:
    length = ("train.steps=30", "checkpoint.every_steps=5", "cluster.gpus_per_node=1", "cluster.nodes=2")
    run, job = submitted(cluster, "hangs-afar", *length, HANG, "recovery.heartbeat_timeout_s=600")
    wait_until(lambda: named(run, "hang_detected"), f"the hang is found: {said(run)}", 80)
    assert ended(cluster, job) == "COMPLETED", said(run)
    hangs = named(run, "hang_detected")
    # The other node's rank has come as far as the next step's gradients, and waits there.
    assert [(it["rank"], it["step"], it["phase"], it["limit"]) for it in hangs] == [(1, 20, "reduce", 20.0)]
    assert "loop_in_python" in run.rank_stacks(0, 1).read_text()
    assert [row["step"] for row in read_metrics(run)] == list(range(1, 31))
