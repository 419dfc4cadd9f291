"""The step profiler: which steps and ranks it traces, what it leaves in the run directory, what it costs."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from conf.schema import ProfileConfig
from orchestra.run.paths import RunDir
from orchestra.train.watch.profile import StepProfiler


def traced(run: RunDir, config: ProfileConfig, rank: int, steps: Iterable[int]) -> list[str]:
    """Run `steps` under a profiler; return the names of the files it leaves."""
    profiler = StepProfiler(config, run, rank)
    matrix = torch.rand(32, 32)
    for step in steps:
        with profiler.around_step(step):
            matrix = (matrix @ matrix).softmax(0)
    profiler.close()
    return sorted(path.name for path in run.profile.glob("*"))


def names_in(trace: Path) -> set[str]:
    return {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}


def test_the_named_steps_are_traced_both_ends_included(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    files = traced(run, ProfileConfig(enabled=True, steps=[5, 7], ranks=[0]), rank=0, steps=range(1, 12))
    assert files == ["rank-00000-steps-5-7.json.gz", "rank-00000-steps-5-7.txt", "summary.json"]
    names = names_in(run.profile / files[0])
    assert {name for name in names if name.startswith("step ")} == {"step 5", "step 6", "step 7"}
    assert "aten::mm" in names
    assert "aten::mm" in (run.profile / files[1]).read_text()


def test_other_ranks_and_disabled_profiling_leave_nothing(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert traced(run, ProfileConfig(enabled=True, steps=[1, 2], ranks=[1]), rank=0, steps=range(1, 4)) == []
    assert traced(run, ProfileConfig(enabled=False, steps=[1, 2]), rank=0, steps=range(1, 4)) == []


def test_a_run_that_ends_or_resumes_inside_the_range_traces_its_part(tmp_path: Path) -> None:
    for asked, trained, found in (([2, 50], range(1, 5), "2-4"), ([2, 6], range(5, 9), "5-6")):
        config = ProfileConfig(enabled=True, steps=asked)
        files = traced(RunDir(tmp_path / found), config, rank=0, steps=trained)
        assert files == [f"rank-00000-steps-{found}.{kind}" for kind in ("json.gz", "txt")] + ["summary.json"]


def test_steps_that_are_asked_for_go_beside_those_of_the_configuration(tmp_path: Path) -> None:
    told: list[tuple[int, int, str | None, str | None]] = []
    run = RunDir(tmp_path)
    config = ProfileConfig(enabled=True, steps=[4, 5])
    traced = StepProfiler(config, run, 0, on_written=lambda *what: told.append(what))
    other = StepProfiler(config, run, 1, on_written=lambda *what: told.append(what))
    for step in range(1, 13):
        for profiler in (traced, other):
            with profiler.around_step(step):
                pass
            profiler.write()
            if step == 1:
                profiler.trace(2, 1, [0], "before")
            if step == 3:
                # Would meet the configured steps, which are no other's on any rank.
                profiler.trace(4, 2, [1], "after")
                profiler.trace(4, 3, [0], "last")
    asked = [(2, 2, "before"), (4, 5, None), (6, 7, "after"), (8, 10, "last")]
    assert told == [(*steps, None) for steps in asked]


def test_no_step_lasts_until_its_trace_is_written(tmp_path: Path) -> None:
    """That may take longer than a rank may be silent within a step."""
    run = RunDir(tmp_path)
    profiler = StepProfiler(ProfileConfig(enabled=True, steps=[1, 1]), run, 0)
    with profiler.around_step(1):
        pass
    assert not run.profile.exists()
    profiler.write()
    assert len(list(run.profile.iterdir())) == 3


@pytest.mark.parametrize("ending", [".json.gz", ".txt"])
def test_a_disk_that_takes_no_trace_ends_no_training_and_is_told(tmp_path: Path, ending: str) -> None:
    run, told = RunDir(tmp_path), list[tuple[object, ...]]()
    run.profile.mkdir()
    (run.profile / f"rank-00000-steps-1-1{ending}").symlink_to("/dev/full")
    config = ProfileConfig(enabled=True, steps=[1, 1])
    profiler = StepProfiler(config, run, 0, on_written=lambda *evidence: told.append(evidence))
    with profiler.around_step(1):
        pass
    profiler.write()
    assert told == [(1, 1, None, f"{run.profile}: No space left on device")]
    assert list(run.profile.iterdir()) == []


def test_an_error_in_a_traced_step_passes_through(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    profiler = StepProfiler(ProfileConfig(enabled=True, steps=[1, 3]), run, 0)
    with pytest.raises(ZeroDivisionError), profiler.around_step(1):
        raise ZeroDivisionError
    profiler.close()
    assert (run.profile / "rank-00000-steps-1-1.json.gz").exists()


def test_disabled_profiling_costs_microseconds(tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileConfig(), RunDir(tmp_path), 0)
    costs = []
    for step in range(1000):
        began = time.perf_counter()
        with profiler.around_step(step):
            pass
        costs.append(time.perf_counter() - began)
    assert sorted(costs)[500] < 50e-6
