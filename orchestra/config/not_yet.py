"""What the configuration can say and orchestra cannot do yet, in one table.

Who builds a feature deletes its row. The planner knows all of it; `run` and `submit` refuse it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from conf.schema import Config
from orchestra.config.keys import shown
from orchestra.config.situation import Situation


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
