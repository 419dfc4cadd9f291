"""One node's part in an order: start torchrun, watch its ranks and the other nodes, report how it ended.

It decides nothing about what comes next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conf.schema import Config, NetworkConfig
from launchers.host_network import address_towards, free_port, interface_of, reachable_address
from launchers.launch_errors import LauncherError
from launchers.node_agent import NodeAgent, Patience, StopRequests, start_agent, supervise
from launchers.node_group import Order
from launchers.slurm.this_job import JobTask
from launchers.spec import Ending, LaunchSpec, Place, RankFailure
from orchestra.agents import node_copies
from orchestra.agents.attempt_record import AttemptRecord
from orchestra.agents.context import START, Station, attempt_of, host_of
from orchestra.agents.hang_watch import HangWatch, NodeInAttempt, heartbeat_environment, open_hang_watch
from orchestra.agents.hang_watch_all_nodes import HangWatchOfAllNodes
from orchestra.agents.node_copies import COPIES
from orchestra.errors import EXIT_DONE, EXIT_FAILED, LaunchError
from orchestra.recovery.hangs import limit_rules
from orchestra.run import stop_requests
from orchestra.run.paths import RunDir
from orchestra.run.stop_requests import StopRequest
from orchestra.submit.launch import launch_spec

# Ends a torchrun that goes on although nothing is left for it to watch: it would hold its node for ever.
#
# A torchrun whose ranks have all ended waits for those of other nodes, and may. Once no rank of the attempt
# is left it has some seconds. It knows nothing of what follows: how the attempt ended the ranks themselves
# said.


# It ends within a second of its ranks; on a machine that swaps, several.
_PATIENCE_S = 15.0
# Looking reads the events of the whole attempt.
_IDLE_LOOK_S = 5.0


class Lingering:
    """Watches one node's torchrun in an attempt of `world_size` ranks, of which `own` are this node's."""

    def __init__(self, station: Station, record: AttemptRecord, own: range, world_size: int) -> None:
        self._station = station
        self._record = record
        self._own = own
        self._world_size = world_size
        self._looked_at = 0.0
        self._has_ended_it = False

    def look(self, agent: NodeAgent) -> None:
        """End torchrun if nothing is left for it to do. Called about ten times a second."""
        now = time.monotonic()
        if agent.idle_s < _PATIENCE_S or self._has_ended_it or now - self._looked_at < _IDLE_LOOK_S:
            return
        self._looked_at = now
        seen = self._record.seen()
        # Where a rank of this node did not come to its end, torchrun waits for nobody.
        is_waiting = seen.finished_ranks >= set(self._own)
        if is_waiting and len(seen.ended_ranks) < self._world_size:
            return
        self._has_ended_it = True
        self._station.say(f"torchrun is ended: all its ranks ended {agent.idle_s:.0f} s ago, and it did not")
        agent.kill()

    def amended(self, ending: Ending) -> Ending:
        """Return how this node's part ended: where torchrun was ended here the ranks' own word counts."""
        if not self._has_ended_it or not self._record.seen().finished_ranks >= set(self._own):
            return ending
        return dataclasses.replace(ending, exit_code=EXIT_DONE)


# Where one node of a job stands: the address it is met at, and what follows for torchrun and gloo.
#
# It starts nothing and opens no connection.


_LOOPBACK = "127.0.0.1"


def own_address(network: NetworkConfig, task: JobTask) -> str:
    """Return the address at which this node meets the others. Raises LaunchError where none is known."""
    if task.num_nodes == 1:
        return _LOOPBACK
    try:
        return reachable_address(network.interface, task.host, task.launch_address)
    except LauncherError as error:
        raise LaunchError(f"{error} (cluster.network.interface)") from error


def placed(spec: LaunchSpec, node: int, address: str, port: int, meeting_id: str) -> tuple[LaunchSpec, Place]:
    """Return the place of the attempt's `node`-th node, and the spec with the interface that leads to the
    others, who meet at `address`.
    """
    if spec.num_nodes == 1:
        address = _LOOPBACK
    local = _LOOPBACK if spec.num_nodes == 1 else address_towards(address)
    interface = None if local is None else interface_of(local)
    if interface is not None and "GLOO_SOCKET_IFNAME" not in spec.environment:
        # gloo takes what this host's name means, which may be an address that nobody else reaches.
        spec = dataclasses.replace(spec, environment={**spec.environment, "GLOO_SOCKET_IFNAME": interface})
    return spec, Place(node, address, port, local_address=local, meeting_id=meeting_id)


# What a node agent makes of the requests to stop an attempt: leave it time to save, or end it at once.
#
# Signals to the agent and files in control/ are the same kind of request. It ends no process itself: it says
# how urgent the end is. Ctrl-C, a second signal, a request that says so, and a save that takes longer than
# recovery.stop_timeout_s end the ranks at once.


# How often the folder of requests is looked into.
_STOP_LOOK_S = 0.5


class Urgency:
    """How urgent it is to end one attempt. Called from the agent's thread, about ten times a second."""

    def __init__(self, run: RunDir, attempt: int, signals: StopRequests, timeout_s: float) -> None:
        self._run = run
        self._attempt = attempt
        self._signals = signals
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._looked_at = -_STOP_LOOK_S
        self._requests: list[StopRequest] = []
        # Signals that led to an end at once; any later one hurries.
        self._num_heard = 0
        # Why the ranks were ended at once; None while they were not.
        self.interruption: str | None = None

    def num_asked(self) -> int:
        """Return how often a stop was asked for, in whatever way."""
        return max(self._signals.count(), len(self._requests))

    def level(self) -> int:
        """Return 0 while the ranks are to be left alone, 1 when they are to be ended, 2 when it hurries."""
        if self.interruption is None:
            self._look()
            self._num_heard = self._signals.count()
            self.interruption = self._found()
            return 0 if self.interruption is None else 1
        return 2 if self._signals.count() > self._num_heard else 1

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

    def _found(self) -> str | None:
        """Return why the ranks are to be ended at once, None where they are not."""
        first = self._signals.first
        if first == "SIGINT":
            return "SIGINT received"
        if self._signals.count() > 1:
            return f"{first} received, and a second signal after it"
        pressing = next((request for request in self._requests if request.at_once), None)
        if pressing is not None:
            return f"{pressing}, at once"
        if first is not None and self._deadline is None and (problem := self._asked(first)):
            return f"{first} received, and the ranks could not be asked to save: {problem}"
        if self._deadline is not None and time.monotonic() > self._deadline:
            what = f"{first} received" if first is not None else str(self._requests[0])
            return f"{what}; the ranks had not stopped after recovery.stop_timeout_s={self._timeout_s:g}"
        return None

    def _asked(self, name: str) -> str | None:
        """Turn a signal into a request to the ranks; return what kept it from being written."""
        self._deadline = time.monotonic() + self._timeout_s
        try:
            request = stop_requests.write_request(self._run, self._attempt, stop_requests.signal_reason(name))
        except OSError as error:
            return error.strerror or str(error)
        self._requests = [*self._requests, request]
        return None


# Imports from a file system that many nodes read at once take that long.
_WARM_TIMEOUT_S = 300.0
# Ranks whose peer failed have nothing to save, and the next attempt sends what they did not.
_PATIENCE = Patience(failed_peer_s=1.5, failed_linger_s=2.0)
# Why an order broke where ranks ended by themselves; how long others of them are given to say the same.
RANKS_FAILED = "ranks failed"
_OWN_WORD_S = 1.5
# How long an agent tries to say how its part ended.
_REPORT_TIMEOUT_S = 60.0
# How long bringing the copies here may take that its ranks begin from.
_FETCH_S = 900.0
# How often a node looks whether the attempt broke on another one.
_LOOK_S = 1.0


def config_of(config: Config, order: Order) -> Config:
    """Return the configuration of an order's attempt: that of the run, on as many nodes as take part."""
    return dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, nodes=len(order.nodes)))


def perform(station: Station, order: Order) -> None:
    """Take this node's part in an attempt to its end and report it; nothing of it is left running then.

    Raises OSError when the report cannot be written: the others take this node for lost. An agent that is
    alone leaves the verdict in `station.untold` instead.
    """
    attempt = attempt_of(order)
    record = station.record(attempt)
    watch = _Watch(station, order)
    try:
        spec, place = _launch(station, order)
        with contextlib.suppress(OSError):
            record.events.write("node_started", node=station.node, pid=os.getpid())
        urgency = Urgency(station.run, attempt, station.signals, station.config.recovery.stop_timeout_s)
        agent = _started(station, spec, place)
        node = NodeInAttempt(attempt, station.node, place.node)
        config = config_of(station.config, order)
        watch.hangs = open_hang_watch(config, station.run, record.events, spec, node)
        others = order.nodes[1:] if place.node == 0 else ()
        watch.all_nodes = HangWatchOfAllNodes(
            station.run, attempt, others, spec.world_size, limit_rules(config)
        )
        own = range(place.node * spec.ranks_per_node, (place.node + 1) * spec.ranks_per_node)
        lingering = Lingering(station, record, own, spec.world_size)
        ending = _supervised(station, agent, urgency, watch, lingering)
    except (LauncherError, LaunchError, OSError) as error:
        record.write_failed(LaunchError(str(error)))
        station.crew.mark_broken(order.number, {"cause": "not started", "message": str(error)})
        _report(station, order, {"code": EXIT_FAILED, "message": str(error)})
        return
    watch.hangs.close()
    if ending.exit_code != EXIT_DONE:
        station.crew.mark_broken(order.number, {"cause": RANKS_FAILED, "host": station.member.host})
    sent = {} if station.copies is None else station.copies.end()
    # A full disk takes the record, not the verdict.
    with contextlib.suppress(OSError):
        record.write_killed_ranks(ending, was_stopped=ending.stops > 0)
        record.events.write("node_ended", node=station.node, code=ending.exit_code, **sent)
    try:
        _report(station, order, _reported(ending, urgency.interruption, watch))
    except OSError:
        if not station.is_alone:
            raise
        station.untold = record.conclude(ending, urgency.interruption)


def _report(station: Station, order: Order, ended: dict[str, Any]) -> None:
    """Say how it ended, what lies here in memory, and where the next attempt may meet."""
    if station.fitness is not None and ended["code"] != EXIT_DONE:
        # The leader is to know of it before it chooses the next attempt's nodes.
        station.fitness.look_again()
    with contextlib.suppress(LauncherError, OSError):
        station.crew.tell({"port": free_port()})
    held = {} if station.copies is None else {COPIES: station.copies.held()}
    deadline = time.monotonic() + (0.0 if station.is_alone else _REPORT_TIMEOUT_S)
    while True:
        station.crew.progress()
        try:
            station.crew.report(order.number, {**ended, **held})
            return
        except OSError:
            # A full or silent file system may answer the next time.
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOOK_S)


def _launch(station: Station, order: Order) -> tuple[LaunchSpec, Place]:
    attempt = attempt_of(order)
    spec = launch_spec(config_of(station.config, order), station.run, attempt, station.search_path)
    logs = tuple(station.run.node_log(attempt, node) for node in order.nodes)
    # Some hundred gigabytes may have to come from another node.
    station.crew.allow(_FETCH_S)
    copied, arguments = node_copies.begin(station, order)
    environment = {**spec.environment, **heartbeat_environment(station.run), **copied}
    arguments = (*spec.arguments, *arguments)
    spec = dataclasses.replace(spec, node_logs=logs, environment=environment, arguments=arguments)
    return placed(
        spec,
        order.nodes.index(station.node),
        order.facts["address"],
        order.facts["port"],
        order.facts["meeting"],
    )


def _started(station: Station, spec: LaunchSpec, place: Place) -> NodeAgent:
    """Start torchrun, from the warm process once that has imported torch: all ranks together do it once."""
    if station.warm is not None:
        station.warm.start()
        station.warm.await_ready(_WARM_TIMEOUT_S, lambda: _is_hurried(station))
    return start_agent(spec, place, _PATIENCE, warm=station.warm)


def _is_hurried(station: Station) -> bool:
    station.crew.progress()
    return station.signals.count() > 0


def _supervised(
    station: Station, agent: NodeAgent, urgency: Urgency, watch: _Watch, lingering: Lingering
) -> Ending:
    def stops() -> int:
        if watch.is_broken():
            # Ranks without their peers have nothing to save, and wait for nobody.
            return max(2, urgency.level())
        return urgency.level()

    def tick() -> None:
        station.crew.progress()
        watch.look()
        lingering.look(agent)
        station.tick(attempt_of(watch.order))
        if station.fitness is not None:
            station.fitness.tick(is_idle=False)

    return lingering.amended(supervise(agent, stops, tick))


def _reported(ending: Ending, interruption: str | None, watch: _Watch) -> dict[str, Any]:
    stops = 0 if watch.found is not None and interruption is None else ending.stops
    return {
        **dataclasses.asdict(ending),
        "stops": stops,
        "interruption": interruption,
        "code": ending.exit_code,
    }


def ending_of(report: Mapping[str, Any]) -> Ending:
    """Return the ending that a node's report tells of."""
    failures = report.get("failures", ())
    return Ending(
        int(report["code"]),
        int(report.get("stops", 0)),
        tuple(RankFailure(**failure) for failure in failures),
        tuple(report.get("survivors", ())),
    )


@dataclass
class _Watch:
    """Looks once a second whether the order broke somewhere, and, where this node leads, who is gone."""

    station: Station
    order: Order
    hangs: HangWatch | None = None
    all_nodes: HangWatchOfAllNodes | None = None
    found: dict[str, Any] | None = None
    _looked_at: float = field(default_factory=time.monotonic)

    def is_broken(self) -> bool:
        """Tell whether this node's ranks are to be ended.

        Where ranks of another node failed, those of this one may just be failing too, for the true reason:
        torchrun is left the time to see it.
        """
        if self.found is None:
            return False
        grace_s = _OWN_WORD_S if self.found.get("cause") == RANKS_FAILED else 0.0
        return time.monotonic() - self._looked_at >= grace_s

    def look(self) -> None:
        hangs = () if self.hangs is None or self.found is not None else self.hangs.look()
        if hangs:
            ranks = [hang.rank for hang in hangs]
            self.found = {"cause": "hang", "ranks": ranks, "host": self.station.member.host}
            self.station.crew.mark_broken(self.order.number, self.found)
        now = time.monotonic()
        if self.station.is_alone or self.found is not None or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        self._look_at_all_nodes()
        if self.station.crew.leads:
            mark_lost(self.station, self.order)
        self.found = self.station.crew.broken(self.order.number)
        limits = {} if self.found is None else self.found.get("limits")
        if self.hangs is not None and isinstance(limits, dict):
            self.hangs.record_hangs({int(rank): float(limit_s) for rank, limit_s in limits.items()})

    def _look_at_all_nodes(self) -> None:
        """Let all know which ranks hang, on whatever node, where this one sees them all."""
        if self.all_nodes is None or self.hangs is None:
            return
        if hung := self.all_nodes.look(self.hangs.stall):
            hosts = list(dict.fromkeys(it.host for it, _ in hung))
            limits = {str(it.rank): limit_s for it, limit_s in hung}
            evidence = {"cause": "hang", "ranks": [it.rank for it, _ in hung], "hosts": hosts}
            self.station.crew.mark_broken(self.order.number, {**evidence, "limits": limits})


def mark_lost(station: Station, order: Order) -> list[int]:
    """Return the nodes of an order that are silent, and let all know that it is broken. *The leader only*."""
    # Spares too: who died long ago must not be chosen.
    silent = station.crew.silent(range(station.crew.num_nodes))
    lost = [node for node in order.nodes if node in silent]
    if lost and order.action == START:
        hosts = [host_of(order, node) for node in lost]
        evidence = {"cause": "nodes lost", "nodes": lost, "hosts": hosts}
        station.crew.mark_broken(order.number, evidence)
    return lost
