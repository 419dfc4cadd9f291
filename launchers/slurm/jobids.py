"""Job ids as Slurm writes them: 123, 123_4 for a task of an array, 123_[5-9%2] for several. Pure text."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LABEL = re.compile(r"(?P<job>\d+)(_(?P<task>\d+)|_\[(?P<tasks>[^\]%]*)(%\d+)?\]?)?")
_RANGE = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def job_and_tasks(label: str) -> tuple[str, tuple[int, ...] | None]:
    """Return the id of a job or of an array, and which tasks of the array are meant (None: no array's).

    Tasks behind dots, where Slurm cut a long list, are left out.
    """
    match = _LABEL.match(label)
    if match is None:
        return label, None
    if match["task"] is not None:
        return match["job"], (int(match["task"]),)
    if match["tasks"] is None:
        return match["job"], None
    found = [range_ for part in match["tasks"].split(",") if (range_ := _RANGE.fullmatch(part))]
    return match["job"], tuple(task for range_ in found for task in _tasks(range_))


def _tasks(match: re.Match[str]) -> Iterable[int]:
    first, last, step = match.groups()
    return range(int(first), int(last or first) + 1, int(step or 1))


def joined(labels: Iterable[str]) -> list[str]:
    """Return the same jobs in as few words as Slurm takes: 12_1, 12_2, 12_4, 13 are 12_[1-2,4] and 13."""
    tasks_of: dict[str, list[int] | None] = {}
    for label in labels:
        job, tasks = job_and_tasks(label)
        if tasks is None:
            tasks_of[job] = None
        elif (known := tasks_of.setdefault(job, [])) is not None:
            known += tasks
    return [job if tasks is None else f"{job}_[{_ranges(tasks)}]" for job, tasks in tasks_of.items()]


def _ranges(tasks: Iterable[int]) -> str:
    spans: list[list[int]] = []
    for task in sorted(set(tasks)):
        if spans and spans[-1][1] == task - 1:
            spans[-1][1] = task
        else:
            spans.append([task, task])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
