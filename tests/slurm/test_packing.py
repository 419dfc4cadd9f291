"""`cluster.members_per_node` on a real cluster: members of a sweep that share nodes, each for itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from sites import TINY, Site, wait_until

from orchestra.run.control.member_places import newest_place
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir, SweepDir

pytestmark = pytest.mark.slow

_STEPS, _EVERY = 16, 4
_SMALL = (*TINY, "cluster.gpus_per_node=1", f"train.steps={_STEPS}", f"checkpoint.every_steps={_EVERY}")
# A job for each of two nodes, with two members at a time.
_PACKED = (
    *("cluster.members_per_node=2", "cluster.array_throttle=2", "cluster.slurm_extra.exclusive=true"),
    *("recovery.preflight=false", "recovery.max_restarts=0"),
)
# Of members that each have a fault of their own, one does not end before it is killed, and one fails.
_HARMLESS = "[{at_step: 1, rank: 0, fault: slow, seconds: 0.0%d}]"
_ENDLESS = "[{at_step: 6, rank: 0, fault: slow, seconds: 60}]"
_FAILING = "[{at_step: 2, rank: 0, fault: exception, attempt: all}]"
_FAULTS = [_HARMLESS % 1, _ENDLESS, *(_HARMLESS % number for number in range(2, 7)), _FAILING, _HARMLESS % 8]


def named(run: RunDir, *names: str) -> list[Record]:
    return [event for event in read_events(run) if event["event"] in names]


def states(cluster: Site, name: str) -> list[str]:
    return [member["state"] for member in cluster.status(name)["members"]]


def to_be_resumed(cluster: Site, name: str) -> list[list[int]]:
    """Return the members of each array that a resume would submit."""
    facts = json.loads(cluster.orchestra("resume", name, "--dry-run", "--json").stdout)
    return [array["members"] for array in facts["arrays"]]


def most_at_once(runs: list[RunDir]) -> dict[str, int]:
    """Return how many attempts ran at the same time on each host, at most."""
    changes: list[tuple[float, int, str]] = []
    for run in runs:
        for start in named(run, "attempt_started"):
            own = [event["time"] for event in read_events(run) if event["attempt"] == start["attempt"]]
            changes += [(min(own), 1, start["host"]), (max(own), -1, start["host"])]
    now: dict[str, int] = {}
    most: dict[str, int] = {}
    for _, change, host in sorted(changes):
        now[host] = now.get(host, 0) + change
        most[host] = max(most.get(host, 0), now[host])
    return most


def kill(cluster: Site, run: RunDir) -> None:
    """Kill whatever keeps a member at work, and what it has started, at once."""
    for host in cluster.layout.nodes:
        for pid, line in cluster.processes_of_jobs(host).items():
            if str(run.path) in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(240)
def test_eight_members_share_two_nodes_whatever_becomes_of_each(cluster: Site) -> None:
    words = (*_SMALL, *_PACKED, f"recovery.inject={','.join(_FAULTS)}", "run.name=packed", "--json")
    facts = json.loads(cluster.orchestra("submit", "-m", *words).stdout)
    runs = [SweepDir(Path(facts["path"])).member(index) for index in range(9)]
    (array,) = facts["arrays"]
    assert array["members"] == list(range(9))
    killed = runs[1]
    wait_until(lambda: named(killed, "checkpoint_committed"), "the second member has saved")
    (waiting,) = json.loads(cluster.orchestra("status", "packed/008", "--json").stdout)
    assert waiting["cause"] == "waits for a place on a node that its sweep's members share"
    # Nobody needs another job: neither who trains nor who waits in the pack.
    assert to_be_resumed(cluster, "packed") == []
    assert "was taken off the list" in cluster.orchestra("cancel", "packed/008").stdout
    kill(cluster, killed)
    assert [cluster.ended(f"{array['id']}_{task}") for task in (0, 1)] == ["COMPLETED"] * 2
    assert states(cluster, "packed") == [*["finished"] * 7, "failed", "cancelled"]
    assert to_be_resumed(cluster, "packed") == [[7, 8]]
    assert sorted(most_at_once(runs)) == ["node1", "node2"]
    assert max(most_at_once(runs).values()) == 2
    # None twice: one attempt each, but for the killed one, which went on from its checkpoint.
    assert [len(named(run, "attempt_started")) for run in runs] == [1, 2, 1, 1, 1, 1, 1, 1, 0]
    assert [row["step"] for row in read_metrics(killed)] == list(range(1, _STEPS + 1))
    (restored,) = named(killed, "restored")
    assert restored["step"] == _EVERY
    places = [newest_place(run, 0) for run in runs]
    assert [place and place.number for place in places] == [0, 1, 0, 0, 0, 0, 0, 0, 0]
