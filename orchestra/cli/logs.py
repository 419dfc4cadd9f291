"""`orchestra logs RUN`: the logs of a run's current attempt, as they are or while they grow. Read-only."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from orchestra.cli.describe import shown
from orchestra.cli.resolve import add_directory_option, resolve
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.events import read_events
from orchestra.report.state import read_ending
from orchestra.report.verdict import first_failure, last_attempt, of_attempt
from orchestra.rundir import RunDir

_POLL_S = 0.5
_ALIVE = ("running", "not started")


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra logs` takes."""
    parser.description = (
        "Print the logs of a run's last attempt: of node 0 (agent and torchrun), of rank 0, "
        "and of the rank that failed first."
    )
    parser.add_argument("run", metavar="RUN", help="name, unique start of one, or path")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("--rank", type=int, action="append", default=[], metavar="R", help="only this rank's")
    parser.add_argument("--node", type=int, action="append", default=[], metavar="N", help="only this node's")
    parser.add_argument("--attempt", type=int, metavar="A", help="of this attempt instead of the last one")
    add_directory_option(parser)


def run(arguments: Namespace) -> int:
    """Print the logs and return 0."""
    chosen = resolve(arguments.run, arguments.dir)
    files = _wanted(chosen, _attempt(chosen, arguments), arguments)
    printer = _Printer(with_titles=not (arguments.node or arguments.rank) or len(files) > 1)
    while True:
        # Asked before printing, so that what a run writes up to its end is printed too.
        goes_on = arguments.follow and read_ending(chosen, read_events(chosen), time.time())[0] in _ALIVE
        for file in files:
            printer.print_new(file)
        # A run that is started again goes on in other files.
        files = _files(chosen, _attempt(chosen, arguments), arguments)
        if not goes_on:
            return EXIT_DONE
        time.sleep(_POLL_S)


def _attempt(run: RunDir, arguments: Namespace) -> int:
    """Return the attempt asked for, else the newest one."""
    return arguments.attempt if arguments.attempt is not None else last_attempt(read_events(run)) or 0


def _wanted(run: RunDir, attempt: int, arguments: Namespace) -> list[Path]:
    """Return the log files asked for; those asked for by number must exist."""
    named = _named(run, attempt, arguments)
    missing = [file for file in named if not file.exists()]
    if missing or (arguments.attempt is not None and not run.attempt_logs(attempt).is_dir()):
        raise ConfigError(_missing(run, attempt, missing))
    return _files(run, attempt, arguments)


def _named(run: RunDir, attempt: int, arguments: Namespace) -> list[Path]:
    nodes = [run.node_log(attempt, node) for node in arguments.node]
    return nodes + [run.rank_log(attempt, rank) for rank in arguments.rank]


def _files(run: RunDir, attempt: int, arguments: Namespace) -> list[Path]:
    """Return the files asked for, else those that say most; without an attempt what the run's jobs wrote."""
    if named := _named(run, attempt, arguments):
        return named
    if not run.attempt_logs(attempt).is_dir() and run.job_logs.is_dir():
        return sorted(run.job_logs.iterdir())
    failed = first_failure(of_attempt(read_events(run), attempt))
    ranks = sorted({0, *([] if failed is None else [int(failed["rank"])])})
    return [run.node_log(attempt, 0), *(run.rank_log(attempt, rank) for rank in ranks)]


def _missing(run: RunDir, attempt: int, missing: list[Path]) -> str:
    folder = run.attempt_logs(attempt)
    if not folder.is_dir():
        attempts = ", ".join(sorted(path.name for path in run.logs.glob("attempt-*"))) or "none"
        return f"{run.name} has no logs of attempt {attempt}; found: {attempts}"
    present = ", ".join(sorted(path.name for path in folder.iterdir()))
    return f"{shown(missing[0])} does not exist; attempt {attempt} has {present}"


class _Printer:
    """Prints what is new in files, with a title wherever the file changes (as `tail -f` does)."""

    def __init__(self, with_titles: bool) -> None:
        self._with_titles = with_titles
        self._offsets: dict[Path, int] = {}
        self._last: Path | None = None

    def print_new(self, file: Path) -> None:
        try:
            with file.open("rb") as log:
                log.seek(self._offsets.get(file, 0))
                new = log.read()
        except FileNotFoundError:
            return
        if not new:
            return
        if self._with_titles and file != self._last:
            print(f"==> {shown(file)} <==")
        self._offsets[file] = self._offsets.get(file, 0) + len(new)
        self._last = file
        print(new.decode(errors="replace"), end="", flush=True)
