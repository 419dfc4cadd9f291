"""The energy of the GPUs that a run trains on: differences of NVML's counters, summed over all ranks.

A GPU counts its millijoules since its driver was loaded. One rank of each GPU reads that counter every two
seconds, in a thread, and leaves what it counted since the attempt began in the ranks' store; rank 0 sums the
newest words for the rows of metrics. No step reads a counter or waits for one. Where a single GPU cannot be
read the sum is not known: the rows then hold null, and an event says which GPU and why.

NVML is reached by NVIDIA's own package (nvidia-ml-py), which is optional; nothing else here needs it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.peers import Peers
from orchestra.parallel.mesh import Mesh, RankEnvironment
from orchestra.run.control.member_places import MEMBERS_VARIABLE
from orchestra.run.events import EventWriter
from orchestra.run.files import Record

_TOPIC = "energy"
_EVERY_S = 2.0
_WORDS_PER_S = 256
# The columns of a row, in their order.
_NOTHING: Record = {"energy_j": None, "power_w": None}
_INSTALL = "pip install 'orchestra-train[energy]'"


class UnmeasuredError(Exception):
    """Says why the energy of a device cannot be read."""


class Counter(Protocol):
    """What a GPU has used since its driver was loaded."""

    def millijoules(self) -> int:
        """Return the counter. Raises UnmeasuredError."""


class NvmlCounter:
    """The counter of one CUDA device. Raises UnmeasuredError where it cannot be read: without the package,
    the driver's library or the right, on GPUs older than Volta, and on a slice of one (MIG).
    """

    def __init__(self, device: torch.device) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise UnmeasuredError(f"NVML: nvidia-ml-py is not installed ({_INSTALL})") from error
        self._pynvml = pynvml
        try:
            pynvml.nvmlInit()
            # The numbers of NVML and of CUDA differ: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        except pynvml.NVMLError as error:
            raise UnmeasuredError(f"NVML: {error}") from error
        self.millijoules()

    def millijoules(self) -> int:
        try:
            return int(self._pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._pynvml.NVMLError as error:
            raise UnmeasuredError(f"NVML: {error}") from error


def joules_between(before_mj: int, now_mj: int) -> float:
    """Return the joules between two readings of a counter in millijoules.

    One that fell began anew with its driver: at least what it says since then was used, and no more is known.
    """
    return (now_mj - before_mj if now_mj >= before_mj else now_mj) / 1000.0


@dataclass(frozen=True)
class Total:
    """What all GPUs used since the attempt began, at `time` (`time.monotonic`)."""

    time: float
    joules: float
    num_gpus: int


def total_of(words: Sequence[Record], now: float) -> Total:
    """Sum the words of all ranks: `joules` of the one rank that reads a GPU, none of others that share it.

    Raises UnmeasuredError with the first reason, and where, as soon as one GPU is not read.
    """
    for word in words:
        if "cause" in word:
            raise UnmeasuredError(f"{word['cause']}, on {word['host']}")
    joules = [word["joules"] for word in words if "joules" in word]
    return Total(now, sum(joules), len(joules))


def energy_columns(before: Total, newest: Total) -> Record:
    """Return a row's columns: the joules of all GPUs since the total of the row before, and the mean power of
    one GPU in watts. Null where there is no newer total: rows may come faster than readings.
    """
    seconds = newest.time - before.time
    if seconds <= 0 or newest.num_gpus == 0:
        return _NOTHING
    joules = newest.joules - before.joules
    return {"energy_j": joules, "power_w": joules / seconds / newest.num_gpus}


class EnergyWatch:
    """Reads and sums the counters from threads. *Any rank*; `columns` is rank 0's.

    `counter`: of the device that this rank reads; None: another rank of this node reads it. What it raises
    is told once, by rank 0 to its `events`.
    """

    def __init__(
        self,
        peers: Peers,
        counter: Counter | UnmeasuredError | None,
        events: EventWriter | None,
        every_s: float | None = None,
    ) -> None:
        self._peers, self._counter, self._events = peers, counter, events
        # Rank 0 reads a word of each rank.
        self._every_s = max(_EVERY_S, peers.world_size / _WORDS_PER_S) if every_s is None else every_s
        self._joules, self._before_mj = 0.0, 0
        self._told = self._newest = Total(time.monotonic(), 0.0, 0)
        self._is_told = False
        self._is_over = threading.Event()
        if isinstance(counter, UnmeasuredError):
            self._unmeasured(str(counter))
        elif counter is not None:
            try:
                self._before_mj = counter.millijoules()
            except UnmeasuredError as error:
                self._counter = error
                self._unmeasured(str(error))
        self._thread = threading.Thread(target=self._follow, name="energy", daemon=True)
        self._thread.start()

    def columns(self) -> Record:
        """Return the columns of the row that is about to be written. Never waits."""
        before, newest = self._told, self._newest
        self._told = newest
        return energy_columns(before, newest)

    def close(self) -> None:
        """End the thread; never waits for it."""
        self._is_over.set()

    def _follow(self) -> None:
        is_asked = True
        while is_asked and not self._is_over.wait(self._every_s):
            # The store goes with rank 0, at the end of the run.
            with contextlib.suppress(CheckpointError):
                is_asked = self._look()

    def _look(self) -> bool:
        """Read, and tell or sum; return whether this has to be done again."""
        own = self._word()
        if self._events is None:
            self._peers.tell(_TOPIC, own)
            # What does not change is told once.
            return "joules" in own
        others = self._peers.words_of_others(_TOPIC)
        if others is None:
            return True
        try:
            self._newest = total_of([own, *others], time.monotonic())
        except UnmeasuredError as error:
            self._unmeasured(str(error))
            return False
        return True

    def _word(self) -> Record:
        if self._counter is None:
            return {}
        try:
            if isinstance(self._counter, UnmeasuredError):
                raise self._counter
            now_mj = self._counter.millijoules()
        except UnmeasuredError as error:
            return {"cause": str(error), "host": socket.gethostname()}
        self._joules += joules_between(self._before_mj, now_mj)
        self._before_mj = now_mj
        return {"joules": self._joules}

    def _unmeasured(self, cause: str) -> None:
        if self._events is None or self._is_told:
            return
        self._is_told = True
        # A full disk takes the record.
        with contextlib.suppress(OSError):
            self._events.write("energy_unmeasured", cause=cause)


def members_on_device() -> int:
    """Return how many members of a sweep train on this rank's GPU at the same time."""
    return int(os.environ.get(MEMBERS_VARIABLE) or 1)


def build_energy_watch(
    mesh: Mesh, ranks: RankEnvironment, peers: Peers, events: EventWriter | None
) -> EnergyWatch | None:
    """Return the watch of this rank's GPU; None on a CPU, where `events` (rank 0's) says that there is
    nothing to read.
    """
    if mesh.device.type != "cuda":
        if events is not None:
            events.write("energy_unmeasured", cause="ranks train on CPUs: energy is read from GPUs alone")
        return None
    counter: Any = None
    # Of those that share a device, the first one reads it.
    if ranks.local_rank == mesh.device.index:
        try:
            if (number := members_on_device()) > 1:
                raise UnmeasuredError(f"{number} members of its sweep share each GPU")
            counter = NvmlCounter(mesh.device)
        except UnmeasuredError as error:
            counter = error
    return EnergyWatch(peers, counter, events)
