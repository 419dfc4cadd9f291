"""The first node's eye: finds who hangs on any node, while its own ranks are silent. It ends nothing.

When its ranks are silent for longer than a step's own work takes, a node writes down where they stand
(`orchestra.agents.hang_watch`). One node reads what all have written, so that thousands of them do not read
each other's; it stands in the attempt's first place, where a rank is that all others wait for sooner or
later.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestra.recovery.hangs import History, LimitRules, Standing, hung_afar, standings_of
from orchestra.run.events import node_writer
from orchestra.run.files import JsonLinesReader
from orchestra.run.paths import RunDir

STALLED, WENT_ON = "step_stalled", "step_went_on"
_WANTED = re.compile(rb'"event"\s*:\s*"(?:' + f"{STALLED}|{WENT_ON}".encode() + rb')"')
# What one node said a moment ago may be news on another one: a shared file system shows it late.
_LOOK_S = 2.0
# How many nodes' files are read in a second.
_FILES_PER_S = 500


@dataclass(frozen=True)
class Stall:
    """This node's own ranks, all of them silent or waiting, at `now` of the pulse's watch."""

    standings: tuple[Standing, ...]
    history: History
    now: float


@dataclass(frozen=True)
class _Report:
    standings: tuple[Standing, ...]
    # On the pulse's watch.
    seen_at: float


class FarSight:
    """Sees the ranks of all nodes of an attempt. *Its first node only*, one for each attempt."""

    def __init__(
        self, run: RunDir, attempt: int, others: Sequence[int], world_size: int, rules: LimitRules
    ) -> None:
        """`others`: the attempt's other nodes, by their numbers in the job."""
        files = {node: run.event_file(node_writer(attempt, node)) for node in others}
        self._readers = {node: JsonLinesReader(file, _WANTED) for node, file in files.items()}
        self._world_size = world_size
        self._rules = rules
        self._reports: dict[int, _Report] = {}
        self._suspects: set[int] = set()
        self._looked_at = 0.0

    def look(self, stall: Stall | None) -> list[tuple[Standing, float]]:
        """Return the ranks that hang, each with the limit that it is beyond, once two looks found the same.

        `stall` is None while this node's own ranks move: then nobody hangs, and nothing is read.
        """
        if stall is None or not self._readers:
            self._suspects = set()
            return []
        if stall.now - self._looked_at < max(_LOOK_S, len(self._readers) / _FILES_PER_S):
            return []
        self._looked_at = stall.now
        self._read(stall.now)
        standings = [*stall.standings, *self._others(stall.now)]
        found = hung_afar(standings, self._world_size, stall.history, self._rules)
        before, self._suspects = self._suspects, {it.rank for it, _ in found}
        return found if found and before == self._suspects else []

    def _read(self, now: float) -> None:
        for node, reader in self._readers.items():
            try:
                events = reader.read_new()
            except OSError:
                continue
            for event in events:
                # Where its ranks move again nothing is known of them.
                is_stall = event.get("event") == STALLED
                self._reports[node] = _Report(tuple(standings_of(event)) if is_stall else (), now)

    def _others(self, now: float) -> list[Standing]:
        return [
            dataclasses.replace(it, silent_s=it.silent_s + now - report.seen_at)
            for report in self._reports.values()
            for it in report.standings
        ]
