"""Overrides on top of a frozen configuration, for a run that goes on: what may change and what may not.

The result passes every rule again, as a new run's does. It knows no checkpoint and no attempt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from conf.schema import Config
from orchestra.config.compose import (
    batch_said_twice,
    batch_size_last_said,
    is_about,
    merge,
    put,
    typed,
)
from orchestra.config.keys import shown
from orchestra.config.overrides import check_overrides
from orchestra.config.situation import Situation, resolved
from orchestra.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

    from orchestra.config.overrides import Checked

_MODEL = "the checkpoints hold this model and no other"
_ORDER = "which samples come next follows from it, and some would come twice or never"
_PLACE = "its records and checkpoints lie there"
# Keys that a run keeps for its whole life, and why.
FIXED = {
    **{f"model.{field.name}": _MODEL for field in dataclasses.fields(Config().model)},
    "train.seed": _ORDER,
    "train.seq_len": _ORDER,
    "data.source": _ORDER,
    "data.path": f"{_ORDER}; where the same files were moved, leave a link behind",
    "data.blend": _ORDER,
    "optim.state_dtype": "the checkpoints hold its moments in this type, and they are not converted",
    "run.name": _PLACE,
    "run.dir": _PLACE,
}


def changed_config(
    frozen: Config, overrides: Sequence[str], situation: Situation, fixed: Mapping[str, str] = FIXED
) -> Config:
    """Return a frozen configuration with overrides on top, resolved and checked for `situation`.

    GROUP=NAME replaces that whole section by the preset. `fixed`: keys that may not change, and why; none for
    a new run that is made after another one. Raises ConfigError with every problem found: unreadable and
    unknown overrides, wrong types, keys that are fixed for the run's life, broken rules.
    """
    from orchestra.config.rules import problems_of

    checked = check_overrides(overrides)
    problems = [*checked.problems, *_experiment_problems(checked)]
    config = None
    try:
        applied = _applied(frozen, checked)
        problems += batch_said_twice(applied, checked.keys)
        config = resolved(batch_size_last_said(applied, checked.keys), situation)
    except ConfigError as error:
        problems += error.problems
    if config is not None:
        problems += _fixed_problems(frozen, config, fixed)
        if not checked.lacks_preset:
            problems += [text for text in problems_of(config, situation) if not is_about(text, checked)]
    if problems or config is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config


def _experiment_problems(checked: Checked) -> Iterator[str]:
    if "experiment" in checked.presets:
        name = checked.presets["experiment"]
        yield f"experiment={name} describes a new run; change single keys of this one"


def _fixed_problems(before: Config, after: Config, fixed: Mapping[str, str]) -> Iterator[str]:
    for name, reason in fixed.items():
        old, new = attrgetter(name)(before), attrgetter(name)(after)
        if old != new:
            yield (
                f"{name}={_shown(new)}: the run has {name}={_shown(old)} and keeps it, since {reason}; "
                f"start a new run with `orchestra run` instead"
            )


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return shown([dataclasses.asdict(part) for part in value])
    return shown(dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value)  # type: ignore[arg-type]


def _applied(frozen: Config, checked: Checked) -> Config:
    """Put presets and values on top of the frozen values. Raises ConfigError for what does not fit a key."""
    from omegaconf import OmegaConf

    from orchestra.frozen import to_yaml, writable_schema

    node = cast("DictConfig", OmegaConf.merge(writable_schema(), OmegaConf.create(to_yaml(frozen))))
    node = _with_presets(node, checked)
    put(node, _values(checked))
    return typed(node)


def _with_presets(node: DictConfig, checked: Checked) -> DictConfig:
    if not checked.presets:
        return node
    groups = [text for text in checked.accepted if _name(text) in (*checked.presets, "hydra.searchpath")]
    composed = merge(check_overrides(groups)).values
    for group in checked.presets:
        if group != "experiment":
            node[group] = composed[group]
    return node


def _values(checked: Checked) -> Iterator[Override]:
    """Yield the parsed override of everything that sets a value, in the order given."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for text in checked.accepted:
        name = _name(text)
        if name not in checked.presets and name != "hydra.searchpath":
            yield OverridesParser.create().parse_override(text)


def _name(text: str) -> str:
    return text.partition("=")[0].lstrip("+~")
