"""Makes the run directories that `recorded/runs.tar.xz` holds: small real runs that ended in different ways.

They were written once, by the code of their day, and stay: runs of older versions must be told as before.
`grid` (a sweep, train.seed=1,2) and `submitted` (2 nodes, a rank fails at step 5) came out of
`orchestra submit` on a cluster of `slurm/devcluster up --nodes 2`; those below are made by `make`.
"""

from __future__ import annotations

import io
import lzma
import re
import socket
import sys
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path

from command_output import STORED_RUNS
from goldens import ROOT, run, stopped

TINY = (
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "train.seq_len=16",
    "train.global_batch_size=4",
    "train.log_every=2",
    "optim.lr=1e-2",
    "wandb.mode=disabled",
    "cluster.device=cpu",
    "cluster.threads_per_rank=1",
    "cluster.peak_tflops=1",
    "checkpoint.every_steps=5",
    "checkpoint.async_save=false",
    "recovery.straggler_every_steps=null",
)
_THREE_FAULTS = (
    "{at_step: 12, rank: 1, fault: sigkill}",
    "{attempt: 1, at_step: 22, rank: 0, fault: sigstop}",
    "{attempt: 2, at_step: 33, rank: 1, fault: exception}",
)
LOCAL: dict[str, tuple[str, ...]] = {
    "finished": ("train.steps=12", "checkpoint.every_steps=4", "checkpoint.keep_last=2", "data.ledger=true"),
    "restarted": (
        *("train.steps=40", "recovery.memory_copy_every_steps=1"),
        f"recovery.inject=[{','.join(_THREE_FAULTS)}]",
    ),
    "same-error": (
        "train.steps=20",
        "recovery.inject=[{attempt: all, at_step: 7, rank: 1, fault: exception}]",
    ),
    "given-up": (
        *("train.steps=20", "recovery.max_restarts=0"),
        "recovery.inject=[{at_step: 3, rank: 1, fault: oom}]",
    ),
    "diverged": (
        *("train.steps=20", "train.on_nonfinite=stop"),
        "recovery.inject=[{attempt: all, at_step: 8, rank: 0, fault: nan}]",
    ),
    "rolled-back": (
        *("train.steps=30", "train.log_every=1", "recovery.loss_spike.action=roll_back"),
        *("recovery.loss_spike.window=8", "recovery.roll_back.steps_before=6"),
        "recovery.roll_back.skip_steps=12",
        "recovery.inject=[{at_step: 18, rank: 1, fault: spike}]",
    ),
    # Asked to stop by a signal.
    "stopped": ("train.steps=1000000", "optim=adamw_constant", "optim.warmup_steps=5"),
}
_KEPT_ROWS = 20
_KEPT_LOG_BYTES = 20_000
# Long enough that nothing of a run counts as recent, on whatever day it is looked at.
_LONG_AGO_S = 90 * 86400
_LEFT_OUT = {"code", "wandb"}


def make(folder: Path) -> None:
    """Train the runs of LOCAL in `folder`, one after the other."""
    for name, overrides in LOCAL.items():
        words = ("run", f"run.name={name}", *TINY, *overrides)
        if name == "stopped":
            code, _ = stopped(folder, folder / "runs" / name / "metrics.jsonl", *words)
        else:
            code = run(folder, *words).returncode
        sys.stdout.write(f"{name}: exit code {code}\n")


def pack(folders: Iterable[Path]) -> None:
    """Write the runs in the folders, each with runs/ in it, to the archive: small, and of no machine."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for folder in folders:
            for file in sorted((folder / "runs").rglob("*")):
                inside = file.relative_to(folder)
                if file.is_file() and not _LEFT_OUT & set(inside.parts):
                    data = _trimmed(file, folder)
                    facts = tarfile.TarInfo(str(inside))
                    facts.size, facts.mtime = len(data), int(time.time() - _LONG_AGO_S)
                    archive.addfile(facts, io.BytesIO(data))
    STORED_RUNS.write_bytes(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def _trimmed(file: Path, folder: Path) -> bytes:
    """Return what is stored of a file: no tensors, few rows, no names of this machine, and times long ago."""
    if file.suffix == ".safetensors":
        return bytes(file.stat().st_size)
    # A manifest holds its own checksum.
    if file.name == "manifest.json":
        return file.read_bytes()
    text = file.read_text()
    if file.name == "metrics.jsonl":
        text = "".join(text.splitlines(keepends=True)[-_KEPT_ROWS:])
    if file.suffix in {".log", ".out"}:
        text = text[-_KEPT_LOG_BYTES:]
    names = ((str(folder), "/stored"), (str(ROOT), "/stored/tree"), (sys.prefix, "/stored/python"))
    for name, replacement in (*names, (f'"{socket.gethostname()}"', '"login"')):
        text = text.replace(name, replacement)
    return re.sub(r"\b1[789]\d{8}\.\d+", lambda found: repr(float(found[0]) - _LONG_AGO_S), text).encode()
