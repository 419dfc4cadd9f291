"""Traces a few steps with torch's profiler into <run>/profile/, on the ranks that the configuration names.

For each traced rank: a Chrome trace (open it in Perfetto, ui.perfetto.dev), a table of the step's shares and
of operations by their own time, and on a GPU the allocator's history for pytorch.org/memory_viz. The first of
these ranks also records the shares in summary.json. Untraced steps cost one comparison.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function

from conf.schema import ProfileConfig
from orchestra.parallel.marks import Traffic
from orchestra.run.files import to_log
from orchestra.run.paths import RunDir
from orchestra.sizes.device_times import HOST_COLLECTIVES, TraceEvent, device_times
from orchestra.sizes.step_shares import MARKS, SUMMARY_FILE, StepShares, shares_of
from orchestra.train.hooks import StepHook

_TABLE_ROWS = 40
_UNTRACED = nullcontext()
# Allocations and frees that the memory history keeps; the oldest are dropped.
_MEMORY_HISTORY_ENTRIES = 200_000
_STEP = "orchestra: step"


@dataclass(frozen=True)
class _Order:
    """Steps to trace, both included, on these ranks (none: on all); `token`: who asked."""

    first: int
    last: int
    ranks: Collection[int]
    token: str | None = None

    def is_for(self, rank: int) -> bool:
        return not self.ranks or rank in self.ranks


class StepProfiler(StepHook):
    """Traces the steps `config.steps[0]` to `config.steps[1]`, both included, on the ranks of `config.ranks`.

    A run that resumes inside that range traces what is left of it; one that ends inside it writes on `close`.
    `trace` asks for others while the run trains; `on_written` is told the first and the last step of a trace,
    and who asked for it.
    `traffic` counts what this rank sends; without one no bytes are recorded. `settle` waits for collectives
    that a step leaves under way: one that ended after the trace would write into memory that is gone.
    """

    def __init__(
        self,
        config: ProfileConfig,
        run: RunDir,
        rank: int,
        traffic: Traffic | None = None,
        settle: Callable[[], None] = lambda: None,
        on_written: Callable[[int, int, str | None, str | None], None] = lambda *_: None,
    ) -> None:
        """`on_written` is called with the first and the last step of a trace, who asked for it, and why it
        could not be written; None where it was.
        """
        # The same on all ranks, also on those that trace nothing; none has a step of another.
        self._orders: list[_Order] = []
        if config.enabled and config.ranks:
            first, last = config.steps
            self._orders.append(_Order(first, last, frozenset(config.ranks)))
        # What is being traced.
        self._order: _Order | None = None
        self._run = run
        self._rank = rank
        self._traffic = traffic or Traffic()
        self._settle = settle
        self._on_written = on_written
        self._bytes_sent: Counter[str] = Counter()
        self._profile: profile | None = None
        # What has been traced, and is to be written.
        self._ended: tuple[profile, _Order] | None = None
        self._began_at = self._ended_at = 0

    def trace(self, first: int, num_steps: int, ranks: Collection[int], token: str) -> None:
        """Trace so many steps from `first` on, on these ranks (none: on all), or after those that are to be
        traced already. All ranks are told the same.
        """
        self._orders = [order for order in self._orders if order.last >= first]
        for order in sorted(self._orders, key=lambda order: order.first):
            if order.first < first + num_steps and first <= order.last:
                first = order.last + 1
        self._orders.append(_Order(first, first + num_steps - 1, ranks, token))

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Return the context that traces `step`, where it is one of those to trace."""
        for order in self._orders:
            if order.first <= step <= order.last and order.is_for(self._rank):
                return self._traced(step, order)
        return _UNTRACED

    def write(self) -> None:
        """Write the trace that has come to its end, if one has; it may take longer than a step has. A disk
        that does not take it ends no training.
        """
        ended, self._ended = self._ended, None
        if ended is None:
            return
        tracing, order = ended
        stem = f"rank-{self._rank:05d}-steps-{self._began_at}-{self._ended_at}"
        problem: str | None = None
        try:
            self._write(tracing, stem, is_recorder=self._rank == min(order.ranks, default=0))
        except OSError as error:
            problem = f"{self._run.profile}: {error.strerror or error}"
            self._remove(stem)
        finally:
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)
        self._bytes_sent.clear()
        self._on_written(self._began_at, self._ended_at, order.token, problem)

    def close(self) -> None:
        """Write what was traced, if that has not been done; call it when the loop has ended."""
        self._orders = []
        self._end()
        self.write()

    def _end(self) -> None:
        tracing, self._profile = self._profile, None
        if tracing is None or self._order is None:
            return
        self._settle()
        _wait_for_device()
        tracing.stop()
        self._ended = (tracing, self._order)

    @contextmanager
    def _traced(self, step: int, order: _Order) -> Iterator[None]:
        self._order = order
        if self._profile is None:
            self._begin(step)
        before = Counter(self._traffic.bytes_sent)
        with record_function(_STEP), record_function(f"step {step}"):
            yield
            # The device's share of a step belongs to it.
            _wait_for_device()
        self._bytes_sent += Counter(self._traffic.bytes_sent) - before
        self._ended_at = step
        if step == order.last:
            self._end()

    def _begin(self, step: int) -> None:
        self.write()
        self._began_at = self._ended_at = step
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_HISTORY_ENTRIES)
        _wait_for_device()
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def _remove(self, stem: str) -> None:
        """Remove what there is of a trace that could not be written: nobody can read a part of it."""
        for path in self._run.profile.glob(f"{stem}[.-]*"):
            with suppress(OSError):
                path.unlink()

    def _write(self, tracing: profile, stem: str, *, is_recorder: bool) -> None:
        folder = self._run.profile
        folder.mkdir(parents=True, exist_ok=True)
        tracing.export_chrome_trace(str(folder / f"{stem}.json.gz"))
        order = "self_cpu_time_total"
        if torch.cuda.is_available():
            order = "self_cuda_time_total"
            torch.cuda.memory._dump_snapshot(str(folder / f"{stem}-memory.pickle"))  # type: ignore[no-untyped-call]
        operations = tracing.key_averages().table(sort_by=order, row_limit=_TABLE_ROWS)
        shares = self._shares(tracing)
        shown = "" if shares is None else "\n".join(shares.table()) + "\n"
        (folder / f"{stem}.txt").write_text(f"{shown}\n{operations}")
        if shares is not None and is_recorder:
            (folder / SUMMARY_FILE).write_text(json.dumps(shares.record(), indent=1) + "\n")
            to_log(shown)

    def _shares(self, tracing: profile) -> StepShares | None:
        """Return the shares of the traced steps; None where none of them came to its end."""
        events = _events(tracing)
        steps = [event.interval for event in events if event.name == _STEP and not event.is_on_device]
        num_steps = len(steps)
        if not steps:
            return None
        if any(event.is_on_device for event in events):
            device = device_times(events)
            seconds, parts, communication = shares_of(steps, device.parts, device.in_flight, device.computing)
        else:
            marks = {part: [e.interval for e in events if e.name == name] for part, name in MARKS.items()}
            in_flight = [e.interval for e in events if e.name.startswith(HOST_COLLECTIVES)]
            seconds, parts, communication = shares_of(steps, marks, in_flight)
        return StepShares(
            rank=self._rank,
            first_step=self._began_at,
            last_step=self._ended_at,
            step_s=seconds / num_steps,
            parts_s={name: each / num_steps for name, each in parts.items()},
            communication_s=communication / num_steps,
            bytes_sent={kind: size / num_steps for kind, size in self._bytes_sent.items()},
        )


def _events(tracing: profile) -> list[TraceEvent]:
    """Return what a trace says, host and device."""
    assert tracing.profiler is not None
    assert tracing.profiler.kineto_results is not None
    return [
        TraceEvent(
            name=event.name(),
            begin=event.start_ns(),
            end=event.start_ns() + event.duration_ns(),
            is_on_device=event.device_type() != DeviceType.CPU,
            is_annotation=event.is_user_annotation(),
            correlation=event.correlation_id(),
            stream=event.device_resource_id(),
        )
        for event in tracing.profiler.kineto_results.events()
    ]


def _wait_for_device() -> None:
    """Let queued kernels end, so that they fall on the right side of the trace's edge."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
