"""Which checkpoints may go: a pure rule of those on the line, and the acts that follow it. No torch.

What is off the line counts for no rule. Retention removes of it what was published after a newer attempt had
begun, which nobody can miss; all else stays until a person asks for it (`remove_off_line`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from checkpointing.catalog import (
    OffLine,
    StoredCheckpoint,
    check_sizes,
    read_manifest,
    remove_checkpoint,
    split,
    stored,
    stored_in,
)
from checkpointing.checkpoint_errors import DamagedError, NewerVersionError, StorageError
from checkpointing.lineage import Lineage
from checkpointing.storage import Storage

# What older versions kept of checkpoints that a roll-back had made void.
_SET_ASIDE = re.compile(r"step-\d{8,}\.set-aside-[0-9a-f]{8}")


@dataclass(frozen=True)
class CommittedCheckpoint:
    """A committed checkpoint. `score` is what `keep_best` compares, lower is better; None: it has none.
    `is_intact` is false where it is known to be damaged.
    """

    step: int
    score: float | None = None
    is_intact: bool = True


@dataclass(frozen=True)
class RetentionPolicy:
    """Keep the newest `keep_last`, every one whose step is a multiple of `keep_every_steps`, and the
    `keep_best` with the lowest scores.

    `score_of`: the name of what is compared. A state that has another one as its "score_of" has no score;
    None, there or here: all scores are of one thing. `replaces`: of two of a step the older one goes.
    """

    keep_last: int = 3
    keep_every_steps: int | None = None
    keep_best: int = 0
    score_of: str | None = None
    replaces: bool = False


def to_remove(checkpoints: Sequence[CommittedCheckpoint], policy: RetentionPolicy) -> list[int]:
    """Return the steps that no rule keeps, ascending. The newest intact one is always kept.

    Damaged ones count for no rule, so that they cannot push an intact one out; they go once `keep_last`
    intact ones are newer.
    """
    intact = [checkpoint for checkpoint in checkpoints if checkpoint.is_intact]
    steps = sorted(checkpoint.step for checkpoint in intact)
    keep = set(steps[-max(1, policy.keep_last) :])
    if policy.keep_every_steps:
        keep |= {step for step in steps if step % policy.keep_every_steps == 0}
    scored = sorted(
        (checkpoint.score, checkpoint.step) for checkpoint in intact if checkpoint.score is not None
    )
    keep |= {step for _, step in scored[: policy.keep_best]}
    if not keep:
        return []
    damaged = {checkpoint.step for checkpoint in checkpoints if not checkpoint.is_intact}
    return sorted({*steps} - keep | {step for step in damaged if step < min(keep)})


def prune(
    storage: Storage,
    policy: RetentionPolicy,
    lineage: Callable[[], Lineage] = Lineage,
    known: dict[int, CommittedCheckpoint] | None = None,
    upcoming: int | None = None,
    fallback: Storage | None = None,
    saved: int | None = None,
) -> list[int]:
    """Remove the checkpoints of the line that the policy does not keep, and those that were published off it
    after a newer attempt had begun; return their steps.

    `upcoming`: a step that has no room; what would go once it is saved goes now, but never the newest intact
    one. `saved`: a step that was committed just now; it stays, also among later ones.
    What else is off the line stays, and counts for no rule. `lineage` is asked again before each is lost.
    `known` holds what is known of the line's checkpoints already, so that many that are kept for good are not
    read again after every save; whoever writes one anew takes it out. What lies in `fallback`, the run's
    second place, counts and goes like the rest; where that does not answer, its StorageError is raised when
    the rest is done. So is that of a checkpoint that cannot be looked at, which stays and counts for no rule.
    """
    storages = [storage] if fallback is None else [storage, fallback]
    known = {} if known is None else known
    judged_by = lineage()
    found, failure = _stored(storages)
    on, off = split(found, judged_by)
    failure = _look_at(on, storages, policy, known) or failure
    there = [known[checkpoint.step] for checkpoint in on if checkpoint.step in known]
    policy_says = set(to_remove(there, policy) if upcoming is None else _outdated(there, upcoming, policy))
    leaving = [each for each in on if each.step in policy_says and each.step != saved]
    # Of two saves of a step by one attempt the older is void, whatever is replaced besides.
    renewed = {(each.step, each.attempt) for each in on if each.attempt is not None}
    late = [
        it
        for it, each in ((each.checkpoint, each) for each in off)
        if each.is_late or (each.departure is None and (policy.replaces or (it.step, it.attempt) in renewed))
    ]
    removed = []
    for checkpoint in (*leaving, *late):
        place = storages[checkpoint.place]
        try:
            if not remove_checkpoint(place, checkpoint, lambda: lineage() == judged_by):
                break
        except StorageError as error:
            # One that may not be removed does not keep all others.
            failure = failure or error
            continue
        removed.append(checkpoint.step)
        if checkpoint in leaving:
            del known[checkpoint.step]
    if failure is not None:
        raise failure
    return sorted(removed)


def removable_bytes(
    storage: Storage, policy: RetentionPolicy, lineage: Lineage, fallback: Storage | None = None
) -> int:
    """Return what `prune` would free for a step after all others that has no room. Raises StorageError."""
    storages = [storage] if fallback is None else [storage, fallback]
    on, _ = split(stored_in(storages), lineage)
    known: dict[int, CommittedCheckpoint] = {}
    _look_at(on, storages, policy, known)
    there = list(known.values())
    upcoming = max((checkpoint.step for checkpoint in on), default=0) + 1
    leaving = set(_outdated(there, upcoming, policy))
    return sum(
        sum(storage.sizes(checkpoint.folder).values())
        for checkpoint in on
        if checkpoint.step in leaving and checkpoint.place == 0
    )


def _look_at(
    on: Iterable[StoredCheckpoint],
    storages: Sequence[Storage],
    policy: RetentionPolicy,
    known: dict[int, CommittedCheckpoint],
) -> StorageError | None:
    """Add to `known` what it lacks of the line's checkpoints; return why one could not be looked at."""
    failure = None
    for checkpoint in on:
        if checkpoint.step not in known:
            try:
                known[checkpoint.step] = _as_kept(storages[checkpoint.place], checkpoint, policy.score_of)
            except StorageError as error:
                failure = error
    return failure


def _stored(storages: Sequence[Storage]) -> tuple[list[StoredCheckpoint], StorageError | None]:
    """Return what lies there. A fallback that does not answer must not let the place itself fill up."""
    try:
        return stored_in(storages), None
    except StorageError as error:
        return stored(storages[0]), error


def _outdated(there: Sequence[CommittedCheckpoint], upcoming: int, policy: RetentionPolicy) -> list[int]:
    """Return the steps that go once `upcoming` is saved, but for the newest intact one."""
    others = [checkpoint for checkpoint in there if checkpoint.step != upcoming]
    newest = max((checkpoint.step for checkpoint in others if checkpoint.is_intact), default=None)
    removed = to_remove([*others, CommittedCheckpoint(upcoming)], policy)
    return [step for step in removed if newest is not None and step != newest]


def is_same_score(saved: str | None, now: str | None) -> bool:
    """Whether scores of two names may be compared. What follows a space in a name tells how it is measured;
    a name without it, as older versions wrote it, is that of any.
    """
    if saved is None or now is None:
        return True
    return saved in (now, now.partition(" ")[0])


def _as_kept(storage: Storage, checkpoint: StoredCheckpoint, score_of: str | None) -> CommittedCheckpoint:
    """Look at a checkpoint as far as that is cheap: its manifest, and the sizes of its files."""
    try:
        manifest = read_manifest(storage, checkpoint)
        check_sizes(storage, manifest, checkpoint.folder)
    except NewerVersionError:
        return CommittedCheckpoint(checkpoint.step)
    except DamagedError:
        return CommittedCheckpoint(checkpoint.step, is_intact=False)
    score, of = manifest.state.get("score"), manifest.state.get("score_of")
    if not isinstance(score, int | float) or not is_same_score(of, score_of):
        return CommittedCheckpoint(checkpoint.step)
    return CommittedCheckpoint(checkpoint.step, float(score))


def remove_off_line(storage: Storage, lineage: Lineage, fallback: Storage | None = None) -> list[OffLine]:
    """Remove all that is off the line, as a person asks for; return it.

    What older versions set aside goes too.
    """
    storages = [storage] if fallback is None else [storage, fallback]
    _, off = split(stored_in(storages), lineage)
    gone = [each for each in off if remove_checkpoint(storages[each.checkpoint.place], each.checkpoint)]
    for name in storage.names():
        if _SET_ASIDE.fullmatch(name):
            storage.remove(name)
    return gone
