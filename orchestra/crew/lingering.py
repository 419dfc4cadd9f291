"""Ends a torchrun that goes on although nothing is left for it to watch: it would hold its node for ever.

A torchrun whose ranks have all ended waits for those of other nodes, and may. Once no rank of the attempt is
left it has some seconds. It knows nothing of what follows: how the attempt ended the ranks themselves said.
"""

from __future__ import annotations

import dataclasses
import time

from launchers.agent import NodeAgent
from launchers.spec import Ending
from orchestra.crew.station import Station
from orchestra.errors import EXIT_DONE
from orchestra.report.verdict import finished_ranks, ranks_with_verdict
from orchestra.submit.recording import AttemptRecord

# It ends within a second of its ranks; on a machine that swaps, several.
_PATIENCE_S = 15.0
# Looking reads the events of the whole attempt.
_LOOK_S = 5.0


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
        if agent.idle_s < _PATIENCE_S or self._has_ended_it or now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        events = self._record.seen()
        # Where a rank of this node did not come to its end, torchrun waits for nobody.
        is_waiting = finished_ranks(events) >= set(self._own)
        if is_waiting and len(ranks_with_verdict(events)) < self._world_size:
            return
        self._has_ended_it = True
        self._station.say(f"torchrun is ended: all its ranks ended {agent.idle_s:.0f} s ago, and it did not")
        agent.kill()

    def amended(self, ending: Ending) -> Ending:
        """Return how this node's part ended: where torchrun was ended here the ranks' own word counts."""
        if not self._has_ended_it or not finished_ranks(self._record.seen()) >= set(self._own):
            return ending
        return dataclasses.replace(ending, exit_code=EXIT_DONE)
