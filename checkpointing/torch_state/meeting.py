"""How the ranks of somebody else's loop come to talk: a store of their own, found through one broadcast.

The loop's own store is not public, and its collectives may not be used by background threads. So rank 0
opens a store, and tells the others where it is, and this conversation's key, by a collective of the loop's
group.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.peers import Peers

# Room for an address: host names have at most 253 letters.
_ADDRESS_BYTES = 1024
# How long rank 0 stays for ranks that have yet to read its last answer.
_LEAVING_S = 30.0


def default_group() -> dist.ProcessGroup | None:
    """Return the loop's default group, None where it has none."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def meet(group: dist.ProcessGroup | None, device: torch.device, limit_s: float) -> Peers:
    """Return this rank's end of a new conversation. *Collective* over `group`, whose backend has to take
    tensors of `device`; None: of a single process.

    Raises CheckpointError where rank 0 cannot open a store, or it cannot be reached.
    """
    if group is None:
        return Peers.alone()
    rank, timeout = dist.get_rank(group), timedelta(seconds=limit_s)
    word: dict[str, str] = {}
    if rank == 0:
        try:
            store = TCPStore("localhost", 0, None, True, timeout, wait_for_workers=False)
            word = {"host": _own_address(group), "port": str(store.port), "key": secrets.token_hex(32)}
        except (RuntimeError, OSError) as error:
            word = {"error": str(error)[: _ADDRESS_BYTES // 4]}
    word = _told(word, group, device)
    if "error" in word:
        raise CheckpointError(f"rank 0 cannot open a store for the checkpoints: {word['error']}")
    if rank != 0:
        try:
            store = TCPStore(word["host"], int(word["port"]), None, False, timeout)
        except (RuntimeError, OSError) as error:
            raise CheckpointError(
                f"rank {rank} does not reach rank 0's store at {word['host']}:{word['port']}: {error}; set "
                "MASTER_ADDR on rank 0 to an address of its machine that all reach"
            ) from error
    return Peers(rank, dist.get_world_size(group), store, limit_s, bytes.fromhex(word["key"]))


def _own_address(group: dist.ProcessGroup) -> str:
    """Return an address of this machine, that of the group's first rank, for the others."""
    master = os.environ.get("MASTER_ADDR")
    if master is None or dist.get_global_rank(group, 0) == 0:
        # Where it is set, it is an address of global rank 0's machine that the others have reached already.
        return master or socket.gethostname()
    # The one from which that machine is reached; nothing is sent.
    family, kind, _, _, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as towards:
        towards.connect(address)
        return str(towards.getsockname()[0])


def part(peers: Peers) -> None:
    """End a conversation: rank 0, with whom the store ends, stays until the others have read everything.
    Never raises; *collective* where all is well.
    """
    try:
        peers.tell("parting", None)
        if peers.is_coordinator:
            peers.hear_all("parting", min(_LEAVING_S, peers.limit_s))
    except CheckpointError:
        return


def _told(word: dict[str, str], group: dist.ProcessGroup, device: torch.device) -> dict[str, str]:
    """Return rank 0's word on every rank."""
    content = json.dumps(word).encode().ljust(_ADDRESS_BYTES)
    message = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
    dist.broadcast(message, group=group, group_src=0)
    heard: dict[str, str] = json.loads(bytes(message.cpu().tolist()))
    return heard
