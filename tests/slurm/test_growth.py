"""A run that lacks nodes gets them while it trains, and loses nothing by it."""

from __future__ import annotations

import pytest
from matrix_injections import LENGTH
from matrix_oracle import References, samples
from sites import Site

pytestmark = pytest.mark.slow

# Each attempt takes its time.
SLOW = "recovery.inject=[{at_step: 1, rank: 0, fault: slow, seconds: 0.08, attempt: all}]"
QUICK = ("cluster.gpus_per_node=1", "recovery.agent_timeout_s=5", "recovery.backoff_s=0.1")


@pytest.mark.timeout(500)
def test_a_run_begins_with_what_is_free_and_grows_shrinks_and_grows_again(
    cluster: Site, references: References
) -> None:
    held = cluster.run("sbatch", "--parsable", "--nodes=2", "--exclusive", "--wrap=sleep 600").stdout.strip()
    run = cluster.submit_run(
        "growing", *LENGTH, *QUICK, SLOW, "cluster.nodes=2..3", "recovery.resize_every_s=1"
    )
    run.wait_for_step(12)
    first = run.hosts(0)
    assert len(first) == 2
    asked = run.wait_for_event("nodes_asked")
    assert (asked["fewest"], asked["most"], asked["first_node"]) == (1, 1, 2)

    cluster.run("scancel", held)
    run.wait_for_attempt(1)
    grown = run.hosts(1)
    assert (grown[:2], len(set(grown))) == (first, 3), run.logs()
    run.wait_for_steps(12)

    lost = run.fail_node(2)
    run.wait_for_attempt(2)
    assert run.hosts(2) == first
    run.wait_for_attempt(3)
    assert run.hosts(3)[:2] == first
    assert len(set(run.hosts(3)) - {lost}) == 3
    run.wait_for_steps(12)

    # The job of a node is ended, and the run's own is not: the ranks save first.
    leaving = run.events("nodes_asked")[-1]["job"]
    cluster.run("scancel", leaving)
    run.wait_for_attempt(4)
    assert run.hosts(4) == first
    run.assert_state("finished", 240)
    run.assert_job_ends("COMPLETED")
    decided = [(event["decision"], event["rule"]) for event in run.events("restarting")]
    grown, left = ("grow", "resized"), ("shrink", "resized")
    assert decided[:4] == [grown, ("shrink", "node_is_gone"), grown, left]
    # What was asked to stop had saved its last step: nothing is trained twice for it.
    restored = {event["attempt"]: event["step"] for event in run.events("restored")}
    for before in (0, 2, 3):
        (stopped,) = {event["step"] for event in run.events("stop_requested") if event["attempt"] == before}
        assert restored[before + 1] == stopped
    assert samples(run.dir) == samples(references.of(3))
    run.wait(run.is_over, "its jobs are over")
    run.wait(lambda: cluster.queue("--name=growing+") == [], "those that helped it are over")
