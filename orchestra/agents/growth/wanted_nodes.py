"""How many nodes a run lacks, as the agent that trains says it to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WantedNodes:
    """How many nodes an attempt of a run lacks."""

    attempt: int
    fewest: int
    most: int
    # Seconds before which they are of no use.
    delay_s: float
    # Hosts that it has.
    without: tuple[str, ...] = ()

    @property
    def number(self) -> int | str:
        """As sbatch takes it."""
        return self.most if self.fewest == self.most else f"{self.fewest}-{self.most}"
