"""How long a crew waits for its members before the first attempt. It begins nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping

from launchers.crew import Member
from orchestra.crew.station import Station
from orchestra.errors import LaunchError

# From the start of the first node's task to the last one's: images are pulled, Python is loaded by many.
GATHER_TIMEOUT_S = 600.0
# How long spares, and with recovery.min_nodes the last of the others, are waited for.
_STRAGGLERS_S = 15.0
_MIN_NODES_WAIT_S = 60.0


class Gathering:
    """The wait for the nodes of one start of a job, as its leader sees it."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._began = time.monotonic()

    def is_over(self, members: Mapping[int, Member]) -> bool:
        """Tell whether as many have come as there will be. Raises LaunchError where they stay too few."""
        waited = time.monotonic() - self._began
        if len(members) == self._station.crew.num_nodes:
            return True
        wanted, least = self._station.config.cluster.nodes, self._station.config.recovery.min_nodes
        if len(members) >= wanted and waited > _STRAGGLERS_S:
            return True
        if least is not None and len(members) >= least and waited > _MIN_NODES_WAIT_S:
            return True
        if waited > GATHER_TIMEOUT_S:
            raise LaunchError(self.too_few(members))
        return False

    def too_few(self, members: Mapping[int, Member]) -> str:
        """Return who is missing, as an error's words."""
        num_nodes = self._station.crew.num_nodes
        missing = sorted(set(range(num_nodes)) - set(members))
        return (
            f"only {len(members)} of {num_nodes} nodes came within {GATHER_TIMEOUT_S:g} s or are fit; "
            f"missing: {', '.join(map(str, missing)) or 'none'}. Their logs tell what became of them, or "
            f"they do not share {self._station.run.path}"
        )
