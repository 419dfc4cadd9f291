"""Our Llamas with weights, and real checkpoints of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from checkpointing.catalog import file_path, read_manifest
from checkpointing.checkpointer import Checkpointer
from checkpointing.manifest import Manifest
from checkpointing.options import Options
from checkpointing.peers import Peers
from checkpointing.shards import Shard, whole
from checkpointing.storage import open_storage
from conf.schema import ModelConfig
from orchestra.model.transformer import Transformer, fill_initial_values


def transformer(model: ModelConfig, seed: int = 3) -> Transformer:
    """Return our model with weights, the gains of its norms no ones."""
    built = Transformer(model)
    fill_initial_values(built, seed)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()))
    return built


def save(place: str | Path, built: Transformer, step: int = 10, **state: Any) -> Manifest:
    """Write a checkpoint as a run does, with tensors cut by rows and by columns; return its manifest."""
    checkpointer = Checkpointer(str(place), Peers.alone(), Options(layout={"dp": 1}))
    shards = [whole("optimizer.exp_avg.norm.weight", torch.zeros(3))]
    for name, parameter in built.named_parameters():
        shards += _cut(f"model.{name}", parameter.detach())
    biases = {name: buffer for name, buffer in built.named_buffers() if name.endswith("_bias")}
    shards += [whole(f"model.{name}", bias) for name, bias in biases.items()]
    checkpointer.save(step, shards, state)
    checkpointer.wait()
    return checkpointer.manifest(step)


def flip(place: str | Path, step: int, tensor: str = "model.norm.weight") -> None:
    """Change one bit of a tensor in its last chunk."""
    storage = open_storage(place)
    chunk = read_manifest(storage, step).tensors[tensor].chunks[-1]
    content = bytearray(storage.get(file_path(step, chunk.file)))
    content[chunk.begin + 5] ^= 1
    storage.put(file_path(step, chunk.file), bytes(content))


def _cut(name: str, tensor: Tensor) -> Iterator[Shard]:
    """Cut matrices as tensor parallelism does: some by rows, some by columns, one into four unequal boxes;
    and stacked experts between experts and inside of them.
    """
    row, column = (0, tensor.shape[0]), (0, tensor.shape[min(1, tensor.dim() - 1)])
    rows, columns = [row], [column]
    if name.endswith(("q_proj.weight", "embed_tokens.weight")):
        rows = _halves(*row, 0.4)
    elif name.endswith(("o_proj.weight", "down_proj.weight")):
        columns = _halves(*column, 0.7)
    elif name.endswith(("up_proj.weight", "experts.up_proj", "experts.down_proj")):
        rows, columns = _halves(*row, 0.3), _halves(*column, 0.6)
    for (top, bottom), (left, right) in itertools.product(rows, columns):
        part = tensor[top:bottom, left:right] if tensor.dim() > 1 else tensor
        yield Shard(name, tuple(tensor.shape), (top, left, 0)[: tensor.dim()], part.contiguous())


def _halves(begin: int, end: int, share: float) -> list[tuple[int, int]]:
    middle = begin + int((end - begin) * share)
    return [(begin, middle), (middle, end)]
