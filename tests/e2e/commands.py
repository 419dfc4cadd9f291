"""`orchestra` as a user types it, in a process of its own, and what the machine and the run then show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.catalog import committed_steps, read_manifest
from checkpointing.manifest import Manifest
from checkpointing.storage import open_storage
from launchers import processes
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from tests.support.tiny import TINY_MODEL
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0
# Importing torch on all ranks of a run takes its time on a busy machine.
START_S = 90.0
# On two ranks.
TINY = (*TINY_MODEL, "train.global_batch_size=4", "optim.lr=1e-2")
# For a run that trains while a test does something else: ranks that train as fast as they can take the
# processors that the test, and others beside it, need. About twenty steps a second.
PACE = "recovery.inject=[{at_step: 1, rank: all, fault: slow, seconds: 0.04, attempt: all}]"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a command, which imports this very tree, and what else tests may import."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "80", **(extra or {})}


def words(*arguments: str) -> list[str]:
    """Return the command line of `orchestra ARGUMENTS`."""
    return [sys.executable, "-m", "orchestra", *arguments]


def orchestra(
    folder: Path,
    *arguments: str,
    code: int = 0,
    extra: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder` to its end, which must have this exit code."""
    done = subprocess.run(
        words(*arguments), cwd=folder, env=environment(extra), capture_output=True, text=True, timeout=limit_s
    )
    assert done.returncode == code, (done.returncode, done.stdout + done.stderr)
    return done


def run_of(folder: Path, name: str) -> RunDir:
    """Return the run of a name, of a command that ran in `folder`."""
    return RunDir(folder / "runs" / name)


def train(folder: Path, name: str, *overrides: str, code: int = 0, limit_s: float = LIMIT_S) -> RunDir:
    """Run `orchestra run` to its end; return the run."""
    orchestra(folder, "run", f"run.name={name}", *overrides, code=code, limit_s=limit_s)
    return run_of(folder, name)


def state_of(folder: Path, name: str) -> Record:
    """Return what `orchestra status` says of one run."""
    (state,) = json.loads(orchestra(folder, "status", name, "--json").stdout)
    return dict(state)


def printed(folder: Path, *arguments: str) -> str:
    """Return what a command prints, without its line breaks."""
    return " ".join(orchestra(folder, *arguments).stdout.split())


@dataclass
class Started:
    """A command that trains a run."""

    run: RunDir
    process: subprocess.Popen[str]

    def wait_for(self, claim: Callable[[], Any], limit_s: float = START_S) -> None:
        """Wait until a claim holds, while the command goes on."""
        holds = eventually(lambda: bool(claim()) or self.process.poll() is not None, limit_s)
        assert self.process.poll() is None, self.process.communicate()
        assert holds, [event["event"] for event in read_events(self.run)]

    def wait_for_steps(self, count: int) -> None:
        self.wait_for(lambda: len(read_metrics(self.run)) >= count)

    def end(self, code: int, limit_s: float = 60.0) -> tuple[str, str]:
        """Wait for the command's end, which must have this exit code and leave no process of the run; return
        what it printed.
        """
        out, err = self.process.communicate(timeout=limit_s)
        assert self.process.returncode == code, (self.process.returncode, out + err)
        assert processes_of(self.run) == []
        return out, err

    def verdict(self) -> Record:
        """Return what the agent recorded as the end."""
        return [event for event in events_of(self.run, "failed") if "rank" not in event][-1]


def start(
    folder: Path,
    name: str,
    *arguments: str,
    extra: Mapping[str, str] | None = None,
    through: tuple[str, ...] = (),
) -> Started:
    """Start a command that trains the run `name` in `folder`, in a session of its own, `through` another
    command where one is given.
    """
    process = subprocess.Popen(
        [*through, *words(*arguments)],
        cwd=folder,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that a script started with `&` ignore Ctrl-C, and so would their command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return Started(run_of(folder, name), process)


def press_ctrl_c_twice(started: Started) -> None:
    """Ask a command to end at once. Two signals in one instant would be one."""
    os.killpg(started.process.pid, signal.SIGINT)
    time.sleep(0.3)
    os.killpg(started.process.pid, signal.SIGINT)


def start_run(folder: Path, name: str, *overrides: str, **options: Any) -> Started:
    """Start `orchestra run`; the options are those of `start`."""
    return start(folder, name, "run", f"run.name={name}", *overrides, **options)


def processes_of(run: RunDir) -> list[int]:
    """Return the ids of all processes with the run's directory on their command line."""
    return [process.pid for process in processes.with_words(str(run.path))]


def events_of(run: RunDir, name: str, attempt: int | None = None) -> list[Record]:
    """Return the events of one name, of one attempt or of all."""
    found = [event for event in read_events(run) if event["event"] == name]
    return [event for event in found if attempt is None or event["attempt"] == attempt]


def newest_manifest(place: Path) -> Manifest:
    """Return the manifest of the newest checkpoint in a folder."""
    storage = open_storage(place)
    return read_manifest(storage, committed_steps(storage)[-1])


def trained_digest(manifest: Manifest) -> str:
    """Return the digest of what training computes: parameters and the optimizer's state."""
    return manifest.digest_of(name for name in manifest.tensors if name.startswith(("model.", "optimizer.")))


def trained_rows(run: RunDir) -> list[tuple[object, ...]]:
    """Return what the steps computed, in full precision."""
    return [
        tuple(row[key] for key in ("step", "loss", "grad_norm", "lr", "tokens")) for row in read_metrics(run)
    ]


def assert_same_training(run: RunDir, other: RunDir) -> None:
    """Compare two runs bit for bit: every row, and the newest checkpoint's step, parameters and optimizer."""
    assert trained_rows(run) == trained_rows(other)
    ours, theirs = newest_manifest(run.checkpoints), newest_manifest(other.checkpoints)
    assert ours.step == theirs.step
    assert trained_digest(ours) == trained_digest(theirs)
