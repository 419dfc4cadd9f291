"""Moments in bf16 that are rounded stochastically: right on average, the same whatever is cut how."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from conf.schema import OptimConfig, StateDType
from orchestra.optim.adamw import (
    MOMENTS,
    AdamW,
    Trained,
    global_norm,
    make_adamw,
    random_bits,
    round_stochastically_,
    rounding_key,
    whole_master,
)

ROUNDED = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=1.0, state_dtype=StateDType.bf16)
EXACT = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=1.0)


def rounded(values: Tensor, step: int, number: int = 0) -> Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    bits = random_bits(torch.arange(values.numel()), rounding_key(0, step, "w"))
    round_stochastically_(out, values, bits, number)
    return out


@pytest.mark.parametrize("value", [1.001, -1.001, 3.1e-12, 1e30, -255.9, 1e-39])
@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_mean_of_many_roundings_is_the_number(value: float, number: int) -> None:
    values = torch.full((100_000,), value)
    found = rounded(values, 1, number).double()
    low, high = found.min(), found.max()
    assert low <= value <= high
    assert len(set(found.tolist())) == 2
    # Five standard errors of the mean of numbers that are one of two.
    limit = 5 * float(high - low) / 2 / 100_000**0.5
    assert abs(float(found.mean()) - float(values[0].double())) <= limit


def test_what_bf16_holds_is_not_changed() -> None:
    values = torch.randn(10_000).to(torch.bfloat16)
    values[:3] = torch.tensor([0.0, -0.0, 1.0])
    assert torch.equal(rounded(values.float(), 1).view(torch.int16), values.view(torch.int16))


def test_bits_of_steps_names_and_moments_have_nothing_in_common() -> None:
    index = torch.arange(50_000)
    keys = [
        rounding_key(0, 1, "a"),
        rounding_key(0, 2, "a"),
        rounding_key(0, 1, "b"),
        rounding_key(1, 1, "a"),
    ]
    streams = [
        ((random_bits(index, key) >> (16 * number)) & 0xFFFF).double() for key in keys for number in (0, 1)
    ]
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams), dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / 50_000**0.5
    for stream in streams:
        assert float(stream.mean()) == pytest.approx(65535 / 2, rel=0.01)
        ahead = torch.corrcoef(torch.stack([stream[1:], stream[:-1]]))[0, 1]
        assert abs(float(ahead)) < 5 / 50_000**0.5


def trained_pair() -> list[Trained]:
    generator = torch.Generator().manual_seed(0)
    parameters = {
        "matrix": nn.Parameter(torch.randn(64, 48, generator=generator)),
        "gain": nn.Parameter(torch.ones(48)),
    }
    return [whole_master(name, value, value.detach()) for name, value in parameters.items()]


def gradients_of(trained: list[Trained], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(item.parameter.shape, generator=generator) for item in trained]


def take_step(optimizer: AdamW, trained: list[Trained], step: int, *, is_bad: bool = False) -> None:
    gradients = gradients_of(trained, step)
    optimizer.begin_step(step, global_norm(gradients), torch.tensor(is_bad))
    optimizer.update(trained, gradients)


def test_rounded_moments_follow_exact_ones() -> None:
    ours, theirs = trained_pair(), trained_pair()
    rounding, exact = make_adamw(ours, ROUNDED), make_adamw(theirs, EXACT)
    for step in range(1, 101):
        take_step(rounding, ours, step)
        take_step(exact, theirs, step)
    for item, twin in zip(ours, theirs, strict=True):
        for name in MOMENTS:
            found, expected = rounding.state[item.master][name], exact.state[twin.master][name]
            assert found.dtype == torch.bfloat16
            assert float((found.float() - expected).norm() / expected.norm()) < 0.02
        assert float((item.master - twin.master).norm() / twin.master.norm()) < 0.01


def test_a_slow_second_moment_moves_where_rounding_to_nearest_would_stand_still() -> None:
    optim = OptimConfig(betas=[0.9, 0.999], clip_norm=None, state_dtype=StateDType.bf16)
    (item, _) = trained_pair()
    optimizer = make_adamw([item], optim)
    second = optimizer.state[item.master]["exp_avg_sq"]
    second.fill_(1.0)
    for step in range(1, 301):
        optimizer.begin_step(step, torch.ones(()), torch.tensor(False))
        optimizer.update([item], [torch.zeros_like(item.master)])
    # One step takes 1/1000 of it away, and bf16 resolves 1/256: to nearest it would be 1 for ever.
    assert float(second.float().mean()) == pytest.approx(0.999**300, rel=0.01)


def test_a_bad_step_leaves_the_bits_of_rounded_moments() -> None:
    trained = trained_pair()
    optimizer = make_adamw(trained, ROUNDED)
    take_step(optimizer, trained, 1)
    before = {name: optimizer.state[trained[0].master][name].clone() for name in MOMENTS}
    take_step(optimizer, trained, 2, is_bad=True)
    for name, value in before.items():
        assert torch.equal(optimizer.state[trained[0].master][name], value)


def test_a_parameter_in_parts_is_rounded_like_the_whole() -> None:
    whole, cut = trained_pair(), trained_pair()
    flat = cut[0].master.view(-1)
    bounds = [0, 32, 1024, 1024, 3072]
    parts = [
        Trained("matrix", cut[0].parameter, flat[start:stop], start, stop)
        for start, stop in itertools.pairwise(bounds)
    ]
    expected, optimizer = make_adamw(whole[:1], ROUNDED), make_adamw(parts, ROUNDED)
    for step in range(1, 6):
        (gradient,) = gradients_of(whole[:1], step)
        for each in (expected, optimizer):
            each.begin_step(step, global_norm([gradient]), torch.tensor(False))
        expected.update(whole[:1], [gradient.clone()])
        optimizer.update(parts, [gradient.view(-1)[part.start : part.stop].clone() for part in parts])
    assert torch.equal(cut[0].master, whole[0].master)
    for name in MOMENTS:
        joined = torch.cat([optimizer.state[part.master][name] for part in parts])
        assert torch.equal(joined, expected.state[whole[0].master][name].view(-1)), name
