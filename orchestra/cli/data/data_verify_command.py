"""`orchestra data verify PREFIX…`: read every byte of token files, and compare their checksums."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from orchestra.cli.text import figures
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_MAX_THREADS = 8
_MAX_SHOWN = 12
_EXPLAINED = """\
Reads PREFIX.bin whole, here or at a URL, and names every block that is not as it was packed, with its offset.
Ranks check each block too, when they first read of it. Exit code 1 where anything is damaged, 2 where
nothing lies at one of them: then none is read.

  orchestra data verify packed/text s3://bucket/corpus
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = _EXPLAINED
    parser.add_argument("files", nargs="+", metavar="PREFIX", help="what `data pack` wrote, as in data.path")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core, at most 8")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per file")


def run(arguments: Namespace) -> int:
    """Verify the files one after the other; return 0, or 1 when something is damaged.

    Raises ConfigError where nothing lies at one of them, DataError where a file has no index or the other way
    round, or its index is none.
    """
    from orchestra.data.block_checks import verified
    from orchestra.data.token_files import is_missing, token_file_prefix

    threads = arguments.threads
    if threads is None:
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    if threads < 1:
        raise ConfigError(f"--threads {threads}: expected 1 or more")
    prefixes, records = [token_file_prefix(path) for path in arguments.files], []
    if missing := [prefix for prefix in prefixes if is_missing(prefix)]:
        advice = "give the PREFIX of what `orchestra data pack` wrote"
        raise ConfigError([f"{prefix}.bin: no such file, nor its index; {advice}" for prefix in missing])
    for prefix in prefixes:
        began = time.monotonic()
        with _progress(prefix) as on_block:
            index, damages = verified(prefix, threads, on_block)
        record = {
            "prefix": prefix,
            "intact": not damages,
            "damages": [dataclasses.asdict(damage) for damage in damages],
            "num_blocks": len(index.block_crc32),
            "num_bytes": index.num_bytes,
            "seconds": time.monotonic() - began,
        }
        records.append(record)
        if not arguments.json:
            _print(record, [str(damage) for damage in damages])
    if arguments.json:
        print(json.dumps(records, indent=2))
    return EXIT_DONE if all(record["intact"] for record in records) else EXIT_FAILED


@contextmanager
def _progress(prefix: str) -> Iterator[Callable[[int], None]]:
    """Show how much was read, on stderr and on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn(prefix), progress.DownloadColumn(), progress.TransferSpeedColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def _print(record: dict[str, Any], damages: list[str]) -> None:
    name = f"{record['prefix']}.bin"
    if not damages:
        speed = record["num_bytes"] / max(record["seconds"], 1e-9)
        print(
            f"{name}: intact, {figures.quantity(float(record['num_bytes']))}B in "
            f"{figures.number_of(record['num_blocks'], 'block')}, {record['seconds']:.1f} s "
            f"({figures.quantity(speed)}B/s)",
            flush=True,
        )
        return
    print(
        f"{name}: DAMAGED, {len(damages)} of {figures.number_of(record['num_blocks'], 'block')}", flush=True
    )
    for damage in damages[:_MAX_SHOWN]:
        print("\n".join(figures.wrapped(damage, "  ", "    ", keeps_words=True)))
    if len(damages) > _MAX_SHOWN:
        print(f"  and {len(damages) - _MAX_SHOWN} more; --json lists all")
