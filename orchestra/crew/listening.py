"""The agent's ear in one attempt: which of this node's ranks hang. It ends none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from conf.schema import Config
from launchers.crew import Order
from orchestra.crew.station import Station, attempt_of
from orchestra.events import read_events
from orchestra.heartbeat import FOLDER_VARIABLE, beats_folder
from orchestra.jsonl import Record
from orchestra.recovery.limits import limit_rules
from orchestra.submit.pulse import Hang, Pulse, Watched


def ranks_of(config: Config, order: Order, node: int) -> range:
    """Return the ranks of one of an order's nodes."""
    per_node = int(config.cluster.gpus_per_node)
    first = order.nodes.index(node) * per_node
    return range(first, first + per_node)


class Listening:
    """This node's pulse in one attempt; silent where no folder can be had for the heartbeats."""

    def __init__(self, station: Station, order: Order) -> None:
        self._pulse: Pulse | None = None
        self.environment: dict[str, str] = {}
        try:
            folder = beats_folder(station.run)
        except OSError as error:
            station.say(f"hangs are not noticed: no folder for heartbeats ({error.strerror})")
            return
        attempt = attempt_of(order)
        ranks = ranks_of(station.config, order, station.node)
        world_size = len(order.nodes) * len(ranks)
        watched = Watched(station.run, attempt, station.node, tuple(ranks), world_size, folder)
        restores_s = list(_restores_s(read_events(station.run, ("restored",))))
        rules = limit_rules(station.config)
        self._pulse = Pulse(watched, rules, station.record(attempt).events, restores_s)
        self.environment = {FOLDER_VARIABLE: str(folder)}

    def look(self) -> tuple[Hang, ...]:
        """Return the ranks that were found to hang just now."""
        return () if self._pulse is None else self._pulse.look()

    def close(self) -> None:
        """Remove the attempt's records, once the ranks have ended."""
        with contextlib.suppress(OSError):
            if self._pulse is not None:
                self._pulse.close()


def _restores_s(events: Iterable[Record]) -> Iterable[float]:
    for event in events:
        if event["event"] == "restored" and isinstance(event.get("seconds"), int | float):
            yield float(event["seconds"])
