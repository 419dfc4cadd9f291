"""`Checkpointer`, the object that users of this library make: one per rank, which saves, waits and restores.

All ranks make it with the same place and options, and call the methods marked *collective* in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch.distributed as dist

from checkpointing import catalog
from checkpointing.catalog import move_back
from checkpointing.checkpoint_errors import DamagedError, StorageError
from checkpointing.manifest import Manifest
from checkpointing.options import Event, Options, Phase, no_event, no_fault
from checkpointing.peers import Peers
from checkpointing.restore import RestoredCheckpoint, restore
from checkpointing.save import Saver
from checkpointing.shards import Shard
from checkpointing.storage import open_storage


class Checkpointer(Saver):
    """Saves and restores this rank's part of a state under one place: a local path or any fsspec URL."""

    def __init__(
        self,
        place: str,
        peers: Peers,
        options: Options,
        *,
        group: dist.ProcessGroup | None = None,
        on_event: Event = no_event,
        at_phase: Phase = no_fault,
    ) -> None:
        """`group` carries the tensors' bytes on restore (None: world size 1); its backend must take tensors
        of the shards' device. `on_event` may be called from a background thread.
        """
        super().__init__(open_storage(place), peers, options, on_event, at_phase)
        self._group = group

    def committed_steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, ascending. *Any rank*; it looks at the storage."""
        return catalog.committed_steps(self._storage)

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a committed checkpoint. *Any rank*; it looks at the storage.

        Raises DamagedError or StorageError.
        """
        return catalog.read_manifest(self._storage, step)

    def set_aside(self, after: int, is_void: Callable[[Manifest], bool]) -> list[tuple[int, str]]:
        """Keep the checkpoints of steps later than `after` that are void under other names, so that none of
        them is restored, listed or counted any more; return their steps and new names, ascending.

        *One rank only*, before `restore`. What cannot be read is left to `restore` to pass over.
        """
        move_back(self._storage)
        done = []
        for step in (step for step in self.committed_steps() if step > after):
            with contextlib.suppress(DamagedError):
                if is_void(self.manifest(step)):
                    done.append((step, catalog.set_aside(self._storage, step)))
        return done

    def restore(
        self, wanted: Callable[[Manifest], Sequence[Shard]], step: int | None = None
    ) -> RestoredCheckpoint | None:
        """Fill the wanted shards from the newest intact checkpoint, or from that of `step`. *Collective*.

        `wanted` is called with the manifest of each checkpoint that is tried. Returns None where the place
        holds no committed checkpoint at all; raises NoCheckpointError where none is intact.
        """
        if self._peers.is_coordinator:
            # What cannot be brought back is not there to be listed either.
            with contextlib.suppress(StorageError):
                move_back(self._storage)
        restored = restore(
            self._storage,
            self._peers,
            self._group,
            wanted,
            how=self._options.restore,
            step=step,
            at_phase=self._at_phase,
        )
        if restored is not None:
            self.distrust(step for step, _ in restored.skipped)
        return restored

    def claim(self, owner: str) -> str:
        """Write down whose checkpoints these are, unless that is written already; return who it is.

        *One rank only*, before the first save. A place has one owner for good.
        """
        return catalog.claim(self._storage, owner)
