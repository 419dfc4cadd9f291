"""How to save and restore, and what a user may hook in. Plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Called at named moments with the step, for rehearsals of failures.
Phase = Callable[[str, int], None]
# Called with an event's name and its evidence, also from background threads.
Event = Callable[[str, Mapping[str, Any]], None]

# staging: shards are copied · mid_file: half of a file is written · before_vote: this rank's files are
# durable, the coordinator does not know · before_manifest: it knows all, nothing is committed · before_prune:
# committed, older ones not yet removed · restore: half of this rank's chunks are read.
PHASES = ("staging", "mid_file", "before_vote", "before_manifest", "before_prune", "restore")


@dataclass(frozen=True)
class Options:
    """What all ranks agree on.

    `generation` numbers the attempt that writes: each start needs one of its own, greater than those before,
    or on an object store it overwrites their files. `layout` is written down as it is. `score_of`: what
    `keep_best` compares. `when_busy`: `skip` or `wait`; `restore`: `broadcast`, `rank0` or `direct`;
    `replaces`: of two saves of a step, by whichever attempt, the older one goes. `limit_s` bounds every wait
    of a save or restore. `staging_dir`: a folder of this machine where each rank's save is put together in a
    file without a name; None: in host memory. `restore_patience_s`: how long a restore waits for a storage
    that does not answer.
    """

    generation: int = 0
    layout: Mapping[str, Any] = field(default_factory=dict)
    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0
    when_busy: str = "wait"
    restore: str = "broadcast"
    limit_s: float = 600.0
    staging_dir: str | None = None
    score_of: str | None = None
    replaces: bool = False
    restore_patience_s: float = 300.0


@dataclass(frozen=True)
class Needs:
    """Bytes that saving takes: the whole checkpoint on storage, this rank's staging buffer;
    what is free on storage, None where it does not tell; and where that is too little, what older
    checkpoints take that a save without room removes first.
    """

    checkpoint_bytes: int
    staging_bytes: int
    free_storage_bytes: int | None
    removable_bytes: int = 0


def no_event(_name: str, _evidence: Mapping[str, Any]) -> None:
    """Ignore an event."""


def no_fault(_phase: str, _step: int) -> None:
    """Go on."""
