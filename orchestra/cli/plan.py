"""`orchestra plan [overrides]`: memory, speed and cost of a configuration before it runs; `--table` for many.

Read-only but for `--output`. It starts nothing, asks no cluster and loads no torch.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from orchestra.plan.prediction import Prediction

_EXPLAINED = """\
  orchestra plan model=llama3_8b parallelism=zero3 train.seq_len=8192
  orchestra plan experiment=llama3_70b cluster.nodes=128 --json
  orchestra plan --table layouts.csv --output predicted.csv

Where no cluster is chosen it plans for nodes of 8 H100 on Slurm; cluster.nodes, cluster.gpus_per_node and
cluster.hardware say otherwise. The trainer's profile is orchestra's; --framework takes another's.

A table has one layout a row, in the columns num_hidden_layers hidden_size intermediate_size
num_attention_heads vocab_size tied seq_len num_gpus micro_batch_size grad_accum dp tp pp zero and, where it
likes, gpu gpu_memory_gib num_key_value_heads recompute precision cp sequence_parallel framework. Each row
comes back with pred_tokens_per_s_per_gpu, pred_mfu_pct (PaLM's convention), pred_peak_memory_gib and
pred_fits (1 or 0). For framework=nanotron, a table's usual one, the peak is the first pipeline stage's, as
its benchmark reports it; for all others the fullest stage's. pred_fits looks at all stages.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra plan` takes."""
    parser.usage = (
        "orchestra plan [overrides] [--framework NAME] [--json]\n"
        "       orchestra plan --table FILE [--output FILE]"
    )
    parser.add_argument("overrides", nargs="*", metavar="overrides", help="KEY=VALUE or GROUP=NAME")
    parser.add_argument("--framework", metavar="NAME", help="whose kernels and habits (default: orchestra)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")
    parser.add_argument("--table", type=Path, metavar="FILE", help="predict every row of a CSV table")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the table here, not to the screen")
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Print the prediction, or write the table's, and return 0. Raises ConfigError before it writes."""
    if arguments.table is not None:
        return _predict_table(arguments)
    if arguments.output is not None:
        raise ConfigError("--output belongs to --table; a single prediction is printed, --json for programs")
    return _predict_one(arguments)


def _predict_table(arguments: Namespace) -> int:
    from orchestra.plan.table import cases, read_table, with_predictions

    beside = [*arguments.overrides, *(["--json"] * arguments.json)]
    beside += [f"--framework {arguments.framework}"] if arguments.framework else []
    if beside:
        raise ConfigError(f"--table takes everything from its rows; leave out {' '.join(beside)}")
    source, target = arguments.table, arguments.output
    if target is not None and target.exists() and source.exists() and target.samefile(source):
        raise ConfigError(f"--output {target} is the table itself, which is never changed; give another file")
    table = read_table(source)
    text = with_predictions(table, cases(source, table))
    if target is None:
        print(text, end="")
    else:
        _write_whole(target, text)
        print(f"{len(table.rows)} rows predicted, written to {target}", file=sys.stderr)
    return EXIT_DONE


def _write_whole(target: Path, text: str) -> None:
    """Write beside the target and put it in place at once, so that nobody reads half a table."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _predict_one(arguments: Namespace) -> int:
    from orchestra.cli import plan_view
    from orchestra.config.compose import compose
    from orchestra.config.situation import Situation
    from orchestra.plan.assemble import case_of, for_planning
    from orchestra.plan.prediction import predict

    overrides = for_planning(arguments.overrides)
    config = compose(overrides, Situation("plan")).config
    prediction = predict(case_of(config, arguments.framework or "orchestra"))
    if arguments.json:
        print(json.dumps(plan_view.facts(config, prediction), indent=2))
        return EXIT_DONE
    for line in plan_view.lines(config, prediction):
        print(line)
    _note_what_was_assumed(arguments.overrides, prediction)
    return EXIT_DONE


def _note_what_was_assumed(typed: list[str], prediction: Prediction) -> None:
    if any(each.startswith(("cluster", "+cluster", "experiment=")) for each in typed):
        return
    case = prediction.case
    words = f"one node of {case.devices_per_node} {case.device.name}"
    print(f"note: no cluster chosen, {words} assumed; cluster.nodes and cluster.hardware", file=sys.stderr)
