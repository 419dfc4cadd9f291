"""Several ranks on one GPU (`cluster.share_devices`): how many share it, and what carries their collectives.

From 2.30 on NCCL takes several ranks on one device where its environment says so, as that of
`orchestra.submit.launch` does. With an older one gloo carries the collectives through host memory. It has all
that an eager step of any layout calls with tensors on a GPU: all_reduce, all_gather, all_gather_into_tensor
and reduce_scatter_tensor (an all-reduce in disguise). What it lacks there is refused before any rank waits:
sends between two ranks, exchanges among all, and the coalesced collectives to which compiled blocks are
traced.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

from conf.schema import Config, ContextMethod
from orchestra.errors import ConfigError

LEAST_NCCL = (2, 30)
# The name that torch links NCCL by.
_LIBRARY = "libnccl.so.2"
NCCL, GLOO = "nccl", "gloo"

NcclVersion = tuple[int, int, int]


def ranks_on_device(local_rank: int, local_world_size: int, num_devices: int) -> int:
    """Return how many ranks of this node use the device of this one, itself included: rank r has device
    r mod `num_devices`.
    """
    return len(range(local_rank % num_devices, local_world_size, num_devices))


def nccl_version() -> NcclVersion | None:
    """Return the version of the NCCL that this process has loaded, which need not be the one that torch was
    built with; None where torch has linked it in or has none.
    """
    try:
        library = ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    # As NCCL writes it since 2.9: 23007 is 2.30.7.
    return number.value // 10_000, number.value // 100 % 100, number.value % 100


def backend_of_shared(config: Config, nccl: NcclVersion | None) -> str:
    """Return what carries the collectives of ranks that share a GPU: `nccl`, or `gloo` where it is too old.

    Raises ConfigError where gloo has not what the configuration needs.
    """
    if nccl is not None and nccl[:2] >= LEAST_NCCL:
        return NCCL
    found = "no NCCL of its own" if nccl is None else f"NCCL {'.'.join(map(str, nccl))}"
    problems = [
        f"cluster.share_devices=true with {found}: gloo has to carry the collectives, and {problem}, or "
        f"install NCCL {'.'.join(map(str, LEAST_NCCL))} or newer (the wheel nvidia-nccl-cu13; docs/gpus.md)"
        for problem in _not_over_gloo(config)
    ]
    if problems:
        raise ConfigError(problems)
    return GLOO


def compiled_over_gloo(config: Config) -> str | None:
    """Return why blocks can't be compiled where gloo carries the collectives of GPUs; None: they can."""
    if config.parallelism.tp == 1:
        return None
    return f"gloo has no collectives for the compiled blocks of parallelism.tp={config.parallelism.tp}"


def _not_over_gloo(config: Config) -> Iterator[str]:
    # With train.compile=auto the ranks train eager then (`build.with_compilation`).
    if config.train.compile is True and (problem := compiled_over_gloo(config)):
        yield f"{problem}; use train.compile=false"
    if config.parallelism.cp > 1 and config.parallelism.cp_method is ContextMethod.ulysses:
        yield (
            "it exchanges no parts of GPU tensors, as parallelism.cp_method=ulysses has to; use "
            "parallelism.cp_method=all_gather"
        )
    if config.parallelism.ep > 1:
        yield "it exchanges no parts of GPU tensors, as parallelism.ep has to; use parallelism.ep=1"
    if config.recovery.replay_every_steps is not None:
        yield (
            "it sends nothing from one GPU tensor to another, as a replay has to; use "
            "recovery.replay_every_steps=null"
        )
