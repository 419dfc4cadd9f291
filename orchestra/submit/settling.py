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
    told, problems = with_scheduler(runs, own)
    deadline = time.monotonic() + _WAIT_S
    has_said = False
    while not problems and (ending := [state for state in told if is_being_ended(state)]):
        if time.monotonic() >= deadline:
            break
        if not has_said:
            _say(ending)
            has_said = True
        time.sleep(_POLL_S)
        told, problems = with_scheduler(runs, [read_state(run, time.time()) for run in runs])
    return told, problems


def is_being_ended(state: RunState) -> bool:
    """Whether an attempt has its verdict, and its job is still on its nodes."""
    return state.state in _ENDED and state.job_state in RUNNING


def unclear(state: RunState) -> str | None:
    """Return why nobody can say here whether a run is alive, and where to ask; None where it is known."""
    job = state.submitted
    if job is None or state.job_state != UNKNOWN or state.state not in OPEN:
        return None
    if job.cluster is None or state.state == "running" and state.asked_cluster is None:
        # Of a job that is younger than Slurm's answer, or of one whose run grows.
        return None if state.state == "running" else f"{state.name}: Slurm's answer is older than its job"
    what = elsewhere(job, state.asked_cluster) or f"its job is on cluster {job.cluster}, and Slurm does not say which one this is"
    return (
        f"{state.name}: {what}. Whether it lives is known there alone (its own records say: {state.state}), so "
        f"nothing was done; go on with it on a login node of cluster {job.cluster}. Where that cluster is no "
        f"more, remove its name from the last of the jobs in {RunDir(Path(state.path)).record}"
    )


def _say(ending: Sequence[RunState]) -> None:
    first, more = ending[0], f" and {len(ending) - 1} more" if len(ending) > 1 else ""
    sys.stderr.write(
        f"waiting, for {_WAIT_S:g} s at most: Slurm still ends job {first.job}, which trained {first.name}"
        f"{more}\n"
    )
