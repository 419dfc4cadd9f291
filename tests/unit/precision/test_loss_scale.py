"""The factor of the loss: how it moves, and what of it is saved."""

from __future__ import annotations

import pytest
import torch

from conf.schema import LossScale, PrecisionConfig, PrecisionName
from orchestra.precision.loss_scale import MOST, DynamicLossScale, ScaleState, make_loss_scale

CPU = torch.device("cpu")
FINE, INFINITE = torch.tensor(1.0), torch.tensor(torch.inf)


def moved(scale: DynamicLossScale, loss: torch.Tensor, norm: torch.Tensor) -> bool:
    """Let the factor follow one step; return whether the step overflowed."""
    has_overflowed = scale.overflowed(loss, norm)
    scale.follow(has_overflowed, torch.isfinite(loss) & torch.isfinite(norm))
    return bool(has_overflowed)


def test_an_overflow_halves_the_factor_and_good_steps_in_a_row_double_it() -> None:
    scale = DynamicLossScale(LossScale(initial=8, growth_steps=3), CPU)
    assert moved(scale, FINE, INFINITE)
    assert scale.state == ScaleState(4.0, 0, 1)
    for norm in (FINE, FINE, INFINITE, FINE, FINE):
        moved(scale, FINE, norm)
    assert scale.state == ScaleState(2.0, 2, 2)
    moved(scale, FINE, FINE)
    assert scale.state == ScaleState(4.0, 0, 2)


def test_a_loss_that_is_not_finite_is_no_overflow_and_moves_nothing() -> None:
    scale = DynamicLossScale(LossScale(initial=8, growth_steps=2), CPU)
    moved(scale, FINE, FINE)
    assert not moved(scale, torch.tensor(torch.nan), INFINITE)
    assert scale.state == ScaleState(8.0, 1, 0)


def test_gradients_that_stay_bad_at_a_factor_of_one_are_not_its_doing() -> None:
    scale = DynamicLossScale(LossScale(initial=4), CPU)
    assert [moved(scale, FINE, INFINITE) for _ in range(4)] == [True, True, False, False]
    assert scale.state == ScaleState(1.0, 0, 2)


def test_the_factor_stays_in_the_range_of_fp32() -> None:
    scale = DynamicLossScale(LossScale(initial=int(MOST), growth_steps=1), CPU)
    moved(scale, FINE, FINE)
    assert scale.state.scale == MOST


def test_a_result_keeps_the_factor_that_it_was_computed_with() -> None:
    scale = DynamicLossScale(LossScale(initial=8), CPU)
    before = scale.scale
    moved(scale, FINE, INFINITE)
    assert (float(before), float(scale.scale)) == (8.0, 4.0)


def test_a_state_that_was_saved_goes_on() -> None:
    scale = DynamicLossScale(LossScale(growth_steps=3), CPU, ScaleState(32.0, 2, 5))
    moved(scale, FINE, FINE)
    assert scale.state == ScaleState(64.0, 0, 5)


@pytest.mark.parametrize("name", PrecisionName)
def test_fp16_alone_scales_its_loss(name: PrecisionName) -> None:
    assert (make_loss_scale(PrecisionConfig(name), CPU) is not None) is (name is PrecisionName.fp16)
