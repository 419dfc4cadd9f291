"""Measures what watching a run costs: logging every step with wandb, against logging once without it.

    python benchmarks/observers.py [--pairs 5] [--steps 200]

Both are whole runs by `orchestra run` of the model `debug` on two CPU ranks, in turn. Printed are the median
time of a step in the second half of each (wandb has started by then), their ratio, and the share of a step
that waits for data.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WATCHED = ("train.log_every=1", "wandb.mode=offline")


def step_times(folder: Path, name: str, steps: int, *overrides: str) -> tuple[float, float]:
    """Run and return the mean seconds of a step and of its wait for data, the first half left out."""
    from orchestra.run.metrics_file import read_metrics
    from orchestra.run.paths import RunDir

    words = [sys.executable, "-m", "orchestra", "run", f"run.dir={folder}", f"run.name={name}"]
    common = (f"train.steps={steps}", "cluster.device=cpu", "cluster.gpus_per_node=2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*words, *common, *overrides], check=True, stdout=subprocess.DEVNULL, env=environment)
    kept = [row for row in read_metrics(RunDir(folder / name)) if row["step"] > steps // 2]
    return (
        statistics.mean(row["step_time_s"] for row in kept),
        statistics.mean(row["data_time_s"] for row in kept),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    rare = (f"train.log_every={arguments.steps // 10}", "wandb.mode=disabled")
    pairs = []
    waits = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.pairs):
            watched, wait = step_times(Path(folder), f"watched-{number}", arguments.steps, *WATCHED)
            alone, _ = step_times(Path(folder), f"alone-{number}", arguments.steps, *rare)
            pairs.append((watched, alone))
            waits.append(wait / watched)
            print(f"pair {number}: watched {watched * 1e3:.1f} ms, alone {alone * 1e3:.1f} ms a step")
    ratio = statistics.median(watched / alone for watched, alone in pairs)
    print(f"median ratio of the step times: {ratio:.4f}; wait for data: {statistics.median(waits):.2%} of it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
