"""A run that goes through its data more than once says so at its begin, in its rows and in its state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conf.schema import TrainConfig
from orchestra.data.source import Blend, TokenSamples
from orchestra.run.events import EventWriter, read_events
from orchestra.run.metrics_file import EPOCH, repeats_words
from orchestra.run.paths import RunDir
from orchestra.run.rollback import Stretch
from orchestra.sizes.topology import StepBatches
from orchestra.train.state import Position
from orchestra.train.watch.epochs import build_epochs

BATCHES = StepBatches(TrainConfig(global_batch_size=10, micro_batch_size=1), dp=1)


def part(num_samples: int) -> TokenSamples:
    return TokenSamples(np.zeros(num_samples + 1, dtype=np.uint16), 1, 2, "array")


def test_only_what_is_repeated_is_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, source = RunDir(tmp_path), Blend([part(10), part(100)], [1, 3], ["web/small", "large"])
    events = EventWriter(run, "attempt-000.rank-00000", 0, rank=0)
    assert build_epochs(source, BATCHES, 4, events) is None
    assert build_epochs(source, BATCHES, 10, None) is None, "the others have no rows"
    assert read_events(run) == []
    epochs = build_epochs(source, BATCHES, 10, events)
    assert epochs is not None
    assert epochs.columns(20) == {EPOCH: pytest.approx(0.5)}
    (event,) = read_events(run)
    assert (event["event"], event["epochs"]) == ("data_repeats", {"web/small": pytest.approx(2.5)})
    assert capfd.readouterr().err == "note: the run goes 2.5 times through web/small\n"


def test_what_a_roll_back_left_out_brings_the_next_time_through_sooner(tmp_path: Path) -> None:
    events, source = EventWriter(RunDir(tmp_path), "rank", 0), part(100)
    assert build_epochs(source, BATCHES, 10, events) is None
    # After 4 steps; the 20 samples from the 50th on are passed over.
    begin = Position(4, samples=40, left_out=(Stretch(50, 70),))
    epochs = build_epochs(source, BATCHES, 10, events, begin)
    assert epochs is not None
    (event,) = read_events(RunDir(tmp_path))
    assert event["epochs"] == {"data": pytest.approx(1.2)}


def test_words_name_what_is_repeated_most_and_survive_damaged_records() -> None:
    for count, words in ((3.14159, "3.14 times"), (1.0004, "just over once"), (1234.5, "1,234 times")):
        assert repeats_words({"epochs": {"data": count}}) == f"goes {words} through its data"
    many = {"epochs": {str(number): number + 1.5 for number in range(6)}}
    assert repeats_words(many).startswith("goes 6.5 times through 5, 5.5 times through 4, ")
    assert repeats_words(many).endswith(" and 2 more parts of its data")
    for damaged in ({}, {"epochs": None}, {"epochs": []}, {"epochs": {"a": "b"}}):
        assert repeats_words(damaged) == ""


def test_a_full_disk_takes_the_record_and_no_training(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.mkdir()
    run.event_file("rank").symlink_to("/dev/full")
    epochs = build_epochs(part(4), BATCHES, 1, EventWriter(run, "rank", 0))
    assert epochs is not None
    assert epochs.columns(6) == {EPOCH: 1.5}
