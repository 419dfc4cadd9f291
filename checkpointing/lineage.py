"""Which states lie on a run's line: a pure function of where its attempts began.

An attempt goes on from one state, its *base*, and records that before it trains or publishes anything. What
an earlier attempt holds of a later step is of another history from then on, however late it is written: no
look before publishing can prevent a process that stands still between the two, so whoever reads decides.
Everything that an attempt leaves is judged here: checkpoints, copies in memory, rows of metrics, sample ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Base:
    """The state that an attempt went on from: after `step` (0: the beginning), written by `attempt` (None:
    not known, or nobody).
    """

    step: int
    attempt: int | None = None


@dataclass(frozen=True)
class AttemptBegin:
    """`attempt` went on from `base`, as it recorded; not `has_begun`: the attempt before it went back to
    there.

    `seen` are step and attempt of the checkpoints of later steps that lay there then; None: not known.
    """

    attempt: int
    base: Base
    seen: frozenset[tuple[int, int | None]] | None = None
    has_begun: bool = True


@dataclass(frozen=True)
class Departure:
    """Why a state is off the line: its `attempt` held it after `step`, and `begin` is that of a later one
    which went on from another. `is_late`: it was published after that one had begun.
    """

    step: int
    attempt: int
    begin: AttemptBegin
    is_late: bool

    @property
    def words(self) -> str:
        """The reason, for people."""
        begin, written = self.begin, f"written by attempt {self.attempt}"
        if not begin.has_begun:
            return f"{written}, before the run went back to step {begin.base.step}"
        if self.is_late:
            return f"{written} after attempt {begin.attempt} had begun at step {begin.base.step}"
        origin = "" if begin.base.attempt is None else f" of attempt {begin.base.attempt}"
        return f"{written}; attempt {begin.attempt} began at step {begin.base.step}{origin}"


@dataclass(frozen=True)
class _HistoryLine:
    """The line, from its newest attempt back: up to which step each attempt's states are on it.

    Before those nobody says whose the states are: of `oldest` and earlier attempts all up to `limit` may be.
    """

    up_to: Mapping[int, float]
    oldest: int
    limit: float


@dataclass(frozen=True)
class Lineage:
    """Where the attempts of a run began. Without any, everything is on the line.

    The newest attempt that has recorded its begin tells where the run is: the line leads from it to the
    attempt that it went on from, up to the step of that, and so on. Whatever others record later, of an
    attempt that was replaced before it came to record its begin for one, changes nothing.
    """

    begins: tuple[AttemptBegin, ...] = ()

    @classmethod
    def of(cls, begins: Iterable[AttemptBegin]) -> Lineage:
        """Return the lineage of these attempts, in any order."""
        return cls(tuple(sorted(begins, key=lambda begin: begin.attempt)))

    @cached_property
    def _line(self) -> _HistoryLine:
        begin_of = {begin.attempt: begin for begin in self.begins}
        attempt, limit = self.begins[-1].attempt, math.inf
        up_to = {}
        while (begin := begin_of.get(attempt)) is not None:
            up_to[attempt] = limit
            limit = min(limit, begin.base.step)
            before = begin.base.attempt
            if before is None or before >= attempt:
                return _HistoryLine(up_to, attempt - 1, limit)
            attempt = before
        return _HistoryLine(up_to, attempt, limit)

    def is_on_line(self, step: int, attempt: int | None) -> bool:
        """Whether the state after `step` that `attempt` held is one of the run's history.

        None, of what does not say who wrote it, is on the line.
        """
        if attempt is None or not self.begins or attempt >= self.begins[-1].attempt:
            return True
        line = self._line
        if attempt in line.up_to:
            return step <= line.up_to[attempt]
        if attempt > line.oldest or step > line.limit:
            return False
        later = (begin for begin in self.begins if attempt < begin.attempt <= line.oldest)
        return all(step <= begin.base.step for begin in later)

    def departure(self, step: int, attempt: int | None) -> Departure | None:
        """Return why a state is off the line; None where it is on it."""
        if attempt is None or self.is_on_line(step, attempt):
            return None
        later = [begin for begin in self.begins if begin.attempt > attempt]
        begin = next((begin for begin in later if step > begin.base.step), later[0])
        is_known = begin.has_begun and begin.seen is not None and step > begin.base.step
        is_late = is_known and begin.seen is not None and (step, attempt) not in begin.seen
        return Departure(step, attempt, begin, is_late)


# Of a place whose attempts nobody has recorded.
UNDIVIDED = Lineage()
