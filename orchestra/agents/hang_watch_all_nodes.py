"""Finds out which rank of all nodes the others wait for. *The first node of an attempt only*.

A node whose ranks are silent for longer than a step's own work takes writes to its events where they are
(`orchestra.agents.hang_watch`). One node reads what all have written, so that thousands of them do not read
each other's; it is the attempt's first one, since it has a rank that all others wait for sooner or later.
The caller lets all nodes know who hangs, and each ends its own ranks.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestra.recovery.hangs import (
    LimitRules,
    RankPosition,
    RankTimes,
    hanging_on_all_nodes,
    positions_in,
)
from orchestra.run.events import node_writer
from orchestra.run.files import JsonLinesReader
from orchestra.run.paths import RunDir

STALLED, WENT_ON = "step_stalled", "step_went_on"
_WANTED = re.compile(rb'"event"\s*:\s*"(?:' + f"{STALLED}|{WENT_ON}".encode() + rb')"')
# What one node wrote a moment ago may be news on another one: a shared file system shows it late.
_LOOK_S = 2.0
# How many nodes' files are read in a second.
_FILES_PER_S = 500


@dataclass(frozen=True)
class NodeStall:
    """This node's own ranks, all of them silent or waiting, at `now` of its hang watch."""

    positions: tuple[RankPosition, ...]
    times: RankTimes
    now: float


@dataclass(frozen=True)
class _NodeReport:
    positions: tuple[RankPosition, ...]
    # On the hang watch's own time.
    seen_at: float


class HangWatchOfAllNodes:
    """Watches the ranks of all nodes through one attempt. *Its first node only*."""

    def __init__(
        self, run: RunDir, attempt: int, others: Sequence[int], world_size: int, rules: LimitRules
    ) -> None:
        """`others`: the attempt's other nodes, by their numbers in the job."""
        files = {node: run.event_file(node_writer(attempt, node)) for node in others}
        self._readers = {node: JsonLinesReader(file, _WANTED) for node, file in files.items()}
        self._world_size = world_size
        self._rules = rules
        self._reports: dict[int, _NodeReport] = {}
        self._suspects: set[int] = set()
        self._looked_at = 0.0

    def look(self, stall: NodeStall | None) -> list[tuple[RankPosition, float]]:
        """Return the ranks that hang, each with the limit in seconds that it is beyond, once two looks found
        the same ones.

        `stall` is None while this node's own ranks move: then nobody hangs, and nothing is read.
        """
        if stall is None or not self._readers:
            self._suspects = set()
            return []
        if stall.now - self._looked_at < max(_LOOK_S, len(self._readers) / _FILES_PER_S):
            return []
        self._looked_at = stall.now
        self._read(stall.now)
        positions = [*stall.positions, *self._others(stall.now)]
        hanging = hanging_on_all_nodes(positions, self._world_size, stall.times, self._rules)
        before, self._suspects = self._suspects, {rank.rank for rank, _ in hanging}
        return hanging if hanging and before == self._suspects else []

    def _read(self, now: float) -> None:
        for node, reader in self._readers.items():
            try:
                events = reader.read_new()
            except OSError:
                continue
            for event in events:
                # Where its ranks move again nothing is known of them.
                is_stall = event.get("event") == STALLED
                self._reports[node] = _NodeReport(tuple(positions_in(event)) if is_stall else (), now)

    def _others(self, now: float) -> list[RankPosition]:
        return [
            dataclasses.replace(rank, silent_s=rank.silent_s + now - report.seen_at)
            for report in self._reports.values()
            for rank in report.positions
        ]
