"""Copies of one rank's state in its node's memory, so that a lost process or node costs a step or two.

Every `recovery.memory_copy_every_steps` steps a thread copies masters, moments and generators while the next
step's forward and backward pass run: these change nowhere but in the update, which waits for the copy
(`MemoryCopies` is a step hook). The checksum and the commit come after that and hold up no step. The node's
agent sends copies to a neighbouring node as they are. Ranks restore from copies together: all have an intact
copy of the same step of the same attempt, or none uses its own.

From a GPU the tensors are copied by a stream of its own straight into the files' memory, which is page-locked
for that; the stream of the training waits for it before the next update, the host for neither.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.shards import Shard
from orchestra.errors import UnusableCheckpointError
from orchestra.run.heartbeat import Phase
from orchestra.sizes.training_shape import NUM_SLOTS
from orchestra.sizes.units import binary
from orchestra.train.copy_files import (
    FOLDER_VARIABLE,
    CopyTable,
    Slot,
    UnusableCopyError,
    folder_bytes,
    slots_of,
    table_of,
)
from orchestra.train.hooks import StepHook
from orchestra.train.memory import host_memory
from orchestra.train.state import CheckpointContext, TensorState

# The named pipe into which a rank writes a byte after each copy, and which the agent reads.
BELL = "bell"


@dataclass(frozen=True)
class Room:
    """The bytes that one rank's copies take, and those it sees free on its node, or why it sees none."""

    host: str
    wanted: int
    free: int = 0
    problem: str | None = None


def room(folder: Path | None, wanted: int) -> Room:
    """Return how many bytes fit on this node, those of its folder included. *Any rank*; takes none."""
    host = socket.gethostname()
    if folder is None:
        return Room(host, wanted, problem="the agent gave this rank no folder in memory for its copies")
    try:
        file_system = os.statvfs(folder)
        taken = folder_bytes(folder)
    except OSError as error:
        return Room(host, wanted, problem=f"{folder}: {error.strerror}")
    free = file_system.f_bavail * file_system.f_frsize
    available = host_memory.available_host_bytes()
    return Room(host, wanted, (free if available is None else min(free, available)) + taken)


def shortage(rooms: Sequence[Room], ranks_per_node: int) -> str | None:
    """Return why the copies do not fit on every node, with those of its neighbour; None where they do.

    `rooms` by rank: a node has consecutive ones, and keeps the copies of the node before it.
    """
    refused = next((room for room in rooms if room.problem is not None), None)
    if refused is not None:
        return f"{refused.host}: {refused.problem}"
    nodes = [rooms[first : first + ranks_per_node] for first in range(0, len(rooms), ranks_per_node)]
    wanted = [sum(room.wanted for room in node) for node in nodes]
    for number, node in enumerate(nodes):
        kept = wanted[number - 1] if len(nodes) > 1 else 0
        free = min(room.free for room in node)
        if wanted[number] + kept > free:
            return (
                f"{node[0].host} has {binary(free)} free for copies in memory, and its own take "
                f"{binary(wanted[number])}, its neighbour's {binary(kept)}; use more nodes or a higher stage "
                "of ZeRO, or recovery.memory_copy_every_steps=null"
            )
    return None


class DeviceCopier:
    """Copies tensors from a device into page-locked memory; for a CPU a plain copy."""

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

    def block_stream(self) -> None:
        """Let the training's stream wait for the copy that was started."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)

    def await_copied(self) -> None:
        """Wait until the bytes are copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Unlock the pages."""
        for address in self._pinned:
            _runtime().cudaHostUnregister(address)
        self._pinned.clear()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class RestoredCopies:
    """What was restored: rank 0's state that is no tensor, who wrote it, and the bytes of all ranks."""

    document: Mapping[str, Any]
    attempt: int
    num_bytes: int
    seconds: float


class MemoryCopies(StepHook):
    """One rank's copies, in the agent's folder, if any. `prepare`, `take` and `restore` are *collective*."""

    def __init__(
        self, context: CheckpointContext, state: TensorState, every_steps: int, folder: Path | None
    ) -> None:
        self._context = context
        self._state = state
        self._every_steps = every_steps
        self._folder = folder
        self._is_on = False
        self._table: CopyTable | None = None
        self._sources: list[Tensor] = []
        # With the part of its memory for each source.
        self._slots: list[tuple[Slot, list[Tensor]]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="memory copies")
        self._under_way: Future[None] | None = None
        self._is_copied = threading.Event()
        self._device = DeviceCopier(context.mesh.device)
        self._bell: int | None = None

    def is_due(self, step: int) -> bool:
        """Whether the state after `step` is to be copied. Never that of the last step: it gets a checkpoint,
        and an attempt that began after the last step would write none.
        """
        return self._is_on and step % self._every_steps == 0 and step < self._context.last_step

    def prepare(self, begin: int) -> None:
        """Forget copies of steps after `begin`, and take the memory; where there is none, copy nothing."""
        shards = self._state.held()
        table = table_of(shards)
        mine = asdict(room(self._folder, table.num_bytes * NUM_SLOTS))
        rooms = [Room(**of_rank) for of_rank in self._context.peers.exchange("copies/room", mine)]
        problem = shortage(rooms, self._context.local_world_size)
        if problem is None:
            problems = self._context.peers.exchange("copies/taken", self._taken(begin, shards, table))
            problem = next((problem for problem in problems if problem is not None), None)
        if problem is not None:
            if self._context.peers.is_coordinator:
                self._context.record("memory_copies_off", {"cause": problem})
            return
        self._table, self._is_on = table, True
        self._sources = _filled(shard.tensor for shard in shards)
        self._bell = _opened_bell(self._folder)
        if self._context.peers.is_coordinator:
            sizes = {"bytes_per_rank": table.num_bytes, "copies": NUM_SLOTS}
            self._context.record("memory_copies_on", {"every_steps": self._every_steps, **sizes})

    def take(self, step: int, document: Mapping[str, Any]) -> None:
        """Begin to copy the state after `step`. Waits for the copy before it, which has ended long ago."""
        self._finish()
        # The generators are copied now; all else are the tensors of the training themselves.
        self._state.held()
        self._is_copied = threading.Event()
        slot, targets = self._slots[0]
        self._slots = [*self._slots[1:], self._slots[0]]
        facts = {**self._identity(), "step": step}
        ready = self._device.ready()
        self._under_way = self._pool.submit(
            self._copy, slot, targets, facts, document, ready, self._is_copied
        )

    def enter(self, phase: Phase, step: int, micro_batch: int, turn: int) -> None:  # noqa: ARG002
        """Wait before an update until the copy under way has read the state."""
        if phase is Phase.update:
            self.await_read()

    def await_read(self) -> None:
        """Wait until the copy under way has read the state, which may then change. On a GPU its stream
        waits.
        """
        if self._under_way is not None:
            self._is_copied.wait()
            self._device.block_stream()

    def close(self) -> None:
        """Wait for the copy under way and release the memory; the files stay for the agent."""
        self._finish()
        self._pool.shutdown()
        self._device.close()
        if self._bell is not None:
            os.close(self._bell)
            self._bell = None

    def restore(self, step: int) -> RestoredCopies | str:
        """Fill the state from the copies of `step`; where any rank cannot, change nothing and return why.

        Raises CheckpointError where ranks are missing.
        """
        began = time.monotonic()
        shards = self._state.held()
        table = table_of(shards)
        slot, report = self._examined(step, table)
        reports = self._context.peers.exchange("copies/found", report)
        reason = _disagreement(reports)
        if reason is not None:
            return reason
        assert slot is not None
        with torch.no_grad():
            for shard, view in zip(shards, slot.views(shards, table), strict=True):
                shard.tensor.detach().copy_(view)
        num_bytes = sum(report["bytes"] for report in reports)
        seconds = time.monotonic() - began
        return RestoredCopies(reports[0]["document"], reports[0]["attempt"], num_bytes, seconds)

    def _identity(self) -> dict[str, Any]:
        context = self._context
        return {
            "run": f"{context.run.name}/{context.wandb_id}",
            "attempt": context.attempt,
            "rank": context.mesh.rank,
            "world_size": context.mesh.world_size,
            "layout": asdict(context.mesh.layout),
            "facts": dict(context.facts),
        }

    def _copy(
        self,
        slot: Slot,
        targets: Sequence[Tensor],
        facts: Mapping[str, Any],
        document: Mapping[str, Any],
        ready: object,
        is_copied: threading.Event,
    ) -> None:
        """Copy, commit, and wake the agent; in the thread. A failure costs this copy and no training."""
        assert self._table is not None
        try:
            try:
                slot.remove_copy()
                self._device.copy(targets, self._sources, ready)
            finally:
                is_copied.set()
            self._device.await_copied()
            slot.commit(facts, document, self._table)
            self._ring()
        except Exception as error:  # noqa: BLE001  the event is how a failure is reported
            self._context.record("memory_copy_failed", {"step": facts["step"], "message": str(error)})

    def _finish(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _ring(self) -> None:
        # The agent may not read, or be too slow: it looks for new copies at intervals too.
        if self._bell is not None:
            with contextlib.suppress(OSError):
                os.write(self._bell, b".")

    def _taken(self, begin: int, shards: Sequence[Shard], table: CopyTable) -> str | None:
        """Take this rank's memory; return why it could not."""
        assert self._folder is not None
        try:
            slots = slots_of(self._folder, self._context.mesh.rank)
            for slot in slots:
                if not _may_stay(slot, begin, table):
                    slot.remove_copy()
                slot.take(table.num_bytes)
                self._device.pin(slot.content)
        except (OSError, RuntimeError) as error:
            return f"rank {self._context.mesh.rank} cannot take memory for its copies: {error}"
        # Those without a copy are written first.
        slots.sort(key=lambda slot: slot.age()[1])
        self._slots = [(slot, _filled(slot.views(shards, table))) for slot in slots]
        return None

    def _examined(self, step: int, table: CopyTable) -> tuple[Slot | None, dict[str, Any]]:
        """Return this rank's copy of `step`, and its report on it to the other ranks."""
        rank = self._context.mesh.rank
        try:
            if self._folder is None:
                raise UnusableCopyError("the agent gave this rank no folder of copies")
            slot, head = _newest_copy(slots_of(self._folder, rank), step)
            mine = self._identity()
            for key in ("run", "rank", "world_size", "layout", "facts"):
                if head.get(key) != mine[key]:
                    raise UnusableCopyError(f"its {key} is {head.get(key)}, not {mine[key]}")
            # The ranks agree on one attempt: one of them looks for all.
            if self._context.peers.is_coordinator:
                departure = self._context.lineage().departure(step, head.get("attempt"))
                if departure is not None:
                    raise UnusableCopyError(f"it is off the run's line: {departure.words}")
            slot.check(table)
            document = None
            if self._context.peers.is_coordinator:
                document = slot.document()
                self._state.refuse_moved_experts(document.get("experts"))
        except (UnusableCopyError, UnusableCheckpointError, CheckpointError, OSError) as error:
            return None, {"problem": f"rank {rank}'s copy of step {step}: {error}"}
        report = {"problem": None, "attempt": head.get("attempt"), "bytes": table.num_bytes}
        return slot, {**report, "document": document}


def build_memory_copies(
    every_steps: int | None, context: CheckpointContext, state: TensorState
) -> MemoryCopies | None:
    """Return this rank's copies in memory (`recovery.memory_copy_every_steps`); None where there are none."""
    if every_steps is None:
        return None
    folder = os.environ.get(FOLDER_VARIABLE)
    return MemoryCopies(context, state, every_steps, None if folder is None else Path(folder))


def _newest_copy(slots: Sequence[Slot], step: int) -> tuple[Slot, dict[str, Any]]:
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
    damaged = next((problem for problem in problems if "damaged" in problem), None)
    raise UnusableCopyError(damaged or "it is not there")


def _disagreement(reports: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why the ranks cannot all use their copies; None where they can."""
    problem = next((report["problem"] for report in reports if report["problem"] is not None), None)
    if problem is not None:
        return str(problem)
    attempts = {report["attempt"] for report in reports}
    if len(attempts) > 1:
        return f"the ranks' copies are of different attempts: {sorted(attempts, key=str)}"
    return None if reports[0]["document"] else "rank 0's copy does not say where the run stood"


def _filled(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that have elements, as plain tensors."""
    return [tensor.detach() for tensor in tensors if tensor.numel()]


def _may_stay(slot: Slot, begin: int, table: CopyTable) -> bool:
    """Whether a slot's copy may stay: of a step not after the attempt's begin, and as large as now."""
    with contextlib.suppress(UnusableCopyError):
        head = slot.head()
        return int(head.get("step", -1)) <= begin and head.get("bytes") == table.num_bytes
    return False


def _opened_bell(folder: Path | None) -> int | None:
    if folder is None:
        return None
    try:
        return os.open(folder / BELL, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
