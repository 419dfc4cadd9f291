"""A job whose nodes are not fit makes room for another one without them, and not for ever."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, Config, Device
from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup
from orchestra.agents.context import END, AgentContext
from orchestra.agents.foreground import Foreground
from orchestra.agents.leader import Leader
from orchestra.agents.wait_for_nodes import Preflight
from orchestra.errors import LaunchError
from orchestra.recovery.policy import Decision
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir

ATTEMPT = 4


@dataclasses.dataclass(frozen=True)
class Cluster(Foreground):
    """A cluster on which another job can follow; it keeps what it was told to leave out."""

    left_out: list[tuple[str, ...]] = dataclasses.field(default_factory=list)
    listed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def can_requeue(self) -> bool:
        return True

    def excluded(self) -> Mapping[str, str]:
        return self.listed

    def requeue(self, decision: Decision, attempt: int, events: EventWriter, /) -> str:
        self.left_out.append(decision.exclude)
        events.write("requeued", job="8", rule=decision.rule, exclude=list(decision.exclude))
        return f"job 8 goes on after attempt {attempt}"


@pytest.fixture
def signals() -> Iterator[StopRequests]:
    with StopRequests() as requests:
        yield requests


def joined(folder: Path, facts: Sequence[Mapping[str, object]]) -> list[NodeGroup]:
    groups = [NodeGroup(folder, node, len(facts), 15.0) for node in range(len(facts))]
    for group, its in zip(groups, facts, strict=True):
        group.join(f"node{group.node + 1}", "127.0.0.1", {"port": 1, **its})
    return groups


def led(
    run: RunDir, group: NodeGroup, signals: StopRequests, scheduler: Foreground, said: list[str]
) -> AgentContext:
    cluster = ClusterConfig(nodes=2, gpus_per_node=1, device=Device.cpu)
    return AgentContext(run, Config(cluster=cluster), group, signals, scheduler, said.append)


def test_another_job_follows_without_the_unfit_node(tmp_path: Path, signals: StopRequests) -> None:
    run, cluster, said = RunDir(tmp_path), Cluster(), []
    EventWriter(run, "test", ATTEMPT).write("attempt_started")
    groups = joined(run.control / "crew", [{}, {"unfit": "nvidia-smi shows 7 devices, 8 are needed"}])
    Leader(led(run, groups[0], signals, cluster, said)).look(None)
    assert cluster.left_out == [("node2",)]
    order = groups[1].newest_order()
    assert order is not None
    assert (order.action, order.facts["code"]) == (END, 1)
    assert said == [f"job 8 goes on after attempt {ATTEMPT}"]
    (checked,) = [event for event in read_events(run) if event["event"] == "node_checked"]
    assert checked["unfit"] == {"node2": "nvidia-smi shows 7 devices, 8 are needed"}
    for group in groups:
        group.leave()


def test_what_no_job_finds_better_ends_the_run_with_the_reason(tmp_path: Path, signals: StopRequests) -> None:
    run, cluster = RunDir(tmp_path), Cluster()
    groups = joined(run.control / "crew", [{}, {"unfit": "/scratch is no folder here"}])
    context = led(run, groups[0], signals, cluster, [])
    members = groups[0].members()
    moved = [Preflight(context).go_elsewhere(members) is not None for _ in range(5)]
    assert moved == [True, True, True, False, False]
    with pytest.raises(LaunchError, match="node2: /scratch is no folder here"):
        Leader(context).look(None)
    # An attempt that began is a new chance.
    EventWriter(run, "test", 0).write("attempt_started")
    assert Preflight(context).go_elsewhere(members) is not None
    for group in groups:
        group.leave()


def test_where_no_job_may_follow_the_reason_is_said(tmp_path: Path, signals: StopRequests) -> None:
    run = RunDir(tmp_path)
    groups = joined(run.control / "crew", [{"unfit": "no room"}, {}])
    with pytest.raises(LaunchError, match="node1: no room"):
        Leader(led(run, groups[0], signals, Foreground(), [])).look(None)
    for group in groups:
        group.leave()


def test_a_listed_node_is_left_out_where_a_spare_is_there(tmp_path: Path, signals: StopRequests) -> None:
    run = RunDir(tmp_path)
    groups = joined(run.control / "crew", [{}, {}, {}])
    listed = Cluster(listed={"node1": "node1 failed twice"})
    preflight = Preflight(led(run, groups[0], signals, listed, []))
    assert preflight.first_nodes(groups[0].members()) == (1, 2)
    everybody = Cluster(listed={f"node{it}": "failed twice" for it in (1, 2, 3)})
    preflight = Preflight(led(run, groups[0], signals, everybody, []))
    assert preflight.first_nodes(groups[0].members()) == (0, 1)
    for group in groups:
        group.leave()
