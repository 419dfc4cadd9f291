"""How a forked process looks in /proc: its command line and its mark, written over those of the fork server.

/proc/PID/cmdline and /proc/PID/environ show memory that a fork copies and that no system call of an ordinary
user moves. So the server is started with room on its command line and a mark of zeros, and each forked
process writes its own there. Used by `server`.

A list of process ids cannot take the place of marks: what a rank forks itself and leaves (data loaders,
compilers) is on no list. Measured with such a list: of two ranks that each forked a child and ended, both
children lived on after the attempt, with the rank's memory; by their marks both are found and ended.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from launchers.processes import MARK_VARIABLE

NO_MARK = "0" * 16
# Bytes of an argument that only makes room; longer command lines are cut when shown.
ROOM_BYTES = 8192


class Appearance:
    """The two areas of this process's memory. Raises OSError and ValueError where they are not there."""

    def __init__(self) -> None:
        stat = Path("/proc/self/stat").read_text()
        # Fields 48 to 51 of /proc/PID/stat: begin and end of the arguments and of the environment.
        fields = [int(field) for field in stat[stat.rindex(")") + 2 :].split()[45:49]]
        self._arguments_at, arguments_end, environment_at, environment_end = fields
        self._arguments_size = arguments_end - self._arguments_at
        environment = Path("/proc/self/environ").read_bytes()
        if environment_end - environment_at != len(environment):
            raise ValueError("this process's environment is not where /proc says")
        place = environment.index(f"{MARK_VARIABLE}={NO_MARK}\0".encode())
        self._mark_at = environment_at + place + len(MARK_VARIABLE) + 1

    def show(self, command: list[str], mark: str) -> None:
        """Let /proc show this command line, cut where it is too long, and this mark of 16 characters."""
        shown = b"\0".join(word.encode(errors="surrogateescape") for word in command)
        # The last byte stays zero: otherwise the kernel takes the area for one long title.
        shown = shown[: self._arguments_size - 1].ljust(self._arguments_size, b"\0")
        ctypes.memmove(self._arguments_at, shown, len(shown))
        ctypes.memmove(self._mark_at, mark.encode().ljust(len(NO_MARK), b"0"), len(NO_MARK))
