"""All rules of a configuration in one list, and the check that reports every violation together.

A rule is a small function that yields one sentence per violation: found, expected, what to do. It guards
itself against values that another rule refuses (a size of zero), so that no rule hides another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from conf.schema import Config
from orchestra.config.keys import shown
from orchestra.config.machine import Situation, this_machine
from orchestra.config.rules import (
    checkpoint_rules,
    place_rules,
    recovery_rules,
    shape_rules,
    slurm_rules,
    value_rules,
)
from orchestra.errors import ConfigError

# What the configuration can say and orchestra cannot do yet, in one table.
#
# Who builds a feature deletes its row. The planner knows all of it; `run` and `submit` refuse it at once.


@dataclass(frozen=True)
class NotYet:
    """A key, the values of it that are not built, the feature's name and what to use until it is."""

    key: str
    is_asked_for: Callable[[Any], bool]
    feature: str
    instead: str
    part: str = "trainer"


def _is_split(degree: Any) -> bool:
    return isinstance(degree, int) and degree > 1


def _is_mixture(num_experts: Any) -> bool:
    return isinstance(num_experts, int) and num_experts > 0


TABLE: tuple[NotYet, ...] = (
    NotYet("parallelism.pp", _is_split, "pipeline parallelism", "parallelism.pp=1"),
    NotYet("parallelism.cp", _is_split, "context parallelism", "parallelism.cp=1"),
    NotYet("model.num_experts", _is_mixture, "mixtures of experts", "model.num_experts=0"),
    NotYet("parallelism.ep", _is_split, "expert parallelism", "parallelism.ep=1"),
)


def not_yet(config: Config, situation: Situation) -> Iterator[str]:
    """Yield a sentence for each feature that is asked for and not built; nothing for the planner."""
    if situation.verb == "plan":
        return
    for row in TABLE:
        value = attrgetter(row.key)(config)
        if row.is_asked_for(value):
            found = f"{row.key}={shown(value)}"
            yield f"{found}: orchestra's {row.part} does not have {row.feature} yet; use {row.instead}"


Rule = Callable[[Config, Situation], Iterator[str]]

RULES: tuple[Rule, ...] = (
    *value_rules.RULES,
    *shape_rules.RULES,
    *place_rules.RULES,
    *slurm_rules.RULES,
    *checkpoint_rules.RULES,
    *recovery_rules.RULES,
    *recovery_rules.FAULT_RULES,
    not_yet,
)


def problems_of(config: Config, situation: Situation) -> list[str]:
    """Return a sentence for every violation, in the order of the rules."""
    return [problem for rule in RULES for problem in rule(config, situation)]


def check(config: Config, situation: Situation | None = None) -> None:
    """Check a configuration that did not come from `compose` (a frozen one, with changes, on resume).

    Raises ConfigError with every violation; without a situation, of `orchestra run` on this machine.
    """
    problems = problems_of(config, situation or this_machine())
    if problems:
        raise ConfigError(problems)
