"""All rules of a configuration in one list, and the check that reports every violation together.

A rule is a small function that yields one sentence per violation: found, expected, what to do. It guards
itself against values that another rule refuses (a size of zero), so that no rule hides another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conf.schema import Config
from orchestra.config import (
    rules_checkpoint,
    rules_faults,
    rules_place,
    rules_recovery,
    rules_shape,
    rules_slurm,
    rules_values,
)
from orchestra.config.not_yet import not_yet
from orchestra.config.situation import Situation, this_machine
from orchestra.errors import ConfigError

Rule = Callable[[Config, Situation], Iterator[str]]

RULES: tuple[Rule, ...] = (
    *rules_values.RULES,
    *rules_shape.RULES,
    *rules_place.RULES,
    *rules_slurm.RULES,
    *rules_checkpoint.RULES,
    *rules_recovery.RULES,
    *rules_faults.RULES,
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
