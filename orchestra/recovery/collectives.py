"""Which ranks a stalled collective waits for, from what torch's flight recorder has of each rank. Pure.

A rank writes its records as JSON when its agent asks (`orchestra.train.watch.flight_recorder`). NCCL's own
watchdog dumps a pickle where recovery.collective_timeout_s passes first. That is read with an unpickler that
makes plain values only (dicts, lists, texts, numbers): it looks up no name, so that nothing in it can run.

A collective has the same sequence number on all ranks of its group: whoever has not come as far as the others
has not entered theirs. The fields are those of torch's FlightRecorder.hpp, version 2.10 (torch 2.13).
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from orchestra.sizes.units import first_few

# Ranks and stalls that are named.
_NAMED = 8
_MOST_STALLS = 4
_OVER = "completed"
_NCCL = "nccl"
_SAME_SHAPE = ("all_reduce", "allreduce", "broadcast")
# Of torch's names for types those that people write otherwise.
_DTYPES = {"Float": "fp32", "BFloat16": "bf16", "Half": "fp16", "Double": "fp64", "Byte": "uint8"}


@dataclass(frozen=True)
class Collective:
    """One collective as one rank recorded it."""

    backend: str
    # torch's name of the group: the same on all of its ranks.
    group: str
    operation: str
    sequence: int
    # Such as fp32[512, 128]; of several tensors the first one.
    shape: str
    is_over: bool
    # Only NCCL knows: whether the device has begun with it.
    has_started: bool


@dataclass(frozen=True)
class FlightRecord:
    """What one rank's collectives did last."""

    collectives: tuple[Collective, ...]
    # Ranks of groups by torch's names, and what the trainer calls them, such as dp; where they are known.
    ranks_of: Mapping[str, tuple[int, ...]]
    axes_of: Mapping[str, str]
    # Whether a message to or from one other rank has not ended.
    awaits_message: bool = False


class _PlainValues(pickle.Unpickler):
    """Reads a pickle of dicts, lists, texts and numbers; refuses whatever names a class or a function."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"the record names {module}.{name}, and may hold plain values only")

    def persistent_load(self, _: Any) -> NoReturn:
        raise ValueError("the record refers to something outside of it")


def parsed(content: bytes) -> FlightRecord:
    """Return a rank's record: JSON, or a pickle of NCCL's watchdog. Raises ValueError for anything else."""
    try:
        record = json.loads(content) if content[:1] == b"{" else _PlainValues(io.BytesIO(content)).load()
        entries = [entry for entry in record["entries"] if not entry.get("is_p2p")]
        messages = [_collective(entry) for entry in record["entries"] if entry.get("is_p2p")]
        groups, configs = record.get("groups", {}), record.get("pg_config", {})
        ranks_of = {name: _ranks(config.get("ranks")) for name, config in configs.items()}
        ranks_of |= {name: _ranks(group["ranks"]) for name, group in groups.items()}
        axes_of = {name: str(group["axes"]) for name, group in groups.items()}
        collectives = tuple(map(_collective, entries))
    except ValueError:
        raise
    # What a damaged pickle raises: the unpickler's documentation names no end of it.
    except Exception as error:
        raise ValueError(f"not a flight record: {type(error).__name__}: {error}") from error
    known = {name: ranks for name, ranks in ranks_of.items() if ranks}
    return FlightRecord(collectives, known, axes_of, any(not it.is_over for it in messages))


def _ranks(value: Any) -> tuple[int, ...]:
    """Return the ranks of a group, which torch writes as the text of a list."""
    ranks = json.loads(value) if isinstance(value, str) else value or ()
    return tuple(int(rank) for rank in ranks)


def _collective(entry: Mapping[str, Any]) -> Collective:
    backend, _, operation = str(entry["profiling_name"]).partition(":")
    state = str(entry["state"])
    # gloo has no events on a device: its collectives stay "scheduled" until they are retired. NCCL retires
    # one that has timed out as well.
    is_over = state == _OVER or (bool(entry.get("retired")) and backend != _NCCL)
    sizes, dtypes = entry.get("input_sizes") or [], entry.get("input_dtypes") or []
    shape = ""
    if sizes and dtypes:
        shape = f"{_DTYPES.get(dtypes[0], str(dtypes[0]).lower())}{list(sizes[0])}"
        shape += f" and {len(sizes) - 1} more" if len(sizes) > 1 else ""
    sequence, group = int(entry["collective_seq_id"]), str(entry["process_group"][0])
    return Collective(backend, group, operation, sequence, shape, is_over, state == "started")


@dataclass(frozen=True)
class StalledCollective:
    """A collective that some ranks of its group wait in."""

    # As one of the waiting ranks recorded it.
    collective: Collective
    # The trainer's word for the group, else torch's, and how many ranks it has.
    group: str
    size: int
    waiting: tuple[int, ...]
    # Ranks that have not entered it, each with the sequence number of its last one in this group.
    missing: tuple[tuple[int, int], ...]
    # Ranks of the group that left no record: stopped, dead, or in the interpreter's lock.
    unknown: tuple[int, ...]
    # What others call it that have entered it with another operation or shape: torch matches by number alone.
    others: tuple[tuple[int, Collective], ...]
    # NCCL only: ranks whose device has not begun with it, because it still works on what came before.
    queued: tuple[int, ...]

    def words(self) -> str:
        """Say who waits for whom, in a sentence."""
        shape = f", {self.collective.shape}" if self.collective.shape else ""
        place = f"of group {self.group} ({self.size} ranks{shape})"
        what = f"{self.collective.operation} {self.collective.sequence} {place}"
        waits = f"{_named(self.waiting)} {_verb(self.waiting, 'waits', 'wait')} there"
        if self.missing:
            ranks = [rank for rank, _ in self.missing]
            last = ", ".join(sorted({str(sequence or "none") for _, sequence in self.missing}))
            has = _verb(ranks, "has", "have")
            told = f"{_named(ranks)} {has} not entered {what}, the last one was {last}; {waits}"
        elif self.others:
            rank, other = self.others[0]
            theirs = f"{other.operation} {other.sequence} ({other.shape or 'no tensor'})"
            alike = [each for each in self.waiting if each not in dict(self.others)]
            told = (
                f"{_named(alike)} {_verb(alike, 'is', 'are')} in {what}, but rank {rank} is in its {theirs}"
            )
        elif self.unknown:
            told = f"{what}: {waits}"
        else:
            told = f"all ranks have entered {what}, and it does not end: the network, or a device"
        if self.queued:
            told += f"; not begun by the device of {_named(self.queued)}"
        return told + (f"; {_named(self.unknown)} left no record" if self.unknown else "")


def _named(ranks: Sequence[int]) -> str:
    return f"{_verb(ranks, 'rank', 'ranks')} {first_few(sorted(ranks), _NAMED)}"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def stalled_collectives(records: Mapping[int, FlightRecord], world_size: int) -> list[StalledCollective]:
    """Return the collectives that do not end, first those that wait for a rank that waits in none itself.

    `records` by rank; of those among the `world_size` that are missing nothing is known.
    """
    stalls = []
    for backend, group in sorted({(it.backend, it.group) for it in _all(records.values())}):
        if (stall := _stall(records, backend, group, world_size)) is not None:
            stalls.append(stall)
    waiting = {rank for stall in stalls for rank in stall.waiting}

    def order(stall: StalledCollective) -> tuple[bool, bool, int]:
        is_root = any(rank not in waiting for rank, _ in stall.missing)
        return not is_root, not (stall.missing or stall.others or stall.unknown), -len(stall.waiting)

    return sorted(stalls, key=order)[:_MOST_STALLS]


def awaited(records: Mapping[int, FlightRecord], world_size: int) -> frozenset[int]:
    """Return the ranks that others wait for in a collective and that wait for nobody themselves: those whose
    record says so, else those that left none. Empty where the records do not tell. The arguments are those of
    `stalled_collectives`.
    """
    stalls = stalled_collectives(records, world_size)
    # Where the devices of others have begun, one that has not still works on what came before.
    behind = {rank for stall in stalls if len(stall.queued) < len(stall.waiting) for rank in stall.queued}
    waiting = {rank for stall in stalls for rank in stall.waiting if rank not in stall.queued}
    waiting |= {rank for rank, record in records.items() if record.awaits_message}
    missing = {rank for stall in stalls for rank, _ in stall.missing}
    unknown = {rank for stall in stalls for rank in stall.unknown}
    return frozenset((missing | behind) - waiting) or frozenset(unknown)


def _all(records: Iterable[FlightRecord]) -> Iterable[Collective]:
    return (collective for record in records for collective in record.collectives)


def _stall(
    records: Mapping[int, FlightRecord], backend: str, group: str, world_size: int
) -> StalledCollective | None:
    own = {
        rank: [it for it in record.collectives if (it.backend, it.group) == (backend, group)]
        for rank, record in records.items()
    }
    pending = {rank: [it for it in found if not it.is_over] for rank, found in own.items()}
    open_ones = [it for found in pending.values() for it in found]
    if not open_ones:
        return None
    sequence = min(it.sequence for it in open_ones)
    # Of several that were launched as one, one that is open.
    entered = {
        rank: it
        for rank, found in own.items()
        for it in sorted(found, key=lambda it: not it.is_over)
        if it.sequence == sequence
    }
    waiting = tuple(rank for rank, it in entered.items() if not it.is_over)
    first = entered[waiting[0]]
    members = _members(records, group, own, world_size)
    last = {rank: max((it.sequence for it in own[rank]), default=0) for rank in members if rank in records}
    others = [(rank, it) for rank, it in entered.items() if _differs(it, first)]
    axes = [record.axes_of[group] for record in records.values() if group in record.axes_of]
    return StalledCollective(
        collective=first,
        group=axes[0] if axes else group,
        size=len(members),
        waiting=waiting,
        missing=tuple((rank, done) for rank, done in last.items() if done < sequence),
        unknown=tuple(rank for rank in members if rank not in records),
        others=tuple(others),
        queued=tuple(rank for rank in waiting if backend == _NCCL and not entered[rank].has_started),
    )


def _differs(it: Collective, first: Collective) -> bool:
    # Others may have another shape on each rank, as all_to_all and gather have.
    is_alike = it.shape == first.shape or it.operation not in _SAME_SHAPE
    return it.operation != first.operation or not is_alike


def _members(
    records: Mapping[int, FlightRecord], group: str, own: Mapping[int, list[Collective]], world_size: int
) -> tuple[int, ...]:
    for record in records.values():
        if ranks := record.ranks_of.get(group):
            return tuple(sorted(ranks))
    # torch calls the group of all ranks 0.
    return tuple(range(world_size)) if group == "0" else tuple(rank for rank, found in own.items() if found)
