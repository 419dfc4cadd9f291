"""Numbers as people write them (1e6, 8k, 4Mi, 90s, 1h30m), and the plain ones that they mean.

k, M, B and T (also K, G) are decimal, Ki, Mi, Gi and Ti binary. Times are in the unit of their key: seconds
where it ends in _s, hours where it ends in _hours. Whoever checks an override or a preset asks.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from fractions import Fraction

from orchestra.config.keys import Key
from orchestra.sizes.units import duration_s

_SCALES = {
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "B": 10**9,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
# Two digits of exponent are more than any key takes, and few enough to be computed.
_NUMBER = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,2})?)([A-Za-z]*)")
_UNITS_S = {"_s": 1, "_hours": 3600}


def plain_number(key: Key, written: str) -> int | float | None:
    """Return the number that `written` means as the value of `key`.

    None where it is no number with a unit or an exponent that the key takes, or needs no translation.
    """
    kinds = typing.get_args(key.type) or (key.type,)
    if bool in kinds or not {int, float} & {*kinds}:
        return None
    value = _value(key, written)
    if value is None:
        return None
    if int in kinds:
        is_plain = re.fullmatch(r"[+-]?\d+", written)
        return int(value) if value.denominator == 1 and not is_plain else None
    return float(value) if written[-1:].isalpha() else None


def plain_list(key: Key, value: object) -> list[object] | None:
    """Return a list with the numbers that its elements mean, those of sections by the type of their key.

    None where `value` is no list that `key` takes, or needs no translation.
    """
    kinds = typing.get_args(key.type) if typing.get_origin(key.type) is types.UnionType else (key.type,)
    inner = next((typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is list), None)
    if inner is None or not isinstance(value, list):
        return None
    hints = typing.get_type_hints(inner) if dataclasses.is_dataclass(inner) else {}
    plain = [_plain_element(key, inner, hints, element) for element in value]
    return None if all(new is old for new, old in zip(plain, value, strict=True)) else plain


def _plain_element(key: Key, kind: object, hints: Mapping[str, object], element: object) -> object:
    """Return an element with its numbers translated, the very same where there are none."""
    if not isinstance(element, dict):
        return _plain_value(Key(key.name, kind, None), element)
    named = {
        name: _plain_value(Key(f"{key.name}.{name}", hints.get(name), None), each)
        for name, each in element.items()
    }
    return element if all(named[name] is each for name, each in element.items()) else named


def _plain_value(key: Key, value: object) -> object:
    """Return the number that is meant, or the value. What is in quotes is of another type."""
    if not isinstance(value, (str, float)):
        return value
    plain = plain_number(key, str(value))
    return value if plain is None else plain


def _value(key: Key, written: str) -> Fraction | None:
    unit_s = next((unit for end, unit in _UNITS_S.items() if key.name.endswith(end)), None)
    if unit_s is not None and (seconds := duration_s(written)) is not None:
        return seconds / unit_s
    match = _NUMBER.fullmatch(written)
    if match is None or (match[2] and match[2] not in _SCALES):
        return None
    return Fraction(match[1]) * _SCALES.get(match[2], 1)


def binary_instead(written: str) -> str | None:
    """Return 4Mi for 4M; None for what is not written with a decimal unit that has a binary one."""
    is_decimal = re.fullmatch(r"[\d.]+[kKMGBT]", written)
    if is_decimal is None:
        return None
    return written[:-1] + {"k": "K", "B": "G"}.get(written[-1], written[-1]) + "i"
