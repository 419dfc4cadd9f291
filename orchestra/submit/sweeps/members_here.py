"""Trains the members of a sweep on this machine: one after another, or `cluster.members_at_once` at a time.

Each member is an `orchestra resume` of its own, started with the sweep's snapshot of the code; so it has its
record, restarts and verdict like any run. Members that train at the same time get equal shares of the cores,
and on GPUs devices of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from orchestra.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from orchestra.report.unwatched import begun_by_this
from orchestra.run.config_file import read_config
from orchestra.run.control import stop_requests
from orchestra.run.paths import RunDir, SweepDir
from orchestra.submit.sweeps.member_shares import MemberShare, on_cores, shares

_POLL_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a member prints, where several train at a time.
_OUTPUT = "output.log"


@dataclass(frozen=True)
class _TrainingMember:
    run: RunDir
    process: subprocess.Popen[bytes]
    share: MemberShare


def at_once(runs: Sequence[RunDir]) -> int:
    """Return how many of these members train at a time: the smallest number that one gives."""
    given = [read_config(run.config).cluster.members_at_once for run in runs]
    return min([*given, len(runs)], default=1)


def output_of(run: RunDir) -> Path:
    """Return the file with what a member printed that trained beside others."""
    return run.path / "logs" / _OUTPUT


def train_members(
    sweep: SweepDir,
    runs: Sequence[RunDir],
    *,
    is_shown: bool,
    begun: Callable[[RunDir], None],
    ended: Callable[[RunDir], None],
) -> int | None:
    """Train runs of a sweep to their ends; return None, or the exit code where a signal ended it before.

    `is_shown`: what members print goes to this terminal, where one trains at a time; else to `output_of`.
    The first signal ends every member that trains with a checkpoint (75), the second at once (130); what
    waits is not begun.
    """
    # `resume` takes requests that are there before it for the past.
    old = {run.path: _cancels(run) for run in runs}
    waiting, children = list(runs), list[_TrainingMember]()
    free = shares([read_config(run.config) for run in runs], at_once(runs))
    is_shown = is_shown and len(free) == 1
    with _forwarded(children) as received:
        while children or (waiting and not received):
            while waiting and free and not received:
                run = waiting.pop(0)
                # Cancelled, removed or renamed while it waited for its turn.
                if _cancels(run) - old[run.path] or not run.has_records():
                    ended(run)
                    continue
                share = free.pop(0)
                begun(run)
                children.append(_TrainingMember(run, _started(sweep, run, share, is_shown=is_shown), share))
            time.sleep(_POLL_S)
            for child in [child for child in children if child.process.poll() is not None]:
                children.remove(child)
                free.append(child.share)
                ended(child.run)
    if not received:
        return None
    return EXIT_STOPPED if len(received) == 1 else EXIT_INTERRUPTED


def _cancels(run: RunDir) -> set[stop_requests.StopRequest]:
    """Return the requests to cancel the attempt of a run that was asked last to stop."""
    asked = stop_requests.requested_attempt(run)
    found = () if asked is None else stop_requests.read_requests(run, asked)
    return {request for request in found if request.reason == stop_requests.CANCEL}


def _started(sweep: SweepDir, run: RunDir, share: MemberShare, *, is_shown: bool) -> subprocess.Popen[bytes]:
    folders = [str(sweep.newest_code()), *([str(sweep.plugins)] if sweep.plugins.is_dir() else [])]
    others = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    path = os.pathsep.join(dict.fromkeys([*folders, *others]))
    environment = {**os.environ, "PYTHONPATH": path, **begun_by_this(), **share.environment}
    # -P: a folder `orchestra` in the working directory is not the snapshot.
    command = [sys.executable, "-P", "-m", "orchestra", "resume", str(run.path)]
    output_of(run).parent.mkdir(exist_ok=True)
    with on_cores(share.cores), output_of(run).open("ab") as log:
        output = None if is_shown else log
        # Signals reach it through this process alone: a terminal's Ctrl-C would count twice.
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, process_group=0)


@contextlib.contextmanager
def _forwarded(children: Sequence[_TrainingMember]) -> Iterator[list[int]]:
    """Hand signals on to the members that train; yields those that came."""
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.process.send_signal(number)

    # What was ignored before stays so: SIGHUP under nohup.
    taken = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, forward) for number in taken}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
