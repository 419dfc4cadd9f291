"""Small Llamas for these tests: their shapes, their weights, and real checkpoints of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpointing.box import Box
from checkpointing.catalog import read_manifest
from checkpointing.manifest import Manifest
from checkpointing.options import Options, no_event, no_fault
from checkpointing.peers import Peers
from checkpointing.save import Saver
from checkpointing.shards import Shard
from checkpointing.storage.local import LocalStorage
from conf.schema import ModelConfig, RopeScaling
from orchestra.model.transformer import Transformer, fill_initial_values

SCALED = RopeScaling(enabled=True, factor=4.0, original_max_position_embeddings=32)


def small(**changes: Any) -> ModelConfig:
    """Return a Llama with odd sizes, grouped queries, and weights large enough to matter."""
    values: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 97,
        "init_std": 0.2,
    }
    return ModelConfig(**{**values, **changes})


MODELS = [
    pytest.param(small(), id="grouped-query"),
    pytest.param(small(num_key_value_heads=1), id="multi-query"),
    pytest.param(small(num_key_value_heads=6), id="multi-head"),
    pytest.param(small(tie_word_embeddings=True), id="tied"),
    pytest.param(small(head_dim=16), id="own-head-width"),
    pytest.param(small(rope_theta=500.0, rope_scaling=SCALED), id="scaled-rope"),
    pytest.param(small(norm_eps=1e-6, rope_theta=5e5, max_position_embeddings=4096), id="other-numbers"),
]


def transformer(model: ModelConfig, seed: int = 3) -> Transformer:
    """Return our model with weights, the gains of its norms no ones."""
    built = Transformer(model)
    fill_initial_values(built, seed)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    return built


def save(place: Path, built: Transformer, step: int = 10, **state: Any) -> Manifest:
    """Write a checkpoint as a run does, with tensors cut by rows and by columns; return its manifest."""
    saver = Saver(LocalStorage(place), Peers.alone(), Options(layout={"dp": 1}), no_event, no_fault)
    shards = [shard for name, it in built.named_parameters() for shard in _cut(f"model.{name}", it.detach())]
    shards.append(Shard("optimizer.exp_avg.norm.weight", (3,), (0,), torch.zeros(3)))
    saver.save(step, shards, state)
    saver.wait()
    return read_manifest(LocalStorage(place), step)


def _cut(name: str, tensor: Tensor) -> Iterator[Shard]:
    """Cut matrices as tensor parallelism does: some by rows, some by columns, one into four unequal boxes."""
    shape = tuple(tensor.shape)
    boxes = [Box.whole(shape)]
    if name.endswith(("q_proj.weight", "embed_tokens.weight")):
        boxes = _halves(boxes[0], 0, 0.4)
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        boxes = _halves(boxes[0], 1, 0.7)
    elif name.endswith("up_proj.weight"):
        boxes = [part for half in _halves(boxes[0], 0, 0.3) for part in _halves(half, 1, 0.6)]
    for box in boxes:
        yield Shard(name, shape, box.offsets, tensor[box.within(Box.whole(shape))].contiguous())


def _halves(box: Box, dim: int, share: float) -> list[Box]:
    first = int(box.shape[dim] * share)
    sizes = ((0, first), (first, box.shape[dim] - first))
    return [
        Box(
            tuple(o + (begin if d == dim else 0) for d, o in enumerate(box.offsets)),
            tuple(size if d == dim else s for d, s in enumerate(box.shape)),
        )
        for begin, size in sizes
    ]
