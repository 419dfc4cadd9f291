"""What one command submits: new runs, each checked and complete, and the place that they get.

A single run is a sweep of one: one member, whose directory is the submission's own. Planning resolves the
configurations, puts the cluster's numbers into them and checks them, each once; it writes nothing. What is
planned here is written and handed to Slurm by `orchestra.submit.hand_over`.

One check is here alone, and serves `orchestra plan` for its advice: whether the devices' memory suffices by
the planner's count, and what would make it. Only devices known by name or profile are judged, and never CPUs.
The count errs by 7 % in the mean (benchmarks/RESULTS.md), so `--skip-memory-check` submits all the same.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema import Config, Device, LauncherName
from orchestra.config.compose import compose, merge, typed
from orchestra.config.home import chooses_cluster
from orchestra.config.keys import shown, written
from orchestra.config.machine import Situation, by_itself, signature
from orchestra.config.overrides import check_overrides
from orchestra.config.rules.all_rules import problems_of
from orchestra.config.sweep import SweepProblems
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of
from orchestra.plan.frameworks import OWN
from orchestra.plan.predict import Prediction, predict
from orchestra.plan.profiles import is_profile, read_profile
from orchestra.run.paths import SweepDir, SweepMember, is_sweep
from orchestra.run.permissions import loose_folders
from orchestra.sizes.advice import BEFORE_SUBMIT, MemoryNeed, changed, what_helps
from orchestra.sizes.memory.rank_memory import USABLE_SHARE
from orchestra.sizes.topology import has_open_micro_batch
from orchestra.sizes.units import GIB
from orchestra.submit.job import Share
from orchestra.submit.network_bench import with_measured_network
from orchestra.submit.new_run import RunRequest, name_taken, parent_of_runs
from orchestra.submit.site import Site, note

if TYPE_CHECKING:
    from orchestra.config.compose import Composed

# Variables from which sbatch takes options, and what says the same here.
_VARIABLES_OF_SBATCH = {
    "SBATCH_ACCOUNT": "cluster.account",
    "SBATCH_PARTITION": "cluster.partition",
    "SBATCH_QOS": "cluster.qos",
    "SBATCH_TIMELIMIT": "cluster.time_limit",
    "SBATCH_CONSTRAINT": "cluster.constraint",
    "SBATCH_RESERVATION": "cluster.slurm_extra.reservation",
}
_HEX_DIGITS = 16
_NUM_COMPONENTS = 3


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
    # What it is on each kind of nodes that would do, `config` and `share` the first; empty: there is one.
    alternatives: tuple[tuple[Config, Share], ...] = ()

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
        signatures = "\n".join(sorted(member.signature for member in self.members))
        return hashlib.sha256(signatures.encode()).hexdigest()[:_HEX_DIGITS]

    @property
    def is_here(self) -> bool:
        """Whether its members train on this machine, without jobs."""
        return self.members[0].config.cluster.launcher is LauncherName.local

    @property
    def configured_name(self) -> str | None:
        return self.members[0].config.run.name

    @property
    def throttle(self) -> int | None:
        """Jobs of the sweep that may run at a time: the smallest number that a member gives."""
        given = [member.config.cluster.array_throttle for member in self.members]
        return min((number for number in given if number is not None), default=None)


def with_cluster(overrides: Sequence[str]) -> list[str]:
    """Return overrides with cluster=slurm before them where they choose no cluster."""
    if any(map(chooses_cluster, overrides)):
        return list(overrides)
    return ["cluster=slurm", *overrides]


def plan(
    overrides: Sequence[str],
    site: Site,
    command: Sequence[str],
    *,
    checks_memory: bool = True,
    follows: bool = False,
) -> Submission:
    """Return the submission of one run; `follows`: it begins after another one. Raises ConfigError with every
    problem found, also what the cluster cannot give, LaunchError where Slurm is silent.
    """
    alternatives = _alternatives(overrides)
    situation = Situation("submit", cluster=site, follows=follows, is_alone=True)
    problems: list[str] = []
    planned: list[PlannedMember] = []
    for number, words in enumerate(alternatives or [[]]):
        try:
            composed = compose([*overrides, *words], situation)
            composed = replace(composed, config=by_itself(composed.config))
            made = _planned_sweep([composed], overrides, site, command, checks_memory=checks_memory)
            planned += made.members
        except ConfigError as error:
            named = f"cluster.alternatives, number {number} ({' '.join(words)}): " if words else ""
            problems += [f"{named}{problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    kinds = tuple((member.config, member.share) for member in planned) if alternatives else ()
    member = replace(planned[0], overrides=tuple(overrides), alternatives=kinds)
    return Submission((member,), tuple(overrides), tuple(command), is_sweep=False)


def _alternatives(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides of each of cluster.alternatives: without them the configuration need not be one.

    Raises ConfigError for what is no list of changes.
    """
    config = typed(merge(check_overrides(overrides))[0])
    kinds = config.cluster.alternatives
    if len(kinds) == 1 or not all(isinstance(kind, dict) and kind for kind in kinds):
        raise ConfigError(
            f"cluster.alternatives={shown(kinds)}: give two kinds of nodes or more, each with what is "
            f"different on it, as in [{{constraint: h100}}, {{constraint: a100, nodes: 2}}]"
        )
    return [
        [f"{key if '.' in key else f'cluster.{key}'}={written(value)}" for key, value in kind.items()]
        for kind in kinds
    ]


def submission_of(request: RunRequest, share: Share) -> Submission:
    """Return the submission of one run that is checked and complete."""
    overrides = tuple(request.overrides)
    member = PlannedMember(0, request.signature, overrides, (), request.config, share)
    return Submission((member,), overrides, tuple(request.command), is_sweep=False)


def plan_sweep(
    members: Sequence[Composed],
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
    if any(member.config.cluster.alternatives for member in members):
        raise ConfigError(
            "cluster.alternatives are for single runs; submit a sweep's members to one kind of nodes"
        )
    return _planned_sweep(members, overrides, site, command, name=name, checks_memory=checks_memory)


def _planned_sweep(
    members: Sequence[Composed],
    overrides: Sequence[str],
    site: Site,
    command: Sequence[str],
    *,
    name: str | None = None,
    checks_memory: bool = True,
) -> Submission:
    site.require()
    members = [replace(member, config=_packed(member.config, site)) for member in members]
    submission = planned_members(members, overrides, command, site.share, name=name)
    group = members[0].config.run.group
    for sentence in loose_folders(parent_of_runs(members[0].config), group):
        note(sentence)
    for sentence in _unused_variables(members[0].config):
        note(sentence)
    problems = SweepProblems([member.chosen for member in members], [])
    for index, member in enumerate(submission.members if checks_memory else ()):
        if problem := _misfit(member.config, member.share, site):
            problems.add(index, [problem])
    if sentences := problems.sentences():
        raise ConfigError(sentences)
    return submission


def _unused_variables(config: Config) -> Iterator[str]:
    """Yield what sbatch would have taken from the shell's variables, and the configuration does not say."""
    cluster = config.cluster
    for variable, key in _VARIABLES_OF_SBATCH.items():
        value = os.environ.get(variable)
        name = key.rpartition(".")[2]
        is_said = name in cluster.slurm_extra or getattr(cluster, name, None) is not None
        if value and not is_said:
            yield f"{variable} is set and not used: a job depends on no shell; {key}={value} says it"


def fitted(config: Config, site: Site, *, checks_memory: bool = True) -> Config:
    """Return a changed configuration of a run that goes on at `site`, with a number in the place of
    cluster.members_per_node=auto, as a new one gets it. Raises ConfigError where memory does not suffice.
    """
    config = _packed(config, site)
    if checks_memory and (problem := _misfit(config, site.share_of_nodes(config), site)):
        raise ConfigError(problem)
    return config


def _misfit(config: Config, share: Share, site: Site) -> str | None:
    """Return why memory does not suffice, of the devices that the configuration or Slurm names."""
    on_one, config = members_on_one(config, share), site.with_gpu_type(config)
    problem = memory_problem(config, Situation("submit")) or crowd_problem(config, on_one)
    return problem or memory_problem(_at_first(config), Situation("submit"))


def _at_first(config: Config) -> Config:
    """Return the configuration on the fewest nodes that a job may begin with."""
    fewest = config.cluster.nodes if config.cluster.min_nodes is None else config.cluster.min_nodes
    return replace(config, cluster=replace(config.cluster, nodes=fewest))


def _packed(config: Config, site: Site) -> Config:
    """Return a member's configuration with a number in the place of cluster.members_per_node=auto.

    Raises ConfigError where the GPUs' memory is not known.
    """
    cluster = config.cluster
    if cluster.members_per_node != "auto":
        return config
    (gpus, cpus), ranks = site.gpus_and_cpus(config), int(cluster.gpus_per_node)
    prediction = _prediction(site.with_gpu_type(config), OWN)
    if prediction is None or gpus < ranks:
        raise ConfigError(
            "cluster.members_per_node=auto: the memory of the nodes' GPUs is not known; give a number, or "
            "say what they are with cluster.hardware"
        )
    is_shared = ranks == 1 and not has_open_micro_batch(config.train)
    on_one = max(1, _most_on_one(prediction)) if is_shared else 1
    members = max(1, min(gpus // ranks * on_one, cpus // ranks))
    return replace(config, cluster=replace(cluster, members_per_node=members))


def _most_on_one(prediction: Prediction) -> int:
    """Return how many processes fit on one GPU. Each has a CUDA context of its own: what one process leaves
    unused is taken for each.
    """
    memory = prediction.case.device.memory_bytes
    return int(memory // (prediction.peak.total + (1 - USABLE_SHARE) * memory))


def members_on_one(config: Config, share: Share) -> int:
    """Return how many members share a GPU, at most."""
    members, ranks = config.cluster.members_per_node, config.cluster.gpus_per_node
    if share.gpus is None or not isinstance(members, int) or not isinstance(ranks, int):
        return 1
    return math.ceil(members * ranks / share.gpus)


def crowd_problem(config: Config, on_one: int) -> str | None:
    """Return why `on_one` members do not fit on one GPU; None where they do, or nobody knows."""
    given = f"cluster.members_per_node={config.cluster.members_per_node}: {on_one} members share a GPU"
    if on_one > 1 and has_open_micro_batch(config.train):
        return f"{given}, and each would fill it with train.micro_batch_size=auto; give a number"
    prediction = _prediction(config, OWN) if on_one > 1 else None
    if prediction is None or (most := _most_on_one(prediction)) >= on_one:
        return None
    return (
        f"{given}, {prediction.peak.total / GIB:.1f} GiB each and what CUDA takes; at most {most} fit on the "
        f"{prediction.case.device.name}; --skip-memory-check submits it all the same"
    )


def planned_members(
    members: Sequence[Composed],
    overrides: Sequence[str],
    command: Sequence[str],
    share: Callable[[Config], Share] = lambda _: Share(),
    *,
    name: str | None = None,
) -> Submission:
    """Return the sweep of composed members; `share` is what a cluster adds to each, `name` is in the place
    of run.name. Raises ConfigError where its members disagree on their folder.
    """
    planned = []
    for index, member in enumerate(members):
        config = member.config
        if name is not None:
            config = replace(config, run=replace(config.run, name=name))
        # Measured figures of the network are no part of what was asked for: the signature is without them.
        complete = with_measured_network(config)
        texts = (member.overrides, member.chosen)
        planned.append(PlannedMember(index, signature(config), *texts, complete, share(config)))
    submission = Submission(tuple(planned), tuple(overrides), tuple(command))
    parent_of_sweep(submission.members)
    return submission


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
        raise ConfigError(name_taken(sweep))
    return sweep


def memory_problem(config: Config, situation: Situation) -> str | None:
    """Return why the devices' memory does not suffice, with the changes that would help; None where it does.

    Raises ConfigError where the configuration names a profile that cannot be read.
    """
    prediction = _prediction(config, OWN)
    if prediction is None or prediction.fits:
        return None
    device, peak = prediction.case.device, prediction.peak
    parts = asdict(peak)
    largest = sorted(parts, key=lambda name: -parts[name])[:_NUM_COMPONENTS]
    shares = ", ".join(f"{name} {parts[name] / GIB:.1f}" for name in largest)
    usable_gib = USABLE_SHARE * device.memory_bytes / GIB
    return (
        f"memory: a rank would need about {peak.total / GIB:.1f} GiB of the {device.name}'s "
        f"{device.memory_bytes / GIB:.1f} GiB, {usable_gib:.1f} usable ({shares}); "
        f"{_what_helps(config, situation, OWN)}; --skip-memory-check submits it all the same"
    )


def advice(config: Config, situation: Situation, framework_name: str) -> str | None:
    """Return what makes it fit by a framework's count: single changes, of each kind the smallest; else as few
    kinds as will do. Only what orchestra's trainer has; None where the device is no known GPU.
    """
    if _prediction(config, framework_name) is None:
        return None
    return _what_helps(config, situation, framework_name)


def _what_helps(config: Config, situation: Situation, framework_name: str) -> str:
    def judge(candidate: Config) -> MemoryNeed | None:
        if problems_of(candidate, situation):
            return None
        prediction = _prediction(candidate, framework_name)
        return None if prediction is None else MemoryNeed(prediction.peak.total, prediction.fits)

    num_ranks = config.cluster.nodes * int(config.cluster.gpus_per_node)
    remedies = what_helps(config, num_ranks, judge, BEFORE_SUBMIT)
    if not remedies:
        return "neither recomputation nor ZeRO nor tensor parallelism nor more nodes make it fit"
    choices = (f"{remedy.overrides} ({remedy.peak_bytes / GIB:.1f} GiB)" for remedy in remedies)
    return f"it would fit with {' or with '.join(choices)}"


def _prediction(config: Config, framework_name: str) -> Prediction | None:
    """Return the prediction; None where the device's figures are not known.

    Raises ConfigError where the configuration names a profile that cannot be read.
    """
    cluster = config.cluster
    profile = read_profile(Path(cluster.hardware)) if is_profile(cluster.hardware) else None
    is_open = cluster.hardware == "auto" or not isinstance(cluster.gpus_per_node, int)
    if cluster.device is not Device.cuda or is_open:
        return None
    if has_open_micro_batch(config.train):
        # The ranks will find the largest that fits: only a single sequence that does not is a problem.
        config = changed(config, {"train.micro_batch_size": 1})
    try:
        return predict(case_of(config, framework_name, profile))
    except ConfigError:
        # A device without figures is no reason to refuse a job.
        return None
