"""Moves the bytes of a restore: read ahead, pass on, put in place, with a bounded number of chunks in memory.

Where a chunk fills a contiguous part of a shard, it is read or received straight into the shard's memory; all
else goes through buffers that are used again. The caller hands in the function that reads; `restore` does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.checkpoint_errors import CheckpointError, StorageError
from checkpointing.plans import NamedChunk, Transfer, busiest_sets
from checkpointing.shards import Shard, as_bytes, torch_dtype


class Placement:
    """Where the bytes of a transfer belong in this rank's shards."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        shared = _sharing_memory(shards)
        self._of_name: dict[str, list[tuple[Shard, bool]]] = {}
        for index, shard in enumerate(shards):
            if shard.tensor.numel():
                self._of_name.setdefault(shard.name, []).append((shard, index not in shared))

    def own_memory(self, transfer: Transfer, device: torch.device) -> Tensor | None:
        """Return the part of a shard that a transfer fills exactly, as flat bytes; None where there is none.

        Only on `device`, and only memory that no other shard has: two transfers must not write it at once.
        """
        if len(transfer.parts) > 1:
            return None
        part = transfer.parts[0]
        for shard, is_unshared in self._of_name.get(part.name, ()):
            if is_unshared and shard.tensor.device == device:
                place = _filled_by(part, shard)
                if place is not None:
                    return as_bytes(place)
        return None

    def put(self, transfer: Transfer, memory: Tensor) -> None:
        """Copy what this rank wants of a transfer, whose bytes `memory` holds, to where it is not yet."""
        for part in transfer.parts:
            begin = part.chunk.begin - transfer.begin
            content = memory[begin : begin + part.chunk.num_bytes].view(torch_dtype(part.dtype))
            source = content.view(part.chunk.box.shape)
            for shard, _ in self._of_name.get(part.name, ()):
                shared = part.chunk.box.overlap(shard.box)
                if shared is None:
                    continue
                target = shard.tensor.detach()[shared.within(shard.box)]
                if target.data_ptr() != source.data_ptr():
                    # From pinned or device memory it goes on while the next bytes are on their way; whoever
                    # uses the memory again waits for this device alone.
                    is_here = not target.is_cuda or target.device.index == torch.cuda.current_device()
                    target.copy_(source[shared.within(part.chunk.box)], non_blocking=is_here)


def _filled_by(part: NamedChunk, shard: Shard) -> Tensor | None:
    if part.chunk.box.overlap(shard.box) != part.chunk.box:
        return None
    place = shard.tensor.detach()[part.chunk.box.within(shard.box)]
    return place if place.is_contiguous() else None


def _sharing_memory(shards: Sequence[Shard]) -> set[int]:
    """Return the indices of shards of whose memory another shard may have a part (tied tensors)."""
    spans = []
    for index, shard in enumerate(shards):
        tensor = shard.tensor
        if tensor.numel():
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            begin = tensor.data_ptr()
            spans.append((str(tensor.device), begin, begin + (last + 1) * tensor.element_size(), index))
    shared: set[int] = set()
    furthest = ("", 0, 0, 0)
    for span in sorted(spans):
        device, begin, end, index = span
        if device == furthest[0] and begin < furthest[2]:
            shared |= {index, furthest[3]}
        if device != furthest[0] or end > furthest[2]:
            furthest = span
    return shared


# Messages between the same two ranks differ in their tag (gloo; NCCL keeps their order by itself).
_NUM_TAGS = 1 << 16


class Routes:
    """The ways for bytes between ranks: one broadcast for all, one for a set of ranks, or straight to each.

    All ranks make it from the same list of transfers, and post in the same order.
    """

    def __init__(self, transfers: Iterable[Transfer], group: dist.ProcessGroup | None) -> None:
        """Make the process groups that are worth it. *Collective*. No `group`: there is no traffic."""
        self._group = group
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        if group is None:
            return
        self._rank = dist.get_rank(group)
        self._everyone = tuple(range(dist.get_world_size(group)))
        if group is not dist.group.WORLD:
            # Some of the job's ranks may not come here, and a group made without them is called by the number
            # of groups that each rank has by now, which no two need agree on.
            return
        for members in busiest_sets(transfers, len(self._everyone)):
            made = dist.new_group([dist.get_global_rank(group, rank) for rank in members])
            if self._rank in members:
                self._groups[members] = made

    def post(self, transfer: Transfer, memory: Tensor) -> Sequence[dist.Work]:
        """Start to bring `memory` (contiguous uint8) from the reader to all members; only members call it."""
        if len(transfer.members) == 1:
            return ()
        assert self._group is not None
        if transfer.members == self._everyone:
            group, source = self._group, transfer.reader
        elif transfer.members in self._groups:
            group, source = self._groups[transfer.members], transfer.members.index(transfer.reader)
        else:
            return self._post_one_by_one(transfer, memory)
        return _works(dist.broadcast(memory, group=group, group_src=source, async_op=True))

    def _post_one_by_one(self, transfer: Transfer, memory: Tensor) -> Sequence[dist.Work]:
        tag = transfer.begin % _NUM_TAGS
        if transfer.reader != self._rank:
            return _works(dist.irecv(memory, group=self._group, group_src=transfer.reader, tag=tag))
        receivers = [rank for rank in transfer.members if rank != self._rank]
        works = [dist.isend(memory, group=self._group, group_dst=rank, tag=tag) for rank in receivers]
        return _works(*works)

    def close(self) -> None:
        """Give up the process groups that were made, when all ranks are through."""
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups = {}


def _works(*works: dist.Work | None) -> Sequence[dist.Work]:
    return [work for work in works if work is not None]


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
        rank: int,
        device: torch.device,
        limit_s: float,
    ) -> None:
        """`device` is where bytes are passed on; `limit_s` bounds each wait for one transfer."""
        self._placement = placement
        self._routes = routes
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
            else:
                arrival = self._arrival(transfer, self._passing, self._device)
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
            free = self._free.pop() if self._free else None
        if free is None:
            return torch.empty(
                self._num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pinned
            )
        buffer, copied = free
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
