"""Submits a sweep's arrays, each once, and writes their ids down. The intents are on disk before it begins.

An array that is too large for what a user may submit is cut in halves until a part fits. What Slurm does not
take stays recorded, for a later `orchestra resume`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from launchers.errors import LauncherError, SlurmRefused
from launchers.slurm import sbatch
from launchers.slurm.limits import is_full
from orchestra.errors import ConfigError, LaunchError
from orchestra.submit.claims import write_whole
from orchestra.submit.sweeps import holding
from orchestra.submit.sweeps.arrays import PlannedArray
from orchestra.submit.sweeps.making import record_jobs
from orchestra.sweepdir import Sweep, SweepArray, SweepDir, to_json


@dataclass
class Outcome:
    """What became of a sweep's arrays: the accepted ones with their ids, and the others."""

    record: Sweep
    accepted: list[SweepArray] = field(default_factory=list)
    refused: list[SweepArray] = field(default_factory=list)
    # Slurm's words for the limit; None where all was accepted.
    limit: str | None = None

    @property
    def num_refused(self) -> int:
        return sum(len(array.tasks) for array in self.refused)


class RefusedError(ConfigError):
    """Slurm refuses the jobs themselves; `num_accepted` were taken before."""

    def __init__(self, words: str, num_accepted: int) -> None:
        super().__init__(words)
        self.num_accepted = num_accepted


def send(
    sweep: SweepDir, record: Sweep, arrays: Sequence[PlannedArray], attempts: Mapping[int, int] | None = None
) -> Outcome:
    """Submit arrays that are claimed and recorded, and return what became of them.

    `attempts` are those that members go on with, by index, where they are not the first. What was accepted is
    recorded whatever happens next. Raises RefusedError when Slurm refuses a job for what it is, LaunchError
    when it stays unknown whether Slurm has an array.
    """
    sender = _Sender(sweep, Outcome(record), attempts or {})
    waiting = list(arrays)
    while waiting:
        waiting = sender.after(waiting[0], waiting[1:])
    return sender.outcome


class _Sender:
    def __init__(self, sweep: SweepDir, outcome: Outcome, attempts: Mapping[int, int]) -> None:
        self.outcome = outcome
        self._sweep = sweep
        self._attempts = attempts

    def after(self, planned: PlannedArray, others: list[PlannedArray]) -> list[PlannedArray]:
        """Try an array; return those that are to be tried next, none where trying on makes no sense."""
        array = planned.array
        try:
            job = sbatch.submit(self._sweep.script(array.number), array.token)
        except SlurmRefused as error:
            if not is_full(str(error)):
                self._give_up([planned, *others])
                raise RefusedError(self._refusal(str(error)), self._num_accepted()) from error
            if len(array.tasks) > 1:
                return [*self._halves(planned), *others]
            self._give_up([planned, *others])
            self.outcome.limit = str(error)
            return []
        except LauncherError as error:
            self._give_up(others)
            raise LaunchError(self._unknown(array, str(error))) from error
        # A lost answer that was found in the queue: 12_[0-99].
        accepted = replace(array, id=job.partition("_")[0])
        self.outcome.accepted.append(accepted)
        self._record(accepted)
        return others

    def _halves(self, planned: PlannedArray) -> list[PlannedArray]:
        number = next(holding.numbers(self._sweep, self.outcome.record))
        head, rest = planned.split(len(planned.array.tasks) // 2, number)
        self._sweep.script(rest.array.number).write_text(rest.script())
        self._sweep.script(head.array.number).write_text(head.script())
        self._record(head.array, rest.array)
        record_jobs(self._sweep, rest.array, self._attempts, instead_of=planned.array.token)
        return [head, rest]

    def _record(self, *changed: SweepArray) -> None:
        """Write sweep.json with these arrays in the place of those with their numbers."""
        arrays = {array.number: array for array in (*self.outcome.record.arrays, *changed)}
        self.outcome.record = replace(self.outcome.record, arrays=tuple(arrays.values()))
        write_whole(self._sweep.record, to_json(self.outcome.record))

    def _give_up(self, planned: Sequence[PlannedArray]) -> None:
        self.outcome.refused += [it.array for it in planned]
        holding.release(self._sweep, [it.array.number for it in planned])

    def _num_accepted(self) -> int:
        return sum(len(array.tasks) for array in self.outcome.accepted)

    def _refusal(self, why: str) -> str:
        accepted, name = self._num_accepted(), self._sweep.name
        before = f"; {accepted} members were submitted before, see `orchestra status {name}`"
        return f"Slurm refuses the jobs: {why}{before if accepted else ''}"

    def _unknown(self, array: SweepArray, why: str) -> str:
        accepted, name = self._num_accepted(), self._sweep.name
        before = f"{accepted} members were submitted before; " if accepted else ""
        return (
            f"{why}: Slurm may have array {array.number} of {name} ({len(array.tasks)} members) or not. "
            f"{before}{self._sweep.path} is kept, with the array's token {array.token}: when Slurm answers, "
            f"`orchestra status {name}` finds what it has, and `orchestra resume {name}` submits the rest"
        )
