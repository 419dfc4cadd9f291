"""Nodes of a job that helps a run stand by until they take part: from its start on they are paid for."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from conf.schema import ClusterConfig, Config, Device, NetworkConfig, RecoveryConfig, TrainConfig
from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup, Order
from launchers.slurm.this_job import JobTask
from orchestra.agents.context import START, AgentContext, Scheduler
from orchestra.agents.growth import resize
from orchestra.agents.growth.helper_job import HelperJob
from orchestra.agents.growth.resize import Resize
from orchestra.report.spending import spending
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir

CONFIG = Config(
    cluster=ClusterConfig(nodes=4, gpus_per_node=8, device=Device.cpu, network=NetworkConfig(interface="lo")),
    recovery=RecoveryConfig(min_nodes=2, resize_every_s=600.0),
    train=TrainConfig(global_batch_size=32),
)
# Seconds from the start of the helping job to its agent's first word.
BEFORE_S = 1800.0


@pytest.fixture
def groups(run: RunDir) -> Iterator[list[NodeGroup]]:
    groups: list[NodeGroup] = []
    yield groups
    for group in groups:
        group.leave()


def joined(run: RunDir, groups: list[NodeGroup], scheduler: Scheduler) -> NodeGroup:
    group = NodeGroup(run.control / "crew", len(groups), 2, 15.0, may_grow=True)
    group.join(f"node{group.node + 1}", "127.0.0.1", {"port": 1, **scheduler.place()})
    groups.append(group)
    return group


def test_a_helping_jobs_nodes_are_counted_as_idle_from_its_start(
    run: RunDir, groups: list[NodeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resize, "_LOOK_S", 0.0)
    first = joined(run, groups, Scheduler())
    joined(run, groups, Scheduler())
    context = AgentContext(run, CONFIG, first, StopRequests(), Scheduler(), print)
    record, order = context.record(0), Order(0, START, (0, 1))
    record.events.write("attempt_started", nodes=2, ranks_per_node=8, nodes_held=2, job="7")
    looks = Resize(context, order, record)
    looks.look()
    task = JobTask("8", 0, 0, 1, "node3", "127.0.0.1", job_began=time.time() - BEFORE_S)
    joined(run, groups, HelperJob(CONFIG, task))
    looks.look()
    looks.look()
    (came,) = [event for event in read_events(run) if event["event"] == "nodes_held"]
    assert (came["nodes"], came["came"]) == (3, ["node3"])
    assert BEFORE_S <= came["before_s"] < BEFORE_S + 60
    # An hour later it is gone, without ever having taken part.
    groups.pop().leave()
    looks.look()
    left = [event for event in read_events(run) if event["event"] == "nodes_held"][-1]
    assert (left["nodes"], left["came"], left["before_s"]) == (2, [], 0.0)
    events = [{**event, "time": 0.0} for event in read_events(run)]
    for event, at in zip(
        (each for each in events if each["event"] == "nodes_held"), (3600.0, 7200.0), strict=True
    ):
        event["time"] = at
    used = spending(events, [], None, None, now=10_800.0)
    idle = came["before_s"] / 3600 + 1
    assert used.idle_gpu_hours == pytest.approx(8 * idle)
    assert used.gpu_hours == pytest.approx(8 * (2 * 3 + idle))


def test_who_was_there_when_the_attempt_began_is_no_news(
    run: RunDir, groups: list[NodeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resize, "_LOOK_S", 0.0)
    for _ in range(3):
        joined(run, groups, Scheduler())
    context = AgentContext(run, CONFIG, groups[0], StopRequests(), Scheduler(), print)
    record = context.record(0)
    record.events.write("attempt_started", nodes=2, ranks_per_node=8, nodes_held=3, job="7")
    Resize(context, Order(0, START, (0, 1)), record).look()
    assert [event["event"] for event in read_events(run)] == ["attempt_started"]
