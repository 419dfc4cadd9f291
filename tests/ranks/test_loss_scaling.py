"""fp16 with a scaled loss on several ranks: as close to fp32 as one process is, overflows left out alike by
all ranks, and the factor in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from small_trainings import EVEN, alone, config_of, mesh_of, start, take_steps
from test_zero_checkpoints import bits, checkpointer

from conf.schema import Config, LossScale
from orchestra.precision.loss_scale import ScaleState
from orchestra.sizes.topology import layout
from orchestra.train.build import Training, build_model_and_optimizer, build_step
from orchestra.train.hooks import StepHooks
from orchestra.train.metrics import Totals
from orchestra.train.state import Position, TensorState, position_from_json, position_to_json

pytestmark = pytest.mark.ranks

Ranks = Callable[[int], RankPool]
TRAIN: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 1}
STAGES: list[dict[str, Any]] = [
    *({"zero": zero} for zero in (0, 1, 2, 3)),
    {"zero": 3, "shard_degree": 2},
    {"zero": 1, "tp": 2},
    {"zero": 3, "tp": 2, "sequence_parallel": True},
]
# Larger than any gradient of these models can stand: the first steps overflow.
TOO_LARGE = LossScale(initial=2**24, growth_steps=4)


def fp16(scale: LossScale | None = None, **parallelism: Any) -> Config:
    config = config_of(EVEN, "fp16", train=TRAIN, **parallelism)
    return replace(config, precision=replace(config.precision, loss_scale=scale or LossScale()))


def trained_all(rank: int, world: int, configs: list[Config], steps: int) -> list[Any]:
    """Return of each training its rows, the states of the factor behind each step, and whether the update of
    an overflow changed anything.
    """
    return [_trained(rank, world, config, steps) for config in configs]


def _trained(rank: int, world: int, config: Config, steps: int) -> Any:
    training, mesh = start(rank, world, config)
    scale = training.step.loss_scale
    assert scale is not None
    state = TensorState(training.parallelized, training.optimizer, mesh)
    rows, scales, changed = [], [], []
    for step in range(1, steps + 1):
        before, overflows = bits(state), scale.state.num_overflows
        rows += take_steps(config, training, mesh, [step])
        scales.append(scale.state)
        if scale.state.num_overflows > overflows:
            changed.append(bits(state) != before)
    # The next training talks over the same groups: what is under way there must have arrived.
    training.parallelized.stage.settle()
    return rows, scales, changed, training.optimizer.num_updates


def test_every_stage_stays_as_close_to_fp32_as_one_process_does(ranks: Ranks) -> None:
    exact = alone(config_of(EVEN, train=TRAIN), steps=6)
    rounded = alone(fp16(), steps=6)
    spread = max(abs(a[0] - b[0]) for a, b in zip(rounded.rows, exact.rows, strict=True))
    results = ranks(4).run(trained_all, world=4, configs=[fp16(**stage) for stage in STAGES], steps=6)
    for of_ranks in zip(*results, strict=True):
        rows, scales, _, updates = of_ranks[0]
        assert all(of_rank[:2] == of_ranks[0][:2] for of_rank in of_ranks)
        assert updates == 6
        assert scales[-1] == ScaleState(65536.0, 6, 0)
        for (loss, norm, _), (loss_expected, norm_expected, _) in zip(rows, exact.rows, strict=True):
            assert abs(loss - loss_expected) <= max(3 * spread, 1e-3 * loss_expected)
            # Unscaled: a norm before clipping, as without a factor.
            assert norm == pytest.approx(norm_expected, rel=5e-3)


def test_overflows_are_left_out_by_all_ranks_and_are_no_bad_steps(ranks: Ranks) -> None:
    results = ranks(4).run(
        trained_all, world=4, configs=[fp16(TOO_LARGE, **stage) for stage in STAGES], steps=14
    )
    for of_ranks in zip(*results, strict=True):
        rows, scales, _, updates = of_ranks[0]
        for of_rank in of_ranks[1:]:
            assert repr(of_rank[0]) == repr(rows)
            assert of_rank[1] == scales
        num_overflows = scales[-1].num_overflows
        assert 0 < num_overflows < 14
        assert updates == 14 - num_overflows
        # The first of them, and then the factor has come down by as many halves.
        assert scales[0] == ScaleState(2.0**23, 0, 1)
        assert not any(of_change for of_rank in of_ranks for of_change in of_rank[2])
        assert not any(was_skipped for _, _, was_skipped in rows)
        losses = [loss for loss, _, _ in rows]
        assert all(torch.isfinite(torch.tensor(losses)))


def test_clipping_sees_gradients_without_the_factor() -> None:
    """Factors are powers of two: where nothing overflows or vanishes, they leave the bits of an update."""
    found = [alone(fp16(LossScale(initial=initial)), steps=3) for initial in (2**10, 2**14)]
    for (loss, norm, _), (other_loss, other_norm, _) in zip(found[0].rows, found[1].rows, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-4)
        assert norm == pytest.approx(other_norm, rel=2e-3)


def save_and_go_on(rank: int, world: int, config: Config, place: Path) -> Any:
    """Train 5 steps, save, go on to the 12th; and the same from the checkpoint in a new training."""
    training, mesh = start(rank, world, config)
    take_steps(config, training, mesh, range(1, 6))
    state = TensorState(training.parallelized, training.optimizer, mesh)
    assert training.step.loss_scale is not None
    behind = Position(
        step=5,
        num_updates=state.num_updates,
        totals=Totals(0.0, 0, 0.0),
        loss_scale=training.step.loss_scale.state,
    )
    saver = checkpointer(rank, world, place, "save")
    saver.prepare(state.snapshot())
    saver.save(5, state.snapshot(), position_to_json(behind))
    saver.wait()
    rows = take_steps(config, training, mesh, range(6, 13))
    expected = repr(rows), training.step.loss_scale.state, bits(state)

    mesh = mesh_of(rank, layout(config.parallelism, world))
    built = build_model_and_optimizer(config, mesh)
    state = TensorState(built.parallelized, built.optimizer, mesh)
    restored = checkpointer(rank, world, place, "read").restore(state.wanted)
    assert restored is not None
    begin = position_from_json(restored.state)
    state.take_back(restored.manifest, begin.num_updates)
    step = build_step(config, mesh, built, StepHooks(), begin.loss_scale)
    again = Training(built.parallelized, built.optimizer, step, built.batch)
    assert again.step.loss_scale is not None
    rows = take_steps(config, again, mesh, range(6, 13))
    return expected, (repr(rows), again.step.loss_scale.state, bits(state))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_goes_on_with_its_factor_bit_for_bit(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    config = fp16(TOO_LARGE, zero=zero)
    for expected, found in ranks(2).run(save_and_go_on, world=2, config=config, place=tmp_path):
        assert found == expected
