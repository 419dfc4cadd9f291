"""Where the bytes of a transfer belong in this rank's shards. It moves nothing between ranks and reads
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from checkpointing.planning.read_plan import Part, Transfer
from checkpointing.shards import Shard, as_bytes, torch_dtype


class Placement:
    """This rank's shards, as the places where bytes go to."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        shared = _sharing_memory(shards)
        self._of_name: dict[str, list[tuple[Shard, bool]]] = {}
        for index, shard in enumerate(shards):
            if shard.tensor.numel():
                self._of_name.setdefault(shard.name, []).append((shard, index not in shared))

    def own_memory(self, transfer: Transfer, device: torch.device) -> Tensor | None:
        """Return the part of a shard that a transfer fills exactly, as flat bytes; None where there is none.

        Only on `device`, and only memory that no other shard has: two transfers must not write it at once.
        """
        if len(transfer.parts) > 1:
            return None
        part = transfer.parts[0]
        for shard, is_unshared in self._of_name.get(part.name, ()):
            if is_unshared and shard.tensor.device.type == device.type:
                place = _filled_by(part, shard)
                if place is not None:
                    return as_bytes(place)
        return None

    def put(self, transfer: Transfer, memory: Tensor) -> None:
        """Copy what this rank wants of a transfer, whose bytes `memory` holds, to where it is not yet."""
        for part in transfer.parts:
            begin = part.chunk.begin - transfer.begin
            content = memory[begin : begin + part.chunk.num_bytes].view(torch_dtype(part.dtype))
            source = content.view(part.chunk.box.shape)
            for shard, _ in self._of_name.get(part.name, ()):
                shared = part.chunk.box.overlap(shard.box)
                if shared is None:
                    continue
                target = shard.tensor.detach()[shared.within(shard.box)]
                if target.data_ptr() != source.data_ptr():
                    # From pinned or device memory it goes on while the next bytes are on their way.
                    target.copy_(source[shared.within(part.chunk.box)], non_blocking=True)


def _filled_by(part: Part, shard: Shard) -> Tensor | None:
    if part.chunk.box.overlap(shard.box) != part.chunk.box:
        return None
    place = shard.tensor.detach()[part.chunk.box.within(shard.box)]
    return place if place.is_contiguous() else None


def _sharing_memory(shards: Sequence[Shard]) -> set[int]:
    """Return the indices of shards of whose memory another shard may have a part (tied tensors)."""
    spans = []
    for index, shard in enumerate(shards):
        tensor = shard.tensor
        if tensor.numel():
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            begin = tensor.data_ptr()
            spans.append((str(tensor.device), begin, begin + (last + 1) * tensor.element_size(), index))
    shared: set[int] = set()
    furthest = ("", 0, 0, 0)
    for span in sorted(spans):
        device, begin, end, index = span
        if device == furthest[0] and begin < furthest[2]:
            shared |= {index, furthest[3]}
        if device != furthest[0] or end > furthest[2]:
            furthest = span
    return shared
