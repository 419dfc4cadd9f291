"""A loader passes over what the run leaves out, on any world size, and else reads what it always read."""

from __future__ import annotations

import numpy as np
import pytest
from test_loader import GLOBAL_BATCH, SOURCE, plan

from orchestra.data.loader import Batch, BatchPlan, Loader
from orchestra.run.rollback import Stretch, merged

OUT = merged([Stretch(GLOBAL_BATCH, 3 * GLOBAL_BATCH), Stretch(4 * GLOBAL_BATCH + 3, 4 * GLOBAL_BATCH + 5)])


def batches(of: BatchPlan, number: int, position: int = 0, left_out: tuple[Stretch, ...] = ()) -> list[Batch]:
    loader = Loader(SOURCE, of, seed=7, position=position, left_out=left_out)
    found = [loader.next_batch() for _ in range(number)]
    loader.close()
    return found


def ids(found: list[Batch]) -> list[int]:
    return [int(it) for batch in found for it in batch.sample_ids.ravel()]


def test_no_sample_that_is_left_out_is_read_and_every_other_one_is() -> None:
    whole = ids(batches(plan(GLOBAL_BATCH), 8))
    kept = [whole[place] for place in range(len(whole)) if not any(it.begin <= place < it.end for it in OUT)]
    found = ids(batches(plan(GLOBAL_BATCH), 5, left_out=OUT))
    assert found == kept[: len(found)]


def test_whole_steps_that_are_left_out_are_as_if_they_were_not_there() -> None:
    whole = batches(plan(GLOBAL_BATCH), 6)
    found = batches(plan(GLOBAL_BATCH), 4, left_out=(Stretch(GLOBAL_BATCH, 3 * GLOBAL_BATCH),))
    for one, other in zip([whole[0], *whole[3:]], found, strict=True):
        assert (one.sample_ids == other.sample_ids).all()
        assert one.position == other.position


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_going_on_from_a_position_reads_on(steps: int) -> None:
    whole = batches(plan(GLOBAL_BATCH), 5, left_out=OUT)
    rest = batches(plan(GLOBAL_BATCH), 5 - steps, position=whole[steps - 1].position, left_out=OUT)
    assert np.concatenate([it.sample_ids for it in rest]).tolist() == (
        np.concatenate([it.sample_ids for it in whole[steps:]]).tolist()
    )
