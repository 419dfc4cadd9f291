"""fp32 masters keep what bf16 parameters cannot hold."""

from __future__ import annotations

import pytest
import torch

from conf.schema import Config, ModelConfig, OptimConfig, PrecisionConfig, PrecisionName, TrainConfig
from orchestra.parallel.apply import Parallelized
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout
from orchestra.train.build import build_training

STEPS = 5
SEQUENCE = 16


def trained_with(precision: PrecisionName, lr: float) -> tuple[Parallelized, dict[str, torch.Tensor]]:
    """Train a few steps; return the result and the initial values in fp32."""
    config = Config(
        model=ModelConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, vocab_size=64),
        precision=PrecisionConfig(name=precision),
        optim=OptimConfig(lr=lr, min_lr=lr, warmup_steps=0, weight_decay=0.0),
        train=TrainConfig(steps=STEPS, seq_len=SEQUENCE, global_batch_size=2),
    )
    training = build_training(config, make_mesh(0, Layout(dp=1), torch.device("cpu")))
    parallelized = training.parallelized
    initial = {item.name: item.master.detach().clone() for item in parallelized.trained}
    for step in range(1, STEPS + 1):
        tokens = torch.randint(0, 64, (1, 2, SEQUENCE + 1), generator=torch.Generator().manual_seed(step))
        training.step.run(step, tokens)
    return parallelized, initial


@pytest.mark.parametrize("precision", [PrecisionName.bf16, PrecisionName.bf16_fp32_grad])
def test_updates_below_the_resolution_of_bf16_are_not_lost(precision: PrecisionName) -> None:
    parallelized, initial = trained_with(precision, lr=1e-6)
    for item in parallelized.trained:
        before = initial[item.name]
        if before.dim() < 2:
            continue
        assert item.parameter.dtype == torch.bfloat16
        # Each step of AdamW moves an element by about the learning rate; bf16 resolves 1/256 of its size.
        moved = (item.master - before).abs()
        assert float(moved.mean()) == pytest.approx(STEPS * 1e-6, rel=0.7), item.name
        assert torch.equal(item.parameter, item.master.to(torch.bfloat16))
        large = before.abs() > 1e-2
        unmoved = item.parameter[large] == before[large].to(torch.bfloat16)
        assert float(unmoved.float().mean()) > 0.8, item.name


def test_fp32_has_no_second_copy() -> None:
    parallelized, _ = trained_with(PrecisionName.fp32, lr=1e-3)
    assert all(item.master.data_ptr() == item.parameter.data_ptr() for item in parallelized.trained)
