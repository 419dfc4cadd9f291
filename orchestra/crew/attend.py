"""One agent's life: join the crew, carry out one order after another, lead when it is its turn, and leave."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from launchers.crew import Order
from launchers.errors import LauncherError
from launchers.ports import free_port
from orchestra.crew.copying import COPIES, keep, open_copies
from orchestra.crew.gathering import GATHER_TIMEOUT_S
from orchestra.crew.leading import Leading
from orchestra.crew.part import perform
from orchestra.crew.reach import Asking
from orchestra.crew.station import END, REFUSE, SURROUNDINGS_S, Station
from orchestra.errors import EXIT_FAILED, LaunchError, RivalError

_POLL_S = 0.2
# Agents that have nothing to do look less often: there may be thousands of them.
_IDLE_POLL_S = 1.0
_MANY_NODES = 64
# How long an agent waits for an order that nobody gives, once it has carried out the one before.
_ORPHAN_TIMEOUT_S = 900.0
# How often it looks whether it has been forgotten: that lists a file for each node.
_CHECK_S = 30.0
# Giving back the memory of copies may take so long.
_CLOSE_S = 900.0
# How long an agent that is warned before the first order waits for the leader, whom Slurm warns with it.
_WARNED_TIMEOUT_S = 20.0
# How long the last agent gives the others to leave before it ends the job.
_LEAVE_TIMEOUT_S = 15.0


def attend(station: Station) -> int:
    """Take part in all attempts of this start of the job; return the exit code that the last order names.

    *Every node*, main thread only. Raises RivalError when something else trains the run, LaunchError,
    LauncherError and OSError when this node cannot take part.
    """
    surroundings = station.surroundings
    address, fitness = surroundings.own_address(), station.fitness
    offered = {} if fitness is None else fitness.offers(address)
    station.crew.join(surroundings.host, address, {"port": free_port(), **offered})
    try:
        if fitness is not None:
            fitness.begin()
        if station.warm is not None:
            station.run.logs.mkdir(exist_ok=True)
            station.warm.start()
        station.copies = open_copies(station)
        if station.copies is not None:
            station.crew.tell({COPIES: station.copies.address})
        return _Agent(station).work()
    finally:
        station.crew.allow(_CLOSE_S)
        if station.copies is not None:
            station.copies.close()
        if fitness is not None:
            fitness.close()
        if station.warm is not None:
            station.warm.close()
        station.crew.leave()


class _Agent:
    def __init__(self, station: Station) -> None:
        self._station = station
        self._crew = station.crew
        self._leading = Leading(station)
        self._asking = Asking(station)
        # The newest order that this agent has dealt with.
        self._done = -1
        self._idle_since = self._checked_at = time.monotonic()
        # When a signal was first seen before the first order.
        self._warned_at: float | None = None

    def work(self) -> int:
        """Carry out orders until one ends the job."""
        while True:
            self._crew.progress()
            order = self._crew.newest_order()
            if order is not None and order.number > self._done:
                self._done = order.number
                if order.action in (END, REFUSE):
                    return self._ended(order)
                self._take_part(order)
                if self._station.untold is not None:
                    return self._station.untold.code
                self._idle_since = time.monotonic()
                continue
            if self._crew.leads:
                self._leading.look(order)
            elif self._station.signals.count() and order is None:
                self._wait_for_the_leaders_word()
            self._refuse_to_wait_for_ever(order)
            self._pause(order)

    def _wait_for_the_leaders_word(self) -> None:
        """Refuse to wait long for who was warned too, and says what that leads to. Raises LaunchError."""
        now = time.monotonic()
        self._warned_at = self._warned_at or now
        if now - self._warned_at > _WARNED_TIMEOUT_S:
            raise LaunchError(f"{self._station.signals.first} came before the first order")

    def _take_part(self, order: Order) -> None:
        if order.is_for(self._station.member):
            perform(self._station, order)
        elif self._station.node not in order.nodes:
            keep(self._station, order)
        elif not self._crew.reports(order.number, [self._crew.node]):
            # The agent before this one had a part in it, and died.
            self._crew.mark_broken(order.number, {"cause": "agent lost", "host": self._station.member.host})
            copies = self._station.copies
            held = {} if copies is None else {COPIES: copies.held()}
            self._crew.report(order.number, {"code": EXIT_FAILED, "cause": "agent lost", **held})

    def _ended(self, order: Order) -> int:
        if order.action == REFUSE:
            raise RivalError(str(order.facts.get("message")))
        if self._crew.leads:
            self._release(order)
        return int(order.facts.get("code", EXIT_FAILED))

    def _release(self, order: Order) -> None:
        """Give the job back where whoever would have done it is gone, after the others have left."""
        lost = {int(node) for node in order.facts.get("lost", [])}
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        if self._station.is_alone:
            return
        self._crew.allow(SURROUNDINGS_S)
        while time.monotonic() < deadline:
            members = self._crew.members()
            # Those that were lost in earlier attempts too: they never took their names off the list.
            lost.update(self._crew.silent(members))
            if members.keys() <= {self._station.node, *lost}:
                break
            time.sleep(_POLL_S)
        with contextlib.suppress(LauncherError):
            self._station.surroundings.release(sorted(lost))

    def _refuse_to_wait_for_ever(self, order: Order | None) -> None:
        now = time.monotonic()
        if now - self._checked_at < _CHECK_S:
            return
        self._checked_at = now
        limit = GATHER_TIMEOUT_S + _ORPHAN_TIMEOUT_S if order is None else _ORPHAN_TIMEOUT_S
        is_busy = order is not None and len(self._crew.reports(order.number, order.nodes)) == 0
        if is_busy or self._crew.leads:
            self._idle_since = now
        if now - self._idle_since > limit:
            raise LaunchError(
                f"nobody has said for {limit:g} s what is to come next ({self._crew.folder}); the other "
                "nodes' logs tell what became of them"
            )

    def _pause(self, order: Order | None) -> None:
        self._station.tick(-1)
        is_spare = order is not None and self._station.node not in order.nodes
        is_awaited = self._asking.look(order)
        if self._station.fitness is not None:
            self._station.fitness.tick(is_idle=is_spare)
        is_patient = not is_awaited and (is_spare or self._crew.num_nodes > _MANY_NODES)
        time.sleep(_IDLE_POLL_S if is_patient and not self._crew.leads else _POLL_S)


def crew_folder(control: Path, job: str, restart: int) -> Path:
    """Return where the agents of one start of a job meet."""
    return control / f"job-{job}.start-{restart}"
