"""State on a GPU: saved through pinned memory and restored to the same bits, its generator included."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpointing.checkpointer import Checkpointer
from checkpointing.options import Options
from checkpointing.peers import Peers
from conf.schema import Config, ModelConfig, PrecisionConfig, PrecisionName, TrainConfig
from orchestra.parallel.mesh import Mesh
from orchestra.sizes.topology import Layout
from orchestra.train.build import Training, build_training
from orchestra.train.state import TensorState, digest

GPU = torch.device("cuda", 0)
CONFIG = Config(
    model=ModelConfig(),
    precision=PrecisionConfig(name=PrecisionName.bf16),
    train=TrainConfig(steps=10, seq_len=64, global_batch_size=4),
)


def state_of() -> tuple[Training, TensorState]:
    degrees = Layout(dp=1)
    mesh = Mesh(0, degrees, degrees.coordinates(0), GPU, None)
    training = build_training(CONFIG, mesh)
    return training, TensorState(training.parallelized, training.optimizer, mesh)


def train(training: Training, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, CONFIG.model.vocab_size, (1, 4, 65), generator=generator)
        losses.append(float(training.step.run(step, tokens).loss))
    return losses


def test_training_goes_on_from_a_restored_state_bit_for_bit(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        training, state = state_of()
        train(training, range(1, 4))
        torch.rand(7, device=GPU)
        saver = Checkpointer(str(tmp_path), Peers.alone(), Options())
        saver.prepare(state.snapshot())
        updates = state.num_updates
        saver.save(3, state.snapshot(), {})
        expected = train(training, range(4, 7))  # while threads write what was staged
        numbers = torch.rand(3, device=GPU)
        saver.wait()

        resumed, filled = state_of()
        restored = Checkpointer(str(tmp_path), Peers.alone(), Options()).restore(filled.wanted)
        assert restored is not None
        filled.take_back(restored.manifest, updates)
        assert updates == filled.num_updates == 3
        assert "rng.cuda.pp0-dp0-cp0-tp0" in restored.manifest.tensors
        assert digest(restored.manifest)
        assert train(resumed, range(4, 7)) == expected
        assert torch.equal(torch.rand(3, device=GPU), numbers)
    finally:
        torch.use_deterministic_algorithms(False)
