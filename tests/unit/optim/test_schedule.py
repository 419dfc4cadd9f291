"""The learning rate's shape."""

from __future__ import annotations

import math

import pytest

from conf.schema import BatchStage, OptimConfig, Schedule, TrainConfig
from orchestra.optim.schedule import learning_rate


def rates(optim: OptimConfig, steps: int) -> list[float]:
    train = TrainConfig(steps=steps)
    return [learning_rate(optim, train, step) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("steps", [1, 2, 9, 10, 1000])
def test_every_schedule_stays_positive_and_peaks_at_lr(schedule: Schedule, steps: int) -> None:
    optim = OptimConfig(lr=1e-3, schedule=schedule)
    values = rates(optim, steps)
    assert all(0 < value <= 1e-3 * (1 + 1e-12) for value in values)
    if steps >= 10:
        assert max(values) == pytest.approx(1e-3)


@pytest.mark.parametrize("schedule", [Schedule.linear, Schedule.cosine, Schedule.wsd])
def test_the_last_step_has_the_lowest_rate(schedule: Schedule) -> None:
    optim = OptimConfig(lr=1e-3, min_lr=2e-5, schedule=schedule)
    assert rates(optim, 200)[-1] == pytest.approx(2e-5)
    # A tenth where it is not given.
    assert rates(OptimConfig(lr=1e-3, schedule=schedule), 200)[-1] == pytest.approx(1e-4)


def test_warm_up_rises_linearly() -> None:
    values = rates(OptimConfig(lr=1.0, warmup_steps=4, schedule=Schedule.constant), 10)
    assert values == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    optim = OptimConfig(lr=1.0, min_lr=0.2, warmup_steps=0, schedule=Schedule.cosine)
    assert rates(optim, 100)[49] == pytest.approx(0.6)
    quarter = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4))
    assert rates(optim, 100)[24] == pytest.approx(quarter)


def test_wsd_is_constant_until_its_decay() -> None:
    optim = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=0, schedule=Schedule.wsd, wsd_decay_fraction=0.2)
    values = rates(optim, 100)
    assert values[:80] == pytest.approx([1.0] * 80)
    assert values[89] == pytest.approx(0.5)


def test_with_a_ramp_the_shape_follows_tokens_and_the_warm_up_steps() -> None:
    ramp = [BatchStage(0, 512), BatchStage(40 * 512, 2048)]
    train = TrainConfig(steps=70, seq_len=256, batch_ramp=ramp)
    optim = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=10, schedule=Schedule.linear)
    values = [learning_rate(optim, train, step) for step in range(1, 71)]
    assert values[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    # Of 30 · 512 + 30 · 2,048 tokens after the warm-up, the first 30 steps take a fifth.
    assert values[39] == pytest.approx(0.8)
    assert values[54] == pytest.approx(0.4)
    assert values[69] == 0.0
