"""From a run's frozen configuration to those of its rehearsal: two short runs that differ in faults alone.

All that decides how a run comes back (cluster, launcher, layout, model, data, storage, limits) stays. It
writes and starts nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config, WandbMode, WhenBusy
from orchestra.config.change import changed_config
from orchestra.config.rules import problems_of
from orchestra.config.situation import Situation
from orchestra.errors import ConfigError
from orchestra.frozen import read_config
from orchestra.rehearsal.faults import Schedule, Wish, entry, schedule, usual_wishes
from orchestra.report.state import name_of
from orchestra.rundir import RunDir
from orchestra.sweepdir import is_sweep

UNDISTURBED, HURT = "undisturbed", "faults"
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
    schedule: Schedule
    undisturbed: Config
    hurt: Config


def rehearsed_config(run: RunDir, overrides: Sequence[str], situation: Situation) -> Config:
    """Return a run's configuration as its rehearsal takes it, but for length, faults and names.

    Raises ConfigError with every problem found, and for keys that a rehearsal decides by itself.
    """
    taken = [f"{key}: {_OWN_KEYS[key]}" for key in map(_key, overrides) if key in _OWN_KEYS]
    if taken:
        raise ConfigError(taken)
    return changed_config(_quiet(read_config(run.config)), overrides, situation, fixed={})


def planned_rehearsal(
    run: RunDir, config: Config, wishes: Sequence[Wish], steps: int | None, situation: Situation
) -> Rehearsal:
    """Return the rehearsal of `run` in `config`, whose ranks per node are a number. Raises ConfigError."""
    course = schedule(wishes or usual_wishes(config), config, steps)
    parent = run.path.parent.parent if is_sweep(run.path.parent) else run.path.parent
    stem = _free_stem(parent, name_of(run).replace("/", "-"))
    pair = [_with_identity(_short(config, course), parent, f"{stem}-{name}") for name in (UNDISTURBED, HURT)]
    faults = [entry(fault) for fault in course.faults]
    hurt = dataclasses.replace(pair[1], recovery=dataclasses.replace(pair[1].recovery, inject=faults))
    if problems := problems_of(hurt, situation):
        raise ConfigError(problems)
    return Rehearsal(name_of(run), course, pair[0], hurt)


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


def _short(config: Config, course: Schedule) -> Config:
    warmup = config.optim.warmup_steps
    warmup = None if warmup is None else min(warmup, course.steps)
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=course.steps),
        optim=dataclasses.replace(config.optim, warmup_steps=warmup),
        checkpoint=dataclasses.replace(config.checkpoint, every_steps=course.every_steps),
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
    """Return what both names begin with: not with RUN's own name, which would be no unique start any more."""
    for number in itertools.count(1):
        stem = f"rehearsal-{name}-{number}"
        if not any(os.path.lexists(parent / f"{stem}-{it}") for it in (UNDISTURBED, HURT)):
            return stem
    raise AssertionError("unreachable")
