"""Writes what this rank's collectives did last when its node agent asks: torch's flight recorder, as JSON.

A thread of its own answers, since the training thread stands in a collective then: it needs the interpreter's
lock for some milliseconds, which a rank that waits in a collective has given up. torch records anyway (2,000
collectives by default); nothing is done here until somebody asks. `orchestra.recovery.collectives` reads it.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from orchestra.parallel.mesh import Mesh
from orchestra.run.files import write_atomically
from orchestra.run.heartbeat import COLLECTIVES_SIGNAL

# NCCL's recorder and that of the others. Both are there from torch 2.11 on; a build without CUDA has one.
_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
# Collectives of each group that are kept beside those that have not ended: thousands of ranks write at once.
_LAST = 8


def answer_for_collectives(mesh: Mesh, target: Path | None) -> None:
    """Write this rank's record to `target` whenever the node agent asks for it. *Any rank*, once its groups
    are open; None: nobody asks.
    """
    if target is None or mesh.world_size == 1:
        return
    # By it the agent knows that somebody waits to be asked.
    with contextlib.suppress(OSError):
        target.touch()
    arguments = (_groups(mesh), target)
    threading.Thread(target=_answer, args=arguments, name="flight recorder", daemon=True).start()


def _answer(groups: dict[str, dict[str, Any]], target: Path) -> None:
    while True:
        signal.sigwait({COLLECTIVES_SIGNAL})
        # Whoever asked goes on without: this thread must be there for the next question.
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            write_atomically(target, json.dumps({"groups": groups, **recorded()}), is_synced=False)


def recorded() -> dict[str, Any]:
    """Return the last collectives of this process, all backends' together, in torch's own fields."""
    entries: list[dict[str, Any]] = []
    configs: dict[str, Any] = {}
    for name in _DUMPS:
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            record = json.loads(dump())
            entries += _newest(record.get("entries", []))
            configs |= {group: config for group, config in record.get("pg_config", {}).items() if group}
    return {"pg_config": configs, "entries": entries}


def _newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for entry in entries:
        groups[str(entry["process_group"])].append(entry)
    return [
        entry
        for found in groups.values()
        for place, entry in enumerate(found)
        if place >= len(found) - _LAST or not entry.get("retired")
    ]


def _groups(mesh: Mesh) -> dict[str, dict[str, Any]]:
    """Return the mesh's groups by torch's names for them: their axes and ranks."""
    named = {
        "dp": mesh.dp_group,
        "tp": mesh.tp_group,
        "cp": mesh.cp_group,
        "pp": mesh.pp_group,
        "loss": mesh.loss_group,
        "shard": mesh.shard_group,
        "replicate": mesh.replicate_group,
        "model": mesh.model_group,
        "ep": mesh.ep_group,
        "expert shard": mesh.expert_shard_group,
        "expert replicate": mesh.expert_replicate_group,
        "all ranks": dist.group.WORLD,
    }
    groups: dict[str, dict[str, Any]] = {}
    for axes, group in named.items():
        if group is not None and group.group_name not in groups:
            groups[group.group_name] = {"axes": axes, "ranks": dist.get_process_group_ranks(group)}
    return groups
