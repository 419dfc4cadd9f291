"""All rules of a configuration in one list, and the check that reports every violation together.

A rule is a small function called rule_… in one of the modules here, which yields one sentence per violation:
found, expected, what to do. It guards itself against values that another rule refuses (a size of zero), so
that no rule hides another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

from conf.schema import Config
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
RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in _rules_of(module))


def problems_of(config: Config, situation: Situation) -> list[str]:
    """Return a sentence for every violation, in the order of the rules."""
    return [problem for rule in RULES for problem in rule(config, situation)]
