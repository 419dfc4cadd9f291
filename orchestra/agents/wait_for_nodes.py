"""Before a job's first attempt: the leader waits for the nodes and their checks, and chooses the first nodes.

Also what follows where a warning of Slurm comes in that time. What the nodes found stands in what their
agents say of themselves, so that another agent can lead at any time; what it means is decided in
`orchestra.agents.choose_nodes`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from conf.schema import Config
from launchers.node_group import GroupMember
from orchestra.agents import choose_nodes
from orchestra.agents.attempt import requests_of
from orchestra.agents.attempt_record import write_start_failed
from orchestra.agents.choose_nodes import (
    CHECKS_TIMEOUT_S,
    are_checked,
    doubts,
    preferred,
    slow,
    words_of,
    write_findings,
)
from orchestra.agents.context import AgentContext
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_FAILED, EXIT_STOPPED, LaunchError
from orchestra.recovery.incidents import Verdict
from orchestra.recovery.policy import Action, Decision
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import Record, read_json_lines
from orchestra.submit.claims import upcoming_attempt

# From the start of the first node's task to the last one's: images are pulled, Python is loaded by many.
NODES_TIMEOUT_S = 600.0
# How long spares, and with recovery.min_nodes the last of the others, are waited for.
_SPARES_WAIT_S = 15.0
_MIN_NODES_WAIT_S = 60.0
# Starts of jobs in a row that may reach their time limit before an attempt begins.
_MOST_TOO_LATE = 3
# Jobs in a row that may end before their attempt because of nodes: what all nodes lack is no node's fault.
MOST_MOVES = 3
UNFIT = "nodes_unfit"


class WaitForNodes:
    """The wait for the nodes of one start of a job. *The leader only*."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._began = time.monotonic()
        # How many the run needs; None while that could not be read.
        self._fewest: int | None = None

    def is_over(self, members: Mapping[int, GroupMember]) -> bool:
        """Tell whether as many have come as there will be, or what follows is known without the others: some
        have fallen silent. Raises LaunchError where all live and stay too few.
        """
        waited = time.monotonic() - self._began
        missing = self._context.group.num_nodes - len(members)
        if missing == 0 or missing <= len(self._context.group.never_come()):
            return True
        wanted, least = self._context.config.cluster.nodes, self._context.config.recovery.min_nodes
        if len(members) >= wanted and waited > _SPARES_WAIT_S:
            return True
        if least is not None and len(members) >= least and waited > _MIN_NODES_WAIT_S:
            # Read once: nothing of it changes before the first order. Storage may fail for a moment.
            with contextlib.suppress(OSError):
                self._fewest = self._fewest or self._needed()
            if self._fewest is not None and len(members) >= self._fewest:
                return True
        if waited > NODES_TIMEOUT_S:
            if self._context.group.silent(members):
                return True
            # Where none died who is missing is asked after the agents' end (orchestra.agents.srun_failed).
            raise LaunchError(self.too_few(members))
        return False

    def _needed(self) -> int:
        return choose_nodes.fewest_nodes(
            choose_nodes.of_next_attempt(self._context.config, self._context.run)
        )

    def too_few(self, members: Mapping[int, GroupMember]) -> str:
        """Return which nodes are missing, as an error's words."""
        num_nodes, waited = self._context.group.num_nodes, time.monotonic() - self._began
        missing = sorted(set(range(num_nodes)) - set(members))
        events, here = read_events(self._context.run), self._context.scheduler.facts()
        hours = self._context.config.recovery.exclude_hours
        bad = choose_nodes.excluded_hosts(events, here, hours)
        bad -= choose_nodes.last_resort(events, here, hours)
        out = [member.host for member in members.values() if member.host in bad]
        if out and not missing:
            return (
                f"{', '.join(out)} failed this run before, or computed something wrong, and too few other "
                "nodes are there; resume it without (cluster.exclude), or on fewer nodes"
            )
        if not missing:
            return self._without_layout(num_nodes)
        return (
            f"only {len(members)} of {num_nodes} nodes came within {waited:.0f} s or can train; "
            f"missing: {', '.join(map(str, missing))}. Their logs tell what became of them, or "
            f"they do not share {self._context.run.path}"
        )

    def _without_layout(self, num_nodes: int) -> str:
        """Return how many nodes the run needs, where all nodes of the job are there and fit."""
        config = choose_nodes.of_next_attempt(self._context.config, self._context.run)
        if (problem := choose_nodes.batch_without_layout(config)) is not None:
            return problem
        own, fewest = config.cluster, choose_nodes.fewest_nodes(config)
        needed = f"{fewest}" if fewest == own.nodes else f"{fewest}..{own.nodes}"
        return (
            f"the job has {num_nodes} nodes of {own.gpus_per_node} ranks, which do not share out the batch "
            f"that the run goes on with: it needs at least {fewest} (cluster.nodes={needed})"
        )


class Preflight:
    """What the leader knows of its nodes before an attempt (`recovery.preflight`)."""

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._all_there_since: float | None = None
        # When each agent that came was seen first, by its incarnation.
        self._seen: dict[str, float] = {}
        self._has_written_findings = False
        self._listed: Mapping[str, str] | None = None

    def is_over(self, members: Mapping[int, GroupMember]) -> bool:
        """Tell whether the nodes that came have checked themselves, or are waited for no longer."""
        now = time.monotonic()
        self._all_there_since = self._all_there_since or now
        for member in members.values():
            self._seen.setdefault(member.incarnation, now)
        return are_checked(members, self._context.group.num_nodes, now - self._all_there_since)

    def is_awaited(self, member: GroupMember) -> bool:
        """Tell whether a node that came after the others may still find that it cannot train."""
        now = time.monotonic()
        since = now - self._seen.setdefault(member.incarnation, now)
        return not choose_nodes.is_ready(member) and since <= CHECKS_TIMEOUT_S

    def first_nodes(self, members: Mapping[int, GroupMember]) -> tuple[int, ...] | None:
        """Return the nodes of a job's first attempt, in rank order; None: they are too few."""
        config = choose_nodes.of_next_attempt(self._context.config, self._context.run)
        wanted = choose_nodes.most_nodes(config)
        events, here = read_events(self._context.run), self._context.scheduler.facts()
        hours = self._context.config.recovery.exclude_hours
        bad = choose_nodes.excluded_hosts(events, here, hours)
        nodes = self._chosen(members, config, wanted, bad)
        if nodes is None and (usable := choose_nodes.last_resort(events, here, hours)):
            # Too few others were there, and Slurm gave them again.
            nodes = self._chosen(members, config, wanted, bad - usable)
        # Without those that were left out another order may be better.
        return None if nodes is None else choose_nodes.arranged(nodes, members, config)

    def _chosen(
        self, members: Mapping[int, GroupMember], config: Config, wanted: int, bad: Collection[str]
    ) -> tuple[int, ...] | None:
        able = [
            node
            for node, member in sorted(members.items())
            if choose_nodes.is_fit(member) and member.host not in bad
        ]
        return preferred(
            choose_nodes.arranged(able, members, config, wanted),
            wanted,
            slow(members),
            doubts(members, self.listed),
            lambda nodes: choose_nodes.shrunk(nodes, config, members),
        )

    def write(self, events: EventWriter, members: Mapping[int, GroupMember], taken: Sequence[int]) -> None:
        """Write down and say what was found, of sound nodes one event alone, and in which order they are."""
        write_findings(events, members, self.listed, taken)
        for words in words_of(members, self.listed, taken):
            self._context.say(words)
        if self._context.is_alone:
            return
        facts = choose_nodes.order_facts(members, taken, self._context.config)
        with contextlib.suppress(OSError):
            events.write("nodes_ordered", **facts)
        for words in choose_nodes.order_words(facts):
            self._context.say(words)

    def go_elsewhere(self, members: Mapping[int, GroupMember], reason: str) -> str | None:
        """Let the run go on in another job without the nodes that cannot train, or with more where the job is
        too small; return what was done, None where that is not to be: neither is so, no job may follow, or
        several before this one did no better.

        Raises LauncherError, LaunchError and OSError.
        """
        context = self._context
        unfit = tuple(self.unfit(members))
        config = choose_nodes.of_next_attempt(context.config, context.run)
        is_small = context.group.num_nodes < choose_nodes.fewest_nodes(config)
        events = read_events(context.run)
        if not context.scheduler.can_requeue or moves(events, rule=UNFIT) >= MOST_MOVES:
            return None
        if not unfit and not is_small:
            return None
        # No attempt began: this follows the one before, which it says nothing of, and the number is free.
        attempt = upcoming_attempt(context.run) - 1
        writer = EventWriter(context.run, f"crew.{context.group.folder.name}", attempt, before_start=True)
        if not self._has_written_findings:
            self._has_written_findings = True
            write_findings(writer, members, self.listed, taken=())
        decision = Decision(Action.requeue, EXIT_FAILED, reason, rule=UNFIT, exclude=unfit)
        try:
            return context.scheduler.requeue(decision, attempt, writer)
        finally:
            writer.close()

    def unfit(self, members: Mapping[int, GroupMember]) -> dict[str, str]:
        """Return the hosts that cannot train, and why."""
        came = {
            member.host: str(member.facts["unfit"])
            for member in members.values()
            if not choose_nodes.is_fit(member)
        }
        ended = self._context.group.never_come().items()
        return came | {host: f"its task ended before its agent had come ({how})" for host, how in ended}

    @property
    def listed(self) -> Mapping[str, str]:
        """Hosts on the cluster's list, and why; read once for a start of a job."""
        if self._listed is None:
            self._listed = self._context.scheduler.excluded()
        return self._listed


def moves(events: Iterable[Record], since: str = "attempt_started", **facts: Any) -> int:
    """Return how often the run was moved to another job since the last event of a kind; `facts` are those of
    the moves that count, such as their rule.
    """
    count = 0
    # A leader that died, and who told of its job in its place, may both have done so.
    jobs: set[object] = set()
    for event in events:
        if event["event"] == since:
            count = 0
        if event["event"] == "requeued" and all(event.get(key) == facts[key] for key in facts):
            # Slurm starts one job again and again.
            count += event.get("how") != "chain" or event.get("job") not in jobs
            jobs.add(event.get("job"))
    return count


def start_failed(context: AgentContext, code: int, cause: str, unfit: Sequence[str] = ()) -> None:
    """Write down why this start of the job ends before an attempt, and which hosts are to blame. *The leader
    only*. Raises OSError.
    """
    job = context.scheduler.facts().get("job")
    write_start_failed(context.run, context.group.folder.name, job, code, cause, unfit)


def called_off(context: AgentContext) -> tuple[int, str]:
    """Let the run go on as after an attempt that was warned; return the exit code, and in a few words what
    was done. *The leader only*, before the first order. Raises OSError.

    The time limit and a preemption say nothing against the run, whether its nodes had met or not.
    """
    first = context.signals.first or ""
    words = f"{first} came before the attempt began"
    attempt = upcoming_attempt(context.run)
    reason = stop_requests.signal_reason(first)
    # Starts since the last attempt that were called off because of the time limit.
    num_too_late = moves(read_events(context.run), reason=stop_requests.TIME_LIMIT, before_start=True)
    if reason == stop_requests.TIME_LIMIT and num_too_late >= _MOST_TOO_LATE:
        limit = context.config.cluster.time_limit
        starts = f"{_MOST_TOO_LATE} starts in a row ended before an attempt began"
        remedy = f"(cluster.time_limit={limit}); resume it with a longer time limit"
        cause = f"{words}: {starts} {remedy}"
        start_failed(context, EXIT_DO_NOT_RESTART, cause)
        return EXIT_DO_NOT_RESTART, cause
    # What follows the attempt before: this one never was, and its number is free.
    name = f"crew.{context.group.folder.name}"
    events = EventWriter(context.run, name, attempt - 1, before_start=True)
    try:
        outcome = context.scheduler.go_on(
            Verdict(EXIT_STOPPED, "StopRequested", words),
            attempt - 1,
            events,
            lambda: frozenset([reason, *(request.reason for request in requests_of(context, attempt))]),
        )
    finally:
        events.close()
    words = f"{words}: {outcome}" if outcome else words
    written = read_json_lines(context.run.event_file(name))
    if not any(event.get("event") in ("requeued", "cancelled") for event in written):
        # Else the run would be told as it stood before, and the job as failed.
        start_failed(context, EXIT_STOPPED, words)
    return EXIT_STOPPED, words
