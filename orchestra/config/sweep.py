"""Composes the members of a sweep: every combination of its values, each checked like a run of its own.

The overrides are expanded by Hydra's own functions, in Hydra's order: an override that comes twice takes the
place of the first. Hydra composes once for each combination of presets; values are then set in what it
composed. What is wrong is said once for all members that it concerns, with the values it is about.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, cast

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import ChoiceSweep, Glob, Override, RangeSweep, Sweep
from hydra.errors import HydraException

from conf.schema import Config
from orchestra.config.compose import Composed, merge, put, settled, typed, with_vocabulary
from orchestra.config.keys import shown
from orchestra.config.machine import Situation
from orchestra.config.overrides import (
    SEARCH_PATH,
    Checked,
    Checker,
    chosen_twice,
    combined,
    hydra_setting,
    parse_overrides,
    tree_of,
    values_as_typed,
)
from orchestra.config.preset_files import GROUPS, Tree
from orchestra.errors import ConfigError

# Far more than anybody trains; a slip such as range(1e9) must not fill the memory first.
MOST_MEMBERS = 10_000


@dataclass(frozen=True)
class OverrideValue:
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


# All values of one override; a single one where it is not swept.
Axis = tuple[OverrideValue, ...]


class Reader:
    """Reads overrides into choices, remembering those it has read: members share most of theirs."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._checker = Checker(tree)
        self._known: dict[tuple[str, bool], OverrideValue] = {}

    def choice(self, text: str, *, is_swept: bool) -> OverrideValue:
        """Return one value of an override, checked as the override of a single run is."""
        known = self._known.get((text, is_swept))
        if known is None:
            known = self._known[text, is_swept] = self._read(text, is_swept)
        return known

    def _read(self, text: str, is_swept: bool) -> OverrideValue:
        parsed = parse_overrides([text], tree=self.tree)
        if not parsed.overrides:
            checked = Checked(tree=self.tree, problems=parsed.problems, refused=parsed.refused)
            return OverrideValue(text, next(iter(parsed.refused)), is_swept, checked)
        checked = self._checker.check(parsed.overrides)
        accepted = tuple(parse_overrides(checked.accepted, tree=self.tree).overrides)
        return OverrideValue(text, parsed.overrides[0].key_or_group, is_swept, checked, accepted)


def read_axes(overrides: Sequence[str]) -> tuple[Reader, list[Axis], list[str]]:
    """Expand the overrides of a sweep: what read them, their axes, and what is wrong with them.

    Never raises for what a user wrote, but for too many members.
    """
    tree = tree_of(parse_overrides(overrides).overrides)
    parsed = parse_overrides(overrides, cast(ConfigLoader, _Presets(tree)))
    reader, problems = Reader(tree), parsed.problems
    groups: dict[str, Override] = {}
    # As a dictionary does: the place of the first, the value of the last.
    axes: dict[str, Axis] = {}
    for override in parsed.overrides:
        if override.key_or_group in GROUPS:
            first = groups.setdefault(override.key_or_group, override)
            problems += chosen_twice(first, override)
        if not override.is_sweep_override():
            axis: Axis = (reader.choice(str(override.input_line), is_swept=False),)
        elif problem := _sweep_problem(override):
            problems.append(problem)
            continue
        else:
            axis = _swept(override, reader, problems)
        axes[override.get_key_element()] = axis
    number = math.prod(map(len, axes.values()))
    if number > MOST_MEMBERS:
        raise ConfigError(_too_many(number))
    return reader, list(axes.values()), problems


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


# How a sweep runs, which no member is made another by.
_OF_THE_SWEEP = ("cluster.array_throttle", "cluster.members_at_once", "cluster.members_per_node")


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
    if key in _OF_THE_SWEEP:
        return f"{text}: it says how the sweep runs, and its members would be the same; give {key} once"
    return None


def _range_problem(values: RangeSweep) -> str | None:
    start, stop, step = float(values.start or 0), float(values.stop or 0), float(values.step)
    if not step or not all(map(math.isfinite, (start, stop, step))):
        return "a range that never ends; give a step that is not 0"
    if (stop - start) / step > MOST_MEMBERS:
        return _too_many(int((stop - start) / step))
    return None


def _swept(override: Override, reader: Reader, problems: list[str]) -> Axis:
    """Expand one override by Hydra's own sweeper; nothing to choose from is a mistake here, not an end."""
    if (texts := values_as_typed(override)) is not None:
        return tuple(reader.choice(text, is_swept=True) for text in texts)
    if _holds_a_sweep(override):
        problems.append(
            f"{override.input_line}: a range or a choice is all values of its key and stands alone; list the "
            f"values instead ({override.key_or_group}=1,2,7)"
        )
        return ()
    try:
        (batch,) = BasicSweeper.split_arguments([override], None)
    except (HydraException, ValueError, TypeError) as error:
        problems.append(f"{override.input_line}: cannot be expanded: {str(error).splitlines()[0]}")
        return ()
    axis = tuple(reader.choice(text, is_swept=True) for (text,) in islice(batch, MOST_MEMBERS + 1))
    if not axis:
        names = ", ".join(reader.tree.options(override.key_or_group))
        there = f"; there are {names}" if override.key_or_group in GROUPS else ""
        problems.append(f"{override.input_line}: no value at all{there}")
    return axis


def _holds_a_sweep(override: Override) -> bool:
    """Whether one of several values is a sweep itself: range(1,4),7."""
    values = override.value()
    return isinstance(values, ChoiceSweep) and any(isinstance(value, Sweep) for value in values.list)


def _too_many(number: int) -> str:
    return f"{number:,} members in one sweep; use at most {MOST_MEMBERS:,}, and several sweeps for more"


# A screen's worth of different sentences, and of members that one of them is about.
_MOST_SENTENCES = 12
_MOST_MEMBERS = 3
# What the members of a sweep have in common.
_COMMON = ("run.name", "run.dir", "run.group", "run.metric")


class SweepProblems:
    """Problems by the members that have them; `chosen` are the swept overrides of each member."""

    def __init__(self, chosen: Sequence[tuple[str, ...]], problems: Sequence[str]) -> None:
        self.chosen = chosen
        # Those of the sweep as a whole.
        self.of_all = list(problems)
        # Members by problem, both in the order they were found.
        self._members: dict[str, list[int]] = {}

    def add(self, member: int, problems: Sequence[str]) -> None:
        """Note what is wrong with a member."""
        for problem in dict.fromkeys(problems):
            self._members.setdefault(problem, []).append(member)

    def sentences(self) -> list[str]:
        """Return the problems for a person: a bounded number, each with the values it is about."""
        sentences = [*self.of_all, *(self._with_values(problem) for problem in self._members)]
        if len(sentences) <= _MOST_SENTENCES:
            return sentences
        more = len(sentences) - _MOST_SENTENCES
        return [*sentences[:_MOST_SENTENCES], f"and {more} more problem{'' if more == 1 else 's'}"]

    def _with_values(self, problem: str) -> str:
        members = self._members[problem]
        if len(members) == len(self.chosen):
            return problem
        common = [
            text for text in self.chosen[members[0]] if all(text in self.chosen[member] for member in members)
        ]
        # The values that decide, where every member with them has the problem.
        if common and sum(set(common) <= set(chosen) for chosen in self.chosen) == len(members):
            named = " ".join(common)
            is_named = re.search(rf"(?<![\w.]){re.escape(named)}(?![\w.])", problem)
            return problem if is_named else f"{problem} (with {named})"
        named = "; ".join(" ".join(self.chosen[member]) for member in members[:_MOST_MEMBERS])
        more = len(members) - _MOST_MEMBERS
        return f"{problem} (with {named}{f'; and {more} more' if more > 0 else ''})"


def shared_places(configs: Sequence[Config]) -> Iterator[str]:
    """Yield a sentence for what the members of a sweep must have in common and have not, and the reverse."""
    for name in _COMMON:
        values = list(dict.fromkeys(attrgetter(name)(config) for config in configs))
        if len(values) > 1:
            yield (
                f"{name} is not the same for all members ({shown(values[0])}, {shown(values[1])}); a "
                f"sweep has one; leave it out of the presets that are swept"
            )
    seen: set[str] = set()
    for place in (config.checkpoint.dir for config in configs):
        if place is not None and place in seen:
            yield (
                f"checkpoint.dir={place} would be the place of several members, and each needs its own; "
                f"leave it out (checkpoints then lie in each member's directory), or write a value that is "
                f"swept into it, as in 'checkpoint.dir={place}/${{train.seed}}'"
            )
            return
        seen.add(place or "")


def compose_members(overrides: Sequence[str], situation: Situation) -> list[Composed]:
    """Return the members of a sweep, in the order of Hydra's own sweeper; without a swept key, one.

    Each equals what `compose` makes of the member's overrides. Raises ConfigError with every problem found,
    each with the values it is about: what a single run is refused for, sweeps of `run.*`, intervals; then for
    members that are equal.
    """
    reader, axes, problems = read_axes(overrides)
    members = _composed(list(itertools.product(*axes)), reader, situation, problems)
    _refuse_equal(members)
    return members


def _refuse_equal(members: Sequence[Composed]) -> None:
    """Raise ConfigError where two members are equal, as with optim.lr=1e-3,0.001."""
    seen: dict[str, int] = {}
    problems = []
    for index, member in enumerate(members):
        first = seen.setdefault(repr(member.config), index)
        if first != index:
            one, other = " ".join(members[first].chosen), " ".join(member.chosen)
            problems.append(f"members {first:03d} ({one}) and {index:03d} ({other}) are equal")
    if problems:
        more = len(problems) - _MOST_SENTENCES
        told = [*problems[:_MOST_SENTENCES], *([f"and {more} more pairs"] if more > 0 else [])]
        raise ConfigError([*told[:-1], f"{told[-1]}; give each value once"])


def compose_batch(
    batch: Sequence[Sequence[str]], swept: Iterable[str], situation: Situation
) -> list[Composed]:
    """Return a member for each list of overrides in `batch`; `swept` are the keys that vary, with their `+`.

    For sweepers that choose the values themselves. Raises ConfigError as `compose_members` does.
    """
    keys = frozenset(swept)
    texts = list(dict.fromkeys(text for overrides in batch for text in overrides))
    reader = Reader(tree_of(parse_overrides(texts).overrides))

    def choice(text: str) -> OverrideValue:
        return reader.choice(text, is_swept=text.partition("=")[0] in keys)

    combinations = [tuple(choice(text) for text in overrides) for overrides in batch]
    return _composed(combinations, reader, situation, [])


def _composed(
    combinations: Sequence[tuple[OverrideValue, ...]],
    reader: Reader,
    situation: Situation,
    problems: Sequence[str],
) -> list[Composed]:
    composer = _Composer(reader, situation)
    problems_found = SweepProblems(
        [tuple(choice.text for choice in combination if choice.is_swept) for combination in combinations],
        problems,
    )
    members: list[Composed] = []
    for index, combination in enumerate(combinations):
        config, broken = composer.compose(combination)
        problems_found.add(index, broken)
        if config is not None:
            members.append(Composed(config, _texts(combination), problems_found.chosen[index]))
    if len(members) == len(combinations):
        problems_found.of_all += shared_places([member.config for member in members])
    if sentences := problems_found.sentences():
        raise ConfigError(sentences)
    return members


def _texts(combination: Iterable[OverrideValue]) -> tuple[str, ...]:
    return tuple(choice.text for choice in combination)


class _Composer:
    """Composes combinations one after the other, keeping what Hydra composed for each choice of presets."""

    def __init__(self, reader: Reader, situation: Situation) -> None:
        self._reader = reader
        self._situation = situation
        # By the overrides that choose presets: the values, or why there are none.
        self._composed: dict[tuple[str, ...], Any] = {}
        # By these and the keys that are set: values that every such member sets anew.
        self._set: dict[tuple[tuple[str, ...], tuple[str, ...]], Any] = {}

    def compose(self, combination: Sequence[OverrideValue]) -> tuple[Config | None, list[str]]:
        """Return a member's configuration and everything wrong with it."""
        checked = combined(self._reader.tree, (choice.checked for choice in combination))
        problems = list(checked.problems)
        try:
            values = self._values(combination)
            put(values, (one for choice in combination if not choice.is_of_group for one in choice.accepted))
            config = with_vocabulary(typed(values), checked.keys)
            config, broken = settled(config, checked, self._situation)
        except ConfigError as error:
            return None, [*problems, *error.problems]
        return config, [*problems, *broken]

    def _values(self, combination: Sequence[OverrideValue]) -> Any:
        """Return composed values to set others in: the same ones for members that set the same keys."""
        groups = [choice for choice in combination if choice.is_of_group]
        composed = self._of_presets(groups)
        # What one member sets the next one sets again, unless a choice was refused or is a part of a mapping.
        if any(not choice.accepted or (choice.is_swept and choice.is_mapping) for choice in combination):
            return copy.deepcopy(composed)
        key = (_texts(groups), tuple(choice.key for choice in combination if not choice.is_of_group))
        if key not in self._set:
            self._set[key] = copy.deepcopy(composed)
        return self._set[key]

    def _of_presets(self, groups: Sequence[OverrideValue]) -> Any:
        key = _texts(groups)
        if key not in self._composed:
            try:
                checked = combined(self._reader.tree, (choice.checked for choice in groups))
                self._composed[key] = merge(checked)[0]
            except ConfigError as error:
                self._composed[key] = error
        if isinstance(self._composed[key], ConfigError):
            raise self._composed[key]
        return self._composed[key]
