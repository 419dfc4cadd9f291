"""Counts the bytes that this rank sends to others, by kind, as the algorithms of the collectives send them.

It measures no time and looks at no wire: what a ring or a direct exchange has to send is arithmetic.
"""

from __future__ import annotations

from collections import Counter


class Traffic:
    """Bytes that one rank has sent since it was made or last cleared."""

    def __init__(self) -> None:
        self.bytes_sent: Counter[str] = Counter()

    @property
    def total_bytes(self) -> int:
        """Bytes of all kinds together."""
        return sum(self.bytes_sent.values())

    def clear(self) -> None:
        """Begin to count at 0 again."""
        self.bytes_sent.clear()

    def add_all_reduce(self, num_bytes: int, num_ranks: int) -> None:
        """Count the sum of `num_bytes` that every rank has, for all of them: 2·(N − 1)/N of it (ring)."""
        self.bytes_sent["all_reduce"] += 2 * num_bytes * (num_ranks - 1) // num_ranks

    def add_reduce_scatter(self, num_bytes: int, num_ranks: int) -> None:
        """Count the sum of `num_bytes`, of which each rank gets its part: (N − 1)/N of it."""
        self.bytes_sent["reduce_scatter"] += num_bytes * (num_ranks - 1) // num_ranks

    def add_all_gather(self, num_bytes: int, num_ranks: int) -> None:
        """Count putting together `num_bytes` of the ranks' parts on all of them: (N − 1)/N of it."""
        self.bytes_sent["all_gather"] += num_bytes * (num_ranks - 1) // num_ranks
