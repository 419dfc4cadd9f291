"""The moments of a training as it passes them: each beats this rank's heart, and planned faults strike.

One call per moment in the loop and the step. It knows neither who listens nor what a fault does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestra.heartbeat import Heart, Phase, silent_heart
from orchestra.train.faults import Faults


def _no_faults() -> Faults:
    return Faults([], 0, 0)


@dataclass(frozen=True)
class Moments:
    """One rank's heart and faults. *Training thread only.*"""

    heart: Heart = field(default_factory=silent_heart)
    faults: Faults = field(default_factory=_no_faults)

    def enter(self, phase: Phase, step: int = 0, micro_batch: int = 0) -> None:
        """Say that `phase` begins; fail where that is planned. About a microsecond, and no wait for a
        device.
        """
        self.heart.beat(phase, step, micro_batch)
        if micro_batch == 0:
            self.faults.strike(phase.name, step)
