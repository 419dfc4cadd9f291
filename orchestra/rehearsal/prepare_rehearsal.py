"""From a run's frozen configuration to those of its rehearsal: two short runs that differ in faults alone.

All that decides how a run comes back (cluster, launcher, layout, model, data, storage, limits) stays. Called
by `orchestra rehearse` before anything is frozen or started; `write_pair` and `read_pair` keep on disk which
two runs belong together.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import Config, Fault, LauncherName, Requeue, WandbMode, WhenBusy
from orchestra.config.compose import changed_config
from orchestra.config.machine import Situation
from orchestra.config.rules.all_rules import problems_of
from orchestra.config.rules.value_rules import LONGEST_RUN_NAME
from orchestra.errors import ConfigError
from orchestra.report.run_state import name_of
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir, is_sweep
from orchestra.run.planned_faults import PlannedFault

# One fault for each attempt, in the order of their steps: what one of them cost is seen before the next one
# comes. Between two of them lie three saves, of which the first is committed whatever the storage's pace, so
# that the policy finds progress and answers each as it would answer the only one.

# What ends an attempt. The others bend numbers or cost time: the run goes on, with another result.
ENDING = (
    *(Fault.sigkill, Fault.sigstop, Fault.exit, Fault.segfault, Fault.exception, Fault.oom),
    *(Fault.hang, Fault.gil, Fault.agent_kill, Fault.node_down),
)
# In the foreground the agent is the command itself, and this machine the only node.
_NEEDS_CLUSTER = (Fault.agent_kill, Fault.node_down)
# Steps between two saves where nobody says how long a rehearsal is to be.
EVERY_STEPS = 5
# Saves before the first fault, between two, and after the last one.
_BEFORE, _BETWEEN, _AFTER = 2, 3, 4


@dataclass(frozen=True)
class AskedFault:
    """A fault as it was asked for; what is None is chosen."""

    fault: Fault
    step: int | None = None
    rank: int | None = None


@dataclass(frozen=True)
class FaultSchedule:
    """A rehearsal's length, how often it saves, and its faults."""

    steps: int
    every_steps: int
    faults: tuple[PlannedFault, ...]


def asked_fault(text: str) -> AskedFault:
    """Return what KIND[@STEP[:RANK]] asks for. Raises ConfigError."""
    kind, has_step, place = text.partition("@")
    step, has_rank, rank = place.partition(":")
    names = [fault.name for fault in ENDING]
    if kind in Fault.__members__ and kind not in names:
        raise ConfigError(
            f"--fault {text}: {kind} ends no attempt, and the run's result would be another one; plan it "
            f"with recovery.inject, or use {', '.join(names[:-1])} or {names[-1]}"
        )
    if kind not in names:
        raise ConfigError(f"--fault {text}: no such fault; use {', '.join(names[:-1])} or {names[-1]}")
    if (has_step and not step.isdecimal()) or (has_rank and not rank.isdecimal()):
        raise ConfigError(f"--fault {text}: expected KIND@STEP or KIND@STEP:RANK, such as sigkill@30:1")
    return AskedFault(Fault[kind], int(step) if has_step else None, int(rank) if has_rank else None)


def usual_faults(config: Config) -> tuple[AskedFault, ...]:
    """Return what is rehearsed where nobody says what: whatever the layout allows."""
    kinds = [Fault.sigkill, Fault.hang]
    if config.cluster.launcher is LauncherName.slurm:
        kinds.append(Fault.agent_kill)
        if why_no_node_goes_down(config) is None:
            kinds.append(Fault.node_down)
    return tuple(AskedFault(kind) for kind in kinds)


def why_no_node_goes_down(config: Config) -> str | None:
    """Return why the loss of a node is not rehearsed; None where it can be."""
    cluster, least = config.cluster, config.recovery.min_nodes
    if cluster.launcher is not LauncherName.slurm:
        return "this machine is the only node"
    if cluster.nodes + cluster.spare_nodes < 2:
        return "the job has one node, and nobody would be left to tell"
    may_shrink = least is not None and least < cluster.nodes
    if not (cluster.spare_nodes or may_shrink or cluster.requeue is not Requeue.never):
        return "the run could not go on: no cluster.spare_nodes, no recovery.min_nodes, cluster.requeue=never"
    return None


def fault_schedule(asked: Sequence[AskedFault], config: Config, steps: int | None) -> FaultSchedule:
    """Return when and where each fault strikes; `steps`: the rehearsal's length, None: as long as it needs.

    `config` says the ranks per node. Raises ConfigError for what the layout or the length does not allow.
    """
    fewest = _BEFORE + _BETWEEN * (len(asked) - 1) + _AFTER
    if steps is not None and steps < fewest:
        raise ConfigError(
            f"--steps {steps}: {len(asked)} faults with checkpoints between them need at least {fewest} "
            f"steps; give more steps, or fewer faults with --fault"
        )
    every = EVERY_STEPS if steps is None else max(1, steps // fewest)
    at = [_step_of(index, every) if fault.step is None else fault.step for index, fault in enumerate(asked)]
    length = max(every * fewest, max(at, default=0) + every) if steps is None else steps
    _refuse_impossible(asked, config, length)
    in_order = sorted(zip(at, asked, strict=True), key=lambda each: each[0])
    return FaultSchedule(length, every, tuple(_placed(in_order, config)))


def entry(fault: PlannedFault) -> dict[str, Any]:
    """Return a fault as `recovery.inject` lists it."""
    return {
        "attempt": fault.attempt,
        "at_step": fault.at_step,
        "rank": fault.rank,
        "fault": fault.fault.name,
    }


def _step_of(index: int, every: int) -> int:
    """Return the step at which a fault strikes: in the midst between two saves."""
    return every * (_BEFORE + _BETWEEN * index) + (every + 1) // 2


def _refuse_impossible(asked: Sequence[AskedFault], config: Config, steps: int) -> None:
    ranks = config.cluster.nodes * int(config.cluster.gpus_per_node)
    problems = []
    for fault in asked:
        named = f"--fault {fault.fault.name}"
        if fault.fault in _NEEDS_CLUSTER and config.cluster.launcher is not LauncherName.slurm:
            problems.append(
                f"{named}: the run's agent is this very command here, and this machine its only node; "
                f"rehearse it on a cluster (cluster=slurm)"
            )
        if fault.step is not None and not 1 <= fault.step <= steps:
            problems.append(f"{named}@{fault.step}: the rehearsal has steps 1 to {steps}; see --steps")
        if fault.rank is not None and fault.rank >= ranks:
            problems.append(f"{named}@{fault.step}:{fault.rank}: the run has ranks 0 to {ranks - 1}")
    if problems:
        raise ConfigError(problems)


def _placed(in_order: Sequence[tuple[int, AskedFault]], config: Config) -> list[PlannedFault]:
    per_node = int(config.cluster.gpus_per_node)
    nodes = _nodes([asked for _, asked in in_order], config.cluster.nodes, per_node)
    planned = []
    for index, ((step, asked), node) in enumerate(zip(in_order, nodes, strict=True)):
        rank = node * per_node + index % per_node if asked.rank is None else asked.rank
        planned.append(PlannedFault(step, rank, attempt=index, fault=asked.fault))
    return planned


def _nodes(asked: Sequence[AskedFault], num_nodes: int, per_node: int) -> list[int]:
    """Return where each fault strikes: on another node each time, since a host that fails twice is left out.

    A node that goes down is not the first one: what runs a job's script there is killed too, and Slurm then
    ends the job, which it does not when that node loses power. So the last ones choose first.
    """
    asked_nodes = [None if fault.rank is None else fault.rank // per_node for fault in asked]
    nodes: list[int] = []
    for index in reversed(range(len(asked))):
        chosen = asked_nodes[index]
        if chosen is None:
            before = asked_nodes[index - 1] if index else None
            free = [(index + offset) % num_nodes for offset in range(num_nodes)]
            allowed = [node for node in free if asked[index].fault is not Fault.node_down or node] or free
            apart = [node for node in allowed if node not in (before, *nodes[-1:])]
            chosen = next(iter(apart or allowed))
        nodes.append(chosen)
    return nodes[::-1]


# What the names of the two runs end with.
_HALVES = ("undisturbed", "faults")
# What a rehearsal decides by itself, and what says it instead.
_OWN_KEYS = {
    "train.steps": "say --steps N",
    "recovery.inject": "say --fault KIND@STEP:RANK",
    "run.name": "the rehearsal's runs are named after RUN",
    "run.dir": "the rehearsal lies beside RUN",
    "data.ledger": "the ledger is what shows that each sample came once",
    "checkpoint.dir": "each of the rehearsal's runs gets a folder of its own beside the run's",
}


@dataclass(frozen=True)
class Rehearsal:
    """Two configurations, ready to be checked against a cluster and to be frozen."""

    of: str
    schedule: FaultSchedule
    undisturbed: Config
    with_faults: Config


def rehearsed_config(run: RunDir, overrides: Sequence[str], situation: Situation) -> Config:
    """Return a run's configuration as its rehearsal takes it, but for length, faults and names.

    Raises ConfigError with every problem found, and for keys that a rehearsal decides by itself.
    """
    taken = [f"{key}: {_OWN_KEYS[key]}" for key in map(_key, overrides) if key in _OWN_KEYS]
    if taken:
        raise ConfigError(taken)
    return changed_config(_quiet(read_config(run.config)), overrides, situation, fixed={})


def planned_rehearsal(
    run: RunDir, config: Config, asked: Sequence[AskedFault], steps: int | None, situation: Situation
) -> Rehearsal:
    """Return the rehearsal of `run` in `config`, whose ranks per node are a number. Raises ConfigError."""
    schedule = fault_schedule(asked or usual_faults(config), config, steps)
    parent = run.path.parent.parent if is_sweep(run.path.parent) else run.path.parent
    stem = _free_stem(parent, name_of(run).replace("/", "-"))
    undisturbed, with_faults = (
        _with_identity(_short(config, schedule), parent, f"{stem}-{half}") for half in _HALVES
    )
    faults = [entry(fault) for fault in schedule.faults]
    with_faults = dataclasses.replace(
        with_faults, recovery=dataclasses.replace(with_faults.recovery, inject=faults)
    )
    if problems := problems_of(with_faults, situation):
        raise ConfigError(problems)
    return Rehearsal(name_of(run), schedule, undisturbed, with_faults)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _quiet(frozen: Config) -> Config:
    """Return a configuration without what would disturb, repeatable bit for bit, and with a full record."""
    train = dataclasses.replace(
        frozen.train,
        log_every=1,
        deterministic=True,
        profile=dataclasses.replace(frozen.train.profile, enabled=False),
    )
    return dataclasses.replace(
        frozen,
        train=train,
        data=dataclasses.replace(frozen.data, ledger=True),
        # A fault finds the checkpoint before the last one committed, however slow the storage is.
        checkpoint=dataclasses.replace(frozen.checkpoint, when_busy=WhenBusy.wait),
        wandb=dataclasses.replace(frozen.wandb, mode=WandbMode.disabled),
        recovery=dataclasses.replace(frozen.recovery, inject=[]),
    )


def _short(config: Config, schedule: FaultSchedule) -> Config:
    warmup = config.optim.warmup_steps
    warmup = None if warmup is None else min(warmup, schedule.steps)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=schedule.steps, tokens=None),
        optim=dataclasses.replace(config.optim, warmup_steps=warmup),
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=schedule.every_steps, every_s=None),
    )


def _with_identity(config: Config, parent: Path, name: str) -> Config:
    place = config.checkpoint.dir
    place = None if place is None else f"{place.rstrip('/')}-{name}"
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, name=name, dir=str(parent)),
        checkpoint=dataclasses.replace(config.checkpoint, dir=place),
    )


def _free_stem(parent: Path, name: str) -> str:
    """Return what both names begin with: not with RUN's own name, which would be no unique start any more. Of
    a long one as much as a run's name may have.
    """
    for number in itertools.count(1):
        room = LONGEST_RUN_NAME - len(f"rehearsal--{number}-") - max(map(len, _HALVES))
        stem = f"rehearsal-{name[:room]}-{number}"
        if not any(os.path.lexists(parent / f"{stem}-{half}") for half in _HALVES):
            return stem
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class RehearsalPair:
    """A rehearsal's runs, and the name of the run that they are short copies of."""

    of: str
    undisturbed: RunDir
    with_faults: RunDir


def write_pair(pair: RehearsalPair) -> None:
    """Let the directory of the run with faults say what it is compared with. Raises OSError."""
    record = {"of": pair.of, "undisturbed": pair.undisturbed.name}
    pair.with_faults.rehearsal.write_text(json.dumps(record) + "\n")


def read_pair(run: RunDir) -> RehearsalPair | None:
    """Return the rehearsal in which `run` is the one with faults; None for any other run. Raises ConfigError
    where the record is damaged, or the undisturbed run was removed.
    """
    try:
        record = json.loads(run.rehearsal.read_text())
        pair = RehearsalPair(str(record["of"]), RunDir(run.path.parent / str(record["undisturbed"])), run)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{run.rehearsal}: cannot be read: {error}; rehearse again") from error
    if not pair.undisturbed.config.is_file():
        raise ConfigError(f"{run.name}: {pair.undisturbed.path} is gone, and nothing left to compare with")
    return pair
