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
import socket
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
from orchestra.sizes.topology import Layout
from orchestra.sizes.units import binary
from orchestra.train.copy_files import (
    NUM_SLOTS,
    Slot,
    Table,
    UnusableCopyError,
    folder_bytes,
    slots_of,
    table_of,
)
from orchestra.train.memory import host_memory
from orchestra.train.state import TensorState

# Memory for copies: whether a node has room for them, and the way there from a GPU. It names no files.
#
# From a GPU the tensors are copied by a stream of its own straight into the files' memory, which is
# page-locked for that; the stream of the training waits for it before the next update, the host for neither.


@dataclass(frozen=True)
class Room:
    """What one rank wants for its copies (bytes), and what it sees free on its node; why it sees nothing."""

    host: str
    wanted: int
    free: int = 0
    problem: str | None = None


def room(folder: Path | None, wanted: int) -> Room:
    """Return what this node has room for, with what lies in its folder already. *Any rank*; takes nothing."""
    host = socket.gethostname()
    if folder is None:
        return Room(host, wanted, problem="nobody gave this rank a folder in memory for its copies")
    try:
        found = os.statvfs(folder)
        taken = folder_bytes(folder)
    except OSError as error:
        return Room(host, wanted, problem=f"{folder}: {error.strerror}")
    free = found.f_bavail * found.f_frsize
    available = host_memory.available_host_bytes()
    return Room(host, wanted, (free if available is None else min(free, available)) + taken)


def shortage(rooms: Sequence[Room], ranks_per_node: int) -> str | None:
    """Return why the copies do not fit on every node, with those of its neighbour; None where they do.

    `rooms` by rank: a node has consecutive ones, and keeps the copies of the node before it.
    """
    problem = next((it for it in rooms if it.problem is not None), None)
    if problem is not None:
        return f"{problem.host}: {problem.problem}"
    nodes = [rooms[first : first + ranks_per_node] for first in range(0, len(rooms), ranks_per_node)]
    wanted = [sum(it.wanted for it in node) for node in nodes]
    for number, node in enumerate(nodes):
        kept = wanted[number - 1] if len(nodes) > 1 else 0
        free = min(it.free for it in node)
        if wanted[number] + kept > free:
            return (
                f"{node[0].host} has {binary(free)} free for copies in memory, and its own take "
                f"{binary(wanted[number])}, its neighbour's {binary(kept)}; use more nodes or a higher stage "
                "of ZeRO, or recovery.memory_copy_every_steps=null"
            )
    return None


class DeviceSide:
    """The copy's way from a device; for a CPU a plain copy."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        self._pinned: list[int] = []

    def pin(self, memory: memoryview) -> None:
        """Page-lock memory for the copies to come. Raises RuntimeError where CUDA refuses."""
        if self._stream is None:
            return
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        code = _runtime().cudaHostRegister(address, len(memory), 0)
        if int(code) != 0:
            raise RuntimeError(f"CUDA cannot page-lock {binary(len(memory))} (code {int(code)})")
        self._pinned.append(address)

    def ready(self) -> object:
        """Mark now, on the training's stream, as the moment whose state is to be copied."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], ready: object) -> None:
        """Copy tensors; on a GPU only start to. In one call: the interpreter's lock is asked for once."""
        with torch.no_grad():
            if self._stream is None:
                torch._foreach_copy_(list(targets), list(sources))
                return
            with torch.cuda.stream(self._stream):
                assert isinstance(ready, torch.cuda.Event)
                self._stream.wait_event(ready)
                torch._foreach_copy_(list(targets), list(sources), non_blocking=True)
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record()

    def hold_back(self) -> None:
        """Let the training's stream wait for the copy that was started."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def await_copied(self) -> None:
        """Wait until the bytes are there."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Give the pages back."""
        for address in self._pinned:
            _runtime().cudaHostUnregister(address)
        self._pinned.clear()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


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
        self._device = DeviceSide(setting.mesh.device)
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
        mine = room(setting.folder, table.num_bytes * NUM_SLOTS)
        values = setting.peers.exchange("copies/room", asdict(mine))
        return shortage([Room(**value) for value in values], setting.local_world_size)

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
