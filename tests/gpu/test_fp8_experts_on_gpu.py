"""Products of experts in fp8 on a GPU: those of the rounded factors, by Hopper's kernel and one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conf.schema import Config, ModelConfig, OptimConfig, PrecisionConfig, PrecisionName, TrainConfig
from orchestra.parallel.mesh import make_mesh
from orchestra.precision.fp8 import LEAST_CAPABILITY
from orchestra.precision.fp8_experts import Fp8GroupedProducts, has_grouped_kernel
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training
from tests.unit.precision.test_fp8_experts import assert_near, emulated, factors, found_of

GPU = torch.device("cuda", 0)
STEPS, SEQUENCE, BATCH = 10, 64, 4


@pytest.fixture(autouse=True)
def _has_fp8() -> None:
    if torch.cuda.get_device_capability(GPU) < LEAST_CAPABILITY:
        pytest.skip("needs a GPU of compute capability 8.9 or more")


@pytest.mark.parametrize("has_kernel", [False, True])
@pytest.mark.parametrize("is_kept", [False, True])
def test_products_on_the_gpu_are_those_of_the_rounded_factors(has_kernel: bool, is_kept: bool) -> None:
    if has_kernel and not has_grouped_kernel(GPU):
        pytest.skip("torch has a kernel for all experts on Hopper alone")
    # Experts' rows begin at any number: scales of rows, of four bytes each, lie at multiples of four alone.
    rows, weights, grads = factors("cuda")
    expected = emulated(rows.detach(), [weight.detach() for weight in weights], grads)
    found = found_of(Fp8GroupedProducts(has_kernel), is_kept=is_kept, device="cuda")
    for made, exact in zip(found, expected, strict=True):
        assert_near(made, exact.cpu())


def losses(precision: str, *, is_compiled: bool = False) -> list[float]:
    model = replace(ModelConfig(), num_experts=4, moe_intermediate_size=64)
    config = Config(
        model=model,
        precision=PrecisionConfig(name=PrecisionName(precision)),
        optim=OptimConfig(lr=1e-3),
        train=TrainConfig(
            steps=STEPS,
            seq_len=SEQUENCE,
            global_batch_size=BATCH,
            micro_batch_size=2,
            compile=is_compiled,
        ),
    )
    training = build_training(config, make_mesh(0, Layout(dp=1), GPU))
    found = []
    for step in range(1, STEPS + 1):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, model.vocab_size, (2, 2, SEQUENCE + 1), generator=generator)
        found.append(float(training.step.run(step, tokens.to(GPU)).loss))
    return found


@pytest.mark.parametrize("is_compiled", [False, True])
def test_losses_of_a_mixture_in_fp8_follow_those_of_bf16(is_compiled: bool) -> None:
    assert losses("fp8", is_compiled=is_compiled) == pytest.approx(losses("bf16"), rel=0.03)
