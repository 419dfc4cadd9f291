"""What can go wrong with checkpoints. Each message says what was found and where.

CheckpointError
├── StorageError        the storage refuses or fails: full, read-only, unreachable
│   └── UnreachableError    it did not answer for as long as a restore waits; says nothing of what it holds
├── DamagedError        a checkpoint is not what its manifest says; names file and tensor
│   └── NewerVersionError   its manifest is that of a newer version of this package
├── NoCheckpointError   nothing to restore from, or nothing intact
├── SupersededError     a newer attempt has saved this step: what this one holds is void
├── MismatchError       the ranks do not describe one whole state, or a checkpoint does not fit the request
├── MissingRanksError   ranks that did not answer within the limit
├── FalseWordError      what lies in the ranks' store was not written by the run's ranks, or is torn
└── SaveFailedError     a save that was not committed; carries the reason of each rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class CheckpointError(Exception):
    """Any failure of this package; the message says what was found, what was expected and what to do."""


class StorageError(CheckpointError):
    """Raised when the storage refuses or fails an operation, after its retries."""


class UnreachableError(StorageError):
    """Raised by a restore whose storage did not answer for as long as it waits: nothing is known to be
    damaged.
    """


class DamagedError(CheckpointError):
    """Raised when a file or a manifest is not what it was written as."""

    def __init__(self, what: str, *, file: str | None = None, tensor: str | None = None) -> None:
        self.what = what
        self.file = file
        self.tensor = tensor
        place = ": ".join(part for part in (file, tensor) if part)
        super().__init__(f"{place}: {what}" if place else what)


class NewerVersionError(DamagedError):
    """Raised for a manifest of a newer version: what it says cannot be told here, and may be intact."""


class NoCheckpointError(CheckpointError):
    """Raised when no checkpoint can be restored; `skipped` tells why each one that is there was not taken."""

    def __init__(self, message: str, skipped: Sequence[tuple[int, str]] = ()) -> None:
        self.skipped = list(skipped)
        reasons = "".join(f"\n  step {step}: {reason}" for step, reason in self.skipped)
        super().__init__(message + reasons)


class SupersededError(CheckpointError):
    """Raised when a newer attempt has saved the step: the run goes on from other states than the caller's."""


class MismatchError(CheckpointError):
    """Raised when shards do not make up one state, or a state does not fit what is asked of it."""


class MissingRanksError(CheckpointError):
    """Raised when ranks did not answer within the limit; `ranks` are those."""

    def __init__(self, ranks: Sequence[int], topic: str, limit_s: float) -> None:
        self.ranks = list(ranks)
        names = ", ".join(map(str, self.ranks[:20])) + (" …" if len(self.ranks) > 20 else "")
        super().__init__(
            f"{topic}: no answer within {limit_s:g} s from rank{'s' if len(self.ranks) > 1 else ''} {names}"
        )


class FalseWordError(CheckpointError):
    """Raised where a word in the ranks' store is not one of the run's own."""


class SaveFailedError(CheckpointError):
    """Raised by `wait` when the save in flight was not committed; `reasons` holds one text for each rank that
    failed.
    """

    def __init__(self, step: int, reasons: Mapping[int, str]) -> None:
        self.step = step
        self.reasons = dict(reasons)
        listed = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(self.reasons.items()))
        super().__init__(f"the checkpoint of step {step} was not committed: {listed}")
