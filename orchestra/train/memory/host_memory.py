"""Whether a save will fit: in host memory, where it is staged, and on storage. Called by `checkpoints` and
`memory_copies`; nothing is allocated here.
"""

from __future__ import annotations

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
    """Raise TrainingError where not even one checkpoint fits on storage, if its room is known."""
    free, needed = needs.free_storage_bytes, needs.checkpoint_bytes
    if free is not None and needed > free:
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
    """Return the bytes left in each of this process's control groups (version 2), innermost first."""
    try:
        entries = [line.split(":", 2) for line in _OWN_GROUPS.read_text().splitlines()]
    except OSError:
        return []
    inner = next((Path(path.lstrip("/")) for number, _, path in entries if number == "0"), None)
    if inner is None:
        return []
    left = [_left(_GROUPS / group) for group in (inner, *inner.parents)]
    return [number for number in left if number is not None]


def _left(group: Path) -> int | None:
    """Return limit − use of one group, without its reclaimable file cache; None where it has no limit."""
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(statistics["inactive_file"]))
    except (OSError, KeyError, ValueError):
        return None
