"""Clipping and skipping inside the fused kernel against torch's plain way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conf.schema import OptimConfig
from orchestra.optim.adamw import AdamW, Trained, global_norm, make_adamw, whole_master


def trained_pair(seed: int = 0) -> list[Trained]:
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        "matrix": nn.Parameter(torch.randn(5, 3, generator=generator)),
        "gain": nn.Parameter(torch.ones(3)),
    }
    return [whole_master(name, value, value.detach()) for name, value in parameters.items()]


def gradients_of(trained: list[Trained], scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(item.parameter.shape, generator=generator) * scale for item in trained]


def step(
    optimizer: AdamW,
    trained: list[Trained],
    gradients: list[Tensor],
    *,
    is_bad: bool = False,
    number: int = 1,
) -> None:
    optimizer.begin_step(number, global_norm(gradients), torch.tensor(is_bad))
    optimizer.update(trained, gradients)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_clipped_steps_equal_torchs_clip_and_plain_adamw(scale: float) -> None:
    optim = OptimConfig(lr=0.1, clip_norm=1.0, weight_decay=0.3, eps=1e-8)
    ours, theirs = trained_pair(), trained_pair()
    optimizer = make_adamw(ours, optim)
    matrix, gain = (item.parameter for item in theirs)
    reference = torch.optim.AdamW(
        [{"params": [matrix], "weight_decay": 0.3}, {"params": [gain], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=False,
        foreach=False,
    )
    for _ in range(4):
        step(optimizer, ours, gradients_of(ours, scale))
        matrix.grad, gain.grad = gradients_of(theirs, scale)
        torch.nn.utils.clip_grad_norm_([matrix, gain], 1.0)
        reference.step()
    for item, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(item.master, twin.master, rtol=2e-5, atol=2e-6)


def test_a_bad_step_changes_neither_parameters_nor_state() -> None:
    trained = trained_pair()
    optimizer = make_adamw(trained, OptimConfig())
    step(optimizer, trained, gradients_of(trained, 1.0))
    before = [item.master.clone() for item in trained]
    states = [{key: value.clone() for key, value in optimizer.state[item.master].items()} for item in trained]
    gradients = gradients_of(trained, 1.0)
    gradients[0][0, 0] = torch.nan
    step(optimizer, trained, gradients, is_bad=True)
    assert optimizer.num_updates == 1
    for item, value, state in zip(trained, before, states, strict=True):
        assert torch.equal(item.master, value)
        for key, kept in state.items():
            assert torch.equal(optimizer.state[item.master][key], kept), key


def test_without_a_clip_norm_gradients_are_used_as_they_are() -> None:
    trained = trained_pair()
    optimizer = make_adamw(trained, OptimConfig(lr=0.0, clip_norm=None))
    gradients = gradients_of(trained, 100.0)
    step(optimizer, trained, [gradient.clone() for gradient in gradients])
    for item, gradient in zip(trained, gradients, strict=True):
        # The first moment after one step is (1 − β₁) times the gradient that was used.
        torch.testing.assert_close(optimizer.state[item.master]["exp_avg"], 0.1 * gradient)


def test_global_norm_is_the_norm_of_all_gradients_joined() -> None:
    gradients = [torch.randn(4, 5), torch.randn(7)]
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(global_norm(gradients), joined.norm())


def test_only_matrices_decay_and_the_rate_reaches_all_groups() -> None:
    trained = trained_pair()
    optimizer = make_adamw(trained, OptimConfig(lr=0.1, weight_decay=0.5, clip_norm=None))
    optimizer.lr = 0.2
    before = [item.master.clone() for item in trained]
    step(optimizer, trained, [torch.zeros_like(item.master) for item in trained])
    torch.testing.assert_close(trained[0].master, before[0] * (1 - 0.2 * 0.5))
    assert torch.equal(trained[1].master, before[1])


def test_a_part_of_a_matrix_decays_like_the_matrix_and_a_step_may_come_in_parts() -> None:
    optim = OptimConfig(lr=0.1, weight_decay=0.5)
    (matrix, gain), (other, _) = trained_pair(), trained_pair()
    expected = make_adamw([matrix, gain], optim)
    flat = other.master.view(-1)
    parts = [
        Trained("matrix", other.parameter, flat[:4], 0, 4),
        Trained("matrix", other.parameter, flat[4:], 4, 15),
        Trained("nothing", other.parameter, flat[15:], 15, 15),
    ]
    optimizer = make_adamw(parts, optim)
    for number in range(1, 4):
        gradient = gradients_of([matrix], 1.0)[0]
        step(expected, [matrix], [gradient.clone()])
        optimizer.begin_step(number, global_norm([gradient]), torch.tensor(False))
        for part in parts:
            optimizer.update([part], [gradient.view(-1)[part.start : part.stop].clone()])
    torch.testing.assert_close(other.master, matrix.master, rtol=1e-6, atol=0)


def test_the_number_of_updates_leaves_out_skipped_steps_and_can_be_set() -> None:
    trained = trained_pair()
    optimizer = make_adamw(trained, OptimConfig())
    assert optimizer.num_updates == 0
    for is_bad in (False, True, False):
        step(optimizer, trained, gradients_of(trained, 1.0), is_bad=is_bad)
    assert optimizer.num_updates == 2
    optimizer.num_updates = 2_000_001
    assert optimizer.num_updates == 2_000_001


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_of_a_million_numbers_is_exact_to_fp32(dtype: torch.dtype) -> None:
    gradient = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    torch.testing.assert_close(global_norm([gradient]).double(), gradient.double().norm(), rtol=1e-6, atol=0)
