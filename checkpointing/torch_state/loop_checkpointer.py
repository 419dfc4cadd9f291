"""`LoopCheckpointer` saves and restores a loop's module and optimizer; `save` and `restore` make one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from checkpointing import catalog
from checkpointing.checkpoint_errors import CheckpointError, MismatchError, SaveFailedError
from checkpointing.checkpointer import Checkpointer
from checkpointing.manifest import Manifest
from checkpointing.options import Options
from checkpointing.peers import Peers
from checkpointing.plans import TensorPiece
from checkpointing.shards import Shard
from checkpointing.storage import open_storage
from checkpointing.torch_state.loop_values import decoded, encoded
from checkpointing.torch_state.meeting import default_group, meet, part
from checkpointing.torch_state.named_tensors import NamedState

_log = logging.getLogger("checkpointing")


class LoopCheckpointer:
    """Saves and restores a loop's state. *Collective*: all ranks make it, call its methods in the same order,
    and close it (`with`), which waits for the last save. One loop at a time may save under a path.
    """

    def __init__(
        self,
        path: str,
        model: nn.Module,
        optimizer: Optimizer | None,
        options: Options | None = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`options`: its `generation` is chosen here, newer than all that lies there. `group`: None for the
        default one; its backend takes the parameters' tensors.
        """
        options = Options() if options is None else options
        group = default_group() if group is None else group
        device = next((each.device for each in model.parameters()), torch.device("cpu"))
        self._state = NamedState(model, optimizer)
        self._peers = meet(group, device, options.limit_s)
        self._pieces: list[TensorPiece] | None = None
        # Whether the last save's failure has been raised: it is over then.
        self._is_told = False
        options = replace(
            options,
            generation=_next_generation(path, self._peers),
            # A loop that goes back saves steps anew.
            replaces=True,
            layout={"world_size": self._peers.world_size, **options.layout},
        )
        self._when_busy = options.when_busy
        self._checkpointer = Checkpointer(path, self._peers, options, group=group)

    def save(self, step: int, extra: Mapping[str, Any] | None = None, *, wait: bool = True) -> bool:
        """Save the state after `step`; returns when it is committed, with `wait=False` when it is copied.

        Returns False where it was skipped (`when_busy`: skip). Raises SaveFailedError where it was not
        committed, or the one before that was not waited for: then nothing is saved, and the next call tries
        again. Raises MismatchError where the state cannot be described.
        """
        shards = self._state.saved(is_first=self._peers.is_coordinator)
        document = {"optimizer": self._state.optimizer_document(), "extra": encoded(dict(extra or {}))}
        pieces = [shard.piece for shard in shards]
        # All together, or none: some rank's part may have changed, the first time and once the optimizer has
        # its state; and of a save that is over all ranks must learn what became of it.
        has_changed = pieces != self._pieces
        words = self._peers.exchange(self._peers.unused("save"), [has_changed, self._checkpointer.is_busy])
        if any(changed for changed, _ in words):
            self.wait()
            self._prepare(shards)
            self._pieces = pieces
        elif self._when_busy == "wait" or not words[0][1]:
            self.wait()
        is_taken = self._checkpointer.save(step, shards, document)
        if is_taken:
            self._is_told = False
        if wait:
            self.wait()
        return is_taken

    def wait(self) -> None:
        """Wait until the save under way is committed. Raises SaveFailedError, once for each."""
        if self._is_told:
            return
        try:
            self._checkpointer.wait()
        except SaveFailedError:
            self._is_told = True
            raise

    def restore(self, extra: dict[str, Any] | None = None) -> int | None:
        """Fill model and optimizer from the newest intact checkpoint, update `extra` with what was saved as
        such, and return the step; None where there is none.

        Checkpoints that are skipped are logged as warnings. After an error the model holds anything. Raises
        NoCheckpointError, MismatchError, UnreachableError.
        """
        filled: dict[torch.Tensor, dict[str, Any]] = {}

        def wanted(manifest: Manifest) -> list[Shard]:
            nonlocal filled
            shards, filled = self._state.wanted(manifest)
            return shards

        restored = self._checkpointer.restore(wanted)
        if restored is None:
            return None
        self._state.take_back(restored.manifest, filled)
        if self._peers.is_coordinator:
            for step, reason in restored.skipped:
                _log.warning("the checkpoint of step %d was skipped: %s", step, reason)
        if extra is not None:
            extra.update(decoded(restored.state.get("extra") or {}))
        return restored.step

    def close(self) -> None:
        """Wait for the last save, and part. Raises SaveFailedError where that has not been raised."""
        try:
            self.wait()
        finally:
            part(self._peers)

    def __enter__(self) -> LoopCheckpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, CheckpointError):
            # All ranks have it; the others may have yet to read rank 0's word.
            part(self._peers)

    def _prepare(self, shards: list[Shard]) -> None:
        names = sorted(self._state.model_tensors())
        mark = hashlib.sha256("\n".join(names).encode()).hexdigest()
        marks = self._peers.exchange(self._peers.unused("names"), [mark, len(names)])
        for rank, other in enumerate(marks):
            if other != marks[0]:
                raise MismatchError(
                    f"rank {rank} has other tensors ({other[1]}) than rank 0 ({marks[0][1]}): each rank "
                    "needs the whole model or its DTensors; give each pipeline stage its own path and group"
                )
        self._checkpointer.prepare(shards)
        self._checkpointer.reserve(shards)


def _next_generation(path: str, peers: Peers) -> int:
    """Return the number of a new attempt at this place, the same on all ranks. Raises CheckpointError."""
    if peers.is_coordinator:
        try:
            found = [each.generation for each in catalog.stored(open_storage(path))]
            peers.answer("generation", {"is": max(found, default=0) + 1})
        except CheckpointError as error:
            peers.answer("generation", {"failed": str(error)})
    answer = peers.await_answer("generation")
    if "failed" in answer:
        part(peers)
        raise CheckpointError(answer["failed"])
    return int(answer["is"])
