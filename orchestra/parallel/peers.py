"""Opens the store through which the ranks talk beside the training's collectives. It says nothing on it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.peers import Peers
from orchestra.parallel.mesh import Mesh, RankEnvironment


def open_peers(mesh: Mesh, ranks: RankEnvironment, attempt: int, limit_s: float) -> Peers:
    """Return this rank's end of a store that rank 0 hosts on a free port. *Collective* over all ranks.

    The store ends with rank 0's process. `limit_s` bounds every wait.
    """
    if mesh.world_size == 1:
        return Peers.alone()
    timeout = timedelta(seconds=limit_s)
    # The store at MASTER_PORT belongs to torchrun and to the process groups: it is left to them.
    host = _store(ranks.master_address, 0, timeout, is_host=True) if mesh.rank == 0 else None
    port = torch.tensor([0 if host is None else host.port], dtype=torch.int64)
    dist.broadcast(port, src=0)
    store = host or _store(ranks.master_address, int(port), timeout, is_host=False)
    prefixed = dist.PrefixStore(f"attempt-{attempt}", store)  # type: ignore[attr-defined]
    return Peers(mesh.rank, mesh.world_size, prefixed, limit_s)


def _store(address: str, port: int, timeout: timedelta, *, is_host: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=is_host, timeout=timeout, wait_for_workers=False
    )
