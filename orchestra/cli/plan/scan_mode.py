"""`orchestra plan --scan RUN…`: what the layouts of real runs reached, beside the prediction, and a map.

Prints a table of layouts for each model, batch and number of devices, then the map of the best ones. Colours
of the map go by MFU; without colours the numbers say the same. Only files of the runs are read.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.cli.plan import (
    Mode,
    layout_words,
    refuse_configuration,
)
from orchestra.cli.text import figures
from orchestra.cli.text.resolve import path_argument, resolve_target
from orchestra.config.home import run_folder
from orchestra.errors import EXIT_DONE, ConfigError
from orchestra.report.layouts import ScannedRun, Workload, best_of, by_workload, read_run
from orchestra.report.run_state import runs_of
from orchestra.run.paths import RunDir, SweepDir, read_sweep

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

# What a refused prediction advises are keys of a configuration; --scan takes none.
_WHERE = "keys above count where a run is started: --scan reads each run's own config.yaml"
_HEADER = (
    *("dp", "tp", "pp", "cp", "zero", "batch", "recompute"),
    *("tok/s", "MFU", "GiB", "pred.", "error", "pred. GiB"),
)
# Left out where they would say the same in every row, or where the terminal is too narrow.
_USUAL = {"tp": "1", "pp": "1", "cp": "1", "zero": "0", "recompute": "none"}
_DROPPED = ("pred. GiB", "error", "recompute")
# From slow to fast: dark blue, blue, teal, green, yellow (as in the perceptual map viridis).
_COLOURS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")
_DARK = 3


_EXPLAINED = """\
--scan takes runs and sweeps, by name or path, and shows for each model, batch and number of devices what each
layout reached: tokens/s per device, MFU, peak memory, with the predictions beside them where the device is
known; then the map of the best ones. The first three logged rows do not count.
"""


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--scan", nargs="+", metavar="RUN", help="compare the layouts of runs and sweeps")
    parser.add_argument("--dir", type=path_argument, metavar="DIR", help="where the runs lie (default: runs)")


def _run(arguments: Namespace) -> int:
    """Print the comparison and return 0. Raises ConfigError when a RUN means none, or no run has a layout."""
    refuse_configuration("--scan", "the runs", arguments)
    runs, problems = _read(_runs(arguments.scan, arguments.dir or run_folder()))
    if not runs:
        raise ConfigError(problems or ["--scan: there is no run in what was named"])
    workloads = by_workload(runs)
    if arguments.json:
        print(json.dumps(_facts(workloads), indent=2))
    else:
        _show(workloads)
    for problem in problems:
        print(f"note: left out: {problem}", file=sys.stderr)
    return EXIT_DONE


MODE = Mode("scan", _EXPLAINED, _add_arguments, _run, ("dir",))


def _runs(texts: list[str], parent: Path) -> list[RunDir]:
    """Return the runs that are meant, of a sweep all members; each once."""
    runs: dict[Path, RunDir] = {}
    for text in texts:
        target = resolve_target(text, parent)
        if isinstance(target, SweepDir):
            members = [run for _, run in runs_of(target, read_sweep(target))]
        else:
            members = [target]
        runs.update({run.path.resolve(): run for run in members})
    return list(runs.values())


def _read(runs: list[RunDir]) -> tuple[list[ScannedRun], list[str]]:
    read, problems, now = [], [], time.time()
    for run in runs:
        try:
            read.append(read_run(run, now))
        except ConfigError as error:
            problems += error.problems
    return read, problems


def _show(workloads: Mapping[Workload, Sequence[ScannedRun]]) -> None:
    """Print the tables and the map to standard output."""
    from rich.console import Console

    for workload, runs in workloads.items():
        print("\n".join(_workload(workload, runs)))
        print()
    best = best_of(workloads)
    if best:
        is_terminal = sys.stdout.isatty()
        console = Console(width=None if is_terminal else figures.WIDTH, highlight=False)
        console.print("the best of each: tokens/s per device, MFU, layout")
        console.print(_map(best))


def _workload(workload: Workload, runs: Sequence[ScannedRun]) -> list[str]:
    rows = [_row(run) for run in runs if run.problem is None]
    same = [
        title for title, usual in _USUAL.items() if all(row[_HEADER.index(title)] == usual for row in rows)
    ]
    if all(run.prediction is None for run in runs):
        same += ["pred.", "error", "pred. GiB"]
    if all(run.mfu is None for run in runs):
        same.append("MFU")
    header = figures.without(_HEADER, _HEADER, same)
    kept = [figures.without(row, _HEADER, same) for row in rows]
    batch = f"{workload.global_batch_size:,} × {workload.seq_len:,} tokens"
    lines = [f"{workload.model}, {workload.precision}, {batch} on {_devices(workload.num_devices)}"]
    lines += figures.fitting_table(header, kept, figures.WIDTH, _DROPPED).splitlines() if rows else []
    notes = [f"{run.name}: {_words(run)}: {run.problem}" for run in runs if run.problem is not None]
    unpredicted = {run.unpredicted for run in runs if run.unpredicted is not None}
    notes += [f"not predicted: {reason}" for reason in sorted(unpredicted)]
    notes += [_WHERE] * bool(unpredicted)
    return [*lines, *(line for note in notes for line in figures.wrapped(note, indent="  "))]


def _devices(number: int) -> str:
    return f"{number:,} device{'s' if number > 1 else ''}"


def _row(run: ScannedRun) -> tuple[str, ...]:
    mesh, setting, prediction = run.layout.mesh, run.layout, run.prediction
    speed, peak = run.tokens_per_s_per_device, run.peak_memory_bytes
    error = prediction.tokens_per_s_per_device / speed - 1 if prediction is not None and speed else None
    return (
        str(mesh.dp),
        f"{mesh.tp}+sp" if setting.sequence_parallel and mesh.tp > 1 else str(mesh.tp),
        str(mesh.pp),
        str(mesh.cp),
        str(setting.zero),
        f"{setting.micro_batch_size}×{setting.accumulation}",
        setting.recompute,
        figures.quantity(speed),
        figures.percent(run.mfu),
        "-" if peak is None else layout_words.gib(peak),
        "-" if prediction is None else figures.quantity(prediction.tokens_per_s_per_device),
        "-" if error is None else f"{100 * error:+.0f}%",
        "-" if prediction is None else layout_words.gib(prediction.peak.total),
    )


def _words(run: ScannedRun) -> str:
    layout = run.layout
    words = layout_words.degrees(layout.mesh)
    words += [f"zero {layout.zero}"] if layout.zero else []
    return " ".join([*words, f"{layout.micro_batch_size}×{layout.accumulation}"])


def _map(best: Mapping[Workload, ScannedRun]) -> Table:
    """Return the map: a row for each model and batch, a column for each number of devices."""
    from rich.table import Table
    from rich.text import Text

    devices, shares = sorted({workload.num_devices for workload in best}), _shares(best)
    table = Table(box=None)
    table.add_column("")
    for number in devices:
        table.add_column(_devices(number), justify="left")
    for work in dict.fromkeys(workload.work for workload in best):
        at = {workload.num_devices: workload for workload in best if workload.work == work}
        cells = [
            _coloured(best[at[number]], shares[at[number]]) if number in at else Text("")
            for number in devices
        ]
        model, seq_len, size, precision = work
        table.add_row(Text(f"{model}\n{precision}\n{size:,}×{seq_len:,}"), *cells)
    return table


def _coloured(run: ScannedRun, share: float) -> Text:
    """Return a cell of the map; `share` of the best decides its colour."""
    from rich.text import Text

    level = round(share * (len(_COLOURS) - 1))
    style = f"{'white' if level < _DARK else 'black'} on {_COLOURS[level]}"
    mfu = "" if run.mfu is None else f"  MFU {figures.percent(run.mfu)}"
    return Text(f"{figures.quantity(run.tokens_per_s_per_device)}{mfu}\n{_words(run)}", style=style)


def _shares(best: Mapping[Workload, ScannedRun]) -> dict[Workload, float]:
    """Return what colours go by: MFU beside the best of the map; where one has none, speed in its row."""
    highest = max((run.mfu or 0.0 for run in best.values()), default=0.0)
    if highest and all(run.mfu is not None for run in best.values()):
        return {workload: (run.mfu or 0.0) / highest for workload, run in best.items()}
    fastest: dict[object, float] = {}
    for workload, run in best.items():
        fastest[workload.work] = max(fastest.get(workload.work, 0.0), run.tokens_per_s_per_device or 0.0)
    return {
        workload: (run.tokens_per_s_per_device or 0.0) / (fastest[workload.work] or 1.0)
        for workload, run in best.items()
    }


def _facts(workloads: Mapping[Workload, Sequence[ScannedRun]]) -> dict[str, Any]:
    """Return the same for programs: bytes, shares of 1."""
    best = best_of(workloads)
    return {
        "places": [
            {
                **asdict(workload),
                "best": best[workload].name if workload in best else None,
                "runs": [_run_facts(run) for run in runs],
            }
            for workload, runs in workloads.items()
        ]
    }


def _run_facts(run: ScannedRun) -> dict[str, Any]:
    prediction, layout = run.prediction, asdict(run.layout)
    return {
        "name": run.name,
        **layout.pop("mesh"),
        **layout,
        "tokens_per_s_per_device": run.tokens_per_s_per_device,
        "mfu": run.mfu,
        "peak_memory_bytes": run.peak_memory_bytes,
        "predicted_tokens_per_s_per_device": prediction and prediction.tokens_per_s_per_device,
        "predicted_mfu": prediction and prediction.mfu,
        "predicted_peak_memory_bytes": prediction and round(prediction.peak.total),
        "predicted_fits": prediction and prediction.fits,
        "problem": run.problem,
        "unpredicted": run.unpredicted,
    }
