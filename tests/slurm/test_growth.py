"""A run that lacks nodes gets them while it trains, and loses nothing by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matrix_injections import LENGTH
from matrix_oracle import References, samples
from sites import TINY, Site, SubmittedRun, slow_attempts

from orchestra.run.paths import SweepDir

pytestmark = pytest.mark.slow

# What three nodes take by default; two of them, or one rank, take it too.
BATCH = "train.global_batch_size=18"
QUICK = ("cluster.gpus_per_node=1", "recovery.agent_timeout_s=5", "recovery.backoff_s=0.1")


@pytest.mark.timeout(500)
def test_a_run_begins_with_what_is_free_and_grows_shrinks_and_grows_again(cluster: Site) -> None:
    held = cluster.run("sbatch", "--parsable", "--nodes=2", "--exclusive", "--wrap=sleep 600").stdout.strip()
    # Each attempt takes its time but the last one.
    shape = (*QUICK, slow_attempts(4, 0.08), "cluster.nodes=2..3", "recovery.resize_every_s=1")
    run = cluster.submit_run("growing", *LENGTH, BATCH, *shape)
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
    # Which samples a step takes depends on no layout: a single rank tells them soonest.
    whole = References(cluster, (*LENGTH, BATCH), "growing").of(1)
    assert samples(run.dir) == samples(whole)
    run.wait(run.is_over, "its jobs are over")
    run.wait(lambda: cluster.queue("--name=growing+") == [], "those that helped it are over")


@pytest.mark.timeout(200)
def test_a_member_of_a_sweep_grows_by_a_job_of_its_own_name(cluster: Site) -> None:
    """One node is free for two members of one or two nodes: the first begins on it, the second one waits."""
    held = cluster.run("sbatch", "--parsable", "--nodes=3", "--exclusive", "--wrap=sleep 600").stdout.strip()
    slow = slow_attempts(1, 0.08)
    words = (*TINY, *QUICK, slow, "train.steps=120", "cluster.nodes=1..2", "recovery.resize_every_s=1")
    facts = json.loads(
        cluster.orchestra("submit", "-m", *words, "train.seed=1,2", "run.name=swept", "--json").stdout
    )
    sweep, array = SweepDir(Path(facts["path"])), facts["arrays"][0]["id"]
    runs = [SubmittedRun(cluster, sweep.member(index), f"{array}_{index}") for index in range(2)]
    asked = runs[0].wait_for_event("nodes_asked")
    assert cluster.queue(f"--jobs={asked['job']}", "--format=%j") == ["swept/000+"]
    cluster.run("scancel", held)
    runs[0].wait_for_attempt(1)
    first = runs[0].hosts(0)
    assert (len(first), runs[0].hosts(1)[:1], len(set(runs[0].hosts(1)))) == (1, first, 2)
    for run in runs:
        run.wait_until_finished()
    (stopped,) = runs[0].events("stop_requested")
    (restored,) = runs[0].events("restored")
    assert restored["step"] == stopped["step"]
    assert [len(run.hosts()) for run in runs] == [2, 2]
    assert cluster.ended(asked["job"]) == "COMPLETED"
