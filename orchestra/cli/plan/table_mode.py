"""`orchestra plan --table FILE [--output FILE]`: predicts every row of a CSV table of layouts.

The table itself is never changed, and nothing is written when a row is wrong.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from orchestra.cli.plan.output import check_target, named
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.plan.table import cases, read_table, taken_for, with_predictions

NAME = "table"
# So much of a trainer's name is shown.
_LONGEST = 32
OPTIONS: tuple[str, ...] = ("output",)

EXPLAINED = """\
A table has one layout a row, in the columns num_hidden_layers hidden_size intermediate_size
num_attention_heads vocab_size tied seq_len num_gpus micro_batch_size grad_accum dp tp pp zero and, where it
likes, gpu gpu_memory_gib num_key_value_heads head_dim recompute precision cp sequence_parallel framework, and
for mixtures of experts num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
ep. Each row comes back with pred_tokens_per_s_per_gpu, pred_mfu_pct (PaLM's convention),
pred_peak_memory_gib and pred_fits (1 or 0). For framework=nanotron, a table's usual one, the peak is the
first pipeline stage's, as its benchmark reports it; for all others the fullest stage's. pred_fits looks at
all stages. A trainer without a profile is predicted like torchtitan, and Megatron-LM on A100 and MI250 with
sequences of up to 2,048 tokens as it was before flash attention (megatron-core: as it is now); a note says
so.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add --table and what belongs to it."""
    parser.add_argument("--table", type=named, metavar="FILE", help="predict every row of a CSV table")
    parser.add_argument("--output", type=named, metavar="FILE", help="write the table, or the profile, to it")


def run(arguments: Namespace) -> int:
    """Write or print the table with its predictions and return 0. Raises ConfigError before it writes."""
    beside = [*arguments.overrides, *(["--json"] * arguments.json)]
    beside += [f"--framework {arguments.framework}"] if arguments.framework is not None else []
    if beside:
        raise ConfigError(f"--table takes everything from its rows; leave out {' '.join(beside)}")
    source, target = arguments.table, arguments.output
    if target is not None and target.exists() and source.exists() and target.samefile(source):
        raise ConfigError(f"--output {target} is the table itself, which is never changed; give another file")
    if target is not None:
        check_target("--output", target)
    try:
        table = read_table(source)
    except OSError as error:
        raise ConfigError(f"--table {source}: {error.strerror}; give a table in CSV") from error
    all_cases = cases(source, table)
    text = with_predictions(table, all_cases)
    for name, used in taken_for(table, all_cases).items():
        print(f"note: framework={_told(name)} is predicted like {used} in some rows or all", file=sys.stderr)
    if target is None:
        print(text, end="")
    else:
        _write_whole(target, text)
        print(f"{len(table.rows)} rows predicted, written to {target}", file=sys.stderr)
    return EXIT_DONE


def _told(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…"


def _write_whole(target: Path, text: str) -> None:
    """Write beside the target and put it in place at once, so that nobody reads half a table."""
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
