"""Stand-ins for Slurm's commands: shell scripts in a folder that comes first in PATH."""

from __future__ import annotations

import getpass
import shlex
from pathlib import Path

import pytest

ME = getpass.getuser()


class FakeSlurm:
    """What each command does is put there by the test; each call is written down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def put(self, name: str, script: str = "exit 0") -> None:
        """Let a command run a script from now on. It is replaced at once: somebody may be calling it."""
        draft = self.folder / f".{name}"
        log = shlex.quote(str(self.folder / "calls"))
        draft.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\n{script}\n')
        draft.chmod(0o755)
        draft.rename(self.folder / name)

    def says(self, name: str, *, prints: str = "", complains: str = "", code: int = 0) -> None:
        """Let a command print these lines, complain of something, and end with a code."""
        (self.folder / f"{name}.out").write_text(prints and prints.removesuffix("\n") + "\n")
        out = shlex.quote(str(self.folder / f"{name}.out"))
        complaint = f"echo {shlex.quote(complains)} >&2\n" if complains else ""
        self.put(name, f"cat {out}\n{complaint}exit {code}")

    def calls(self, name: str = "") -> list[str]:
        """Return how a command was called (all), oldest first: its name and its arguments."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.startswith(name)]


def queue_line(
    job: str, state: str, name: str, *, reason: str = "Priority", start: str = "N/A", token: str | None = None
) -> str:
    """Return what squeue says of a job of this user."""
    return f"{job}|{state}|{ME}|{reason}|node1|{start}|{name}|{token or f'orchestra:{name}'}"


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Stand-ins that the commands of a test find; there are none until it puts them there."""
    commands = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{commands.folder}:/usr/bin:/bin")
    return commands
