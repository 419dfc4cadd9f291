"""Steps that neighbours compute again: the same bits on every layout, and a flipped one is found."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from layouts import peers
from pool import Ranks
from small_trainings import EVEN, bits, config_of, mesh_of, tokens_of

from conf.schema import Config, Recompute, RecoveryConfig
from orchestra.errors import ConfigError
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir
from orchestra.run.planned_faults import planned_faults
from orchestra.sizes.topology import layout
from orchestra.train.build import Training, build_model_and_optimizer, build_step
from orchestra.train.hooks import StepHooks
from orchestra.train.state import Position, TensorState
from orchestra.train.trainer import build_replay
from orchestra.train.watch.inject_faults import Faults, planned_loss_factor
from orchestra.train.watch.replay import Replay, ReplayError

STEPS, EVERY, FLIPPED_AT = 6, 2, 4
LAYOUTS: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 1},
    {"zero": 2},
    {"zero": 1, "shard_degree": 2},
    {"zero": 0, "precision": "bf16"},
    {"zero": 2, "precision": "fp16"},
    {"zero": 1, "tp": 2},
    {"zero": 2, "tp": 2, "sequence_parallel": True, "precision": "bf16"},
    {"zero": 1, "train": {"recompute": Recompute.selective}},
    {"zero": 1, "cp": 2},
]


def config(every: int | None, train: dict[str, Any] | None = None, **choices: Any) -> Config:
    sizes = {"global_batch_size": 16, "micro_batch_size": 2, **(train or {})}
    base = config_of(EVEN, train=sizes, **choices)
    return replace(base, recovery=RecoveryConfig(replay_every_steps=every))


def trained(
    rank: int,
    world: int,
    config: Config,
    folder: Path,
    flip: tuple[int, int] | None = None,
    fault: str = "flip",
) -> Any:
    """Return the rows and the state's bits; of a step that differed the step and what is known of it.
    `flip`: the step in which a bit flips, or another fault strikes, and on which rank.
    """
    mesh = mesh_of(rank, layout(config.parallelism, world))
    built = build_model_and_optimizer(config, mesh)
    planned = [] if flip is None else [{"at_step": flip[0], "rank": flip[1], "fault": fault}]
    faults = Faults(planned_faults(planned), 0, rank, flipped=built.parallelized.model.norm.weight)
    replay = None
    if config.recovery.replay_every_steps is not None:
        events = EventWriter(RunDir(folder), "rank", 0) if rank == 0 else None
        among = peers(rank, world, f"replay/{folder}", limit_s=60.0)
        is_deterministic = config.train.deterministic
        factor_of = partial(planned_loss_factor, planned_faults(planned), 0)
        replay = Replay(
            config.recovery, is_deterministic, built.parallelized, mesh, among, events, 0, factor_of
        )
    hooks = StepHooks((faults, replay))
    step_of_run = build_step(config, mesh, built, hooks)
    training = Training(built.parallelized, built.optimizer, built.batches, step_of_run)
    rows = []
    for step in range(1, STEPS + 1):
        try:
            with hooks.around_step(step):
                result = training.step.run(step, tokens_of(config, step, mesh, training))
        except ReplayError as error:
            return step, error.bad
        rows.append((float(result.loss), float(result.grad_norm)))
    training.parallelized.stage.settle()
    return rows, bits(TensorState(training.parallelized, training.optimizer, mesh))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_replay_agrees_and_changes_no_bit_of_the_training(
    ranks: Ranks, tmp_path: Path, layout: dict[str, Any]
) -> None:
    without = ranks(4).run(trained, config=config(None, **layout), folder=tmp_path)
    with_replay = ranks(4).run(trained, config=config(EVERY, **layout), folder=tmp_path)
    assert with_replay == without
    assert all(len(rows) == STEPS for rows, _ in with_replay)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_flipped_bit_names_the_rank_that_computed_it(
    ranks: Ranks, tmp_path: Path, zero: int, at: int
) -> None:
    config_of_stage = config(EVERY, zero=zero)
    results = ranks(4).run(trained, config=config_of_stage, folder=tmp_path, flip=(FLIPPED_AT, at))
    assert all(of_rank == results[0] for of_rank in results)
    step, bad = results[0]
    first = FLIPPED_AT - EVERY + 1
    assert (step, bad.first, bad.last, bad.leaves_out) == (FLIPPED_AT, first, FLIPPED_AT, False)
    assert f"rank {at} on" in bad.words
    (event,) = read_events(RunDir(tmp_path))
    assert (event["event"], event["rank"], event["is_settled"]) == ("replay_differs", at, True)
    assert (event["of_rank"], event["by_rank"], event["step"]) == (at, (at + 1) % 4, FLIPPED_AT)


@pytest.mark.parametrize("fault", ["spike", "nan"])
def test_a_loss_that_is_multiplied_on_purpose_is_no_broken_device(
    ranks: Ranks, tmp_path: Path, fault: str
) -> None:
    rows = [
        rows
        for rows, _ in ranks(4).run(
            trained, config=config(EVERY, zero=1), folder=tmp_path, flip=(FLIPPED_AT, 1), fault=fault
        )
    ]
    assert [len(of_rank) for of_rank in rows] == [STEPS] * 4
    loss, _ = rows[0][FLIPPED_AT - 1]
    # A quarter of the batch's losses, or all of it, is not what it was.
    assert math.isnan(loss) if fault == "nan" else loss > 100 * rows[0][0][0]
    assert read_events(RunDir(tmp_path)) == []


def test_of_two_data_parallel_ranks_one_is_broken_and_nobody_says_which(ranks: Ranks, tmp_path: Path) -> None:
    two = config(EVERY, zero=1, tp=2)
    step, bad = ranks(4).run(trained, config=two, folder=tmp_path, flip=(FLIPPED_AT, 1))[0]
    assert step == FLIPPED_AT
    assert all(words in bad.words for words in ("rank 1 on", "rank 3 on", "one of these two is broken"))
    (event,) = read_events(RunDir(tmp_path))
    assert (event["of_rank"], event["by_rank"], event["is_settled"]) == (1, 3, False)


def refusal(rank: int, world: int, attempt: int, folder: Path) -> str | None:
    """Return why one data-parallel rank's replays are refused, None where they are not."""
    alone = config(EVERY, tp=2)
    mesh = mesh_of(rank, layout(alone.parallelism, world))
    built = build_model_and_optimizer(alone, mesh)
    events = EventWriter(RunDir(folder), "rank", attempt) if rank == 0 else None
    among = peers(rank, world, f"refusal/{folder}", limit_s=60.0)
    try:
        assert build_replay(alone, mesh, built, among, events, Position(), attempt) is None
    except ConfigError as error:
        return str(error)
    return None


def test_a_later_attempt_goes_on_without_where_a_first_one_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Its nodes may be fewer than those that the run began on."""
    messages = ranks(2).run(refusal, attempt=0, folder=tmp_path / "0")
    assert all("one data-parallel rank" in message for message in messages)
    assert ranks(2).run(refusal, attempt=1, folder=tmp_path / "1") == [None, None]
    (event,) = read_events(RunDir(tmp_path / "1"))
    assert event["event"] == "replay_off"
    assert "one data-parallel rank" in event["cause"]
