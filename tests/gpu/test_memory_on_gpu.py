"""A GPU's memory: the micro-batch that is found fits, the next one does not, and running out is explained."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conf.schema import Config, ModelConfig, ParallelismConfig, PrecisionConfig, PrecisionName, TrainConfig
from orchestra.parallel.mesh import RankEnvironment, open_mesh
from orchestra.sizes.topology import divisors
from orchestra.train.build import build_training
from orchestra.train.memory.micro_batch import choose_micro_batch_size
from orchestra.train.memory.out_of_memory import is_out_of_memory

# More sequences than any device holds: 32 MiB of activations and more in each.
SHARE = 1 << 16
CONFIG = Config(
    model=ModelConfig(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1024,
        max_position_embeddings=2048,
    ),
    precision=PrecisionConfig(PrecisionName.bf16),
    parallelism=ParallelismConfig(zero=1),
    train=TrainConfig(seq_len=2048, global_batch_size=SHARE, micro_batch_size="auto"),
)


@pytest.mark.gpu
def test_the_chosen_micro_batch_is_the_largest_that_fits_and_its_trials_leave_nothing() -> None:
    alone = RankEnvironment()
    with open_mesh(CONFIG, alone) as mesh:
        before = torch.cuda.memory_allocated(mesh.device)
        choice = choose_micro_batch_size(CONFIG, mesh, alone)
        assert torch.cuda.memory_allocated(mesh.device) == before
        assert None in choice.peak_bytes.values()
        sizes = divisors(SHARE)
        assert choice.peak_bytes[sizes[sizes.index(choice.size) + 1]] is None
        for size, fits in ((choice.size, True), (8 * choice.size, False)):
            config = replace(CONFIG, train=replace(CONFIG.train, micro_batch_size=size))
            training = build_training(config, mesh)
            tokens = torch.zeros(1, size, CONFIG.train.seq_len + 1, dtype=torch.int64, device=mesh.device)
            if fits:
                training.step.run(1, tokens)
            else:
                with pytest.raises(torch.OutOfMemoryError) as raised:
                    training.step.run(1, tokens)
                assert is_out_of_memory(raised.value)
            training.parallelized.stage.close()
            del training, tokens
            torch.cuda.empty_cache()
