"""`cluster.alternatives` on a real cluster: of the jobs for several kinds of nodes exactly one trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sites import HELD, TINY, Site, wait_until

from orchestra.run.config_file import read_config
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir

pytestmark = pytest.mark.slow

_KINDS = (
    "cluster.alternatives=[{constraint: many, nodes: 2, gpus_per_node: 1},"
    "{constraint: one, gpus_per_node: 2, train.micro_batch_size: 2}]"
)
_SMALL = (*TINY, "train.steps=2", "train.global_batch_size=4", _KINDS)


def submitted(cluster: Site, name: str, *words: str) -> tuple[RunDir, list[str]]:
    facts = json.loads(cluster.orchestra("submit", *_SMALL, f"run.name={name}", *words, "--json").stdout)
    return RunDir(Path(facts["path"])), facts["jobs"]


def named(run: RunDir, name: str) -> list[Record]:
    return [event for event in read_events(run) if event["event"] == name]


def finish(cluster: Site, run: RunDir) -> Record:
    wait_until(lambda: named(run, "finished"), f"{run.name} is finished")
    (start,) = named(run, "attempt_started")
    assert cluster.ended(start["job"]) == "COMPLETED"
    assert cluster.status(run.name)["state"] == "finished"
    return start


def test_of_two_kinds_of_nodes_one_trains_and_the_other_is_withdrawn_once(cluster: Site) -> None:
    for node, kind in (("node1", "one"), ("node2", "many"), ("node3", "many"), ("node4", "none")):
        cluster.as_root("scontrol", "update", f"NodeName={node}", f"Features={kind}")
    cluster.refused(2, "number 1 (cluster.constraint=one", "submit", *_SMALL, "train.global_batch_size=1")
    # Both begin in the same second.
    run, jobs = submitted(cluster, "both", HELD)
    cancelled, waiting = submitted(cluster, "none", HELD)
    state = cluster.status("both")
    assert (state["state"], "of its 2 jobs the first to start trains" in state["cause"]) == ("queued", True)
    cluster.run("scontrol", "release", *jobs)
    start = finish(cluster, run)
    (other,) = [job for job in jobs if job != start["job"]]
    (chosen,) = named(run, "alternative_chosen")
    assert (chosen["job"], jobs.index(start["job"])) == (start["job"], chosen["alternative"])
    assert (cluster.ended(other), cluster.exit_code(other)) in (("COMPLETED", "0:0"), ("CANCELLED", "0:0"))
    cluster.orchestra("cancel", "none")
    assert [cluster.ended(job) for job in waiting] == ["CANCELLED"] * 2
    assert cluster.status("none")["state"] == "cancelled"
    assert named(cancelled, "attempt_started") == []
    # One of the two kinds is not free.
    cluster.submit("--nodelist=node2", "--exclusive", "--wrap=sleep 600")
    run, jobs = submitted(cluster, "second")
    start = finish(cluster, run)
    assert (start["job"], start["nodes"]) == (jobs[1], 1)
    assert cluster.ended(jobs[0]) == "CANCELLED"
    config = read_config(run.config)
    assert (config.cluster.nodes, config.cluster.constraint, config.train.micro_batch_size) == (1, "one", 2)
