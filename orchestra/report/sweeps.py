"""The states of a sweep's members, and what a sweep comes to. From their records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestra.report.run_state import RunState, read_state
from orchestra.run.paths import RunDir, Sweep, SweepDir, SweepMember, read_sweep
from orchestra.run.record import RunPhase


@dataclass(frozen=True)
class MemberState:
    """One member of a sweep: which, what distinguishes it, and the state of its run."""

    member: SweepMember
    run: RunDir
    state: RunState


@dataclass(frozen=True)
class SweepState:
    """A sweep as `orchestra status` tells of it; `problem` says why its record could not be read."""

    sweep: SweepDir
    members: tuple[MemberState, ...]
    created: float = 0.0
    problem: str | None = None

    @property
    def counts(self) -> dict[RunPhase, int]:
        """How many members are in which state, in the order of the states."""
        return counted(member.state for member in self.members)

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints: all members with what distinguishes them."""
        members = [
            {"index": each.member.index, "overrides": list(each.member.overrides), **each.state.to_json()}
            for each in self.members
        ]
        identity = {"name": self.sweep.name, "path": str(self.sweep.path), "created": self.created}
        told = {"counts": self.counts, "problem": self.problem, "members": members}
        return {"kind": "sweep", **identity, **told}


def counted(states: Iterable[RunState]) -> dict[RunPhase, int]:
    """Return how many there are of each state, in the order of the states."""
    counts = Counter(state.state for state in states)
    return {phase: counts[phase] for phase in RunPhase if counts[phase]}


def read_sweep_state(sweep: SweepDir, now: float) -> SweepState:
    """Read a sweep's record and the states of its members. Raises ConfigError when there is no record."""
    record = read_sweep(sweep)
    members = tuple(
        MemberState(member, run, replace(read_state(run, now), name=member_name(sweep, member)))
        for member, run in runs_of(sweep, record)
    )
    return SweepState(sweep, members, record.created)


def runs_of(sweep: SweepDir, record: Sweep) -> list[tuple[SweepMember, RunDir]]:
    """Return the members with their runs, wherever these lie."""
    return [(member, record.run(sweep, member)) for member in record.members]


def member_name(sweep: SweepDir, member: SweepMember) -> str:
    """Return what to type for a member."""
    return f"{sweep.name}/{member.index:03d}"


def with_states(sweep: SweepState, states: Sequence[RunState]) -> SweepState:
    """Return the sweep with other states of its members, in their order."""
    members = zip(sweep.members, states, strict=True)
    return replace(sweep, members=tuple(replace(member, state=state) for member, state in members))
