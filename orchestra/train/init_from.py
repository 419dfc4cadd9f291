"""Starts a run's parameters from a folder of Hugging Face weights (`model.init_from`) instead of a seed.

Each byte is read once and broadcast, by the same code that restores checkpoints. Whether a run starts anew it
does not know: that is for its caller to decide.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from checkpointing.format.manifest import Manifest
from checkpointing.peers import Peers
from checkpointing.restoring.restore import fetch
from checkpointing.shards import Shard, torch_dtype
from conf.schema import Config
from orchestra.errors import DataError, TrainingError
from orchestra.huggingface.folder import from_json, open_folder, to_json
from orchestra.huggingface.start import problems_of_folder

# Weights of another type than the masters' pass through memory of their own: of this many bytes at a time.
_BYTES_AT_ONCE = 1 << 30


@dataclasses.dataclass(frozen=True)
class Start:
    """Where the weights came from, the bytes that all ranks together read, and the seconds it took."""

    place: str
    bytes_read: int
    seconds: float


def load_start(
    config: Config, masters: Sequence[Shard], peers: Peers, group: dist.ProcessGroup | None
) -> Start:
    """Fill the masters (`model.<parameter>`) from the folder `model.init_from`. *Collective*.

    Any floating-point type is taken; fp32 masters hold every number of the narrower ones. The 16-bit copies
    are the caller's to make. Raises on every rank: TrainingError where the folder is not that of this model
    or holds numbers that are not finite; DamagedError where it cannot be read.
    """
    began = time.monotonic()
    assert config.model.init_from is not None
    topic = peers.unused("init_from")
    if peers.is_coordinator:
        peers.answer(topic, _found(config))
    found = peers.await_answer(topic, 2 * peers.limit_s)
    if "error" in found:
        raise TrainingError(found["error"])
    storage, folder, manifest = from_json(found)
    how = config.checkpoint.restore.name
    bytes_read = 0
    for names in _batches(manifest):
        here = [shard for shard in masters if shard.name in names]
        wanted = [_as_stored(shard, manifest) for shard in here]
        bytes_read += fetch(storage, folder, manifest, wanted, peers, group, how=how, topic=topic)
        for shard, filled in zip(here, wanted, strict=True):
            if filled is not shard:
                shard.tensor.copy_(filled.tensor)
    _refuse_nonfinite(masters, peers, topic, config.model.init_from)
    bytes_of_all = sum(peers.exchange(f"{topic}/bytes", bytes_read))
    return Start(config.model.init_from, bytes_of_all, time.monotonic() - began)


def _found(config: Config) -> dict[str, Any]:
    """Read the headers for all ranks; what is wrong with them goes to all as well."""
    assert config.model.init_from is not None
    try:
        folder = open_folder(config.model.init_from)
    except DataError as error:
        return {"error": f"model.init_from: {error}"}
    problem = next(problems_of_folder(config.model, folder), None)
    return to_json(folder) if problem is None else {"error": problem}


def _batches(manifest: Manifest) -> Iterator[set[str]]:
    """Yield the tensors' names in groups, the same ones on all ranks, whatever each rank holds of them."""
    names: set[str] = set()
    num_bytes = 0
    for name, tensor in manifest.tensors.items():
        if names and num_bytes + tensor.num_bytes > _BYTES_AT_ONCE:
            yield names
            names, num_bytes = set(), 0
        names.add(name)
        num_bytes += tensor.num_bytes
    yield names


def _as_stored(shard: Shard, manifest: Manifest) -> Shard:
    """Return the shard, or one like it in the type that the folder has."""
    dtype = manifest.tensors[shard.name].dtype
    if dtype == shard.dtype:
        return shard
    return dataclasses.replace(shard, tensor=torch.empty_like(shard.tensor, dtype=torch_dtype(dtype)))


def _refuse_nonfinite(masters: Sequence[Shard], peers: Peers, topic: str, place: str) -> None:
    """There are no checksums in such a folder; at least nothing that cannot be trained is taken."""
    bad = next((shard.name for shard in masters if not bool(torch.isfinite(shard.tensor).all())), None)
    reported = peers.exchange(f"{topic}/finite", bad)
    name = next((each for each in reported if each is not None), None)
    if name is not None:
        raise TrainingError(
            f"model.init_from={place}: {name} holds numbers that are not finite: the file is damaged, or the "
            "model was; copy it again"
        )
