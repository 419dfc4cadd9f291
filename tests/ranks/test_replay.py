"""Steps that neighbours compute again: the same bits on every layout, and a flipped one is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from pool import RankPool
from small_trainings import EVEN, config_of, mesh_of, tokens_of
from test_zero_checkpoints import bits

from checkpointing.peers import Peers
from conf.schema import Config, RecoveryConfig
from orchestra.errors import ConfigError
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir
from orchestra.run.planned_faults import planned_faults
from orchestra.sizes.topology import layout
from orchestra.train.build import Training, build_model_and_optimizer, build_step
from orchestra.train.hooks import StepHooks
from orchestra.train.state import Position, TensorState
from orchestra.train.trainer import build_replay
from orchestra.train.watch.inject_faults import Faults
from orchestra.train.watch.replay import Replay, ReplayError

pytestmark = pytest.mark.ranks

Ranks = Callable[[int], RankPool]
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
]
RECOMPUTING = {"recompute": "selective"}


def config(every: int | None, train: dict[str, Any] | None = None, **choices: Any) -> Config:
    sizes = {"global_batch_size": 16, "micro_batch_size": 2, **(train or {})}
    base = config_of(EVEN, train=sizes, **choices)
    return replace(base, recovery=RecoveryConfig(replay_every_steps=every))


def trained_all(rank: int, world: int, configs: list[Config]) -> list[Any]:
    return [_trained(rank, world, each, number) for number, each in enumerate(configs)]


def _trained(
    rank: int,
    world: int,
    config: Config,
    number: int,
    inject: list[dict[str, Any]] | None = None,
    folder: Path | None = None,
) -> Any:
    """Return the rows and the state's bits; of a step that differed the step and what was said."""
    mesh = mesh_of(rank, layout(config.parallelism, world))
    built = build_model_and_optimizer(config, mesh)
    flipped = built.parallelized.trained[-1].parameter
    faults = Faults(planned_faults(inject or []), 0, rank, flipped=flipped)
    replay = None
    if config.recovery.replay_every_steps is not None:
        store = dist.distributed_c10d._get_default_store()
        prefix = dist.PrefixStore(f"replay {dist.get_world_size()} {number} {folder}", store)  # type: ignore[attr-defined]
        peers = Peers(rank, world, prefix, 60.0)
        events = EventWriter(RunDir(folder), "rank", 0) if folder is not None and rank == 0 else None
        replay = Replay(config, built.parallelized, mesh, peers, events, 0)
    hooks = StepHooks((faults, replay))
    step_of_run = build_step(config, mesh, built, hooks)
    training = Training(built.parallelized, built.optimizer, step_of_run, built.batch)
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


def test_a_replay_agrees_on_every_layout_and_changes_no_bit_of_the_training(ranks: Ranks) -> None:
    choices: list[dict[str, Any]] = [*LAYOUTS, {"zero": 1, "train": RECOMPUTING}]
    pairs = [(config(None, **each), config(EVERY, **each)) for each in choices]
    results = ranks(4).run(trained_all, world=4, configs=[it for pair in pairs for it in pair])
    for of_rank in results:
        for without, with_replay in zip(of_rank[::2], of_rank[1::2], strict=True):
            assert len(with_replay[0]) == STEPS
            assert with_replay == without


def flipped(rank: int, world: int, choices: dict[str, Any], at: int, folder: Path) -> Any:
    inject = [{"at_step": FLIPPED_AT, "rank": at, "fault": "flip"}]
    return _trained(rank, world, config(EVERY, **choices), 0, inject, folder)


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("zero", [0, 2])
def test_a_flipped_bit_names_the_rank_that_computed_it(
    ranks: Ranks, tmp_path: Path, zero: int, at: int
) -> None:
    results = ranks(4).run(flipped, world=4, choices={"zero": zero}, at=at, folder=tmp_path)
    assert all(of_rank == results[0] for of_rank in results)
    step, bad = results[0]
    assert (step, bad.first, bad.last, bad.leaves_out) == (
        FLIPPED_AT,
        FLIPPED_AT - EVERY + 1,
        FLIPPED_AT,
        False,
    )
    assert f"rank {at} on" in bad.words
    (event,) = read_events(RunDir(tmp_path))
    assert (event["event"], event["rank"], event["is_settled"]) == ("replay_differs", at, True)
    assert (event["of_rank"], event["by_rank"], event["step"]) == (at, (at + 1) % 4, FLIPPED_AT)


def test_of_two_data_parallel_ranks_one_is_broken_and_nobody_says_which(ranks: Ranks, tmp_path: Path) -> None:
    choices = {"zero": 1, "tp": 2}
    results = ranks(4).run(flipped, world=4, choices=choices, at=1, folder=tmp_path)
    step, bad = results[0]
    assert step == FLIPPED_AT
    assert "rank 1 on" in bad.words
    assert "rank 3 on" in bad.words
    assert "one of these two is broken" in bad.words
    (event,) = read_events(RunDir(tmp_path))
    assert (event["of_rank"], event["by_rank"], event["is_settled"]) == (1, 3, False)


def test_a_bit_that_is_flipped_in_another_step_goes_unseen(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks(2).run(unseen, world=2, folder=tmp_path)
    assert all(len(rows) == STEPS for rows, _ in results)
    assert read_events(RunDir(tmp_path)) == []


def unseen(rank: int, world: int, folder: Path) -> Any:
    inject = [{"at_step": FLIPPED_AT + 1, "rank": 1, "fault": "flip"}]
    return _trained(rank, world, config(EVERY, zero=0), 0, inject, folder)


def test_a_later_attempt_goes_on_without_where_a_first_one_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    """Its nodes may be fewer than those that the run began on."""
    refused = ranks(2).run(asked_for, world=2, attempt=0, folder=tmp_path / "0")
    assert all("one data-parallel rank" in said for said in refused)
    assert ranks(2).run(asked_for, world=2, attempt=1, folder=tmp_path / "1") == [None, None]
    (event,) = read_events(RunDir(tmp_path / "1"))
    assert event["event"] == "replay_off"
    assert "one data-parallel rank" in event["cause"]


def asked_for(rank: int, world: int, attempt: int, folder: Path) -> str | None:
    """Return what is said against replays, None where nothing is."""
    asked = config(EVERY, zero=0, tp=2)
    mesh = mesh_of(rank, layout(asked.parallelism, world))
    built = build_model_and_optimizer(asked, mesh)
    store = dist.distributed_c10d._get_default_store()
    prefix = dist.PrefixStore(f"asked for {attempt} {folder}", store)  # type: ignore[attr-defined]
    events = EventWriter(RunDir(folder), "rank", attempt) if rank == 0 else None
    peers = Peers(rank, world, prefix, 60.0)
    try:
        assert build_replay(asked, mesh, built, peers, events, Position(), attempt) is None
    except ConfigError as error:
        return str(error)
    return None
