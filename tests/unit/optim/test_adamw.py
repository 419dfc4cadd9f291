"""The optimizer against torch's plain one: clipping, skipping, parts of parameters, and moments in bf16 that
are rounded stochastically: right on average, the same whatever is cut how.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from conf.schema import OptimConfig, StateDType
from orchestra.model.initial import mixed_bits, random_key
from orchestra.optim.adamw import MOMENTS, AdamW, Trained, round_stochastically_, squared_norm

EXACT = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=1.0)
ROUNDED = OptimConfig(lr=1e-2, weight_decay=0.1, clip_norm=1.0, state_dtype=StateDType.bf16)
for_both_states = pytest.mark.parametrize("optim", [EXACT, ROUNDED], ids=["fp32", "bf16"])


def trained_pair() -> list[Trained]:
    generator = torch.Generator().manual_seed(0)
    matrix = nn.Parameter(torch.randn(64, 48, generator=generator))
    return [
        Trained(name, value, value.detach(), 0, value.numel())
        for name, value in {"matrix": matrix, "gain": nn.Parameter(torch.ones(48))}.items()
    ]


def optimizer_of(trained: list[Trained], optim: OptimConfig) -> AdamW:
    return AdamW(trained, optim, 0, lambda _, start, stop: torch.arange(start, stop))


def gradients_of(trained: list[Trained], step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(item.parameter.shape, generator=generator) * scale for item in trained]


def norm_of(gradients: list[Tensor]) -> Tensor:
    return squared_norm(gradients).sqrt().float()


def take_step(
    optimizer: AdamW, trained: list[Trained], gradients: list[Tensor], step: int = 1, *, is_bad: bool = False
) -> None:
    optimizer.begin_step(step, norm_of(gradients), torch.tensor(is_bad))
    optimizer.update(trained, gradients, [item.master for item in trained])


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_clipped_steps_equal_torchs_clip_and_plain_adamw(scale: float) -> None:
    optim = OptimConfig(lr=9.0, clip_norm=1.0, weight_decay=0.3, eps=1e-8)
    ours, theirs = trained_pair(), trained_pair()
    optimizer = optimizer_of(ours, optim)
    # The rate of each step counts, not the configured one: for the update and for the decay.
    optimizer.lr = 0.1
    matrix, gain = (item.parameter for item in theirs)
    reference = torch.optim.AdamW(
        [{"params": [matrix], "weight_decay": 0.3}, {"params": [gain], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=False,
        foreach=False,
    )
    for step in range(1, 5):
        take_step(optimizer, ours, gradients_of(ours, step, scale))
        matrix.grad, gain.grad = gradients_of(theirs, step, scale)
        torch.nn.utils.clip_grad_norm_([matrix, gain], 1.0)
        reference.step()
    for item, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(item.master, twin.master, rtol=2e-5, atol=2e-6)


@for_both_states
def test_a_bad_step_changes_neither_parameters_nor_state(optim: OptimConfig) -> None:
    trained = trained_pair()
    optimizer = optimizer_of(trained, optim)
    take_step(optimizer, trained, gradients_of(trained, 1))
    kept = [item.master for item in trained]
    kept += [moment for state in optimizer.state.values() for moment in state.values()]
    before = [tensor.clone() for tensor in kept]
    gradients = gradients_of(trained, 2)
    gradients[0][0, 0] = torch.nan
    take_step(optimizer, trained, gradients, 2, is_bad=True)
    assert optimizer.num_updates == 1
    assert all(torch.equal(tensor, value) for tensor, value in zip(kept, before, strict=True))
    take_step(optimizer, trained, gradients_of(trained, 3), 3)
    assert optimizer.num_updates == 2


def test_without_a_clip_norm_gradients_are_used_as_they_are() -> None:
    trained = trained_pair()
    optimizer = optimizer_of(trained, OptimConfig(lr=0.0, clip_norm=None))
    gradients = gradients_of(trained, 1, 100.0)
    take_step(optimizer, trained, [gradient.clone() for gradient in gradients])
    for item, gradient in zip(trained, gradients, strict=True):
        # The first moment after one step is (1 − β₁) times the gradient that was used.
        torch.testing.assert_close(optimizer.state[item.master]["exp_avg"], 0.1 * gradient)


@for_both_states
def test_a_matrix_in_parts_that_come_one_by_one_is_updated_and_rounded_like_the_whole(
    optim: OptimConfig,
) -> None:
    (whole, _), (cut, _) = trained_pair(), trained_pair()
    flat = cut.master.view(-1)
    parts = [
        Trained("matrix", cut.parameter, flat[start:stop], start, stop)
        for start, stop in itertools.pairwise([0, 36, 1024, 1024, 3072])
    ]
    expected, optimizer = optimizer_of([whole], optim), optimizer_of(parts, optim)
    for step in range(1, 6):
        (gradient,) = gradients_of([whole], step)
        take_step(expected, [whole], [gradient.clone()], step)
        optimizer.begin_step(step, norm_of([gradient]), torch.tensor(False))
        for part in parts:
            of_part = gradient.view(-1)[part.start : part.stop].clone()
            optimizer.update([part], [of_part], [part.master])
    torch.testing.assert_close(cut.master, whole.master, rtol=1e-6, atol=0)
    for name in MOMENTS:
        joined = torch.cat([optimizer.state[part.master][name] for part in parts])
        other = expected.state[whole.master][name].view(-1)
        torch.testing.assert_close(joined, other, rtol=1e-6 if optim is EXACT else 0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_a_million_numbers_in_several_tensors_is_exact_to_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(*shape, generator=generator).to(dtype) for shape in ((1000, 1000), (7,))]
    joined = torch.cat([gradient.double().flatten() for gradient in gradients])
    torch.testing.assert_close(norm_of(gradients).double(), joined.norm(), rtol=1e-6, atol=0)


def random_bits(index: Tensor, *parts: int | str) -> Tensor:
    return mixed_bits(index, random_key("rounding", *parts), rounds=1)


def rounded(values: Tensor, step: int, number: int = 0) -> Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    bits = random_bits(torch.arange(values.numel()), 0, step, "w")
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
    keys = [(0, 1, "a"), (0, 2, "a"), (0, 1, "b"), (1, 1, "a")]
    streams = [
        ((random_bits(index, *key) >> (16 * number)) & 0xFFFF).double() for key in keys for number in (0, 1)
    ]
    correlation = torch.corrcoef(torch.stack(streams)) - torch.eye(len(streams), dtype=torch.float64)
    assert float(correlation.abs().max()) < 5 / 50_000**0.5
    for stream in streams:
        assert float(stream.mean()) == pytest.approx(65535 / 2, rel=0.01)
        ahead = torch.corrcoef(torch.stack([stream[1:], stream[:-1]]))[0, 1]
        assert abs(float(ahead)) < 5 / 50_000**0.5


def test_rounded_moments_follow_exact_ones() -> None:
    ours, theirs = trained_pair(), trained_pair()
    rounding, exact = optimizer_of(ours, ROUNDED), optimizer_of(theirs, EXACT)
    for step in range(1, 101):
        take_step(rounding, ours, gradients_of(ours, step), step)
        take_step(exact, theirs, gradients_of(theirs, step), step)
    for item, twin in zip(ours, theirs, strict=True):
        for name in MOMENTS:
            moment, expected = rounding.state[item.master][name], exact.state[twin.master][name]
            assert moment.dtype == torch.bfloat16
            assert float((moment.float() - expected).norm() / expected.norm()) < 0.02
        assert float((item.master - twin.master).norm() / twin.master.norm()) < 0.01


def test_a_slow_second_moment_moves_where_rounding_to_nearest_would_stand_still() -> None:
    optim = OptimConfig(betas=[0.9, 0.999], clip_norm=None, state_dtype=StateDType.bf16)
    (item, _) = trained_pair()
    optimizer = optimizer_of([item], optim)
    second = optimizer.state[item.master]["exp_avg_sq"]
    second.fill_(1.0)
    for step in range(1, 301):
        optimizer.begin_step(step, torch.ones(()), torch.tensor(False))
        optimizer.update([item], [torch.zeros_like(item.master)], [item.master])
    # One step takes 1/1000 of it away, and bf16 resolves 1/256: to nearest it would be 1 for ever.
    assert float(second.float().mean()) == pytest.approx(0.999**300, rel=0.01)


def update_of_whole_tensors(
    optimizer: AdamW, item: Trained, gradient: Tensor, parameter: Tensor, num_updates: Tensor, decay: float
) -> None:
    """What the optimizer does by blocks, with fp32 copies of whole tensors."""
    torch._fused_adamw_(
        [item.master],
        [gradient.to(torch.float32, copy=True)],
        [optimizer.state[item.master]["exp_avg"]],
        [optimizer.state[item.master]["exp_avg_sq"]],
        [],
        [num_updates],
        lr=EXACT.lr,
        beta1=EXACT.betas[0],
        beta2=EXACT.betas[1],
        weight_decay=decay,
        eps=EXACT.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=optimizer._grad_scale,
        found_inf=optimizer._found_inf,
    )
    parameter.copy_(item.master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_updates_by_blocks_equal_those_of_whole_tensors_bit_for_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A block ends within each of the larger ones, and takes several of the smaller ones.
    monkeypatch.setattr("orchestra.optim.adamw.ROUNDED_CPU", 1024)
    shapes = [(64, 131), (7,), (3, 5), (64,), (70, 33), (0,), (1, 1)]
    generator = torch.Generator().manual_seed(0)
    ours, theirs = [], []
    for index, shape in enumerate(shapes):
        master = torch.randn(shape, generator=generator)
        for items in (ours, theirs):
            own = master.clone()
            parameter = own if dtype is torch.float32 else own.to(dtype)
            items.append(Trained(str(index), parameter, own, 0, own.numel()))
    blocks, whole = optimizer_of(ours, EXACT), optimizer_of(theirs, EXACT)
    num_updates = torch.zeros(())
    for step in range(1, 5):
        gradients = [gradient.to(dtype) for gradient in gradients_of(ours, step, 8.0)]
        is_bad = torch.tensor(step == 3)
        for optimizer in (blocks, whole):
            optimizer.begin_step(step, norm_of(gradients), is_bad, torch.tensor(4.0))
        num_updates += ~is_bad
        for item, gradient in zip(theirs, gradients, strict=True):
            decay = EXACT.weight_decay if len(item.parameter.shape) >= 2 else 0.0
            update_of_whole_tensors(whole, item, gradient, item.parameter, num_updates, decay)
        blocks.update(ours, [gradient.clone() for gradient in gradients], [item.parameter for item in ours])
    for item, twin in zip(ours, theirs, strict=True):
        assert torch.equal(item.master, twin.master)
        assert torch.equal(item.parameter, twin.parameter)
        for name in MOMENTS:
            assert torch.equal(blocks.state[item.master][name], whole.state[twin.master][name])
