"""What befell a run, attempt by attempt, and what was decided: as data, and in lines of 80 columns.

It decides nothing again: what is told is what the events say was decided then.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestra.recovery import history
from orchestra.recovery.history import Attempt
from orchestra.recovery.incidents import Incident, Kind, incidents
from orchestra.run.events import is_number
from orchestra.run.files import Record

_WIDTH = 80
_INDENT = 5
# Longer stories are told from their end; the first attempt always is.
_MOST_TOLD = 12
_GAVE_UP = "give_up"
_TOLD = {
    "restart": "restarted in place",
    "replace": "restarted with a spare",
    "shrink": "restarted on fewer nodes",
    "requeue": "requeued",
    _GAVE_UP: "gave up",
    "end": "ended",
}


@dataclass(frozen=True)
class Chapter:
    """One attempt: what ended it, and what was decided; None where no decision was written down."""

    incident: Incident
    decision: str | None = None
    rule: str | None = None
    reason: str | None = None
    wait_s: float = 0.0
    exclude: tuple[str, ...] = ()
    # What the run ended with, where it was given up.
    code: int | None = None
    # Of each node that a spare replaced: the lost host and the spare's.
    replaced: tuple[tuple[str, str], ...] = ()

    def record(self) -> Record:
        """Return it for `--json`."""
        record = dataclasses.asdict(self)
        record["incident"]["kind"] = self.incident.kind.value
        return record


def chapters(events: Sequence[Record], steps: Mapping[int, int] | None = None) -> list[Chapter]:
    """Return the attempts that are over, oldest first. `events` are in the order of time.

    `steps`: see `incidents`.
    """
    attempts = history.read(events)
    by_number = {attempt.number: attempt for attempt in attempts}
    ended = incidents(attempts, steps)
    return [_chapter(incident, by_number[incident.attempt]) for incident in ended]


def _chapter(incident: Incident, attempt: Attempt) -> Chapter:
    decided = attempt.decisions
    replaced = tuple(
        (str(event.get("host")), str(event["by_host"]))
        for event in attempt.named("node_replaced")
        if "by_host" in event
    )
    if not decided:
        return Chapter(incident, replaced=replaced)
    # A requeue is told twice: why it was decided, and by which job it goes on.
    last = decided[-1]
    first = next((event for event in decided if "rule" in event), last)
    decision = "requeue" if last["event"] == "requeued" else _text(last, "decision")
    wait_s = first.get("wait_s")
    return Chapter(
        incident,
        decision=decision,
        rule=_text(first, "rule"),
        reason=_text(first, "reason"),
        wait_s=float(wait_s) if is_number(wait_s) else 0.0,
        exclude=incident.excluded,
        code=first["code"] if decision == _GAVE_UP and "code" in first else None,
        replaced=replaced,
    )


def _text(event: Record, key: str) -> str | None:
    value = event.get(key)
    return value if isinstance(value, str) and value else None


def story(found: Sequence[Chapter]) -> list[str]:
    """Return what befell the run, two or three lines an attempt, each of at most 80 columns.

    Nothing where there was one attempt and nothing was decided about it.
    """
    if len(found) < 2 and not any(chapter.decision for chapter in found):
        return []
    left_out = len(found) - _MOST_TOLD
    lines = ["attempts"]
    for index, chapter in enumerate(found):
        if left_out > 0 and 0 < index <= left_out:
            lines += [f"  … {left_out} more"] if index == 1 else []
            continue
        lines += _lines(chapter)
    return lines


def _lines(chapter: Chapter) -> list[str]:
    it = chapter.incident
    head = f"{it.attempt:>3}  "
    lines = _wrapped(f"{_steps(it)}{_what(it)}", head)
    if chapter.decision is None:
        return lines
    lines += _wrapped(f"{_decided(chapter)}{_because(chapter)}", "     → ", " " * (_INDENT + 2))
    return lines


def _steps(incident: Incident) -> str:
    if incident.before_first_step:
        return "before the first step: "
    if incident.step is None:
        return f"from step {incident.began + 1}: "
    about = "" if incident.step_is_exact or incident.kind is Kind.finished else "about "
    return f"steps {incident.began + 1} to {about}{max(incident.step, incident.began + 1)}: "


def _what(incident: Incident) -> str:
    who = "" if incident.rank is None else f"rank {incident.rank}"
    where = "" if incident.host is None else f"on {incident.host}" if who else incident.host
    place = " ".join(part for part in (who, where) if part)
    saved = f"; saved: step {incident.committed}" if incident.committed else "; nothing was saved"
    if incident.kind is Kind.finished:
        return "finished"
    cause = f"stopped ({incident.cause})" if incident.kind is Kind.stopped else incident.cause
    return f"{cause}{f' ({place})' if place else ''}{saved}"


def _decided(chapter: Chapter) -> str:
    words = _TOLD.get(str(chapter.decision), str(chapter.decision))
    if chapter.replaced:
        words += f" ({', '.join(f'{new} for {old}' for old, new in chapter.replaced)})"
    if chapter.wait_s:
        words += f" after {chapter.wait_s:g} s"
    replaced = [old for old, _ in chapter.replaced]
    others = [host for host in chapter.exclude if host not in replaced]
    return words + (f", without {', '.join(others)}" if others else "")


def _because(chapter: Chapter) -> str:
    # An ordinary restart has no other reason than what is told above it.
    is_new = chapter.reason is not None and not chapter.reason.startswith(chapter.incident.cause)
    reason = f": {chapter.reason}" if is_new else ""
    return f"{reason} [{chapter.rule}]" if chapter.rule else reason


def _wrapped(text: str, head: str, indent: str = " " * _INDENT) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)


# What the nodes of a run's last job found when they looked at themselves, in lines of 80 columns.
#
# Sound nodes are not spoken of. It judges nothing again: what is told is what the leader wrote down.


# Of a job with a thousand nodes that share one fault.
_MAX_NODES_SHOWN = 8


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
    for host, reasons in list(found.items())[:_MAX_NODES_SHOWN]:
        used = "left out" if host in out else "used all the same"
        lines += _wrapped_node_line(f"{host}, {used}: {'; '.join(reasons)}")
    if len(found) > _MAX_NODES_SHOWN:
        lines += _wrapped_node_line(f"… {len(found) - _MAX_NODES_SHOWN} more")
    lines += [
        line for host, off in _clocks(last) for line in _wrapped_node_line(f"{host}: its clock is {off}")
    ]
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


def _wrapped_node_line(text: str) -> list[str]:
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
