"""The contestants of `gpu.py` by name, and its table: rates, ratios, memory. Pure: no torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# In the order of their turns and of the table.
CONTESTANTS = {
    "eager": "orchestra, eager",
    "compiled": "orchestra, compiled",
    "fp8": "orchestra, fp8, compiled",
    "fp8_rows": "orchestra, fp8, scales of rows",
    "fp8_output": "orchestra, fp8, its output product too",
    "selective": "orchestra, selective recomputation",
    "full": "orchestra, full recomputation",
    "offload": "orchestra, full, its state offloaded",
    "transformers": "transformers, autocast, compiled",
    "fully_shard": "transformers, fully_shard, compiled",
    "torchtitan": "torchtitan, autocast, compiled",
    "sustained": "products and attention alone, in a row",
    "limit": "limit: each of them by itself",
}
# Others that are measured only where they are named: a turn of theirs takes long.
ON_REQUEST = ("fp8_rows", "offload")
PEERS = ("transformers", "fully_shard", "torchtitan")
LIMIT = "limit"
_GIB = 2**30


@dataclass
class Measured:
    """What one contestant measured, turn by turn: `seconds` of a step."""

    seconds: list[float] = field(default_factory=list)
    first_steps_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    # The loss of the first step, None of what trains nothing.
    first_loss: float | None = None
    # Where the time of each turn's first step went.
    first_steps: list[Mapping[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, turn: Mapping[str, Any]) -> None:
        """Take in a turn, as the contestant's process tells it."""
        self.seconds.append(turn["seconds"])
        self.first_steps_s.append(turn["first_step_s"])
        self.first_steps.append(turn.get("first_step", {}))
        self.peak_bytes = max(self.peak_bytes, turn["peak_bytes"])
        if self.first_loss is None:
            self.first_loss = turn["first_loss"]
        self.facts = turn["facts"]


def best_peer(measured: Mapping[str, Measured]) -> str | None:
    """Return the peer with the shortest median step; None where no peer was measured."""
    present = [name for name in PEERS if name in measured]
    return min(present, key=lambda name: statistics.median(measured[name].seconds), default=None)


def rows_of(
    measured: Mapping[str, Measured], tokens: int, flops_per_token: int, peak_flops: float | None
) -> list[dict[str, Any]]:
    """Return a row for each contestant: `of_best_peer` and `of_limit` are its speed by theirs. MFU is against
    the peak of the precision that the run was asked for, fp8's too; None where that is not known.
    """
    peer = best_peer(measured)
    rows = []
    for name, found in measured.items():
        rate = tokens / statistics.median(found.seconds)
        rows.append(
            {
                "name": name,
                "contestant": CONTESTANTS[name],
                "seconds": found.seconds,
                "median_s": statistics.median(found.seconds),
                "tokens_per_s": rate,
                "mfu": None if peak_flops is None else rate * flops_per_token / peak_flops,
                "of_best_peer": _speed_by(found, measured.get(peer or "")),
                "of_limit": _speed_by(found, measured.get(LIMIT)),
                "is_best_peer": name == peer,
                "peak_bytes": found.peak_bytes,
                "first_step_s": found.first_steps_s[0],
                "first_loss": found.first_loss,
                "first_steps": found.first_steps,
            }
        )
    return rows


def _speed_by(mine: Measured, other: Measured | None) -> float | None:
    if other is None:
        return None
    # Of the same rounds: the last one may have ended early.
    pairs = zip(mine.seconds, other.seconds, strict=False)
    return statistics.median(theirs / own for own, theirs in pairs)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the printed table."""
    names = (("step s", 9), ("tokens/s", 9), ("MFU", 7), ("of peer", 8), ("of limit", 9), ("peak GiB", 9))
    names = (*names, ("1st step s", 11), ("1st loss", 9))
    lines = [" " * 37 + " ".join(f"{name:>{width}}" for name, width in names)]
    for row in rows:
        mark = "*" if row["is_best_peer"] else " "
        cells = [
            f"{row['contestant']:36}{mark}{row['median_s']:9.4f}",
            f"{row['tokens_per_s']:9,.0f}",
            _told(row["mfu"], "7.1%"),
            _told(row["of_best_peer"], "8.3f"),
            _told(row["of_limit"], "9.1%"),
            f"{row['peak_bytes'] / _GIB:9.2f}",
            f"{row['first_step_s']:11.1f}",
            _told(row["first_loss"], "9.4f"),
        ]
        lines.append(" ".join(cells))
    if any(row["is_best_peer"] for row in rows):
        lines.append("* the best peer")
    return lines


def _told(value: float | None, form: str) -> str:
    width = int(form.partition(".")[0])
    return f"{'n/a':>{width}}" if value is None else f"{value:{form}}"
