"""`checkpoint.every_steps=auto`: by the times of earlier attempts, or of the first steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from conf.schema import CheckpointConfig, ClusterConfig, Config, ModelConfig, TrainConfig
from orchestra.parallel.mesh import Mesh, RankEnvironment, open_peers
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.sizes import save_interval
from orchestra.sizes.topology import Layout
from orchestra.train.checkpoints import SaveRhythm
from orchestra.train.starting_point import CheckpointContext

HOURS = 1.0


class Alone:
    """One rank's rhythm in an attempt of a run, and what it wrote down."""

    def __init__(self, path: Path, attempt: int, every_steps: Any = "auto", steps: int = 10_000) -> None:
        run = RunDir(path)
        run.path.mkdir(exist_ok=True)
        config = Config(
            model=ModelConfig(hidden_size=16, intermediate_size=24, num_hidden_layers=1),
            train=TrainConfig(steps=steps),
            checkpoint=CheckpointConfig(every_steps=every_steps),
            cluster=ClusterConfig(mtbf_device_hours=HOURS),
        )
        degrees = Layout(dp=1)
        mesh = Mesh(0, degrees, degrees.coordinates(0), torch.device("cpu"), None)
        self.events = EventWriter(run, rank_writer(attempt, 0), attempt, rank=0)
        peers = open_peers(mesh, RankEnvironment(), attempt, 20.0)
        context = CheckpointContext(config, run, attempt, RankEnvironment(), mesh, peers, self.events)
        self.run = run
        self.rhythm = SaveRhythm(context)

    def due(self, begin: int, last: int) -> list[int]:
        self.rhythm.begin(begin)
        return [step for step in range(begin + 1, last + 1) if self.rhythm.is_due(step)]

    def told(self) -> list[Record]:
        return read_events(self.run, ("save_interval",))


def test_a_number_of_steps_is_kept_and_null_saves_nothing(tmp_path: Path) -> None:
    assert Alone(tmp_path, 0, every_steps=5).due(3, 16) == [5, 10, 15]
    nothing = Alone(tmp_path, 0, every_steps=None)
    assert nothing.due(0, 50) == []
    assert nothing.told() == []


def test_a_later_attempt_goes_by_what_was_measured(tmp_path: Path) -> None:
    first = Alone(tmp_path, 0)
    first.events.write("checkpoint_started", step=10, blocked_s=8.0)
    first.events.write("checkpoint_committed", step=10)
    rows = [{"step": step, "time": float(step), "step_time_s": 2.0} for step in range(1, 11)]
    first.run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    later = Alone(tmp_path, 1)
    later.rhythm.begin(10)
    (told,) = later.told()
    assert (told["source"], told["step_time_s"], told["stall_s"]) == ("measured", 2.0, 8.0)
    expected = save_interval.chosen(2.0, 8.0, save_interval.mttf_s(1, HOURS)).every_steps
    assert told["every_steps"] == expected


def test_in_the_first_attempt_the_first_steps_are_timed(tmp_path: Path) -> None:
    alone = Alone(tmp_path, 0)
    alone.rhythm.begin(0)
    assert [step for step in range(1, 21) if alone.rhythm.is_due(step)] == []
    assert alone.told() == []
    alone.rhythm.is_due(21)
    (told,) = alone.told()
    assert told["source"] == "measured"
    assert 1 <= told["every_steps"] <= 10_000


def test_the_interval_is_no_longer_than_the_run(tmp_path: Path) -> None:
    first = Alone(tmp_path, 0)
    first.run.metrics.write_text(json.dumps({"step": 1, "time": 1.0, "step_time_s": 0.001}) + "\n")
    assert Alone(tmp_path, 1, steps=40).due(0, 40) == [40]
