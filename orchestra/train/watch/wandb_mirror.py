"""Mirrors `metrics.jsonl` to Weights & Biases from a process of its own, so that it can neither stop nor slow
the training.

The trainer starts `python -m orchestra.train.watch.wandb_mirror RUN_DIR` and holds the other end of its
standard input; that end closing, by `close()` or by the trainer's death, makes the mirror send what is
left and finish. The two share no other channel: rows come from the file. Row i of the file is wandb's
internal step i, so a resumed online run goes on where it stopped and a rollback shows as it was; charts use
the row's `step`.

Neither side imports torch here, and the trainer's side does not import wandb.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

import orchestra
from conf.schema import Config, WandbConfig, WandbMode
from orchestra.run.config_file import read_config
from orchestra.run.events import EventWriter
from orchestra.run.files import JsonLinesReader, Record
from orchestra.run.metrics_file import MFU_CONVENTION
from orchestra.run.paths import RunDir

EXIT_MIRRORED = 0
EXIT_KEPT_OFFLINE = 3  # the server could not be reached: the records lie in the run directory
EXIT_GAVE_UP = 4  # not finished within wandb.finish_timeout_s
EXIT_REFUSED = 5  # wandb refused the settings, a missing API key above all: kept in the run directory

_MODULE = "orchestra.train.watch.wandb_mirror"
_POLL_S = 1.0
# Priority once the wandb run is open: a tenth of a core that others want. 19 leaves 1.5 %: beside four busy
# processes a second of work took longer than wandb.finish_timeout_s.
_NICE_WHILE_TRAINING = 10
_AUTOGROUP_WHILE_TRAINING = 19
# Part of wandb.finish_timeout_s that wandb.init may take, so that a run that ends at once is kept offline.
_INIT_SHARE = 0.4
# The mirror gives up by itself this long before the trainer would kill it, to say why in its log.
_MARGIN_S = 1.0


class WandbMirror:
    """The trainer's handle on the mirror process. *Rank 0 only.*

    No method raises because of wandb, and only `close` waits: at most `wandb.finish_timeout_s`.
    """

    def __init__(
        self, run: RunDir, config: Config, events: EventWriter, process: subprocess.Popen[bytes] | None
    ) -> None:
        self._run = run
        self._timeout_s = config.wandb.finish_timeout_s
        self._events = events
        self._process = process

    @classmethod
    def start(cls, run: RunDir, config: Config, events: EventWriter) -> WandbMirror:
        """Start the process, or none with `wandb.mode=disabled`; a failure to start becomes an event."""
        if config.wandb.mode is WandbMode.disabled:
            return cls(run, config, events, None)
        process: subprocess.Popen[bytes] | None = None
        try:
            process = _spawn(run)
        except OSError as error:
            events.write("wandb_failed", cause=f"the mirror process could not be started: {error}")
        return cls(run, config, events, process)

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
            EXIT_REFUSED: "wandb refused to go online (no API key? `wandb login`); kept offline, see the log",
            EXIT_GAVE_UP: f"not finished within {limit_s:g} s",
        }
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        is_open = any(self._run.wandb.glob("*run-*/*.wandb"))
        remedy = (
            f"to send what wandb recorded: wandb sync {self._run.wandb}/*run-*"
            if is_open
            else f"wandb recorded nothing yet; to do so now: python -m {_MODULE} {self._run.path} </dev/null"
        )
        self._events.write(
            "wandb_failed",
            cause=causes.get(code, f"the mirror process {ended}"),
            log=str(_log_path(self._run)),
            advice=f"metrics.jsonl is complete; {remedy}",
        )


def _log_path(run: RunDir) -> Path:
    return run.logs / "wandb.log"


def _spawn(run: RunDir) -> subprocess.Popen[bytes]:
    run.logs.mkdir(parents=True, exist_ok=True)
    roots = [str(Path(orchestra.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    with _log_path(run).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(run.path)],
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


def mirror(run: RunDir) -> int:
    """Mirror the rows of `run` until standard input ends, then finish; return the exit code. *The mirror
    process*, as all that follows.
    """
    config = read_config(run.config).wandb
    ending = _MirrorEnd(config.finish_timeout_s)
    # At normal priority: a run that is short, on a busy machine, would be over before wandb has opened it.
    wandb_run, code = _open(run, config)
    ending.lower_priority()
    reader = JsonLinesReader(run.metrics)
    index = 0
    last_round = False
    while True:
        for row in reader.read_new():
            if index >= wandb_run.starting_step:  # rows before it are there from an earlier attempt
                _log(wandb_run, row, index)
            index += 1
        if last_round:
            break
        last_round = ending.wait(_POLL_S)
    wandb_run.finish()
    return code


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


def _open(run: RunDir, config: WandbConfig) -> tuple[Any, int]:
    """Open the wandb run in the mode asked for, or offline where the server or the key is missing."""
    import wandb

    try:
        return _init(run, config, config.mode.value), EXIT_MIRRORED
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        if config.mode is not WandbMode.online:
            raise
        sys.stderr.write(f"wandb online failed, keeping the records offline: {error}\n")
        wandb.teardown(exit_code=1)
        is_refused = isinstance(error, wandb.errors.UsageError)
        kept = _init(run, config, WandbMode.offline.value)
        return kept, EXIT_REFUSED if is_refused else EXIT_KEPT_OFFLINE


def _init(run: RunDir, config: WandbConfig, mode: Any) -> Any:
    import wandb

    record = json.loads(run.record.read_text())
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
        config={**frozen, "mfu_convention": MFU_CONVENTION},
        settings=settings,
    )
    wandb_run.define_metric("step")
    wandb_run.define_metric("*", step_metric="step")
    return wandb_run


def _log(wandb_run: Any, row: Record, index: int) -> None:
    """Log the numbers of a row at its own time; null values (unknown or non-finite) leave a gap."""
    values = {key: value for key, value in row.items() if isinstance(value, int | float) and key != "time"}
    if "time" in row:
        values["_timestamp"] = row["time"]
    wandb_run.log(values, step=index)


def _set_autogroup(nice: int) -> None:
    """Set the priority of this session against all other sessions."""
    with contextlib.suppress(OSError):  # kernels without autogroup, or a read-only /proc
        Path("/proc/self/autogroup").write_text(str(nice))


if __name__ == "__main__":
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # nothing leaves the machine unasked
    sys.exit(mirror(RunDir(Path(sys.argv[1]))))
