"""Checkpoints of a plain torch loop: a module, a `torch.optim` optimizer and JSON, in one process, under DDP
or with FSDP2's DTensors. `docs/library.md` is the page.

    from checkpointing.torch_state import restore, save

    step = restore(path, model, optimizer) or 0        # the newest intact one, on whatever world size
    save(path, model, optimizer, step)                 # returns when it is committed

`loop_checkpointer` is what both make, and what saves while the training goes on; `named_tensors` says which
shards a module and an optimizer are, `meeting` lets the ranks talk. Nothing here is used by the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from checkpointing.options import Options
from checkpointing.torch_state.loop_checkpointer import LoopCheckpointer

__all__ = ["LoopCheckpointer", "restore", "save"]


def save(
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    step: int,
    *,
    extra: Mapping[str, Any] | None = None,
    keep_last: int = 3,
    limit_s: float = 600.0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a loop's state after `step` under `path` (a folder or any fsspec URL), and wait until it is
    committed. *Collective* over `group` (None: the default group; where there is none, this process alone).

    `extra` is JSON of the loop's own, rank 0's counts. The newest `keep_last` checkpoints stay. `limit_s`
    bounds every wait, also that for the slowest rank's files. Raises SaveFailedError where it was not
    committed, MismatchError where the state cannot be described, and where a later step lies there from which
    this process did not go on.
    """
    options = Options(keep_last=keep_last, limit_s=limit_s)
    with LoopCheckpointer(path, model, optimizer, options, group=group) as checkpointer:
        checkpointer.save(step, extra)


def restore(
    path: str,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: dict[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> int | None:
    """Fill model and optimizer from the newest intact checkpoint, and return its step; None where there is
    none. *Collective*, as `save` is.

    Without `optimizer` only the model is filled. `extra` is updated with what was saved as such. Raises
    NoCheckpointError where none is intact, MismatchError where it is that of another model or optimizer.
    """
    with LoopCheckpointer(path, model, optimizer, group=group) as checkpointer:
        return checkpointer.restore(extra)
