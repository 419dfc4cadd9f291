"""How much host memory is free, and whether a save will fit: in host memory, where it is staged, and on
storage. Called by `checkpoints`, `memory_copies` and `micro_batch`; nothing is allocated here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from checkpointing.options import Needs
from orchestra.errors import TrainingError
from orchestra.sizes.units import binary

_MEMORY = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")


def check_host_memory(staging_bytes: int, num_local_ranks: int, available: int | None) -> None:
    """Raise TrainingError where the copies of this node's ranks do not fit into `available` bytes."""
    needed = staging_bytes * num_local_ranks
    if available is not None and needed > available:
        raise TrainingError(
            f"saving a checkpoint takes {binary(needed)} of host memory on this node "
            f"({num_local_ranks} × {binary(staging_bytes)}), and {binary(available)} are free; "
            "use more nodes, a smaller model, or save nothing with checkpoint.every_steps=null"
        )


def check_storage(needs: Needs, place: str) -> None:
    """Raise TrainingError where not even one checkpoint fits on storage, if its room is known, nor would
    once those are gone that it outdates.
    """
    free, needed = needs.free_storage_bytes, needs.checkpoint_bytes
    if free is not None and needed > free + needs.removable_bytes:
        raise TrainingError(
            f"{place}: one checkpoint takes {binary(needed)}, and {binary(free)} are free there; "
            "free some, choose another checkpoint.dir, or save nothing with checkpoint.every_steps=null"
        )


def missing_storage_bytes(needs: Needs, num_to_come: int) -> int:
    """Return how many bytes are missing on storage for `num_to_come` more checkpoints; 0 where all fit."""
    if needs.free_storage_bytes is None:
        return 0
    return max(0, needs.checkpoint_bytes * num_to_come - needs.free_storage_bytes)


def available_host_bytes() -> int | None:
    """Return the memory that this process can still take: of the machine, or of the control groups it is in.

    None where the system does not tell (not Linux).
    """
    try:
        lines = dict(line.split(":", 1) for line in _MEMORY.read_text().splitlines())
        of_machine = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    return min([of_machine, *_left_in_groups()])


def _left_in_groups() -> list[int]:
    """Return limit − use of each of this process's control groups that have a limit, without their
    reclaimable file cache: of version 2 innermost first, then the container's of version 1.
    """
    entries: list[list[str]] = []
    with contextlib.suppress(OSError):
        entries = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    inner = next((Path(path.lstrip("/")) for number, _, path in entries if number == "0"), Path())
    groups = [(_GROUPS / group, "memory.max", "memory.current") for group in (inner, *inner.parents)]
    groups.append((_GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"))
    left = []
    for group, limit_name, used_name in groups:
        # A group that has no such files, or "max" for a limit, has none.
        with contextlib.suppress(OSError, ValueError):
            limit, used = int((group / limit_name).read_text()), int((group / used_name).read_text())
            left.append(max(0, limit - used + _reclaimable_bytes(group)))
    return left


def _reclaimable_bytes(group: Path) -> int:
    """Return a control group's file cache with that of the groups in it; 0 where the system does not tell."""
    try:
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # Of version 1 only the total counts the groups inside, as the use does.
        return int(statistics.get("total_inactive_file", statistics.get("inactive_file", "0")))
    except (OSError, ValueError):
        return 0
