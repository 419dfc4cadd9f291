"""All rules of a configuration in one list, and the check that reports every violation together.

A rule is a small function called rule_… in one of the modules here, which yields one sentence per violation:
found, expected, what to do. It guards itself against values that another rule refuses (a size of zero), so
that no rule hides another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from types import ModuleType

from conf.schema import Config
from orchestra.config.keys import shown
from orchestra.config.machine import Situation
from orchestra.config.rules import (
    checkpoint_rules,
    eval_rules,
    mixture_rules,
    place_rules,
    plugin_rules,
    recovery_rules,
    shape_rules,
    value_rules,
)


@dataclass(frozen=True)
class NotYet:
    """A number or choice of the configuration, the largest that is built, and the feature's name."""

    key: str
    most: int
    feature: str


# Who builds a feature deletes its row. The planner knows all of it; `run` and `submit` refuse it at once.
TABLE: tuple[NotYet, ...] = ()


def not_yet(config: Config, situation: Situation) -> Iterator[str]:
    """Yield a sentence for each feature that is asked for and not built; nothing for the planner."""
    if situation.verb == "plan":
        return
    for row in TABLE:
        value = attrgetter(row.key)(config)
        if value > row.most:
            yield (
                f"{row.key}={shown(value)}: orchestra's trainer does not have {row.feature} yet; use "
                f"{row.key}={shown(row.most)}"
            )


Rule = Callable[[Config, Situation], Iterator[str]]


def _rules_of(module: ModuleType) -> list[Rule]:
    """Return a module's own functions called rule_…, in their order."""
    own = (value for value in vars(module).values() if getattr(value, "__module__", None) == module.__name__)
    return [function for function in own if function.__name__.startswith("rule_")]


_MODULES = (
    value_rules,
    shape_rules,
    mixture_rules,
    place_rules,
    eval_rules,
    checkpoint_rules,
    recovery_rules,
    plugin_rules,
)
RULES: tuple[Rule, ...] = (*(rule for module in _MODULES for rule in _rules_of(module)), not_yet)


def problems_of(config: Config, situation: Situation) -> list[str]:
    """Return a sentence for every violation, in the order of the rules."""
    return [problem for rule in RULES for problem in rule(config, situation)]
