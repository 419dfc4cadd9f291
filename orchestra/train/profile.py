"""Traces a few steps with torch's profiler into <run>/profile/, on the ranks that the configuration names.

For each traced rank: a Chrome trace (open it in Perfetto, ui.perfetto.dev), a table of operations by their
own time, and on a GPU the allocator's history for pytorch.org/memory_viz. Untraced steps cost one comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from conf.schema import ProfileConfig
from orchestra.rundir import RunDir

_TABLE_ROWS = 40
_UNTRACED = nullcontext()
# Allocations and frees that the memory history keeps; the oldest are dropped.
_MEMORY_HISTORY_ENTRIES = 200_000


class StepProfiler:
    """Traces the steps `config.steps[0]` to `config.steps[1]`, both included, on the ranks of `config.ranks`.

    A run that resumes inside that range traces what is left of it; one that ends inside it writes on `close`.
    """

    def __init__(self, config: ProfileConfig, run: RunDir, rank: int) -> None:
        self._first, self._last = config.steps
        self._is_armed = config.enabled and rank in config.ranks
        self._run = run
        self._rank = rank
        self._profile: profile | None = None
        self._began_at = self._ended_at = 0

    def step(self, step: int) -> AbstractContextManager[object]:
        """Return the context to run `step` in."""
        if not self._is_armed or not self._first <= step <= self._last:
            return _UNTRACED
        return self._traced(step)

    def close(self) -> None:
        """Write what was traced, if that has not been done; call it when the loop ends, whatever ended it."""
        self._is_armed = False
        tracing, self._profile = self._profile, None
        if tracing is None:
            return
        _wait_for_device()
        tracing.stop()
        self._write(tracing)

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        if self._profile is None:
            self._begin(step)
        with record_function(f"step {step}"):
            yield
        self._ended_at = step
        if step == self._last:
            self.close()

    def _begin(self, step: int) -> None:
        self._began_at = self._ended_at = step
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_HISTORY_ENTRIES)
        _wait_for_device()
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def _write(self, tracing: profile) -> None:
        folder = self._run.profile
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"rank-{self._rank:05d}-steps-{self._began_at}-{self._ended_at}"
        tracing.export_chrome_trace(str(folder / f"{stem}.json.gz"))
        order = "self_cpu_time_total"
        if torch.cuda.is_available():
            order = "self_cuda_time_total"
            torch.cuda.memory._dump_snapshot(str(folder / f"{stem}-memory.pickle"))  # type: ignore[no-untyped-call]
            torch.cuda.memory._record_memory_history(enabled=None)
        averages = tracing.key_averages()
        (folder / f"{stem}.txt").write_text(averages.table(sort_by=order, row_limit=_TABLE_ROWS))


def _wait_for_device() -> None:
    """Let queued kernels end, so that they fall on the right side of the trace's edge."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
