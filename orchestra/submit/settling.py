"""Slurm's word on runs that are to go on, once it is clear: waits while Slurm still ends their jobs.

A verdict says that an attempt is over. Its job may be queued again in the very next moment, and a job that
was submitted meanwhile would be a second one. What is then done about a run is decided elsewhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from launchers.slurm.states import RUNNING, UNKNOWN
from orchestra.report.scheduler import OPEN, elsewhere, with_scheduler
from orchestra.report.state import RunState, read_state
from orchestra.rundir import RunDir

# A job that ends takes KillWait at most, 30 s by default, and the nodes' epilog.
_WAIT_S = 60.0
_POLL_S = 3.0
# A verdict that stands, though the job may not be over.
_ENDED = ("stopped", "failed", "interrupted")


def settled(runs: Sequence[RunDir], own: Sequence[RunState]) -> tuple[list[RunState], list[str]]:
    """Return the runs' states with Slurm's word, and why it could not be asked if it could not.

    `own` are the states as the runs' records tell them. Waits up to a minute, for all of them together, while
    jobs of attempts that ended are still being ended, and says so.
    """
    states, problems = with_scheduler(runs, own)
    deadline = time.monotonic() + _WAIT_S
    ending = _being_ended(states)
    if ending and not problems:
        _say([states[index] for index in ending])
    while ending and not problems and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        unsettled = [runs[index] for index in ending]
        told, problems = with_scheduler(unsettled, [read_state(run, time.time()) for run in unsettled])
        for index, state in zip(ending, told, strict=True):
            states[index] = state
        ending = _being_ended(states)
    return states, problems


def _being_ended(states: Sequence[RunState]) -> list[int]:
    return [index for index, state in enumerate(states) if is_being_ended(state)]


def is_being_ended(state: RunState) -> bool:
    """Whether an attempt has its verdict, and its job is still on its nodes."""
    return state.state in _ENDED and state.job_state in RUNNING


def unclear(state: RunState) -> str | None:
    """Return why nobody can say here whether a run is alive, and where to ask; None where it is known."""
    job = state.submitted
    if job is None or state.job_state != UNKNOWN or state.state not in OPEN:
        return None
    if state.asked_cluster is None and state.state == "running":
        # It is left alone anyway.
        return None
    if job.cluster is None:
        return f"{state.name}: Slurm was asked before it had the job; nothing was done, try again"
    what = elsewhere(job, state.asked_cluster) or f"Slurm does not say whether this is cluster {job.cluster}"
    return (
        f"{state.name}: {what}. Whether it lives can be told there alone (by its records: {state.state}). "
        f"Nothing was done; go on with it on a login node of cluster {job.cluster}. Where that cluster is no "
        f"more, remove its name from the last job in {RunDir(Path(state.path)).record}"
    )


def _say(ending: Sequence[RunState]) -> None:
    first, more = ending[0], f" and {len(ending) - 1} more" if len(ending) > 1 else ""
    sys.stderr.write(
        f"waiting, for {_WAIT_S:g} s at most: Slurm still ends job {first.job}, which trained {first.name}"
        f"{more}\n"
    )
