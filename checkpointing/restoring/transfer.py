"""Moves the bytes of a restore: read ahead, pass on, put in place, with a bounded number of chunks in memory.

Where a chunk fills a contiguous part of a shard, it is read or received straight into the shard's memory; all
else goes through buffers that are used again. It knows neither storage (it is handed a function that reads)
nor what a checkpoint is, and it never looks at the bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.errors import CheckpointError, StorageError
from checkpointing.planning.read_plan import Transfer
from checkpointing.restoring.nearby import Nearby
from checkpointing.restoring.placement import Placement
from checkpointing.restoring.routes import Routes

# Fills the memory with a transfer's bytes. It never raises: it remembers what went wrong.
Read = Callable[[Transfer, memoryview], None]

# Transfers on their way between ranks, and transfers that are read before it is their turn.
_NUM_UNDER_WAY = 3
_NUM_AHEAD = 3
_NUM_READING_THREADS = 2


@dataclass
class _Arrival:
    """A transfer on this rank: where its bytes are, or will be."""

    transfer: Transfer
    memory: Tensor
    buffer: Tensor | None
    works: Sequence[dist.Work] = ()


class Mover:
    """Carries out this rank's part of a list of transfers."""

    def __init__(
        self,
        transfers: Sequence[Transfer],
        placement: Placement,
        routes: Routes,
        nearby: Nearby,
        rank: int,
        device: torch.device,
        limit_s: float,
    ) -> None:
        """`device` is where bytes are passed on; `limit_s` bounds each wait for one transfer."""
        self._placement = placement
        self._routes = routes
        self._nearby = nearby
        self._rank = rank
        self._device = device
        self._limit_s = limit_s
        self._mine = [transfer for transfer in transfers if rank in transfer.members]
        largest = max((transfer.num_bytes for transfer in self._mine), default=0)
        self._host = _Buffers(largest, torch.device("cpu"), pinned=device.type == "cuda")
        self._passing = self._host if device.type == "cpu" else _Buffers(largest, device)

    def move(self, read: Read, after_read: Callable[[int], None]) -> None:
        """Bring all wanted bytes to this rank's shards. *Collective*.

        `after_read` is called with the number of transfers that this rank has read so far. Raises
        StorageError where reading hangs, CheckpointError where another rank is gone.
        """
        to_read = [transfer for transfer in self._mine if transfer.reader == self._rank]
        ahead = _ReadAhead(to_read, lambda transfer: self._read(transfer, read))
        try:
            with torch.no_grad():
                self._pass_on(ahead, after_read)
        finally:
            ahead.stop()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _pass_on(self, ahead: _ReadAhead, after_read: Callable[[int], None]) -> None:
        under_way: deque[_Arrival] = deque()
        num_read = 0
        for transfer in self._mine:
            if transfer.reader == self._rank:
                arrival = ahead.next(self._limit_s)
                num_read += 1
                after_read(num_read)
            elif self._nearby.carries(transfer):
                arrival = _Arrival(transfer, self._nearby.published(transfer, self._limit_s), None)
            else:
                arrival = self._arrival(transfer, self._passing, self._device)
            if self._nearby.carries(transfer):
                # At once: the reader fills the memory again when all have copied it.
                self._finish(arrival, ahead)
                continue
            arrival.works = self._routes.post(transfer, arrival.memory)
            under_way.append(arrival)
            if len(under_way) > _NUM_UNDER_WAY:
                self._finish(under_way.popleft(), ahead)
        while under_way:
            self._finish(under_way.popleft(), ahead)

    def _arrival(self, transfer: Transfer, buffers: _Buffers, device: torch.device) -> _Arrival:
        own = self._placement.own_memory(transfer, device)
        if own is not None:
            return _Arrival(transfer, own, None)
        buffer = buffers.take()
        return _Arrival(transfer, buffer[: transfer.num_bytes], buffer)

    def _read(self, transfer: Transfer, read: Read) -> _Arrival:
        """Read a transfer to where it is passed on from. Called by the reading threads."""
        if self._nearby.carries(transfer):
            slot = self._nearby.free_slot(transfer, self._limit_s)
            read(transfer, slot.numpy().data)
            self._nearby.publish(transfer)
            return _Arrival(transfer, slot, None)
        host = self._arrival(transfer, self._host, torch.device("cpu"))
        read(transfer, host.memory.numpy().data)
        if self._device.type == "cpu" or len(transfer.members) == 1:
            return host
        with torch.cuda.device(self._device):
            arrival = self._arrival(transfer, self._passing, self._device)
            arrival.memory.copy_(host.memory)
            if host.buffer is not None:
                self._host.give(host.buffer)
        return arrival

    def _finish(self, arrival: _Arrival, ahead: _ReadAhead) -> None:
        for work in arrival.works:
            _await(work, arrival.transfer, self._limit_s)
        self._placement.put(arrival.transfer, arrival.memory)
        if self._nearby.carries(arrival.transfer):
            self._nearby.copied(arrival.transfer)
        if arrival.buffer is not None:
            buffers = self._host if arrival.buffer.device.type == "cpu" else self._passing
            buffers.give(arrival.buffer)
        if arrival.transfer.reader == self._rank:
            ahead.release()


class _ReadAhead:
    """Reads transfers in their order, in threads, a bounded number of them before they are asked for."""

    def __init__(self, transfers: Sequence[Transfer], read: Callable[[Transfer], _Arrival]) -> None:
        self._transfers = transfers
        self._read = read
        self._results: list[Future[_Arrival]] = [Future() for _ in transfers]
        self._num_begun = 0
        self._num_taken = 0
        self._is_stopped = False
        self._lock = threading.Lock()
        # Those under way between ranks still hold their buffers.
        self._slots = threading.Semaphore(_NUM_UNDER_WAY + _NUM_AHEAD)
        for _ in range(min(_NUM_READING_THREADS, len(transfers))):
            # Daemons: a storage that hangs must not keep the process from ending.
            threading.Thread(target=self._work, name="read-ahead", daemon=True).start()

    def next(self, limit_s: float) -> _Arrival:
        """Return the next transfer as soon as it is read."""
        result = self._results[self._num_taken]
        transfer = self._transfers[self._num_taken]
        self._num_taken += 1
        try:
            return result.result(limit_s)
        except TimeoutError as error:
            raise StorageError(
                f"{transfer.file}: {transfer.num_bytes} bytes could not be read within {limit_s:g} s"
            ) from error

    def release(self) -> None:
        """Say that one of those taken is through."""
        self._slots.release()

    def stop(self) -> None:
        """Begin no further reads."""
        self._is_stopped = True
        self._slots.release(_NUM_READING_THREADS)

    def _work(self) -> None:
        while True:
            self._slots.acquire()
            with self._lock:
                index = self._num_begun
                if self._is_stopped or index == len(self._transfers):
                    self._slots.release()
                    return
                self._num_begun += 1
            try:
                self._results[index].set_result(self._read(self._transfers[index]))
            except BaseException as error:  # noqa: BLE001  raised where the transfer is asked for
                self._results[index].set_exception(error)


class _Buffers:
    """Memory for transfers, taken once and used again. Safe to use from several threads."""

    def __init__(self, num_bytes: int, device: torch.device, *, pinned: bool = False) -> None:
        self._num_bytes = num_bytes
        self._device = device
        self._pinned = pinned
        self._free: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._lock = threading.Lock()

    def take(self) -> Tensor:
        with self._lock:
            found = self._free.pop() if self._free else None
        if found is None:
            return torch.empty(
                self._num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned
            )
        buffer, copied = found
        if copied is not None:
            copied.synchronize()
        return buffer

    def give(self, buffer: Tensor) -> None:
        copied = None
        if self._device.type == "cuda" or self._pinned:
            # Copies out of it may still be on their way.
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        with self._lock:
            self._free.append((buffer, copied))


def _await(work: dist.Work, transfer: Transfer, limit_s: float) -> None:
    try:
        work.wait(timedelta(seconds=limit_s))
    except (RuntimeError, dist.DistError) as error:
        raise CheckpointError(
            f"{transfer.file}: what rank {transfer.reader} reads did not get through to all of ranks "
            f"{list(transfer.members)}, one of them may have ended: {error}"
        ) from error
