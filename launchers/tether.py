"""The stub between an agent and torchrun: ties its life to the agent's, then becomes the command it was
given.

`python -m launchers.tether PARENT_PID COMMAND…`. The kernel kills the command when the agent dies in
whatever way, SIGKILL included. It is a program of its own because code between fork and exec is not safe
in a threaded parent. SIGTERM, SIGUSR1 and SIGUSR2 are ignored from here on: Slurm sends them to every
process of a job, torchrun would die of them and leave its workers behind. Workers inherit that and install
handlers of their own where they want to know.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

# <sys/prctl.h>
_PR_SET_PDEATHSIG = 1
# Set for the workers: the process id of their parent, so that they can tell whether it still is. It is
# torchrun's, or that of the process that forked them.
PARENT_VARIABLE = "LAUNCHERS_PARENT_PID"
# What `timeout` and `env` return for a command that cannot be started.
_EXIT_NOT_STARTED = 127


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent (the thread that started it) ends.

    Exits at once when `parent` is already gone.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise SystemExit(_EXIT_NOT_STARTED)


def main(arguments: list[str]) -> None:
    """Tie, ignore, and become the command; never returns."""
    parent, command = int(arguments[0]), arguments[1:]
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    os.execve(command[0], command, {**os.environ, PARENT_VARIABLE: str(os.getpid())})


if __name__ == "__main__":
    main(sys.argv[1:])
