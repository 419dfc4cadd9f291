"""Keeps a rank of an attempt that another one has replaced from publishing anything.

An attempt's number is claimed once in a run's life: a higher claim means that somebody else trains the run,
and this process was stopped, cut off or forgotten, and woke up. What it still holds in its hands is void.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

from orchestra import control
from orchestra.errors import EXIT_FAILED
from orchestra.events import EventWriter, read_events
from orchestra.rundir import RunDir

# Before a checkpoint is made valid, and before older ones are removed.
_PHASES = ("before_manifest", "before_prune")


def fenced(
    run: RunDir, attempt: int, events: EventWriter, at_phase: Callable[[str, int], None]
) -> Callable[[str, int], None]:
    """Return `at_phase`, and behind it a look for a newer attempt where this one is about to publish.

    Called from any thread. Where there is a newer attempt this process ends at once: its peers are as void.
    """

    def look(phase: str, step: int) -> None:
        at_phase(phase, step)
        if phase not in _PHASES:
            return
        # A file system that cannot be asked now cannot take the manifest either.
        newest = control.claimed_attempt(run)
        if newest is not None and newest > attempt and _has_begun(run, attempt):
            with contextlib.suppress(OSError):
                events.write("fenced", step=step, phase=phase, newest=newest, cause="a newer attempt began")
            sys.stderr.write(f"attempt {newest} has begun: this process of attempt {attempt} ends\n")
            sys.stderr.flush()
            os._exit(EXIT_FAILED)

    return look


def _has_begun(run: RunDir, attempt: int) -> bool:
    """Tell whether an attempt after this one was started: a claim alone may be a dead leader's."""
    started = read_events(run, ("attempt_started",))
    return any(it["event"] == "attempt_started" and it["attempt"] > attempt for it in started)
