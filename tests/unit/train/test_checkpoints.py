"""The rules of checkpoint.* on one rank and a real folder: when a run saves, what it refuses and survives."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing import catalog
from checkpointing.checkpointer import Checkpointer
from checkpointing.storage import open_storage
from conf.schema import CheckpointConfig, Config, ModelConfig, TrainConfig, WhenBusy
from orchestra.errors import TrainingError, UnusableCheckpointError
from orchestra.parallel.mesh import Mesh, RankEnvironment, open_peers
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.sizes.topology import Layout
from orchestra.train.build import Training, build_training
from orchestra.train.checkpoints import Checkpoints, build_memory_copies
from orchestra.train.memory import host_memory
from orchestra.train.metrics import Totals
from orchestra.train.starting_point import CheckpointContext
from orchestra.train.state import Position, TensorState
from orchestra.train.watch.inject_faults import Faults

ALONE = RankEnvironment()
STEPS = 20


def config_of(steps: int = STEPS, hidden_size: int = 16, **checkpoint: Any) -> Config:
    sizes = {"hidden_size": hidden_size, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 64}
    return Config(
        model=ModelConfig(**sizes, num_attention_heads=2, num_key_value_heads=2),
        train=TrainConfig(steps=steps, seq_len=8),
        checkpoint=CheckpointConfig(**{"every_steps": 5, "timeout_s": 20.0, **checkpoint}),
    )


class Attempt:
    """One attempt of a run on one rank, without a loop: the test says what was trained."""

    def __init__(self, path: Path, number: int, config: Config, faults: Faults | None = None) -> None:
        self.run = RunDir(path)
        self.run.path.mkdir(parents=True, exist_ok=True)
        if not self.run.record.exists():
            self.run.record.write_text(json.dumps({"wandb_id": f"id-of-{path.name}"}))
        degrees = Layout(dp=1)
        mesh = Mesh(0, degrees, degrees.coordinates(0), torch.device("cpu"), None)
        self.training: Training = build_training(config, mesh)
        self.state = TensorState(self.training.parallelized, self.training.optimizer, mesh)
        events = EventWriter(self.run, rank_writer(number, 0), number, rank=0)
        peers = open_peers(mesh, ALONE, number, config.checkpoint.timeout_s)
        context = CheckpointContext(config, self.run, number, ALONE, mesh, peers, events)
        copies = build_memory_copies(context, self.state)
        at_phase = (faults or Faults([], number, 0)).strike
        self.checkpoints = Checkpoints(context, self.state, copies, at_phase)

    def save(self, step: int, *, is_last: bool = False) -> None:
        """Save with every element of the state set to `step`."""
        for shard in self.state.snapshot():
            if shard.name.startswith(("model.", "optimizer.")):
                shard.tensor.fill_(step)
        totals = Totals(1.0, step * 128, 0.5)
        behind = Position(step=step, samples=step * 16, totals=totals, score=1.0 / step)
        self.checkpoints.save(behind, is_last=is_last)

    def holds(self, value: float) -> bool:
        shards = (it for it in self.state.snapshot() if not it.name.startswith("rng."))
        return all(bool((shard.tensor == value).all()) for shard in shards)


def steps_of(path: Path) -> list[int]:
    return catalog.committed_steps(open_storage(path / "checkpoints"))


def events(path: Path, name: str) -> list[Record]:
    return [event for event in read_events(RunDir(path)) if event["event"] == name]


def test_a_save_is_due_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "run", 0, config_of(steps=12))
    assert [step for step in range(1, 13) if attempt.checkpoints.is_due(step)] == [5, 10, 12]
    never = Attempt(tmp_path / "other", 0, config_of(steps=12, every_steps=None))
    assert never.checkpoints.begin() == Position()
    assert not any(never.checkpoints.is_due(step) for step in range(1, 13))
    assert not (tmp_path / "other" / "checkpoints").exists()


@pytest.mark.parametrize("async_save", [True, False])
def test_the_next_attempt_continues_behind_the_newest_checkpoint(tmp_path: Path, async_save: bool) -> None:
    first = Attempt(tmp_path / "run", 0, config_of(async_save=async_save, when_busy=WhenBusy.wait))
    assert first.checkpoints.begin() == Position()
    for step in (5, 10, STEPS):
        first.save(step)
    second = Attempt(tmp_path / "run", 1, config_of())
    begin = second.checkpoints.begin()
    assert (begin.step, begin.samples, begin.score) == (STEPS, STEPS * 16, 1.0 / STEPS)
    assert begin.totals == Totals(1.0, STEPS * 128, 0.5)
    assert second.holds(STEPS)
    (event,) = events(tmp_path / "run", "restored")
    assert (event["step"], event["skipped"], event["generation"]) == (STEPS, [], 0)
    assert event["bytes_read"] > 0
    assert [it["step"] for it in events(tmp_path / "run", "checkpoint_committed")] == [5, 10, STEPS]


def test_a_synchronous_save_is_committed_when_it_returns(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "run", 0, config_of(async_save=False))
    attempt.checkpoints.begin()
    for step in (5, 10):
        attempt.save(step)
        assert steps_of(tmp_path / "run")[-1] == step


def test_the_last_save_of_an_attempt_that_stops_early_is_committed_when_it_returns(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "run", 0, config_of(async_save=True))
    attempt.checkpoints.begin()
    attempt.save(5)
    assert attempt.checkpoints.is_due(7, is_last=True)
    attempt.save(7, is_last=True)
    assert steps_of(tmp_path / "run") == [5, 7]
    assert events(tmp_path / "run", "checkpoint_skipped") == []
    never = Attempt(tmp_path / "other", 0, config_of(every_steps=None))
    assert not never.checkpoints.is_due(7, is_last=True)


def test_a_checkpoint_whose_manifest_is_gone_is_reported(tmp_path: Path) -> None:
    first = Attempt(tmp_path / "run", 0, config_of(async_save=False))
    first.checkpoints.begin()
    for step in (5, 10):
        first.save(step)
    (tmp_path / "run" / "checkpoints" / "step-00000010" / "manifest.json").unlink()
    assert Attempt(tmp_path / "run", 1, config_of()).checkpoints.begin().step == 5
    (skipped,) = events(tmp_path / "run", "restored")[0]["skipped"]
    assert skipped["step"] == 10
    assert "manifest is not there any more" in skipped["reason"]


def test_two_runs_that_begin_in_one_place_do_not_both_train(tmp_path: Path) -> None:
    place = str(tmp_path / "shared")
    Attempt(tmp_path / "first", 0, config_of(dir=place)).checkpoints.begin()
    with pytest.raises(UnusableCheckpointError, match=r"belongs to another run .*id-of-first"):
        Attempt(tmp_path / "second", 0, config_of(dir=place)).checkpoints.begin()


def test_a_new_run_refuses_a_folder_that_holds_checkpoints(tmp_path: Path) -> None:
    place = str(tmp_path / "shared")
    first = Attempt(tmp_path / "first", 0, config_of(dir=place, async_save=False))
    first.checkpoints.begin()
    first.save(5)
    second = Attempt(tmp_path / "second", 0, config_of(dir=place))
    with pytest.raises(UnusableCheckpointError, match=r"newest: step 5.*orchestra resume"):
        second.checkpoints.begin()
    with pytest.raises(UnusableCheckpointError, match=r"id-of-first, this run's is id-of-second"):
        Attempt(tmp_path / "second", 1, config_of(dir=place)).checkpoints.begin()


def test_an_attempt_without_any_checkpoint_begins_anew_and_says_so(tmp_path: Path) -> None:
    Attempt(tmp_path / "run", 0, config_of()).checkpoints.begin()
    assert Attempt(tmp_path / "run", 1, config_of()).checkpoints.begin() == Position()
    (event,) = events(tmp_path / "run", "restored")
    assert (event["step"], event["reason"]) == (0, "no checkpoint was committed yet")


def test_an_attempt_whose_checkpoints_are_gone_never_begins_anew(tmp_path: Path) -> None:
    first = Attempt(tmp_path / "run", 0, config_of(async_save=False))
    first.checkpoints.begin()
    first.save(5)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(UnusableCheckpointError, match=r"a checkpoint of step 5.*holds none"):
        Attempt(tmp_path / "run", 1, config_of()).checkpoints.begin()


def test_a_damaged_checkpoint_is_passed_over_with_its_reason(tmp_path: Path) -> None:
    first = Attempt(tmp_path / "run", 0, config_of(async_save=False))
    first.checkpoints.begin()
    first.save(5)
    first.save(10)
    for step in (10, 5):
        (file,) = (tmp_path / "run" / "checkpoints" / catalog.step_name(step)).glob("*.safetensors")
        content = bytearray(file.read_bytes())
        content[-100] ^= 1
        file.write_bytes(content)
        attempt = Attempt(tmp_path / "run", 1, config_of())
        if step == 10:
            assert attempt.checkpoints.begin().step == 5
            assert attempt.holds(5)
            (skipped,) = events(tmp_path / "run", "restored")[0]["skipped"]
            assert skipped["step"] == 10
            assert file.name in skipped["reason"]
        else:
            with pytest.raises(UnusableCheckpointError, match="step 5"):
                attempt.checkpoints.begin()


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"hidden_size": 32}, r"model.hidden_size=16.*, this run has model.hidden_size=32"),
        ({"num_attention_heads": 1, "num_key_value_heads": 1}, "model.num_attention_heads=2"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_its_keys(
    tmp_path: Path, other: dict[str, int], found: str
) -> None:
    first = Attempt(tmp_path / "run", 0, config_of(async_save=False))
    first.checkpoints.begin()
    first.save(5)
    config = config_of()
    with pytest.raises(UnusableCheckpointError, match=found):
        Attempt(
            tmp_path / "run", 1, replace(config, model=replace(config.model, **other))
        ).checkpoints.begin()


def test_another_order_of_samples_is_refused(tmp_path: Path) -> None:
    first = Attempt(tmp_path / "run", 0, config_of(async_save=False))
    first.checkpoints.begin()
    first.save(5)
    config = replace(config_of(), train=TrainConfig(steps=STEPS, seq_len=16))
    with pytest.raises(UnusableCheckpointError, match=r"train\.seq_len=8 \(this run has 16\)"):
        Attempt(tmp_path / "run", 1, config).checkpoints.begin()


def test_a_failed_save_is_an_event_and_the_next_one_works(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "run", 0, config_of(async_save=False))
    attempt.checkpoints.begin()
    place = tmp_path / "run" / "checkpoints"
    shutil.rmtree(place, ignore_errors=True)
    place.write_text("in the way")
    attempt.save(5)
    (event,) = events(tmp_path / "run", "checkpoint_failed")
    assert (event["step"], event["rank"]) == (5, 0)
    assert list(event["reasons"]) == ["0"]
    place.unlink()
    attempt.save(10)
    assert steps_of(tmp_path / "run") == [10]


class Failing(Faults):
    """The first writes of the last step fail."""

    def __init__(self, times: int) -> None:
        super().__init__([], 0, 0)
        self._left = times

    def strike(self, phase: str, step: int) -> None:
        if (phase, step) == ("mid_file", STEPS) and self._left:
            self._left -= 1
            raise OSError(5, "Input/output error")


def test_the_last_save_is_tried_again(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "run", 0, config_of(), Failing(times=1))
    attempt.checkpoints.begin()
    attempt.save(STEPS)
    assert steps_of(tmp_path / "run") == [STEPS]
    assert len(events(tmp_path / "run", "checkpoint_failed")) == 1


def test_a_run_whose_last_save_fails_for_good_fails_clearly(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path / "run", 0, config_of(), Failing(times=2))
    attempt.checkpoints.begin()
    with pytest.raises(TrainingError, match=r"step 20 was trained, but .* Input/output error.*resume run"):
        attempt.save(STEPS)
    assert steps_of(tmp_path / "run") == []


def test_what_a_save_needs_is_known_and_checked_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Attempt(tmp_path / "run", 0, config_of()).checkpoints.begin()
    (needs,) = events(tmp_path / "run", "checkpoint_needs")
    assert 0 < needs["checkpoint_bytes"] <= needs["staging_bytes"] < needs["free_storage_bytes"]
    monkeypatch.setattr(host_memory, "available_host_bytes", lambda: 1000)
    with pytest.raises(TrainingError, match="of host memory on this node"):
        Attempt(tmp_path / "other", 0, config_of()).checkpoints.begin()


def test_storage_without_room_is_an_error_and_with_room_for_few_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    prepare = Checkpointer.prepare
    monkeypatch.setattr(
        Checkpointer,
        "prepare",
        lambda self, shards: replace(prepare(self, shards), free_storage_bytes=free),
    )
    with pytest.raises(TrainingError, match="0 bytes are free there"):
        Attempt(tmp_path / "none", 0, config_of()).checkpoints.begin()
    free = 10**6
    Attempt(tmp_path / "little", 0, config_of(keep_last=50)).checkpoints.begin()
    (event,) = events(tmp_path / "little", "checkpoint_space_low")
    assert event["missing_bytes"] == 51 * event["checkpoint_bytes"] - 10**6


def test_an_event_that_cannot_be_written_takes_no_checkpoint_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = Attempt(tmp_path / "run", 0, config_of(async_save=False))
    attempt.checkpoints.begin()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(EventWriter, "write", full)
    attempt.save(5)
    assert steps_of(tmp_path / "run") == [5]
    assert "checkpoint_committed" in capsys.readouterr().err
