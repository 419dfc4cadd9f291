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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.errors import OrchestraError
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

if TYPE_CHECKING:
    from conf.schema import Config


# Both measurements take seconds; beside much other work a minute.
_LIMIT_S = 300.0
_RUN = "smallest"
_SMALLEST = (
    *("model=debug", "model.num_hidden_layers=1", "model.hidden_size=64", "model.intermediate_size=128"),
    *("train.seq_len=64", "train.global_batch_size=2", "train.steps=3", "train.log_every=1"),
    *("cluster.device=cpu", "cluster.gpus_per_node=2", "checkpoint.every_steps=null", "wandb.mode=disabled"),
    # Known, so that it spends no time measuring it.
    "cluster.peak_tflops=1",
)


def measure_if_needed(config: Config) -> None:
    """Measure and keep the rates that a plan for CPUs starts from; says so on stderr, as it takes seconds.

    Raises OrchestraError where measuring fails.
    """
    from conf.schema import Device
    from orchestra.plan.cpu import are_sure, is_busy, keep_rates, known_rates
    from orchestra.plan.profiles import is_profile

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
    from orchestra.submit.launch import source_root

    environment = {**os.environ, "PYTHONPATH": str(source_root()), "PYTHONSAFEPATH": "1"}
    printed = _printed(["orchestra.train.cpu_rates", precision], environment)
    rates: dict[str, float] = json.loads(printed.splitlines()[-1])
    return {**rates, "fixed_bytes": _smallest_peak_bytes(precision, environment)}


def _smallest_peak_bytes(precision: str, environment: Mapping[str, str]) -> float:
    """Return the peak of a rank that trains next to nothing: its own tensors take a few MiB."""
    with tempfile.TemporaryDirectory() as folder:
        typed = [f"run.dir={folder}", f"run.name={_RUN}", f"precision={precision}", *_SMALLEST]
        _printed(["orchestra", "run", *typed], environment)
        *_, last = read_metrics(RunDir(Path(folder) / _RUN))
    return float(last["memory_peak_bytes"])


def _printed(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return what a module prints, run with these arguments. Raises OrchestraError where it fails."""
    command = [sys.executable, "-m", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        why = f"no end after {error.timeout:.0f} s"
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"exit code {error.returncode}"]
        why = said[-1].removeprefix("error: ")
    else:
        return done.stdout
    raise OrchestraError(f"measuring the CPU failed: {why}; give a profile with cluster.hardware=FILE.json")
