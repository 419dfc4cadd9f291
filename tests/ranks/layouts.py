"""A small state of odd shapes, the ways in which ranks can share it, and how to save and restore it so.

Everything here is run by the ranks of a pool. It knows no trainer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.box import Box
from checkpointing.manifest import MANIFEST
from checkpointing.options import Options
from checkpointing.outages import OutagePatience
from checkpointing.peers import Peers
from checkpointing.restore import Places, RestoredCheckpoint, WantedShards, restore
from checkpointing.saving.save import Saver
from checkpointing.shards import Shard, as_bytes
from checkpointing.storage.local import LocalStorage

LAYOUTS = ("replicated", "rows", "columns", "grid", "uneven", "striped", "one rank", "mixture")
# Minus zero, quiet and signalling NaN with payloads, infinity, a denormal: arithmetic would change some.
_ODD_BITS = (0x80000000, 0x7FC12345, 0x7F812345, 0xFFC00001, 0x7F800000, 0x00000001)


def state(seed: int = 0) -> dict[str, Tensor]:
    """Return the whole state, equal on all ranks."""
    generator = torch.Generator().manual_seed(seed)

    def bits(*shape: int) -> Tensor:
        return torch.randint(-(2**31), 2**31 - 1, shape, generator=generator).to(torch.int32)

    matrix = bits(37, 13)
    matrix.view(-1)[: len(_ODD_BITS)] = torch.tensor(_ODD_BITS, dtype=torch.int64).to(torch.int32)
    matrix[20, :6] = matrix[0, :6]
    return {
        "matrix": matrix.view(torch.float32),
        "bias": bits(13).view(torch.float32),
        "scalar": bits(1).view(torch.float32).reshape(()),
        "half": bits(37, 13).view(torch.bfloat16),
        "counts": bits(13, 74).view(torch.int64),
        "cube": bits(5, 6, 7).view(torch.float32),
        "bytes": bits(5).view(torch.uint8),
        "nothing": torch.zeros(0, 4),
    }


def boxes(shape: Sequence[int], layout: str, rank: int, world: int) -> list[Box]:
    """Return what a rank holds of a tensor."""
    whole = Box.whole(shape)
    if layout == "one rank":
        return [whole] if rank == world - 1 else []
    if layout == "replicated" or not shape:
        return [whole]
    if layout == "rows":
        return [_slab(whole, 0, *_even(shape[0], rank, world))]
    if layout == "columns":
        return [_slab(whole, len(shape) - 1, *_even(shape[-1], rank, world))]
    if layout == "grid":
        # The first ranks share the first dim, their neighbours the last; a 1-D tensor has two replicas.
        rows = max(1, world // 2)
        row, column = rank % rows, rank // rows
        slab = _slab(whole, 0, *_even(shape[0], row, rows))
        if len(shape) == 1:
            return [slab]
        num_columns = -(-world // rows)
        return [_slab(slab, len(shape) - 1, *_even(shape[-1], column, num_columns))]
    if layout == "uneven":
        # Rank 0 has nothing (unless alone), each other one twice as much as the one before.
        weights = [0 if other == 0 and world > 1 else 2**other for other in range(world)]
        ends = [shape[0] * sum(weights[:upto]) // sum(weights) for upto in range(world + 1)]
        return [_slab(whole, 0, ends[rank], ends[rank + 1])]
    if layout == "striped":
        starts = range(rank * 3, shape[0], world * 3)
        return [_slab(whole, 0, start, min(start + 3, shape[0])) for start in starts] or [
            _slab(whole, 0, 0, 0)
        ]
    raise ValueError(layout)


def shards(whole: dict[str, Tensor], layout: str, rank: int, world: int, *, is_filled: bool) -> list[Shard]:
    """Return a rank's shards, some of them strided; filled from `whole`, or with a value that is nowhere."""
    found = []
    for index, (name, tensor) in enumerate(whole.items()):
        its_layout = LAYOUTS[index % (len(LAYOUTS) - 1)] if layout == "mixture" else layout
        for number, box in enumerate(boxes(tuple(tensor.shape), its_layout, rank, world)):
            local = tensor[box.within(Box.whole(tensor.shape))].clone()
            if (index + number) % 3 == 1 and local.dim() > 1:
                local = local.transpose(0, -1).contiguous().transpose(0, -1)
            if not is_filled:
                local.copy_(torch.full_like(local, 77))
            found.append(Shard(name, tuple(tensor.shape), box.offsets, local))
    return found


def _slab(box: Box, dim: int, begin: int, end: int) -> Box:
    offsets, shape = list(box.offsets), list(box.shape)
    offsets[dim], shape[dim] = begin, end - begin
    return Box(tuple(offsets), tuple(shape))


def _even(size: int, part: int, num_parts: int) -> tuple[int, int]:
    """Return the begin and end of a part as torch cuts: equal ones first, short and empty ones last."""
    each = -(-size // num_parts)
    return min(part * each, size), min((part + 1) * each, size)


def is_equal(shard: Shard, whole: dict[str, Tensor]) -> bool:
    """Whether a shard holds the bits of the state."""
    expected = whole[shard.name][shard.box.within(Box.whole(shard.shape))]
    return torch.equal(as_bytes(shard.tensor.contiguous()), as_bytes(expected.contiguous()))


def peers(rank: int, world: int, topic: str, limit_s: float = 30.0) -> Peers:
    """Return this rank's end of a conversation that no other test has."""
    store = dist.PrefixStore(topic, dist.distributed_c10d._get_default_store())
    return Peers(rank, world, store, limit_s)


def watched(place: Path) -> Mock:
    """Return a storage that remembers what is asked of it."""
    return Mock(wraps=LocalStorage(place))


def bytes_read(storage: Mock) -> int:
    """Return the bytes of tensors that were read; rank 0 also looks at the beginnings of manifests."""
    calls = (call.args for call in storage.read_into.call_args_list)
    return sum(len(memory) for path, _, memory in calls if not path.endswith(MANIFEST))


def restored(
    rank: int,
    world: int,
    place: Path,
    topic: str,
    wanted: WantedShards,
    *,
    storage: Any = None,
    limit_s: float = 30.0,
    patience_s: float = 0.0,
    **options: Any,
) -> RestoredCheckpoint | None:
    """Restore what is wanted from a place, in a conversation of its own."""
    among, group = peers(rank, world, f"{topic}/{place}", limit_s), dist.group.WORLD if world > 1 else None
    places = Places([storage or LocalStorage(place)], patience=OutagePatience(patience_s))
    return restore(places, among, group, wanted, **options)


def save(rank: int, world: int, place: Path, layout: str, states: dict[int, dict[str, Tensor]]) -> None:
    """Save some states as steps of one place."""
    topic = hashlib.sha256(str(place).encode()).hexdigest()
    saver = Saver(
        LocalStorage(place), peers(rank, world, topic), Options(keep_last=9), lambda *_: None, lambda *_: None
    )
    for step, whole in states.items():
        saver.save(step, shards(whole, layout, rank, world, is_filled=True), {"step": step})
        saver.wait()


def restore_state(rank: int, world: int, place: Path, layout: str, how: str) -> dict[str, Any]:
    """Restore the state; return what is not as it was, and how much was read."""
    whole, storage = state(), watched(place)
    mine = shards(whole, layout, rank, world, is_filled=False)
    found = restored(rank, world, place, f"{layout}/{how}", lambda _: mine, storage=storage, how=how)
    assert found is not None
    return {
        "wrong": [(shard.name, shard.offsets) for shard in mine if not is_equal(shard, whole)],
        "reported": found.bytes_read,
        "read": bytes_read(storage),
        "asked": {name for name, *_ in storage.method_calls},
        "size": sum(tensor.num_bytes for tensor in found.manifest.tensors.values()),
    }
