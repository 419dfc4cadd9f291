"""`python -m orchestra.train.network_rank FOLDER`: what torchrun starts on every rank to measure the network.

FOLDER is laid out like a run directory and its frozen configuration says device and interface; rank 0 writes
the result there. Messages between ranks are timed: all-reduces and round trips of several sizes, over pairs
of ranks and over all. Each number is a median of repeats, of the slowest rank that took part; the number of
repeats follows from the first time of a size, so that a slow network takes as long as a fast one.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from orchestra.errors import EXIT_DONE
from orchestra.parallel.mesh import choose_device, rank_environment
from orchestra.run.config_file import read_config
from orchestra.run.files import write_atomically
from orchestra.run.paths import RunDir
from orchestra.sizes.network import (
    BETWEEN,
    EVERYWHERE,
    INSIDE,
    RESULT_NAME,
    Link,
    Measurement,
    Sample,
)
from orchestra.sizes.units import MIB
from orchestra.train.__main__ import die_with_parent, ignore_scheduler_signals, leave_at_once, redirect_output

_SIZES_BYTES = (8, 1 << 10, 32 << 10, MIB, 16 * MIB, 64 * MIB)
# NVLink is not yet busy with 64 MiB.
_SIZES_ON_GPU_BYTES = (*_SIZES_BYTES, 256 * MIB)
_BUDGET_S = 0.1
_FEWEST, _MOST = 3, 100
# A size that takes longer is the last one, and is not repeated.
_SLOW_S = 0.3
_FLOAT_BYTES = 4
# HOST_NAME_MAX is 64, without a domain.
_NAME_BYTES = 256
# A peer that is silent for so long will not answer.
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Scope:
    """Which ranks talk at the same time: each group within itself."""

    kind: str
    what: str
    groups: tuple[tuple[int, ...], ...]


def scopes(num_nodes: int, ranks_per_node: int) -> list[Scope]:
    """Return what can be measured with so many ranks, numbered node by node. Rank 0 is part of everything."""
    measured = []
    if ranks_per_node > 1:
        measured.append(Scope(INSIDE, "1 pair", ((0, 1),)))
    if ranks_per_node > 2:
        measured.append(Scope(INSIDE, f"{ranks_per_node} ranks", (tuple(range(ranks_per_node)),)))
    if num_nodes > 1:
        measured.append(Scope(BETWEEN, "1 pair", ((0, ranks_per_node),)))
    if num_nodes > 1 and ranks_per_node > 1:
        pairs = tuple((rank, ranks_per_node + rank) for rank in range(ranks_per_node))
        measured.append(Scope(BETWEEN, f"{ranks_per_node} pairs", pairs))
    world = num_nodes * ranks_per_node
    if num_nodes > 1 and world > 2:
        measured.append(Scope(EVERYWHERE, f"{world} ranks", (tuple(range(world)),)))
    return measured


def measure(scope: Scope, device: torch.device) -> Link:
    """Time all sizes in one scope. *Collective* over all ranks, also those that only wait."""
    groups = [dist.new_group(list(ranks)) for ranks in scope.groups]
    members = list(zip(scope.groups, groups, strict=True))
    own = next(((ranks, group) for ranks, group in members if dist.get_rank() in ranks), None)
    are_pairs = all(len(ranks) == 2 for ranks in scope.groups)
    acts = [_all_reduce, _round_trip] if are_pairs else [_all_reduce]
    if own is not None:
        for act in acts:  # the first ones connect
            _seconds(partial(act, torch.zeros(1, device=device), *own), device)
    samples = []
    for size in _SIZES_ON_GPU_BYTES if device.type == "cuda" else _SIZES_BYTES:
        tensor = torch.zeros(size // _FLOAT_BYTES, device=device)
        times = [_timed(None if own is None else partial(act, tensor, *own), device) for act in acts]
        (all_reduce_s, is_slow), *round_trip = times
        samples.append(Sample(size, all_reduce_s, round_trip[0][0] / 2 if round_trip else None))
        if is_slow:
            break
    if own is not None:
        dist.destroy_process_group(own[1])
    return Link(scope.kind, scope.what, len(scope.groups[0]), tuple(samples))


def _all_reduce(tensor: torch.Tensor, _: tuple[int, ...], group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


def _round_trip(tensor: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> None:
    first, second = ranks
    if dist.get_rank() == first:
        dist.send(tensor, second, group=group)
        dist.recv(tensor, second, group=group)
    else:
        dist.recv(tensor, first, group=group)
        dist.send(tensor, first, group=group)


def _timed(act: Callable[[], None] | None, device: torch.device) -> tuple[float, bool]:
    """Return the median seconds of `act` on the slowest rank, and whether it is too slow for larger sizes.

    *Collective* over all ranks; those without a part have no act.
    """
    dist.barrier()
    first_s = _seconds(act, device)
    # Rank 0 takes part in every scope, so that it always has a time to count by.
    repeats = torch.tensor([_num_repeats(first_s)])
    dist.broadcast(repeats, 0)
    times = [_seconds(act, device) for _ in range(int(repeats))] or [first_s]
    slowest = torch.tensor([statistics.median(times)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest), float(slowest) > _SLOW_S


def _num_repeats(first_s: float) -> int:
    """Return how often is measured after the first time, which may have had to connect."""
    return 0 if first_s > _SLOW_S else min(_MOST, max(_FEWEST, int(_BUDGET_S / max(first_s, 1e-9))))


def _seconds(act: Callable[[], None] | None, device: torch.device) -> float:
    if act is None:
        return 0.0
    begin = time.perf_counter()
    act()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def main(argv: list[str]) -> NoReturn:
    """Take part as this process's rank; ends the process at once when all is written."""
    die_with_parent()
    ignore_scheduler_signals()
    folder = RunDir(Path(argv[0]).resolve())
    redirect_output(folder.rank_log(0, int(os.environ.get("RANK", "0"))))
    measurement = _measurement(folder)
    if measurement is not None:
        write_atomically(folder.path / RESULT_NAME, json.dumps(asdict(measurement), indent=2) + "\n")
    leave_at_once(EXIT_DONE)


def _measurement(folder: RunDir) -> Measurement | None:
    """Measure all that these ranks can. *Collective*. Return the result on rank 0, None on the others."""
    ranks = rank_environment()
    device = choose_device(read_config(folder.config).cluster, ranks.local_rank)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        timeout=timedelta(seconds=_TIMEOUT_S),
        device_id=device if on_gpu else None,
    )
    hosts = _hosts(ranks.world_size)
    links = [
        measure(scope, device)
        for scope in scopes(ranks.world_size // ranks.local_world_size, ranks.local_world_size)
    ]
    dist.barrier()
    if ranks.rank:
        return None
    interface = os.environ.get("NCCL_SOCKET_IFNAME" if on_gpu else "GLOO_SOCKET_IFNAME")
    return Measurement(
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if on_gpu else platform.machine(),
        backend="nccl" if on_gpu else "gloo",
        interface=interface,
        hosts=tuple(dict.fromkeys(hosts)),
        ranks_per_node=ranks.local_world_size,
        time=time.time(),
        links=tuple(links),
    )


def _hosts(world_size: int) -> list[str]:
    """Return every rank's host. *Collective* over all ranks, and without pickle, which runs what it reads."""
    name = platform.node().encode()[:_NAME_BYTES]
    own = torch.frombuffer(bytearray(name.ljust(_NAME_BYTES, b"\0")), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(gathered, own)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered]


if __name__ == "__main__":
    main(sys.argv[1:])
