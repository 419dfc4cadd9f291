"""From a layout that a search found to the overrides that say it and the command that submits it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from conf.schema import Config, LauncherName
from orchestra.config.keys import shown
from orchestra.config.not_yet import TABLE
from orchestra.plan.cases.case import Case
from orchestra.plan.layouts.space import KEYS, Fixed, choice_of

_WIDTH = 80


@dataclass(frozen=True)
class Asked:
    """What a search was asked for: the configuration and the overrides it was composed from, those that were
    typed, the sequences of a step, what stays as it is, what is wrong with its own layout, and notes.
    """

    config: Config
    overrides: tuple[str, ...]
    typed: tuple[str, ...]
    num_sequences: int
    fixed: Fixed
    broken: list[str]
    notes: list[str]


def runs_today(case: Case) -> bool:
    """Whether orchestra's trainer can run a layout: it uses nothing that `not_yet` lists."""
    values = {f"parallelism.{axis}": getattr(case.layout, axis) for axis in ("pp", "cp", "ep")}
    values["model.num_experts"] = case.model.num_experts
    return not any(row.is_asked_for(values[row.key]) for row in TABLE if row.key in values)


def overrides_of(asked: Asked, case: Case) -> list[str]:
    """Return the overrides that turn the configuration into a layout: those in which it differs."""
    config, choice = asked.config, choice_of(case)
    wanted: dict[str, Any] = {key: choice.value(knob) for knob, key in KEYS.items()}
    parallelism, train = config.parallelism, config.train
    if parallelism.dp not in ("auto", case.layout.dp):
        wanted["parallelism.dp"] = "auto"
    wanted["train.recompute_every"] = 1
    wanted["train.recompute_budget_gib"] = None
    if train.global_batch_tokens is None:
        wanted["train.global_batch_size"] = asked.num_sequences
    always = {KEYS["micro_batch_size"]}
    differing = {
        key: value for key, value in wanted.items() if key in always or attrgetter(key)(config) != value
    }
    return [f"{key}={shown(value)}" for key, value in differing.items()]


def command(asked: Asked, case: Case, verb: str | None = None) -> list[str]:
    """Return the command for a layout as lines for a shell, at most 80 columns wide where words allow.

    Without a verb it is the one that trains: `submit`, on this machine `run`.
    """
    trains = "run" if asked.config.cluster.launcher is LauncherName.local else "submit"
    verb = verb or trains
    ours = overrides_of(asked, case)
    replaced = {each.partition("=")[0] for each in ours}
    # What is trained on is up to whoever submits: planning alone needs none.
    typed = [each for each in asked.overrides if each in asked.typed or each != "data=stdlib"]
    kept = [each for each in typed if each.partition("=")[0].lstrip("+") not in replaced]
    return wrapped(["orchestra", verb, *map(shlex.quote, [*kept, *ours])])


def wrapped(words: list[str]) -> list[str]:
    """Break a command between words, each line but the last ending in a backslash."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > _WIDTH:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return lines
