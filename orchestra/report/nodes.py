"""What the nodes of a run's last job found when they looked at themselves, in lines of 80 columns.

Sound nodes are not spoken of. It judges nothing again: what is told is what the leader wrote down.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from orchestra.jsonl import Record

_WIDTH = 80
_INDENT = 5
# Of a job with a thousand nodes that share one fault.
_MOST_TOLD = 8


def node_lines(events: Sequence[Record]) -> list[str]:
    """Return what spoke against which node, and whether it was used; nothing where all were sound."""
    checked = [event for event in events if event["event"] == "node_checked"]
    if not checked:
        return []
    last = checked[-1]
    found: dict[str, list[str]] = {}
    for host, words in [*_texts(last, "unfit"), *_texts(last, "doubt")]:
        found.setdefault(host, []).append(words)
    for event in events:
        if event["event"] == "node_slow" and event["time"] >= last["time"]:
            found.setdefault(str(event.get("host")), []).append(str(event.get("cause")))
    left_out = last.get("left_out")
    out = left_out if isinstance(left_out, list) else []
    lines = []
    for host, reasons in list(found.items())[:_MOST_TOLD]:
        used = "left out" if host in out else "used all the same"
        lines += _wrapped(f"{host}, {used}: {'; '.join(reasons)}")
    if len(found) > _MOST_TOLD:
        lines += _wrapped(f"… {len(found) - _MOST_TOLD} more")
    lines += [line for host, off in _clocks(last) for line in _wrapped(f"{host}: its clock is {off}")]
    return ["nodes", *lines] if lines else []


def _texts(event: Record, key: str) -> list[tuple[str, str]]:
    value: Any = event.get(key)
    return [(host, str(words)) for host, words in value.items()] if isinstance(value, Mapping) else []


def _clocks(event: Record) -> list[tuple[str, str]]:
    found = []
    for host, text in _texts(event, "clock_off_s"):
        direction = "behind" if text.startswith("-") else "ahead of"
        found.append((host, f"{text.removeprefix('-')} s {direction} the others'"))
    return found


def _wrapped(text: str) -> list[str]:
    indent = " " * _INDENT
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        # Paths stay whole, to be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
