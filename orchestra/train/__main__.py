"""`python -m orchestra.train RUN_DIR [--attempt N]`: the entry point of every rank.

Before torch is imported (two seconds of processor time) the process ties its life to its parent's, takes its
own log file, and lets the node agent alone react to the scheduler's signals.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from orchestra.data.token_files import allow_many_files
from orchestra.errors import EXIT_DONE, EXIT_STOPPED
from orchestra.run.heartbeat import open_heart
from orchestra.run.paths import RunDir
from orchestra.run.rank_cores import take_own_cores

_PR_SET_PDEATHSIG = 1
# The parent's process id: torchrun, or the process that this one was forked from (launchers/processes.py).
_PARENT_VARIABLE = "LAUNCHERS_PARENT_PID"


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends: under torchrun every worker has its own session,
    so that it would outlive a kill of torchrun's process group.
    """
    parent = int(os.environ.get(_PARENT_VARIABLE, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the request was in force
            os._exit(1)


def ignore_scheduler_signals() -> None:
    """Ignore USR1 and USR2: Slurm's warning reaches every process of a job and kills without a handler."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def redirect_output(path: Path) -> None:
    """Send this process's standard output and error to its own file, which is only ever appended to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())


def leave_at_once(code: int) -> NoReturn:
    """End the process without Python's own shutdown. The verdict and all records are written by now.

    Threads and process groups of a failed rank may not end by themselves. And a rank that had finished was
    seen to die of SIGABRT while the interpreter shut down ("terminate called without an active exception",
    twice in some hundred ends): a native thread that then asks for the interpreter's lock ends the process.
    gloo's does, where it gives back the tensors of a last collective late.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> NoReturn:
    """Run this rank and end with its exit code.

    Under torchrun a stop on request ends with 0 like a finished run, and its verdict is in the events: after
    another code torchrun would end the ranks that still have to close what they hold.
    """
    parser = argparse.ArgumentParser(prog="python -m orchestra.train", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--from-memory", type=int, metavar="STEP")
    arguments = parser.parse_args()
    die_with_parent()
    ignore_scheduler_signals()
    allow_many_files()
    run = RunDir(arguments.run_dir.resolve())
    is_under_torchrun = "RANK" in os.environ
    if is_under_torchrun:
        redirect_output(run.rank_log(arguments.attempt, int(os.environ["RANK"])))
    faulthandler.enable()  # a crash in native code leaves its stacks in the rank's log
    take_own_cores()
    heart = open_heart(run, arguments.attempt, int(os.environ.get("RANK", "0")))

    from orchestra.train.trainer import run_rank

    code = run_rank(run, arguments.attempt, arguments.from_memory, heart)
    leave_at_once(EXIT_DONE if code == EXIT_STOPPED and is_under_torchrun else code)


if __name__ == "__main__":
    main()
