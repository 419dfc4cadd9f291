"""Members of a sweep on this machine and the command that began them, which may be killed before they end.

The command leaves a word in the environment of the members that it begins. A member asks the kernel for
SIGTERM when the command ends in whatever way, and stops with a checkpoint. The begin of each of its attempts
holds the word too: one whose command ended before it had asked is told by `orchestra status SWEEP` and by
whoever goes on with the sweep.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping

from launchers import processes
from orchestra.report.run_state import RunState, is_of_this_host, leader_lives
from orchestra.run.events import is_whole, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir

_VARIABLE = "ORCHESTRA_SWEEP_COMMAND"


def begun_by_this() -> dict[str, str]:
    """Return what the environment of a member says that this process begins."""
    process = processes.find(os.getpid())
    return {_VARIABLE: f"{os.getpid()}:{'' if process is None else process.started}"}


def beginner(environment: Mapping[str, str]) -> Record:
    """Return what the begin of an attempt records of the command that began this member; empty elsewhere."""
    pid, _, started = environment.get(_VARIABLE, "").partition(":")
    if not pid.isdecimal():
        return {}
    return {"begun_by": {"pid": int(pid), "pid_started": int(started) if started.isdecimal() else None}}


def stop_with_command() -> None:
    """Have the kernel send SIGTERM to this process when the command ends that began it as a member of a
    sweep, by whatever signal: SIGABRT, SIGQUIT and SIGKILL leave it no time to hand one on. Does nothing in
    other processes. *Main thread only*, before training begins.
    """
    if beginner(os.environ).get("begun_by", {}).get("pid") == os.getppid():
        processes.signal_at_parents_end(signal.SIGTERM)


def unwatched(members: Iterable[tuple[RunDir, RunState]]) -> list[RunDir]:
    """Return the members that train on this host although the command that began them is gone."""
    return [run for run, state in members if state.state.is_alive and _is_unwatched(run)]


def _is_unwatched(run: RunDir) -> bool:
    try:
        starts = read_events(run, ("attempt_started",))
    except OSError:
        return False
    if not starts or not is_of_this_host(starts[-1]) or not leader_lives(starts[-1]):
        return False
    command = starts[-1].get("begun_by")
    return isinstance(command, dict) and is_whole(command.get("pid")) and not leader_lives(command)
