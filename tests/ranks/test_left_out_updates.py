"""Updates that all ranks leave out alike: of values that are not finite, of spikes, and of overflows of fp16.

Where nothing overflows, fp16 is on any layout as close to fp32 as in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Ranks
from small_trainings import EVEN, alone, assert_goes_on_bit_for_bit, bits, config_of, start, tokens_of

from conf.schema import Config, LossScale, LossSpikeConfig, OnSpike, RecoveryConfig
from orchestra.precision.policies import ScaleState
from orchestra.train.state import TensorState

TRAIN: dict[str, Any] = {"global_batch_size": 8, "micro_batch_size": 1}
# Each stage on two ranks: where a value is not finite, and what goes on bit for bit.
LAYOUTS: list[dict[str, Any]] = [
    {"zero": 0},
    {"zero": 2},
    {"zero": 3, "shard_degree": 2},
    {"zero": 1, "tp": 2},
    {"zero": 3, "tp": 2, "sequence_parallel": True},
]
# Larger than any gradient of these models can stand: two steps overflow, three do not, and with the factor
# that has grown the next one does again.
TOO_LARGE, OVERFLOW_STEPS = LossScale(initial=2**22, growth_steps=3), 8
SPIKE_STEPS, WINDOW = 10, 4


def fp16(scale: LossScale | None = None, **parallelism: Any) -> Config:
    config = config_of(EVEN, "fp16", train=TRAIN, **parallelism)
    return replace(config, precision=replace(config.precision, loss_scale=scale or LossScale()))


@dataclass(frozen=True)
class Step:
    """What one rank knows of a step. `is_unchanged`: whether its state has the bits of the step before."""

    loss: float
    norm: float
    was_skipped: bool
    is_spike: bool | None
    is_unchanged: bool
    num_updates: int
    scale: ScaleState | None


def trained(
    rank: int, world: int, config: Config, steps: int, poisoned: tuple[int, int] | None = None
) -> list[Step]:
    """Train some steps. `poisoned`: the rank and the step of a loss that is not finite."""
    training, mesh = start(rank, world, config)
    state = TensorState(training.parallelized, training.optimizer, mesh)
    scale, step = training.step.loss_scale, 0
    found: list[Step] = []

    def poison(_module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        return out * (torch.nan if (rank, step) == poisoned else 1)

    if poisoned is not None:
        training.parallelized.model.norm.register_forward_hook(poison)
    for step in range(1, steps + 1):
        before = bits(state)
        result = training.step.run(step, tokens_of(config, step, mesh, training))
        found.append(
            Step(
                float(result.loss),
                float(result.grad_norm),
                bool(result.was_skipped),
                None if result.is_spike is None else bool(result.is_spike),
                bits(state) == before,
                training.optimizer.num_updates,
                None if scale is None else scale.state,
            )
        )
    # The next training talks over the same groups: what is under way there must have arrived.
    training.parallelized.stage.settle()
    return found


def agreed(of_ranks: Sequence[list[Step]]) -> list[Step]:
    """Return the steps, which must be the same for all ranks. As text: one NaN is as good as another."""
    assert len({repr(steps) for steps in of_ranks}) == 1
    return of_ranks[0]


def assert_left_out(steps: Sequence[Step], left_out: Sequence[bool]) -> None:
    assert [step.is_unchanged for step in steps] == left_out
    assert [step.num_updates for step in steps] == list(accumulate(not is_out for is_out in left_out))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_non_finite_value_on_one_rank_skips_the_step_on_all(
    ranks: Ranks, zero: int, precision: str
) -> None:
    config = config_of(EVEN, precision, train={"global_batch_size": 4}, zero=zero)
    steps = agreed(ranks(2).run(trained, config=config, steps=3, poisoned=(1, 2)))
    assert [step.was_skipped for step in steps] == [False, True, False]
    assert_left_out(steps, [False, True, False])


def test_overflows_are_left_out_by_all_ranks_and_are_no_bad_steps(ranks: Ranks) -> None:
    for parallelism in LAYOUTS:
        steps = agreed(ranks(4).run(trained, config=fp16(TOO_LARGE, **parallelism), steps=OVERFLOW_STEPS))
        scales = [step.scale for step in steps if step.scale is not None]
        overflows = [scale.num_overflows for scale in scales]
        assert 0 < overflows[3] < overflows[-1] < OVERFLOW_STEPS
        assert_left_out(
            steps, [now > before for before, now in zip([0, *overflows], overflows, strict=False)]
        )
        # The first of them, and then the factor has come down by as many halves.
        assert scales[0] == ScaleState(2.0**21, 0, 1)
        assert not any(step.was_skipped for step in steps)
        assert all(torch.isfinite(torch.tensor([step.loss for step in steps])))


@pytest.mark.parametrize("action", [OnSpike.skip, OnSpike.roll_back, OnSpike.warn])
def test_all_ranks_leave_out_the_updates_of_spikes_where_the_policy_says_so(
    action: OnSpike, ranks: Ranks
) -> None:
    # Every loss above the median is a spike: random tokens give some of both kinds.
    spikes = LossSpikeConfig(action=action, factor=1e-9, window=WINDOW)
    # A step is left out in one way, whatever happens then.
    layouts = (LAYOUTS[0], *LAYOUTS[2:]) if action is OnSpike.skip else LAYOUTS[-1:]
    for parallelism in layouts:
        base = config_of(EVEN, train={"global_batch_size": 8}, **parallelism)
        config = replace(base, recovery=RecoveryConfig(loss_spike=spikes))
        steps = agreed(ranks(4).run(trained, config=config, steps=SPIKE_STEPS))
        are_spikes = [step.is_spike is True for step in steps]
        assert not any(are_spikes[:WINDOW])
        assert 0 < sum(are_spikes) < SPIKE_STEPS - WINDOW
        assert_left_out(steps, [False] * SPIKE_STEPS if action is OnSpike.warn else are_spikes)


def test_fp16_is_as_close_to_fp32_on_every_layout_as_in_one_process(ranks: Ranks) -> None:
    exact, rounded = alone(config_of(EVEN, train=TRAIN), steps=6), alone(fp16(), steps=6)
    spread = max(abs(a[0] - b[0]) for a, b in zip(rounded.rows, exact.rows, strict=True))
    for parallelism in LAYOUTS:
        steps = agreed(ranks(4).run(trained, config=fp16(**parallelism), steps=6))
        assert (steps[-1].num_updates, steps[-1].scale) == (6, ScaleState(65536.0, 6, 0))
        for step, (loss, norm, _) in zip(steps, exact.rows, strict=True):
            assert abs(step.loss - loss) <= max(3 * spread, 1e-3 * loss)
            # Unscaled: a norm before clipping, as without a factor.
            assert step.norm == pytest.approx(norm, rel=5e-3)


def test_clipping_sees_gradients_without_the_factor() -> None:
    """Factors are powers of two: where nothing overflows or vanishes, they leave the bits of an update."""
    found = [alone(fp16(LossScale(initial=initial)), steps=3) for initial in (2**10, 2**14)]
    for (loss, norm, _), (other_loss, other_norm, _) in zip(found[0].rows, found[1].rows, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-4)
        assert norm == pytest.approx(other_norm, rel=2e-3)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_goes_on_with_its_factor_bit_for_bit(ranks: Ranks, tmp_path: Path, zero: int) -> None:
    assert_goes_on_bit_for_bit(ranks(2), fp16(TOO_LARGE, zero=zero), tmp_path, saved=4, last=OVERFLOW_STEPS)
