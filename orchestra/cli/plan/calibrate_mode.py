"""`orchestra plan --calibrate RUN… [--output FILE.json]`: fits the planner's constants to runs of one device.

The profile that it writes is used with `cluster.hardware=FILE.json`, by `plan` and all that plans. It reads
run directories and changes none.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from orchestra.cli.plan.output import check_target
from orchestra.cli.text.resolve import resolve
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.plan.calibrate import calibrated, measured_run
from orchestra.plan.profiles import Profile, write_profile

NAME = "calibrate"
OPTIONS: tuple[str, ...] = ("output",)

EXPLAINED = """\
  orchestra plan --calibrate RUN RUN RUN --output cpu.json
  orchestra plan cluster.hardware=cpu.json cluster.gpus_per_node=4 model=debug

--calibrate fits what products, memory traffic, collectives, the host and a step's fixed work take, and what a
rank holds besides its tensors, to the runs' own config.yaml and metrics.jsonl (medians of later steps). It
prints how far the fit is off for each run and which constants no run decided; --output keeps it as a profile
for cluster.hardware. Two sizes of model on one rank and one run for each thing to predict are enough.
"""

_UNITS = {
    "memory_bytes_per_s": (1e9, "GB/s"),
    "link_bytes_per_s": (1e9, "GB/s"),
    "attention_flops": (1e9, "GFLOP/s"),
    "inside_latency_s": (1e-6, "µs"),
    "busy_share": (1.0, "of 1"),
    "busy_memory_share": (1.0, "of 1"),
    "host_layer_s": (1e-3, "ms"),
    "step_s": (1e-3, "ms"),
    "exposed_reduction": (1.0, "of 1"),
    "fixed_bytes": (1 << 20, "MiB"),
    "step_share": (1.0, "times"),
}
_MEANING = {
    "memory_bytes_per_s": "memory traffic",
    "link_bytes_per_s": "collectives",
    "attention_flops": "attention",
    "inside_latency_s": "latency of a collective",
    "busy_share": "a core's products beside the other cores",
    "busy_memory_share": "a core's memory traffic beside the others",
    "host_layer_s": "host's work for a layer",
    "step_s": "fixed work of a step",
    "exposed_reduction": "share of reductions that nothing hides",
    "fixed_bytes": "memory before training",
    "step_share": "memory of a step beside its tensors",
}
_MIB = 1 << 20
_WIDTH, _NAMES = 80, 26


def add_arguments(parser: ArgumentParser) -> None:
    """Add --calibrate; --output is the table's too."""
    parser.add_argument(
        "--calibrate", nargs="+", metavar="RUN", help="fit the constants to runs (names, paths, run.dir=runs)"
    )


def run(arguments: Namespace) -> int:
    """Print what was fitted, write the profile where asked, and return 0. Raises ConfigError before that."""
    wrong = list(arguments.overrides)
    wrong += [f"--framework {arguments.framework}"] if arguments.framework is not None else []
    if wrong:
        raise ConfigError(f"--calibrate takes everything from its runs; leave out {' '.join(wrong)}")
    if arguments.output is not None:
        if arguments.output.suffix != ".json":
            raise ConfigError(
                f"--output {arguments.output}: a profile's name ends in .json; give such a name"
            )
        check_target("--output", arguments.output)
    runs = [measured_run(resolve(text, Path("runs"), takes_dir=False)) for text in arguments.calibrate]
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    profile = calibrated(runs, len(os.sched_getaffinity(0)), memory)
    if arguments.json:
        print(json.dumps(asdict(profile), indent=1))
    else:
        print("\n".join(lines(profile)))
    if arguments.output is not None:
        write_profile(arguments.output, profile)
        print(f"written; use it with cluster.hardware={arguments.output}", file=sys.stderr)
    return EXIT_DONE


def lines(profile: Profile) -> list[str]:
    """Return the constants and the residuals as people read them."""
    where = f"{profile.device}, figures of one core" if profile.is_cpu else profile.device
    title = f"profile of {where}; {profile.source}"
    found = [*textwrap.wrap(title, _WIDTH, subsequent_indent="  ", break_on_hyphens=False), ""]
    found += [_constant(name, value, profile) for name, value in sorted(profile.constants.items())]
    heads = f"{'step s':>9}{'fitted':>9}{'off':>8}{'peak MiB':>11}{'fitted':>9}{'off':>8}"
    found += ["", f"{'run':<{_NAMES}}{heads}"]
    for it in profile.residuals:
        times, memory = it.predicted_step_s / it.step_s - 1, it.predicted_peak_bytes / it.peak_bytes - 1
        peaks = f"{it.peak_bytes / _MIB:>11,.0f}{it.predicted_peak_bytes / _MIB:>9,.0f}{memory:>+8.1%}"
        figures = f"{it.step_s:>9.3f}{it.predicted_step_s:>9.3f}{times:>+8.1%}{peaks}"
        # A longer name has a line of its own.
        found += (
            [it.run, " " * _NAMES + figures] if len(it.run) > _NAMES else [f"{it.run:<{_NAMES}}{figures}"]
        )
    return found


def _constant(name: str, value: float, profile: Profile) -> str:
    scale, unit = _UNITS.get(name, (1e9, "GFLOP/s"))
    precision = name.partition(".")[2]
    meaning = _MEANING.get(name, f"products in {precision}")
    if precision and profile.peak_flops.get(precision):
        meaning += f" ({value / profile.peak_flops[precision]:.0%} of peak)"
    note = "  (no run decides)" if name in profile.undecided else ""
    return f"  {meaning:<42}{value / scale:>10,.3g} {unit}{note}"
