"""`Checkpointer`, the object that users of this library make: one per rank, which saves, waits and restores.

All ranks make it with the same place and options, and call the methods marked *collective* in the same order.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from checkpointing import catalog
from checkpointing.catalog import StoredCheckpoint
from checkpointing.checkpoint_errors import NoCheckpointError, StorageError, SupersededError
from checkpointing.lineage import Base, Lineage
from checkpointing.manifest import Manifest
from checkpointing.options import Event, Options, Phase, no_event, no_fault
from checkpointing.outages import OutagePatience
from checkpointing.peers import Peers
from checkpointing.restore import Places, RestoredCheckpoint, restore
from checkpointing.saving.save import Saver
from checkpointing.shards import Shard
from checkpointing.storage import open_storage
from checkpointing.storage.local import LocalStorage


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
        lineage: Callable[[], Lineage] = Lineage,
        fallback: str | None = None,
    ) -> None:
        """`group` carries the tensors' bytes on restore (None: world size 1); its backend must take tensors
        of the shards' device. `on_event` may be called from a background thread, and so may `lineage`, which
        returns where the attempts began as far as that is known now; as it stands everything is on the line.
        `fallback` is a second place, for `save(…, in_fallback=True)` alone; what lies there counts like the
        rest.
        """
        second = None if fallback is None else open_storage(fallback)
        super().__init__(open_storage(place), peers, options, on_event, at_phase, lineage, second)
        self._group = group

    def committed_steps(self) -> list[int]:
        """Return the steps of the committed checkpoints on the line, ascending. *Any rank*; it looks at the
        storage.
        """
        return [checkpoint.step for checkpoint in self._on_line()]

    def _on_line(self) -> list[StoredCheckpoint]:
        return catalog.split(catalog.stored_in(self._used_places), self._lineage())[0]

    def manifest(self, step: int) -> Manifest:
        """Return the manifest of a committed checkpoint on the line. *Any rank*; it looks at the storage.

        Raises NoCheckpointError, DamagedError or StorageError.
        """
        for checkpoint in self._on_line():
            if checkpoint.step == step:
                return catalog.read_manifest(self._places[checkpoint.place], checkpoint)
        raise NoCheckpointError(f"{self._storage.place}: no checkpoint of step {step} is committed")

    def stored_after(self, step: int) -> list[tuple[int, int | None]]:
        """Return step and attempt of all that lies there of later steps, on the line or not.
        *Coordinator*.
        """
        self._look_into_fallback()
        found = catalog.stored_in(self._used_places)
        return [(checkpoint.step, checkpoint.attempt) for checkpoint in found if checkpoint.step > step]

    def begin_from(self, base: Base) -> None:
        """Note what the states to be saved go on from. *Each rank*, once that is on record.

        What an attempt that stood still has begun to remove since is taken back.
        """
        self.base = base
        if self._peers.is_coordinator:
            self._move_back()

    def _move_back(self) -> None:
        # What cannot be brought back is not there to be listed either.
        with contextlib.suppress(StorageError, SupersededError):
            for storage in self._used_places:
                catalog.move_back(storage, self._lineage())

    def restore(
        self,
        wanted: Callable[[Manifest], Sequence[Shard]],
        step: int | None = None,
        *,
        expected: Mapping[int, int] | None = None,
        goes_on: Callable[[], None] = lambda: None,
    ) -> RestoredCheckpoint | None:
        """Fill the wanted shards from the newest intact checkpoint on the line, or from that of `step`.
        *Collective*.

        `wanted` is called with the manifest of each checkpoint that is tried. Returns None where the place
        holds no committed checkpoint of the line; raises NoCheckpointError where none is intact.

        A storage that does not answer is waited for, for `restore_patience_s`: the event `restore_waits`
        tells, `goes_on` is called before each try, and UnreachableError raised in the end. So is a place
        that is empty, though step `expected[0]` (of the fallback: [1]) was committed there.
        """
        if self._peers.is_coordinator:
            self._move_back()
        patience = OutagePatience(self._options.restore_patience_s, self._on_event)
        restored = restore(
            Places(self._places, self._lineage, patience, expected or {}),
            self._peers,
            self._group,
            wanted,
            how=self._options.restore,
            step=step,
            at_phase=self._at_phase,
            goes_on=goes_on,
        )
        if self._peers.is_coordinator:
            self._look_into_fallback()
        if restored is not None:
            self.base = Base(restored.step, restored.manifest.attempt)
            self.distrust(step for step, _ in restored.skipped)
        return restored

    def fallback_problem(self, num_bytes: int) -> str | None:
        """Return why so many bytes could not be written to the fallback as it looks now, None where they
        could. *One process only*; a probe is written and removed.
        """
        assert self._fallback is not None
        try:
            is_new = isinstance(self._fallback, LocalStorage) and not Path(self._fallback.place).exists()
            self._fallback.put(probe := f".probe-{secrets.token_hex(4)}", b"")
            self._fallback.remove(probe)
            free = self._fallback.free_bytes()
            if is_new:
                # Only an empty folder: a newer attempt may have saved there since.
                with contextlib.suppress(OSError):
                    Path(self._fallback.place).rmdir()
        except (StorageError, OSError) as error:
            return str(error)
        if free is not None and free < num_bytes:
            return f"{self._fallback.place}: {free:,} bytes are free, a checkpoint takes {num_bytes:,}"
        return None

    def claim(self, owner: str) -> str:
        """Write down whose checkpoints these are, unless that is written already; return who it is.

        *One rank only*, before the first save. A place has one owner for good.
        """
        return catalog.claim(self._storage, owner)

    def is_anything_there(self) -> bool:
        """Whether the place holds anything at all. *Any rank*; it looks at the storage."""
        return bool(self._storage.names())

    def owner(self) -> str | None:
        """Return who has claimed the place, None where nobody has. *Any rank*; it looks at the storage."""
        return catalog.owner(self._storage)
