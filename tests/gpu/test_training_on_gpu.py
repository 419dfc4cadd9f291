"""The training step on a GPU against the same step on the CPU: every precision, rounded moments, and state in
host memory; and state that is saved through pinned memory and restored to the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing.checkpointer import Checkpointer
from checkpointing.options import Options
from checkpointing.peers import Peers
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
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.parallel.blocks import refuse_missing_hardware
from orchestra.parallel.mesh import make_mesh
from orchestra.precision.fp8 import LEAST_CAPABILITY, Fp8Products
from orchestra.sizes.topology import Layout
from orchestra.train.build import Training, build_training, set_numerics
from orchestra.train.state import Position, TensorState, digest
from tests.unit.precision.test_fp8 import emulated

STEPS, SEQUENCE, BATCH = 10, 64, 4
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def config_of(precision: str = "fp32", optim: dict[str, Any] | None = None, **train: Any) -> Config:
    sizes = {"steps": STEPS, "seq_len": SEQUENCE, "global_batch_size": BATCH, "micro_batch_size": 2}
    return Config(
        model=ModelConfig(),
        precision=PrecisionConfig(name=PrecisionName(precision)),
        optim=OptimConfig(lr=1e-3, **(optim or {})),
        train=TrainConfig(**sizes, **train),
    )


def trained_on(device: torch.device, config: Config) -> tuple[Training, list[float]]:
    """Train on the same tokens as everybody; return the training and its losses."""
    set_numerics(config, device)
    training = build_training(config, make_mesh(0, Layout(dp=1), device))
    return training, train(training, config, range(1, STEPS + 1))


def train(training: Training, config: Config, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, config.model.vocab_size, (2, BATCH // 2, SEQUENCE + 1), generator=generator)
        losses.append(float(training.step.run(step, tokens).loss))
    return losses


def losses_on(device: torch.device, config: Config) -> list[float]:
    return trained_on(device, config)[1]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    return losses_on(CPU, config_of())


def test_initial_values_are_the_same_bits() -> None:
    on_cpu, on_gpu = Transformer(ModelConfig()), Transformer(ModelConfig()).to(GPU)
    fill_initial_values(on_cpu, 0)
    fill_initial_values(on_gpu, 0)
    for name, value in on_cpu.named_parameters():
        assert torch.equal(value, on_gpu.get_parameter(name).cpu()), name


def test_fp32_losses_equal_those_of_the_cpu(expected: list[float]) -> None:
    assert losses_on(GPU, config_of()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp32_grad"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_bf16_losses_follow_those_of_the_cpu(
    expected: list[float], precision: str, is_compiled: bool
) -> None:
    assert losses_on(GPU, config_of(precision, compile=is_compiled)) == pytest.approx(expected, rel=0.02)


def test_deterministic_repeats_are_bit_identical() -> None:
    config = config_of("bf16", deterministic=True)
    try:
        assert losses_on(GPU, config) == losses_on(GPU, config)
    finally:
        torch.use_deterministic_algorithms(False)


def test_training_goes_on_from_a_restored_state_bit_for_bit(tmp_path: Path) -> None:
    config, mesh = config_of("bf16", deterministic=True), make_mesh(0, Layout(dp=1), GPU)
    set_numerics(config, GPU)
    try:
        training, resumed = build_training(config, mesh), build_training(config, mesh)
        state, filled = (TensorState(each.parallelized, each.optimizer, mesh) for each in (training, resumed))
        train(training, config, range(1, 4))
        torch.rand(7, device=GPU)
        saver = Checkpointer(str(tmp_path), Peers.alone(), Options())
        saver.prepare(state.snapshot())
        updates = state.num_updates
        saver.save(3, state.snapshot(), {})
        expected = train(training, config, range(4, 7))  # while threads write what was staged
        numbers = torch.rand(3, device=GPU)
        saver.wait()

        restored = Checkpointer(str(tmp_path), Peers.alone(), Options()).restore(filled.wanted)
        assert restored is not None
        filled.take_back(restored.manifest, Position(num_updates=updates))
        assert updates == filled.num_updates == 3
        assert "rng.cuda.pp0-dp0-cp0-tp0" in restored.manifest.tensors
        assert digest(restored.manifest)
        assert train(resumed, config, range(4, 7)) == expected
        assert torch.equal(torch.rand(3, device=GPU), numbers)
    finally:
        torch.use_deterministic_algorithms(False)


def needs_fp8() -> None:
    if torch.cuda.get_device_capability(GPU) < LEAST_CAPABILITY:
        pytest.skip("needs a GPU of compute capability 8.9 or more")


@pytest.mark.parametrize("is_compiled", [False, True])
def test_fp16_losses_follow_those_of_fp32(expected: list[float], is_compiled: bool) -> None:
    assert losses_on(GPU, config_of("fp16", compile=is_compiled)) == pytest.approx(expected, rel=0.01)


def test_fp16_overflows_are_left_out_without_asking_the_host() -> None:
    config = config_of("fp16")
    scale = LossScale(initial=2**24)
    training, losses = trained_on(GPU, replace(config, precision=replace(config.precision, loss_scale=scale)))
    assert training.step.loss_scale is not None
    state = training.step.loss_scale.state
    assert state.num_overflows == STEPS - training.optimizer.num_updates
    assert all(loss == loss for loss in losses)


@pytest.mark.parametrize(
    "choices",
    [
        {"fp8_scaling": Scaling.tensor},
        {"fp8_scaling": Scaling.row},
        {"fp8_scaling": Scaling.tensor, "fp8_output": True, "fp8_delayed_scaling": True},
        {"fp8_scaling": Scaling.row, "fp8_output": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_fp8_losses_follow_those_of_fp32(
    expected: list[float], choices: dict[str, Any], is_compiled: bool
) -> None:
    needs_fp8()
    config = config_of("fp8", compile=is_compiled)
    refuse_missing_hardware(config, GPU)
    config = replace(config, precision=replace(config.precision, **choices))
    assert losses_on(GPU, config) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("scaling", Scaling)
def test_fp8_products_on_the_gpu_are_those_of_the_rounded_factors(scaling: Scaling) -> None:
    needs_fp8()
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 96), (128, 96), (64, 128))
    factors = [torch.randn(shape, generator=generator).to(torch.bfloat16) for shape in shapes]
    x, weight, grad = (factor.to(GPU) for factor in factors)
    x.requires_grad_()
    weight.requires_grad_()
    out = Fp8Products(scaling).linear(x, weight)
    out.backward(grad)  # type: ignore[no-untyped-call]
    # In fp32 on the CPU, whose own products of fp8 know no scales of rows in every torch.
    for found, exact in zip((out, x.grad, weight.grad), emulated(*factors, scaling), strict=True):
        assert found is not None
        assert float((found.detach().cpu().float() - exact).norm() / exact.norm()) < 0.01


def test_rounded_moments_stay_on_the_gpu_and_follow_exact_ones(expected: list[float]) -> None:
    config = config_of(optim={"state_dtype": StateDType.bf16})
    training, losses = trained_on(GPU, config)
    assert losses == pytest.approx(expected, rel=1e-3)
    moments = [moment for state in training.optimizer.state.values() for moment in state.values()]
    assert all(moment.is_cuda and moment.dtype == torch.bfloat16 for moment in moments)


@pytest.mark.parametrize("offload", [Offload.optimizer, Offload.optimizer_disk])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_fp32_grad"])
def test_state_in_host_memory_or_on_disk_trains_like_state_on_the_gpu(
    precision: str, offload: Offload, tmp_path: Path
) -> None:
    here = config_of(precision)
    training, expected = trained_on(GPU, here)
    there = ParallelismConfig(offload=offload, offload_dir=str(tmp_path), bucket_mib=0.1)
    away = replace(here, parallelism=there)
    offloaded, losses = trained_on(GPU, away)
    assert losses == pytest.approx(expected, rel=1e-5 if precision == "fp32" else 0.01)
    if offload is Offload.optimizer:
        assert all(item.master.is_pinned() for item in offloaded.parallelized.trained)
    assert all(item.parameter.is_cuda for item in offloaded.parallelized.trained)
    TensorState(offloaded.parallelized, offloaded.optimizer, make_mesh(0, Layout(dp=1), GPU)).snapshot()
    torch.cuda.synchronize()
    for item in offloaded.parallelized.trained:
        # What went back is what is there.
        assert torch.equal(
            item.parameter.detach().cpu().view(-1), item.master.view(-1).to(item.parameter.dtype)
        )
    assert training.optimizer.num_updates == offloaded.optimizer.num_updates
