"""Mirrors `metrics.jsonl` to Weights & Biases from a process of its own, so that it can neither stop nor slow
the training.

The trainer starts `python -m orchestra.train.watch.wandb_mirror RUN_DIR ATTEMPT` and holds the other end of
its standard input; that end closing, by `close()` or by the trainer's death, makes the mirror send what is
left and finish. The two share no other channel: rows and events come from the run's files.

**One wandb run for the run's whole life**, by the id in run.json. A training step is wandb's step, so that
none is there twice. An attempt's mirror waits until its rank 0 has said where it goes on, sends the rows of
the attempts before that still count, and then only its own: what a roll-back or a restart made void is not
sent again. It falls silent as soon as somebody has claimed a newer attempt. Offline, each attempt begins a
folder with all rows that count and then removes those of the attempts before: one `wandb sync` sends all.
Online, wandb keeps what it was sent: after a roll-back the void rows stay until the run is beyond them.

Neither side imports torch here, and the trainer's side does not import wandb.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

import orchestra
from conf.schema import Config, WandbConfig, WandbMode
from orchestra.run.config_file import read_config
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, event_files, is_number, is_whole, rank_writer, read_events
from orchestra.run.files import JsonLinesReader, Record
from orchestra.run.metrics_file import MFU_CONVENTION, rows_that_count, sound_row
from orchestra.run.paths import RunDir
from orchestra.run.record import jobs_of, read_record
from orchestra.run.run_lineage import BEGIN, read_lineage

EXIT_MIRRORED = 0
EXIT_KEPT_OFFLINE = 3  # the server could not be reached: the records lie in the run directory
EXIT_GAVE_UP = 4  # not finished within wandb.finish_timeout_s
# wandb refused the settings, an API key that is missing or wrong above all: kept in the run directory.
EXIT_REFUSED = 5

# What the server answered where the key is not the right one, in wandb's words.
_REFUSED = re.compile(r"\berror 40[13]\b")
_MODULE = "orchestra.train.watch.wandb_mirror"
_POLL_S = 1.0
# Priority once the wandb run is open: a tenth of a core that others want. 19 leaves 1.5 %: beside four busy
# processes a second of work took longer than wandb.finish_timeout_s.
_NICE_WHILE_TRAINING = 10
_AUTOGROUP_WHILE_TRAINING = 19
# Part of wandb.finish_timeout_s that wandb.init may take, so that a run that ends at once is kept offline.
_INIT_SHARE = 0.4
# Of the table of events.
_EVENT_COLUMNS = (
    "time",
    "attempt",
    "event",
    "rank",
    "host",
    "step",
    "cause",
    "message",
    "decision",
    "reason",
)
_TOLD_CHARACTERS = 500
# What `orchestra watch --wandb` writes, in files that begin so.
_ALERT_WRITERS, _ALERTS, _ALERTS_S = "watch.", ("alert_raised", "alert_ended"), 10.0
# The own step time of each host, that of its slowest rank, with the newest rows; hosts beyond are left out.
_OWN_TIMES, _OWN_TIMES_S, _MOST_HOSTS = "own_step_s/", 60.0, 64
# Of wandb.finish_timeout_s, for making the report of a run that has finished.
_REPORT_SHARE = 0.3
# The mirror gives up by itself this long before the trainer would kill it, to say why in its log.
_MARGIN_S = 1.0


class WandbMirror:
    """The trainer's handle on the mirror process. *Rank 0 only.*

    No method raises because of wandb, and only `close` waits: at most `wandb.finish_timeout_s`.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        events: EventWriter,
        process: subprocess.Popen[bytes] | None,
        attempt: int,
    ) -> None:
        self._run = run
        self._timeout_s = config.wandb.finish_timeout_s
        self._events = events
        self._process = process
        self._attempt = attempt

    @classmethod
    def start(cls, run: RunDir, config: Config, events: EventWriter, attempt: int) -> WandbMirror:
        """Start the process, or none with `wandb.mode=disabled`; a failure to start becomes an event."""
        if config.wandb.mode is WandbMode.disabled:
            return cls(run, config, events, None, attempt)
        process: subprocess.Popen[bytes] | None = None
        try:
            process = _spawn(run, attempt)
        except OSError as error:
            events.write("wandb_failed", cause=f"the mirror process could not be started: {error}")
        return cls(run, config, events, process, attempt)

    def close(self, timeout_s: float | None = None) -> None:
        """Let the mirror finish for at most `timeout_s` (None: `wandb.finish_timeout_s`), then kill it.

        Call it after the last row is written. An event `wandb_failed` says what was not mirrored.
        """
        process, self._process = self._process, None
        if process is None:
            return
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the mirror is gone already
            process.stdin.close()
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = EXIT_GAVE_UP
            _kill_session(process)
        if code != EXIT_MIRRORED:
            self._report(code, limit_s)

    def _report(self, code: int, limit_s: float) -> None:
        causes = {
            EXIT_KEPT_OFFLINE: "the server could not be reached; the records were kept offline",
            EXIT_REFUSED: "wandb refused to go online (no API key, or not the right one? `wandb login`); "
            "the records were kept offline, see the log",
            EXIT_GAVE_UP: f"not finished within {limit_s:g} s",
        }
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        is_open = any(self._run.wandb.glob("*run-*/*.wandb"))
        remedy = (
            f"to send what wandb recorded: wandb sync {self._run.wandb}/*run-*"
            if is_open
            else f"wandb recorded nothing yet; to do so now: python -m {_MODULE} {self._run.path} "
            f"{self._attempt} </dev/null"
        )
        self._events.write(
            "wandb_failed",
            cause=causes.get(code, f"the mirror process {ended}"),
            log=str(_log_path(self._run)),
            advice=f"metrics.jsonl is complete; {remedy}",
        )


def _log_path(run: RunDir) -> Path:
    return run.logs / "wandb.log"


def _spawn(run: RunDir, attempt: int) -> subprocess.Popen[bytes]:
    run.logs.mkdir(parents=True, exist_ok=True)
    roots = [str(Path(orchestra.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with _log_path(run).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(run.path), str(attempt)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(root for root in roots if root)},
            start_new_session=True,  # Ctrl-C in the terminal is not for the mirror
        )


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the mirror and reap it. wandb's own service process ends when it sees its parent gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def mirror(run: RunDir, attempt: int) -> int:
    """Mirror the rows of `run` until standard input ends, then finish; return the exit code. *The mirror
    process* of an attempt, as all that follows.
    """
    config = read_config(run.config).wandb
    ending = _MirrorEnd(config.finish_timeout_s)
    # At normal priority: a run that is short, on a busy machine, would be over before wandb has opened it.
    wandb_run, code = _open(run, config, attempt)
    ending.lower_priority()
    rows, alerts, own_times = _Rows(run, attempt), _Alerts(run), _OwnTimes(run, attempt)
    beside: Record = {}
    last_step, is_last, is_superseded = wandb_run.starting_step - 1, False, False
    last_row: Record | None = None
    while not is_superseded:
        had_begun = rows.has_begun
        beside |= own_times.new(is_last=is_last)
        for row in rows.new(is_last=is_last):
            if row["step"] > last_step:
                _log(wandb_run, {**row, **beside})
                beside = {}
                last_step, last_row = row["step"], row
        if rows.has_begun and not had_begun:
            _remove_older_folders(run, wandb_run, attempt)
        for title, text in alerts.new():
            wandb_run.alert(title, text)
        if is_last:
            _log_events(wandb_run, run, last_row, beside)
            _log_report(wandb_run, run, attempt, config.finish_timeout_s)
            break
        is_last = ending.wait(_POLL_S)
        # A newer attempt's mirror sends what is missing here.
        is_superseded = _is_superseded(run, attempt)
    wandb_run.finish()
    return code


def _is_superseded(run: RunDir, attempt: int) -> bool:
    try:
        newest = stop_requests.claimed_attempt(run)
    except OSError:
        return False
    return newest is not None and newest > attempt


class _Rows:
    """The rows to send, each once: at first those that count when the attempt says where it goes on, from
    then on its own.
    """

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._metrics = JsonLinesReader(run.metrics)
        self._events = JsonLinesReader(run.event_file(rank_writer(attempt, 0)))
        self._before: list[Record] = []
        self.has_begun = False

    def new(self, *, is_last: bool) -> list[Record]:
        """Return the rows that were written since the last call; none before the attempt's begin is known,
        unless nothing more will come.
        """
        rows = [row for read in self._metrics.read_new() if (row := sound_row(read)) is not None]
        if self.has_begun:
            return [row for row in rows if row.get("attempt", self._attempt) == self._attempt]
        self._before += rows
        events = self._events.read_new()
        began = any(event.get("event") == BEGIN and is_whole(event.get("step")) for event in events)
        if not began and not is_last:
            return []
        self.has_begun = True
        before, self._before = self._before, []
        return rows_that_count(before, read_lineage(self._run))


class _Alerts:
    """What `orchestra watch --wandb` has said since this mirror began."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._readers: dict[Path, JsonLinesReader] = {}
        self._looked_at = -math.inf
        self.new()

    def new(self) -> list[tuple[str, str]]:
        """Return the title and the text of each alert, and of the end of each."""
        now, told = time.monotonic(), []
        if now - self._looked_at < _ALERTS_S:
            return []
        self._looked_at = now
        for event in self._read_new():
            names, key = event.get("told"), event.get("key")
            if event.get("event") in _ALERTS and isinstance(names, list) and "wandb" in names:
                is_over = event["event"] == _ALERTS[1]
                words = (event.get("message"), event.get("advice"))
                text = "; ".join(str(word) for word in words if word)
                told.append((f"{self._run.name}: {key}{' is over' if is_over else ''}", text))
        return told

    def _read_new(self) -> list[Record]:
        files = [file for file in event_files(self._run) if file.name.startswith(_ALERT_WRITERS)]
        return [
            event
            for file in files
            for event in self._readers.setdefault(file, JsonLinesReader(file)).read_new()
        ]


class _OwnTimes:
    """The own step times that the ranks of an attempt have written since this mirror last looked."""

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._readers: dict[Path, JsonLinesReader] = {}
        self._looked_at = -math.inf

    def new(self, *, is_last: bool) -> Record:
        """Return columns: of each host the newest time of its slowest rank; none where there is no newer."""
        now = time.monotonic()
        if not is_last and now - self._looked_at < _OWN_TIMES_S:
            return {}
        self._looked_at = now
        slowest: dict[str, float] = {}
        try:
            files = sorted(self._run.times.glob(f"{rank_writer(self._attempt, 0).partition('.')[0]}.*.jsonl"))
        except OSError:
            return {}
        for file in files:
            try:
                lines = self._readers.setdefault(file, JsonLinesReader(file)).read_new()
            except OSError:
                continue
            for line in lines[-1:]:
                seconds, host = line.get("own_s"), line.get("host")
                if isinstance(seconds, list) and seconds and is_number(seconds[-1]) and isinstance(host, str):
                    slowest[host] = max(seconds[-1], slowest.get(host, 0.0))
        return {f"{_OWN_TIMES}{host}": slowest[host] for host in sorted(slowest)[:_MOST_HOSTS]}


def _remove_older_folders(run: RunDir, wandb_run: Any, attempt: int) -> None:
    """Remove what earlier attempts recorded offline: this one's folder holds all of it that counts.

    wandb names folders by its host's clock, which says nothing of another host's. A newer attempt makes its
    own after its claim: where none is claimed once they were listed, all others are older.
    """
    if not wandb_run.offline:
        return
    own = Path(wandb_run.dir).parent.name
    others = [each for each in run.wandb.glob(f"offline-run-*-{wandb_run.id}") if each.name != own]
    if _is_superseded(run, attempt):
        return
    for folder in others:
        shutil.rmtree(folder, ignore_errors=True)


def _log_events(wandb_run: Any, run: RunDir, last_row: Record | None, more: Record) -> None:
    """Log the run's events as a table, beside the last row, with `more` columns. What only developers read is
    left out.
    """
    import wandb

    if last_row is None:
        return
    events = [[_told(event.get(name)) for name in _EVENT_COLUMNS] for event in read_events(run)]
    table = wandb.Table(columns=list(_EVENT_COLUMNS), data=events, allow_mixed_types=True)
    # In the row's own record, at its own time.
    stamp = {"_timestamp": last_row["time"]} if "time" in last_row else {}
    wandb_run.log({"events": table, **more, **stamp}, step=last_row["step"])


def _told(value: object) -> object:
    if value is None or isinstance(value, int | float):
        return value
    return str(value)[:_TOLD_CHARACTERS]


def _log_report(wandb_run: Any, run: RunDir, attempt: int, limit_s: float) -> None:
    """Make the report of a run that has finished and log it as an artifact; without one nothing is logged."""
    ends = read_events(run, ("finished",))
    if not any(event["event"] == "finished" and event["attempt"] == attempt for event in ends):
        return
    report = run.path / "report.html"
    command = [sys.executable, "-m", "orchestra", "report", str(run.path), "-o", str(report)]
    # One of before may lie there: only what has been made now is logged.
    try:
        limit_s *= _REPORT_SHARE
        made = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        return
    if made == 0:
        wandb_run.log_artifact(report, name=f"report-{wandb_run.id}", type="report")


class _MirrorEnd:
    """Notices that the trainer closed standard input (or SIGTERM), and ends a mirror that then hangs."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = max(limit_s / 2, limit_s - _MARGIN_S)
        self._closed = threading.Event()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: self._close())
        threading.Thread(target=self._watch_input, daemon=True).start()
        threading.Thread(target=self._give_up_late, daemon=True).start()

    def wait(self, timeout_s: float) -> bool:
        """Return True as soon as the trainer is done, False after `timeout_s`."""
        return self._closed.wait(timeout_s)

    def _watch_input(self) -> None:
        # os.read, not sys.stdin: a thread inside a buffered reader would hold its lock at exit.
        while os.read(0, 4096):
            pass
        self._close()

    def lower_priority(self) -> None:
        """Lower the priority of this process and of wandb's service for as long as the training goes on: it
        needs the processors.
        """
        if os.getsid(0) != os.getpid():
            # Started by hand after the training: its caller would become slow, with all its group.
            return
        os.setpriority(os.PRIO_PGRP, 0, _NICE_WHILE_TRAINING)
        _set_autogroup(_AUTOGROUP_WHILE_TRAINING)
        if self._closed.is_set():
            _set_autogroup(0)

    def _close(self) -> None:
        self._closed.set()
        # As far as a user may undo it: the training is over, and time to finish is limited.
        _set_autogroup(0)

    def _give_up_late(self) -> None:
        self._closed.wait()
        threading.Event().wait(self._limit_s)
        os._exit(EXIT_GAVE_UP)


def _open(run: RunDir, config: WandbConfig, attempt: int) -> tuple[Any, int]:
    """Open the wandb run in the mode asked for, or offline where the server or the key is missing."""
    import wandb

    try:
        return _init(run, config, config.mode.value, attempt), EXIT_MIRRORED
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        if config.mode is not WandbMode.online:
            raise
        sys.stderr.write(f"wandb online failed, keeping the records offline: {error}\n")
        wandb.teardown(exit_code=1)
        kinds = (wandb.errors.UsageError, wandb.errors.AuthenticationError)
        is_refused = isinstance(error, kinds) or _REFUSED.search(str(error)) is not None
        kept = _init(run, config, WandbMode.offline.value, attempt)
        return kept, EXIT_REFUSED if is_refused else EXIT_KEPT_OFFLINE


def _init(run: RunDir, config: WandbConfig, mode: Any, attempt: int) -> Any:
    import wandb

    record = read_record(run)
    frozen = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(run.config)))
    settings = wandb.Settings(
        console="off",
        quiet=True,
        symlink=False,
        save_code=False,
        disable_code=True,
        disable_git=True,
        init_timeout=_INIT_SHARE * config.finish_timeout_s,
    )
    wandb_run = wandb.init(
        mode=mode,
        id=record["wandb_id"],
        # Of a sweep's member: its own name is a number.
        name=f"{record['sweep']}/{run.name}" if "sweep" in record else run.name,
        dir=run.path,
        resume="allow",
        project=config.project,
        entity=config.entity,
        group=config.group or record.get("sweep"),
        tags=config.tags,
        notes=config.notes,
        job_type=config.job_type,
        config={**frozen, "mfu_convention": MFU_CONVENTION, "provenance": _provenance(run, record, attempt)},
        settings=settings,
    )
    wandb_run.define_metric("step")
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run


def _provenance(run: RunDir, record: Record, attempt: int) -> Record:
    """Return where the run comes from: code, command, Slurm's jobs, and the hosts of this attempt."""
    starts = [event for event in read_events(run, ("attempt_started",)) if event["attempt"] == attempt]
    facts: Record = {
        key: record[key] for key in ("code_revision", "versions", "command", "sweep") if key in record
    }
    jobs = [str(entry["id"]) for entry in jobs_of(record) if entry.get("id") is not None]
    place: Record = {
        key: starts[-1][key] for key in ("job", "hosts", "nodes") if starts and key in starts[-1]
    }
    return {**facts, "path": str(run.path), "slurm_jobs": jobs, "attempt": attempt, **place}


def _log(wandb_run: Any, row: Record) -> None:
    """Log the numbers of a row at its own time; null values (unknown or non-finite) leave a gap."""
    values = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "time"}
    if "time" in row:
        values["_timestamp"] = row["time"]
    wandb_run.log(values, step=row["step"])


def _set_autogroup(nice: int) -> None:
    """Set the priority of this session against all other sessions."""
    with contextlib.suppress(OSError):  # kernels without autogroup, or a read-only /proc
        Path("/proc/self/autogroup").write_text(str(nice))


if __name__ == "__main__":
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing leaves the machine unasked
    if not os.access(os.path.expanduser("~"), os.W_OK):  # noqa: PTH111  a home that is none stays `~`
        # Staging files go there otherwise.
        os.environ.setdefault("WANDB_DATA_DIR", str(RunDir(Path(sys.argv[1])).wandb))
    sys.exit(mirror(RunDir(Path(sys.argv[1])), int(sys.argv[2])))
