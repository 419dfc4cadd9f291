"""This process's place in the mesh: rank, coordinates, device and the process groups of its axes.

It starts and ends torch.distributed. Layout arithmetic is in `orchestra.topology`; nothing here knows a
model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from conf.schema import Config, Device
from orchestra.errors import StopRequested, TrainingError
from orchestra.topology import Coordinates, Layout, layout


@dataclass(frozen=True)
class RankEnvironment:
    """What torchrun tells each process. The defaults are those of a process started alone."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    # Ranks on this node.
    local_world_size: int = 1
    # Where rank 0 can be reached.
    master_address: str = "127.0.0.1"


def rank_environment() -> RankEnvironment:
    """Read the ranks that torchrun set."""
    return RankEnvironment(
        rank=int(os.environ.get("RANK", "0")),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        master_address=os.environ.get("MASTER_ADDR", "127.0.0.1"),
    )


@dataclass(frozen=True)
class Mesh:
    """One rank's place. `dp_group` is None where there is nothing to reduce over."""

    rank: int
    layout: Layout
    coordinates: Coordinates
    device: torch.device
    dp_group: dist.ProcessGroup | None

    @property
    def world_size(self) -> int:
        return self.layout.world_size


@contextmanager
def open_mesh(config: Config, ranks: RankEnvironment) -> Iterator[Mesh]:
    """Join the process group, and leave it when all went well. *Collective* over all ranks.

    All went well too where the ranks stopped on request. After any other exception the group is left
    standing: ending it waits for the other ranks (NCCL), which wait for this one. The process is to write its
    verdict and exit. Raises TrainingError when the device that the configuration asks for is not there.
    """
    device = choose_device(config.cluster.device, ranks.local_rank)
    degrees = layout(config.parallelism, ranks.world_size)
    if ranks.world_size > 1:
        _join(config, device, ranks)
    mesh = Mesh(
        rank=ranks.rank,
        layout=degrees,
        coordinates=degrees.coordinates(ranks.rank),
        device=device,
        dp_group=dist.group.WORLD if degrees.dp > 1 else None,
    )
    try:
        yield mesh
    except StopRequested:
        _leave()
        raise
    _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device(wanted: Device, local_rank: int) -> torch.device:
    """Return this rank's device: its GPU, or the CPU where there is none or it was asked for."""
    has_gpu = torch.cuda.is_available()
    if wanted is Device.cuda and not has_gpu:
        raise TrainingError(
            f"cluster.device=cuda, but torch {torch.__version__} sees no GPU on this node ({_why_no_gpu()}); "
            "use cluster.device=cpu to train without"
        )
    if wanted is Device.cpu or not has_gpu:
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise TrainingError(
            f"local rank {local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
            "lower cluster.gpus_per_node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "this build of torch has no CUDA: install one that has"
    return "see what `nvidia-smi` and CUDA_VISIBLE_DEVICES say"


def _join(config: Config, device: torch.device, ranks: RankEnvironment) -> None:
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=config.recovery.collective_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
