"""A plan for CPUs on a machine that nobody has measured: it measures first, and meets a run's peak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import orchestra

from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir

PLACE = ("cluster.device=cpu", "cluster.gpus_per_node=2", "model=debug")
RUN = (
    "run.name=small",
    "run.dir=runs",
    "train.steps=4",
    "checkpoint.every_steps=null",
    "wandb.mode=disabled",
)


@pytest.mark.slow
@pytest.mark.timeout(360)
def test_an_unmeasured_cpu_is_measured_and_a_runs_peak_is_met(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    first = orchestra(tmp_path, "plan", *PLACE, "--json", extra=cache)
    assert first.returncode == 0, first.stderr
    assert "measuring this machine's CPU in fp32" in first.stderr
    [rates] = json.loads((tmp_path / "cache" / "orchestra" / "cpu_rates.json").read_text()).values()
    assert all(0 < rates["fp32"][name] <= 1 for name in ("busy_share", "busy_memory_share"))
    done = orchestra(tmp_path, "run", *PLACE, *RUN, extra=cache)
    assert done.returncode == 0, done.stderr
    *_, last = read_metrics(RunDir(tmp_path / "runs" / "small"))
    predicted = json.loads(first.stdout)["peak_memory_bytes"]
    assert predicted == pytest.approx(last["memory_peak_bytes"], rel=0.1)
