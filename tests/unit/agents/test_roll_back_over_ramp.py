"""A run that shrank in a late batch of a ramp and is rolled back into an earlier one, which as many nodes do
not share out: it goes on with other nodes where there are any, and ends with words where there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from job_in_slurm import TASK, Slurm, options

from conf.schema import BatchStage, ClusterConfig, Config, Device, RecoveryConfig, Requeue, TrainConfig
from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup, Order
from orchestra.agents import wait_for_nodes
from orchestra.agents.choose_nodes import of_next_attempt
from orchestra.agents.context import END, START, AgentContext, Scheduler
from orchestra.agents.leader import Leader
from orchestra.agents.slurm_job import RunContinuation, SlurmJob
from orchestra.agents.wait_for_nodes import Preflight, WaitForNodes
from orchestra.errors import EXIT_STOPPED
from orchestra.recovery.incidents import Verdict
from orchestra.recovery.policy import Action, Decision
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.paths import RunDir
from orchestra.run.rollback import EVENT, SPIKE

# Steps of the first batch, of 4 sequences; the other one is of 12, which alone 3 nodes of a rank share out.
BORDER, SEQUENCE = 10, 8


def config_of(nodes: int, least: int | None) -> Config:
    tokens = 4 * SEQUENCE
    ramp = [BatchStage(0, tokens), BatchStage(BORDER * tokens, 3 * tokens)]
    train = TrainConfig(steps=60, seq_len=SEQUENCE, batch_ramp=ramp, micro_batch_size=1)
    cluster = ClusterConfig(nodes=nodes, gpus_per_node=1, device=Device.cpu)
    return Config(cluster=cluster, recovery=RecoveryConfig(min_nodes=least), train=train)


class Cluster(Scheduler):
    """A cluster on which another job can follow, or none."""

    def __init__(self, can_requeue: bool = True) -> None:
        self.reasons: list[str] = []
        self._can_requeue = can_requeue

    @property
    def can_requeue(self) -> bool:
        return self._can_requeue

    def requeue(self, decision: Decision, attempt: int, _: EventWriter, /) -> str:
        self.reasons.append(decision.reason)
        return f"job 8 goes on after attempt {attempt}"


@pytest.fixture
def groups(run: RunDir) -> Iterator[list[NodeGroup]]:
    """The agents of three nodes."""
    groups = [NodeGroup(run.control / "crew", node, 3, 15.0) for node in range(3)]
    for group in groups:
        group.join(f"node{group.node + 1}", "127.0.0.1", {"port": 1})
    yield groups
    for group in groups:
        group.leave()


def after_roll_back(
    run: RunDir, groups: list[NodeGroup], config: Config, cluster: Cluster, to: int
) -> tuple[Order, list[str]]:
    """Let three nodes train on behind the border, and their loss leap; return what they are told then."""
    saved = EventWriter(run, "test", 0)
    saved.write("attempt_started")
    saved.write("checkpoint_committed", step=BORDER + 10)
    said: list[str] = []
    context = AgentContext(run, config, groups[0], StopRequests(), cluster, said.append)
    leader = Leader(context, first_attempt=1)
    leader.look(None)
    order = groups[0].newest_order()
    assert order is not None
    assert (order.action, order.nodes) == (START, (0, 1, 2))
    rank = EventWriter(run, rank_writer(1, 0), 1, rank=0)
    rank.write("restored", step=BORDER + 10, generation=0, source="checkpoint")
    rank.write(EVENT, step=BORDER + 11, to=to, cause=SPIKE, left_out=[])
    rank.write("failed", code=1, cause="RollBackError", message="the loss leapt", step=BORDER + 11)
    for group in groups:
        group.report(order.number, {"code": 1, "stops": 0, "failures": [], "survivors": []})
    leader.look(order)
    told = groups[1].newest_order()
    assert told is not None
    assert told.number == order.number + 1
    return told, said


def test_fewer_nodes_go_on_that_share_out_that_batch(run: RunDir, groups: list[NodeGroup]) -> None:
    order, _ = after_roll_back(run, groups, config_of(4, 2), Cluster(), to=BORDER - 2)
    assert (order.action, order.nodes) == (START, (0, 1))


def test_behind_the_border_the_same_nodes_go_on(run: RunDir, groups: list[NodeGroup]) -> None:
    order, _ = after_roll_back(run, groups, config_of(4, 2), Cluster(), to=BORDER)
    assert (order.action, order.nodes) == (START, (0, 1, 2))


def test_where_only_more_nodes_share_it_out_another_job_goes_on(run: RunDir, groups: list[NodeGroup]) -> None:
    cluster = Cluster()
    order, _ = after_roll_back(run, groups, config_of(4, 3), cluster, to=BORDER - 2)
    assert (order.action, order.facts["code"]) == (END, 1)
    assert cluster.reasons == [f"it goes back to step {BORDER - 2}"]


def test_where_no_other_job_may_follow_the_run_says_why_it_ends(run: RunDir, groups: list[NodeGroup]) -> None:
    order, said = after_roll_back(run, groups, config_of(4, 3), Cluster(can_requeue=False), to=BORDER - 2)
    assert (order.action, order.facts["code"]) == (END, 1)
    assert "no layout for its batch, and no other job may follow" in said[-1]


@pytest.mark.parametrize("least", [None, 3])
def test_where_no_number_of_nodes_shares_it_out_no_other_job_is_tried(
    run: RunDir, groups: list[NodeGroup], least: int | None
) -> None:
    cluster = Cluster()
    order, said = after_roll_back(run, groups, config_of(3, least), cluster, to=BORDER - 2)
    assert (order.action, order.facts["code"], cluster.reasons) == (END, 93, [])
    words = f"a batch of {4 * SEQUENCE} tokens (train.batch_ramp), which 3 nodes of 1 ranks do not share out"
    assert words in said[-1]
    final = [event for event in read_events(run) if event["event"] == "failed"][-1]
    assert final["code"] == 93
    assert words in final["message"]


def test_a_job_begins_with_as_many_nodes_as_share_out_the_batch_gone_back_to(
    run: RunDir, groups: list[NodeGroup]
) -> None:
    """It was resumed with three nodes behind the border."""
    saved = EventWriter(run, "test", 0)
    saved.write("attempt_started")
    saved.write("checkpoint_committed", step=BORDER + 10)
    config = config_of(3, 2)
    preflight = Preflight(AgentContext(run, config, groups[0], StopRequests(), Cluster(), print))
    assert preflight.first_nodes(groups[0].members()) == (0, 1, 2)
    saved.write(EVENT, step=BORDER + 11, to=BORDER - 2, cause=SPIKE, left_out=[])
    assert len(of_next_attempt(config, run).train.batch_ramp) == 2
    assert preflight.first_nodes(groups[0].members()) == (0, 1)


# A job that may begin with few nodes (cluster.nodes=3..4) may get too few for the batch gone back to.


def ranged(config: Config, **own: object) -> Config:
    return replace(config, cluster=replace(config.cluster, min_nodes=3, **own))  # type: ignore[arg-type]


def resumed(run: RunDir) -> EventWriter:
    """Let the run have been resumed behind the border."""
    events = EventWriter(run, "test", 0)
    events.write("attempt_started")
    events.write("checkpoint_committed", step=BORDER + 10)
    return events


def rolled_back(events: EventWriter) -> EventWriter:
    """Let it then have gone back over the border."""
    events.write(EVENT, step=BORDER + 11, to=BORDER - 2, cause=SPIKE, left_out=[])
    return events


TOO_SMALL = (
    "the job has 3 nodes of 1 ranks, which do not share out the batch that the run goes on with: it needs at "
    "least 4 (cluster.nodes=4)"
)


@pytest.mark.parametrize("may_follow", [True, False])
def test_a_job_that_is_too_small_is_followed_by_another_one_or_says_what_is_needed(
    run: RunDir, groups: list[NodeGroup], may_follow: bool
) -> None:
    rolled_back(resumed(run))
    cluster, said = Cluster(may_follow), []
    context = AgentContext(run, ranged(config_of(4, 3)), groups[0], StopRequests(), cluster, said.append)
    Leader(context).look(None)
    order = groups[2].newest_order()
    assert order is not None
    assert (order.action, order.facts["code"]) == (END, 1)
    assert cluster.reasons == ([TOO_SMALL] if may_follow else [])
    assert said == ["job 8 goes on after attempt 0" if may_follow else TOO_SMALL]


def test_the_next_job_asks_for_as_many_nodes_as_share_out_the_batch(run: RunDir, slurm: Slurm) -> None:
    config = ranged(config_of(4, 3))
    may_shrink = replace(config, recovery=RecoveryConfig(min_nodes=2))
    events = resumed(run)

    def asked(config: Config, job: str) -> str | None:
        SlurmJob(run, config, replace(TASK, job=job)).requeue(Decision(Action.requeue, 1, "why"), 0, events)
        return options(slurm.calls("sbatch")[-1], "nodes")

    # Else the script of the job says enough.
    assert asked(config, "12") is None
    rolled_back(events)
    assert asked(config, "13") == "4"
    assert asked(ranged(config_of(6, 3)), "15") == "4-6"
    # A spare is one of those that share it out.
    assert asked(replace(config, cluster=replace(config.cluster, spare_nodes=1)), "16") is None
    assert asked(may_shrink, "14") is None


def test_so_does_the_one_that_follows_the_time_limit(run: RunDir, slurm: Slurm) -> None:
    config = ranged(config_of(4, 3), requeue=Requeue.chain)
    reasons = frozenset([stop_requests.TIME_LIMIT])
    continuation = RunContinuation(run, config, TASK, 0, rolled_back(resumed(run)), lambda: reasons)
    continuation.go_on(Verdict(EXIT_STOPPED, "StopRequested"))
    assert [options(call, "nodes") for call in slurm.calls("sbatch")] == ["4"]


def test_as_many_nodes_as_share_out_the_batch_are_waited_for(
    run: RunDir, groups: list[NodeGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fourth one may come any minute."""
    monkeypatch.setattr(wait_for_nodes, "_MIN_NODES_WAIT_S", 0.0)
    group = NodeGroup(run.control / "crew", 0, 4, 15.0)
    context = AgentContext(run, config_of(4, 3), group, StopRequests(), Cluster(), print)
    there, events = groups[0].members(), resumed(run)
    assert WaitForNodes(context).is_over(there)
    rolled_back(events)
    wait = WaitForNodes(context)
    kept = run.events.rename(run.path / "kept")
    # A loop: storage that fails.
    run.events.symlink_to(run.events)
    assert not wait.is_over(there)
    run.events.unlink()
    kept.rename(run.events)
    assert not wait.is_over(there)
    # What was found is kept.
    run.events.rename(kept)
    run.events.symlink_to(run.events)
    assert not wait.is_over(there)
