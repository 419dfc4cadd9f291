"""What a sweep varies: each override with the values it stands for, expanded by Hydra's own functions.

It composes nothing. The order is Hydra's: an override that comes again takes the place of the one before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Glob, Override, RangeSweep
from hydra.errors import HydraException

from orchestra.config.overrides import (
    SEARCH_PATH,
    Checked,
    Checker,
    chosen_twice,
    hydra_setting,
    parse_overrides,
    tree_of,
)
from orchestra.config.tree import GROUPS, Tree
from orchestra.errors import ConfigError

# Far more than anybody trains; a slip such as range(1e9) must not fill the memory first.
MOST_MEMBERS = 10_000


@dataclass(frozen=True)
class Choice:
    """One value of one override: its text, and what its check found."""

    text: str
    key: str
    is_swept: bool
    checked: Checked
    # The accepted text as Hydra's grammar reads it; empty for a refused one.
    accepted: tuple[Override, ...] = ()

    @property
    def is_of_group(self) -> bool:
        """Whether Hydra has to compose again for it."""
        return self.key in GROUPS or self.key == SEARCH_PATH

    @property
    def is_mapping(self) -> bool:
        """Whether it sets what stands in a mapping and leaves the rest of it."""
        return any(isinstance(override.value(), dict) for override in self.accepted)


@dataclass(frozen=True)
class Axis:
    """All values of one override; a single one where it is not swept."""

    choices: tuple[Choice, ...]


@dataclass
class Axes:
    """What the overrides of a sweep stand for, and sentences about those that cannot be read or used."""

    tree: Tree
    axes: list[Axis] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Reader:
    """Reads overrides into choices, remembering those it has read: members share most of theirs."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._checker = Checker(tree)
        self._known: dict[tuple[str, bool], Choice] = {}

    def choice(self, text: str, *, is_swept: bool) -> Choice:
        """Return one value of an override, checked as the override of a single run is."""
        known = self._known.get((text, is_swept))
        if known is None:
            known = self._known[text, is_swept] = self._read(text, is_swept)
        return known

    def _read(self, text: str, is_swept: bool) -> Choice:
        parsed = parse_overrides([text])
        if not parsed.overrides:
            checked = Checked(tree=self.tree, problems=parsed.problems, refused=parsed.refused)
            return Choice(text, next(iter(parsed.refused)), is_swept, checked)
        checked = self._checker.check(parsed.overrides)
        accepted = tuple(parse_overrides(checked.accepted).overrides)
        return Choice(text, parsed.overrides[0].key_or_group, is_swept, checked, accepted)


def read_axes(overrides: Sequence[str]) -> tuple[Reader, Axes]:
    """Expand the overrides of a sweep. Never raises for what a user wrote, but for too many members."""
    tree = tree_of(parse_overrides(overrides).overrides)
    parsed = parse_overrides(overrides, cast(ConfigLoader, _Presets(tree)))
    reader, found = Reader(tree), Axes(tree, problems=parsed.problems)
    groups: dict[str, Override] = {}
    by_key: dict[str, Axis] = {}
    for override in parsed.overrides:
        if override.key_or_group in GROUPS:
            first = groups.setdefault(override.key_or_group, override)
            found.problems += chosen_twice(first, override)
        if not override.is_sweep_override():
            axis = Axis((reader.choice(str(override.input_line), is_swept=False),))
        elif problem := _sweep_problem(override):
            found.problems.append(problem)
            continue
        else:
            axis = _swept(override, reader, found)
        # As a dictionary does: the place of the first, the value of the last.
        by_key[override.get_key_element()] = axis
    found.axes = list(by_key.values())
    _refuse_too_many(found.axes)
    return reader, found


class _Presets:
    """Answers what glob() asks Hydra's loader, from our tree and the user's own folders."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree

    def get_group_options(self, group_name: str, results_filter: Any = None) -> list[str]:
        del results_filter
        return self._tree.options(group_name)


def _sweep_problem(override: Override) -> str | None:
    """Return why an override cannot be swept; what is wrong with single values of it is found later."""
    key, text, value = override.key_or_group, override.input_line, override.value()
    if problem := common_key_problem(override):
        return problem
    if override.is_interval_sweep():
        return (
            f"{text}: no values to try one after the other; name a sweeper that chooses them "
            f"(hydra/sweeper=NAME), or give some: {key}=choice(…) or {key}=range(…)"
        )
    if isinstance(value, Glob) and key not in GROUPS:
        return f"{text}: glob() chooses among the presets of a group; give the values of {key} themselves"
    if isinstance(value, RangeSweep) and (problem := _range_problem(value)):
        return f"{text}: {problem}"
    return None


def common_key_problem(override: Override) -> str | None:
    """Return the sentence for a swept key that all members of a sweep, or of a sweeper, have in common."""
    key, text = override.key_or_group, str(override.input_line)
    if override.is_hydra_override():
        several = f"{text}: several values for a setting of Hydra's; give one"
        return several if key == SEARCH_PATH else hydra_setting(text)
    if key == "run" or key.startswith("run."):
        return (
            f"{text}: the members of a sweep share one name, folder and metric; give {key} once: "
            f"members are called NAME/000, NAME/001 and so on"
        )
    return None


def _range_problem(values: RangeSweep) -> str | None:
    start, stop, step = float(values.start or 0), float(values.stop or 0), float(values.step)
    if not step or not all(map(math.isfinite, (start, stop, step))):
        return "a range that never ends; give a step that is not 0"
    if (stop - start) / step > MOST_MEMBERS:
        return _too_many(int((stop - start) / step))
    return None


def _swept(override: Override, reader: Reader, found: Axes) -> Axis:
    """Expand one override by Hydra's own sweeper; nothing to choose from is a mistake here, not an end."""
    try:
        (batch,) = BasicSweeper.split_arguments([override], None)
    except (HydraException, ValueError, TypeError) as error:
        found.problems.append(f"{override.input_line}: cannot be expanded: {str(error).splitlines()[0]}")
        return Axis(())
    choices = tuple(reader.choice(text, is_swept=True) for (text,) in islice(batch, MOST_MEMBERS + 1))
    if not choices:
        names = ", ".join(reader.tree.options(override.key_or_group))
        there = f"; there are {names}" if override.key_or_group in GROUPS else ""
        found.problems.append(f"{override.input_line}: no value at all{there}")
    return Axis(choices)


def _refuse_too_many(axes: Sequence[Axis]) -> None:
    number = math.prod(len(axis.choices) for axis in axes)
    if number > MOST_MEMBERS:
        raise ConfigError(_too_many(number))


def _too_many(number: int) -> str:
    return f"{number:,} members in one sweep; use at most {MOST_MEMBERS:,}, and several sweeps for more"
