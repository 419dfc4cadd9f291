"""Composes the members of a sweep: every combination of its values, each checked like a run of its own.

Hydra composes once for each combination of presets; values are then set in what it composed. It submits
nothing, and it names no member's run.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from orchestra.config.compose import merge, put, settled, typed
from orchestra.config.overrides import combined, parse_overrides, tree_of
from orchestra.config.situation import Situation
from orchestra.config.sweep_axes import Choice, Reader, read_axes
from orchestra.config.sweep_problems import Findings, shared_places
from orchestra.errors import ConfigError


@dataclass(frozen=True)
class Member:
    """One combination of a sweep's values and the configuration it gives."""

    # All of them, as `orchestra run` would take them.
    overrides: tuple[str, ...]
    # Only those that were swept.
    chosen: tuple[str, ...]
    # Resolved and checked.
    config: Config


def compose_members(overrides: Sequence[str], situation: Situation) -> list[Member]:
    """Return the members of a sweep, in the order of Hydra's own sweeper; without a swept key, one.

    Each equals what `compose` makes of the member's overrides. Raises ConfigError with every problem found,
    each with the values it is about: what a single run is refused for, sweeps of `run.*`, intervals.
    """
    reader, found = read_axes(overrides)
    combinations = list(itertools.product(*(axis.choices for axis in found.axes)))
    return _composed(combinations, reader, situation, found.problems)


def compose_batch(batch: Sequence[Sequence[str]], swept: Iterable[str], situation: Situation) -> list[Member]:
    """Return a member for each list of overrides in `batch`; `swept` are the keys that vary, with their `+`.

    For sweepers that choose the values themselves. Raises ConfigError as `compose_members` does.
    """
    keys = frozenset(swept)
    texts = list(dict.fromkeys(text for overrides in batch for text in overrides))
    reader = Reader(tree_of(parse_overrides(texts).overrides))

    def choice(text: str) -> Choice:
        return reader.choice(text, is_swept=text.partition("=")[0] in keys)

    combinations = [tuple(choice(text) for text in overrides) for overrides in batch]
    return _composed(combinations, reader, situation, [])


def _composed(
    combinations: Sequence[tuple[Choice, ...]], reader: Reader, situation: Situation, problems: Sequence[str]
) -> list[Member]:
    composer = _Composer(reader, situation)
    findings = Findings([_chosen(combination) for combination in combinations], problems)
    members: list[Member] = []
    for index, combination in enumerate(combinations):
        config, broken = composer.compose(combination)
        findings.add(index, broken)
        if config is not None:
            members.append(Member(_texts(combination), findings.chosen[index], config))
    if len(members) == len(combinations):
        findings.about_all(shared_places([member.config for member in members]))
    if sentences := findings.sentences():
        raise ConfigError(sentences)
    return members


def _chosen(combination: Iterable[Choice]) -> tuple[str, ...]:
    return tuple(choice.text for choice in combination if choice.is_swept)


def _texts(combination: Iterable[Choice]) -> tuple[str, ...]:
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

    def compose(self, combination: Sequence[Choice]) -> tuple[Config | None, list[str]]:
        """Return a member's configuration and everything wrong with it."""
        checked = combined(self._reader.tree, (choice.checked for choice in combination))
        problems = list(checked.problems)
        try:
            values = self._values(combination)
            put(values, _setting(combination))
            config, broken = settled(typed(values), checked, self._situation)
        except ConfigError as error:
            return None, [*problems, *error.problems]
        return config, [*problems, *broken]

    def _values(self, combination: Sequence[Choice]) -> Any:
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

    def _of_presets(self, groups: Sequence[Choice]) -> Any:
        key = _texts(groups)
        if key not in self._composed:
            try:
                checked = combined(self._reader.tree, (choice.checked for choice in groups))
                self._composed[key] = merge(checked).values
            except ConfigError as error:
                self._composed[key] = error
        if isinstance(self._composed[key], ConfigError):
            raise self._composed[key]
        return self._composed[key]


def _setting(combination: Iterable[Choice]) -> Iterator[Any]:
    for choice in combination:
        if not choice.is_of_group:
            yield from choice.accepted
