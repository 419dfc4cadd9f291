"""The shapes that `gpu.py` measures: models and their batches."""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import ModelConfig, MoeBalance
from orchestra.config.compose import compose


@dataclass(frozen=True)
class Shape:
    """A model and its batch: sequences of a micro-batch, and micro-batches of a step."""

    model: ModelConfig
    seq_len: int
    micro_batch: int
    accumulation: int = 4

    @property
    def tokens(self) -> int:
        """The tokens of one step."""
        return self.seq_len * self.micro_batch * self.accumulation


def preset(name: str, num_layers: int) -> ModelConfig:
    """Return a preset with only so many of its layers: its step's proportions, in the memory of a device."""
    return compose([f"model={name}", f"model.num_hidden_layers={num_layers}"]).config.model


SHAPES = {
    "8b8": Shape(preset("llama3_8b", 8), seq_len=8192, micro_batch=1),
    "llama_1b": Shape(preset("llama_1b", 16), seq_len=4096, micro_batch=4),
    "llama_125m": Shape(preset("llama_125m", 12), seq_len=2048, micro_batch=16),
    "gpt2_xl": Shape(preset("gpt2_xl", 48), seq_len=1024, micro_batch=4, accumulation=8),
    "mixtral": Shape(preset("mixtral_8x7b", 2), seq_len=4096, micro_batch=2),
    "qwen3_moe": Shape(preset("qwen3_30b_a3b", 4), seq_len=4096, micro_batch=4),
    "tiny_moe": Shape(
        ModelConfig(
            "tiny_moe",
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            vocab_size=256,
            num_experts=4,
            num_experts_per_tok=2,
            moe_balance=MoeBalance.aux,
        ),
        seq_len=32,
        micro_batch=2,
        accumulation=2,
    ),
    "tiny": Shape(
        ModelConfig("tiny", hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=256),
        seq_len=32,
        micro_batch=2,
        accumulation=2,
    ),
}
