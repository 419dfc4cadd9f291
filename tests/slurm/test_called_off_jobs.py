"""A job that Slurm warns before its nodes have met is started again, and trains as if nothing had been."""

from __future__ import annotations

import pytest
from sites import Site, wait_until
from test_requeue import starts_now
from test_submit import ended, named, said, state_of, submitted

pytestmark = pytest.mark.slow

# In the first start of the job the second node comes too late for anything.
LATE = """#!/bin/sh
test "$SLURM_NODEID" = 0 || test "${SLURM_RESTART_COUNT:-0}" -gt 0 || sleep 600
exec "$@"
"""


@pytest.mark.timeout(150)
def test_a_warning_before_the_first_attempt_puts_the_job_back_into_the_queue(cluster: Site) -> None:
    script = cluster.shared / "late.sh"
    script.write_text(LATE)
    script.chmod(0o755)
    late = f"cluster.container.prefix={script}"
    run, job = submitted(
        cluster, "too-late", "cluster.nodes=2", "cluster.gpus_per_node=1", "train.steps=5", late
    )
    member = run.control / f"job-{job}.start-0" / "member-000.json"
    wait_until(member.exists, f"the first node waits for the other one: {said(run)}")
    cluster.run("scancel", "--signal=USR2", job)
    wait_until(lambda: named(run, "requeued"), f"it is put back: {said(run)}")
    starts_now(cluster, job)
    assert ended(cluster, job) == "COMPLETED", said(run)
    assert [(it["how"], it["reason"]) for it in named(run, "requeued")] == [("requeue", "time_limit")]
    (start,) = named(run, "attempt_started")
    assert (start["attempt"], start["job_start"]) == (0, 1)
    assert state_of(cluster, "too-late")["state"] == "finished"
