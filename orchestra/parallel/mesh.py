"""This process's place in the mesh: rank, coordinates, device and the process groups of its axes.

It starts and ends torch.distributed. Layout arithmetic is in `orchestra.sizes.topology`; nothing here knows a
model. A group of one rank is None: there is nobody to talk to.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.peers import Peers
from conf.schema import ClusterConfig, Config, Device
from orchestra.errors import StopRequested, TrainingError
from orchestra.parallel.marks import Traffic
from orchestra.parallel.shared_devices import (
    GLOO,
    NCCL,
    backend_of_shared,
    nccl_version,
    ranks_on_device,
)
from orchestra.sizes.topology import Coordinates, Layout, layout


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


# As many ranks as may call at the same time.
_BACKLOG = 4096

# Opens the process group of some ranks, in their order; called by these ranks alone, two or more of them.
OpenGroup = Callable[[Sequence[int]], dist.ProcessGroup]


@dataclass(frozen=True)
class Mesh:
    """One rank's place and its groups, each None where it would have one rank.

    `dp_group`: ranks with other samples and the same part of the model. `tp_group`: ranks that share each
    layer. `cp_group`: ranks with other parts of the same sequences. `pp_group`: the stages of one pipeline.
    `data_group`: those of dp and cp together.
    `loss_group`: ranks whose losses add up to that of the global batch. Over those of them that have the same
    stage gradients are summed: `shard_group` are those over which ZeRO shards, `replicate_group` those that
    hold the same shards. `ep_group`: ranks that share out the experts; `expert_shard_group` and
    `expert_replicate_group` are for the parameters of experts what the two without `expert` are for others.
    `model_group`: ranks that hold one copy of the training state together, each a part of its own or a
    replica over tp or ep.
    """

    rank: int
    layout: Layout
    coordinates: Coordinates
    device: torch.device
    dp_group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    loss_group: dist.ProcessGroup | None = None
    shard_group: dist.ProcessGroup | None = None
    replicate_group: dist.ProcessGroup | None = None
    model_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None
    ep_group: dist.ProcessGroup | None = None
    expert_shard_group: dist.ProcessGroup | None = None
    expert_replicate_group: dist.ProcessGroup | None = None
    # Bytes that this rank has sent for the training.
    traffic: Traffic = field(default_factory=Traffic)
    # Ranks whose device this is too, this one included; and what carries their collectives on it.
    ranks_on_device: int = 1
    backend: str = GLOO
    # Whether it stands for a GPU's place in a count that runs without one (`train.dry_build`).
    counts_as_gpu: bool = False
    # For groups that are of no axis.
    open_group: OpenGroup = field(default_factory=lambda: _open_group)

    @property
    def world_size(self) -> int:
        return self.layout.world_size

    @property
    def is_gpu(self) -> bool:
        """Whether this rank's memory is, or is to be counted as, a GPU's."""
        return self.counts_as_gpu or self.device.type == "cuda"

    @property
    def shard_index(self) -> int:
        """This rank's place in its shard group, which says what range of everything it owns."""
        return self.layout.shard_index(self.coordinates)

    @property
    def expert_shard_index(self) -> int:
        """This rank's place in the shard group of its experts' parameters."""
        return self.layout.expert_shard_index(self.coordinates)

    @property
    def ep_index(self) -> int:
        """Which of the shares of the experts this rank has."""
        return self.layout.ep_index(self.coordinates)

    def rank_on(self, axis: str, coordinate: int) -> int:
        """Return the rank at another place on one axis (dp, tp, pp or cp) and at this one's on all others."""
        return self.layout.rank(replace(self.coordinates, **{axis: coordinate}))


def make_mesh(rank: int, degrees: Layout, device: torch.device, open_group: OpenGroup | None = None) -> Mesh:
    """Return a rank's place in a layout of all ranks. *Collective* where there are several."""
    # Tokens travel while ZeRO gathers and reduces: over a communicator of their own, where the ranks are the
    # same too, since what is started over one runs one after the other (NCCL).
    open_own = open_group or _open_own_group
    open_group = open_group or _open_group
    opened: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def group(*axes: str) -> dist.ProcessGroup | None:
        # NCCL splits communicators off the world's together: all ranks open equally many, in one order. They
        # do, since each is in one group of every kind, and all groups of a kind are of one size.
        members = degrees.neighbours(rank, axes)
        if len(members) == 1:
            return None
        if members not in opened:
            opened[members] = open_group(members)
        return opened[members]

    is_sharded, has_ep = degrees.shard > 1, degrees.ep > 1
    ep_group = open_own(degrees.neighbours(rank, ["ep"])) if has_ep else None
    return Mesh(
        rank=rank,
        layout=degrees,
        coordinates=degrees.coordinates(rank),
        device=device,
        dp_group=group("dp"),
        tp_group=group("tp"),
        cp_group=group("cp"),
        loss_group=group("dp", "cp", "pp"),
        shard_group=group("shard"),
        replicate_group=group("replicate"),
        # Without ZeRO the ranks of one copy of the experts have a copy of all else each.
        model_group=group("ep", "tp", "pp") if has_ep and not is_sharded else group("shard", "tp", "pp"),
        pp_group=group("pp"),
        data_group=group("dp", "cp"),
        ep_group=ep_group,
        expert_shard_group=group("expert_shard"),
        expert_replicate_group=group("expert_replicate"),
        open_group=open_group,
    )


def _open_group(members: Sequence[int]) -> dist.ProcessGroup:
    if len(members) == dist.get_world_size():
        world = dist.group.WORLD
        assert world is not None
        return world
    return _open_own_group(members)


def _open_own_group(members: Sequence[int]) -> dist.ProcessGroup:
    # Only the members meet: of a thousand ranks none waits for groups that it is not in.
    group: dist.ProcessGroup = dist.new_group(list(members), use_local_synchronization=True)
    return group


def collective_named(new: str, old: str) -> Callable[..., Any]:
    """Return a collective of torch by the name that this version has for it: 2.13 renamed two of them."""
    collective: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return collective


@contextmanager
def open_mesh(config: Config, ranks: RankEnvironment) -> Iterator[Mesh]:
    """Join the process group, and leave it when all went well. *Collective* over all ranks.

    All went well too where the ranks stopped on request. After any other exception the group is left
    standing: ending it waits for the other ranks (NCCL), which wait for this one. The process is to write its
    verdict and exit. Raises TrainingError when the device that the configuration asks for is not there, and
    ConfigError when ranks are to share one and nothing carries their collectives.
    """
    device = choose_device(config.cluster, ranks.local_rank)
    sharing, backend = 1, GLOO
    if device.type == "cuda":
        num_devices = torch.cuda.device_count()
        sharing = ranks_on_device(ranks.local_rank, ranks.local_world_size, num_devices)
        # Of all ranks alike, also of one that has its device for itself.
        is_shared = ranks.local_world_size > num_devices
        backend = backend_of_shared(config, nccl_version()) if is_shared else NCCL
    degrees = layout(config.parallelism, ranks.world_size)
    if ranks.world_size > 1:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if backend == NCCL else GLOO,
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=config.recovery.collective_timeout_s),
            device_id=device if backend == NCCL else None,
        )
    try:
        mesh = make_mesh(ranks.rank, degrees, device)
        yield replace(mesh, ranks_on_device=sharing, backend=backend)
    except StopRequested:
        _leave()
        raise
    _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def choose_device(cluster: ClusterConfig, local_rank: int) -> torch.device:
    """Return this rank's device: its GPU, or the CPU where there is none or it was asked for."""
    wanted, has_gpu = cluster.device, torch.cuda.is_available()
    if wanted is Device.cuda and not has_gpu:
        why = "see what `nvidia-smi` and CUDA_VISIBLE_DEVICES say"
        if torch.version.cuda is None:
            why = "this build of torch has no CUDA: install one that has"
        raise TrainingError(
            f"cluster.device=cuda, but torch {torch.__version__} sees no GPU on this node ({why}); use "
            "cluster.device=cpu to train without"
        )
    if wanted is Device.cpu or not has_gpu:
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices and not cluster.share_devices:
        raise TrainingError(
            f"local rank {local_rank} has no GPU: this node shows {num_devices}; lower cluster.gpus_per_node"
        )
    device = torch.device("cuda", local_rank % num_devices)
    torch.cuda.set_device(device)
    return device


def open_peers(
    mesh: Mesh, ranks: RankEnvironment, attempt: int, limit_s: float, key: bytes | None = None
) -> Peers:
    """Return this rank's end of a store that rank 0 hosts on a free port. *Collective* over all ranks.

    The store ends with rank 0's process. `limit_s` bounds every wait. `key`: what only this attempt's ranks
    know; without it nobody's word is checked.
    """
    if mesh.world_size == 1:
        return Peers.alone()
    timeout = timedelta(seconds=limit_s)
    # The store at MASTER_PORT belongs to torchrun and to the process groups: it is left to them.
    host = _hosted(ranks.master_address, timeout) if mesh.rank == 0 else None
    port = torch.tensor([0 if host is None else host.port], dtype=torch.int64)
    dist.broadcast(port, src=0)
    store = host or dist.TCPStore(  # type: ignore[attr-defined]
        ranks.master_address, int(port), is_master=False, timeout=timeout, wait_for_workers=False
    )
    prefixed = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    return Peers(mesh.rank, mesh.world_size, prefixed, limit_s, key)


def _hosted(address: str, timeout: timedelta) -> Any:
    """Return a store that listens at one address of this node; by itself torch listens at all of them."""
    listener = socket.create_server((address, 0), backlog=_BACKLOG)
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        listener.getsockname()[1],
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
