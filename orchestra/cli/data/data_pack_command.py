"""`orchestra data pack`: text files in, one token file out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from orchestra.errors import EXIT_DONE

if TYPE_CHECKING:
    from orchestra.data.pack import PackPlan, PackResult

_EXPLAINED = """\
Reads .txt, .md and .rst (one document), .jsonl and .ndjson (one document a line), each also as .gz or
.zst, and .parquet (one document a row). Each document is followed by the separator: 256 for bytes, else
the tokenizer's end of text.
Writes PREFIX.bin and PREFIX.json for `data=tokens data.path=PREFIX`.

  orchestra data pack 'corpus/**/*.jsonl.zst' --output data/corpus \\
    --tokenizer tokenizer.json
  orchestra data pack book.txt --output book
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = _EXPLAINED
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files, folders, patterns or URLs")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="writes PREFIX.bin and PREFIX.json")
    parser.add_argument(
        "--tokenizer", default="bytes", metavar="bytes|PATH", help="bytes (default), or a tokenizer.json"
    )
    parser.add_argument("--separator", metavar="TOKEN", help="name of the token that ends a document")
    parser.add_argument("--field", default="text", help="field or column that holds the text (default: text)")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="processes that encode (default: all cores; for bytes 1)"
    )
    parser.add_argument("--dry-run", action="store_true", help="list inputs and output; write nothing")
    parser.add_argument("--json", action="store_true", help="print the result (or the plan) as JSON")


def run(arguments: Namespace) -> int:
    """Pack, or show what would be packed."""
    from orchestra.data.pack import PackRequest, plan_pack

    workers = arguments.workers if arguments.workers is not None else _default_workers(arguments.tokenizer)
    request = PackRequest(
        inputs=arguments.inputs,
        output=arguments.output,
        tokenizer=arguments.tokenizer,
        separator=arguments.separator,
        field=arguments.field,
        num_workers=workers,
    )
    plan = plan_pack(request)
    if arguments.dry_run:
        _print_plan(plan, as_json=arguments.json)
        return EXIT_DONE
    with _leaving_no_draft():
        result = _packed(plan)
    _print_result(result, as_json=arguments.json)
    return EXIT_DONE


@contextlib.contextmanager
def _leaving_no_draft() -> Iterator[None]:
    """Let a time limit or a closed terminal end a pack as Ctrl-C does: its draft is as large as its tokens.
    What is ignored (nohup) stays so.
    """

    def leave(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    taken = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _default_workers(tokenizer: str) -> int:
    """Bytes cost more to hand over than to encode: 2 processes took 1.5 to 4 times as long as 1."""
    from orchestra.data.tokenizer import BYTES

    return 1 if tokenizer == BYTES else len(os.sched_getaffinity(0))


def _packed(plan: PackPlan) -> PackResult:
    """Pack with a progress bar, on stderr and on a terminal only."""
    from orchestra.data.pack import pack

    if not sys.stderr.isatty():
        return pack(plan)
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("packing"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[num_tokens]:,} tokens"),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=plan.num_bytes, num_tokens=0)

        def show(input_bytes: int, num_tokens: int) -> None:
            bar.update(task, completed=input_bytes, num_tokens=num_tokens)

        return pack(plan, show)


def _print_plan(plan: PackPlan, *, as_json: bool) -> None:
    if as_json:
        record = {
            "inputs": [dataclasses.asdict(file) for file in plan.files],
            "num_bytes": plan.num_bytes,
            "tokenizer": plan.tokenizer.name,
            "vocab_size": plan.tokenizer.vocab_size,
            "separator_id": plan.tokenizer.separator_id,
            "num_workers": plan.request.num_workers,
            "output": [f"{plan.prefix}.bin", f"{plan.prefix}.json"],
        }
        print(json.dumps(record))
        return
    for file in plan.files:
        print(f"{file.num_bytes:>16,}  {file.url}")
    print(f"{plan.num_bytes:>16,}  bytes in {len(plan.files)} files")
    print(
        f"tokenizer {plan.tokenizer.name}: {plan.tokenizer.vocab_size:,} tokens, separator "
        f"{plan.tokenizer.separator_id}; {plan.request.num_workers} workers"
    )
    print(f"would write {plan.prefix}.bin and {plan.prefix}.json")


def _print_result(result: PackResult, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(result)))
        return
    megabytes = result.text_bytes / 1e6
    print(
        f"{result.prefix}.bin: tokens {result.num_tokens:,} ({result.dtype}, vocabulary "
        f"{result.vocab_size:,}), documents "
        f"{result.num_documents:,}, files {result.num_files:,}, text {megabytes:,.1f} MB in "
        f"{result.seconds:.1f} s ({megabytes / result.seconds:,.1f} MB/s)"
    )
    from orchestra.huggingface.folder import shown

    # As the shell, and then Hydra, reads it back.
    chosen = shlex.quote(f"data.path={shown(result.prefix)}")
    print(f"train on it: orchestra run data=tokens {chosen}")
