"""Checks overrides one by one, so that all their problems are reported and not only the first.

Hydra stops at the first override it cannot use. Here each is parsed with Hydra's own grammar and tried on the
schema; those that are fine are handed on. It composes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException

from orchestra.config.keys import (
    Key,
    empty,
    find_key,
    inside,
    nearest,
    shown,
    takes_list,
    takes_text,
    takes_texts,
    unknown_key,
)
from orchestra.config.numbers import binary_instead, plain_list, plain_number
from orchestra.config.preset_files import GROUPS, Scratch, Tree, own_folder
from orchestra.config.rules.value_rules import run_name_problems

SEARCH_PATH = "hydra.searchpath"
# As many nodes as are free, between two numbers.
_NODE_RANGE = re.compile(r"cluster\.nodes=(?P<least>\d+)\.\.(?P<most>\d+)")
# A number or a truth value as Hydra reads it: no quotes, no brackets, no function call.
_PLAIN = re.compile(r"[A-Za-z0-9_.+-]+")
# What Hydra's parser says of a text that it cannot read.
_GRAMMAR = re.compile(r"(?:[a-z ]+ input|token recognition error at:) '(?P<where>.+?)'(?: expecting .*)?")
# What stands in quotes, or else a path in somebody's home, which is no word of Hydra's grammar: a value, or
# an element of a list or section.
_HOME = re.compile(
    r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|(?P<home>(?<=[=\[,:\s])~[^\s,:'"\[\]{}()]*(?=$|[\s,\]}]))"""
)
# Groups that can be left out, and what then stands in their place: whoever deletes the watcher wants none.
_LEFT_OUT = {
    **dict.fromkeys(("~wandb", "wandb=null", "wandb=none", "wandb=off", "wandb=false"), "wandb=disabled"),
    "experiment=null": "~experiment",
}
# What presets are called elsewhere.
_PRESETS_ELSEWHERE = {
    "parallelism": {**dict.fromkeys(("fsdp", "fsdp2", "full_shard"), "zero3"), "none": "ddp", "dp": "ddp"},
    "optim": {"sgd": "adamw optim.target=torch.optim:SGD"},
}


@dataclass
class Checked:
    """What the check found: overrides that Hydra will accept, and sentences about the others."""

    tree: Tree
    accepted: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    # The preset chosen for each group.
    presets: dict[str, str] = field(default_factory=dict)
    # Keys that were given a value, for rules about what was said explicitly.
    keys: set[str] = field(default_factory=set)
    # Whether a preset is missing: the values of its group are then not what was meant.
    lacks_preset: bool = False
    # Keys whose value was refused: what a rule says about their default is not what was meant.
    refused: set[str] = field(default_factory=set)
    # By key the binary number (4Mi) beside a decimal one that was written (4M).
    binary: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Parsed:
    """Overrides as Hydra's grammar reads them, and what it could not read."""

    overrides: list[Override]
    problems: list[str]
    # Keys of the unreadable ones.
    refused: set[str]


def parse_overrides(
    overrides: Sequence[str], loader: ConfigLoader | None = None, tree: Tree | None = None
) -> Parsed:
    """Parse each override on its own; never raises for what a user wrote.

    `loader` is asked for the presets that glob() matches. `tree`: where presets lie; None: as the overrides
    themselves say.
    """
    parsed = Parsed([], [], set())
    parser = OverridesParser.create()
    for text in _with_ranges(overrides):
        try:
            override = parser.parse_override(_with_homes(text))
            override.config_loader = loader
            parsed.overrides.append(override)
        except (HydraException, ValueError, RecursionError) as error:
            parsed.problems.append(_unreadable(text, error))
            parsed.refused.add(_split(text)[0])
    places = tree_of(parsed.overrides) if tree is None else tree
    parsed.overrides[:] = [_or_in_its_place(override, places) for override in parsed.overrides]
    return parsed


def _or_in_its_place(override: Override, tree: Tree) -> Override:
    """Return an override, or what stands in the place of a group that it leaves out; a preset that is called
    so (wandb/off.yaml) leaves nothing out.
    """
    text = str(override.input_line).strip()
    instead = _LEFT_OUT.get(text)
    if instead is None or (override.value() is not None and tree.file(text.replace("=", "/")) is not None):
        return override
    return OverridesParser.create().parse_override(instead)


def _with_homes(text: str) -> str:
    """Return an override with ~/folder in quotes: a shell leaves it where a point stands before the =."""
    return _HOME.sub(lambda match: f"'{match[0]}'" if match["home"] else match[0], text)


def _with_ranges(overrides: Sequence[str]) -> Iterator[str]:
    """Yield the overrides, cluster.nodes=4..8 as what it stands for."""
    for text in overrides:
        match = _NODE_RANGE.fullmatch(text.strip())
        if match is None or int(match["least"]) > int(match["most"]):
            yield text
            continue
        least, most = match["least"], match["most"]
        yield from (f"cluster.nodes={most}", f"cluster.min_nodes={least}")
        if not any(_split(other)[0] == "recovery.min_nodes" for other in overrides):
            yield f"recovery.min_nodes={least}"


def check_overrides(overrides: Sequence[str]) -> Checked:
    """Parse and try each override on its own; never raises for what a user wrote."""
    parsed = parse_overrides(overrides)
    checked = Checker(tree_of(parsed.overrides)).check(parsed.overrides)
    checked.problems[:0] = parsed.problems
    checked.refused |= parsed.refused
    return checked


class Checker:
    """Tries overrides on one tree and one copy of the schema, which is worth keeping: it takes 20 ms."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self._scratch = Scratch()

    def check(self, overrides: Sequence[Override]) -> Checked:
        """Try overrides, each for one run."""
        checked = Checked(tree=self.tree)
        chosen: dict[str, Override] = {}
        for override in overrides:
            if override.key_or_group in GROUPS:
                problems = list(_group_problems(override, self.tree))
                problems += chosen_twice(chosen.setdefault(override.key_or_group, override), override)
                checked.lacks_preset |= bool(problems)
                _sort_in(checked, override, problems)
                if not problems and not override.is_delete():
                    checked.presets[override.key_or_group] = _preset(override)
            else:
                _sort_in(checked, override, list(_value_problems(override, self._scratch)))
        return checked


def combined(tree: Tree, parts: Iterable[Checked]) -> Checked:
    """Return what the check of all `parts` together would have found, but for groups chosen twice."""
    whole = Checked(tree=tree)
    for part in parts:
        whole.accepted += part.accepted
        whole.problems += part.problems
        whole.presets |= part.presets
        whole.keys |= part.keys
        whole.lacks_preset |= part.lacks_preset
        whole.refused |= part.refused
        whole.binary |= part.binary
    return whole


def _sort_in(checked: Checked, override: Override, problems: list[str]) -> None:
    checked.problems += problems
    if problems:
        checked.refused.add(override.key_or_group)
    else:
        checked.keys.add(override.key_or_group)
        checked.accepted.append(accepted_text(override))
        if _plain(override) is not None and (binary := binary_instead(_raw(override))) is not None:
            checked.binary[override.key_or_group] = binary


def accepted_text(override: Override) -> str:
    """Return the text for Hydra: what stands below a dictionary needs Hydra's `++` to be new there."""
    text = str(override.input_line)
    if override.key_or_group == SEARCH_PATH:
        escaped = (str(folder).replace("'", "\\'") for folder in _folders(override))
        urls = ",".join(f"'file://{folder}'" for folder in escaped)
        return f"{SEARCH_PATH}=[{urls}]"
    key = find_key(override.key_or_group)
    is_new_below = key is not None and key.is_free and not override.is_delete()
    return "++" + text.lstrip("+") if is_new_below else _as_typed(override, key)


def _as_typed(override: Override, key: Key | None) -> str:
    """Return the override, quoted where a text is expected but Hydra reads a number: 1e5 stays 1e5."""
    text, raw = str(override.input_line), _raw(override)
    if override.is_delete() or override.is_sweep_override():
        return text
    value, before = override.value(), text.partition("=")[0]
    if isinstance(plain := _plain(override), list):
        # Texts in quotes keep them.
        return f"{before}={replace(override, _value=plain).get_value_element_as_str()}"
    if plain is not None:
        return f"{before}={plain}"
    if _is_number(value) and _PLAIN.fullmatch(raw):
        is_text = override.key_or_group in GROUPS or (key is not None and takes_text(key))
        return f"{before}='{raw}'" if is_text else text
    if key is not None and takes_texts(key) and isinstance(value, list) and raw.startswith("["):
        elements = [element.strip() for element in raw[1:-1].split(",")]
        if any(map(_is_number, value)) and all(map(_PLAIN.fullmatch, elements)):
            pairs = zip(value, elements, strict=True)
            quoted = (f"'{typed}'" if _is_number(element) else typed for element, typed in pairs)
            return f"{before}=[{','.join(quoted)}]"
    return text


def _plain(override: Override) -> Any:
    """Return a number that is written with a unit or an exponent, or a list with such ones; None for other
    values.
    """
    key = find_key(override.key_or_group)
    if key is None or override.is_delete() or override.is_sweep_override():
        return None
    if (number := plain_number(key, _raw(override))) is not None:
        return number
    # As it was parsed: it still tells which texts are in quotes.
    return plain_list(key, override._value)


def values_as_typed(override: Override) -> list[str] | None:
    """Return the overrides of a choice whose key takes texts, with those that look like a number as they were
    typed: 1.10 of 1.10,1.20 and 1e5. None for other choices, which Hydra expands.
    """
    key, values = find_key(override.key_or_group), override.value()
    takes_any = override.key_or_group in GROUPS or (key is not None and takes_text(key))
    if not takes_any or not isinstance(values, ChoiceSweep) or values.shuffle or values.tags:
        return None
    raw = re.sub(r"^choice\((.*)\)$", r"\1", _raw(override))
    elements = [element.strip() for element in raw.split(",")]
    is_plain = all(map(_PLAIN.fullmatch, elements)) and len(elements) == len(values.list)
    if not is_plain or not any(map(_is_number, values.list)):
        return None
    return [f"{str(override.input_line).partition('=')[0]}={element}" for element in elements]


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float))


def _split(text: str) -> tuple[str, str]:
    """Return key and value of an override as they were typed."""
    name, _, raw = text.partition("=")
    return name.strip().lstrip("+~"), raw.strip()


def _raw(override: Override) -> str:
    return _split(str(override.input_line))[1]


def _preset(override: Override) -> str:
    """Return the name of the chosen preset; one that looks like a number as it was typed."""
    value = override.value()
    return _raw(override) if _is_number(value) else shown(value)


def _unreadable(text: str, error: Exception) -> str:
    if text.startswith("-"):
        return f"{text}: not an option; overrides are written key=value"
    if "=" not in text:
        return f"{text}: not an override; write key=value, without spaces around ="
    name, raw = _split(text)
    if name == "run.name" and (problem := next(run_name_problems(raw), None)):
        return problem
    reason = _reason(raw, error)
    return f"{text}: cannot be read ({reason}); put values with special characters in quotes: 'key=\"value\"'"


def _reason(raw: str, error: Exception) -> str:
    """Return why Hydra's grammar could not read a value, without the tokens that its parser lists."""
    said = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    match = _GRAMMAR.match(said)
    if match is None:
        return said
    opened, closed = (sum(map(raw.count, brackets)) for brackets in ("([{", ")]}"))
    if raw.startswith("("):
        return "a list is written [a,b]"
    if opened != closed:
        return "a bracket is not closed" if opened > closed else "a bracket is closed that was not opened"
    where = match["where"]
    if where[0] in "\"'":
        return "a quote is not closed"
    return "something is missing at its end" if where == "<EOF>" else f"{where!r} cannot stand there"


def _sweep(override: Override) -> str:
    name = override.key_or_group
    key = find_key(name)
    other = ""
    if key is not None and takes_list(key):
        other = f" (a list is written {name}=[…])"
    elif key is not None and (takes_text(key) or key.is_free):
        other = f""" (one with commas in it is written "{name}='a,b'")"""
    return (
        f"{override.input_line}: several values for one run; give one value{other}; `orchestra run -m` "
        "trains and `orchestra submit -m` submits a run for each of them"
    )


def _group_problems(override: Override, tree: Tree) -> Iterator[str]:
    group, options = override.key_or_group, tree.options(override.key_or_group)
    if override.is_sweep_override():
        yield _sweep(override)
        return
    value = override.value()
    if override.package is not None:
        yield f"{override.input_line}: groups always go to their own section; write {group}={shown(value)}"
    elif override.is_add() or override.is_force_add():
        yield f"{override.input_line}: {group} has its place already; write {group}={shown(value)}"
    elif override.is_delete() or value is None:
        if group != "experiment":
            yield (
                f"{override.input_line}: a section cannot be left out; take a preset of it "
                f"({', '.join(f'{group}={option}' for option in options)}), or set its keys"
            )
    elif isinstance(value, (dict, list)):
        yield (
            f"{override.input_line}: {group} takes the name of a preset ({', '.join(options)}); "
            f"set single values with {group}.key=value"
        )
    elif value == "":
        yield f"{group} is empty; there are {', '.join(options)}"
    elif _preset(override) not in options:
        elsewhere = _PRESETS_ELSEWHERE.get(group, {}).get(_preset(override).lower())
        meant = elsewhere or nearest(_preset(override), options)
        hint = f"did you mean {group}={meant}? There are" if meant else "there are"
        yield f"{group}={_preset(override)}: no such preset; {hint} {', '.join(options)}"
    elif (hidden := tree.hidden_by_ours(f"{group}/{_preset(override)}")) is not None:
        yield (
            f"{group}={_preset(override)}: orchestra has a preset of this name, which is found first, and "
            f"{hidden} would not be read; give that file another name"
        )


def chosen_twice(first: Override, override: Override) -> list[str]:
    """Return the sentence for a group that `first` chose before; nothing where they are the same."""
    if first is override:
        return []
    return [f"{override.input_line}: {override.key_or_group} is chosen twice, before as {first.input_line}"]


def _value_problems(override: Override, scratch: Scratch) -> Iterator[str]:
    name, text = override.key_or_group, override.input_line
    if not name:
        yield _unreadable(str(text), ValueError("no key"))
    elif name == SEARCH_PATH:
        yield from _search_path_problems(override)
    elif name.startswith(("hydra.", "hydra/")) or name == "hydra":
        yield hydra_setting(str(text))
    elif "/" in name or override.package is not None:
        yield f"{text}: no such group; the groups are {', '.join(GROUPS)}"
    elif override.is_sweep_override() and find_key(name) is not None:
        yield _sweep(override)
    elif override.is_delete():
        yield from _delete_problems(name, find_key(name))
    elif override.is_add() and (key := find_key(name)) is not None and not key.is_free:
        yield f"{text}: {name} exists already; write {str(text).lstrip('+')}"
    elif (key := find_key(name)) is None:
        yield unknown_key(name)
    elif not _raw(override) and not key.is_free and not takes_text(key):
        yield empty(key, name)
    elif (match := _NODE_RANGE.fullmatch(str(text))) is not None:
        yield f"{text}: the range ends below its begin; use {name}={match['most']}..{match['least']}"
    else:
        plain = _plain(override)
        meant = override if plain is None else replace(override, _value=plain)
        yield from scratch.problems(name, meant.value())


def hydra_setting(text: str) -> str:
    """Return the sentence for a setting of Hydra's own that nothing here reads."""
    if text.lstrip("+~").startswith(("hydra/sweeper", "hydra.sweeper")):
        return f"{text}: a sweeper needs several runs; use `orchestra submit -m hydra/sweeper=NAME`"
    return f"{text}: Hydra's own settings have no effect here, except {SEARCH_PATH}=[folder]"


def _delete_problems(name: str, key: Key | None) -> Iterator[str]:
    if key is None:
        yield unknown_key(name)
    elif key.is_section:
        yield f"~{name}: a section cannot be left out; set one of {', '.join(inside(key))}"
    elif not key.is_free or key.name == name:
        yield f"~{name}: a key cannot be deleted; give it another value, such as {name}={shown(key.default)}"


def _search_path_problems(override: Override) -> Iterator[str]:
    if override.is_delete() or override.value() is None:
        yield f"{override.input_line}: give folders with YAML groups inside, or leave it out"
        return
    for folder in _folders(override):
        if not os.path.isdir(folder):  # noqa: PTH112  false of a name that is too long, too
            yield f"{override.input_line}: {folder} is not a folder; give folders with YAML groups inside"
        elif not os.access(folder, os.R_OK | os.X_OK):
            yield f"{override.input_line}: {folder} cannot be read: Permission denied; leave it out"


def tree_of(parsed: Sequence[Override]) -> Tree:
    """Return the folders that overrides choose from: our own, then those of the last hydra.searchpath."""
    paths = [override for override in parsed if override.key_or_group == SEARCH_PATH]
    return Tree((own_folder(), *(_folders(paths[-1]) if paths else ())))


def searched_folders(text: str) -> list[Path] | None:
    """Return the folders that an override of hydra.searchpath names; None where it cannot be read."""
    parsed = parse_overrides([text]).overrides
    is_readable = bool(parsed) and not parsed[0].is_sweep_override() and parsed[0].value() is not None
    return _folders(parsed[0]) if is_readable else None


def _folders(override: Override) -> list[Path]:
    value = None if override.is_sweep_override() or override.is_delete() else override.value()
    names = value if isinstance(value, list) else [value]
    return [Path(str(name).removeprefix("file://")).expanduser().absolute() for name in names]
