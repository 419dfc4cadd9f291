"""Shares out bytes among ranks: each next piece of work goes to whoever has the least so far. Pure."""

from __future__ import annotations

import heapq


class Loads:
    """The bytes that each rank has to read or write so far."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._queues: dict[tuple[int, ...], list[tuple[int, int]]] = {}

    def add(self, rank: int, num_bytes: int) -> None:
        self._bytes[rank] = self._bytes.get(rank, 0) + num_bytes

    def least(self, ranks: tuple[int, ...]) -> int:
        """Return which of the ranks has least. Loads only grow, so a stale entry is renewed when it comes
        up.
        """
        if ranks not in self._queues:
            self._queues[ranks] = [(0, rank) for rank in ranks]
        queue = self._queues[ranks]
        while True:
            load, rank = queue[0]
            if load == self._bytes.get(rank, 0):
                return rank
            heapq.heapreplace(queue, (self._bytes[rank], rank))
