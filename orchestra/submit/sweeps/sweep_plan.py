"""What a sweep is made of before anything of it exists: its members, its name, its place and its arrays."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.schema import Config
from orchestra.errors import ConfigError
from orchestra.run.paths import SweepDir, SweepMember, is_sweep
from orchestra.submit.job import Share
from orchestra.submit.new_run import parent_of_runs

_HEX_DIGITS = 16


@dataclass(frozen=True)
class PlannedMember:
    """One member with its checked configuration, in which nothing is left to the cluster."""

    index: int
    signature: str
    # All of them, and the swept ones alone.
    overrides: tuple[str, ...]
    chosen: tuple[str, ...]
    config: Config
    share: Share
    # The run that another sweep made and this one takes over.
    adopted: str | None = None

    @property
    def record(self) -> SweepMember:
        return SweepMember(self.index, self.signature, self.chosen, self.adopted)


@dataclass(frozen=True)
class SweepPlan:
    """A sweep that is to be made."""

    members: tuple[PlannedMember, ...]
    # As typed.
    overrides: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    @property
    def signature(self) -> str:
        """Equal for sweeps of the same members, in whatever order they were typed."""
        return signature_of_members(member.signature for member in self.members)

    @property
    def configured_name(self) -> str | None:
        return self.members[0].config.run.name

    @property
    def throttle(self) -> int | None:
        """Jobs of the sweep that may run at a time: the smallest number that a member gives."""
        given = [member.config.cluster.array_throttle for member in self.members]
        return min((number for number in given if number is not None), default=None)

    def adopting(self, runs: dict[int, str]) -> SweepPlan:
        """Return the plan with runs of other sweeps in the place of these members."""
        members = (replace(member, adopted=runs.get(member.index)) for member in self.members)
        return replace(self, members=tuple(members))


def signature_of_members(signatures: Iterable[str]) -> str:
    """Return 16 hexadecimal digits that name a set of members."""
    return hashlib.sha256("\n".join(sorted(signatures)).encode()).hexdigest()[:_HEX_DIGITS]


def parent_of_sweep(members: Sequence[PlannedMember]) -> Path:
    """Return the folder that the sweep lies in. Raises ConfigError where its members disagree on it."""
    problems = [
        f"run.{key} is one for the whole sweep and cannot be swept; give one value"
        for key in ("dir", "name")
        if len({getattr(member.config.run, key) for member in members}) > 1
    ]
    if problems:
        raise ConfigError(problems)
    return parent_of_runs(members[0].config)


def planned_sweep(plan: SweepPlan, now: float, *, is_forced: bool = False) -> SweepDir:
    """Return the directory that a new sweep would get, for a made name the first choice.

    Raises ConfigError when something is in the place of a configured name.
    """
    parent = parent_of_sweep(plan.members)
    name = plan.configured_name
    if name is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        return SweepDir(parent / f"sweep-{stamp}-{plan.signature[:6]}")
    sweep = SweepDir(parent / name)
    if os.path.lexists(sweep.path):
        if is_forced and is_sweep(sweep.path):
            raise ConfigError(
                f"--force trains all members anew, in a new sweep, and run.name={sweep.name} names one that "
                f"is there; give another run.name, or leave it out to have one made"
            )
        raise ConfigError(taken(sweep))
    return sweep


def taken(sweep: SweepDir) -> str:
    """Return why a sweep cannot have its configured name."""
    what = "another sweep" if is_sweep(sweep.path) else "something else"
    return (
        f"run.name={sweep.name}: {sweep.path} exists already and holds {what}; choose another run.name, "
        f"leave it out to have one made, or remove that directory"
    )
