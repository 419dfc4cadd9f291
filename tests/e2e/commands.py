"""`orchestra` as a user types it, in a process of its own, and what the machine and the run then show."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from checkpointing.catalog import committed_steps, read_manifest
from checkpointing.manifest import Manifest
from checkpointing.storage import open_storage
from launchers import processes
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0
# A model of 11,056 parameters on two ranks: what takes time is starting them.
TINY = (
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "train.seq_len=16",
    "train.global_batch_size=4",
    "optim.lr=1e-2",
    "wandb.mode=disabled",
    "cluster.device=cpu",
    "cluster.threads_per_rank=1",
    # Known, so that no attempt spends time measuring it.
    "cluster.peak_tflops=1",
)

# For a run that trains while a test does something else: ranks that train as fast as they can take the
# processors that the test, and others beside it, need. About twenty steps a second.
PACE = "recovery.inject=[{at_step: 1, rank: all, fault: slow, seconds: 0.04, attempt: all}]"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a command, which imports this very tree."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", **(extra or {})}


def words(*arguments: str) -> list[str]:
    """Return the command line of `orchestra ARGUMENTS`."""
    return [sys.executable, "-m", "orchestra", *arguments]


def orchestra(
    folder: Path, *arguments: str, extra: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end in `folder`."""
    return subprocess.run(
        words(*arguments), cwd=folder, env=environment(extra), capture_output=True, text=True, timeout=limit_s
    )


def start(
    folder: Path, *arguments: str, extra: Mapping[str, str] | None = None, through: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """Start a command in `folder`, in a session of its own, `through` another command where one is given."""
    return subprocess.Popen(
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


def eventually(claim: Callable[[], bool], limit_s: float) -> bool:
    """Wait until a claim holds; return whether it does."""
    deadline = time.monotonic() + limit_s
    while True:
        looked = time.monotonic()
        if claim():
            return True
        now = time.monotonic()
        if now > deadline:
            return False
        time.sleep(max(0.05, 2 * (now - looked)))


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
