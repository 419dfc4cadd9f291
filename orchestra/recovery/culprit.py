"""Which rank holds up the others, when all are silent. Pure: it reads positions, from events or agents.

One hanging rank stalls all ranks in a collective within a step, so that silence alone names nobody. The
culprit is a rank whose process is stopped, else one that has come least far: the others wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.events import is_number, is_whole
from orchestra.heartbeat import Beat, Phase

# Events that carry positions: `ranks`, a list of `Standing.record`.
EVENTS = ("step_stalled", "hang_detected")


@dataclass(frozen=True)
class Standing:
    """Where one rank stands, as its node's agent sees it. `state` is the process's letter in /proc: T, t:
    stopped; None: nothing is known of the process.
    """

    rank: int
    host: str
    phase: Phase
    step: int
    micro_batch: int
    silent_s: float
    state: str | None

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def position(self) -> tuple[int, int, int, int]:
        return Beat(0, self.phase, self.step, self.micro_batch, 0, 0, 0).position

    def record(self) -> dict[str, Any]:
        """Return what an event says of it."""
        return {
            "rank": self.rank,
            "phase": self.phase.name,
            "step": self.step,
            "micro_batch": self.micro_batch,
            "seconds": round(self.silent_s, 1),
            "state": self.state,
        }

    def where(self) -> str:
        """Say where it stands, for people."""
        if self.phase in (Phase.setup, Phase.restore):
            return f"in {self.phase.name}"
        if self.phase in (Phase.forward, Phase.backward):
            return f"in {self.phase.name} of micro-batch {self.micro_batch} of step {self.step}"
        return f"in {self.phase.name} of step {self.step}"


@dataclass(frozen=True)
class Culprit:
    """The rank to blame; `rank` and `host` are None where nothing tells the ranks apart."""

    rank: int | None
    host: str | None
    why: str


def furthest_behind(standings: Sequence[Standing]) -> list[Standing]:
    """Return those that hold up the others: the stopped ones, else those that have come least far."""
    stopped = [it for it in standings if it.is_stopped]
    if stopped:
        return stopped
    least = min((it.position for it in standings), default=None)
    return [it for it in standings if it.position == least]


def culprit(events: Iterable[Mapping[str, Any]]) -> Culprit | None:
    """Name the rank that one attempt's events accuse of a hang; None where they report none.

    Each node reports its own ranks: the events of all nodes are wanted, and of each rank the last one counts.
    """
    newest: dict[int, Standing] = {}
    for event in events:
        if event.get("event") in EVENTS:
            newest.update({it.rank: it for it in standings_of(event)})
    return among(list(newest.values())) if newest else None


def among(standings: Sequence[Standing]) -> Culprit:
    """Name the rank that holds up the others, and say why."""
    behind = sorted(furthest_behind(standings), key=lambda it: it.rank)
    first = behind[0]
    others = len(standings) - len(behind)
    if first.is_stopped:
        names = ", ".join(str(it.rank) for it in behind)
        return Culprit(first.rank, first.host, f"rank {names} is stopped (SIGSTOP), {first.where()}")
    if others == 0 and len(standings) > 1:
        return Culprit(None, None, f"all {len(standings)} silent ranks stand {first.where()}")
    if others == 0:
        return Culprit(first.rank, first.host, f"rank {first.rank} is silent {first.where()}")
    ahead = min((it for it in standings if it not in behind), key=lambda it: it.position)
    also = f" (and {len(behind) - 1} more)" if len(behind) > 1 else ""
    why = f"rank {first.rank}{also} stands {first.where()}, the next one {ahead.where()}"
    return Culprit(first.rank, first.host, why)


def standings_of(event: Mapping[str, Any]) -> list[Standing]:
    """Return the positions that an event carries; what is damaged is passed over."""
    host, ranks = event.get("host"), event.get("ranks")
    found = []
    for it in ranks if isinstance(ranks, list) else []:
        if not isinstance(it, dict) or it.get("phase") not in Phase.__members__:
            continue
        numbers = [it.get(key) for key in ("rank", "step", "micro_batch")]
        if not all(is_whole(number) for number in numbers) or not is_number(it.get("seconds")):
            continue
        place = (Phase[it["phase"]], it["step"], it["micro_batch"], float(it["seconds"]))
        state = it.get("state")
        found.append(Standing(it["rank"], str(host), *place, state if isinstance(state, str) else None))
    return found
