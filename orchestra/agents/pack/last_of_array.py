"""What becomes of members that wait for a place when a job that takes them ends: another job of the array
takes them, or the last one is queued again. Called by `orchestra.agents.pack.__main__`.

Each start of a job says in a file of the sweep that it takes no more, before it looks who else is there: of
several that end in the same moment at least one sees that it is the last.
"""

from __future__ import annotations

import json

from launchers.slurm import this_job
from launchers.slurm.queue import RUNNING, WAITING
from launchers.slurm.this_job import JobTask
from orchestra.agents.wait_for_nodes import MOST_MOVES
from orchestra.run.files import names_in, read_json, write_atomically
from orchestra.run.paths import SweepDir


def say_left(sweep: SweepDir, array: int, task: JobTask, *, is_again: bool = False) -> None:
    """Say that this start of a job takes no more members; `is_again`: and that the job is to start again only
    because some wait. Raises OSError.
    """
    sweep.control.mkdir(exist_ok=True)
    text = json.dumps({"again": is_again}) + "\n"
    write_atomically(sweep.left(array, task.job, task.restart), text, is_synced=False)


def is_last(sweep: SweepDir, array: int, task: JobTask) -> bool:
    """Tell whether no other job of the array waits or takes members. Raises LauncherError and OSError."""
    for label, state in this_job.tasks_of_array(task.job).items():
        if label == task.job:
            continue
        if state in WAITING:
            return False
        # One that is being cleaned up takes nobody any more.
        if state in RUNNING and state != "COMPLETING":
            file = sweep.left(array, label, this_job.own_job(label).restarts)
            if file.name not in names_in(sweep.control):
                return False
    return True


def is_too_often(sweep: SweepDir, array: int, task: JobTask) -> bool:
    """Tell whether the job's starts before this one, several in a row, were queued again for nothing else."""
    before = range(task.restart - 1, task.restart - 1 - MOST_MOVES, -1)
    return all((read_json(sweep.left(array, task.job, start)) or {}).get("again") is True for start in before)
