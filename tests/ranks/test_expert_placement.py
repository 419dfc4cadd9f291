"""Experts that move to other ranks in the midst of a training, which stays the same training."""

from __future__ import annotations

import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attempts import (
    EVERY,
    STEPS,
    attempt_of,
    committed,
    config_of,
    digest_at,
    events_of,
    kill_all,
    restored,
    rows,
    with_steps,
)
from mixture_trainings import MIXTURE, Choices, MixtureTrained, mixed, trained_alone, trained_mixture
from pool import Ranks
from small_trainings import SEQUENCE, assert_equal_trainings, assert_same_bits
from test_agreed_stop import stopped_attempt

from checkpointing import catalog
from checkpointing.storage import open_storage
from conf.schema import Config, EvalConfig, ExpertPlacement, ModelConfig, Offload, StateDType, WhenBusy
from orchestra.run.files import Record
from orchestra.run.heartbeat import Heart, Phase
from orchestra.run.metrics_file import eval_column, read_metrics
from orchestra.run.paths import RunDir
from tests.support.torch_features import NEEDS_ROW_PRODUCTS

MOVES_AFTER, LAST = 3, 6
AUTO, FIXED = ExpertPlacement.auto, ExpertPlacement.fixed
TIGHT = replace(MIXTURE, moe_capacity_factor=1.0)
FIVE = replace(MIXTURE, num_experts=5)
# Between them every stage of ZeRO, ranges of experts that are cut, whole and uneven ones, and every degree.
LAYOUTS: tuple[Config, ...] = (
    mixed(dp=4, ep=2, zero=2, accumulation=2),
    mixed(dp=4, ep=2, zero=0),
    mixed(TIGHT, dp=2, ep=2, tp=2, sequence_parallel=True),
    mixed(dp=2, ep=2, cp=2, zero=3, recompute="full"),
    mixed(dp=2, ep=2, pp=2, zero=1, accumulation=4),
    mixed(dp=4, ep=2, zero=3, shard_degree=2),
    mixed(FIVE, dp=3, ep=3, num_sequences=6, zero=3),
)


def uneven_choices(model: ModelConfig, num_sequences: int) -> Choices:
    """Return choices of which the first experts, neighbours, get most; in each layer others the most."""
    generator = torch.Generator().manual_seed(0)
    layers = range(model.first_k_dense_replace, model.num_hidden_layers)
    weights = 0.5 ** torch.arange(model.num_experts)
    return {
        (step, layer): torch.multinomial(
            weights.roll(layer).expand(num_sequences * SEQUENCE, -1), 2, generator=generator
        ).view(num_sequences, SEQUENCE, 2)
        for step in range(1, LAST + 1)
        for layer in layers
    }


@functools.cache
def reference(model: ModelConfig, num_sequences: int) -> tuple[MixtureTrained, Choices]:
    """Train in one process, each batch in one pass."""
    choices = uneven_choices(model, num_sequences)
    return trained_alone(mixed(model, num_sequences=num_sequences), LAST, choices), choices


def placed(config: Config, how: ExpertPlacement) -> Config:
    return replace(config, parallelism=replace(config.parallelism, expert_placement=how))


@pytest.mark.parametrize("config", LAYOUTS, ids=range(len(LAYOUTS)))
def test_a_training_whose_experts_move_is_the_same_one(ranks: Ranks, config: Config) -> None:
    num_sequences = config.train.global_batch_size
    assert num_sequences is not None
    expected, choices = reference(config.model, num_sequences)
    shape = config.parallelism
    pool = ranks(int(shape.dp) * shape.tp * shape.cp * shape.pp)
    given = {"choices": choices, "steps": LAST}
    found = pool.run(trained_mixture, config=placed(config, AUTO), moves_after=MOVES_AFTER, **given)
    assert_equal_trainings(found, expected, str(shape))
    moved = found[0].moved
    assert moved is not None
    assert moved.layers > 0
    assert moved.experts >= 2 * moved.layers
    assert 1 <= moved.load_expected < moved.load_before
    assert sum(of_rank.moved.bytes for of_rank in found if of_rank.moved is not None) > 0
    if shape.zero == 2:
        # Two ranks have the same experts: sums of two are the same in either order.
        fixed = pool.run(trained_mixture, config=config, **given)
        assert found[0].rows == fixed[0].rows
        assert_same_bits(found, fixed)


# Chosen by routers as they are at the begin, which are uneven enough. Moments are rounded by random bits.
MOVING = {
    "num_experts": 5,
    "ep": 2,
    "zero": 2,
    "precision": "bf16",
    "state_dtype": StateDType.bf16,
    "expert_placement": AUTO,
}
SECOND = 2 * EVERY


def phases_of_attempt(rank: int, world: int, **settings: Any) -> list[tuple[int, Phase]]:
    """Train an attempt; return where its heartbeats said that this rank saves."""
    beats: list[tuple[int, Phase]] = []

    def beat(_: Heart, phase: Phase, step: int = 0, *__: Any) -> None:
        beats.append((step, phase))

    with patch.object(Heart, "beat", beat):
        attempt_of(rank, world, **settings)
    last = settings["config"].train.steps
    return [(step, phase) for step, phase in beats if phase in (Phase.save, Phase.commit) and step < last]


def order_at(path: Path, step: int) -> dict[str, list[int]]:
    """Return the order of experts by layer that a checkpoint has, of those that had moved."""
    manifest = catalog.read_manifest(open_storage(str(RunDir(path).checkpoints)), step)
    return dict(manifest.state.get("experts", {}).get("order", {}))


Run = tuple[Path, list[dict[str, str]]]


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run that nobody interrupts or stops, and what its ranks hold in the end."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    return path, ranks(4).run(attempt_of, path=path, attempt=0, config=config_of(**MOVING))


def test_what_is_computed_and_saved_knows_of_no_placement(ranks: Ranks, whole: Run, tmp_path: Path) -> None:
    fixed = tmp_path / "fixed"
    config = config_of(**{**MOVING, "expert_placement": FIXED})
    ranks(4).run(attempt_of, path=fixed, attempt=0, config=config)
    assert [event["step"] for event in events_of(whole[0], "experts_moved")] == [EVERY, SECOND]
    assert events_of(fixed, "experts_moved") == []
    assert rows(whole[0]) == rows(fixed)
    for step in (EVERY, SECOND, STEPS):
        assert digest_at(whole[0], step) == digest_at(fixed, step)
    # Each goes on as the other began.
    begun = shutil.copytree(whole[0], tmp_path / "begun")
    settings = {"checkpoint": {"async_save": True}}
    auto, stays = (
        with_steps(config_of(**{**MOVING, "expert_placement": how}, **settings), 2 * SECOND + 1)
        for how in (AUTO, FIXED)
    )
    ranks(4).run(attempt_of, path=begun, attempt=1, config=stays)
    phases = ranks(4).run(phases_of_attempt, path=fixed, attempt=1, config=auto)
    assert [event["step"] for event in events_of(fixed, "experts_moved")] == [SECOND + EVERY]
    assert [event["step"] for event in events_of(begun, "experts_moved")] == [EVERY, SECOND]
    assert rows(fixed) == rows(begun)
    assert digest_at(fixed, 2 * SECOND + 1) == digest_at(begun, 2 * SECOND + 1)
    # Moving, and the first save after it, may take longer than any save that a hang's limit is learned from.
    longer = [(step, phase) for step in (SECOND + EVERY, 2 * SECOND) for phase in (Phase.save, Phase.commit)]
    assert phases == [longer] * 4


def test_a_run_whose_experts_moved_goes_on_bit_for_bit_and_on_any_other_ranks(
    ranks: Ranks, whole: Run, tmp_path: Path
) -> None:
    path, expected = whole
    broken = tmp_path / "broken"
    until_killed = config_of(**MOVING, inject=kill_all(SECOND + 2))
    assert ranks(4).run(attempt_of, path=broken, attempt=0, config=until_killed) == [None] * 4
    order = order_at(broken, SECOND)
    assert order
    on_one = {key: value for key, value in MOVING.items() if key not in ("ep", "zero")}
    # Ranks that share experts alike begin with those that they are said to have.
    others = {
        3: (config_of(**{**MOVING, "ep": 3, "zero": 3}), {}),
        2: (config_of(**MOVING), order),
        1: (config_of(**on_one), {}),
    }
    for size, (config, expected_order) in others.items():
        copy = tmp_path / f"on {size}"
        shutil.copytree(broken, copy)
        ranks(size).run(attempt_of, path=copy, attempt=1, config=config)
        assert (restored(copy)["step"], restored(copy)["digest"]) == (SECOND, digest_at(path, SECOND))
        assert order_at(copy, STEPS) == expected_order
        losses = [row["loss"] for row in rows(copy)]
        assert losses == pytest.approx([row["loss"] for row in rows(path)], rel=2e-3)
    assert ranks(4).run(attempt_of, path=broken, attempt=1, config=config_of(**MOVING)) == expected
    assert rows(broken) == rows(path)


def test_state_on_disk_moves_with_its_experts_and_is_that_in_memory(
    ranks: Ranks, whole: Run, tmp_path: Path
) -> None:
    path, expected = whole
    disk, broken = tmp_path / "disk", tmp_path / "broken"
    disk.mkdir()
    on_disk = {**MOVING, "offload": Offload.optimizer_disk, "offload_dir": str(disk)}
    until_killed = config_of(**on_disk, inject=kill_all(SECOND + 2))
    assert ranks(4).run(attempt_of, path=broken, attempt=0, config=until_killed) == [None] * 4
    assert [event["step"] for event in events_of(broken, "experts_moved")] == [EVERY, SECOND]
    assert digest_at(broken, SECOND) == digest_at(path, SECOND)
    assert ranks(4).run(attempt_of, path=broken, attempt=1, config=config_of(**on_disk)) == expected
    assert rows(broken) == rows(path)
    assert list(disk.iterdir()) == []


def test_a_run_that_was_stopped_moves_the_experts_that_it_would_have(
    ranks: Ranks, whole: Run, tmp_path: Path
) -> None:
    path, expected = whole
    stopped = tmp_path / "stopped"
    # Saves are under way while experts move.
    config = config_of(**MOVING, checkpoint={"async_save": True, "when_busy": WhenBusy.wait})
    # Its last save is not of the rhythm: experts stay, and what was counted up to there is kept.
    ranks(4).run(stopped_attempt, path=stopped, ask_at=EVERY + 2, config=config)
    assert committed(stopped) != [EVERY]
    assert ranks(4).run(attempt_of, path=stopped, attempt=1, config=config) == expected
    assert rows(stopped) == rows(path)
    told = ("step", "experts", "load_before", "load_expected")
    moves = [
        [[event[key] for key in told] for event in events_of(run, "experts_moved")] for run in (stopped, path)
    ]
    assert moves[0] == moves[1]


def in_fp8(how: ExpertPlacement, **others: Any) -> Config:
    """Return a run in fp8, of hybrid sharding, that evaluates just before it saves."""
    settings = {**MOVING, "num_experts": 6, "precision": "fp8", "shard_degree": 2, "expert_placement": how}
    config = config_of(**{**settings, **others})
    # Sizes that 16 divides.
    model = replace(config.model, hidden_size=32, intermediate_size=64, moe_intermediate_size=32)
    held_out = EvalConfig(every_steps=EVERY, steps=1, data={"source": config.data.source})
    return replace(config, model=model, eval=held_out)


@NEEDS_ROW_PRODUCTS
def test_what_is_kept_in_fp8_follows_experts_that_move_after_an_evaluation(
    ranks: Ranks, tmp_path: Path
) -> None:
    def told(run: str) -> list[tuple[Record, float | None]]:
        losses = [row.get(eval_column("held_out")) for row in read_metrics(RunDir(tmp_path / run))]
        return list(zip(rows(tmp_path / run), losses, strict=True))

    ranks(4).run(attempt_of, path=tmp_path / "fixed", attempt=0, config=in_fp8(FIXED))
    # Not in the next step: rank 0 might be gone, and its store, before others have read who moved what.
    until_killed = in_fp8(AUTO, inject=kill_all(SECOND + 2))
    ranks(4).run(attempt_of, path=tmp_path / "moved", attempt=0, config=until_killed)
    moves = [event["step"] for event in events_of(tmp_path / "moved", "experts_moved")]
    assert moves == [EVERY, SECOND]
    ranks(4).run(attempt_of, path=tmp_path / "moved", attempt=1, config=in_fp8(AUTO))
    assert told("moved") == told("fixed")
    assert [row["step"] for row, loss in told("moved") if loss is not None] == [EVERY, SECOND, STEPS]
    for step in (EVERY, SECOND, STEPS):
        assert digest_at(tmp_path / "moved", step) == digest_at(tmp_path / "fixed", step)
