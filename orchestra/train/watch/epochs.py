"""How often a run goes through its data: where that is more than once, the column data/epoch of its rows.

Each part of a blend has epochs of its own, so the column is that of the part that is repeated most. Called by
the trainer.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from orchestra.data.source import SampleSource
from orchestra.run.events import EventWriter
from orchestra.run.files import to_log
from orchestra.run.metrics_file import EPOCH, repeats_words
from orchestra.run.rollback import kept
from orchestra.sizes.topology import StepBatches
from orchestra.train.state import Position


@dataclass(frozen=True)
class Epochs:
    """Says how often a run has gone through its data: 1.25 is a quarter into the second time."""

    source: SampleSource

    def columns(self, position: int) -> dict[str, float]:
        """Return the row's column of a run that has consumed `position` samples."""
        return {EPOCH: max(self.source.epochs_at(position).values())}


def build_epochs(
    source: SampleSource,
    batches: StepBatches,
    steps: int,
    events: EventWriter | None,
    begin: Position | None = None,
) -> Epochs | None:
    """Return what tells the epochs of a run of so many steps, once that is recorded and printed; None where
    it repeats nothing, and on all ranks but 0, whose `events` these are. `begin`: where it goes on, and what
    it leaves out from there.
    """
    begin, through = begin or Position(), batches.ramp.sequences_through
    left = max(0, through(steps) - through(begin.step))
    place, count = kept(begin.samples, left, begin.left_out)[-1]
    whole = source.epochs_at(place + count)
    epochs = {name: count for name, count in whole.items() if count > 1}
    if not epochs or events is None:
        return None
    # A full disk takes what is said of it, and no training.
    with contextlib.suppress(OSError):
        events.write("data_repeats", epochs=epochs)
    to_log(f"note: the run {repeats_words({'epochs': epochs})}\n")
    return Epochs(source)
