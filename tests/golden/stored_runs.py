"""Packs the run directories that `recorded/runs.tar.xz` holds: small real runs that ended in different ways.

They were written once, by the code of their day, and stay: runs of older versions must be told as before. How
each was made its run.json says: `grid` and `submitted` by `orchestra submit` on a cluster of
`slurm/devcluster up --nodes 2`, the others by `orchestra run`, of which `stopped` was asked to by a signal.
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
from goldens import ROOT

_KEPT_ROWS = 20
_KEPT_LOG_BYTES = 20_000
# Long enough that nothing of a run counts as recent, on whatever day it is looked at.
_LONG_AGO_S = 90 * 86400
_LEFT_OUT = {"code", "wandb"}


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
