"""To which step a run went back, as its events record it, and the data that it leaves out since. Pure.

A roll-back is one event, `roll_back`, on the disk before the attempt that asks for it ends: whatever happens
then, every later attempt reads the same. It names the step after which the run goes on, which takes off the
line all that the attempts so far saved or copied after it (`orchestra.run.run_lineage`), and a stretch of
data that nobody trains on any more. The order of samples is an endless sequence (`orchestra.data.order`);
what is left out are places in it, so that neither the world size nor the batch size plays a part. With n
sequences in each global batch, data step s is the places from (s − 1) · n on.

The ranks decide on a roll-back (`orchestra.train`) and pass over what is void. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from orchestra.run.events import is_whole
from orchestra.run.files import Record

EVENT = "roll_back"
# The causes.
SPIKE = "loss spike"
NOT_FINITE = "loss or gradient not finite"
BROKEN_DEVICE = "broken device"


@dataclass(frozen=True, order=True)
class Stretch:
    """The places [begin, end) in the sequence of samples."""

    begin: int
    end: int


def merged(stretches: Iterable[Stretch]) -> tuple[Stretch, ...]:
    """Return the same places, ascending, no two stretches touching each other; empty ones are dropped."""
    joined: list[Stretch] = []
    for stretch in sorted(stretch for stretch in stretches if stretch.begin < stretch.end):
        if joined and stretch.begin <= joined[-1].end:
            joined[-1] = Stretch(joined[-1].begin, max(joined[-1].end, stretch.end))
        else:
            joined.append(stretch)
    return tuple(joined)


def kept(position: int, count: int, left_out: Sequence[Stretch]) -> list[tuple[int, int]]:
    """Return where the next `count` samples from `position` on lie that are not left out, as pairs of a first
    place and a number.

    `left_out` as `merged` returns it. At least one pair, also for a count of 0.
    """
    parts: list[tuple[int, int]] = []
    for stretch in (stretch for stretch in left_out if stretch.end > position):
        taken = min(count, max(0, stretch.begin - position))
        if taken:
            parts.append((position, taken))
            count -= taken
        if not count:
            break
        position = stretch.end
    if count or not parts:
        parts.append((position, count))
    return parts


def from_lists(value: object) -> tuple[Stretch, ...]:
    """Return the stretches that JSON holds as pairs; what is none is passed over."""
    pairs = value if isinstance(value, list) else []
    return merged(
        Stretch(pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list)
        and len(pair) == 2
        and all(is_whole(number) and number >= 0 for number in pair)
    )


def to_lists(stretches: Iterable[Stretch]) -> list[list[int]]:
    """Return stretches for JSON."""
    return [[stretch.begin, stretch.end] for stretch in stretches]


@dataclass(frozen=True)
class BadSteps:
    """Steps before which the run is to go back: the first bad one and the one at which that was seen.

    `leaves_out`: whether their data is to blame. `words` are for people.
    """

    first: int
    last: int
    cause: str
    words: str
    leaves_out: bool = True


@dataclass(frozen=True)
class RollBack:
    """One roll-back: `attempt` found its step `step` bad and asked to go on after step `to` (0: from the
    beginning), without the data in `left_out`. `cause` is the same text for the same cause.
    """

    attempt: int
    step: int
    to: int
    cause: str
    left_out: tuple[Stretch, ...] = ()
    # The first and last data step that are left out, for readers.
    data_steps: tuple[int, int] | None = None

    @property
    def words(self) -> str:
        """What follows, for people."""
        where = f"it goes back to step {self.to}" if self.to else "it goes back to the beginning"
        if self.data_steps is None:
            return where
        first, last = self.data_steps
        return f"{where}; the data of steps {first} to {last} is left out"


def roll_backs(events: Iterable[Record]) -> list[RollBack]:
    """Return a run's roll-backs, in the order of its events; records that do not say where to are none."""
    found = []
    for event in events:
        step, to = event.get("step"), event.get("to")
        if event.get("event") != EVENT or not is_whole(to) or to < 0:
            continue
        steps = event.get("data_steps")
        is_pair = isinstance(steps, list) and len(steps) == 2 and all(is_whole(step) for step in steps)
        found.append(
            RollBack(
                attempt=int(event["attempt"]),
                step=step if is_whole(step) else to,
                to=to,
                cause=str(event.get("cause", "unknown")),
                left_out=from_lists(event.get("left_out")),
                data_steps=(steps[0], steps[1]) if is_pair and isinstance(steps, list) else None,
            )
        )
    return found
