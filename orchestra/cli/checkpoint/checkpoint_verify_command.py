"""`orchestra checkpoint verify RUN [STEP]`: read every byte and compare, offline.

The run's events keep the verdict, for `checkpoint ls`; nothing else is written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from orchestra.cli.checkpoint.checkpoint_ls_command import (
    Place,
    add_run_arguments,
    chosen_checkpoints,
    explained,
    first_look,
    open_place,
)
from orchestra.cli.text import figures
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from orchestra.run.events import EventWriter
from orchestra.run.permissions import open_to_group

if TYPE_CHECKING:
    from checkpointing.catalog import StoredCheckpoint
    from checkpointing.verify import VerifyReport

_MAX_THREADS = 8
# A file that is cut off damages many tensors.
_MAX_SHOWN = 12
_EXPLAINED = """\
Checks the manifest, the size and checksum of every file, the checksum of every chunk and the digest of every
tensor, and names file and tensor of each damage. Exit code 1 where anything is damaged. What is off the run's
line (`checkpoint ls` names it) is left out.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_run_arguments(parser, step_help="default: all of them")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core, at most 8")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per checkpoint")
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Verify, oldest first, and return 0, or 1 when something is damaged."""
    from checkpointing.verify import verify

    threads = arguments.threads
    if threads is None:
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    if threads < 1:
        raise ConfigError(f"--threads {threads}: expected 1 or more")
    place = open_place(arguments.run, arguments.dir)
    # Another of the group's may verify next, and keeps the verdict in the same file.
    open_to_group(place.config.run.group)
    records = []
    with explained():
        for checkpoint in reversed(chosen_checkpoints(place, arguments.step)):
            began = time.monotonic()
            report = verify(place.storage_of(checkpoint), checkpoint, threads)
            seconds = time.monotonic() - began
            records.append(_record(report, seconds))
            _keep_verdict(place, checkpoint, report)
            if not arguments.json:
                _print(report, seconds)
    if arguments.json:
        print(json.dumps(records, indent=2))
    return EXIT_DONE if all(record["intact"] for record in records) else EXIT_FAILED


def _keep_verdict(place: Place, checkpoint: StoredCheckpoint, report: VerifyReport) -> None:
    manifest = first_look(place.storage_of(checkpoint), checkpoint).manifest
    # Somebody else's run may be read and not written.
    with contextlib.suppress(OSError):
        EventWriter(place.run, "verify", 0).write(
            "checkpoint_verified",
            step=report.step,
            created=None if manifest is None else manifest.created,
            intact=report.is_intact,
        )


def _record(report: VerifyReport, seconds: float) -> dict[str, Any]:
    return {
        "step": report.step,
        "intact": report.is_intact,
        "damages": [dataclasses.asdict(damage) for damage in report.damages],
        "num_tensors": report.num_tensors,
        "num_files": report.num_files,
        "num_bytes": report.num_bytes,
        "seconds": seconds,
    }


def _print(report: VerifyReport, seconds: float) -> None:
    if report.is_intact:
        size, speed = figures.quantity(float(report.num_bytes)), report.num_bytes / max(seconds, 1e-9)
        print(
            f"step {report.step}: intact, {size}B, {report.num_tensors:,} tensors in {report.num_files:,} "
            f"files, {seconds:.1f} s ({figures.quantity(speed)}B/s)",
            flush=True,
        )
        return
    print(f"step {report.step}: DAMAGED", flush=True)
    for damage in report.damages[:_MAX_SHOWN]:
        # Names of tensors and checksums stay whole, so that they can be copied.
        print("\n".join(figures.wrapped(str(damage), "  ", "    ", keeps_words=True)))
    if len(report.damages) > _MAX_SHOWN:
        print(f"  and {len(report.damages) - _MAX_SHOWN} more; --json lists all")
