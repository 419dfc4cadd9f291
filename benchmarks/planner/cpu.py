"""Predicted against measured on this machine's own CPU: makes runs, calibrates on some, predicts others.

    python benchmarks/planner/cpu.py [--dir FOLDER] [--only NAME ...] [--rounds 3] [--again]

Each run is `orchestra run` on 1, 2 or 4 ranks with models of 5 to 30 million parameters, once a round, since
single runs stray by 15 %. `orchestra plan --calibrate` fits a profile on the runs marked `fit`; the others
are held out. Step times are medians over the later steps and then over rounds, peaks the resident memory of
rank 0. Runs that are there already are kept (`--again` makes them anew). On a quiet machine a round takes
some six minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestra.plan.profiles import Profile

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

STEPS = 8
SMALL = "model.hidden_size=256 model.intermediate_size=704 model.num_hidden_layers=4 model.vocab_size=4096"
MIDDLE = "model.hidden_size=512 model.intermediate_size=1408 model.num_hidden_layers=6 model.vocab_size=8192"
LARGE = "model.hidden_size=640 model.intermediate_size=1728 model.num_hidden_layers=4 model.vocab_size=8192"
SEQUENCES = "train.seq_len=256 train.global_batch_size=4"


@dataclass(frozen=True)
class Run:
    name: str
    is_fit: bool
    ranks: int
    overrides: str


RUNS = (
    Run("small-1", True, 1, f"{SMALL} {SEQUENCES} cluster.threads_per_rank=1"),
    Run("middle-1", True, 1, f"{MIDDLE} {SEQUENCES} cluster.threads_per_rank=1"),
    Run("middle-2", True, 2, f"{MIDDLE} {SEQUENCES}"),
    Run("small-2-zero3", True, 2, f"{SMALL} {SEQUENCES} parallelism=zero3"),
    Run("small-2-tp2", True, 2, f"{SMALL} {SEQUENCES} parallelism=tp2"),
    Run("small-4", True, 4, f"{SMALL} {SEQUENCES}"),
    Run("large-1", False, 1, f"{LARGE} {SEQUENCES} train.micro_batch_size=2 cluster.threads_per_rank=1"),
    Run("middle-1-full", False, 1, f"{MIDDLE} {SEQUENCES} train.recompute=full"),
    Run("middle-1-long", False, 1, f"{MIDDLE} train.seq_len=512 train.global_batch_size=2"),
    Run("middle-1-threads", True, 1, f"{MIDDLE} {SEQUENCES}"),
    Run("large-2", False, 2, f"{LARGE} {SEQUENCES}"),
    Run("middle-2-zero1", False, 2, f"{MIDDLE} {SEQUENCES} parallelism=zero1"),
    Run("middle-2-zero2", False, 2, f"{MIDDLE} {SEQUENCES} parallelism=zero2 train.micro_batch_size=1"),
    Run("middle-2-zero3", False, 2, f"{MIDDLE} {SEQUENCES} parallelism=zero3"),
    Run("middle-2-tp2", False, 2, f"{MIDDLE} {SEQUENCES} parallelism=tp2"),
    Run("middle-4", False, 4, f"{MIDDLE} {SEQUENCES}"),
    Run("middle-4-zero1", False, 4, f"{MIDDLE} {SEQUENCES} parallelism=zero1"),
    Run("middle-4-zero3", False, 4, f"{MIDDLE} {SEQUENCES} parallelism=zero3"),
    Run("small-4-tp2-zero1", False, 4, f"{SMALL} {SEQUENCES} parallelism=tp2 parallelism.zero=1"),
)


def make(run: Run, folder: Path, steps: int = STEPS) -> float:
    """Train a run in the foreground, as its user would; return the seconds it took."""
    command = [sys.executable, "-m", "orchestra", "run", f"run.name={run.name}", f"run.dir={folder}"]
    command += [f"cluster.gpus_per_node={run.ranks}", "cluster.device=cpu", f"train.steps={steps}"]
    command += ["checkpoint.every_steps=null", "wandb.mode=disabled", *run.overrides.split()]
    began = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(
            f"{run.name}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return time.monotonic() - began


def calibrated(runs: list[Path], profile: Path) -> None:
    command = [sys.executable, "-m", "orchestra", "plan", "--calibrate", *map(str, runs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--output", str(profile)], check=True, env=environment)


def table(chosen: list[Run], folders: list[Path], profile: Profile) -> None:
    """Print each run's medians over the rounds beside what a profile predicts."""
    from orchestra.plan.calibrate import measured_run, prediction_of
    from orchestra.run.paths import RunDir

    print(f"{'run':<20}{'':<6}{'step s':>9}{'predicted':>11}{'off':>8}{'MiB':>9}{'predicted':>11}{'off':>8}")
    off: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for run in chosen:
        rounds = [measured_run(RunDir(folder / run.name)) for folder in folders]
        found = prediction_of(rounds[0], profile)
        step_s = statistics.median(it.step_s for it in rounds)
        peak_bytes = statistics.median(it.peak_bytes for it in rounds)
        times, memory = found.time.total / step_s - 1, found.peak.total / peak_bytes - 1
        off[run.is_fit].append((abs(times), abs(memory)))
        kind, mib = "fit" if run.is_fit else "new", 2**20
        speed = f"{step_s:>9.3f}{found.time.total:>11.3f}{times:>+8.1%}"
        peaks = f"{peak_bytes / mib:>9.0f}{found.peak.total / mib:>11.0f}{memory:>+8.1%}"
        print(f"{run.name:<20}{kind:<6}{speed}{peaks}")
    for is_fit, errors in off.items():
        if errors:
            print(summary("fitted" if is_fit else "held out", errors))


def summary(name: str, errors: list[tuple[float, float]]) -> str:
    """Return one line on the errors of step times and peaks."""
    times, peaks = [it[0] for it in errors], [it[1] for it in errors]
    words = [
        f"{statistics.median(found):.1%} in the median, {max(found):.1%} at worst" for found in (times, peaks)
    ]
    near = sum(it <= 0.15 for it in times), sum(it <= 0.10 for it in peaks)
    within = f"{near[0]} of {len(times)} within 15 %, {near[1]} of {len(peaks)} within 10 %"
    return f"{name}: step time off {words[0]}; peak {words[1]}; {within}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, help="where the runs lie (default: a new folder under /tmp)")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="some of the runs")
    parser.add_argument("--rounds", type=int, default=3, help="how often each run is made")
    parser.add_argument("--again", action="store_true", help="make runs anew that are there")
    arguments = parser.parse_args()
    from orchestra.plan.profiles import read_profile

    folder = arguments.dir or Path(tempfile.mkdtemp(prefix="planner-cpu-"))
    folders = [folder / f"round-{number}" for number in range(arguments.rounds)]
    chosen = [run for run in RUNS if not arguments.only or run.name in arguments.only]
    for each in folders:
        each.mkdir(parents=True, exist_ok=True)
        for run in chosen:
            if arguments.again or not (each / run.name / "metrics.jsonl").exists():
                print(f"{each.name}/{run.name}: made in {make(run, each):.0f} s", file=sys.stderr)
    profile = folder / "profile.json"
    calibrated([each / run.name for each in folders for run in chosen if run.is_fit], profile)
    table(chosen, folders, read_profile(profile))
    print(f"runs and profile in {folder}")


if __name__ == "__main__":
    main()
