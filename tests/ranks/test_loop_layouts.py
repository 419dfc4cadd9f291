"""A torch loop's state by `checkpointing.torch_state` on every layout and wrapper that its page names, and by
torch.distributed.checkpoint, imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import Ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from checkpointing import catalog
from checkpointing.manifest import Manifest
from checkpointing.storage import open_storage
from checkpointing.torch_state import restore, save
from tests.support.command_line import CommandLine

WORLD_SIZE = 4
NAMES = {f"{block}.{name}" for block in (0, 1) for name in ("0.weight", "0.bias", "2.weight", "2.bias")}


def network(seed: int) -> nn.Sequential:
    """Two blocks of uneven sizes, a head, and a buffer."""
    torch.manual_seed(seed)
    blocks = [nn.Sequential(nn.Linear(12, 18), nn.GELU(), nn.Linear(18, 12)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(12, 5))
    model.register_buffer("rank_of", torch.tensor(float(dist.get_rank())))
    return model


def ddp(seed: int) -> nn.Module:
    return DistributedDataParallel(network(seed), broadcast_buffers=False)


def hsdp(seed: int) -> nn.Module:
    """Two replicas, each in two parts."""
    model = network(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def wrapped_fsdp(seed: int) -> nn.Module:
    """One block compiled and one recomputed, each in four parts."""
    model = network(seed)
    model[0] = torch.compile(model[0], backend="eager")
    model[1] = checkpoint_wrapper(model[1])
    for block in (model[0], model[1], model):
        fully_shard(block)
    return model


def compiled_ddp(seed: int) -> nn.Module:
    compiled = torch.compile(ddp(seed), backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, share: slice
) -> Iterator[float]:
    """Yield the loss of each step on this rank's share of its batch."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(16, 12, generator=generator)[share]
        labels = torch.randint(0, 5, (16,), generator=generator)[share]
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def chain(rank: int, world: int, place: str) -> tuple[list[float], list[float]]:
    """Train eight steps, each two on another layout from the checkpoint of the one before; return the mean
    losses, and those of one process. The sharded ones write what DCP writes as well.
    """
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    losses: list[Tensor] = []
    layouts: list[Callable[[int], nn.Module]] = [ddp, hsdp, wrapped_fsdp, compiled_ddp]
    for number, layout in enumerate(layouts):
        model = layout(seed=number)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        begin = restore(place, model, optimizer)
        assert begin == (2 * number or None)
        if begin:
            assert dict(model.named_buffers(remove_duplicate=False)).popitem()[1] == 0
        steps = range(2 * number + 1, 2 * number + 3)
        losses += map(torch.tensor, trained(model, optimizer, steps, slice(rank, None, world)))
        save(place, model, optimizer, steps[-1], keep_last=9)
        if layout in (hsdp, wrapped_fsdp):
            options = StateDictOptions(flatten_optimizer_state_dict=layout is hsdp)
            weights, state = get_state_dict(model, optimizer, options=options)
            content = {**weights, "optimizer": state} if layout is hsdp else {"app": [weights, state]}
            dcp.save(content, checkpoint_id=f"{place}/dcp/step-{steps[-1]}")
    for loss in losses:
        dist.all_reduce(loss)
    alone = network(0)
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    return [loss.item() / world for loss in losses], list(trained(alone, reference, range(1, 9), slice(None)))


def manifest(place: Path) -> Manifest:
    storage = open_storage(place)
    return catalog.read_manifest(storage, catalog.committed_steps(storage)[-1])


def test_layouts_and_wrappers_restore_from_each_other_and_dcp_s_checkpoints_hold_the_same(
    ranks: Ranks, tmp_path: Path, orchestra: CommandLine
) -> None:
    results: list[Any] = ranks(WORLD_SIZE).run(chain, place=str(tmp_path / "ours"))
    for losses, reference in results:
        assert losses == pytest.approx(reference, rel=1e-4)
    storage = open_storage(tmp_path / "ours")
    saved = {step: catalog.read_manifest(storage, step) for step in catalog.committed_steps(storage)}
    assert sorted(saved) == [2, 4, 6, 8]
    for content in saved.values():
        names = {name.removeprefix("model.") for name in content.tensors if name.startswith("model.")}
        assert names == {*NAMES, "2.weight", "2.bias", "rank_of"}
    for step in (4, 6):
        place = tmp_path / f"imported-{step}"
        orchestra("checkpoint", "import", "--from", "dcp", f"{tmp_path}/ours/dcp/step-{step}", str(place))
        assert manifest(place).step == step
        assert manifest(place).state_digest == saved[step].state_digest
        assert manifest(place).state["optimizer"]["values"] == saved[step].state["optimizer"]["values"]
