"""From the checkpoint benchmark's figures to medians, ratios and targets, as a table. No torch, no clocks.

Ratios are medians over rounds, each against the same round of the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

OURS = "orchestra"
DCP_SAVE = "dcp.save"
DCP_THREAD = "dcp.async_save, thread"
DCP_STAGER = "dcp.async_save, thread, async staging"
DCP_PROCESS = "dcp.async_save, process"
TORCH_SAVE = "torch.save"
SAVERS = (OURS, DCP_SAVE, DCP_THREAD, DCP_STAGER, DCP_PROCESS, TORCH_SAVE)
LIMIT_MEMCPY = "memcpy"
LIMIT_BUFFERED = "disk, buffered"
LIMIT_DIRECT = "disk, O_DIRECT"
RESTORES = ("broadcast", "rank0", "direct")
DCP_LOAD = "dcp.load"
LOST, BLOCKED, WHOLE = "lost_s", "blocked_s", "whole_s"


@dataclass(frozen=True)
class Target:
    """One of the project's targets: a ratio that is to be at most (or at least) a limit."""

    what: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def tables_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one table for each layout of a number of ranks."""
    return [_table(result, layout, figures) for layout, figures in result["layouts"].items()]


def _table(result: dict[str, Any], layout: str, figures: dict[str, Any]) -> dict[str, Any]:
    size = figures["state_bytes"]
    return {
        "ranks": result["ranks"],
        "layout": layout,
        "state_bytes": size,
        "saves": {name: _medians(turns) for name, turns in figures["saves"].items()},
        "limits_s": {
            name: statistics.median(values)
            for name, values in figures["limits"].items()
            if None not in values
        },
        "restores": {
            name: {cache: _medians(rounds) for cache, rounds in caches.items()}
            for name, caches in figures["restores"].get("timed", {}).items()
        },
        "counted_bytes": figures["restores"].get("counted_bytes", {}),
        "targets": [{**asdict(it), "is_met": it.is_met} for it in _targets(figures)],
    }


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    keys = [key for key, value in rounds[0].items() if value is not None]
    return {key: statistics.median(each[key] for each in rounds) for key in keys}


def _targets(figures: dict[str, Any]) -> list[Target]:
    saves = figures["saves"]
    targets = []
    if OURS in saves:
        targets += _limit_targets(saves[OURS], figures["limits"])
        targets += _peer_targets(saves)
    if figures["restores"]:
        targets += _restore_targets(figures["restores"], figures["state_bytes"])
    return targets


def _limit_targets(ours: Sequence[dict[str, Any]], limits: dict[str, list[float | None]]) -> list[Target]:
    disks = {
        name: [value for value in values if value is not None]
        for name, values in limits.items()
        if name in (LIMIT_BUFFERED, LIMIT_DIRECT) and None not in values
    }
    best = min(disks, key=lambda name: statistics.median(disks[name]))
    copies = [value for value in limits[LIMIT_MEMCPY] if value is not None]
    blocked = _ratio([turn[BLOCKED] for turn in ours], copies)
    share = _ratio(disks[best], [turn[WHOLE] for turn in ours])
    beyond = statistics.median(turn["beyond_staging"] for turn in ours)
    return [
        Target("blocked, of the memcpy time", blocked, 1.3),
        Target(f"whole save, share of the bandwidth of the {best}", share, 0.8, at_least=True),
        Target("host memory beyond one staging copy", beyond, 0.1),
    ]


def _peer_targets(saves: dict[str, list[dict[str, Any]]]) -> list[Target]:
    targets = []
    for key, what, limit in ((LOST, "training time lost", 0.5), (WHOLE, "whole save", 1.0)):
        theirs = {
            name: [turn[key] for turn in turns] for name, turns in saves.items() if name.startswith("dcp")
        }
        if theirs:
            best = min(theirs, key=lambda name: statistics.median(theirs[name]))
            ours = [turn[key] for turn in saves[OURS]]
            targets.append(Target(f"{what}, of {best}", _ratio(ours, theirs[best]), limit))
    return targets


def _restore_targets(restores: dict[str, Any], size: int) -> list[Target]:
    targets = []
    timed, counted = restores["timed"], restores["counted_bytes"]
    for name in ("broadcast", "rank0"):
        for cache, rounds in timed[name].items():
            said = statistics.median(each["said_bytes"] for each in rounds) / size
            targets.append(Target(f"{name}, {cache}: bytes read by its own count", said, 1.02))
            if cache == "dropped":
                kernel = statistics.median(each["kernel_bytes"] for each in rounds) / size
                targets.append(Target(f"{name}, {cache}: bytes read by the kernel's count", kernel, 1.02))
        if name in counted:
            targets.append(Target(f"{name}: bytes by the counting file system", counted[name] / size, 1.02))
    for cache, rounds in timed["broadcast"].items():
        ratio = _ratio(_column(rounds, "seconds"), _column(timed[DCP_LOAD][cache], "seconds"))
        targets.append(Target(f"broadcast, {cache}: of dcp.load's time", ratio, 0.7))
    return targets


def _column(rounds: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [each[key] for each in rounds]


def _ratio(mine: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def report(results: Sequence[dict[str, Any]], tables: Sequence[dict[str, Any]], file_system: str) -> None:
    """Print everything for a reader, at most 100 columns wide."""
    first = results[0]
    print(f"torch={first['torch']}  device={first['device']}  scratch={file_system}")
    if not first["can_drop_caches"]:
        print("not root: the page cache was not dropped, restores are from the warm one only")
    for table in tables:
        threads = next(it["threads"] for it in results if it["ranks"] == table["ranks"])
        step_s = statistics.median(row["step_s"] for row in table["saves"].values())
        print(
            f"\n{table['ranks']} ranks with {threads} threads, {table['layout']}, "
            f"{table['state_bytes'] / 1e9:.2f} GB, a step takes {step_s * 1e3:.0f} ms"
        )
        _print_saves(table)
        _print_restores(table)
        print("  targets")
        for target in table["targets"]:
            print(_target_line(target))


def _target_line(target: dict[str, Any]) -> str:
    sign = "≥" if target["at_least"] else "≤"
    verdict = "met" if target["is_met"] else "MISSED"
    return f"  {target['what']:66} {target['value']:7.3f} {sign} {target['limit']:<5g} {verdict}"


def _print_saves(table: dict[str, Any]) -> None:
    size = table["state_bytes"]
    header = f"{'blocked s':>9} {'slowdown':>9} {'lost s':>8} {'whole s':>8} {'GB/s':>6} {'memory':>8}"
    print(f"  {'save':38} {header}")
    for name, row in table["saves"].items():
        slowdown = row[LOST] - row[BLOCKED]
        print(
            f"  {name:38} {row[BLOCKED]:9.3f} {slowdown:9.3f} {row[LOST]:8.3f} {row[WHOLE]:8.3f} "
            f"{size / row[WHOLE] / 1e9:6.2f} {row['memory_rise_bytes'] / 1e9:5.2f} GB"
        )
        if name == OURS:
            print(f"  {'  the same, until the manifest is durable':66} {row['committed_s']:8.3f}")
    for name, seconds in table["limits_s"].items():
        amount = size / table["ranks"] if name == LIMIT_MEMCPY else size
        print(f"  limit: {name:59} {seconds:8.3f} {amount / seconds / 1e9:6.2f}")


def _print_restores(table: dict[str, Any]) -> None:
    if not table["restores"]:
        return
    size = table["state_bytes"]
    caches = list(next(iter(table["restores"].values())))
    header = "".join(f" {cache + ' s':>10} {'read':>7} {'disk':>7}" for cache in caches)
    print(f"  {'restore (bytes as multiples of the state)':42}{header}")
    for name, row in table["restores"].items():
        cells = "".join(
            f" {row[cache]['seconds']:10.3f} {row[cache]['said_bytes'] / size:6.2f}x "
            f"{row[cache]['kernel_bytes'] / size:6.2f}x"
            for cache in caches
        )
        counted = table["counted_bytes"].get(name)
        note = f"; {counted / size:.3f}x under fsspec" if counted is not None else ""
        print(f"  {name + note:42}{cells}")
