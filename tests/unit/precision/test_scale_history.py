"""Delayed scaling: scales of the last steps, and what the first step, outliers and bad steps do to them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conf.schema import PrecisionName, Scaling
from orchestra.precision import fp8
from orchestra.precision.fp8 import BACKWARD, FORWARD, Fp8Products, rounded, rounded_by
from orchestra.precision.scale_history import DECAY, ScaleHistory
from orchestra.train.build import Training
from tests.support.inductor_bytes import counted_bytes
from tests.unit.precision.test_fp8 import (
    BATCH,
    INPUTS,
    OUTPUTS,
    SEQUENCE,
    TOKENS,
    built,
    config_of,
    losses,
    numbers,
)

NOT_LEFT_OUT = torch.tensor(False)


def attached() -> tuple[ScaleHistory, Tensor, Fp8Products]:
    """Return a history, a weight that has it, and the weight's products."""
    history, weight = ScaleHistory(), numbers(2, OUTPUTS, INPUTS).requires_grad_()
    history.attach([{"w": weight}])
    return history, weight, Fp8Products(Scaling.tensor, history)


def end_step(history: ScaleHistory, is_left_out: Tensor = NOT_LEFT_OUT) -> dict[str, float]:
    history.follow(history.found(), is_left_out)
    return history.state


def test_sizes_are_the_largest_numbers_of_all_micro_batches_and_shrink_slowly() -> None:
    history, weight, products = attached()
    assert history.state == {}
    small, large, grad = (
        numbers(1, TOKENS, INPUTS),
        3 * numbers(1, TOKENS, INPUTS),
        numbers(3, TOKENS, OUTPUTS),
    )
    for x in (large, small):
        torch.autograd.backward(products.linear(x, weight), grad)
    first = end_step(history)
    assert first == {"w.input": float(large.abs().max()), "w.gradient": float(grad.abs().max())}
    history.begin_step()
    products.linear(small, weight)
    second = end_step(history)
    assert second["w.input"] == pytest.approx(DECAY * first["w.input"])
    assert second["w.gradient"] == pytest.approx(DECAY * first["w.gradient"])
    history.begin_step()
    products.linear(2 * large, weight)
    assert end_step(history)["w.input"] == 2 * first["w.input"]


def test_what_is_larger_than_ever_becomes_the_largest_number() -> None:
    history, weight, products = attached()
    x, grad = numbers(1, TOKENS, INPUTS), numbers(3, TOKENS, OUTPUTS)
    torch.autograd.backward(products.linear(x, weight), grad)
    end_step(history)
    for scale in (torch.tensor(1e-3), torch.tensor(1e-6)):
        for dtype in (FORWARD, BACKWARD):
            values = rounded_by(scale, x, dtype).float()
            assert float(values.abs().max()) == torch.finfo(dtype).max
    far = (1e4 * x).requires_grad_()
    weight.grad = None
    out = products.linear(far, weight)
    torch.autograd.backward(out, 1e4 * grad)
    assert far.grad is not None
    assert weight.grad is not None
    assert all(bool(torch.isfinite(each).all()) for each in (out, far.grad, weight.grad))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_steps_that_are_left_out_and_numbers_that_are_not_finite_change_no_size(bad: float) -> None:
    history, weight, products = attached()
    x = numbers(1, TOKENS, INPUTS)
    products.linear(x, weight)
    before = end_step(history)
    history.begin_step()
    products.linear(5 * x, weight)
    assert end_step(history, torch.tensor(True)) == before
    x[3, 3] = bad
    history.begin_step()
    products.linear(x, weight)
    after = end_step(history)
    assert after["w.input"] == before["w.input"]


def test_after_a_first_step_that_was_left_out_gradients_are_not_lost() -> None:
    history, weight, products = attached()
    assert end_step(history, torch.tensor(True)) == {"w.input": 0.0, "w.gradient": 0.0}
    x, grad = torch.randn(TOKENS, INPUTS).bfloat16().requires_grad_(), numbers(3, TOKENS, OUTPUTS) * 1e-8
    torch.autograd.backward(products.linear(x, weight), grad)
    assert x.grad is not None
    exact = grad.float() @ weight.detach().float()
    assert float((x.grad.float() - exact).norm()) < 0.1 * float(exact.norm())


def test_the_first_step_scales_by_the_moment_and_later_ones_by_the_last() -> None:
    history, weight, products = attached()
    x, plain = numbers(1, TOKENS, INPUTS), Fp8Products(Scaling.tensor)
    assert torch.equal(products.linear(x, weight), plain.linear(x, weight))
    end_step(history)
    # By the same scale, though every number is smaller: small ones lose digits.
    out = products.linear(0.01 * x, weight)
    assert not torch.equal(out, plain.linear(0.01 * x, weight))
    by_last = rounded_by(rounded(x, FORWARD, Scaling.tensor).scale, 0.01 * x, FORWARD)
    by_rows = rounded(weight.detach(), FORWARD, Scaling.tensor)
    scale = rounded(x, FORWARD, Scaling.tensor).scale * by_rows.scale
    exact = by_last.float() @ by_rows.values.float().t() * scale
    torch.testing.assert_close(out.float(), exact, rtol=2**-7, atol=1e-3 * float(exact.abs().max()))


def test_no_pass_looks_for_the_largest_number_once_a_scale_is_known() -> None:
    """As the compiler counts: without a scale the matrix is read once more."""
    size, read = [], torch.randn(512, 1024).bfloat16()
    for is_known in (False, True):
        history, weight, _ = attached()
        history.is_known = is_known
        scale, found = (getattr(weight, f"fp8_input_{name}") for name in ("scale", "found"))

        def noted(x: Tensor, scale: Tensor = scale, found: Tensor = found, known: bool = is_known) -> Tensor:
            return fp8._noted(x, FORWARD, Scaling.tensor, [scale, found], known).values

        with counted_bytes() as counted:
            torch.compile(noted)(read)
            size.append(counted())
    numel = read.numel()
    assert 5 * numel <= size[0]
    assert 3 * numel <= size[1] <= 3.1 * numel


def trained(training: Training, steps: range, *, evaluates: bool = False) -> list[float]:
    tokens = torch.randint(0, 64, (2, BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(0))
    found = []
    for step in steps:
        found.append(float(training.step.run(step, tokens).loss))
        if evaluates:
            with torch.no_grad():
                training.parallelized.model(tokens[0, :, :-1].flip(0), tokens[0, :, 1:])
    return found


def test_an_evaluation_between_steps_changes_no_bit_of_the_training() -> None:
    config = config_of(PrecisionName.fp8, fp8_delayed_scaling=True)
    config = replace(config, train=replace(config.train, global_batch_size=2 * BATCH))
    steps = range(1, 6)
    assert trained(built(config), steps) == trained(built(config), steps, evaluates=True)


def test_restored_sizes_give_the_bits_of_a_training_that_goes_on_and_others_do_not_count() -> None:
    history, weight, products = attached()
    products.linear(numbers(1, TOKENS, INPUTS), weight)
    state = end_step(history)
    other, again, with_it = attached()
    other.restore(state)
    x = numbers(4, TOKENS, INPUTS)
    assert torch.equal(with_it.linear(x, again), products.linear(x, weight))
    stranger, *_ = attached()
    stranger.restore({"v.input": 1.0, "v.gradient": 1.0})
    assert not stranger.is_known


@pytest.mark.slow
def test_losses_follow_those_of_bf16() -> None:
    expected = losses(config_of(PrecisionName.bf16))
    found = losses(config_of(PrecisionName.fp8, fp8_delayed_scaling=True))
    assert found == pytest.approx(expected, rel=0.01)
    assert found != losses(config_of(PrecisionName.fp8))
