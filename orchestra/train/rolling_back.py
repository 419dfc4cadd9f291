"""Where a run goes on that is rolled back, and which data it leaves out: decided once, by rank 0, and written
down before the attempt ends.

PaLM's practice (arXiv:2204.02311, section 5.1): restart from a checkpoint roughly 100 steps before the spike
started, and skip the batches that were seen before and during it, 200 to 500. What becomes of it then is the
next attempt's: `orchestra.roll_backs` says what is void, `beginning` restores. Whether the run may go on at
all is the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.checkpointer import Checkpointer
from checkpointing.errors import CheckpointError
from conf.schema import RollBackConfig
from orchestra import roll_backs
from orchestra.events import EventWriter, is_whole
from orchestra.roll_backs import BadSteps, RollBack, Stretch, kept, merged


@dataclass(frozen=True)
class Seen:
    """What the training has seen: where its data stands behind the last bad step, the sequences of a global
    batch, and what is left out already.
    """

    position: int
    global_batch_size: int
    left_out: tuple[Stretch, ...]


def target(committed: Sequence[int], first_bad: int, steps_before: int) -> int:
    """Return the step to go back to: of the committed ones (ascending) the newest that is `steps_before` the
    first bad one, else the oldest before that, else 0, the beginning.
    """
    before = [step for step in committed if step < first_bad]
    old_enough = [step for step in before if step <= first_bad - steps_before]
    return old_enough[-1] if old_enough else min(before, default=0)


def order(
    checkpointer: Checkpointer,
    bad: BadSteps,
    seen: Seen,
    config: RollBackConfig,
    attempt: int,
    events: EventWriter,
) -> RollBack:
    """Decide on a roll-back and put it on the disk. *Rank 0 only*, no save under way.

    Raises StorageError where the checkpoints cannot be listed, and OSError where nothing can be written.
    """
    to, position = _target(checkpointer, bad, config)
    stretch = _stretch(to, position, bad, seen, config) if bad.leaves_out else None
    size = seen.global_batch_size
    found = RollBack(
        attempt=attempt,
        step=bad.last,
        to=to,
        cause=bad.cause,
        left_out=() if stretch is None else (stretch,),
        data_steps=None if stretch is None else (stretch.begin // size + 1, -(-stretch.end // size)),
    )
    events.write(
        roll_backs.EVENT,
        step=found.step,
        first_bad=bad.first,
        to=to,
        cause=found.cause,
        left_out=roll_backs.to_lists(found.left_out),
        data_steps=None if found.data_steps is None else list(found.data_steps),
        message=bad.words,
    )
    events.sync()
    return found


def _target(checkpointer: Checkpointer, bad: BadSteps, config: RollBackConfig) -> tuple[int, int]:
    """Return the step to go back to, and where the data stood behind it."""
    committed = checkpointer.committed_steps()
    while committed:
        # A device may have been broken since before all that is kept: then from the oldest.
        first = bad.first if bad.leaves_out else max(bad.first, committed[0] + 1)
        step = target(committed, first, config.steps_before if bad.leaves_out else 1)
        if step == 0:
            break
        try:
            samples = checkpointer.manifest(step).state.get("samples")
        except CheckpointError:
            samples = None
        if is_whole(samples):
            return step, samples
        # The restore will pass it over too.
        committed.remove(step)
    return 0, 0


def _stretch(to: int, position: int, bad: BadSteps, seen: Seen, config: RollBackConfig) -> Stretch:
    """Return what is left out from the data behind step `to` on: so many steps, and all bad ones."""
    num_steps = max(config.skip_steps, bad.last - to)
    parts = kept(position, num_steps * seen.global_batch_size, merged(seen.left_out))
    begin, count = parts[-1]
    return Stretch(parts[0][0], max(begin + count, seen.position))
