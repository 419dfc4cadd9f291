"""What the leading agent does: begin attempts, conclude how they ended, and say what comes next.

Any agent may lead at any time: all that it needs stands in files, so that the next agent can lead where this
one died. What follows a failure is decided by `orchestra.recovery.policy`, on which nodes by
`orchestra.agents.choose_nodes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from launchers import LauncherError, SlurmRefused
from launchers.node_group import GroupMember, Order
from launchers.torchrun import Ending
from orchestra.agents import choose_nodes
from orchestra.agents.attempt import config_of, ending_of, is_to_be_resized, mark_lost, requests_of
from orchestra.agents.attempt_record import AttemptRecord, write_started
from orchestra.agents.context import END, REFUSE, SCHEDULER_S, START, AgentContext, attempt_number, host_of
from orchestra.agents.growth.resize import living
from orchestra.agents.node_check.after_hang import RingAnswers, cut_off, word_of
from orchestra.agents.node_copies import MEMORY, memory_of
from orchestra.agents.wait_for_nodes import (
    NODES_TIMEOUT_S,
    Preflight,
    WaitForNodes,
    called_off,
    start_failed,
)
from orchestra.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    LaunchError,
)
from orchestra.recovery import history
from orchestra.recovery.incidents import Incident, Verdict, incidents, node_verdict
from orchestra.recovery.policy import Action, Decision, Rules, decide
from orchestra.run.control import stop_requests
from orchestra.run.control.stop_requests import StopRequest
from orchestra.run.events import is_whole, read_events
from orchestra.run.files import Record
from orchestra.submit.claims import rival_claim, take_next
from orchestra.submit.launch import launch_spec

# How each node's part of an order ended, as its agent reported it.
Reports = dict[int, dict[str, Any]]

# How long nodes that live are waited for at an attempt's end: their ranks may still write a checkpoint.
_END_TIMEOUT_S = 120.0
# Between two tries to submit the next job: not all that fails takes its time.
_SUBMIT_PAUSE_S = 5.0


class Leader:
    """One agent's turn as the leader. `look` is called every now and then while it leads and is idle."""

    def __init__(self, context: AgentContext, first_attempt: int | None = None) -> None:
        """`first_attempt`: the number of the first one, where it is claimed already."""
        self._context = context
        self._first_attempt = first_attempt
        self._group = context.group
        self._preflight = Preflight(context)
        self._wait = WaitForNodes(context)
        self._answers = RingAnswers(context)
        self._ended_since: float | None = None
        # Since when it is not known whether Slurm has the job that is to go on.
        self._unanswered_since: float | None = None
        # What is to follow and when (this host's own clock): the policy may want to wait.
        self._next: tuple[float, Order] | None = None
        # Whether this agent has no further part in the job.
        self.has_stepped_down = False

    def look(self, order: Order | None) -> None:
        """Do what is due. Raises LaunchError and OSError."""
        # Whom it has seen alive it misses sooner.
        self._group.silent(range(self._group.num_nodes))
        if self._next is not None and order is not None and order.number >= self._next[1].number:
            # Another agent went on while this one stood still.
            self._next = None
        if self._next is not None:
            self._publish_when_due(*self._next)
        elif order is None:
            self._begin()
        elif order.action == START and self._is_over(order) and self._answers.are_in(order):
            alone = cut_off(self._context, order)
            if self._context.node in alone and self._steps_down(order, alone):
                return
            self._conclude(order)

    def _steps_down(self, order: Order, alone: Sequence[int]) -> bool:
        """Let another agent conclude the attempt, and lead: no other node reaches this one. False where that
        cannot be written.
        """
        try:
            self._group.step_down(word_of(order, alone))
        except OSError:
            return False
        self._context.say("no other node reaches this one: it takes no further part")
        self.has_stepped_down = True
        return True

    # Beginning.

    def _begin(self) -> None:
        self._group.allow(SCHEDULER_S)
        context = self._context
        members = self._group.members()
        # A warning came while this start of the job waited for its nodes.
        is_warned = context.signals.count() > 0
        if not is_warned and not (self._wait.is_over(members) and self._preflight.is_over(members)):
            return
        # A job that this one may have submitted is no rival: it is taken over.
        rival = context.scheduler.refusal() if self._unanswered_since is None else None
        if self._group.newest_order() is not None:
            # That may have taken minutes, and another agent have led.
            return
        if rival is not None:
            # It may be the job that a leader before this one let the run go on in.
            if (moved := context.scheduler.moved_to()) is not None:
                self._order_end(0, EXIT_STOPPED if is_warned else EXIT_FAILED, moved)
            else:
                self._refuse(0, rival)
            return
        if self._was_cancelled_before():
            words = (
                f"{context.run.name} was cancelled, and Slurm started its job again all the same; "
                f"`orchestra resume {context.run.name}` goes on"
            )
            start_failed(context, EXIT_STOPPED, words)
            self._order_end(0, EXIT_STOPPED, words)
            return
        if is_warned:
            self._order_end(0, *called_off(context))
            return
        # Whoever came meanwhile is there too.
        members = self._group.members()
        if not (self._wait.is_over(members) and self._preflight.is_over(members)):
            return
        # One that came and died meanwhile is as unfit as one that says so itself.
        for node in self._group.silent(members):
            facts = {**members[node].facts, "unfit": "its agent fell silent before the first attempt"}
            members[node] = dataclasses.replace(members[node], facts=facts)
        ready = {node: it for node, it in members.items() if not self._preflight.is_awaited(it)}
        nodes = self._preflight.first_nodes(ready)
        if nodes is None:
            if len(ready) == len(members):
                self._end_unstarted(members)
            return
        if self._unanswered_since is not None:
            # Enough have come after all: the next look asks who else trains the run, and begins.
            self._unanswered_since = None
            return
        # What still waits to help a job before this one.
        with contextlib.suppress(LauncherError, OSError):
            context.scheduler.withdraw(for_good=False)
        self._start(0, nodes, members, wait_s=0.0)

    def _was_cancelled_before(self) -> bool:
        """Tell whether an earlier start of this job led the newest attempt, and it was cancelled: Slurm may
        have queued the job again at the same time. Only `orchestra resume` goes on then, with another job.
        """
        context, facts = self._context, self._context.scheduler.facts()
        if not facts.get("job_start"):
            return False
        newest = history.newest_attempt(read_events(context.run, ("attempt_started",)))
        if newest is None or newest.start.get("job") != facts.get("job"):
            return False
        is_earlier = newest.start.get("job_start") != facts["job_start"]
        return is_earlier and any(
            request.reason == stop_requests.CANCEL for request in requests_of(context, newest.number)
        )

    def _end_unstarted(self, members: dict[int, GroupMember]) -> None:
        """End this start of the job, whose nodes do not suffice: the run goes on in another one, or is over.

        By an order: the others would wait for nodes in vain, and nobody would give a dead node's job back.
        """
        context = self._context
        unfit = self._preflight.unfit(members)
        reason = "; ".join(map(": ".join, unfit.items())) or self._wait.too_few(members)
        try:
            outcome = self._preflight.go_elsewhere(members, reason)
        except (LauncherError, LaunchError, OSError) as error:
            is_refused = any(isinstance(it, SlurmRefused) for it in (error, error.__cause__))
            if not is_refused and self._tries_again():
                return
            outcome, reason = None, f"{reason}; it does not go on by itself: {error}"
        if outcome is None:
            outcome = reason
            with contextlib.suppress(OSError):
                start_failed(context, EXIT_FAILED, outcome, list(unfit))
            if context.is_alone:
                raise LaunchError(outcome)
        self._order_end(0, EXIT_FAILED, outcome)

    def _tries_again(self) -> bool:
        """Tell whether the next look asks Slurm once more, which gave no answer; it may have the job."""
        now = time.monotonic()
        self._unanswered_since = self._unanswered_since or now
        if now - self._unanswered_since > NODES_TIMEOUT_S:
            return False
        time.sleep(_SUBMIT_PAUSE_S)
        return True

    def _start(
        self, number: int, nodes: Sequence[int], members: dict[int, GroupMember], wait_s: float, **facts: Any
    ) -> None:
        """Prepare the order that starts an attempt, to be given in `wait_s` seconds."""
        paths = choose_nodes.switch_paths(members)
        where = {str(node): list(paths[node]) for node in nodes if node in paths}
        order = Order(
            number,
            START,
            tuple(nodes),
            {str(node): members[node].incarnation for node in nodes},
            {
                "hosts": {str(node): members[node].host for node in nodes},
                # Where a lost node was nobody else can tell.
                **({"switches": where} if where else {}),
                **facts,
            },
        )
        self._next = (time.monotonic() + wait_s, order)
        self._publish_when_due(*self._next)

    def _publish_when_due(self, due: float, order: Order) -> None:
        context = self._context
        before = order.facts.get("after")
        if before is not None and self._is_stopped_between(order.number, int(before)):
            self._next = None
            return
        if time.monotonic() < due:
            return
        self._next = None
        members = self._group.members()
        silent = self._group.silent(order.nodes)
        if any(node not in members or node in silent for node in order.nodes):
            # A node left meanwhile: what follows is decided again.
            return
        group = self._group.folder.name
        if before is not None and (rival := rival_claim(context.run, int(before), group)) is not None:
            self._refuse(order.number, f"attempt {rival} of {context.run.name} was begun by somebody else")
            return
        claimed = self._first_attempt if order.number == 0 else None
        attempt = take_next(context.run, group) if claimed is None else claimed
        first = members[order.nodes[0]]
        meeting = {"attempt": attempt, "address": first.address, "port": first.facts["port"]}
        meeting["meeting"] = f"{group}-{attempt}"
        order = Order(order.number, START, order.nodes, order.incarnations, {**order.facts, **meeting})
        if not self._publish(order):
            # Another agent leads, and has claimed an attempt of its own.
            context.run.claim(attempt).unlink(missing_ok=True)
            return
        self._write_started(order, attempt)
        if before is not None:
            # It may have been asked to stop in the moment that this one began.
            self._forward_requests(int(before), attempt)

    def _write_started(self, order: Order, attempt: int) -> None:
        context = self._context
        record = context.record(attempt)
        config = config_of(context.config, order)
        hosts = [host_of(order, node) for node in order.nodes]
        spec = launch_spec(config, context.run, attempt)
        facts = {"crew": self._group.folder.name, **context.scheduler.facts()}
        # What is paid for: nodes that stand by, or that a layout has no place for, are held too.
        held = len(living(context, order))
        if held > 1 or not context.is_alone:
            facts["nodes_held"] = held
        if order.number == 0:
            with contextlib.suppress(LauncherError, OSError):
                context.scheduler.complete_history()
        write_started(record, config, spec, hosts=hosts, **facts)
        if not (context.is_alone and order.number == 0):
            context.say(f"attempt {attempt} on {', '.join(hosts)}")
        if order.number == 0:
            self._preflight.write(record.events, self._group.members(), order.nodes)

    def _is_stopped_between(self, number: int, before: int) -> bool:
        """End the run here if a stop was asked for since attempt `before` ended; tell whether it was."""
        context, first = self._context, self._context.signals.first
        requests = self._asked(before)
        if first is None and not requests:
            return False
        is_urgent = self._is_hurried or any(request.at_once for request in requests)
        words = f"{first} received" if first is not None else str(requests[0])
        cause = "interrupted" if is_urgent else "StopRequested"
        verdict = Verdict(EXIT_INTERRUPTED if is_urgent else EXIT_STOPPED, cause, words)
        record = context.record(before)
        with contextlib.suppress(OSError):
            facts = {"code": verdict.code, "cause": cause, "message": words}
            record.events.write_surely("failed", node=record.node, **facts)
        self._group.allow(SCHEDULER_S)
        outcome = "" if is_urgent else context.scheduler.go_on(verdict, before, record.events)
        self._order_end(number, verdict.code, outcome or words)
        return True

    @property
    def _is_hurried(self) -> bool:
        """Whether a second signal said that nothing is to be waited for."""
        return self._context.signals.count() > 1

    def _asked(self, attempt: int) -> list[StopRequest]:
        """Return the requests to stop an attempt; a signal that no rank was left to hear is one of them.

        As a request it is read by whatever decides whether the run goes on by itself.
        """
        context, first = self._context, self._context.signals.first
        requests = requests_of(context, attempt)
        if first is not None and not requests:
            with contextlib.suppress(OSError):
                reason = stop_requests.signal_reason(first)
                requests = [
                    stop_requests.write_request(context.run, attempt, reason, at_once=self._is_hurried)
                ]
        return requests

    def _publish(self, order: Order) -> bool:
        self._ended_since = None
        return self._group.publish(order)

    def _forward_requests(self, before: int, attempt: int, *, only: str | None = None) -> None:
        """Ask an attempt to stop as the one before was asked; `only`: where that was the reason."""
        run = self._context.run
        for request in requests_of(self._context, before):
            if only in (None, request.reason):
                with contextlib.suppress(OSError):
                    stop_requests.write_request(run, attempt, request.reason, at_once=request.at_once)

    # Ending.

    def _is_over(self, order: Order) -> bool:
        """Tell whether all nodes have reported their part, or will not any more."""
        reports = self._group.reports(order.number, order.nodes)
        missing = set(order.nodes) - set(reports)
        if not missing or missing <= set(mark_lost(self._context, order)):
            return True
        if not reports:
            self._ended_since = None
            return False
        now = time.monotonic()
        self._ended_since = self._ended_since or now
        # They may still write their last checkpoint.
        return now - self._ended_since > max(_END_TIMEOUT_S, self._context.config.recovery.stop_timeout_s)

    def _conclude(self, order: Order) -> None:
        """Conclude the attempt, write that down, and prepare what follows."""
        context, attempt = self._context, attempt_number(order)
        self._group.allow(SCHEDULER_S)
        verdict, lost = conclude(context, order)
        record = context.record(attempt)
        number = order.number + 1
        if is_fenced(record):
            self._refuse(number, f"a newer attempt of {context.run.name} was begun by somebody else")
            return
        if verdict.code == EXIT_DONE:
            self._order_end(number, EXIT_DONE, "finished", lost)
            return
        requests = self._asked(attempt)
        is_stopped = verdict.code in (EXIT_STOPPED, EXIT_INTERRUPTED)
        if is_stopped and not requests and not context.signals.count() and is_to_be_resized(context, attempt):
            self._resize(order, verdict, record, lost)
        elif is_stopped or requests or context.signals.count():
            stopped = as_stopped(verdict, requests)
            outcome = context.scheduler.go_on(stopped, attempt, record.events)
            self._order_end(number, verdict.code, outcome or verdict.cause, lost)
        else:
            self._recover(order, verdict, record, lost)

    # Going on.

    def _resize(self, order: Order, verdict: Verdict, record: AttemptRecord, lost: list[int]) -> None:
        """Go on with the nodes that came, or without those that leave: nothing failed."""
        context, number = self._context, order.number + 1
        if self._has_moved(number, verdict, record, lost):
            return
        members = {node: it for node, it in living(context, order).items() if node not in lost}
        excluded = self._excluded(read_events(context.run))
        config = choose_nodes.of_next_attempt(context.config, context.run)
        nodes = choose_nodes.resized(order, members, config, self._preflight.listed, excluded)
        there, now = len(order.nodes), 0 if nodes is None else len(nodes)
        action, reason = _change(there, now)
        decision = Decision(action, verdict.code, reason, rule="resized")
        with contextlib.suppress(OSError):
            record.events.write("restarting", **choose_nodes.evidence(decision), after=verdict.cause)
        context.say(f"{action.name}: {reason}")
        if nodes is None:
            self._requeue(number, decision, verdict, record, lost)
            return
        if now >= context.config.cluster.nodes:
            # Those who come later would only stand by.
            with contextlib.suppress(LauncherError, OSError):
                context.scheduler.withdraw(for_good=False)
        self._start(
            number, nodes, members, 0.0, after=record.number, **self._memory(order, nodes, set(members))
        )

    def _has_moved(self, number: int, verdict: Verdict, record: AttemptRecord, lost: list[int]) -> bool:
        """End this start of the job where a leader that did not live to say so has let the run go on in
        another one: nothing may begin beside that. Tell whether one has.
        """
        moved = self._context.scheduler.moved_to()
        if moved is not None:
            self._forward_requests(record.number, record.number + 1, only=stop_requests.CANCEL)
            self._order_end(number, verdict.code, moved, lost)
        return moved is not None

    def _recover(self, order: Order, verdict: Verdict, record: AttemptRecord, lost: list[int]) -> None:
        context = self._context
        if self._has_moved(order.number + 1, verdict, record, lost):
            return
        members = {node: member for node, member in self._group.members().items() if node not in lost}
        silent = self._group.silent(members)
        members = {node: member for node, member in members.items() if node not in silent}
        choose_nodes.write_found(order, members, record.seen(), record.events)
        events = read_events(context.run)
        resources = choose_nodes.resources(order, members, context, events)
        log = incidents(history.read(events))
        decision = decide(log, resources, Rules.of(context.config.recovery))
        decision = choose_nodes.without_unfit(order, decision, members)
        waited_s = self._announce(record, verdict, decision, log)
        number = order.number + 1
        if decision.action in (Action.give_up, Action.end):
            if decision.code != verdict.code:
                _write_final(record, verdict, decision.code, decision.reason)
            self._order_end(number, decision.code or verdict.code, decision.reason, lost)
            return
        context.say(f"{decision.action.name}: {decision.reason}")
        listed = self._preflight.listed
        excluded = self._excluded(events)
        config = choose_nodes.of_next_attempt(context.config, context.run)
        nodes = choose_nodes.next_nodes(order, decision, members, config, listed, excluded)
        if decision.action is Action.requeue or nodes is None:
            self._requeue(number, decision, verdict, record, lost)
            return
        self._write_replaced(order, nodes, members, record)
        memory = self._memory(order, nodes, set(members))
        wait_s = max(0.0, decision.wait_s - waited_s)
        self._start(number, nodes, members, wait_s, after=record.number, **memory)

    def _excluded(self, events: list[Record]) -> frozenset[str]:
        context = self._context
        hours = context.config.recovery.exclude_hours
        return choose_nodes.excluded_hosts(events, context.scheduler.facts(), hours)

    def _announce(
        self, record: AttemptRecord, verdict: Verdict, decision: Decision, log: list[Incident]
    ) -> float:
        """Write down what follows; return how long it has been waited for by an agent that died meanwhile."""
        written = newest_restart(record)
        if written is not None and written.get("decision") == decision.action.name:
            return max(0.0, time.time() - float(written["time"]))
        with contextlib.suppress(OSError):
            record.events.write("restarting", **choose_nodes.evidence(decision), after=verdict.cause)
            self._context.scheduler.exclude(decision, log)
        return 0.0

    def _memory(self, order: Order, nodes: Sequence[int], living: set[int]) -> dict[str, Any]:
        """Return what the next order says of copies in memory, empty where it begins with the checkpoint."""
        reports = self._group.reports(order.number, order.nodes)
        memory, reason = memory_of(self._context, reports, nodes, living)
        if reason is not None:
            self._context.say(f"the next attempt begins with the checkpoint: {reason}")
        return {} if memory is None else {MEMORY: memory}

    def _write_replaced(
        self, order: Order, nodes: Sequence[int], members: dict[int, GroupMember], record: AttemptRecord
    ) -> None:
        gone = [node for node in order.nodes if node not in nodes]
        for old, new in zip(gone, (node for node in nodes if node not in order.nodes), strict=False):
            with contextlib.suppress(OSError):
                record.events.write(
                    "node_replaced", node=old, host=host_of(order, old), by=new, by_host=members[new].host
                )

    def _requeue(
        self, number: int, decision: Decision, verdict: Verdict, record: AttemptRecord, lost: list[int]
    ) -> None:
        context = self._context
        problem = choose_nodes.batch_without_layout(choose_nodes.of_next_attempt(context.config, context.run))
        if problem is not None:
            # No other job would have other nodes.
            outcome = f"{decision.reason}: {problem}"
            _write_final(record, verdict, EXIT_DO_NOT_RESTART, outcome)
            self._order_end(number, EXIT_DO_NOT_RESTART, outcome, lost)
            return
        try:
            if not context.scheduler.can_requeue:
                raise LaunchError(
                    "the nodes that are left are too few, or have no layout for its batch, and no other job "
                    f"may follow ({decision.reason})"
                )
            outcome = context.scheduler.requeue(decision, record.number, record.events)
            # The other job's attempt must hear of a cancel that came while that job was submitted.
            self._forward_requests(record.number, record.number + 1, only=stop_requests.CANCEL)
        except (LauncherError, LaunchError, OSError) as error:
            outcome = f"it does not go on by itself: {error}"
            _write_final(record, verdict, verdict.code, outcome)
        self._order_end(number, verdict.code, outcome, lost)

    def _refuse(self, number: int, message: str) -> None:
        self._publish(Order(number, REFUSE, facts={"message": message}))

    def _order_end(self, number: int, code: int, outcome: str, lost: Sequence[int] = ()) -> None:
        self._context.say(outcome)
        with contextlib.suppress(LauncherError, OSError):
            self._context.scheduler.withdraw(for_good=True)
        self._publish(Order(number, END, facts={"code": code, "said": outcome, "lost": list(lost)}))


def _change(there: int, now: int) -> tuple[Action, str]:
    """Return what going on with other nodes is called, by how many there were and are; and why."""
    if not now:
        return Action.requeue, "too few nodes stay"
    if now == there:
        # One came while another one left.
        return Action.replace, f"{now} nodes as before, not the same ones"
    return Action.grow if now > there else Action.shrink, f"{now} nodes instead of {there}"


def _write_final(record: AttemptRecord, verdict: Verdict, code: int, message: str) -> None:
    """Write the verdict once more: what is known of the attempts before this one changes it."""
    facts = {"cause": verdict.cause, "message": message, "step": verdict.step}
    with contextlib.suppress(OSError):
        record.events.write_surely("failed", node=record.node, code=code, **facts)


# How an attempt over several nodes ended: from the nodes' reports and the events to one verdict.


def conclude(context: AgentContext, order: Order) -> tuple[Verdict, list[int]]:
    """Conclude an attempt whose nodes have all reported or are lost; return the verdict and the lost nodes,
    with those that no other node reaches.

    It is written down once: an agent that leads after another one died over it takes that one's verdict.
    """
    attempt = attempt_number(order)
    record = context.record(attempt)
    reports = context.group.reports(order.number, order.nodes)
    missing = [node for node in order.nodes if node not in reports]
    alone = [node for node in cut_off(context, order) if node in reports]
    lost = [*missing, *alone]
    written = node_verdict(record.seen()) if newest_restart(record) is not None else None
    if written is not None:
        return written, lost
    _write_lost(context, order, record, reports, alone)
    ending, interruption = _merged(context, order, record, reports)
    verdict = record.conclude(
        ending,
        interruption,
        lambda verdict: context.scheduler.final_verdict(verdict, attempt, record.events),
        decides=lambda verdict: _is_for_the_policy(context, record, verdict),
        ended_after=_ended_after(order, reports),
        steps=context.config.train.steps,
    )
    context.say(f"attempt {attempt} {verdict.state}: {_in_words(verdict)}")
    return verdict, lost


def _in_words(verdict: Verdict) -> str:
    """Return what ended an attempt, and of a rank that failed which one it was and where."""
    if verdict.state != "failed" or verdict.explained or verdict.rank is None:
        return verdict.message or verdict.cause
    where = f" on {verdict.host}" if verdict.host else ""
    message = f": {verdict.message}" if verdict.message else ""
    return f"{verdict.cause} (rank {verdict.rank}{where}){message}"


def _is_for_the_policy(context: AgentContext, record: AttemptRecord, verdict: Verdict) -> bool:
    """Tell whether the policy decides what follows this verdict: it does so within the next second."""
    is_stopped = context.signals.count() or requests_of(context, record.number)
    return verdict.state == "failed" and not is_stopped and not is_fenced(record)


def _ended_after(order: Order, reports: Reports) -> int | None:
    """Return the step after which the ranks of all nodes were heard to come to their end."""
    steps = [reports.get(node, {}).get("ended_after") for node in order.nodes]
    heard = [step for step in steps if is_whole(step)]
    return min(heard) if heard and len(heard) == len(steps) else None


def newest_restart(record: AttemptRecord) -> dict[str, Any] | None:
    """Return what was decided after this attempt; None while nothing was."""
    decided = record.seen().named("restarting")
    return decided[-1] if decided else None


def is_fenced(record: AttemptRecord) -> bool:
    """Tell whether a rank found that a newer attempt trains the run: then these agents take no part in it."""
    return bool(record.seen().named("fenced"))


def as_stopped(verdict: Verdict, requests: list[StopRequest]) -> Verdict:
    """Return the verdict by which a run goes on that was warned, and then failed while it saved.

    One that says that starting again would not help stays.
    """
    reasons = {request.reason for request in requests}
    is_warned = stop_requests.TIME_LIMIT in reasons and stop_requests.CANCEL not in reasons
    if not is_warned or verdict.code == EXIT_DO_NOT_RESTART:
        return verdict
    return Verdict(EXIT_STOPPED, verdict.cause, verdict.message, step=verdict.step)


def _write_lost(
    context: AgentContext, order: Order, record: AttemptRecord, reports: Reports, alone: Sequence[int]
) -> None:
    """Write down which nodes did not report or are not reached, and whose agent died."""
    silent = context.group.silent(order.nodes)
    for node in order.nodes:
        report = reports.get(node)
        if report is None:
            cause = "its agent is silent" if node in silent else "it did not report its end"
            event = "node_lost"
        elif node in alone:
            cause, event = "no other node reaches it", "node_lost"
        elif report.get("cause") == "agent lost":
            cause = event = "agent_lost"
        else:
            continue
        with contextlib.suppress(OSError):
            record.events.write(event, node=node, host=host_of(order, node), cause=cause.replace("_", " "))


def _merged(
    context: AgentContext, order: Order, record: AttemptRecord, reports: Reports
) -> tuple[Ending, str | None]:
    """Return the ending of all nodes together, and why the ranks were ended at once where they were."""
    endings = {node: ending_of(report) for node, report in reports.items()}
    finished = record.seen().finished_ranks
    per_node = int(context.config.cluster.gpus_per_node)
    codes = [ending.exit_code for ending in endings.values()]
    for index, node in enumerate(order.nodes):
        if node not in reports:
            is_done = finished >= set(range(index * per_node, (index + 1) * per_node))
            codes.append(EXIT_DONE if is_done else EXIT_FAILED)
    code = next((code for code in codes if code != EXIT_DONE), EXIT_DONE)
    failures = tuple(failure for ending in endings.values() for failure in ending.failures)
    survivors = tuple(survivor for ending in endings.values() for survivor in ending.survivors)
    stops = max((ending.stops for ending in endings.values()), default=0)
    interruptions = [str(report["interruption"]) for report in reports.values() if report.get("interruption")]
    return Ending(code, stops, failures, survivors), next(iter(interruptions), None)
