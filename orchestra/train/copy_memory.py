"""Memory for copies: whether a node has room for them, and the way there from a GPU. It names no files.

From a GPU the tensors are copied by a stream of its own straight into the files' memory, which is
page-locked for that; the stream of the training waits for it before the next update, the host for neither.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestra.train import preflight
from orchestra.train.copy_slots import folder_bytes
from orchestra.units import binary


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
    available = preflight.available_host_bytes()
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
