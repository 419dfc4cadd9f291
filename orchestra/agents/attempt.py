"""One node's part in an attempt: start torchrun, watch its ranks and the other nodes, report how it ended.

`perform` is called by each agent that takes part; what comes next is the leader's to decide. Three things may
end the ranks before they end by themselves: a request to stop (`StopDeadline`), something that broke here or
on another node (`_AttemptWatch`), and a torchrun that goes on although nothing is left for it to watch
(`IdleTorchrun`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from conf.schema import Config
from launchers import LauncherError
from launchers.host_network import free_port
from launchers.node_agent import NodeAgent, Patience, StopRequests, start_agent, supervise
from launchers.node_group import Order
from launchers.numa import as_list
from launchers.torchrun import Ending, LaunchPlace, LaunchSpec, RankFailure
from orchestra.agents.attempt_record import AttemptRecord
from orchestra.agents.context import START, AgentContext, attempt_number, host_of
from orchestra.agents.growth.resize import Resize
from orchestra.agents.hang_watch import (
    HangWatchOfAllNodes,
    heartbeat_environment,
    open_hang_watch,
)
from orchestra.agents.node_copies import COPIES, prepare_copies
from orchestra.agents.stalled_ranks import recorder_environment
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, LaunchError
from orchestra.recovery.hangs import AWAITED, limit_rules
from orchestra.recovery.incidents import Verdict
from orchestra.run.control import stop_requests
from orchestra.run.control.stop_requests import StopRequest
from orchestra.run.paths import RunDir
from orchestra.run.secret import SECRET_VARIABLE
from orchestra.submit.launch import binding_here, launch_spec, placed

# Imports from a file system that many nodes read at once take that long.
_IMPORT_TIMEOUT_S = 300.0
# Ranks whose peer failed have nothing to save, and the next attempt sends what they did not.
_PATIENCE = Patience(failed_peer_s=1.5, failed_linger_s=2.0)
# Why an order broke where ranks ended by themselves; how long others of them are given to say the same.
_RANKS_FAILED = "ranks failed"
_HANG = "hang"
_OWN_VERDICT_S = 1.5
# How long an agent tries to report how its part ended.
_REPORT_TIMEOUT_S = 60.0
# How long it may take to bring the copies here that this node's ranks begin from.
_FETCH_S = 900.0
# How long it waits before it tries once more.
_RETRY_S = 1.0
# How often the folder of requests to stop is looked into.
_STOP_LOOK_S = 0.5
# torchrun ends within a second of its ranks; on a machine that swaps, several.
_TORCHRUN_END_S = 15.0
# Looking for ranks that are left reads the events of the whole attempt.
_IDLE_LOOK_S = 5.0


def perform(context: AgentContext, order: Order, tick: Callable[[int], None]) -> Verdict | None:
    """Take this node's part in an attempt to its end and report it; nothing of it is left running then.

    `tick` is called about ten times a second with the attempt. Raises OSError when the report cannot be
    written: the others take this node for lost. An agent that is alone returns the verdict instead, since
    nobody else can read it; else returns None.
    """
    attempt = attempt_number(order)
    record = context.record(attempt)
    try:
        spec, place = _launch(context, order)
        with contextlib.suppress(OSError):
            record.events.write("node_started", node=context.node, pid=os.getpid(), **_bound(context.config))
        patience_s, reason = context.config.recovery.stop_timeout_s, context.scheduler.stop_reason
        stop = StopDeadline(context.run, attempt, context.signals, patience_s, reason)
        resize = Resize(context, order, record)
        if not _is_to_start(context):
            return _report_not_begun(context, order, record, stop)
        agent = _started(context, spec, place)
        own = range(place.node * spec.ranks_per_node, (place.node + 1) * spec.ranks_per_node)
        watch = _AttemptWatch(context, order, record, spec, own)
        idle = IdleTorchrun(context, record, own, spec.world_size)

        def turn() -> None:
            tick(attempt)
            resize.look()

        ending = _supervised(context, agent, stop, watch, idle, turn)
    except (LauncherError, LaunchError, OSError) as error:
        record.write_failed(LaunchError(str(error)))
        context.group.mark_broken(order.number, {"cause": "not started", "message": str(error)})
        _report(context, order, {"code": EXIT_FAILED, "message": str(error)})
        return None
    ended_after = watch.ended_after() if ending.exit_code == EXIT_DONE else None
    watch.close()
    if ending.exit_code != EXIT_DONE:
        context.group.mark_broken(order.number, {"cause": _RANKS_FAILED, "host": context.member.host})
    sent = {} if context.copies is None else context.copies.end()
    # A full disk takes the record, not the verdict.
    with contextlib.suppress(OSError):
        record.write_killed_ranks(ending, was_stopped=ending.stops > 0)
        record.events.write("node_ended", node=context.node, code=ending.exit_code, **sent)
    try:
        # Ranks that were ended because the attempt broke elsewhere were not stopped on request.
        stops = 0 if watch.broken is not None and stop.interruption is None else ending.stops
        facts = {"stops": stops, "interruption": stop.interruption, "code": ending.exit_code}
        facts |= {"ended_after": ended_after}
        _report(context, order, {**dataclasses.asdict(ending), **facts})
    except OSError:
        if not context.is_alone:
            raise
        steps = context.config.train.steps
        return record.conclude(ending, stop.interruption, ended_after=ended_after, steps=steps)
    return None


def config_of(config: Config, order: Order) -> Config:
    """Return the configuration of an order's attempt: that of the run, on as many nodes as take part."""
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, nodes=len(order.nodes)))


def _launch(context: AgentContext, order: Order) -> tuple[LaunchSpec, LaunchPlace]:
    attempt = attempt_number(order)
    config, binding = config_of(context.config, order), binding_here(context.config)
    spec = launch_spec(config, context.run, attempt, context.search_path, binding)
    logs = tuple(context.run.node_log(attempt, node) for node in order.nodes)
    # Some hundred gigabytes may have to come from another node.
    context.group.allow(_FETCH_S)
    copied, arguments = prepare_copies(context, order)
    context.group.secret()
    secret = {SECRET_VARIABLE: str(context.group.secret_file)}
    recorder = recorder_environment(context.run, attempt, os.environ)
    environment = {**spec.environment, **heartbeat_environment(context.run), **recorder, **secret, **copied}
    arguments = (*spec.arguments, *arguments)
    spec = dataclasses.replace(spec, node_logs=logs, environment=environment, arguments=arguments)
    return placed(
        spec,
        order.nodes.index(context.node),
        order.facts["address"],
        order.facts["port"],
        order.facts["meeting"],
    )


def _bound(config: Config) -> dict[str, Any]:
    """Return what the record of a start says of the ranks' cores."""
    binding = binding_here(config)
    return {"cores": [as_list(cores) for cores in binding.cores], "unbound": binding.reason or None}


def _is_to_start(context: AgentContext) -> bool:
    """Wait until the fork server has imported torch, which all ranks together do once; False where the run is
    asked to stop meanwhile and no other node waits for this one's ranks.
    """

    def is_stopped() -> bool:
        context.group.progress()
        return context.signals.count() > 0

    if context.fork_server is not None:
        context.fork_server.start()
        context.fork_server.await_ready(_IMPORT_TIMEOUT_S, is_stopped)
    return not (context.is_alone and is_stopped())


def _started(context: AgentContext, spec: LaunchSpec, place: LaunchPlace) -> NodeAgent:
    """Start torchrun, from the fork server where that is ready."""
    if context.fork_server is None:
        return start_agent(spec, place, _PATIENCE)
    return start_agent(spec, place, _PATIENCE, starter=context.fork_server.start_torchrun)


def _report_not_begun(
    context: AgentContext, order: Order, record: AttemptRecord, stop: StopDeadline
) -> Verdict | None:
    """Report, as `perform` does, an attempt that was asked to stop before its ranks were started."""
    # The request, which whoever decides what follows reads.
    stop.level()
    ending = Ending(EXIT_STOPPED, stops=1)
    with contextlib.suppress(OSError):
        record.events.write("node_ended", node=context.node, code=ending.exit_code)
    try:
        facts = {"code": ending.exit_code, "interruption": stop.interruption}
        _report(context, order, {**dataclasses.asdict(ending), **facts})
    except OSError:
        return record.conclude(ending, stop.interruption, steps=context.config.train.steps)
    return None


def _supervised(
    context: AgentContext,
    agent: NodeAgent,
    stop: StopDeadline,
    watch: _AttemptWatch,
    idle: IdleTorchrun,
    tick: Callable[[], None],
) -> Ending:
    def stops() -> int:
        if watch.is_broken():
            # Ranks without their peers have nothing to save, and wait for nobody.
            return max(2, stop.level())
        return stop.level()

    def look() -> None:
        context.group.progress()
        watch.look()
        idle.look(agent)
        tick()
        if context.node_check is not None:
            context.node_check.tick(is_idle=False)

    return idle.amended(supervise(agent, stops, look))


class StopDeadline:
    """What the requests to stop one attempt ask for: time to save, or an end at once.

    Signals to the agent (Ctrl-C is one) and files in control/ are the same kind of request. A second signal,
    a request that says so, and a save that takes longer than recovery.stop_timeout_s end the ranks at once.
    Called from the agent's thread, about ten times a second.
    """

    def __init__(
        self,
        run: RunDir,
        attempt: int,
        signals: StopRequests,
        timeout_s: float,
        reason: Callable[[str], str] = stop_requests.signal_reason,
    ) -> None:
        """`reason`: of the request that a signal leads to."""
        self._run = run
        self._attempt = attempt
        self._signals = signals
        self._timeout_s = timeout_s
        self._reason = reason
        self._deadline: float | None = None
        self._looked_at = -_STOP_LOOK_S
        self._requests: list[StopRequest] = []
        # Signals that came before the ranks were ended at once; any later one kills them.
        self._num_before = 0
        # Why the ranks were ended at once; None while they were not.
        self.interruption: str | None = None

    def level(self) -> int:
        """Return 0 while the ranks are to be left alone, 1 when they are to be ended, 2 to kill them."""
        if self.interruption is None:
            self._look()
            self._num_before = self._signals.count()
            self.interruption = self._reason_to_interrupt()
            return 0 if self.interruption is None else 1
        return 2 if self._signals.count() > self._num_before else 1

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _STOP_LOOK_S:
            return
        self._looked_at = now
        try:
            self._requests = stop_requests.read_requests(self._run, self._attempt)
        except OSError:
            # The next look may succeed; a signal is heard without the file system.
            return
        if self._requests and self._deadline is None:
            self._deadline = now + self._timeout_s

    def _reason_to_interrupt(self) -> str | None:
        """Return why the ranks are to be ended at once, None where they are not."""
        first = self._signals.first
        if self._signals.count() > 1:
            return f"{first} received, and a second signal after it"
        at_once = next((request for request in self._requests if request.at_once), None)
        if at_once is not None:
            return f"{at_once}, at once"
        if first is not None and self._deadline is None and (problem := self._request_stop(first)):
            return f"{first} received, and the ranks could not be asked to save: {problem}"
        if self._deadline is not None and time.monotonic() > self._deadline:
            what = f"{first} received" if first is not None else str(self._requests[0])
            return f"{what}; the ranks had not stopped after recovery.stop_timeout_s={self._timeout_s:g}"
        return None

    def _request_stop(self, name: str) -> str | None:
        """Turn a signal into a request to the ranks; return what kept it from being written."""
        self._deadline = time.monotonic() + self._timeout_s
        try:
            request = stop_requests.write_request(self._run, self._attempt, self._reason(name))
        except OSError as error:
            return error.strerror or str(error)
        self._requests = [*self._requests, request]
        return None


def requests_of(context: AgentContext, attempt: int) -> list[StopRequest]:
    """Return the requests that the run stops with an attempt, none where the file system does not answer."""
    return [request for request in _all_requests(context, attempt) if request.reason != stop_requests.RESIZE]


def is_to_be_resized(context: AgentContext, attempt: int) -> bool:
    """Tell whether an attempt was asked to stop so that other nodes go on."""
    return any(request.reason == stop_requests.RESIZE for request in _all_requests(context, attempt))


def _all_requests(context: AgentContext, attempt: int) -> list[StopRequest]:
    try:
        return stop_requests.read_requests(context.run, attempt)
    except OSError:
        return []


class IdleTorchrun:
    """Ends one node's torchrun that goes on although no rank of the attempt is left: it would hold its node.

    A torchrun whose ranks have all ended waits for those of other nodes, and may. How the attempt ended the
    ranks themselves have written.
    """

    def __init__(self, context: AgentContext, record: AttemptRecord, own: range, world_size: int) -> None:
        """`own`: this node's ranks of the attempt's `world_size`."""
        self._context = context
        self._record = record
        self._own = own
        self._world_size = world_size
        self._looked_at = 0.0
        self._has_ended_it = False

    def look(self, agent: NodeAgent) -> None:
        """End torchrun if nothing is left for it to do. Called about ten times a second."""
        now = time.monotonic()
        if agent.idle_s < _TORCHRUN_END_S or self._has_ended_it or now - self._looked_at < _IDLE_LOOK_S:
            return
        self._looked_at = now
        seen = self._record.seen()
        # Where a rank of this node did not come to its end, torchrun waits for nobody.
        is_waiting = seen.finished_ranks >= set(self._own)
        if is_waiting and len(seen.ended_ranks) < self._world_size:
            return
        self._has_ended_it = True
        self._context.say(
            f"torchrun is ended: all its ranks ended {agent.idle_s:.0f} s ago, and it goes on by itself"
        )
        agent.kill()

    def amended(self, ending: Ending) -> Ending:
        """Return how this node's part ended: where torchrun was ended here the ranks' own verdicts count."""
        if not self._has_ended_it or not self._record.seen().finished_ranks >= set(self._own):
            return ending
        return dataclasses.replace(ending, exit_code=EXIT_DONE)


class _AttemptWatch:
    """Looks every now and then whether the attempt broke somewhere, and, where this node leads, which node is
    lost.
    """

    def __init__(
        self, context: AgentContext, order: Order, record: AttemptRecord, spec: LaunchSpec, own: range
    ) -> None:
        """Watch this node's `own` ranks, just started, and on the first node those of all nodes."""
        self._context = context
        self._order = order
        # Why the attempt broke; None while it has not.
        self.broken: dict[str, Any] | None = None
        self._looked_at = -context.group.look_s
        config = config_of(context.config, order)
        self._hangs = open_hang_watch(config, record, spec, own)
        others = order.nodes[1:] if context.node == order.nodes[0] else ()
        self._hangs_of_all_nodes = HangWatchOfAllNodes(
            context.run, record.number, others, spec.world_size, limit_rules(config)
        )

    def ended_after(self) -> int | None:
        """Return the step after which this node's ranks came to their end; None where one was silent."""
        return self._hangs.ended_after()

    def close(self) -> None:
        """Remove the ranks' heartbeats. *After they have ended.*"""
        self._hangs.close()

    def is_broken(self) -> bool:
        """Tell whether this node's ranks are to be ended.

        Where ranks of another node failed, those of this one may just be failing too, for the true reason:
        torchrun is left the time to see it.
        """
        if self.broken is None:
            return False
        grace_s = _OWN_VERDICT_S if self.broken.get("cause") == _RANKS_FAILED else 0.0
        return time.monotonic() - self._looked_at >= grace_s

    def look(self) -> None:
        context = self._context
        if self.broken is None and (hangs := self._hangs.look()):
            ranks = [hang.rank for hang in hangs]
            self.broken = {"cause": _HANG, "ranks": ranks, "host": context.member.host}
            context.group.mark_broken(self._order.number, self.broken)
        now = time.monotonic()
        if context.is_alone or self.broken is not None or now - self._looked_at < context.group.look_s:
            return
        self._looked_at = now
        self._look_at_all_nodes()
        if context.group.leads:
            mark_lost(context, self._order)
        self.broken = context.group.broken(self._order.number)
        if self.broken is not None and self.broken.get("cause") == _HANG:
            # Ranks of this node may be what the hanging one did not meet.
            self._hangs.keep_collectives()
        broken = self.broken or {}
        limits, is_awaited = broken.get("limits"), broken.get(AWAITED) is True
        if isinstance(limits, dict):
            limits_s = {int(rank): float(limit_s) for rank, limit_s in limits.items()}
            self._hangs.record_hangs(limits_s, is_awaited=is_awaited)

    def _look_at_all_nodes(self) -> None:
        """Let all nodes know which ranks hang, on whatever node, where this one sees them all."""
        if hanging := self._hangs_of_all_nodes.look(self._hangs.stall):
            # Where several stand at the same place some of them only wait.
            waited_for = self._hangs.awaited() if len(hanging) > 1 else frozenset()
            named = [(rank, limit_s) for rank, limit_s in hanging if rank.rank in waited_for]
            hanging = named or hanging
            hosts = list(dict.fromkeys(rank.host for rank, _ in hanging))
            limits = {str(rank.rank): limit_s for rank, limit_s in hanging}
            evidence = {"cause": _HANG, "ranks": [rank.rank for rank, _ in hanging], "hosts": hosts}
            told = {"limits": limits, AWAITED: bool(named)}
            self._context.group.mark_broken(self._order.number, {**evidence, **told})


def mark_lost(context: AgentContext, order: Order) -> list[int]:
    """Return the nodes of an order that are silent, and let all know that it is broken. *The leader only*."""
    # Spares too: one that died long ago must not be chosen.
    silent = context.group.silent(range(max(context.group.num_nodes, *(node + 1 for node in order.nodes))))
    if gone := context.group.gone(silent):
        context.scheduler.let_go([member.host for member in gone])
    lost = [node for node in order.nodes if node in silent]
    if lost and order.action == START:
        hosts = [host_of(order, node) for node in lost]
        evidence = {"cause": "nodes lost", "nodes": lost, "hosts": hosts}
        context.group.mark_broken(order.number, evidence)
    return lost


def _report(context: AgentContext, order: Order, ended: dict[str, Any]) -> None:
    """Report how it ended, what lies here in memory, and where the next attempt may meet."""
    if context.node_check is not None and ended["code"] != EXIT_DONE:
        # The leader is to know of it before it chooses the next attempt's nodes.
        context.node_check.look_again()
    with contextlib.suppress(LauncherError, OSError):
        context.group.tell({"port": free_port()})
    held = {} if context.copies is None else {COPIES: context.copies.held()}
    deadline = time.monotonic() + (0.0 if context.is_alone else _REPORT_TIMEOUT_S)
    while True:
        context.group.progress()
        try:
            context.group.report(order.number, {**ended, **held})
            return
        except OSError:
            # A full or silent file system may answer the next time.
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


def ending_of(report: Mapping[str, Any]) -> Ending:
    """Return the ending that a node's report tells of."""
    failures = report.get("failures", ())
    return Ending(
        int(report["code"]),
        int(report.get("stops", 0)),
        tuple(RankFailure(**failure) for failure in failures),
        tuple(report.get("survivors", ())),
    )
