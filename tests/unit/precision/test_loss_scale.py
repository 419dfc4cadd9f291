"""The factor of the loss: how it moves, and what of it is saved."""

from __future__ import annotations

import pytest
import torch

from conf.schema import LossScale, PrecisionConfig, PrecisionName
from orchestra.precision.policies import MOST, DynamicLossScale, ScaleState, make_loss_scale

CPU = torch.device("cpu")
FINE, INFINITE = torch.tensor(1.0), torch.tensor(torch.inf)


def moved(scale: DynamicLossScale, loss: torch.Tensor, norm: torch.Tensor) -> bool:
    """Let the factor follow one step; return whether the step overflowed."""
    has_overflowed = scale.overflowed(loss, norm)
    scale.follow(has_overflowed, torch.isfinite(loss) & torch.isfinite(norm))
    return bool(has_overflowed)


@pytest.mark.parametrize(
    ("before", "norms", "after"),
    [
        pytest.param((8.0, 0, 0), [INFINITE], (4.0, 0, 1), id="an overflow halves"),
        pytest.param((4.0, 0, 1), [FINE, FINE, INFINITE, FINE, FINE], (2.0, 2, 2), id="not in a row"),
        pytest.param((2.0, 2, 2), [FINE], (4.0, 0, 2), id="three good steps in a row double"),
        pytest.param((4.0, 0, 0), [INFINITE] * 4, (1.0, 0, 2), id="at one it is not its doing"),
        pytest.param((MOST, 2, 0), [FINE], (MOST, 0, 0), id="in the range of fp32"),
    ],
)
def test_the_factor_follows_the_steps_from_any_state_on(
    before: tuple[float, int, int], norms: list[torch.Tensor], after: tuple[float, int, int]
) -> None:
    scale = DynamicLossScale(LossScale(growth_steps=3), CPU, ScaleState(*before))
    overflows = [moved(scale, FINE, norm) for norm in norms]
    assert scale.state == ScaleState(*after)
    assert sum(overflows) == after[2] - before[2]


def test_a_loss_that_is_not_finite_is_no_overflow_and_moves_nothing() -> None:
    scale = DynamicLossScale(LossScale(initial=8, growth_steps=2), CPU)
    moved(scale, FINE, FINE)
    assert not moved(scale, torch.tensor(torch.nan), INFINITE)
    assert scale.state == ScaleState(8.0, 1, 0)


def test_a_result_keeps_the_factor_that_it_was_computed_with() -> None:
    scale = DynamicLossScale(LossScale(initial=8), CPU)
    before = scale.scale
    moved(scale, FINE, INFINITE)
    assert (float(before), float(scale.scale)) == (8.0, 4.0)


@pytest.mark.parametrize("name", PrecisionName)
def test_fp16_alone_scales_its_loss(name: PrecisionName) -> None:
    assert (make_loss_scale(PrecisionConfig(name), CPU) is not None) is (name is PrecisionName.fp16)
