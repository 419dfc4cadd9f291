"""The schema's keys: which exist, what each accepts, which one a mistyped key meant. It changes no value."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any

from conf.schema import Config
from orchestra.config import other_tools

# Similarity below which a suggestion would rather mislead (difflib's ratio).
_LIKENESS = 0.6
_NUMBER_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_EXAMPLES = {int: "1", float: "0.1", bool: "true", str: "name"}


@dataclass(frozen=True)
class Key:
    """One key of the schema: its dotted name, type and default. A section's type is its dataclass."""

    name: str
    type: Any
    default: Any

    @property
    def is_section(self) -> bool:
        return dataclasses.is_dataclass(self.type)

    @property
    def takes_null(self) -> bool:
        """Whether null is a value of this key."""
        return type(None) in typing.get_args(self.type)

    @property
    def is_free(self) -> bool:
        """Whether anything may stand below this key (a dictionary)."""
        return typing.get_origin(_without_none(self.type)) is dict


@cache
def known_keys() -> dict[str, Key]:
    """Return every key of the schema by its dotted name, sections included."""
    return {key.name: key for key in _keys_of(Config, "", Config())}


def _keys_of(section: Any, prefix: str, defaults: Any) -> list[Key]:
    hints = typing.get_type_hints(section)
    keys: list[Key] = []
    for field in dataclasses.fields(section):
        name, default = prefix + field.name, getattr(defaults, field.name)
        keys.append(Key(name, hints[field.name], default))
        if dataclasses.is_dataclass(hints[field.name]):
            keys += _keys_of(hints[field.name], name + ".", default)
    return keys


def find_key(name: str) -> Key | None:
    """Return the key `name`, or the list or dictionary that `name` points into; None when there is none."""
    known = known_keys()
    if name in known:
        return known[name]
    parent, _, last = name.rpartition(".")
    above = find_key(parent) if parent else None
    if above is None or above.is_section:
        return None
    is_element = typing.get_origin(above.type) is list and last.isdecimal()
    return above if above.is_free or is_element else None


def unknown_key(name: str) -> str:
    """Return the sentence for a key that does not exist, with the nearest ones that do."""
    meant = nearest_keys(name)
    if meant:
        return f"{name}: no such key; did you mean {' or '.join(meant)}?"
    section = name.rpartition(".")[0]
    while section and not (section in known_keys() and known_keys()[section].is_section):
        section = section.rpartition(".")[0]
    return f"{name}: no such key; {section or 'a configuration'} has {', '.join(children(section))}"


def children(section: str) -> list[str]:
    """Return the names directly below a section; of the whole configuration for the empty name."""
    depth = section.count(".") + 1 if section else 0
    prefix = section + "." if section else ""
    return [
        name[len(prefix) :]
        for name in known_keys()
        if name.startswith(prefix) and name.count(".") == depth and name != section
    ]


def inside(section: Key) -> list[str]:
    """Return the full names of the keys directly below a section."""
    return [f"{section.name}.{child}" for child in children(section.name)]


def nearest_keys(name: str) -> list[str]:
    """Return up to two keys that `name` may have meant: the same last word elsewhere, what other trainers
    call so, else a similar one."""
    known = known_keys()
    # No key has capitals.
    name = name.lower()
    if name in known:
        return [name]
    leaves = [key for key in known if not known[key].is_section]
    last = name.rpartition(".")[2]
    same_word = [key for key in leaves if key.rpartition(".")[2] == last]
    similar = difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS)
    if same_word:
        return difflib.get_close_matches(name, same_word, n=2, cutoff=0.0)
    if (elsewhere := other_tools.key_of(name)) is not None:
        return [elsewhere]
    if similar and similar[0].rpartition(".")[0] == name.rpartition(".")[0]:
        return similar
    words: dict[str, list[str]] = {}
    for key in leaves:
        words.setdefault(key.rpartition(".")[2], []).append(key)
    near_words = difflib.get_close_matches(last, words, n=2, cutoff=_LIKENESS)
    return [words[word][0] for word in near_words] or similar


def nearest(word: str, options: list[str]) -> str | None:
    """Return the option most like `word`; None when none is like it."""
    as_written = difflib.get_close_matches(word, options, n=1, cutoff=_LIKENESS)
    in_small = difflib.get_close_matches(word.lower(), options, n=1, cutoff=_LIKENESS)
    return next(iter([*as_written, *in_small]), None)


def wrong_type(key: Key, name: str, value: Any) -> str:
    """Return the sentence for a value that `key` does not accept: found, expected, example."""
    found = f"{name}={shown(value)}"
    if key.is_section:
        return f"{found}: {key.name} is a section; set one of {', '.join(inside(key))}"
    hint = _without_none(key.type)
    if hint is int and isinstance(value, float) and value.is_integer():
        return f"{found}: expected a whole number without a point or exponent; write {int(value)}"
    if takes_texts(key) and isinstance(value, str):
        as_list = f"{key.name}={written([value])}"
        return f"{found}: found text, expected a list, each element text; write {as_list}"
    is_list = isinstance(value, list) and value and typing.get_origin(hint) is list
    what = f"a list that begins with {_kind(value[0])}" if is_list else _kind(value)
    return f"{found}: found {what}, {_expected(key)}"


def empty(key: Key, name: str) -> str:
    """Return the sentence for `name=` with nothing after it."""
    return f"{name} is empty; {_expected(key)}"


def takes_text(key: Key) -> bool:
    """Return whether `key` takes a text (or null), so that 1.10 is meant as it is typed."""
    return _without_none(key.type) is str


def takes_list(key: Key) -> bool:
    """Return whether `key` takes a list, of whatever."""
    return typing.get_origin(_without_none(key.type)) is list


def takes_texts(key: Key) -> bool:
    """Return whether `key` takes a list of texts."""
    return typing.get_origin(key.type) is list and typing.get_args(key.type) == (str,)


def element_problems(key: Key, name: str, elements: Any) -> Iterator[str]:
    """Yield a sentence for each unknown key inside the sections of a list (data.blend)."""
    inner = typing.get_args(key.type)[0] if typing.get_origin(key.type) is list else None
    if not dataclasses.is_dataclass(inner) or not isinstance(elements, list):
        return
    known = [field.name for field in dataclasses.fields(inner)]
    for index, element in enumerate(elements):
        for child in element if isinstance(element, dict) else ():
            if child not in known:
                meant = nearest(str(child), known)
                hint = f"did you mean {meant}?" if meant else f"an element has {', '.join(known)}"
                yield f"{name}[{index}].{child}: no such key; {hint}"


def misplaced_elements(config: Config) -> Iterator[str]:
    """Yield a sentence for each list or section in a list of plain values, which OmegaConf lets pass."""
    for key in known_keys().values():
        hint = _without_none(key.type)
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
        if inner not in _NUMBER_WORDS:
            continue
        for index, element in enumerate(attrgetter(key.name)(config) or ()):
            if isinstance(element, (list, tuple, dict)):
                quoted = "; in YAML a text with `: ` in it stands in quotes" if inner is str else ""
                found = f"{key.name}[{index}]={shown(element)}: found {_kind(element)}"
                yield f"{found}, expected {_accepted(inner)}{quoted}"


def _expected(key: Key) -> str:
    hint = _without_none(key.type)
    or_null = " or null" if hint is not key.type else ""
    return f"expected {_accepted(hint)}{or_null}, e.g. {_example(key, hint)}"


def _accepted(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    if hint in _NUMBER_WORDS:
        return _NUMBER_WORDS[hint]
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        if dataclasses.is_dataclass(inner):
            return f"a list of {{{', '.join(field.name for field in dataclasses.fields(inner))}}}"
        return "a list, each element " + _accepted(inner)
    if typing.get_origin(hint) is dict:
        return "names with values, {name: value}"
    return "true, false or auto" if bool in typing.get_args(hint) else "a whole number or auto"


def _example(key: Key, hint: Any) -> str:
    default = key.default
    if isinstance(default, (int, float, str, Enum)) or (isinstance(default, list) and default):
        return f"{key.name}={shown(default)}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"{key.name}={next(iter(hint)).name}"
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        if dataclasses.is_dataclass(inner):
            return f"{key.name}=[{{{dataclasses.fields(inner)[0].name}: …}}]"
        return f"{key.name}=[]"
    return f"{key.name}={'{}' if typing.get_origin(hint) is dict else _EXAMPLES.get(hint, '1')}"


def _without_none(hint: Any) -> Any:
    """Return `X` of `X | None`, and `X | Y` of `X | Y | None`; anything else as it is."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    inner = [part for part in typing.get_args(hint) if part is not type(None)]
    if len(inner) == len(typing.get_args(hint)):
        return hint
    return inner[0] if len(inner) == 1 else typing.Union[tuple(inner)]  # noqa: UP007


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    for kind, word in ((bool, "true or false"), (int, "a whole number"), (float, "a number"), (str, "text")):
        if isinstance(value, kind):
            return word
    return "a list" if isinstance(value, (list, tuple)) else "a section {…}"


def shown(value: Any) -> str:
    """Return a value as it would be written in an override."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(shown(element) for element in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{shown(element)}" for name, element in value.items()) + "}"
    return str(value)


# What Hydra's grammar takes for one text without quotes, alone and inside of a list or a section.
_PLAIN_TEXT = re.compile(r"[\w.+%@/-]+( [\w.+-]+)*", re.ASCII)

# What it reads as a number, a truth value or nothing.
_NO_TEXT = re.compile(r"true|false|null|[+-]?(inf|nan|[\d_]*\.?[\d_]*(e[+-]?\d+)?)", re.IGNORECASE)


def written(value: Any) -> str:
    """Return a value as Hydra reads it back: texts in quotes where they need them."""
    if isinstance(value, str) and (not _PLAIN_TEXT.fullmatch(value) or _NO_TEXT.fullmatch(value)):
        # Of backslashes Hydra reads those before a quote alone as an escape.
        escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), value)
        return f"'{escaped}'"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{written(element)}" for name, element in value.items()) + "}"
    return shown(value)
