"""Which nodes train and which are left out, from what they say of themselves and of each other."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from conf.schema import (
    ClusterConfig,
    Config,
    Device,
    NodeOrder,
    ParallelismConfig,
    RecoveryConfig,
    TrainConfig,
)
from launchers import SlurmRefused, SlurmSilent
from launchers.node_agent import StopRequests
from launchers.node_group import GroupMember, NodeGroup, Order
from orchestra.agents import choose_nodes, leader, wait_for_nodes
from orchestra.agents.choose_nodes import (
    Shrink,
    are_checked,
    arranged,
    by_preference,
    doubts,
    excluded_hosts,
    found_unfit,
    gives_layout,
    next_nodes,
    order_facts,
    preferred,
    resized,
    shrunk,
    slow,
    words_of,
    write_findings,
)
from orchestra.agents.context import END, REFUSE, START, AgentContext, Scheduler
from orchestra.agents.leader import Leader
from orchestra.agents.node_check.after_hang import cut_off, without_links
from orchestra.agents.wait_for_nodes import Preflight, WaitForNodes
from orchestra.errors import LaunchError
from orchestra.recovery.history import attempt_of
from orchestra.recovery.policy import Action, Decision
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir

GB = 1e9


def members(*facts: dict[str, Any]) -> dict[int, GroupMember]:
    numbers = range(len(facts))
    return {node: GroupMember(node, f"node{node + 1}", "10.0.0.1", "x", 1, facts[node]) for node in numbers}


def in_ring(*rates: list[float] | str, **more: Any) -> dict[int, GroupMember]:
    """Members of which node n measured rates[n] on the way to the next one, or an error."""
    results = ({"error": rate} if isinstance(rate, str) else {"bytes_per_s": rate} for rate in rates)
    rings = ({"to": (node + 1) % len(rates), **result, **more} for node, result in enumerate(results))
    return members(*({"ring": ring} for ring in rings))


def of_cores(*seconds: float) -> dict[int, GroupMember]:
    return members(*({"checked": {"core_s": core_s}} for core_s in seconds))


FAST, BAD = [1.1 * GB, 1.0 * GB], [0.11 * GB, 0.12 * GB]


@pytest.mark.parametrize(
    ("nodes", "slow_nodes"),
    [
        # Both links of it are slow; its neighbours are not blamed.
        (in_ring(FAST, BAD, BAD, FAST, FAST), [2]),
        (in_ring(BAD, FAST, FAST, BAD), [0]),
        # Nobody reaches it, and it reaches nobody.
        (in_ring(FAST, "timed out", "timed out", FAST, FAST), [2]),
        # A single slow link has two ends.
        (in_ring(BAD, FAST, FAST, FAST), []),
        # One good round is enough.
        (in_ring(FAST, [0.1 * GB, GB], [0.1 * GB, GB], FAST), []),
        # Busy hosts that share cores: far apart, and none of them slow.
        (in_ring([2.1 * GB] * 2, [0.4 * GB, 0.6 * GB], [0.3 * GB] * 2, [1.7 * GB] * 2), []),
        # Everything is slow: no single node is.
        (in_ring(*[[0.01 * GB] * 2] * 4), []),
        # Too few to compare.
        (in_ring(FAST, [0.01 * GB] * 2, FAST), []),
        (of_cores(0.002, 0.009, 0.002), []),
        (in_ring(), []),
        (members({}, {"ring": None}, {"ring": {"to": "x"}}, {"ring": {"to": 9, "bytes_per_s": "many"}}), []),
        # A throttled processor is slow, an older one is not.
        (of_cores(0.002, 0.002, 0.009, 0.0021), [2]),
        (of_cores(0.002, 0.002, 0.004, 0.0021), []),
    ],
)
def test_who_is_far_slower_than_all_others_is_slow(
    nodes: dict[int, GroupMember], slow_nodes: list[int]
) -> None:
    assert list(slow(nodes)) == slow_nodes


def test_a_slow_node_is_named_with_its_better_rate() -> None:
    assert "120 MB/s" in slow(in_ring(FAST, BAD, BAD, FAST))[2]


def shrink_to(least: int | None) -> Shrink:
    return lambda nodes: tuple(nodes) if least is not None and len(nodes) >= least else None


@pytest.mark.parametrize(
    ("fit", "slow_nodes", "doubtful", "least", "expected"),
    [
        # All well: the scheduler's order, the last ones are spares.
        ([0, 1, 2, 3], {}, {}, None, (0, 1, 2)),
        # A spare in the place of a slow or a doubtful one.
        ([0, 1, 2, 3], {1}, {}, None, (0, 2, 3)),
        ([0, 1, 2, 3], {}, {0}, None, (1, 2, 3)),
        # No spare: the slow one is used, even where fewer would do; a doubtful one only where they would not.
        ([0, 1, 2], {1}, {}, 2, (0, 1, 2)),
        ([0, 1, 2], {}, {1}, 2, (0, 2)),
        ([0, 1, 2], {}, {1}, None, (0, 1, 2)),
        ([0, 1, 2], {}, {1, 2}, 2, (0, 1, 2)),
        # A slow one rather than a doubtful one.
        ([0, 1, 2, 3], {1}, {3}, None, (0, 1, 2)),
        ([0, 1, 2, 3], {1, 2}, {0}, None, (1, 2, 3)),
        # Too few are fit.
        ([0, 1], {}, {}, None, None),
        ([0, 1], {}, {1}, 1, (0,)),
        ([0, 1], {}, {0, 1}, 1, (0, 1)),
        ([], {}, {}, 1, None),
    ],
)
def test_the_better_nodes_are_taken(
    fit: list[int], slow_nodes: set[int], doubtful: set[int], least: int | None, expected: Any
) -> None:
    chosen = preferred(fit, 3, dict.fromkeys(slow_nodes, ""), dict.fromkeys(doubtful, ""), shrink_to(least))
    assert chosen == expected


def test_the_sound_spare_steps_in_first() -> None:
    assert by_preference([1, 2, 3, 4], {2: "slow"}, {1: "listed"}) == [3, 4, 2, 1]


def test_the_first_attempt_waits_for_the_looks_but_not_for_ever() -> None:
    no_ring = {"looks": True, "ring_port": 1, "checked": {}}
    done = {**no_ring, "ring": {}}
    assert are_checked(members(done, done), 2, 0.0)
    assert not are_checked(members(done, no_ring), 2, 0.0)
    assert not are_checked(members(done, {"looks": True}), 2, 0.0)
    assert are_checked(members(done, {"looks": True}), 2, 11.0)
    # Who does not look, and who has no neighbour, is not waited for.
    assert are_checked(members({}, {}), 2, 0.0)
    assert are_checked(members(no_ring), 2, 0.0)


def test_the_events_and_the_words_say_who_is_left_out_and_why(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    facts: list[dict[str, Any]] = [{"checked": {"seconds": 0.2, "clock_ahead_s": 0.0}} for _ in range(4)]
    facts[1]["unfit"] = "/tmp is no folder here"
    facts[2]["checked"]["clock_ahead_s"] = 40.0
    there = members(*facts)
    listed = {"node4": "node4 failed twice"}
    assert doubts(there, listed) == {3: "node4 failed twice"}
    write_findings(EventWriter(run, "test", 0), there, listed, taken=(0, 2))
    (event,) = read_events(run, ("node_checked",))
    assert event["unfit"] == {"node2": "/tmp is no folder here"}
    assert event["doubt"] == {"node4": "node4 failed twice"}
    assert event["left_out"] == ["node2", "node4"]
    assert event["clock_off_s"] == {"node3": 40.0}
    assert words_of(there, listed, taken=(0, 2, 3)) == [
        "node2: /tmp is no folder here (left out)",
        "node4: node4 failed twice (used all the same)",
        "node3: its clock differs from the others' by 40.0 s",
    ]
    assert json.dumps(event)


# Which nodes no other one reaches, from what the nodes of a ring measured after an attempt that hung.

NUMBER = 3


def linked(*links: bool | None, number: int = NUMBER) -> dict[int, GroupMember]:
    """Members of which node n reached the next one or did not; None: it is gone."""
    there = in_ring(*([GB] if carried else "timed out" for carried in links), order=number)
    return {node: member for node, member in there.items() if links[node] is not None}


@pytest.mark.parametrize(
    ("links", "alone"),
    [
        # It is not heard: neither does it reach the next one, nor does it answer the one before.
        ((False, False, True), [1]),
        ((False, True, True, False), [0]),
        ((True, False, False, True, True), [2]),
        # Two of them side by side.
        ((True, False, False, False, True), [2, 3]),
        # One link has two ends.
        ((True, False, True, True), []),
        ((True, True, True), []),
        # The network is away for all.
        ((False, False, False), []),
        # What a node that is gone does not answer says nothing.
        ((True, False, None, True), []),
        ((False, None, False, True, True), []),
    ],
)
def test_a_node_without_any_link_that_carries_is_apart(
    links: tuple[bool | None, ...], alone: list[int]
) -> None:
    assert without_links(linked(*links), NUMBER, len(links)) == alone


def test_what_was_measured_at_another_time_says_nothing() -> None:
    assert without_links(linked(False, False, True, number=NUMBER - 1), NUMBER, 3) == []
    assert without_links(members(*[{"ring": None}] * 3), NUMBER, 3) == []


def test_a_host_that_was_left_out_does_not_come_back_as_a_spare() -> None:
    config = Config(cluster=ClusterConfig(nodes=2, spare_nodes=2, gpus_per_node=1))
    there = linked(True, None, True, True)
    decision = Decision(Action.replace, 1, "", exclude=("node2",))
    order = Order(0, "start", (0, 1))
    assert next_nodes(order, decision, there, config, {}) == (0, 2)
    assert next_nodes(order, decision, there, config, {}, {"node3"}) == (0, 3)
    assert next_nodes(order, decision, there, config, {}, {"node3", "node4"}) is None


# Where nodes are in the network.


def test_whoever_stays_keeps_its_place_and_only_checked_nodes_are_added() -> None:
    config = Config(
        cluster=ClusterConfig(nodes=4, gpus_per_node=1, device=Device.cpu),
        recovery=RecoveryConfig(min_nodes=1),
    )
    order = Order(3, "start", (2, 0))
    sound, unchecked = {"looks": True, "checked": {}}, {"looks": True}
    there = members(sound, {"unfit": "its disk is full"}, sound, unchecked, sound)
    assert resized(order, there, config, {}) == (2, 0, 4)
    assert resized(order, there, config, {}, excluded=["node5"]) == (2, 0)
    leaves = there | members({**sound, "leaves": True})
    assert resized(order, leaves, config, {}) == (2, 4)
    # No more than are wanted, and none where too few are left.
    many = there | {node: dataclasses.replace(there[4], node=node) for node in (5, 6)}
    assert resized(order, many, config, {}) == (2, 0, 4, 5)
    pairs = dataclasses.replace(config, recovery=RecoveryConfig(min_nodes=2))
    assert resized(order, members({"leaves": True}, sound), pairs, {}) is None


@pytest.mark.parametrize("ep", [1, 2])
def test_a_run_shrinks_and_grows_only_to_numbers_of_nodes_that_whole_shard_groups_fill(ep: int) -> None:
    config = Config(
        cluster=ClusterConfig(nodes=4, gpus_per_node=2),
        parallelism=ParallelismConfig(ep=ep, zero=2, shard_degree=4),
        recovery=RecoveryConfig(min_nodes=1),
        train=TrainConfig(global_batch_size=24),
    )
    assert [count for count in range(1, 5) if gives_layout(config, count)] == [2, 4]
    assert shrunk([0, 1, 3], config) == (0, 1)
    assert shrunk([3], config) is None


def under(*leaves: str) -> dict[int, GroupMember]:
    return members(*({"switches": ["spine", leaf]} for leaf in leaves))


def test_a_spare_under_the_lost_nodes_switch_steps_in_and_the_others_keep_their_ranks() -> None:
    config = Config(cluster=ClusterConfig(nodes=3, spare_nodes=3, gpus_per_node=1))
    there = under("a", "b", "b", "b", "a", "a")
    where = {str(node): ["spine", leaf] for node, leaf in enumerate("abb")}
    order = Order(0, "start", (0, 1, 2), facts={"switches": where})
    replace = Decision(Action.replace, 1, "")
    for lost, expected in ((0, (4, 1, 2)), (1, (0, 3, 2))):
        left = {node: member for node, member in there.items() if node != lost}
        assert next_nodes(order, replace, left, config, {}) == expected
    # A sound one under another switch rather than a doubtful one.
    left = {node: member for node, member in there.items() if node != 1}
    assert next_nodes(order, replace, left, config, {"node4": "failed twice"}) == (0, 4, 2)


def test_ranks_are_laid_out_by_the_switches_and_what_is_left_out_breaks_no_group() -> None:
    cluster = ClusterConfig(nodes=4, spare_nodes=1, gpus_per_node=2)
    config = Config(cluster=cluster, parallelism=ParallelismConfig(tp=2, pp=2))
    there = under("a", "b", "a", "b", "a")
    # Two pipeline stages of two nodes; the odd node is the spare.
    assert arranged(range(5), there, config, 4) == (0, 2, 1, 3, 4)
    off = dataclasses.replace(cluster, node_order=NodeOrder.scheduler)
    assert arranged(range(5), there, dataclasses.replace(config, cluster=off), 4) == (0, 1, 2, 3, 4)
    may_shrink = dataclasses.replace(config, recovery=RecoveryConfig(min_nodes=2))
    assert shrunk([1, 2, 4], may_shrink, there) == (2, 4)
    facts = order_facts(there, (0, 2, 1, 3), config)
    assert (facts["by"], facts["leaves"]) == (
        "topology",
        {"spine.a": ["node1", "node3"], "spine.b": ["node2", "node4"]},
    )


# A job whose nodes are not fit makes room for another one without them, and not for ever.

ATTEMPT = 4


@dataclasses.dataclass(frozen=True)
class Cluster(Scheduler):
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


Join = Callable[..., list[NodeGroup]]


@pytest.fixture
def joined(run: RunDir) -> Iterator[Join]:
    """Let agents join that say these things of their nodes; they leave at the end."""
    groups: list[NodeGroup] = []

    def join(*facts_of_nodes: Mapping[str, object]) -> list[NodeGroup]:
        for node, facts in enumerate(facts_of_nodes):
            groups.append(NodeGroup(run.control / "crew", node, len(facts_of_nodes), 15.0))
            groups[-1].join(f"node{node + 1}", "127.0.0.1", {"port": 1, **facts})
        return groups

    yield join
    for group in groups:
        group.leave()


def led(run: RunDir, group: NodeGroup, scheduler: Scheduler, said: list[str] | None = None) -> AgentContext:
    config = Config(cluster=ClusterConfig(nodes=2, gpus_per_node=1, device=Device.cpu))
    words = [] if said is None else said
    return AgentContext(run, config, group, StopRequests(), scheduler, words.append)


def test_another_job_follows_without_the_unfit_node(run: RunDir, joined: Join) -> None:
    cluster, said = Cluster(), []
    EventWriter(run, "test", ATTEMPT).write("attempt_started")
    groups = joined({}, {"unfit": "nvidia-smi shows 7 devices, 8 are needed"})
    Leader(led(run, groups[0], cluster, said)).look(None)
    assert cluster.left_out == [("node2",)]
    order = groups[1].newest_order()
    assert order is not None
    assert (order.action, order.facts["code"]) == (END, 1)
    assert said == [f"job 8 goes on after attempt {ATTEMPT}"]
    (checked,) = [event for event in read_events(run) if event["event"] == "node_checked"]
    assert checked["unfit"] == {"node2": "nvidia-smi shows 7 devices, 8 are needed"}
    # Of the attempt before it nothing is said.
    assert checked["before_start"] is True
    assert attempt_of(read_events(run), ATTEMPT).excluded_hosts == ()


def test_a_node_that_fell_silent_before_the_first_attempt_has_no_part_in_it(
    run: RunDir, joined: Join
) -> None:
    cluster = Cluster()
    groups = joined({}, {}, {})
    groups[1].step_down({})
    Leader(led(run, groups[0], cluster)).look(None)
    order = groups[2].newest_order()
    assert order is not None
    assert (order.action, order.nodes, cluster.left_out) == (START, (0, 2), [])


def test_where_too_few_are_left_another_job_follows_without_the_silent_node(
    run: RunDir, joined: Join
) -> None:
    cluster = Cluster()
    groups = joined({}, {})
    groups[1].step_down({})
    Leader(led(run, groups[0], cluster)).look(None)
    assert cluster.left_out == [("node2",)]


def test_all_nodes_that_are_cut_off_step_down_before_an_attempt_is_concluded(
    run: RunDir, joined: Join
) -> None:
    ring = [{"order": 0, "error": "silent"}, {"order": 0, "error": "silent"}, {"order": 0}]
    groups = joined(*({"ring": measured} for measured in [*ring, ring[0]]))
    who = {str(node): member.incarnation for node, member in groups[0].members().items()}
    order = Order(0, START, (0, 1), who, {"attempt": ATTEMPT, "hosts": {"0": "node1", "1": "node2"}})
    assert groups[0].publish(order)
    for group in groups[:2]:
        group.report(0, {"code": 1})
    groups[0].mark_broken(0, {"cause": "hang"})
    for number in (0, 1):
        assert groups[number].leads
        leader = Leader(led(run, groups[number], Cluster()))
        leader.look(order)
        assert leader.has_stepped_down
    # Nothing was concluded by them, and the next one finds what they found.
    assert groups[2].leads
    assert read_events(run) == []
    assert cut_off(led(run, groups[2], Cluster()), order) == [0, 1]


@pytest.mark.parametrize(
    ("facts", "nodes"),
    [
        (({"unfit": "no room"}, {}), [0]),
        (({"unfit": "no room"}, {"unfit": "no room"}), []),
        (({"unfit": "no room"},), []),
        (({"unfit": "7 devices", "broken_device": "7 devices"},), [0]),
        (({"unfit": "7 devices", "broken_device": "7 devices"},) * 2, []),
    ],
)
def test_what_all_nodes_lack_is_no_nodes_fault_but_a_single_ones_broken_device_is(
    joined: Join, facts: tuple[dict[str, str], ...], nodes: list[int]
) -> None:
    members = joined(*facts)[0].members()
    assert list(found_unfit(Order(0, "start", tuple(range(len(facts)))), members)) == nodes


def test_what_no_job_finds_better_ends_the_run_with_the_reason(run: RunDir, joined: Join) -> None:
    groups = joined({}, {"unfit": "/scratch is no folder here"})
    context = led(run, groups[0], Cluster())
    members = groups[0].members()
    moved = [Preflight(context).go_elsewhere(members, "why") is not None for _ in range(5)]
    assert moved == [True, True, True, False, False]
    assert ended(groups, context) == [(END, 1, "node2: /scratch is no folder here")] * 2
    # An attempt that began is a new chance.
    EventWriter(run, "test", 0).write("attempt_started")
    assert Preflight(context).go_elsewhere(members, "why") is not None


def ended(groups: list[NodeGroup], context: AgentContext) -> list[tuple[str, int, str]]:
    """Let the first node lead; return what each agent is told."""
    Leader(context).look(None)
    orders = [order for group in groups if (order := group.newest_order()) is not None]
    return [(order.action, order.facts["code"], order.facts["said"]) for order in orders]


@dataclasses.dataclass(frozen=True)
class RefusingCluster(Cluster):
    def requeue(self, _decision: Decision, _attempt: int, _events: EventWriter, /) -> str:
        raise LaunchError("Slurm refused the next job: Invalid account") from SlurmRefused("Invalid account")


def test_where_no_job_may_follow_all_are_told_the_reason_and_wait_for_nobody(
    run: RunDir, joined: Join
) -> None:
    groups = joined({"unfit": "no room"}, {})
    assert ended(groups, led(run, groups[0], Scheduler())) == [(END, 1, "node1: no room")] * 2


def test_where_slurm_refuses_the_next_job_all_are_told_so(run: RunDir, joined: Join) -> None:
    groups = joined({}, {"unfit": "no room"})
    ((_, code, said), other) = ended(groups, led(run, groups[0], RefusingCluster()))
    assert (code, other[1]) == (1, 1)
    assert said == "node2: no room; it does not go on by itself: Slurm refused the next job: Invalid account"


@dataclasses.dataclass(frozen=True)
class SilentCluster(Cluster):
    """A cluster that gives no answer for the first so many times; what it took then it knows afterwards."""

    num_silent: int = 1
    tries: list[int] = dataclasses.field(default_factory=list)

    def refusal(self) -> str | None:
        return "job 8 was submitted for it later" if self.tries else None

    def requeue(self, decision: Decision, attempt: int, events: EventWriter, /) -> str:
        self.tries.append(attempt)
        if len(self.tries) <= self.num_silent:
            raise LaunchError("Slurm may have the job or not") from SlurmSilent("timed out")
        return super().requeue(decision, attempt, events)


def test_where_slurm_does_not_answer_it_is_asked_again(
    run: RunDir, joined: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "_SUBMIT_PAUSE_S", 0.0)
    groups, cluster, said = joined({}, {"unfit": "no room"}), SilentCluster(), []
    leading = Leader(led(run, groups[0], cluster, said))
    leading.look(None)
    assert (groups[1].newest_order(), said) == (None, [])
    leading.look(None)
    order = groups[1].newest_order()
    assert order is not None
    assert (order.action, said, cluster.left_out) == (END, ["job 8 goes on after attempt -1"], [("node2",)])
    assert [event["event"] for event in read_events(run)] == ["node_checked", "requeued"]


def test_where_slurm_stays_silent_all_end_after_a_while(
    run: RunDir, joined: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "NODES_TIMEOUT_S", -1.0)
    groups = joined({}, {"unfit": "no room"})
    words = "node2: no room; it does not go on by itself: Slurm may have the job or not"
    assert ended(groups, led(run, groups[0], SilentCluster())) == [(END, 1, words)] * 2


def test_nodes_that_come_while_slurm_is_silent_are_used_where_no_other_job_trains_the_run(
    run: RunDir, joined: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "_SUBMIT_PAUSE_S", 0.0)
    groups = joined({}, {"unfit": "no room"})
    leading = Leader(led(run, groups[0], SilentCluster()))
    leading.look(None)
    groups[1].tell({"unfit": None})
    leading.look(None)
    assert groups[1].newest_order() is None
    leading.look(None)
    order = groups[1].newest_order()
    assert order is not None
    assert (order.action, order.facts["message"]) == (REFUSE, "job 8 was submitted for it later")


@dataclasses.dataclass(frozen=True)
class NoOtherJob(Scheduler):
    """A job that none may follow."""

    def facts(self) -> dict[str, Any]:
        return {"job": "7"}


def test_where_nothing_can_be_written_all_are_told_all_the_same(run: RunDir, joined: Join) -> None:
    groups = joined({"unfit": "no room"}, {})
    run.events.write_text("no folder")
    assert ended(groups, led(run, groups[0], NoOtherJob())) == [(END, 1, "node1: no room")] * 2


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_node_that_died_is_left_out_though_another_one_never_came(
    run: RunDir, joined: Join, monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    """Where all live that came, who is missing is asked after their end: it may be taken or down."""
    monkeypatch.setattr(wait_for_nodes, "NODES_TIMEOUT_S", -1.0)
    cluster, groups = Cluster(), joined({}, {}, {})
    groups.pop().leave()
    context = led(run, groups[0], cluster)
    own = dataclasses.replace(context.config.cluster, nodes=3)
    context = dataclasses.replace(context, config=dataclasses.replace(context.config, cluster=own))
    if is_dead:
        groups[1].step_down({})
        assert [(action, code) for action, code, _ in ended(groups, context)] == [(END, 1)] * 2
        assert cluster.left_out == [("node2",)]
    else:
        with pytest.raises(LaunchError, match="only 2 of 3 nodes came within 0 s or can train; missing: 2"):
            Leader(context).look(None)


def test_a_node_that_is_alone_ends_with_the_reason(run: RunDir, joined: Join) -> None:
    groups = joined({"unfit": "no room"})
    with pytest.raises(LaunchError, match="node1: no room"):
        Leader(led(run, groups[0], Scheduler())).look(None)


@pytest.mark.parametrize(("rule", "is_used"), [("same_host_twice", True), ("broken_device", False)])
def test_a_node_that_failed_twice_is_used_where_slurm_has_no_other_and_no_broken_device_is(
    run: RunDir, joined: Join, rule: str, is_used: bool
) -> None:
    """The job after that may get it again where too few others are there."""
    events = EventWriter(run, "test", ATTEMPT)
    hosts = ["node1", "node2"]
    events.write("attempt_started", job="7", job_start=0, hosts=hosts)
    events.write("restarting", decision="requeue", rule=rule, exclude=["node2"])
    groups = joined({}, {}, {})
    preflight = Preflight(led(run, groups[0], Cluster()))
    assert preflight.first_nodes(groups[0].members()) == (0, 2)
    groups.pop().leave()
    there = groups[0].members()
    assert preflight.first_nodes(there) == ((0, 1) if is_used else None)
    assert excluded_hosts(read_events(run), {}, 24.0) == {"node2"}
    if is_used:
        # It is one of the run's own again: a failure is no loss of it.
        EventWriter(run, "next", ATTEMPT + 1).write("attempt_started", job="8", job_start=0, hosts=hosts)
        assert excluded_hosts(read_events(run), {}, 24.0) == frozenset()
    else:
        words = WaitForNodes(led(run, groups[0], Cluster())).too_few(members({}, {}, {}))
        assert words.startswith("node2 failed this run before, or computed something wrong")


@dataclasses.dataclass(frozen=True)
class AskingCluster(Cluster):
    """A cluster that takes its time to say whether another job trains the run; a node comes meanwhile."""

    late: list[NodeGroup] = dataclasses.field(default_factory=list)
    facts_of_late: Mapping[str, object] = dataclasses.field(default_factory=dict)

    def refusal(self) -> str | None:
        while self.late:
            group = self.late.pop()
            group.join(f"node{group.node + 1}", "127.0.0.1", {"port": 1, **self.facts_of_late})
        return None


@pytest.mark.parametrize("is_asking", [True, False])
def test_a_good_spare_that_comes_while_something_is_waited_for_is_preferred_to_a_last_resort(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, is_asking: bool
) -> None:
    events = EventWriter(run, "test", ATTEMPT)
    events.write("attempt_started", job="7", job_start=0, hosts=["node1", "node2"])
    events.write("restarting", decision="requeue", rule="same_host_twice", exclude=["node2"])
    groups = [NodeGroup(run.control / "crew", node, 3, 15.0) for node in range(3)]
    for group in groups[:2]:
        group.join(f"node{group.node + 1}", "127.0.0.1", {"port": 1})
    spare = groups[2]
    leader = Leader(led(run, groups[0], AskingCluster(late=[spare] if is_asking else [])))
    # As long as spares are waited for nothing is chosen.
    leader.look(None)
    assert spare.newest_order() is None
    if not is_asking:
        spare.join("node3", "127.0.0.1", {"port": 1})
    monkeypatch.setattr(wait_for_nodes, "_SPARES_WAIT_S", 0.0)
    leader.look(None)
    order = spare.newest_order()
    assert order is not None
    assert order.nodes == (0, 2)
    for group in groups:
        group.leave()


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_node_that_comes_late_and_has_not_checked_itself_is_used_only_when_it_has_or_takes_too_long(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, is_needed: bool
) -> None:
    monkeypatch.setattr(wait_for_nodes, "_SPARES_WAIT_S", 0.0)
    # The others have been there for longer than checks take.
    monkeypatch.setattr(choose_nodes, "CHECKS_TIMEOUT_S", -1.0)
    groups = [NodeGroup(run.control / "crew", node, 3, 15.0) for node in range(3)]
    for group in groups[:2]:
        facts = {"unfit": "no room"} if group.node == 1 and is_needed else {}
        group.join(f"node{group.node + 1}", "127.0.0.1", {"port": 1, **facts})
    spare = groups[2]
    if not is_needed:
        events = EventWriter(run, "test", ATTEMPT)
        events.write("attempt_started", job="7", job_start=0, hosts=["node1", "node2"])
        events.write("restarting", decision="requeue", rule="same_host_twice", exclude=["node2"])
    leading = Leader(led(run, groups[0], AskingCluster(late=[spare], facts_of_late={"looks": True})))
    # It is preferred to no last resort.
    leading.look(None)
    order = spare.newest_order()
    assert (None if order is None else order.nodes) == (None if is_needed else (0, 1))
    if is_needed:
        leading.look(None)
        assert spare.newest_order() is None
        monkeypatch.setattr(wait_for_nodes, "CHECKS_TIMEOUT_S", -1.0)
        leading.look(None)
        order = spare.newest_order()
        assert order is not None
        assert order.nodes == (0, 2)
    for group in groups:
        group.leave()


@dataclasses.dataclass(frozen=True)
class SlowCluster(Cluster):
    """A cluster that takes so long to answer that another agent leads meanwhile."""

    others: list[NodeGroup] = dataclasses.field(default_factory=list)

    def refusal(self) -> str | None:
        assert self.others[0].publish(Order(0, START, (0, 1), {}, {"attempt": 0}))
        return None


def test_who_was_cut_off_decides_nothing_beside_an_attempt_that_another_agent_began(
    run: RunDir, joined: Join
) -> None:
    groups = joined({}, {"unfit": "no room"}, {"unfit": "no room"})
    cluster = SlowCluster(others=groups[1:])
    Leader(led(run, groups[0], cluster)).look(None)
    assert (cluster.left_out, read_events(run)) == ([], [])


def test_a_listed_node_is_left_out_where_a_spare_is_there(run: RunDir, joined: Join) -> None:
    groups = joined({}, {}, {})
    listed = Cluster(listed={"node1": "node1 failed twice"})
    preflight = Preflight(led(run, groups[0], listed))
    assert preflight.first_nodes(groups[0].members()) == (1, 2)
    everybody = Cluster(listed=dict.fromkeys(("node1", "node2", "node3"), "failed twice"))
    preflight = Preflight(led(run, groups[0], everybody))
    assert preflight.first_nodes(groups[0].members()) == (0, 1)
