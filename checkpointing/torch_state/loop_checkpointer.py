"""`LoopCheckpointer` saves and restores a loop's module and optimizer; `save` and `restore` make one."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
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
from checkpointing.plans import TensorPiece
from checkpointing.shards import Shard
from checkpointing.storage import open_storage
from checkpointing.torch_state.loop_values import decoded, encoded
from checkpointing.torch_state.meeting import default_group, meet, part
from checkpointing.torch_state.named_tensors import NamedState

_log = logging.getLogger("checkpointing")
# So long the save under way is waited for where the loop is left by an exception.
_LEAVING_S = 60.0
# Of a path the steps that this process has saved, or has passed over in a restore as damaged.
_known_steps: dict[str, set[int]] = {}


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
        self._path = path
        self._pieces: list[TensorPiece] | None = None
        # Whether the last save's failure has been raised: it is over then.
        self._is_told = False
        options = replace(
            options,
            generation=self._look_around(),
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
        again. Raises MismatchError, on every rank, where the state cannot be described, and where a later
        step lies there from which this process did not go on: a restart would begin with that.
        """
        shards, document, refusal = self._described(step, extra or {})
        pieces = [shard.piece for shard in shards]
        # All together, or none: some rank's part may have changed, the first time and once the optimizer has
        # its state; and of a save that is over all ranks must learn what became of it.
        has_changed = pieces != self._pieces
        word = [has_changed, self._checkpointer.is_busy, None if refusal is None else str(refusal)]
        words = self._peers.exchange(self._peers.unused("described"), word)
        if refusal is not None:
            raise refusal
        for rank, (_, _, why) in enumerate(words):
            if why is not None:
                raise MismatchError(f"rank {rank}: {why}")
        if any(changed for changed, _, _ in words):
            self.wait()
            self._prepare(shards)
            self._pieces = pieces
        elif self._when_busy == "wait" or not words[0][1]:
            self.wait()
        is_taken = self._checkpointer.save(step, shards, document)
        if is_taken:
            self._is_told = False
            self._known.add(step)
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
        self._known.update(step for step in self._others if step > restored.step)
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
        else:
            # What was copied is worth its time, whatever ends the loop: sys.exit, Ctrl-C, an error.
            with contextlib.suppress(CheckpointError):
                self._checkpointer.wait(_LEAVING_S)

    def _described(
        self, step: int, extra: Mapping[str, Any]
    ) -> tuple[list[Shard], dict[str, Any], MismatchError | None]:
        """Return this rank's shards, the document if it is the first, and why there is none."""
        try:
            if type(step) is not int or step < 0:
                raise MismatchError(f"step={step!r}: expected a whole number of steps done, 0 or more")
            later = [each for each in self._others - self._known if each > step]
            if later:
                raise MismatchError(
                    f"{self._path} has step {max(later)}, from which this loop did not go on, and a restart "
                    f"would: step {step} is not saved beside it; use another path, restore first, or remove "
                    "the later steps' folders"
                )
            shards = self._state.saved(is_first=self._peers.is_coordinator)
            document: dict[str, Any] = {}
            if self._peers.is_coordinator:
                document = {"optimizer": self._state.optimizer_document(), "extra": encoded(dict(extra))}
                score = extra.get("score")
                if isinstance(score, int | float) and math.isfinite(score):
                    # What `keep_best` compares.
                    document["score"] = score
        except OverflowError:
            return [], {}, MismatchError("extra['score'] is too large to be compared")
        except MismatchError as error:
            return [], {}, error
        return shards, document, None

    @property
    def _known(self) -> set[int]:
        return _known_steps.setdefault(self._path, set())

    def _look_around(self) -> int:
        """Return the number of a new attempt at this place, the same on all ranks, and remember what lies
        there. Raises CheckpointError.
        """
        peers = self._peers
        self._others: set[int] = set()
        if peers.is_coordinator:
            try:
                found = catalog.stored(open_storage(self._path))
                self._others = {each.step for each in found}
                newest = max((each.generation for each in found), default=0)
                peers.answer("generation", {"is": newest + 1})
            except CheckpointError as error:
                peers.answer("generation", {"failed": str(error)})
        answer = peers.await_answer("generation")
        if "failed" in answer:
            part(peers)
            raise CheckpointError(answer["failed"])
        return int(answer["is"])

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
