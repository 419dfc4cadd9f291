"""Bytes that several processes of one machine want: one puts them into shared memory, the others copy them.

Much cheaper than sending them through the loopback device. Each reader has a ring of slots in memory without
a name (memfd), which the others open through /proc; so nothing is left behind, whoever ends when. Where that
does not work (other machines, containers of their own, no memory) nobody uses it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.peers import Peers
from checkpointing.read_plan import Transfer

# One is filled while the other is copied.
NUM_SLOTS = 2
_PAGE = 4096
_TOKEN_BYTES = 16
_COUNTER_BYTES = 8
_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001


class Nearby:
    """The rings of all readers on this machine that this rank has to do with."""

    def __init__(
        self,
        rank: int,
        carried: Mapping[Transfer, int],
        rings: Mapping[int, _Ring],
        watched: Mapping[int, int],
    ) -> None:
        """`carried`: the transfers that go this way, each with its number among those of its reader;
        `watched`: a descriptor of each process that may be waited for.
        """
        self._rank = rank
        self._numbers = carried
        self._rings = rings
        self._watched = watched
        self._of_reader: dict[int, list[Transfer]] = {}
        for transfer in carried:
            self._of_reader.setdefault(transfer.reader, []).append(transfer)

    def __del__(self) -> None:
        # Not before: a thread that still reads must never use a descriptor that means something else by now.
        for descriptor in self._watched.values():
            os.close(descriptor)

    def carries(self, transfer: Transfer) -> bool:
        """Whether the transfer goes through shared memory."""
        return transfer in self._numbers

    def free_slot(self, transfer: Transfer, limit_s: float) -> Tensor:
        """Return the memory to read into, when all have copied what was there before. *The reader only.*"""
        number, ring = self._numbers[transfer], self._rings[self._rank]
        if number >= NUM_SLOTS:
            before = self._of_reader[self._rank][number - NUM_SLOTS]

            def late() -> list[int]:
                return [rank for rank in before.members if ring.num_copied(rank) <= number - NUM_SLOTS]

            self._wait(late, limit_s, f"{before.file}: not copied out of the shared memory")
        return ring.slot(number)[: transfer.num_bytes]

    def publish(self, transfer: Transfer) -> None:
        """Say that the bytes are in the slot. *The reader only.*"""
        self._rings[self._rank].publish(self._numbers[transfer])

    def published(self, transfer: Transfer, limit_s: float) -> Tensor:
        """Return the slot with the bytes, when they are there."""
        number, ring = self._numbers[transfer], self._rings[transfer.reader]

        def late() -> list[int]:
            return [] if ring.is_published(number) else [transfer.reader]

        self._wait(late, limit_s, f"{transfer.file}: not read")
        return ring.slot(number)[: transfer.num_bytes]

    def copied(self, transfer: Transfer) -> None:
        """Say that this rank needs the slot no more."""
        self._rings[transfer.reader].copied(self._rank, self._numbers[transfer])

    def _wait(self, late: Callable[[], list[int]], limit_s: float, what: str) -> None:
        """Wait until no rank is late any more; notice at once when one of those has ended."""
        deadline = time.monotonic() + limit_s
        pause = _FIRST_PAUSE_S
        while ranks := late():
            if time.monotonic() > deadline:
                raise CheckpointError(f"{what} within {limit_s:g} s by ranks {ranks}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            # Asked before whether they are late still: who copied or read it and then ended is not missed.
            ended = [rank for rank in ranks if _has_ended(self._watched[rank])]
            lost = [rank for rank in late() if rank in ended]
            if lost:
                raise CheckpointError(f"{what}: the process of ranks {lost} has ended")


def meet(transfers: Sequence[Transfer], peers: Peers, topic: str) -> Nearby:
    """Agree on the transfers that go through shared memory and open it. *Collective*.

    Those whose members are all on one machine do, if every rank can open what it needs; none otherwise.
    """
    shared = [transfer for transfer in transfers if len(transfer.members) > 1]
    if not shared:
        return Nearby(peers.rank, {}, {}, {})
    mine = [transfer for transfer in shared if transfer.reader == peers.rank]
    own: _Ring | None = None
    card: dict[str, Any] | None
    try:
        own = _Ring.made(max(it.num_bytes for it in mine), peers.world_size) if mine else None
        card = {"machine": _machine(), "process": os.getpid(), "ring": own.address if own else None}
    except OSError:
        card = None
    cards = peers.exchange(f"{topic}/nearby", card)
    carried = _carried(shared, cards)
    joined = [transfer for transfer in carried if peers.rank in transfer.members]
    rings = {} if own is None else {peers.rank: own}
    watched: dict[int, int] = {}
    try:
        for reader in {it.reader for it in joined} - {peers.rank}:
            rings[reader] = _Ring.opened(cards[reader]["ring"], peers.world_size)
        for rank in {member for it in joined for member in it.members}:
            watched[rank] = os.pidfd_open(cards[rank]["process"])
        is_open = True
    except OSError:
        is_open = False
    is_agreed = all(peers.exchange(f"{topic}/open", is_open))
    return Nearby(peers.rank, carried if is_agreed else {}, rings, watched)


def _carried(shared: Iterable[Transfer], cards: Sequence[Mapping[str, Any] | None]) -> dict[Transfer, int]:
    carried: dict[Transfer, int] = {}
    counts: dict[int, int] = {}
    for transfer in shared:
        machines = {card["machine"] if card else None for card in (cards[rank] for rank in transfer.members)}
        if len(machines) == 1 and None not in machines:
            number = counts.get(transfer.reader, 0)
            carried[transfer] = number
            counts[transfer.reader] = number + 1
    return carried


class _Ring:
    """Slots of equal size behind the counters that say which are filled and who has copied what.

    Counters go through the kernel (pread, pwrite), which orders them with the bytes on any processor.
    """

    def __init__(self, descriptor: int, num_bytes: int, world_size: int, address: Mapping[str, Any]) -> None:
        self.address = address
        self._descriptor = descriptor
        self._num_bytes = num_bytes
        self._begin = _slots_begin(world_size)
        size = self._begin + NUM_SLOTS * num_bytes
        # Mapped now, all pages at once: one by one they would cost as much as the copies.
        self._pages = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._memory = torch.frombuffer(self._pages, dtype=torch.uint8)

    @classmethod
    def made(cls, num_bytes: int, world_size: int) -> _Ring:
        """Take the memory of this rank's own ring. Raises OSError where there is none."""
        rounded = -(-num_bytes // _PAGE) * _PAGE
        descriptor = os.memfd_create("checkpoint-restore")
        try:
            # Really taken: memory that is missing must be missed here, not in the middle of a copy.
            os.posix_fallocate(descriptor, 0, _slots_begin(world_size) + NUM_SLOTS * rounded)
        except OSError:
            os.close(descriptor)
            raise
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.pwrite(descriptor, token, 0)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
        return cls(descriptor, rounded, world_size, {"path": path, "bytes": rounded, "token": token.hex()})

    @classmethod
    def opened(cls, address: Mapping[str, Any], world_size: int) -> _Ring:
        """Open another process's ring. Raises OSError where that is not possible, or it is another file."""
        descriptor = os.open(address["path"], os.O_RDWR)
        if os.pread(descriptor, _TOKEN_BYTES, 0).hex() != address["token"]:
            os.close(descriptor)
            raise OSError(f"{address['path']} is not the ring that was announced")
        return cls(descriptor, address["bytes"], world_size, address)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def slot(self, number: int) -> Tensor:
        """Return the memory of the slot for transfer `number`."""
        begin = self._begin + number % NUM_SLOTS * self._num_bytes
        return self._memory[begin : begin + self._num_bytes]

    def publish(self, number: int) -> None:
        self._set(number % NUM_SLOTS, number + 1)

    def is_published(self, number: int) -> bool:
        return self._get(number % NUM_SLOTS) == number + 1

    def copied(self, rank: int, number: int) -> None:
        self._set(NUM_SLOTS + rank, number + 1)

    def num_copied(self, rank: int) -> int:
        return self._get(NUM_SLOTS + rank)

    def _set(self, index: int, value: int) -> None:
        os.pwrite(self._descriptor, value.to_bytes(_COUNTER_BYTES, "little"), _counter(index))

    def _get(self, index: int) -> int:
        return int.from_bytes(os.pread(self._descriptor, _COUNTER_BYTES, _counter(index)), "little")


def _counter(index: int) -> int:
    return _TOKEN_BYTES + index * _COUNTER_BYTES


def _slots_begin(world_size: int) -> int:
    return -(-_counter(NUM_SLOTS + world_size) // _PAGE) * _PAGE


def _machine() -> str:
    """Return what tells apart machines, and containers that do not see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _has_ended(process: int) -> bool:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))
