"""Which nodes the next attempt takes: pure functions over members, events and a decision of the policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from conf.schema import Config
from launchers.crew import Member, Order
from orchestra.crew.station import Station
from orchestra.crew.suitability import by_preference, doubts, slow
from orchestra.errors import ConfigError
from orchestra.jsonl import Record
from orchestra.recovery.policy import Action, Decision, Resources, node_is_gone
from orchestra.topology import batch_shape, has_open_micro_batch, layout


def excluded_hosts(events: Iterable[Record], here: Mapping[str, Any]) -> frozenset[str]:
    """Return the hosts that decisions so far left out of this run. `here`: the facts of this start of a job.

    A host that was merely gone is left out of the start that it left: Slurm gives none to a later one before
    it answers again, and a long run would in time be left without nodes.
    """
    hosts: set[str] = set()
    starts: dict[int, tuple[object, object]] = {}
    for event in events:
        if event["event"] == "attempt_started":
            starts[event["attempt"]] = _start_of_job(event)
        elif event["event"] == "restarting" and isinstance(event.get("exclude"), list):
            is_of_here = starts.get(event["attempt"]) == _start_of_job(here)
            if is_of_here or event.get("rule") != node_is_gone.__name__:
                hosts.update(event["exclude"])
    return frozenset(hosts)


def _start_of_job(facts: Mapping[str, Any]) -> tuple[object, object]:
    return facts.get("job"), facts.get("job_start")


def is_fit(member: Member) -> bool:
    """Tell whether a node's own look at itself found nothing that keeps it from training."""
    return not member.facts.get("unfit")


def shrunk(nodes: Sequence[int], config: Config) -> tuple[int, ...] | None:
    """Return as many of the nodes as give a layout, at least recovery.min_nodes; None where none does."""
    least = config.recovery.min_nodes
    if least is None:
        return None
    for count in range(min(len(nodes), config.cluster.nodes), least - 1, -1):
        if gives_layout(config, count):
            return tuple(nodes[:count])
    return None


def gives_layout(config: Config, num_nodes: int) -> bool:
    """Tell whether the run can train on so many nodes, with the same global batch by more accumulation."""
    try:
        mesh = layout(config.parallelism, num_nodes * int(config.cluster.gpus_per_node))
        if not has_open_micro_batch(config.train):
            batch_shape(config.train, mesh.dp)
    except ConfigError:
        return False
    return True


def resources(
    order: Order, members: Mapping[int, Member], station: Station, events: Iterable[Record]
) -> Resources:
    """Return what the policy has to choose from: the nodes that live, those of the order first."""
    bad = excluded_hosts(events, station.surroundings.facts())
    fit = {node: it for node, it in members.items() if is_fit(it) and it.host not in bad}
    hosts = tuple(fit[node].host for node in order.nodes if node in fit)
    spares = tuple(it.host for node, it in fit.items() if node not in order.nodes)
    wanted, least = station.config.cluster.nodes, station.config.recovery.min_nodes
    return Resources(
        wanted_nodes=wanted,
        min_nodes=wanted if least is None else least,
        in_place=True,
        hosts=hosts,
        spares=spares,
        can_requeue=station.surroundings.can_requeue,
    )


def next_nodes(
    order: Order,
    decision: Decision,
    members: Mapping[int, Member],
    config: Config,
    listed: Mapping[str, str],
    excluded: Collection[str] = (),
) -> tuple[int, ...] | None:
    """Return the nodes that the next attempt takes, in rank order; None where they do not suffice.

    Who stays keeps its place, so that its ranks find what they held; a spare takes the place of who is gone,
    and one that something speaks against (`listed`: hosts on the cluster's list) only where no other is.
    `excluded`: what earlier decisions left out.
    """
    bad = {*excluded, *decision.exclude}
    fit = {node for node, it in members.items() if is_fit(it) and it.host not in bad}
    spares = iter(by_preference(sorted(fit - set(order.nodes)), slow(members), doubts(members, listed)))
    places: list[int | None] = [node if node in fit else None for node in order.nodes]
    if decision.action in (Action.replace, Action.restart):
        places = [next(spares, None) if node is None else node for node in places]
    nodes = [node for node in places if node is not None]
    if len(nodes) == len(order.nodes):
        return tuple(nodes)
    return shrunk(nodes, config)


def without_unfit(order: Order, decision: Decision, members: Mapping[int, Member]) -> Decision:
    """Return a decision that also leaves out the nodes of an attempt that found themselves unfit, unless all
    did: then no node is to blame.
    """
    taking_part = [members[node] for node in order.nodes if node in members]
    unfit = {it.host: it.facts["unfit"] for it in taking_part if not is_fit(it)}
    if not unfit or len(unfit) == len(order.nodes) or decision.action in (Action.give_up, Action.end):
        return decision
    reason = "; ".join([decision.reason, *(f"{host} is not fit: {words}" for host, words in unfit.items())])
    exclude = tuple(dict.fromkeys([*decision.exclude, *unfit]))
    return dataclasses.replace(decision, exclude=exclude, reason=reason)


def evidence(decision: Decision) -> dict[str, Any]:
    """Return what an event says of a decision."""
    facts = dataclasses.asdict(decision)
    return {"decision": facts.pop("action").name, **facts}
