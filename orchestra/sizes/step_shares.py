"""The shares of a training step: how long it computes, communicates and waits for data, from marked times.

Intervals are pairs of nanoseconds on one clock. Where parts overlap, the time counts once: what stands under
communication is exposed communication, whatever phase of the step it stands in. Arithmetic and a JSON record;
the control plane reads the record too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Part(Enum):
    """What a step is made of."""

    data = "data"
    forward = "forward"
    backward = "backward"
    optimizer = "optimizer"
    communication = "communication"


# The names of the parts in a trace; the shares' file in a run's profile folder.
MARKS = {part: f"orchestra: {part.value}" for part in Part}
SUMMARY_FILE = "summary.json"
OTHER = "other"
# In the table's order; the remainder is the host's own work between the parts.
_SHOWN = {
    Part.data.value: "wait for data",
    Part.forward.value: "forward",
    Part.backward.value: "backward",
    Part.optimizer.value: "optimizer",
    Part.communication.value: "communication, exposed",
    OTHER: "other",
}

Interval = tuple[int, int]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint ones, in order."""
    union: list[Interval] = []
    for begin, end in sorted(intervals):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        elif end > begin:
            union.append((begin, end))
    return union


def common(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return what two unions of intervals, as `merged` returns them, have in common."""
    both = []
    mine, theirs = 0, 0
    while mine < len(one) and theirs < len(other):
        begin, end = max(one[mine][0], other[theirs][0]), min(one[mine][1], other[theirs][1])
        if begin < end:
            both.append((begin, end))
        if one[mine][1] < other[theirs][1]:
            mine += 1
        else:
            theirs += 1
    return both


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


@dataclass(frozen=True)
class StepShares:
    """Means over the traced steps of one rank, in seconds a step.

    `parts_s` has the parts and what is left over as `other`; together they are `step_s`. In it stands of
    communication only what nothing else hides (`exposed_s`); `communication_s` is all of it, from the start
    of a collective to its end. `bytes_sent` are the bytes a step that this rank sends, by kind of collective.
    """

    rank: int
    first_step: int
    last_step: int
    step_s: float
    parts_s: dict[str, float]
    communication_s: float
    bytes_sent: dict[str, float]

    @property
    def exposed_s(self) -> float:
        return self.parts_s[Part.communication.value]

    @property
    def hidden_share(self) -> float | None:
        """The share of the communication that runs beside other work; None where there is none."""
        return 1.0 - self.exposed_s / self.communication_s if self.communication_s else None

    @property
    def total_bytes(self) -> float:
        return sum(self.bytes_sent.values())

    def record(self) -> dict[str, Any]:
        """Return the JSON record: the fields, and what follows from them."""
        shares = {name: seconds / self.step_s for name, seconds in self.parts_s.items()}
        follows = {"exposed_s": self.exposed_s, "hidden_share": self.hidden_share}
        return {**asdict(self), "shares": shares, **follows, "total_bytes": self.total_bytes}

    def table(self) -> list[str]:
        """Return the lines that show a person where the time of a step goes."""
        steps = f"steps {self.first_step} to {self.last_step} of rank {self.rank}"
        lines = [f"{steps}, traced: {_milliseconds(self.step_s)} a step"]
        lines += [
            f"  {title:<24}{_milliseconds(self.parts_s[name]):>12}{self.parts_s[name] / self.step_s:>8.1%}"
            for name, title in _SHOWN.items()
        ]
        if self.hidden_share is not None:
            hidden = f"{self.hidden_share:.0%} of it hidden"
            lines.append(f"  communication in all {_milliseconds(self.communication_s)}, {hidden}")
        if self.bytes_sent:
            kinds = ", ".join(f"{kind} {_megabytes(size)}" for kind, size in sorted(self.bytes_sent.items()))
            lines.append(f"  sent a step {_megabytes(self.total_bytes)}: {kinds}")
        return lines


def shares_of(
    steps: Iterable[Interval],
    parts: Mapping[Part, Iterable[Interval]],
    in_flight: Iterable[Interval],
    computing: Iterable[Interval] | None = None,
) -> tuple[float, dict[str, float], float]:
    """Return seconds of all steps, of each part in them (and `other`), and of all communication.

    `parts` are marked times; `in_flight` is when collectives were under way. With `computing` (a device that
    runs beside the host), communication is exposed where the device computes nothing under it; without, it
    is exposed where the host stands in its mark.
    """
    whole = merged(steps)
    times = {part: common(merged(parts.get(part, ())), whole) for part in Part}
    under_way = merged([*common(merged(in_flight), whole), *times[Part.communication]])
    exposed = times[Part.communication] if computing is None else without(under_way, merged(computing))
    taken = exposed
    seconds = {Part.communication.value: length(exposed) / 1e9}
    for part in (Part.data, Part.optimizer, Part.backward, Part.forward):
        rest = without(times[part], taken)
        seconds[part.value] = length(rest) / 1e9
        taken = merged([*taken, *rest])
    total = length(whole)
    seconds[OTHER] = (total - length(taken)) / 1e9
    return total / 1e9, seconds, length(under_way) / 1e9


def without(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Return what of a union of intervals is not in another one."""
    left = []
    for begin, end in one:
        for cut_begin, cut_end in common([(begin, end)], other):
            if begin < cut_begin:
                left.append((begin, cut_begin))
            begin = cut_end
        if begin < end:
            left.append((begin, end))
    return left


def read_shares(folder: Path) -> StepShares | None:
    """Return the shares that a profile folder records; None where it has none that can be read."""
    try:
        record = json.loads((folder / SUMMARY_FILE).read_text())
        return StepShares(**{name: record[name] for name in StepShares.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.2f} MB"
