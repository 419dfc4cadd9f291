"""How far an attempt came in a given time of training, and what of it was kept: saves and copies in memory.

Closed forms: the simulator asks once per attempt, whatever number of steps lies between. A step is taken to
last as long as any other, and a save to be committed a fixed time behind the wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reached:
    """Where an attempt stands: steps done, the newest committed and the newest copied one (None: none of its
    own), and seconds by what they went to.
    """

    step: int
    committed: int | None
    copied: int | None
    training_s: float
    saving_s: float


@dataclass(frozen=True)
class Course:
    """An attempt that trains on from step `begin`. `copy_every`: None without copies in memory."""

    begin: int
    step_s: float
    every_steps: int
    stall_s: float
    write_s: float = 0.0
    copy_every: int | None = None
    copy_s: float = 0.0

    @property
    def unit_s(self) -> float:
        """A step with its share of what copies in memory cost."""
        return self.step_s + (self.copy_s / self.copy_every if self.copy_every else 0.0)

    def at(self, seconds: float) -> Reached:
        """Return where it stands so many seconds after its first step began."""
        unit, every = self.unit_s, self.every_steps
        num_first = every - self.begin % every
        first_s = num_first * unit + self.stall_s
        done: float = num_first
        if seconds < num_first * unit:
            done = seconds / unit
        elif seconds >= first_s:
            num_whole, rest_s = divmod(seconds - first_s, every * unit + self.stall_s)
            done = num_first + num_whole * every + min(float(every), rest_s / unit)
        # A step that is over by all but rounding is over.
        num_steps = int(done + 1e-9)
        training_s = done * self.step_s
        return Reached(
            step=self.begin + num_steps,
            committed=self._committed(seconds - first_s - self.write_s, num_first, unit),
            copied=self._copied(num_steps),
            training_s=training_s,
            saving_s=max(0.0, seconds - training_s),
        )

    def _committed(self, seconds: float, num_first: int, unit: float) -> int | None:
        if seconds < 0:
            return None
        later = int(seconds / (self.every_steps * unit + self.stall_s))
        return self.begin + num_first + later * self.every_steps

    def _copied(self, num_steps: int) -> int | None:
        """A copy is whole one step later."""
        if self.copy_every is None:
            return None
        newest = (self.begin + num_steps - 1) // self.copy_every * self.copy_every
        return newest if newest > self.begin else None
