"""`orchestra logs RUN`: the logs of a run's current attempt, as they are or while they grow.

It follows a run over restarts and through Slurm's queue, and only reads.
"""

from __future__ import annotations

import codecs
import contextlib
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from launchers.slurm.queue import RUNNING, UNKNOWN, Questions
from orchestra.cli.text.describe import invocation, shown
from orchestra.cli.text.resolve import add_directory_option, resolve
from orchestra.errors import EXIT_DONE, ConfigError, OrchestraError
from orchestra.recovery.history import attempt_of, last_attempt
from orchestra.recovery.incidents import first_failure
from orchestra.report.run_state import RunState, name_of, read_state
from orchestra.report.scheduler import job_logs, newest_job, with_scheduler
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.run.removal import RemovalCheck

_POLL_S = 0.5
_CHUNK_BYTES = 1 << 20
_Decoder = codecs.getincrementaldecoder("utf-8")


def add_arguments(parser: ArgumentParser) -> None:
    parser.description = (
        "Print the logs of a run's last attempt: of node 0 (agent and torchrun), of rank 0, "
        "and of the rank that failed first. Before an attempt begins: what the run's job wrote."
    )
    parser.add_argument("run", metavar="RUN", help="name, unique start of one, path, or SWEEP/3")
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on until the run ends, also across restarts"
    )
    parser.add_argument("--rank", type=int, action="append", default=[], metavar="R", help="only this rank's")
    parser.add_argument("--node", type=int, action="append", default=[], metavar="N", help="only this node's")
    parser.add_argument("--attempt", type=int, metavar="A", help="of this attempt instead of the last one")
    add_directory_option(parser)


def run(arguments: Namespace) -> int:
    """Print the logs and return 0."""
    chosen = resolve(arguments.run, arguments.dir)
    files = _wanted(chosen, _attempt(chosen, arguments), arguments)
    printer = _Printer(with_titles=not (arguments.node or arguments.rank) or len(files) > 1)
    watch = _StateFollower(chosen) if arguments.follow else None
    while True:
        # Asked before printing, so that what a run writes up to its end is printed too.
        goes_on = watch is not None and watch.goes_on()
        for file in files:
            printer.print_new(file)
        if watch is not None:
            watch.tell()
        # A run that is started again goes on in other files.
        files = _files(chosen, _attempt(chosen, arguments), arguments)
        if not goes_on:
            break
        time.sleep(_POLL_S)
    printer.end()
    if watch is None and not printer.has_printed:
        _say_why_nothing(chosen)
    return EXIT_DONE


class _StateFollower:
    """Follows a run's state: by its own records each time, by Slurm's word now and then."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._removal_check = RemovalCheck(run)
        self._questions = Questions()
        self._state: RunState | None = None
        self._said: str | None = None

    def goes_on(self) -> bool:
        """Whether more may be written: the run trains, waits, or nobody can say that it does not.

        Raises OrchestraError where the run's directory was removed or renamed.
        """
        with contextlib.suppress(OSError):
            if self._removal_check.away_s(time.monotonic()) is not None:
                raise OrchestraError(f"{shown(self._run.path)} was removed: there is nothing more to follow")
        own = read_state(self._run, time.time())
        may_go_on_by_itself = own.state in (RunPhase.unknown, RunPhase.died, RunPhase.stopped)
        is_open = own.state.is_alive or may_go_on_by_itself or own.restart is not None
        if not is_open or own.submitted is None:
            self._state = own
        elif own.state is not RunPhase.running or self._questions.is_due():
            ((self._state,), _) = with_scheduler([self._run], [own], self._questions)
        else:
            self._state = own
        word = self._state.job_state
        # Between the verdict and the news that the run goes on by itself its job still runs.
        may_go_on = own.state is RunPhase.stopped and word in RUNNING
        is_unheard = word == UNKNOWN and own.state is not RunPhase.stopped
        return self._state.state.is_alive or may_go_on or is_unheard

    def tell(self) -> None:
        """Say in a line what is waited for, or how it ended, when that is news; on standard error."""
        state = self._state
        if state is None:
            return
        line = _news(state)
        if line is not None and line != self._said:
            sys.stdout.flush()
            print(f"note: {state.name}: {line}", file=sys.stderr, flush=True)
        self._said = line


def _news(state: RunState) -> str | None:
    """Return what to say of a run whose logs do not grow; None while it trains and after it ended well."""
    if state.state in (RunPhase.running, RunPhase.finished):
        return None
    job = f" (job {state.job})" if state.job else ""
    if state.job_state == UNKNOWN:
        return f"{state.state}{job}; Slurm could not be asked what becomes of it"
    cause = f": {state.cause}" if state.cause else ""
    start = f"; expected to start {state.job_start.replace('T', ' ')}" if state.job_start else ""
    if state.state is RunPhase.restarting and state.restart is not None:
        # The time of day, not what is left: said once.
        start = f"; the next attempt is due at {time.strftime('%H:%M:%S', time.localtime(state.restart.due))}"
    has_date = state.state in (RunPhase.queued, RunPhase.restarting)
    return f"{state.state}{job}{cause}{start if has_date else ''}"


def _say_why_nothing(run: RunDir) -> None:
    """Tell whoever sees nothing what the run waits for."""
    own = read_state(run, time.time())
    ((state,), _) = with_scheduler([run], [own])
    line = _news(state)
    if line is None or state.submitted is None:
        return
    print(f"note: {state.name}: {line}; nothing was written yet", file=sys.stderr)
    if state.state.is_alive:
        print(f"note: `{invocation('logs', run)} -f` waits for it", file=sys.stderr)


def _attempt(run: RunDir, arguments: Namespace) -> int:
    """Return the attempt asked for, else the newest one."""
    if arguments.attempt is not None:
        return int(arguments.attempt)
    return last_attempt(read_events(run, ("attempt_started",))) or 0


def _wanted(run: RunDir, attempt: int, arguments: Namespace) -> list[Path]:
    """Return the log files asked for; those asked for by number must exist, unless they are waited for."""
    named = _named(run, attempt, arguments)
    missing = [file for file in named if not file.exists()]
    is_to_come = arguments.follow and arguments.attempt is None and not run.attempt_logs(attempt).is_dir()
    if not is_to_come and (
        missing or (arguments.attempt is not None and not run.attempt_logs(attempt).is_dir())
    ):
        raise ConfigError(_missing(run, attempt, missing))
    return _files(run, attempt, arguments)


def _named(run: RunDir, attempt: int, arguments: Namespace) -> list[Path]:
    nodes = [run.node_log(attempt, node) for node in arguments.node]
    return nodes + [run.rank_log(attempt, rank) for rank in arguments.rank]


def _files(run: RunDir, attempt: int, arguments: Namespace) -> list[Path]:
    """Return the files asked for, else those that say most; without an attempt what the run's job wrote."""
    if named := _named(run, attempt, arguments):
        return named
    if not run.attempt_logs(attempt).is_dir():
        return job_logs(run, newest_job(run))
    failed = first_failure(attempt_of(read_events(run, ("failed", "rank_failed")), attempt))
    ranks = sorted({0, *([] if failed is None else [int(failed["rank"])])})
    return [run.node_log(attempt, 0), *(run.rank_log(attempt, rank) for rank in ranks)]


def _missing(run: RunDir, attempt: int, missing: list[Path]) -> str:
    folder = run.attempt_logs(attempt)
    if not folder.is_dir():
        attempts = ", ".join(sorted(path.name for path in run.logs.glob("attempt-*"))) or "none"
        return f"{name_of(run)} has no logs of attempt {attempt}; found: {attempts}"
    present = ", ".join(sorted(path.name for path in folder.iterdir()))
    return f"{shown(missing[0])} does not exist; attempt {attempt} has {present}"


class _Printer:
    """Prints what is new in files, with a title wherever the file changes (as `tail -f` does)."""

    def __init__(self, with_titles: bool) -> None:
        self._with_titles = with_titles
        self._offsets: dict[Path, int] = {}
        self._decoders: dict[Path, codecs.IncrementalDecoder] = {}
        self._last: Path | None = None
        self.has_printed = False

    def print_new(self, file: Path) -> None:
        with contextlib.suppress(FileNotFoundError), file.open("rb") as log:
            log.seek(self._offsets.get(file, 0))
            # A log may be larger than the memory.
            while new := log.read(_CHUNK_BYTES):
                self._print(file, new)
                self._offsets[file] = log.tell()

    def _print(self, file: Path, new: bytes) -> None:
        if self._with_titles and file != self._last:
            print(f"==> {shown(file)} <==")
        self._last = file
        self.has_printed = True
        # What was written so far may end within a character.
        text = self._decoders.setdefault(file, _Decoder(errors="replace")).decode(new)
        print(text, end="", flush=True)

    def end(self) -> None:
        """Print what is left of characters that were never written whole."""
        for decoder in self._decoders.values():
            print(decoder.decode(b"", final=True), end="", flush=True)
