"""Mixtures that start from Hugging Face's weights on ranks that share out experts, heads and states: the bits
of one rank, read as seldom as can be, and the same files when they are exported again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import peers
from pool import Ranks
from safetensors.torch import load_file
from small_trainings import config_of, start

from checkpointing.catalog import read_manifest
from checkpointing.checkpointer import Checkpointer
from checkpointing.options import Options
from checkpointing.peers import Peers
from checkpointing.storage.local import LocalStorage
from conf.schema import Config, ModelConfig, MoeBalance
from orchestra.huggingface.export import ExportRequest, plan_export, write_export
from orchestra.train import starting_point
from orchestra.train.starting_point import load_weights
from orchestra.train.state import TensorState, digest
from tests.support.reference_mixtures import DEEPSEEK_V3, MIXTRAL, QWEN3_MOE, reference_mixture

FAMILIES = {
    "mixtral": replace(MIXTRAL, moe_balance=MoeBalance.aux),
    # Three experts on one rank and two on the other.
    "qwen3-moe": replace(QWEN3_MOE, num_experts=5, moe_balance=MoeBalance.aux),
    "deepseek-v3": DEEPSEEK_V3,
}
SHARED_OUT = {"tp": 2, "ep": 2, "zero": 3}


def folder_of(place: Path, model: ModelConfig) -> Path:
    """Write the random weights of transformers' own model, in several files; no gain and no bias is usual."""
    torch.manual_seed(4)
    theirs: Any = reference_mixture(model)
    with torch.no_grad():
        for name, value in (*theirs.named_parameters(), *theirs.named_buffers()):
            if value.dim() == 1 and "inv_freq" not in name:
                value.add_(torch.randn(value.shape) * 0.2)
    theirs.save_pretrained(place, max_shard_size="40KB", save_original_format=True)
    return place


def stored(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}


def loaded(rank: int, world: int, config: Config, how: str, place: Path) -> tuple[int, int, str]:
    """Start from the folder and save; return the bytes that all ranks have read, those that this one has
    masters of, and the digest of what is saved. *Collective*.
    """
    training, mesh = start(rank, world, config)
    state = TensorState(training.parallelized, training.optimizer, mesh)
    masters = state.wanted_masters()
    for shard in masters:
        shard.tensor.fill_(torch.nan)
    group = dist.group.WORLD if world > 1 else None
    among, saving = (
        peers(rank, world, f"{topic}/{place}") if world > 1 else Peers.alone() for topic in ("load", "save")
    )
    starting_point._BYTES_AT_ONCE = 20_000  # several batches
    evidence = load_weights(config.model, how, masters, among, group)
    state.copy_masters_to_parameters()
    saver = Checkpointer(str(place), saving, Options(), group=group)
    saver.save(1, state.snapshot(), {})
    saver.wait()
    training.parallelized.stage.close()
    saved = digest(read_manifest(LocalStorage(place), 1))
    return evidence["bytes_read"], sum(shard.tensor.nbytes for shard in masters), saved


@pytest.mark.parametrize(
    ("name", "how"), [("mixtral", "broadcast"), ("qwen3-moe", "direct"), ("deepseek-v3", "broadcast")]
)
def test_weights_on_ranks_are_those_of_one_and_go_back_into_the_same_files(
    ranks: Ranks, tmp_path: Path, name: str, how: str
) -> None:
    model = FAMILIES[name]
    folder = folder_of(tmp_path / "theirs", model)
    expected = stored(folder)
    model = replace(model, init_from=str(folder))
    *_, alone = loaded(0, 1, config_of(model), how, tmp_path / "alone")
    found = ranks(4).run(loaded, config=config_of(model, **SHARED_OUT), how=how, place=tmp_path / "four")
    assert {saved for *_, saved in found} == {alone}
    num_bytes = sum(tensor.nbytes for tensor in expected.values())
    # No rank's masters are another's but for gains, which tp does not cut.
    assert num_bytes <= sum(own for _, own, _ in found) < 1.2 * num_bytes
    if how == "direct":
        # An expert by the two ranks that have a half of it each, all else by no more than all.
        of_experts = sum(tensor.nbytes for key, tensor in expected.items() if ".experts." in key)
        most = 2 * of_experts + 4 * (num_bytes - of_experts)
        assert {num_bytes <= read <= most for read, *_ in found} == {True}
    else:
        assert {read for read, *_ in found} == {num_bytes}
    manifest = read_manifest(LocalStorage(tmp_path / "four"), 1)
    plan = plan_export(manifest, model, ExportRequest(target=tmp_path / "out"))
    write_export(LocalStorage(tmp_path / "four"), manifest, plan)
    again = stored(tmp_path / "out")
    assert again.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(again[key], tensor), key
