"""The training step on a GPU against the same step on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conf.schema import Config, ModelConfig, OptimConfig, PrecisionConfig, PrecisionName, TrainConfig
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training, set_numerics

STEPS, SEQUENCE, BATCH = 10, 64, 4
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def config_of(precision: str = "fp32", **train: bool) -> Config:
    return Config(
        model=ModelConfig(),
        precision=PrecisionConfig(name=PrecisionName(precision)),
        optim=OptimConfig(lr=1e-3),
        train=replace(TrainConfig(steps=STEPS, seq_len=SEQUENCE, global_batch_size=BATCH), **train),
    )


def losses_on(device: torch.device, config: Config) -> list[float]:
    set_numerics(config, device)
    training = build_training(config, make_mesh(0, Layout(dp=1), device))
    losses = []
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, config.model.vocab_size, (2, BATCH // 2, SEQUENCE + 1), generator=generator)
        losses.append(float(training.step.run(step, tokens).loss))
    return losses


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
