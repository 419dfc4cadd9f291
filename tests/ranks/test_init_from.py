"""Starting from a folder of weights on several ranks: read once, the same bits everywhere, failing as one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import peers
from pool import Ranks
from safetensors.torch import load_file, save_file
from small_trainings import ODD, start

from checkpointing.peers import Peers
from checkpointing.shards import Shard
from conf.schema import (
    CheckpointConfig,
    Config,
    ParallelismConfig,
    PrecisionConfig,
    PrecisionName,
    Restore,
    TrainConfig,
)
from orchestra.errors import TrainingError
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.train import starting_point
from orchestra.train.starting_point import load_weights
from orchestra.train.state import TensorState
from tests.support.reference_llama import reference_llama

# Odd, and with weights that are no small numbers.
MODEL = replace(ODD, init_std=0.3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of weights in several files."""
    reference_llama(MODEL).save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    return tmp_path / "llama"


def convert(folder: Path, dtype: torch.dtype) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    assert len(files) > 1
    return {name.removeprefix("model."): tensor for file in files for name, tensor in file.items()}


def config_of(folder: Path, how: str = "broadcast", **changes: Any) -> Config:
    model = replace(MODEL, init_from=str(folder), **changes)
    return Config(model=model, checkpoint=CheckpointConfig(restore=Restore(how)))


def filled(rank: int, world: int, config: Config, is_cut: bool = False) -> tuple[dict[str, Any], int]:
    """Start on this rank, with all of each parameter or uneven rows; return what it has and was read."""
    model = Transformer(config.model)
    fill_initial_values(model, 1)
    shards = []
    for name, parameter in model.named_parameters():
        rows = parameter.shape[0]
        first = rank * (rows // world + 1) if is_cut else 0
        mine = parameter.detach()[first : first + rows // world + 1] if is_cut else parameter.detach()
        offsets = (min(first, rows), *(0 for _ in parameter.shape[1:]))
        shards.append(Shard(f"model.{name}", tuple(parameter.shape), offsets, mine.clone()))
    starting_point._BYTES_AT_ONCE = 20_000  # several batches
    how, among = config.checkpoint.restore.name, peers(rank, world, f"init_from/{config}")
    evidence = load_weights(config.model, how, shards, among, dist.group.WORLD)
    return {shard.name: (shard.offsets, shard.tensor) for shard in shards}, evidence["bytes_read"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_every_rank_has_the_weights_and_each_byte_was_read_once(
    ranks: Ranks, folder: Path, dtype: torch.dtype
) -> None:
    convert(folder, dtype)
    expected = weights(folder)
    for found, bytes_read in ranks(2).run(filled, config=config_of(folder)):
        assert set(found) == {f"model.{name}" for name in expected}
        for name, weight in expected.items():
            assert torch.equal(found[f"model.{name}"][1], weight.to(torch.float32))
        assert bytes_read == sum(weight.nbytes for weight in expected.values())


@pytest.mark.parametrize("how", ["broadcast", "rank0", "direct"])
def test_ranks_with_uneven_rows_get_theirs(ranks: Ranks, folder: Path, how: str) -> None:
    convert(folder, torch.bfloat16)
    expected = weights(folder)
    for found, _ in ranks(3).run(filled, config=config_of(folder, how), is_cut=True):
        for name, weight in expected.items():
            offsets, tensor = found[f"model.{name}"]
            begin = offsets[0]
            assert torch.equal(tensor, weight[begin : begin + tensor.shape[0]].to(torch.float32))


def refused(rank: int, world: int, config: Config) -> str:
    try:
        filled(rank, world, config)
    except TrainingError as error:
        return str(error)
    return "nothing was raised"


def test_what_is_wrong_ends_all_ranks_alike(ranks: Ranks, folder: Path) -> None:
    first, second = ranks(2).run(refused, config=config_of(folder, vocab_size=60))
    assert first == second
    assert "model.vocab_size=59 (configured 60)" in first
    file = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, file)
    first, second = ranks(2).run(refused, config=config_of(folder))
    assert first == second
    assert f"{name.removeprefix('model.')} holds numbers that are not finite" in first
    assert ranks(2).run(refused, config=config_of(folder.parent / "gone"))[1].startswith("model.init_from: ")


def rounded(rank: int, world: int, config: Config) -> list[tuple[str, torch.Tensor]]:
    """Start 16-bit parameters on this rank; return those that it has as a whole."""
    training, mesh = start(rank, world, config)
    state = TensorState(training.parallelized, training.optimizer, mesh)
    group = dist.group.WORLD if world > 1 else None
    among = peers(rank, world, f"rounded/{config}") if world > 1 else Peers.alone()
    load_weights(config.model, config.checkpoint.restore.name, state.wanted_masters(), among, group)
    state.copy_masters_to_parameters()
    for item in training.parallelized.trained:
        part = item.parameter.detach().view(-1)[item.start : item.stop]
        assert torch.equal(part, item.master.view(-1).to(torch.bfloat16)), item.name
    return [(item.name, item.parameter.detach().clone()) for item in training.parallelized.trained]


@pytest.mark.parametrize(("world", "zero"), [(1, 0), (2, 0), (3, 1), (3, 2)])
def test_16_bit_parameters_are_rounded_from_the_weights(
    ranks: Ranks, folder: Path, world: int, zero: int
) -> None:
    config = replace(
        config_of(folder),
        precision=PrecisionConfig(name=PrecisionName.bf16),
        parallelism=ParallelismConfig(zero=zero, bucket_mib=0.01),
        train=TrainConfig(global_batch_size=6, micro_batch_size=1),
    )
    expected = weights(folder)
    for found in ranks(world).run(rounded, config=config):
        assert {name for name, _ in found} == set(expected)
        for name, parameter in found:
            assert torch.equal(parameter, expected[name].to(torch.bfloat16)), name
