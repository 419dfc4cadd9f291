"""docs/first-week.md, typed as it stands there: each command prints the lines that the page shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from commands import environment, events_of, run_of

from orchestra.report.attempts import rank_processes
from orchestra.run.paths import RunDir
from tests.support.pages import DOCS, ROOT
from tests.support.waiting import eventually

PAGE = (DOCS / "first-week.md").read_text()
# Files that the page names before it shows them; and what is typed, and printed in the other terminal.
FILES = re.findall(
    r"`([\w/]+\.(?:py|yaml))`[^`]*?```(?:python|yaml)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
)
BLOCKS = re.findall(r"^```(console|text)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
# For one command, however busy the machine is.
SECONDS = 200.0
# It goes on in a terminal of its own until it is cancelled.
ENDLESS = "run.name=killed"
PROGRAMS = {"orchestra": [sys.executable, "-m", "orchestra"], "python": [sys.executable], "kill": ["kill"]}


class Terminal:
    """Runs one command in a folder; what it prints goes into a file."""

    def __init__(self, folder: Path, command: str) -> None:
        program, *words = shlex.split(command)
        self._output = folder / f"{len(list(folder.glob('*.output')))}.output"
        with self._output.open("w") as file:
            self.process = subprocess.Popen(
                [*PROGRAMS[program], *words],
                cwd=folder,
                env=environment({"ORCHESTRA_CONFIG_DIR": str(folder / "no home")}),
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def printed(self) -> str:
        return self._output.read_text()

    def missing(self, lines: list[str]) -> str | None:
        """Return the first of the lines that was not printed, in this order; `…` in them is any text."""
        left = iter(self.printed().splitlines())
        for line in lines:
            pattern = re.compile(re.escape(line).replace("…", ".*"))
            if line != "..." and not any(pattern.fullmatch(each) for each in left):
                return line
        return None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("README.md", "CHANGELOG.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name, text in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def is_shown(terminal: Terminal, lines: list[str]) -> bool:
    return terminal.missing(lines) is None


def can_be_killed(run: RunDir) -> bool:
    """Whether its processes are known and something is saved."""
    return bool(rank_processes(run, 0)) and bool(events_of(run, "checkpoint_committed"))


@pytest.mark.timeout(900)
def test_the_tasks_of_the_first_week_are_typed_as_the_page_shows_them(folder: Path) -> None:
    assert len(FILES) == 4
    assert re.findall(r"^## \((.)\)", PAGE, re.MULTILINE) == list("abcdefghi")
    killed: Terminal | None = None
    run, victim = run_of(folder, "killed"), 0
    try:
        for kind, block in BLOCKS:
            if kind == "text":
                assert killed is not None
                assert eventually(partial(is_shown, killed, block.splitlines()), SECONDS), killed.printed()
                continue
            for typed in block.removeprefix("$ ").split("\n$ "):
                command, *lines = typed.splitlines()
                terminal = Terminal(folder, command.replace("PID", str(victim)))
                if ENDLESS in command:
                    killed = terminal
                    assert eventually(partial(can_be_killed, run), SECONDS), killed.printed()
                    victim = rank_processes(run, 0)[1].pid
                    continue
                expected = 2 if lines and lines[0].startswith("error: ") else 0
                assert terminal.process.wait(SECONDS) == expected, (command, terminal.printed())
                assert terminal.missing(lines) is None, (terminal.missing(lines), terminal.printed())
                if command == "orchestra cancel killed":
                    assert killed is not None
                    assert killed.process.wait(SECONDS) == 75, killed.printed()
    finally:
        if killed is not None and killed.process.poll() is None:
            killed.process.kill()
            killed.process.wait()
