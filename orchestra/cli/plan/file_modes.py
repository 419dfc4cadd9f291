"""`orchestra plan --table FILE` and `--calibrate RUN…`: modes that take files and can write one, `--output`.

`--table` predicts every row of a CSV table of layouts; the table itself is never changed, and nothing is
written when a row is wrong. `--calibrate` fits the planner's constants to runs of one device: the profile
that it writes is used with `cluster.hardware=FILE.json`, by `plan` and all that plans.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from orchestra.cli.plan import Mode, check_target, print_result, refuse_configuration
from orchestra.cli.text import figures
from orchestra.cli.text.resolve import path_argument, resolve
from orchestra.config.home import run_folder
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.plan.calibrate import calibrated, measured_run
from orchestra.plan.profiles import SUFFIX, Profile, write_profile
from orchestra.plan.table import cases, read_table, taken_for, with_predictions
from orchestra.report.run_state import name_of
from orchestra.sizes.units import MIB

# So much of a trainer's name is shown.
_LONGEST_NAME = 32

_TABLE_EXPLAINED = """\
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


def _add_table(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--table", type=path_argument, metavar="FILE", help="predict every row of a CSV table"
    )
    parser.add_argument(
        "--output", type=path_argument, metavar="FILE", help="write the table, or the profile, to it"
    )


def _predict_table(arguments: Namespace) -> int:
    """Write or print the table with its predictions and return 0. Raises ConfigError before it writes."""
    refuse_configuration("--table", "its rows", arguments, *["--json"] * arguments.json)
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
        shown = name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"
        print(f"note: framework={shown} is predicted like {used} in some rows or all", file=sys.stderr)
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


TABLE = Mode("table", _TABLE_EXPLAINED, _add_table, _predict_table, ("output",))

_CALIBRATE_EXPLAINED = """\
  orchestra plan --calibrate RUN RUN RUN --output cpu.json
  orchestra plan cluster.hardware=cpu.json cluster.gpus_per_node=4 model=debug

--calibrate fits what products, memory traffic, collectives, the host and a step's fixed work take, and what a
rank holds besides its tensors, to the runs' own config.yaml and metrics.jsonl (medians of later steps). It
prints how far the fit is off for each run and which constants no run decided; --output keeps it as a profile
for cluster.hardware. Two sizes of model on one rank and one run for each thing to predict are enough.
"""
# What a constant is called, and how large its unit is.
_CONSTANTS = {
    "memory_bytes_per_s": ("memory traffic", 1e9, "GB/s"),
    "link_bytes_per_s": ("collectives", 1e9, "GB/s"),
    "attention_flops": ("attention", 1e9, "GFLOP/s"),
    "inside_latency_s": ("latency of a collective", 1e-6, "µs"),
    "busy_share": ("a core's products beside the other cores", 1.0, "of 1"),
    "busy_memory_share": ("a core's memory traffic beside the others", 1.0, "of 1"),
    "host_layer_s": ("host's work for a layer", 1e-3, "ms"),
    "step_s": ("fixed work of a step", 1e-3, "ms"),
    "exposed_reduction": ("share of reductions that nothing hides", 1.0, "of 1"),
    "fixed_bytes": ("memory before training", MIB, "MiB"),
    "step_share": ("memory of a step beside its tensors", 1.0, "times"),
}
_NAME_WIDTH = 26


def _add_calibrate(parser: ArgumentParser) -> None:
    """Add --calibrate; --output is the table's too."""
    parser.add_argument(
        "--calibrate", nargs="+", metavar="RUN", help="fit the constants to runs (names, paths, run.dir=runs)"
    )


def _calibrate(arguments: Namespace) -> int:
    """Print what was fitted, write the profile where asked, and return 0. Raises ConfigError before that."""
    refuse_configuration("--calibrate", "its runs", arguments)
    target = arguments.output
    if target is not None:
        if target.suffix != SUFFIX:
            raise ConfigError(f"--output {target}: a profile's name ends in {SUFFIX}; give such a name")
        check_target("--output", target)
    chosen = [resolve(text, run_folder(), takes_dir=False) for text in arguments.calibrate]
    runs = [measured_run(run, name_of(run)) for run in chosen]
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    profile = calibrated(runs, len(os.sched_getaffinity(0)), memory)
    print_result(arguments, lambda: asdict(profile), lambda: profile_lines(profile))
    if target is not None:
        write_profile(target, profile)
        print(f"written; use it with cluster.hardware={target}", file=sys.stderr)
    return EXIT_DONE


CALIBRATE = Mode("calibrate", _CALIBRATE_EXPLAINED, _add_calibrate, _calibrate, ("output",))


def profile_lines(profile: Profile) -> list[str]:
    """Return the constants and the residuals as people read them."""
    where = f"{profile.device}, figures of one core" if profile.is_cpu else profile.device
    lines = [*figures.wrapped(f"profile of {where}; {profile.source}", indent="  "), ""]
    lines += [_constant(name, value, profile) for name, value in sorted(profile.constants.items())]
    heads = f"{'step s':>9}{'fitted':>9}{'off':>8}{'peak MiB':>11}{'fitted':>9}{'off':>8}"
    lines += ["", f"{'run':<{_NAME_WIDTH}}{heads}"]
    for run in profile.residuals:
        time_off = run.predicted_step_s / run.step_s - 1
        peak_off = run.predicted_peak_bytes / run.peak_bytes - 1
        peaks = f"{run.peak_bytes / MIB:>11,.0f}{run.predicted_peak_bytes / MIB:>9,.0f}{peak_off:>+8.1%}"
        cells = f"{run.step_s:>9.3f}{run.predicted_step_s:>9.3f}{time_off:>+8.1%}{peaks}"
        if len(run.run) > _NAME_WIDTH:
            lines += [run.run, " " * _NAME_WIDTH + cells]
        else:
            lines.append(f"{run.run:<{_NAME_WIDTH}}{cells}")
    return lines


def _constant(name: str, value: float, profile: Profile) -> str:
    precision = name.partition(".")[2]
    meaning, scale, unit = _CONSTANTS.get(name, (f"products in {precision}", 1e9, "GFLOP/s"))
    if precision and profile.peak_flops.get(precision):
        meaning += f" ({value / profile.peak_flops[precision]:.0%} of peak)"
    note = "  (no run decides)" if name in profile.undecided else ""
    return f"  {meaning:<42}{value / scale:>10,.3g} {unit}{note}"
