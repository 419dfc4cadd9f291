"""One agent's part in the preflight: it looks at its node and its neighbour, and says what it found.

Before the first attempt all looks have time, since nothing trains yet; behind an attempt's end the newest
word is waited for a moment only; spares look while they are idle. What was found goes into what the agent
says of itself (`unfit`, `doubt`, `checked`, `ring`). What follows is `orchestra.crew.suitability`'s to say.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from conf.schema import Config
from launchers.crew import Crew
from orchestra.crew.fitness_check import SETTLE_S, NodeCheck, wishes_of
from orchestra.crew.fitness_ring import Ring
from orchestra.rundir import RunDir

_IDLE_EVERY_S = 60.0


class Fitness:
    """Looks at this node for a crew's agent. All calls from the agent's own thread; none blocks for long."""

    def __init__(self, crew: Crew, check: NodeCheck, *, idle_every_s: float = _IDLE_EVERY_S) -> None:
        self._crew = crew
        self._check = check
        self._idle_every_s = idle_every_s
        self._ring: Ring | None = None
        self._begun_at = time.monotonic()
        # What is still to be told: the file system may have failed the last time.
        self._untold: dict[str, Any] = {}

    def offers(self, address: str) -> dict[str, Any]:
        """Return what the agent says when it joins: that it looks, and where its neighbour reaches it."""
        offered: dict[str, Any] = {"looks": True}
        if self._crew.num_nodes > 1:
            # Without a ring nobody is found slow, that is all.
            with contextlib.suppress(OSError):
                self._ring = Ring(address)
                offered["ring_port"] = self._ring.port
        return offered

    def begin(self) -> None:
        """Begin the looks of a start of a job. The agent has joined."""
        self._check.begin()
        self.measure_ring()

    def measure_ring(self, **facts: Any) -> None:
        """Begin to measure the way to the neighbour; `facts` stand in what is told of it."""
        if self._ring is not None:
            self._ring.measure(self._neighbour, **facts)

    def tick(self, *, is_idle: bool) -> None:
        """Take what was found meanwhile and tell it; look again where the node has long been idle."""
        self._take(self._check.look())
        if self._ring is not None and (measured := self._ring.taken()) is not None:
            self._untold["ring"] = {"to": self._next_node, **measured}
        now = time.monotonic()
        if is_idle and now - self._begun_at > self._idle_every_s:
            self._begun_at = now
            self._check.begin()
        self._tell()

    def look_again(self) -> None:
        """Look at the node behind an attempt's end, and tell what is found within a moment."""
        self._begun_at = time.monotonic()
        self._check.begin()
        self._take(self._check.settle(SETTLE_S))
        self._tell()

    def close(self) -> None:
        """Look no more."""
        self._check.close()
        if self._ring is not None:
            self._ring.close()

    def _take(self, found: Any) -> None:
        if found is None:
            return
        self._untold = {**self._untold, **found.told()}

    def _tell(self) -> None:
        member = self._crew.member
        if not self._untold or member is None:
            return
        news = {key: value for key, value in self._untold.items() if not _is_old(key, value, member.facts)}
        with contextlib.suppress(OSError):
            if news:
                self._crew.tell(self._untold)
            self._untold = {}

    @property
    def _next_node(self) -> int:
        return (self._crew.node + 1) % self._crew.num_nodes

    def _neighbour(self) -> tuple[str, int] | None:
        member = self._crew.member_of(self._next_node)
        if member is None or "ring_port" not in member.facts:
            return None
        return member.address, int(member.facts["ring_port"])


def _is_old(key: str, value: Any, facts: Any) -> bool:
    """Tell whether the agent has said so already; how long a look took is no news."""
    return key in facts and (key == "checked" or facts[key] == value)


def fitness_of(config: Config, run: RunDir, crew: Crew) -> Fitness | None:
    """Return what looks at this node; None where it is not wanted (`recovery.preflight`)."""
    return Fitness(crew, NodeCheck(wishes_of(config, run))) if config.recovery.preflight else None
