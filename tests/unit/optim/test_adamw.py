"""Clipping and skipping inside the fused kernel against torch's plain way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conf.schema import OptimConfig
from orchestra.optim.adamw import (
    Trained,
    global_norm,
    make_adamw,
    num_updates,
    set_learning_rate,
    set_num_updates,
    step_clipped,
)


def trained_pair(seed: int = 0) -> list[Trained]:
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        "matrix": nn.Parameter(torch.randn(5, 3, generator=generator)),
        "gain": nn.Parameter(torch.ones(3)),
    }
    return [Trained(name, value, value) for name, value in parameters.items()]


def give_gradients(trained: list[Trained], scale: float) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for item in trained:
        item.master.grad = torch.randn(item.master.shape, generator=generator) * scale
    return [item.master.grad for item in trained if item.master.grad is not None]


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_clipped_steps_equal_torchs_clip_and_plain_adamw(scale: float) -> None:
    optim = OptimConfig(lr=0.1, clip_norm=1.0, weight_decay=0.3, eps=1e-8)
    ours, theirs = trained_pair(), trained_pair()
    optimizer = make_adamw(ours, optim)
    matrix, gain = (item.master for item in theirs)
    reference = torch.optim.AdamW(
        [{"params": [matrix], "weight_decay": 0.3}, {"params": [gain], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=False,
        foreach=False,
    )
    for _ in range(4):
        norm = global_norm(give_gradients(ours, scale))
        step_clipped(optimizer, norm, torch.tensor(False), optim.clip_norm)
        give_gradients(theirs, scale)
        torch.nn.utils.clip_grad_norm_([matrix, gain], 1.0)
        reference.step()
    for item, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(item.master, twin.master, rtol=2e-5, atol=2e-6)


def test_a_bad_step_changes_neither_parameters_nor_state() -> None:
    trained = trained_pair()
    optimizer = make_adamw(trained, OptimConfig())
    step_clipped(optimizer, global_norm(give_gradients(trained, 1.0)), torch.tensor(False), 1.0)
    before = [item.master.clone() for item in trained]
    states = [{key: value.clone() for key, value in optimizer.state[item.master].items()} for item in trained]
    gradients = give_gradients(trained, 1.0)
    gradients[0][0, 0] = torch.nan
    norm = global_norm(gradients)
    step_clipped(optimizer, norm, ~torch.isfinite(norm), 1.0)
    for item, value, state in zip(trained, before, states, strict=True):
        assert torch.equal(item.master, value)
        for key, kept in state.items():
            assert torch.equal(optimizer.state[item.master][key], kept), key


def test_without_a_clip_norm_gradients_are_used_as_they_are() -> None:
    trained = trained_pair()
    optimizer = make_adamw(trained, OptimConfig(lr=0.0, clip_norm=None))
    gradients = [gradient.clone() for gradient in give_gradients(trained, 100.0)]
    step_clipped(optimizer, global_norm(gradients), torch.tensor(False), None)
    for item, gradient in zip(trained, gradients, strict=True):
        assert torch.equal(item.master.grad, gradient)


def test_global_norm_is_the_norm_of_all_gradients_joined() -> None:
    gradients = [torch.randn(4, 5), torch.randn(7)]
    joined = torch.cat([gradient.flatten() for gradient in gradients])
    torch.testing.assert_close(global_norm(gradients), joined.norm())


def test_only_matrices_decay_and_the_rate_reaches_all_groups() -> None:
    trained = trained_pair()
    optimizer = make_adamw(trained, OptimConfig(lr=0.1, weight_decay=0.5, clip_norm=None))
    set_learning_rate(optimizer, 0.2)
    before = [item.master.clone() for item in trained]
    for item in trained:
        item.master.grad = torch.zeros_like(item.master)
    step_clipped(optimizer, torch.tensor(0.0), torch.tensor(False), None)
    torch.testing.assert_close(trained[0].master, before[0] * (1 - 0.2 * 0.5))
    assert torch.equal(trained[1].master, before[1])


def test_a_state_made_beforehand_trains_like_one_that_torch_makes_at_the_first_step() -> None:
    ours, theirs = trained_pair(), trained_pair()
    early, late = make_adamw(ours, OptimConfig()), make_adamw(theirs, OptimConfig())
    late.state.clear()
    for _ in range(3):
        for trained, optimizer in ((ours, early), (theirs, late)):
            step_clipped(optimizer, global_norm(give_gradients(trained, 1.0)), torch.tensor(False), 1.0)
    for item, twin in zip(ours, theirs, strict=True):
        assert torch.equal(item.master, twin.master)
        assert early.state[item.master].keys() == late.state[twin.master].keys()
        for key, value in early.state[item.master].items():
            assert torch.equal(value, late.state[twin.master][key]), key
            assert value.dtype == late.state[twin.master][key].dtype


def test_the_number_of_updates_leaves_out_skipped_steps_and_can_be_set() -> None:
    trained = trained_pair()
    optimizer = make_adamw(trained, OptimConfig())
    assert num_updates(optimizer) == 0
    for is_bad in (False, True, False):
        step_clipped(optimizer, global_norm(give_gradients(trained, 1.0)), torch.tensor(is_bad), 1.0)
    assert num_updates(optimizer) == 2
    set_num_updates(optimizer, 2_000_001)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2_000_001}
