"""The savers that the checkpoint benchmark compares, behind one interface, and the state that they save.

Each peer is used at its best: it stages into memory that is already there, it has a process group of its own,
and training does not wait for a staging that runs behind it (in a real loop the optimizer's next step would).
Nothing here takes times.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_report import DCP_PROCESS, DCP_SAVE, DCP_STAGER, DCP_THREAD, OURS, TORCH_SAVE
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as AlongDim

from checkpointing.checkpointer import Checkpointer
from checkpointing.options import Needs, Options
from checkpointing.peers import Peers
from checkpointing.restore import RestoredCheckpoint
from checkpointing.shards import Shard

Shapes = dict[str, tuple[int, ...]]
Finish = Callable[[], None]

STEP = 1


def llama_shapes(num_bytes: int) -> Shapes:
    """Return a Llama's parameters of width 1024 that make up `num_bytes` with AdamW's moments in fp32."""
    width, inner, vocabulary = 1024, 2816, 16384
    layer = 4 * width * width + 3 * width * inner + 2 * width
    rows = num_bytes // 12 // width
    num_layers = max(0, (rows - vocabulary) * width // layer)
    shapes: Shapes = {}
    for number in range(num_layers):
        shapes |= {f"layers.{number}.{name}.weight": (width, width) for name in ("q", "k", "v", "o")}
        shapes |= {f"layers.{number}.{name}.weight": (inner, width) for name in ("gate", "up")}
        shapes |= {f"layers.{number}.down.weight": (width, inner)}
        shapes |= {f"layers.{number}.{name}.weight": (width,) for name in ("norm_1", "norm_2")}
    left = rows - num_layers * layer // width
    return {"embedding.weight": (max(64, left // 64 * 64), width), **shapes}


def preset_shapes(name: str) -> Shapes:
    """Return the shapes of a preset of conf/model."""
    from orchestra.config.compose import compose
    from orchestra.model.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(compose([f"model={name}"]).config.model)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@dataclass
class State:
    """fp32 parameters with both moments of AdamW: whole on every rank, or this rank's rows of each."""

    layout: str
    tensors: dict[str, Tensor]
    shapes: Shapes
    rank: int
    num_bytes: int

    @classmethod
    def make(cls, layout: str, shapes: Shapes, rank: int, world_size: int, device: torch.device) -> State:
        named = {
            f"{part}.{name}": shape
            for part in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
            for name, shape in shapes.items()
        }
        tensors = {}
        for name, shape in named.items():
            if layout == "sharded":
                shape = (shape[0] // world_size, *shape[1:])
            seed = zlib.crc32(name.encode()) + (rank if layout == "sharded" else 0)
            generator = torch.Generator(device).manual_seed(seed)
            tensors[name] = torch.rand(shape, generator=generator, device=device)
        return cls(layout, tensors, named, rank, 4 * sum(torch.Size(it).numel() for it in named.values()))

    def shards(self) -> list[Shard]:
        """Return the state as orchestra takes it."""
        return [Shard(name, self.shapes[name], self._offsets(it), it) for name, it in self.tensors.items()]

    def _offsets(self, tensor: Tensor) -> tuple[int, ...]:
        first = self.rank * tensor.shape[0] if self.layout == "sharded" else 0
        return (first, *(0,) * (tensor.dim() - 1))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.distributed.checkpoint takes it; the values share its memory."""
        if self.layout == "replicated":
            return dict(self.tensors)
        device = next(iter(self.tensors.values())).device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        return {
            name: DTensor.from_local(tensor, mesh, [AlongDim(0)], run_check=False)
            for name, tensor in self.tensors.items()
        }

    def clear(self) -> None:
        """Forget the values, so that a restore has something to do."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def fingerprint(self) -> list[int]:
        """Return the sum of each tensor's bits: it tells whether a restore brought them back."""
        return [int(it.view(torch.int32).sum(dtype=torch.int64)) for it in self.tensors.values()]


class Saver(Protocol):
    """One way to save. All ranks call all of it alike."""

    def open(self, state: State, place: Path) -> None:
        """Take what can be taken before the first save."""

    def save(self) -> Finish:
        """Save as far as training is blocked; return what waits for the rest."""

    def close(self) -> None:
        """Give everything back."""


class Orchestra:
    """`checkpointing.Checkpointer`; each use gets topics of its own in the store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._num_uses = 0
        self.needs: Needs | None = None
        # Seconds until the last save was committed, on rank 0.
        self.committed_s = 0.0
        self._checkpointer: Checkpointer | None = None

    def checkpointer(self, place: str, how: str = "broadcast") -> Checkpointer:
        """Return a new checkpointer of a place."""
        self._num_uses += 1
        store = dist.PrefixStore(f"benchmark/{self._num_uses}", self._store)
        peers = Peers(dist.get_rank(), dist.get_world_size(), store)
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        return Checkpointer(place, peers, Options(restore=how), group=group, on_event=self._take)

    def _take(self, event: str, evidence: Mapping[str, Any]) -> None:
        if event == "checkpoint_committed":
            self.committed_s = evidence["seconds"]

    def open(self, state: State, place: Path) -> None:
        self._shards = state.shards()
        self._checkpointer = self.checkpointer(str(place))
        self.needs = self._checkpointer.prepare(self._shards)
        self._checkpointer.reserve(self._shards)

    def save(self) -> Finish:
        assert self._checkpointer is not None
        self._checkpointer.save(STEP, self._shards, {"step": STEP})
        return self._checkpointer.wait

    def close(self) -> None:
        self._checkpointer = None
        self._shards = []

    def restore(self, state: State, place: str, how: str) -> int:
        """Fill the state; return the bytes that this rank read."""
        restored = self.checkpointer(place, how).restore(lambda _manifest: state.shards())
        assert isinstance(restored, RestoredCheckpoint)
        return restored.bytes_read


class TorchSave:
    """`torch.save` with an fsync: rank 0 writes a replicated state, every rank its part of a sharded one."""

    def open(self, state: State, place: Path) -> None:
        self._state = state
        self._place = place
        place.mkdir(parents=True, exist_ok=True)

    def save(self) -> Finish:
        if self._state.layout == "sharded" or self._state.rank == 0:
            with (self._place / f"{self._state.rank}.pt").open("wb") as file:
                torch.save(self._state.tensors, file)
                file.flush()
                os.fsync(file.fileno())
        return nothing

    def close(self) -> None:
        del self._state


class DcpSave:
    """`torch.distributed.checkpoint.save`, which blocks until all is written."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def open(self, state: State, place: Path) -> None:
        self._state_dict = state.state_dict()
        self._place = place

    def save(self) -> Finish:
        dcp.save(self._state_dict, checkpoint_id=self._place, process_group=self._group)
        return nothing

    def close(self) -> None:
        del self._state_dict


class DcpAsync:
    """`torch.distributed.checkpoint.async_save`, by a thread or a process, with a stager that is kept."""

    def __init__(
        self, group: dist.ProcessGroup, kind: AsyncCheckpointerType, staging: StagingOptions | None
    ) -> None:
        """Without `staging` each save takes its own memory, as async_save does by default."""
        self._group = group
        self._kind = kind
        self._staging = staging

    def open(self, state: State, place: Path) -> None:
        self._state_dict = state.state_dict()
        self._place = place
        self._stager = DefaultStager(self._staging) if self._staging else None
        if self._stager:
            self._stager.stage(self._state_dict)
            self._stager.synchronize_staging()

    def save(self) -> Finish:
        response = dcp.async_save(
            self._state_dict,
            checkpoint_id=self._place,
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response

        def finish() -> None:
            future.result()

        return finish

    def close(self) -> None:
        if self._stager:
            self._stager.close()
            # It holds what it staged last.
            self._stager = None
        del self._state_dict


def dcp_load(state_dict: dict[str, Any], place: str, group: dist.ProcessGroup) -> None:
    """Fill a state's `state_dict` by `torch.distributed.checkpoint.load`."""
    dcp.load(state_dict, checkpoint_id=place, process_group=group)


def savers(group: dist.ProcessGroup, orchestra: Orchestra, device: torch.device) -> dict[str, Saver]:
    """Return all savers by name. `group` is a gloo group for the peers alone."""
    is_gpu = device.type == "cuda"
    thread, process = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
    return {
        OURS: orchestra,
        DCP_SAVE: DcpSave(group),
        DCP_THREAD: DcpAsync(group, thread, None),
        DCP_STAGER: DcpAsync(group, thread, _staging(is_gpu, shared=False, behind=True)),
        DCP_PROCESS: DcpAsync(group, process, _staging(is_gpu, shared=True, behind=False)),
        TORCH_SAVE: TorchSave(),
    }


def _staging(is_gpu: bool, *, shared: bool, behind: bool) -> StagingOptions:
    return StagingOptions(
        use_pinned_memory=is_gpu,
        use_shared_memory=shared,
        use_async_staging=behind,
        use_non_blocking_copy=is_gpu,
    )


def nothing() -> None:
    """Wait for nothing: all was done while training was blocked."""
