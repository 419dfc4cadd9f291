"""Which nodes the next attempt takes, and which had better not train. Called by the leader.

Functions of what the nodes publish about themselves and each other, of the run's events, and of a decision of
`orchestra.recovery.policy`. There are three degrees: *unfit* nodes cannot train and are never taken; *slow*
ones are left out where a spare is there; *doubtful* ones (on the cluster's list, or with signs of a failing
device) also where fewer nodes will do. Where they are needed they are used, and the event says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from conf.schema import Config, Device, NodeOrder
from launchers.node_group import GroupMember, Order
from launchers.slurm.switches import SwitchPath, distance, ordered
from orchestra.agents.context import AgentContext
from orchestra.errors import ConfigError
from orchestra.recovery.history import Attempt
from orchestra.recovery.policy import Action, Decision, Resources, broken_device, node_is_gone
from orchestra.run.events import EventWriter, is_number, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.run_lineage import newest_checkpoint
from orchestra.sizes.topology import batch_problems, batch_ramp, layout, node_blocks
from orchestra.sizes.units import first_few

# With fewer nodes the others' median says too little.
_FEWEST_NODES = 4
# A node is slow that reaches this share of the others' median, in all its measurements.
_SLOW_SHARE = 1 / 3
# Above that a single stream tells more about how busy a host is than about its network: a link of 10 Gb/s
# that fell back to 1 Gb/s carries 0.12 GB/s.
_FAST_BYTES_PER_S = 0.25e9
_CLOCK_SLACK_S = 2.0
# What tells NCCL on which network it meets the others.
_NCCL_NETWORK = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_NET", "NCCL_CROSS_NIC")
_HOUR_S = 3600.0
# How long the first attempt waits for the nodes' checks, once all nodes are there.
CHECKS_TIMEOUT_S = 10.0

Nodes = tuple[int, ...]
# What an agent publishes whose job is about to be ended while the others' goes on.
LEAVES = "leaves"
# Returns as many of the nodes as give a layout, None where too few do.
Shrink = Callable[[Sequence[int]], Nodes | None]


def are_checked(members: Mapping[int, GroupMember], num_nodes: int, waited_s: float) -> bool:
    """Tell whether all nodes that came have checked themselves and their neighbours, or are waited for no
    longer. `num_nodes`: of the whole job.
    """
    if waited_s > CHECKS_TIMEOUT_S:
        return True
    checking = {node: member.facts for node, member in members.items() if member.facts.get("looks")}
    ends = {node for node, facts in checking.items() if "ring_port" in facts}
    return all(
        "checked" in facts and ("ring" in facts or node not in ends or (node + 1) % num_nodes not in ends)
        for node, facts in checking.items()
    )


def slow(members: Mapping[int, GroupMember]) -> dict[int, str]:
    """Return the nodes that are far slower than the others, with what was measured."""
    return {**_far_slower(_rates(members), _rate_words), **_far_slower(_core_rates(members), _core_words)}


def doubts(members: Mapping[int, GroupMember], listed: Mapping[str, str]) -> dict[int, str]:
    """Return the nodes that something speaks against; `listed`: hosts on the cluster's list, and why."""
    doubtful = {}
    for node, member in members.items():
        reasons = [member.facts.get("doubt"), listed.get(member.host)]
        words = "; ".join(str(reason) for reason in reasons if reason)
        if words:
            doubtful[node] = words
    return doubtful


def preferred(
    fit: Sequence[int],
    wanted: int,
    slow_nodes: Mapping[int, str],
    doubtful: Mapping[int, str],
    shrink: Shrink,
) -> Nodes | None:
    """Return the nodes of an attempt, in their order: without those that something speaks against where the
    others suffice. None where even all are too few.
    """
    sound = [node for node in fit if node not in slow_nodes and node not in doubtful]
    with_slow = [node for node in fit if node not in doubtful]
    for pool, first in ((with_slow, sound), (list(fit), with_slow)):
        if len(pool) >= wanted:
            chosen = [*first, *(node for node in pool if node not in first)][:wanted]
            taken = tuple(node for node in fit if node in chosen)
            if pool is with_slow or (smaller := shrink(with_slow)) is None:
                return taken
            return smaller
    return shrink(with_slow) or shrink(fit)


def by_preference(
    nodes: Sequence[int], slow_nodes: Mapping[int, str], doubtful: Mapping[int, str]
) -> list[int]:
    """Return spares in the order in which they step in."""
    return sorted(nodes, key=lambda node: (node in doubtful, node in slow_nodes, node))


def write_findings(
    events: EventWriter, members: Mapping[int, GroupMember], listed: Mapping[str, str], taken: Sequence[int]
) -> None:
    """Write down what the nodes' checks found, in one event, and one for each slow node."""
    checks = [member.facts.get("checked") for member in members.values()]
    checked = [check for check in checks if isinstance(check, dict)]
    slow_nodes = slow(members)
    unfit = {member.host: member.facts["unfit"] for member in members.values() if not is_fit(member)}
    doubtful = {members[node].host: words for node, words in doubts(members, listed).items()}
    against = {*unfit, *doubtful, *(members[node].host for node in slow_nodes)}
    left_out = [
        member.host for node, member in members.items() if node not in taken and member.host in against
    ]
    findings = {"unfit": unfit, "doubt": doubtful, "left_out": left_out, "clock_off_s": _clocks_off(members)}
    with contextlib.suppress(OSError):
        events.write(
            "node_checked",
            nodes=len(members),
            looked=len(checked),
            seconds=max((check.get("seconds", 0.0) for check in checked), default=0.0),
            **{name: value for name, value in findings.items() if value},
        )
        for node, words in slow_nodes.items():
            host = members[node].host
            events.write("node_slow", node=node, host=host, cause=words, used=node in taken)


def words_of(
    members: Mapping[int, GroupMember], listed: Mapping[str, str], taken: Sequence[int]
) -> list[str]:
    """Return what a person should know of the nodes, a line for each; none where all are sound."""
    lines = []
    slow_nodes, doubtful = slow(members), doubts(members, listed)
    for node, member in sorted(members.items()):
        reasons = [member.facts.get("unfit"), doubtful.get(node), slow_nodes.get(node)]
        words = "; ".join(str(reason) for reason in reasons if reason)
        if words:
            lines.append(f"{member.host}: {words} ({'used all the same' if node in taken else 'left out'})")
    off = _clocks_off(members)
    return [*lines, *(f"{host}: its clock differs from the others' by {s:.1f} s" for host, s in off.items())]


def _clocks_off(members: Mapping[int, GroupMember]) -> dict[str, float]:
    """Return the hosts whose clock differs from the others', as compared with that of the file system."""
    ahead = {member.host: _number(member, "checked", "clock_ahead_s") for member in members.values()}
    known = {host: seconds for host, seconds in ahead.items() if seconds is not None}
    if not known:
        return {}
    middle = statistics.median(known.values())
    return {host: round(s - middle, 1) for host, s in known.items() if abs(s - middle) > _CLOCK_SLACK_S}


def _rates(members: Mapping[int, GroupMember]) -> dict[int, float]:
    """Return each node's best rate, as sender or as receiver, in bytes per second.

    A slow link has two ends, and the better of a node's two links tells which of them is slow.
    """
    best: dict[int, float] = {}
    for node, member in members.items():
        ring = member.facts.get("ring")
        if not isinstance(ring, dict):
            continue
        # Of both rounds; where the neighbour was not reached nothing came through.
        rounds = ring.get("bytes_per_s")
        rates = [float(rate) for rate in rounds if is_number(rate)] if isinstance(rounds, list) else []
        for end in (node, ring.get("to")):
            if isinstance(end, int) and end in members:
                best[end] = max(best.get(end, 0.0), 0.0, *rates)
    return best


def _core_rates(members: Mapping[int, GroupMember]) -> dict[int, float]:
    """Return how often in a second one core of a node does the same piece of work."""
    seconds = {node: _number(member, "checked", "core_s") for node, member in members.items()}
    return {node: 1.0 / value for node, value in seconds.items() if value}


def _number(member: GroupMember, *keys: str) -> float | None:
    value: Any = member.facts
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return float(value) if is_number(value) else None


def _far_slower(rates: Mapping[int, float], words: Callable[[float, float], str]) -> dict[int, str]:
    if len(rates) < _FEWEST_NODES:
        return {}
    slower = {}
    for node, rate in rates.items():
        median = statistics.median(other for key, other in rates.items() if key != node)
        evidence = words(rate, median) if rate < _SLOW_SHARE * median else ""
        if evidence:
            slower[node] = evidence
    return slower


def _rate_words(rate: float, median: float) -> str:
    if rate >= _FAST_BYTES_PER_S:
        return ""
    return f"sends and receives {rate / 1e6:.0f} MB/s at best, the others' median is {median / 1e6:.0f}"


def _core_words(rate: float, median: float) -> str:
    return f"a core takes {median / rate:.1f} times the others' median for the same work"


# Which nodes there are, and which are taken.


def excluded_hosts(
    events: Iterable[Record], here: Mapping[str, Any], hours: float, now: float | None = None
) -> frozenset[str]:
    """Return the hosts that decisions so far left out of this run. `here`: the facts of this start of a job;
    `hours`: recovery.exclude_hours, after which a host that failed is as good as any other; `now`: Unix
    seconds (default: the time of day).

    A host that was merely gone is left out of the start that it left: Slurm gives none to a later one before
    it answers again, and a long run would in time be left without nodes. One that a later attempt had to use
    again (`last_resort`) is not left out any more.
    """
    now = time.time() if now is None else now
    # By host the attempt after which it was left out, and the last one that used it.
    left_out: dict[str, int] = {}
    used: dict[str, int] = {}
    starts: dict[int, tuple[object, object]] = {}
    lost: dict[int, set[object]] = {}
    for event in events:
        if event["event"] == "attempt_started":
            starts[event["attempt"]] = _start_of_job(event)
            used.update(dict.fromkeys(event.get("hosts") or (), event["attempt"]))
        elif event["event"] in ("node_lost", "agent_lost"):
            lost.setdefault(event["attempt"], set()).add(event.get("host"))
        elif event["event"] == "restarting" and isinstance(event.get("exclude"), list):
            is_lost = event.get("rule") == node_is_gone.__name__
            # A clock that ran far ahead must not keep a host out for longer either. One that fell silent does
            # not become better within this start: it may be thawed in the midst of an attempt.
            if not is_lost and abs(now - event["time"]) >= hours * _HOUR_S:
                continue
            hosts = event["exclude"]
            if starts.get(event["attempt"]) != _start_of_job(here):
                # Beside one that failed twice others may have been lost. A rehearsal lists nobody.
                failed = event.get("listed") or hosts
                gone = lost.get(event["attempt"], set()).difference(failed)
                hosts = [] if is_lost else [host for host in hosts if host not in gone]
            left_out.update(dict.fromkeys(hosts, event["attempt"]))
    return frozenset(host for host, attempt in left_out.items() if used.get(host, -1) <= attempt)


def last_resort(
    events: Iterable[Record], here: Mapping[str, Any], hours: float, now: float | None = None
) -> frozenset[str]:
    """Return those of the hosts left out with which a job may train that would have too few nodes otherwise:
    what failed twice is an ordinary failure where there is nowhere else to go. Not those whose device
    computed something wrong. The arguments are those of `excluded_hosts`.
    """
    events = list(events)
    wrong: set[str] = set()
    for event in events:
        if event["event"] == "restarting" and event.get("rule") == broken_device.__name__:
            wrong.update(event.get("exclude") or ())
    return excluded_hosts(events, here, hours, now) - wrong


def _start_of_job(facts: Mapping[str, Any]) -> tuple[object, object]:
    return facts.get("job"), facts.get("job_start")


def is_fit(member: GroupMember) -> bool:
    """Tell whether a node's check of itself found nothing that keeps it from training."""
    return not member.facts.get("unfit")


def is_ready(member: GroupMember) -> bool:
    """Tell whether a node has checked itself, or does not."""
    return "checked" in member.facts or not member.facts.get("looks")


def resized(
    order: Order,
    members: Mapping[int, GroupMember],
    config: Config,
    listed: Mapping[str, str],
    excluded: Collection[str] = (),
) -> tuple[int, ...] | None:
    """Return as many nodes as the run can use, in rank order: those of the order that stay, then others that
    came. None where too few are left.

    `members`: those that live. A node that leaves (`LEAVES`) is not taken, and none that has not been checked
    yet.
    """
    fit = {
        node: member
        for node, member in members.items()
        if is_fit(member) and member.host not in excluded and not member.facts.get(LEAVES)
    }
    ready = {node for node, member in fit.items() if is_ready(member)}
    stay = [node for node in order.nodes if node in fit]
    new = by_preference(sorted(ready - set(order.nodes)), slow(members), doubts(members, listed))
    return shrunk([*stay, *new], config)


def shrunk(
    nodes: Sequence[int], config: Config, members: Mapping[int, GroupMember] | None = None
) -> tuple[int, ...] | None:
    """Return as many of the nodes as give a layout, at least recovery.min_nodes; None where none does. With
    `members`, who say where they are, those stay that are near each other.
    """
    least = config.recovery.min_nodes
    if least is None:
        return None
    for count in range(min(len(nodes), config.cluster.nodes), least - 1, -1):
        if gives_layout(config, count):
            return arranged(nodes, members or {}, config, count)[:count]
    return None


def gives_layout(config: Config, num_nodes: int) -> bool:
    """Tell whether the run can train on so many nodes, with the same global batch by more accumulation."""
    try:
        mesh = layout(config.parallelism, num_nodes * int(config.cluster.gpus_per_node))
    except ConfigError:
        return False
    return not any(batch_problems(config.train, mesh.dp))


def most_nodes(config: Config) -> int:
    """Return the largest number of nodes that the run may have and that gives a layout; all that it wants
    where none does, so that the ranks say why.
    """
    wanted = config.cluster.nodes
    return next((count for count in _numbers_of_nodes(config) if gives_layout(config, count)), wanted)


def fewest_nodes(config: Config) -> int:
    """Return the smallest number of nodes that the run may have and that gives a layout; the smallest that it
    may have where none does.
    """
    counts = _numbers_of_nodes(config)
    return next((count for count in reversed(counts) if gives_layout(config, count)), counts[-1])


def batch_without_layout(config: Config) -> str | None:
    """Return why the run cannot go on with any number of nodes that it may have: it is to go back into a
    batch of a ramp that none of them shares out. None where one does.

    `config` as `of_next_attempt` returns it.
    """
    counts = _numbers_of_nodes(config)
    if not config.train.batch_ramp or any(gives_layout(config, count) for count in counts):
        return None
    nodes = f"{counts[-1]} to {counts[0]}" if len(counts) > 1 else f"{counts[0]}"
    tokens = config.train.batch_ramp[0].global_batch_tokens
    return (
        f"it would go on with a batch of {tokens} tokens (train.batch_ramp), which {nodes} nodes of "
        f"{config.cluster.gpus_per_node} ranks do not share out; resume it with cluster.nodes or "
        "cluster.gpus_per_node that do"
    )


def _numbers_of_nodes(config: Config) -> range:
    """Return the numbers of nodes that an attempt may have, the largest first."""
    wanted, least = config.cluster.nodes, config.recovery.min_nodes
    return range(wanted, (wanted if least is None else least) - 1, -1)


def of_next_attempt(config: Config, run: RunDir) -> Config:
    """Return the configuration that nodes for a further attempt are chosen by: without the batches of a ramp
    that the run no longer trains, which more or fewer ranks need not share out. Raises OSError.
    """
    if not config.train.batch_ramp:
        return config
    begin = newest_checkpoint(read_events(run)) or 0
    to_come = config.train.batch_ramp[batch_ramp(config.train).at(begin + 1).number :]
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch_ramp=to_come))


def resources(
    order: Order, members: Mapping[int, GroupMember], context: AgentContext, events: Iterable[Record]
) -> Resources:
    """Return what the policy can choose from: the nodes that live, those of the order first."""
    bad = excluded_hosts(events, context.scheduler.facts(), context.config.recovery.exclude_hours)
    fit = {node: member for node, member in members.items() if is_fit(member) and member.host not in bad}
    hosts = tuple(fit[node].host for node in order.nodes if node in fit)
    spares = tuple(member.host for node, member in fit.items() if node not in order.nodes)
    wanted, least = context.config.cluster.nodes, context.config.recovery.min_nodes
    return Resources(
        wanted_nodes=wanted,
        min_nodes=wanted if least is None else least,
        in_place=True,
        hosts=hosts,
        spares=spares,
        can_requeue=context.scheduler.can_requeue,
    )


def next_nodes(
    order: Order,
    decision: Decision,
    members: Mapping[int, GroupMember],
    config: Config,
    listed: Mapping[str, str],
    excluded: Collection[str] = (),
) -> tuple[int, ...] | None:
    """Return the nodes that the next attempt takes, in rank order; None where they do not suffice.

    A node that stays keeps its index, so that its ranks find what they held; a spare takes the index of one
    that is gone, a slow or doubtful one only where no other is (`listed`: hosts on the cluster's list).
    `excluded`: hosts that earlier decisions left out.
    """
    bad = {*excluded, *decision.exclude}
    fit = {node for node, member in members.items() if is_fit(member) and member.host not in bad}
    spares = by_preference(sorted(fit - set(order.nodes)), slow(members), doubts(members, listed))
    places: list[int | None] = [node if node in fit else None for node in order.nodes]
    if decision.action in (Action.replace, Action.restart):
        places = _with_spares(order, places, spares, members, _degree(slow(members), doubts(members, listed)))
    nodes = [node for node in places if node is not None]
    if len(nodes) == len(order.nodes):
        if gives_layout(config, len(nodes)):
            return tuple(nodes)
        # The run goes back into a batch of a ramp that these do not share out; more may have stood by.
        nodes += [node for node in spares if node not in nodes]
    return shrunk(nodes, config, members)


def _degree(slow_nodes: Mapping[int, str], doubtful: Mapping[int, str]) -> Callable[[int], tuple[bool, bool]]:
    return lambda node: (node in doubtful, node in slow_nodes)


def _with_spares(
    order: Order,
    places: Sequence[int | None],
    spares: Sequence[int],
    members: Mapping[int, GroupMember],
    degree: Callable[[int], tuple[bool, bool]],
) -> list[int | None]:
    """Return the places of an order filled up: a spare under the lost node's own switch rather than another
    one, where nothing more speaks against it.
    """
    paths, left = switch_paths(members), list(spares)
    filled = list(places)
    for place, node in enumerate(order.nodes):
        if filled[place] is None and left:
            lost = tuple(order.facts.get("switches", {}).get(str(node), ()))
            # The first of equals, as they are sorted.
            best = min(left, key=lambda spare: (degree(spare), distance(lost, paths.get(spare, ()))))
            left.remove(best)
            filled[place] = best
    return filled


def switch_paths(members: Mapping[int, GroupMember]) -> dict[int, SwitchPath]:
    """Return the switches above each node that told of any."""
    told = {node: member.facts.get("switches") for node, member in members.items()}
    return {node: tuple(map(str, path)) for node, path in told.items() if isinstance(path, list) and path}


def arranged(
    nodes: Sequence[int], members: Mapping[int, GroupMember], config: Config, count: int | None = None
) -> Nodes:
    """Return nodes in the order of their ranks, where `count` of them (None: all) take part: groups that talk
    much lie under one switch (cluster.node_order). The last ones are those to leave out best.
    """
    paths = switch_paths(members)
    if config.cluster.node_order is NodeOrder.scheduler or not paths:
        return tuple(nodes)
    ranks = int(config.cluster.gpus_per_node)
    try:
        blocks = node_blocks(layout(config.parallelism, (count or len(nodes)) * ranks), ranks)
    except ConfigError:
        blocks = []
    return ordered(nodes, paths, blocks)


def order_facts(members: Mapping[int, GroupMember], nodes: Sequence[int], config: Config) -> dict[str, Any]:
    """Return what the event says of the order of nodes: the hosts by rank, those of each leaf, and the
    interfaces on which they meet.
    """
    # One may have left since.
    nodes = [node for node in nodes if node in members]
    paths, hosts = switch_paths(members), {node: members[node].host for node in nodes}
    leaves: dict[str, list[str]] = {}
    for node in nodes:
        if node in paths:
            leaves.setdefault(".".join(paths[node]), []).append(hosts[node])
    interfaces = {hosts[node]: members[node].facts.get("interface") for node in nodes}
    by = config.cluster.node_order if leaves else NodeOrder.scheduler
    told = {name: value for name in _NCCL_NETWORK if (value := os.environ.get(name))}
    chosen = config.cluster.network.interface
    if chosen is not None:
        told["NCCL_SOCKET_IFNAME"] = chosen
    return {"by": by.value, "hosts": list(hosts.values()), "leaves": leaves, "interfaces": interfaces} | (
        {} if config.cluster.device is Device.cpu else {"nccl": told}
    )


def order_words(facts: Mapping[str, Any]) -> list[str]:
    """Return the same for a log."""
    leaves, names = facts["leaves"], set(facts["interfaces"].values())
    if leaves:
        where = ", ".join(f"{len(hosts)} under {leaf}" for leaf, hosts in leaves.items())
        shown = f"{len(leaves)} leaf switch{'' if len(leaves) == 1 else 'es'} or blocks: {where}"
    else:
        shown = "Slurm knows of no switches"
    words = [
        f"nodes in the order of their ranks (by {facts['by']}): {first_few(facts['hosts'], 16)}; {shown}"
    ]
    met = next(iter(names)) if len(names) == 1 else None
    line = f"they meet on {met}" if met else f"they meet on {facts['interfaces']}"
    if "nccl" in facts:
        told = " ".join(f"{name}={value}" for name, value in facts["nccl"].items())
        line += f"; NCCL {f'is told {told}' if told else 'chooses its interfaces itself'}"
    return [*words, line]


def found_unfit(order: Order, members: Mapping[int, GroupMember]) -> dict[int, str]:
    """Return the nodes of an attempt whose check found them unfit, and why. None where all were: then no node
    is to blame, but a single one whose device is broken.
    """
    unfit = {
        node: str(members[node].facts["unfit"])
        for node in order.nodes
        if node in members and not is_fit(members[node])
    }
    is_alone = len(order.nodes) == 1 and any(members[node].facts.get("broken_device") for node in unfit)
    return unfit if is_alone or len(unfit) < len(order.nodes) else {}


def write_found(
    order: Order, members: Mapping[int, GroupMember], attempt: Attempt, events: EventWriter
) -> None:
    """Write down which nodes an attempt left unfit: that it ended is then no fault of the code where a device
    is broken. The leader before this one may have done so.
    """
    known = {event.get("host") for event in attempt.named("node_unfit")}
    for node, words in found_unfit(order, members).items():
        member = members[node]
        if member.host not in known:
            facts = {"host": member.host, "cause": words, "device": bool(member.facts.get("broken_device"))}
            with contextlib.suppress(OSError):
                events.write("node_unfit", node=node, **facts)


def without_unfit(order: Order, decision: Decision, members: Mapping[int, GroupMember]) -> Decision:
    """Return a decision that also leaves out the nodes of an attempt that their check found unfit."""
    unfit = {members[node].host: words for node, words in found_unfit(order, members).items()}
    if not unfit or decision.action in (Action.give_up, Action.end):
        return decision
    reason = "; ".join([decision.reason, *(f"{host} cannot train: {words}" for host, words in unfit.items())])
    exclude = tuple(dict.fromkeys([*decision.exclude, *unfit]))
    return dataclasses.replace(decision, exclude=exclude, reason=reason)


def evidence(decision: Decision) -> dict[str, Any]:
    """Return what an event says of a decision."""
    facts = dataclasses.asdict(decision)
    return {"decision": facts.pop("action").name, **facts}
