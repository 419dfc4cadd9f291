"""Takes jobs out of Slurm's queue, or ends them. It knows nothing of what they do.

Tasks of an array that wait are one record in Slurm: `scancel --state=PENDING 12_4` was seen to cancel all
that wait, 12_5 too (22.05). And without --state it kills a task that has begun meanwhile. So the state is
asked for where all waiting tasks are meant; of fewer, those are held first, so that they cannot begin.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from launchers.errors import SlurmRefused
from launchers.slurm.commands import output_of
from launchers.slurm.jobids import job_and_tasks, joined

# Some of them have ended or were cancelled meanwhile: Slurm goes on with the others.
_OVER = re.compile(
    r"Invalid job id|already completing or completed|No active jobs|no longer pending|already finished",
    re.IGNORECASE,
)
# Ids per command, so that its words stay far from what Linux takes.
_AT_ONCE = 2000
_WAITING = "--state=PENDING"


def cancel(labels: Iterable[str], *, only_waiting: bool = True) -> None:
    """Cancel jobs (123) and tasks of arrays (123_4), whoever of them is still there.

    With `only_waiting` what has begun is left alone, even if that was a moment ago. Raises LauncherError when
    Slurm refuses or does not answer.
    """
    wanted = list(dict.fromkeys(labels))
    for some in _batches(wanted):
        if not only_waiting:
            _said("scancel", *joined(some))
            continue
        tasks = [label for label in some if job_and_tasks(label)[1] is not None]
        whole, part = _arrays(tasks)
        if others := [label for label in some if label not in set(tasks)]:
            _said("scancel", _WAITING, *others)
        if whole:
            _said("scancel", _WAITING, *whole)
        if part:
            _cancel_some(part)


def _arrays(tasks: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arrays of which all waiting tasks are meant, and the waiting tasks of the others."""
    if not tasks:
        return [], []
    arrays = dict.fromkeys(_array(task) for task in tasks)
    meant, waiting = set(tasks), _waiting(arrays)
    whole = [array for array in arrays if all(task in meant for task in waiting if _array(task) == array)]
    return whole, [task for task in waiting if task in meant and _array(task) not in whole]


def _cancel_some(tasks: Sequence[str]) -> None:
    _said("scontrol", "hold", *joined(tasks))
    waiting = set(_waiting({_array(task) for task in tasks}))
    if held := [task for task in tasks if task in waiting]:
        _said("scancel", *joined(held))
    if begun := [task for task in tasks if task not in waiting]:
        # Held while it ran, it would not start again after a requeue.
        _said("scontrol", "release", *joined(begun))


def _waiting(arrays: Iterable[str]) -> list[str]:
    words = ("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i")
    return _said(*words, f"--jobs={','.join(arrays)}").split()


def _array(task: str) -> str:
    return job_and_tasks(task)[0]


def _said(*words: str) -> str:
    """Run a command and return what it printed, nothing where it only says that jobs are over."""
    try:
        return output_of(words)
    except SlurmRefused as refusal:
        if not _OVER.search(str(refusal)):
            raise
        return ""


def _batches(labels: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(labels)
    while some := list(itertools.islice(iterator, _AT_ONCE)):
        yield some
