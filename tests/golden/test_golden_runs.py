"""Four layouts compute the recorded bits and write the recorded keys: moving code alters neither.

Bits are compared where the processor is the one that they were recorded on, and on others the numbers within
1e-4: kernels for other instructions add in another order.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fresh_runs import LAYOUTS, computed, event_keys, pack_corpus, processor, stop, train, written
from goldens import REMEDY, differences, read

pytestmark = pytest.mark.ranks

OTHER_PROCESSOR = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("layouts")
    pack_corpus(made)
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_writes_the_recorded_keys_and_computes_the_recorded_bits(folder: Path, layout: str) -> None:
    trained = train(folder, layout)
    wrong = differences(read(f"layouts/{layout}.written.json"), written(trained))
    wrong += differences(read(f"layouts/{layout}.events.json"), event_keys(trained))
    assert not wrong, "\n".join([*wrong, REMEDY])
    recorded, found = read(f"layouts/{layout}.computed.json"), computed(trained)
    if recorded.pop("processor") == processor():
        assert found == recorded, REMEDY
        return
    steps = zip(recorded["loss_and_grad_norm"], found["loss_and_grad_norm"], strict=True)
    for before, now in steps:
        # None is a number that was not finite.
        expected = before if None in before else pytest.approx(before, rel=OTHER_PROCESSOR)
        assert now == expected, REMEDY


def test_a_stopped_run_ends_with_75_and_writes_the_recorded_events(folder: Path) -> None:
    wrong = differences(read("layouts/stopped.events.json"), event_keys(stop(folder)))
    assert not wrong, "\n".join([*wrong, REMEDY])
