"""fp16, fp8, rounded moments and state in host memory on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conf.schema import (
    Config,
    LossScale,
    ModelConfig,
    Offload,
    OptimConfig,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    Scaling,
    StateDType,
    TrainConfig,
)
from orchestra.parallel.low_precision import refuse_missing_hardware
from orchestra.parallel.mesh import make_mesh
from orchestra.precision.fp8 import LEAST_CAPABILITY, Fp8Products
from orchestra.sizes.topology import Layout
from orchestra.train.build import Training, build_training, set_numerics

STEPS, SEQUENCE, BATCH = 10, 64, 4
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def config_of(precision: str = "fp32", optim: dict[str, Any] | None = None, **more: Any) -> Config:
    config = Config(
        model=ModelConfig(),
        precision=PrecisionConfig(name=PrecisionName(precision)),
        optim=OptimConfig(lr=1e-3, **(optim or {})),
        train=TrainConfig(steps=STEPS, seq_len=SEQUENCE, global_batch_size=BATCH, micro_batch_size=2),
    )
    return replace(config, **more)


def trained_on(device: torch.device, config: Config) -> tuple[Training, list[float]]:
    set_numerics(config, device)
    training = build_training(config, make_mesh(0, Layout(dp=1), device))
    losses = []
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, config.model.vocab_size, (2, BATCH // 2, SEQUENCE + 1), generator=generator)
        losses.append(float(training.step.run(step, tokens).loss))
    return training, losses


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return trained_on(CPU, config_of())[1]


def needs_fp8() -> None:
    if torch.cuda.get_device_capability(GPU) < LEAST_CAPABILITY:
        pytest.skip("needs a GPU of compute capability 8.9 or more")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_fp16_losses_follow_those_of_fp32(expected: list[float], is_compiled: bool) -> None:
    config = config_of("fp16")
    config = replace(config, train=replace(config.train, compile=is_compiled))
    assert trained_on(GPU, config)[1] == pytest.approx(expected, rel=0.01)


def test_fp16_overflows_are_left_out_without_asking_the_host() -> None:
    config = config_of("fp16")
    scale = LossScale(initial=2**24)
    training, losses = trained_on(GPU, replace(config, precision=replace(config.precision, loss_scale=scale)))
    assert training.step.loss_scale is not None
    state = training.step.loss_scale.state
    assert state.num_overflows == STEPS - training.optimizer.num_updates
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize("scaling", Scaling)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_fp8_losses_follow_those_of_fp32(expected: list[float], scaling: Scaling, is_compiled: bool) -> None:
    needs_fp8()
    config = config_of("fp8")
    refuse_missing_hardware(config, GPU)
    config = replace(
        config,
        precision=replace(config.precision, fp8_scaling=scaling),
        train=replace(config.train, compile=is_compiled),
    )
    assert trained_on(GPU, config)[1] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("scaling", Scaling)
def test_fp8_products_on_the_gpu_are_those_of_the_cpu(scaling: Scaling) -> None:
    needs_fp8()
    found = []
    for device in (CPU, GPU):
        generator = torch.Generator().manual_seed(0)
        x, weight, grad = (
            torch.randn(shape, generator=generator).to(device, torch.bfloat16)
            for shape in ((64, 96), (128, 96), (64, 128))
        )
        x.requires_grad_()
        weight.requires_grad_()
        out = Fp8Products(scaling).linear(x, weight)
        out.backward(grad)  # type: ignore[no-untyped-call]
        found.append([out.detach().cpu().float(), x.grad.cpu().float(), weight.grad.cpu().float()])  # type: ignore[union-attr]
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert float((on_cpu - on_gpu).norm() / on_cpu.norm()) < 0.01


def test_rounded_moments_stay_on_the_gpu_and_follow_exact_ones(expected: list[float]) -> None:
    config = config_of(optim={"state_dtype": StateDType.bf16})
    training, losses = trained_on(GPU, config)
    assert losses == pytest.approx(expected, rel=1e-3)
    moments = [moment for state in training.optimizer.state.values() for moment in state.values()]
    assert all(moment.is_cuda and moment.dtype == torch.bfloat16 for moment in moments)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_fp32_grad"])
def test_state_in_host_memory_trains_like_state_on_the_gpu(precision: str) -> None:
    here = config_of(precision)
    training, expected = trained_on(GPU, here)
    away = replace(here, parallelism=ParallelismConfig(offload=Offload.optimizer, bucket_mib=0.1))
    offloaded, losses = trained_on(GPU, away)
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 0.01)
    assert all(item.master.is_pinned() for item in offloaded.parallelized.trained)
    assert all(item.parameter.is_cuda for item in offloaded.parallelized.trained)
    torch.cuda.synchronize()
    for item in offloaded.parallelized.trained:
        # What went back is what is there.
        assert torch.equal(
            item.parameter.detach().cpu().view(-1), item.master.view(-1).to(item.parameter.dtype)
        )
    assert training.optimizer.num_updates == offloaded.optimizer.num_updates
