"""What one command submits: new runs, each checked and complete, and the place that they get.

A single run is a sweep of one: one member, whose directory is the submission's own. Planning resolves the
configurations, puts the cluster's numbers into them and checks them, each once; it writes nothing. What is
planned here is written and handed to Slurm by `orchestra.submit.hand_over`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema import Config
from orchestra.config.compose import compose
from orchestra.config.machine import Situation, signature
from orchestra.errors import ConfigError
from orchestra.run.paths import SweepDir, SweepMember, is_sweep
from orchestra.submit.job import Share
from orchestra.submit.memory_check import memory_problems
from orchestra.submit.network_bench import with_measured_network
from orchestra.submit.new_run import RunRequest, parent_of_runs
from orchestra.submit.site import Site

if TYPE_CHECKING:
    from orchestra.config.sweep import ComposedMember

_HEX_DIGITS = 16


@dataclass(frozen=True)
class PlannedMember:
    """One run with its checked configuration, in which nothing is left to the cluster."""

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

    def request(self, command: Sequence[str]) -> RunRequest:
        """Return what the run's directory is written from."""
        return RunRequest(self.config, self.signature, self.overrides, command)


@dataclass(frozen=True)
class Submission:
    """New runs that are submitted together: one, or the members of a sweep."""

    members: tuple[PlannedMember, ...]
    # As typed.
    overrides: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    # A sweep gets a directory around those of its members, and its jobs are arrays.
    is_sweep: bool = True

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

    def adopting(self, runs: dict[int, str]) -> Submission:
        """Return the submission with runs of other sweeps in the place of these members."""
        members = (replace(member, adopted=runs.get(member.index)) for member in self.members)
        return replace(self, members=tuple(members))


def signature_of_members(signatures: Iterable[str]) -> str:
    """Return 16 hexadecimal digits that name a set of members."""
    return hashlib.sha256("\n".join(sorted(signatures)).encode()).hexdigest()[:_HEX_DIGITS]


def with_cluster(overrides: Sequence[str]) -> list[str]:
    """Return overrides with cluster=slurm before them where they choose no cluster."""
    chosen = ("cluster=", "+cluster=", "cluster.launcher=", "experiment=")
    if any(override.startswith(chosen) for override in overrides):
        return list(overrides)
    return ["cluster=slurm", *overrides]


def plan(
    overrides: Sequence[str], site: Site, command: Sequence[str], *, checks_memory: bool = True
) -> Submission:
    """Return the submission of one run. Raises ConfigError with every problem found, also what the cluster
    cannot give, LaunchError where Slurm is silent.
    """
    composed = compose(overrides, Situation("submit", cluster=site))
    site.require()
    if checks_memory and (problems := _memory_problems(composed.config, site)):
        raise ConfigError(problems)
    member = _planned(0, composed.config, tuple(overrides), (), site)
    return Submission((member,), tuple(overrides), tuple(command), is_sweep=False)


def submission_of(request: RunRequest, share: Share) -> Submission:
    """Return the submission of one run that is checked and complete."""
    overrides = tuple(request.overrides)
    member = PlannedMember(0, request.signature, overrides, (), request.config, share)
    return Submission((member,), overrides, tuple(request.command), is_sweep=False)


def plan_sweep(
    members: Sequence[ComposedMember],
    overrides: Sequence[str],
    site: Site,
    command: Sequence[str],
    *,
    name: str | None = None,
    checks_memory: bool = True,
) -> Submission:
    """Return the submission of members that were composed for `site`, `name` in the place of run.name.

    Raises ConfigError where a device's memory does not suffice, LaunchError where Slurm is silent.
    """
    site.require()
    problems: dict[str, list[int]] = {}
    for index, member in enumerate(members if checks_memory else ()):
        for problem in _memory_problems(member.config, site):
            problems.setdefault(problem, []).append(index)
    if problems:
        raise ConfigError([_about(text, indices, members) for text, indices in problems.items()])
    planned = []
    for index, member in enumerate(members):
        config = member.config
        if name is not None:
            config = replace(config, run=replace(config.run, name=name))
        planned.append(_planned(index, config, member.overrides, member.chosen, site))
    submission = Submission(tuple(planned), tuple(overrides), tuple(command))
    parent_of_sweep(submission.members)
    return submission


def _memory_problems(config: Config, site: Site) -> list[str]:
    """Return why the devices' memory does not suffice, where the configuration or Slurm names the device."""
    return list(memory_problems(site.with_gpu_type(config), Situation("submit")))


def _planned(
    index: int, config: Config, overrides: tuple[str, ...], chosen: tuple[str, ...], site: Site
) -> PlannedMember:
    """Return a member; measured figures of the network are no part of what was asked for, so the signature
    does not change with them.
    """
    share = site.share(config)
    return PlannedMember(index, signature(config), overrides, chosen, with_measured_network(config), share)


def _about(text: str, indices: Sequence[int], members: Sequence[ComposedMember]) -> str:
    """Say whose problem it is, unless all members have it."""
    if len(indices) == len(members):
        return text
    first = " ".join(members[indices[0]].chosen)
    more = f" and {len(indices) - 1} more" if len(indices) > 1 else ""
    return f"{first}{more}: {text}"


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


def planned_sweep(submission: Submission, now: float, *, is_forced: bool = False) -> SweepDir:
    """Return the directory that a new sweep would get, for a made name the first choice.

    `is_forced`: all members are trained anew, whatever there is. Raises ConfigError when something is in the
    place of a configured name.
    """
    parent = parent_of_sweep(submission.members)
    name = submission.configured_name
    if name is None:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        return SweepDir(parent / f"sweep-{stamp}-{submission.signature[:6]}")
    sweep = SweepDir(parent / name)
    if os.path.lexists(sweep.path):
        if is_forced and is_sweep(sweep.path):
            raise ConfigError(
                f"--force trains all members anew, in a new sweep, and run.name={sweep.name} names one that "
                f"is there; give another run.name, or leave it out to have one made"
            )
        raise ConfigError(sweep_taken(sweep))
    return sweep


def sweep_taken(sweep: SweepDir) -> str:
    """Return why a sweep cannot have its configured name."""
    what = "another sweep" if is_sweep(sweep.path) else "something else"
    return (
        f"run.name={sweep.name}: {sweep.path} exists already and holds {what}; choose another run.name, "
        f"leave it out to have one made, or remove that directory"
    )
