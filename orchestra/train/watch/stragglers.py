"""Each rank's own time in a step, without its waits for others, and who among the ranks is slow.

One step of every so many is timed, on all ranks the same one: the whole step less the marked communication,
on a GPU by events in its stream that are read much later, so that no host ever waits for a device. A rank
leaves its times in its file (`orchestra.run.step_times`) and in the ranks' store and goes on; rank 0 reads
all of them there in a thread and writes `straggler_found` and `straggler_gone`. A step that is not timed
costs a comparison.

Communication inside of what torch compiled has no marks: waits there count as a rank's own time and hide who
is slow, but accuse no other rank.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.peers import Peers
from conf.schema import RecoveryConfig
from orchestra.parallel.marks import time_communication
from orchestra.run.events import EventWriter, is_number
from orchestra.run.step_times import StepTimesFile, ratios_in_stages
from orchestra.train.hooks import StepHook

_TOPIC = "step times"
# Step times that a rank reports at once: a host that is ahead of its device reports the last one late.
_NUM_REPORTED = 4


@dataclass(frozen=True)
class Straggler:
    """A rank, and how many times the others' median it needed (the median over the windows)."""

    rank: int
    ratio: float


@dataclass(frozen=True)
class StragglerChanges:
    """What changed with the newest window: which ranks became slow, and which are slow no more."""

    found: tuple[Straggler, ...] = ()
    gone: tuple[int, ...] = ()


def straggler_changes(
    history: Sequence[Sequence[float]],
    known: Collection[int],
    *,
    factor: float,
    windows: int,
    num_stages: int = 1,
) -> StragglerChanges:
    """Return what the newest `windows` of a history change about the ranks that are `known` to be slow.

    A window holds the seconds of one step by rank, without the waits for other ranks; the oldest comes first.
    A rank is slow in a window if it needs more than `factor` times the median of the others. It becomes a
    straggler after `windows` such windows in a row, and is none any more after as many in which it was not
    slow. A single slow step, or noise on every rank, makes no straggler: with a noise of 10 % (one standard
    deviation) one window reaches 1.3 times the median once in a thousand times, five in a row never do. With
    fewer windows, or one rank, nothing changes. In a pipeline a rank's others are those of its stage, which
    have the same work; one that has a stage for itself is never slow.
    """
    if len(history) < windows or len(history[-1]) < 2:
        return StragglerChanges()
    ratios = [ratios_in_stages(window, num_stages) for window in history[-windows:]]
    found, gone = [], []
    for rank, of_rank in enumerate(zip(*ratios, strict=True)):
        if rank not in known and min(of_rank) > factor:
            found.append(Straggler(rank, statistics.median(of_rank)))
        elif rank in known and max(of_rank) <= factor:
            gone.append(rank)
    return StragglerChanges(tuple(found), tuple(gone))


class StepClock(Protocol):
    """Times one step after the other on one rank."""

    def begin(self) -> None:
        """Begin a step."""

    def communicating(self) -> AbstractContextManager[Any]:
        """Return the context in which this rank talks to others or waits for them."""

    def end(self) -> None:
        """End the step."""

    def own_time_s(self) -> float | None:
        """Return the seconds of the step that was ended, less its communication; None: not known yet."""


class HostClock:
    """For ranks that compute on the host: the wall time."""

    def __init__(self) -> None:
        self._began = self._own_time_s = self._communicated_s = 0.0
        self._depth = 0

    def begin(self) -> None:
        self._communicated_s, self._depth = 0.0, 0
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        began = time.perf_counter()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._communicated_s += time.perf_counter() - began

    def end(self) -> None:
        self._own_time_s = time.perf_counter() - self._began - self._communicated_s

    def own_time_s(self) -> float | None:
        return self._own_time_s


class DeviceClock:
    """For ranks that compute on a GPU: events in its stream, where the waits for other ranks happen too."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._depth = 0

    def begin(self) -> None:
        self._depth = 0
        self._events = [(_event(), _event())]
        self._events[0][0].record()

    @contextlib.contextmanager
    def communicating(self) -> Iterator[None]:
        self._depth += 1
        if self._depth > 1:
            yield
            self._depth -= 1
            return
        pair = (_event(), _event())
        pair[0].record()
        try:
            yield
        finally:
            pair[1].record()
            self._events.append(pair)
            self._depth -= 1

    def end(self) -> None:
        self._events[0][1].record()

    def own_time_s(self) -> float | None:
        if not self._events or not self._events[0][1].query():  # type: ignore[no-untyped-call]
            return None
        whole, *parts = [float(first.elapsed_time(last)) for first, last in self._events]
        return max(0.0, whole - sum(parts)) / 1000.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class StepTimes(StepHook):
    """Times this rank's steps. All ranks call `begin` and `end` for the same steps; neither waits.

    `events` is rank 0's, where the stragglers are written; None on the others. `file` takes what is timed.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        peers: Peers,
        clock: StepClock,
        events: EventWriter | None,
        num_stages: int = 1,
        file: StepTimesFile | None = None,
    ) -> None:
        self._file = file
        self._every_steps = config.straggler_every_steps if peers.world_size > 1 else None
        self._peers = peers
        self._clock = clock
        self._timed: int | None = None
        self._is_running = False
        self._reported: deque[tuple[int, float]] = deque(maxlen=_NUM_REPORTED)
        self._host = socket.gethostname()
        self._watch: StragglerWatch | None = None
        if events is not None and self._every_steps is not None:
            self._watch = StragglerWatch(config, peers, events, num_stages)

    @contextlib.contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Time the step where it is due."""
        self.begin(step)
        yield
        self.end()

    def begin(self, step: int) -> None:
        """Begin `step`, with all that this rank does for it."""
        if self._every_steps is None or step % self._every_steps:
            return
        self._report()
        self._timed, self._is_running = step, True
        time_communication(self._clock.communicating)
        self._clock.begin()

    def end(self) -> None:
        """End the step; after it ranks may wait for each other without a mark."""
        if self._is_running:
            self._clock.end()
            time_communication(None)
            self._is_running = False

    def _report(self) -> None:
        """Leave the time of the step that was timed last, if the device has come that far."""
        own_time_s = None if self._timed is None else self._clock.own_time_s()
        if own_time_s is None or self._timed is None:
            return
        self._reported.append((self._timed, own_time_s))
        if self._file is not None:
            self._file.add(self._timed, own_time_s)
        report = {"host": self._host, "times": list(self._reported)}
        if self._watch is not None:
            self._watch.look(report)
            return
        # Where rank 0 is gone, the training notices it by itself.
        with contextlib.suppress(CheckpointError):
            self._peers.tell(_TOPIC, report)

    def close(self) -> None:
        """Write what is left and end the threads. Asks no device, which may be broken, and waits for none."""
        time_communication(None)
        if self._file is not None:
            self._file.close()
        if self._watch is not None:
            self._watch.close()


class StragglerWatch:
    """Reads what all ranks have reported, whenever there is something new, and judges it. *Rank 0 only*."""

    def __init__(self, config: RecoveryConfig, peers: Peers, events: EventWriter, num_stages: int) -> None:
        self._config, self._num_stages = config, num_stages
        self._peers = peers
        self._events = events
        self._history: deque[list[float]] = deque(maxlen=config.straggler_windows)
        self._judged = 0
        self._slow: set[int] = set()
        self._own: dict[str, Any] = {}
        self._is_new = threading.Event()
        self._is_over = False
        self._thread = threading.Thread(target=self._follow, name="stragglers", daemon=True)
        self._thread.start()

    def look(self, own: dict[str, Any]) -> None:
        """Have the thread look at what is there, with rank 0's own times. Never waits."""
        self._own = own
        self._is_new.set()

    def close(self) -> None:
        """End the thread; never waits for it."""
        self._is_over = True
        self._is_new.set()

    def _follow(self) -> None:
        while True:
            self._is_new.wait()
            self._is_new.clear()
            if self._is_over:
                return
            # The store goes with rank 0, at the end of the run.
            with contextlib.suppress(CheckpointError):
                others = self._peers.words_of_others(_TOPIC)
                if others is not None:
                    self._judge([self._own, *others])

    def _judge(self, reports: list[dict[str, Any]]) -> None:
        """Judge the steps that all ranks have reported since the last ones that were judged."""
        times = [dict(report["times"]) for report in reports]
        new = set.intersection(*(set(of_rank) for of_rank in times))
        for step in sorted(step for step in new if step > self._judged):
            self._judged = step
            window = [of_rank[step] for of_rank in times]
            if all(is_number(seconds) for seconds in window):
                self._history.append(window)
                self._announce(step, reports)

    def _announce(self, step: int, reports: list[dict[str, Any]]) -> None:
        config = self._config
        factor, windows = config.straggler_factor, config.straggler_windows
        changes = straggler_changes(
            list(self._history), self._slow, factor=factor, windows=windows, num_stages=self._num_stages
        )
        num_steps = windows * (config.straggler_every_steps or 1)
        # A full disk takes the record; the next one is tried again.
        with contextlib.suppress(OSError):
            for straggler in changes.found:
                rank, host = straggler.rank, reports[straggler.rank]["host"]
                evidence = {"ratio": straggler.ratio, "steps": num_steps, "seconds": self._history[-1][rank]}
                self._events.write("straggler_found", rank=rank, host=host, step=step, **evidence)
                self._slow.add(rank)
            for rank in changes.gone:
                host = reports[rank]["host"]
                self._events.write("straggler_gone", rank=rank, host=host, step=step, steps=num_steps)
                self._slow.discard(rank)
