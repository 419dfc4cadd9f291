"""How many nodes a run holds while it trains on fewer: those of a job that helps it stand by until they take
part, and are paid for.

The begin of each attempt says how many there were (`nodes_held` in `attempt_started`); what changes while it
trains is an event of its own, which `orchestra.report.spending` counts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping

from launchers.node_group import GroupMember
from orchestra.run.events import EventWriter, is_number, is_whole
from orchestra.run.files import Record

CHANGED = "nodes_held"
# What an agent of a helping job says of itself: since when its job has its node (Unix seconds).
HELD_SINCE = "held_since"


class HeldNodes:
    """Writes down for one attempt how many nodes are held, when that changes. *One node of it only*."""

    def __init__(self, events: EventWriter, alive: Iterable[int], start: Record | None) -> None:
        """`alive`: the nodes that live, the attempt's own among them; `start`: the attempt's first record."""
        self._events = events
        self._known = set(alive)
        held = None if start is None else start.get("nodes_held")
        self._num_held = held if is_whole(held) else len(self._known)

    def look(self, alive: Mapping[int, GroupMember]) -> None:
        """Write down what has changed. `alive`: the nodes that live now."""
        came = [member for node, member in alive.items() if node not in self._known]
        self._known.update(alive)
        if len(alive) == self._num_held and not came:
            return
        self._num_held, now = len(alive), time.time()
        since = [member.facts.get(HELD_SINCE) for member in came]
        before_s = sum(max(0.0, now - float(each)) for each in since if is_number(each))
        # A full disk takes the record.
        with contextlib.suppress(OSError):
            self._events.write(
                CHANGED,
                nodes=len(alive),
                came=[member.host for member in came],
                # Node-seconds in which those who came were held before anybody saw them.
                before_s=round(before_s, 3),
            )
