"""Failures on purpose (`recovery.inject`): a fault is a value that says who fails, when and how.

A rehearsed failure is the real thing: SIGKILL leaves the process no chance to tidy up. Nothing here knows
what is to happen afterwards.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import Fault, FaultPhase


@dataclass(frozen=True)
class PlannedFault:
    """What befalls `rank` (None: every rank that comes that far) in `attempt` at a phase of `at_step`.

    The phases of a save and of a restore strike at the save or restore of that step.
    """

    at_step: int
    rank: int | None
    phase: FaultPhase = FaultPhase.step
    attempt: int = 0
    fault: Fault = Fault.sigkill

    def befalls(self, attempt: int, rank: int) -> bool:
        """Whether it is meant for this rank of this attempt."""
        return self.attempt == attempt and self.rank in (None, rank)


def planned_faults(entries: Iterable[Mapping[str, Any]]) -> list[PlannedFault]:
    """Return the faults that `recovery.inject` lists; the rules have checked its entries."""
    return [
        PlannedFault(
            at_step=entry["at_step"],
            rank=None if entry["rank"] == "all" else entry["rank"],
            phase=FaultPhase[entry.get("phase", FaultPhase.step.name)],
            attempt=entry.get("attempt", 0),
            fault=Fault[entry.get("fault", Fault.sigkill.name)],
        )
        for entry in entries
    ]


class Faults:
    """The faults of one rank in one attempt. `strike` is called from any thread."""

    def __init__(self, planned: Sequence[PlannedFault], attempt: int, rank: int) -> None:
        self._moments = {(it.phase.name, it.at_step) for it in planned if it.befalls(attempt, rank)}

    def strike(self, phase: str, step: int) -> None:
        """Fail if a fault is planned for this moment: then this call never returns."""
        if (phase, step) in self._moments:
            os.kill(os.getpid(), signal.SIGKILL)
