"""Copies of one rank's state in its node's memory, so that a lost process or node costs a step or two.

Every `recovery.memory_copy_every_steps` steps a thread copies masters, moments and generators while the next
step's forward and backward pass run: these change nowhere but in the update, which waits for the copy
(`let_change`). The checksum and the commit come after that and hold up nobody. Copies are brought to a
neighbour by the node's agent, which knows nothing of what is in them. Restoring is a vote: all ranks have an
intact copy of the same step of the same attempt, or none uses its own.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.peers import Peers
from checkpointing.shards import Shard
from orchestra.parallel.mesh import Mesh
from orchestra.topology import Layout
from orchestra.train import copy_memory
from orchestra.train.copy_memory import Room
from orchestra.train.copy_slots import NUM_SLOTS, Slot, Table, UnusableCopyError, slots_of, table_of
from orchestra.train.state import TensorState

# How the event `restored` says that no storage was read.
SOURCE = "memory"
# What the agent listens at, to hear of a new copy.
BELL = "bell"


@dataclass(frozen=True)
class CopySetting:
    """Whose copies they are. `folder` is this node's; None where nobody gave the rank one. `run` says whose
    state it is and `facts` what of the configuration decides its meaning.
    """

    folder: Path | None
    every_steps: int
    last_step: int
    attempt: int
    run: str
    facts: Mapping[str, Any]
    mesh: Mesh
    peers: Peers
    local_world_size: int
    tell: Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Restored:
    """What was restored: rank 0's document of the state that is no tensor, who wrote it, and what it took."""

    document: Mapping[str, Any]
    attempt: int
    num_bytes: int
    seconds: float


class MemoryCopies:
    """One rank's copies. All methods but `is_due`, `let_change` and `close` are *collective*."""

    def __init__(self, setting: CopySetting, state: TensorState) -> None:
        self._setting = setting
        self._state = state
        self._is_on = False
        self._table: Table | None = None
        self._sources: list[Tensor] = []
        # With the part of its memory for each source.
        self._slots: list[tuple[Slot, list[Tensor]]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="memory copies")
        self._under_way: Future[None] | None = None
        self._is_copied = threading.Event()
        self._device = copy_memory.DeviceSide(setting.mesh.device)
        self._bell: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether the state behind `step` is to be copied. Never the last one's: it gets a checkpoint, and an
        attempt that began behind it would write none.
        """
        return self._is_on and step % self._setting.every_steps == 0 and step < self._setting.last_step

    def prepare(self, begin: int) -> None:
        """Forget copies of steps after `begin`, and take the memory; where there is none, copy nothing."""
        shards = self._state.held()
        table = table_of(shards)
        problem = self._room_problem(table)
        if problem is None:
            problem = self._agreed("taken", self._taken(begin, shards, table))
        if problem is not None:
            if self._setting.peers.is_coordinator:
                self._setting.tell("memory_copies_off", {"cause": problem})
            return
        self._table, self._sources, self._is_on = table, _filled(it.tensor for it in shards), True
        self._bell = _opened_bell(self._setting.folder)
        if self._setting.peers.is_coordinator:
            every = self._setting.every_steps
            evidence = {"every_steps": every, "bytes_per_rank": table.num_bytes, "copies": NUM_SLOTS}
            self._setting.tell("memory_copies_on", evidence)

    def take(self, step: int, document: Mapping[str, Any]) -> None:
        """Begin to copy the state behind `step`. Waits for the copy before it, which has ended long ago."""
        self._finish()
        # The generators are copied now; all else are the tensors of the training themselves.
        self._state.held()
        self._is_copied = threading.Event()
        slot, targets = self._slots[0]
        self._slots = [*self._slots[1:], self._slots[0]]
        facts = {**self._identity(), "step": step, "document": dict(document)}
        ready = self._device.ready()
        self._under_way = self._pool.submit(self._copy, slot, targets, facts, ready, self._is_copied)

    def let_change(self) -> None:
        """Wait until the state may change: the copy under way has read it. On a GPU its stream waits."""
        if self._under_way is not None:
            self._is_copied.wait()
            self._device.hold_back()

    def close(self) -> None:
        """Wait for the copy under way and let go of the memory; what was copied stays."""
        self._finish()
        self._pool.shutdown()
        self._device.close()
        if self._bell is not None:
            os.close(self._bell)
            self._bell = None

    def restore(self, step: int) -> Restored | str:
        """Fill the state from the copies of `step`; where any rank cannot, change nothing and return why.

        Raises CheckpointError where ranks are missing.
        """
        began = time.monotonic()
        shards = self._state.held()
        table = table_of(shards)
        slot, word = self._examined(step, table)
        words = self._setting.peers.exchange("copies/found", word)
        reason = _disagreement(words)
        if reason is not None:
            return reason
        assert slot is not None
        with torch.no_grad():
            for shard, view in zip(shards, slot.views(shards, table), strict=True):
                shard.tensor.detach().copy_(view)
        document = words[0]["document"]
        num_bytes = sum(it["bytes"] for it in words)
        return Restored(document, words[0]["attempt"], num_bytes, time.monotonic() - began)

    # Making copies.

    def _identity(self) -> dict[str, Any]:
        setting = self._setting
        return {
            "run": setting.run,
            "attempt": setting.attempt,
            "rank": setting.mesh.rank,
            "world_size": setting.mesh.world_size,
            "layout": asdict(setting.mesh.layout),
            "facts": dict(setting.facts),
        }

    def _copy(
        self,
        slot: Slot,
        targets: Sequence[Tensor],
        facts: Mapping[str, Any],
        ready: object,
        is_copied: threading.Event,
    ) -> None:
        """Copy, commit, and tell the agent; in the thread. A failure costs this copy and no training."""
        assert self._table is not None
        try:
            try:
                slot.remove_copy()
                self._device.copy(targets, self._sources, ready)
            finally:
                is_copied.set()
            self._device.await_copied()
            slot.commit(facts, self._table)
            self._ring()
        except Exception as error:  # noqa: BLE001  the event is how it is told
            self._setting.tell("memory_copy_failed", {"step": facts["step"], "message": str(error)})

    def _finish(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _ring(self) -> None:
        # Nobody may listen, or be too slow to: the agent looks now and then by itself.
        if self._bell is not None:
            with contextlib.suppress(OSError):
                os.write(self._bell, b".")

    # Making ready.

    def _room_problem(self, table: Table) -> str | None:
        setting = self._setting
        mine = copy_memory.room(setting.folder, table.num_bytes * NUM_SLOTS)
        values = setting.peers.exchange("copies/room", asdict(mine))
        return copy_memory.shortage([Room(**value) for value in values], setting.local_world_size)

    def _taken(self, begin: int, shards: Sequence[Shard], table: Table) -> str | None:
        """Take this rank's memory; return why it could not."""
        assert self._setting.folder is not None
        try:
            slots = slots_of(self._setting.folder, self._setting.mesh.rank)
            for slot in slots:
                if not _is_behind(slot, begin, table):
                    slot.remove_copy()
                slot.take(table.num_bytes)
                self._device.pin(slot.content)
        except (OSError, RuntimeError) as error:
            return f"rank {self._setting.mesh.rank} cannot take memory for its copies: {error}"
        # Those without a copy are written first.
        self._slots = [(slot, _filled(slot.views(shards, table))) for slot in sorted(slots, key=_step)]
        return None

    def _agreed(self, topic: str, problem: str | None) -> str | None:
        """Return the first rank's problem, on all ranks; None where none has any."""
        problems = self._setting.peers.exchange(f"copies/{topic}", problem)
        return next((it for it in problems if it is not None), None)

    # Restoring.

    def _examined(self, step: int, table: Table) -> tuple[Slot | None, dict[str, Any]]:
        """Return this rank's copy of `step`, and its word on it for the other ranks."""
        setting = self._setting
        try:
            if setting.folder is None:
                raise UnusableCopyError("nobody gave this rank a folder of copies")
            slot, head = _found(slots_of(setting.folder, setting.mesh.rank), step)
            mine = self._identity()
            for key in ("run", "rank", "world_size", "layout", "facts"):
                if head.get(key) != mine[key]:
                    raise UnusableCopyError(f"its {key} is {head.get(key)}, not {mine[key]}")
            slot.check(table)
        except (UnusableCopyError, OSError) as error:
            return None, {"problem": f"rank {setting.mesh.rank}'s copy of step {step}: {error}"}
        document = head.get("document") if setting.peers.is_coordinator else None
        word = {"problem": None, "attempt": head.get("attempt"), "bytes": table.num_bytes}
        return slot, {**word, "document": document}


def evidence(restored: Restored, layout: Layout) -> dict[str, Any]:
    """Return what the event `restored` tells of a restore from memory."""
    return {
        "source": SOURCE,
        "step": restored.document["step"],
        "seconds": restored.seconds,
        "bytes_read": restored.num_bytes,
        "skipped": [],
        "layout_saved": asdict(layout),
        "layout": asdict(layout),
        "generation": restored.attempt,
        "changes": {},
    }


def _found(slots: Sequence[Slot], step: int) -> tuple[Slot, dict[str, Any]]:
    """Return the newest attempt's copy of `step` among a rank's slots. Raises UnusableCopyError."""
    problems = []
    for slot in reversed(slots):
        try:
            head = slot.head()
        except UnusableCopyError as error:
            problems.append(str(error))
            continue
        if head.get("step") == step:
            return slot, head
    damaged = next((it for it in problems if "damaged" in it), None)
    raise UnusableCopyError(damaged or "it is not there")


def _disagreement(words: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why the ranks cannot all use their copies; None where they can."""
    problem = next((it["problem"] for it in words if it["problem"] is not None), None)
    if problem is not None:
        return str(problem)
    attempts = {it["attempt"] for it in words}
    if len(attempts) > 1:
        return f"the ranks' copies are of different attempts: {sorted(attempts, key=str)}"
    return None if words[0]["document"] else "rank 0's copy says nothing of where the run stood"


def _filled(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return those that have elements, as plain tensors."""
    return [tensor.detach() for tensor in tensors if tensor.numel()]


def _step(slot: Slot) -> int:
    with contextlib.suppress(UnusableCopyError):
        return int(slot.head().get("step", -1))
    return -1


def _is_behind(slot: Slot, begin: int, table: Table) -> bool:
    """Whether a slot's copy may stay: of a step that the attempt has gone on from, and as large as now."""
    try:
        return _step(slot) <= begin and slot.head().get("bytes") == table.num_bytes
    except UnusableCopyError:
        return False


def _opened_bell(folder: Path | None) -> int | None:
    if folder is None:
        return None
    try:
        return os.open(folder / BELL, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
