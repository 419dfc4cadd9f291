"""When a device worked on each part of a step, from a trace: kernels belong to what started them.

The host only queues kernels, and those of the backward pass from a thread of autograd's own. So a kernel is
followed by its correlation id to the call of CUDA that started it, and that call by its time to the mark that
stood on the host at that moment, on whichever thread: while autograd's thread queues kernels, the main thread
stands in `backward()`. It holds for kernels of compiled code alike, which Triton starts through the driver.
The step profiler calls it; it knows no torch.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from orchestra.sizes.step_shares import MARKS, Interval, Part, merged, without

# What NCCL calls its kernels, and gloo its work on the host.
_DEVICE_COLLECTIVES = ("nccl",)
HOST_COLLECTIVES = ("gloo:",)
# Calls of CUDA's runtime (cudaLaunchKernel, cudaMemcpyAsync), of its driver (cuLaunchKernelEx) and of HIP.
# Operators of torch have correlation ids too, of a count of their own.
_STARTS_WORK = re.compile(r"cuda[A-Z]|cu[A-Z]|hip[A-Z]")
# Where marks stand inside one another, and recomputation in the backward pass.
_LAUNCHING = (Part.communication, Part.optimizer, Part.backward, Part.forward)
# Where kernels of two parts run at once: the passes hide what runs beside them, such as copies of state.
_RUNNING = (Part.backward, Part.forward, Part.optimizer)


@dataclass(frozen=True)
class TraceEvent:
    """An event of torch's profiler: times in nanoseconds on one clock, host and device.

    `correlation` is the same number for a kernel and the call that started it. `stream` is the device's
    queue; of host events it says nothing. `is_annotation`: a mark, or its repetition on the device.
    """

    name: str
    begin: int
    end: int
    is_on_device: bool = False
    is_annotation: bool = False
    correlation: int = 0
    stream: int = 0

    @property
    def interval(self) -> Interval:
        return self.begin, self.end


@dataclass(frozen=True)
class DeviceTimes:
    """What `shares_of` takes: disjoint times of each part, of collectives, and of all other work."""

    parts: dict[Part, list[Interval]]
    in_flight: list[Interval]
    computing: list[Interval]


def device_times(events: Sequence[TraceEvent]) -> DeviceTimes:
    """Return when the device worked on what.

    Collectives, and copies that are started under their mark, are in flight; all else computes. The wait for
    data is what the host stands in its mark while the device computes nothing. A host that waits for its
    device (or runs ahead of it) does not show: the device's time counts.
    """
    launched = {
        event.correlation: event.begin
        for event in events
        if not event.is_on_device and event.correlation and _STARTS_WORK.match(event.name)
    }
    marks = {part: [e.interval for e in _host(events) if e.name == MARKS[part]] for part in Part}
    windows = _windows(marks)
    running: dict[Part | None, list[Interval]] = {None: [], **{part: [] for part in Part}}
    in_flight = [event.interval for event in _host(events) if event.name.startswith(HOST_COLLECTIVES)]
    last_of: dict[int, Part | None] = {}
    kernels = (event for event in events if event.is_on_device and not event.is_annotation)
    for kernel in sorted(kernels, key=lambda event: event.begin):
        if kernel.name.startswith(_DEVICE_COLLECTIVES):
            in_flight.append(kernel.interval)
            continue
        if kernel.correlation in launched:
            last_of[kernel.stream] = windows.part_at(launched[kernel.correlation])
        # A stream runs in the order of launches: without one, a kernel goes with the one before it.
        running[last_of.get(kernel.stream)].append(kernel.interval)
    in_flight += running.pop(Part.communication)
    computing = merged(interval for intervals in running.values() for interval in intervals)
    parts = _apart({part: merged(running[part]) for part in _RUNNING})
    parts[Part.data] = without(merged(marks[Part.data]), computing)
    return DeviceTimes(parts, merged(in_flight), computing)


def _host(events: Iterable[TraceEvent]) -> Iterable[TraceEvent]:
    return (event for event in events if not event.is_on_device)


@dataclass(frozen=True)
class _Windows:
    """Disjoint times of the host in order, and the part that each stands for."""

    begins: list[int]
    ends: list[int]
    parts: list[Part]

    def part_at(self, time: int) -> Part | None:
        index = bisect_right(self.begins, time) - 1
        return self.parts[index] if index >= 0 and time < self.ends[index] else None


def _windows(marks: Mapping[Part, Sequence[Interval]]) -> _Windows:
    apart = _apart({part: merged(marks[part]) for part in _LAUNCHING})
    found = sorted((begin, end, part.value) for part, times in apart.items() for begin, end in times)
    return _Windows(
        [begin for begin, _, _ in found], [end for _, end, _ in found], [Part(name) for _, _, name in found]
    )


def _apart(times: Mapping[Part, list[Interval]]) -> dict[Part, list[Interval]]:
    """Return the times of each part without those of the parts that stand before it."""
    taken: list[Interval] = []
    left = {}
    for part, intervals in times.items():
        left[part] = without(intervals, taken)
        taken = merged([*taken, *left[part]])
    return left
