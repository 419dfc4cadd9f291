"""What the observers add on a GPU: kernels in the trace, the allocator's history, peak memory."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from conf.schema import ProfileConfig
from orchestra.run.paths import RunDir
from orchestra.train.metrics import memory_peak_bytes
from orchestra.train.watch.profile import StepProfiler

GPU = torch.device("cuda")


def test_trace_holds_kernels_and_the_memory_history_is_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    profiler = StepProfiler(ProfileConfig(enabled=True, steps=[2, 3]), run, rank=0)
    matrix = torch.rand(256, 256, device=GPU)
    for step in range(1, 5):
        with profiler.around_step(step):
            matrix = (matrix @ matrix).softmax(0)
    trace = json.loads(gzip.decompress((run.profile / "rank-00000-steps-2-3.json.gz").read_bytes()))
    assert "kernel" in {event.get("cat") for event in trace["traceEvents"]}
    assert (run.profile / "rank-00000-steps-2-3-memory.pickle").stat().st_size > 0


def test_peak_memory_is_that_of_tensors_on_the_device() -> None:
    before = memory_peak_bytes(GPU)
    block = torch.empty(before + (64 << 20), dtype=torch.uint8, device=GPU)
    assert memory_peak_bytes(GPU) >= block.numel()
