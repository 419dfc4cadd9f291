"""`orchestra plan --scan RUN…`: what the layouts of real runs reached, beside the prediction, and a map.

It reads the runs' own files and changes nothing.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cli.planning.files import named
from orchestra.errors import EXIT_DONE, ConfigError

if TYPE_CHECKING:
    from orchestra.report.layouts import Run
    from orchestra.rundir import RunDir

NAME = "scan"
OPTIONS: tuple[str, ...] = ("dir",)

EXPLAINED = """\
--scan takes runs and sweeps, by name or path, and shows for each model, batch and number of devices what each
layout reached: tokens/s per device, MFU, peak memory, with the predictions beside them where the device is
known; then the map of the best ones. The first three logged rows do not count.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add --scan and what belongs to it."""
    parser.add_argument("--scan", nargs="+", metavar="RUN", help="compare the layouts of runs and sweeps")
    parser.add_argument("--dir", type=named, metavar="DIR", help="where the runs lie (default: runs)")


def run(arguments: Namespace) -> int:
    """Print the comparison and return 0. Raises ConfigError when a RUN means none, or no run has a layout."""
    from orchestra.cli.planning import scan_view
    from orchestra.report.layouts import by_place

    if arguments.overrides or arguments.framework:
        wrong = [*arguments.overrides, *([f"--framework {arguments.framework}"] * bool(arguments.framework))]
        raise ConfigError(f"--scan takes everything from the runs; leave out {' '.join(wrong)}")
    runs, problems = _read(_runs(arguments.scan, arguments.dir or Path("runs")))
    if not runs:
        raise ConfigError(problems or ["--scan: there is no run in what was named"])
    places = by_place(runs)
    if arguments.json:
        print(json.dumps(scan_view.facts(places), indent=2))
    else:
        scan_view.show(places)
    for problem in problems:
        print(f"note: left out: {problem}", file=sys.stderr)
    return EXIT_DONE


def _runs(texts: list[str], parent: Path) -> list[RunDir]:
    """Return the runs that are meant, of a sweep all members; each once."""
    from orchestra.cli.resolve import resolve_target
    from orchestra.report.sweeps import runs_of
    from orchestra.sweepdir import SweepDir, read_sweep

    found: dict[Path, RunDir] = {}
    for text in texts:
        target = resolve_target(text, parent)
        if isinstance(target, SweepDir):
            members = [run for _, run in runs_of(target, read_sweep(target))]
        else:
            members = [target]
        found.update({run.path.resolve(): run for run in members})
    return list(found.values())


def _read(runs: list[RunDir]) -> tuple[list[Run], list[str]]:
    from orchestra.report.layouts import read_run

    read, problems, now = [], [], time.time()
    for each in runs:
        try:
            read.append(read_run(each, now))
        except ConfigError as error:
            problems += error.problems
    return read, problems
