"""Has this machine's CPU measured, once, where a plan is about CPUs and nobody has: `plan` does it first.

A process of the data plane measures rates (`python -m orchestra.train.cpu_rates`), and a run of the smallest
model shows what a rank holds beside its tensors: libraries, their workspaces, threads, text. The figures are
kept for the next plan, and those of a busy machine only until a plan finds it quiet. It predicts nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.errors import OrchestraError
from orchestra.metrics_file import read_metrics
from orchestra.rundir import RunDir

if TYPE_CHECKING:
    from conf.schema import Config


_RUN = "smallest"
_SMALLEST = (
    *("model=debug", "model.num_hidden_layers=1", "model.hidden_size=64", "model.intermediate_size=128"),
    *("train.seq_len=64", "train.global_batch_size=2", "train.steps=3", "train.log_every=1"),
    *("cluster.device=cpu", "cluster.gpus_per_node=2", "checkpoint.every_steps=null", "wandb.mode=disabled"),
)


def measure_if_needed(config: Config) -> None:
    """Measure and keep the rates that a plan for CPUs starts from; says so on stderr, as it takes seconds.

    Raises OrchestraError where measuring fails.
    """
    from conf.schema import Device
    from orchestra.plan.cases.cpu import are_sure, is_busy, keep_rates, known_rates
    from orchestra.plan.cases.profiles import is_profile

    precision = config.precision.name.value
    if config.cluster.device is not Device.cpu or is_profile(config.cluster.hardware):
        return
    was_busy, is_known = is_busy(), known_rates(precision) is not None
    if is_known and (was_busy or are_sure(precision)):
        return
    why = "again, now that it is quiet" if is_known else "once"
    print(f"measuring this machine's CPU in {precision}, {why}; it takes about 15 seconds", file=sys.stderr)
    rates = _measured(precision)
    is_sure = not was_busy and not is_busy()
    keep_rates(precision, rates, is_sure=is_sure)
    if not is_sure:
        print("it is busy: these figures are low, and are measured again once it is quiet", file=sys.stderr)


def _measured(precision: str) -> dict[str, float]:
    from orchestra.submit.environment import source_root

    environment = {**os.environ, "PYTHONPATH": str(source_root()), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "orchestra.train.cpu_rates", precision]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise OrchestraError(
            f"measuring the CPU failed: {last[0]}; give a profile with cluster.hardware=FILE.json"
        )
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {**rates, "fixed_bytes": _smallest_peak_bytes(precision, environment)}


def _smallest_peak_bytes(precision: str, environment: Mapping[str, str]) -> float:
    """Return the peak of a rank that trains next to nothing: its own tensors take less than a MiB."""
    with tempfile.TemporaryDirectory() as folder:
        typed = [f"run.dir={folder}", f"run.name={_RUN}", f"precision={precision}", *_SMALLEST]
        command = [sys.executable, "-m", "orchestra", "run", *typed]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        rows = [] if done.returncode else list(read_metrics(RunDir(Path(folder) / _RUN)))
    if not rows:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise OrchestraError(
            f"measuring the memory of a rank failed: {last[0]}; give a profile with "
            "cluster.hardware=FILE.json"
        )
    return float(rows[-1]["memory_peak_bytes"])
