"""What happened to a run, attempt by attempt, and what was decided then: as data, and in lines of 80 columns.

Called by `orchestra why` and by rehearsals. `node_lines` says what the nodes of the last job found when they
checked themselves.
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
# Of a run with more attempts the first one and the last ones are shown.
_MOST_SHOWN = 12
_GAVE_UP = "give_up"
_WORDS_OF_DECISIONS = {
    "restart": "restarted in place",
    "replace": "restarted with a spare",
    "shrink": "restarted on fewer nodes",
    "requeue": "requeued",
    _GAVE_UP: "gave up",
    "end": "ended",
}


@dataclass(frozen=True)
class EndedAttempt:
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


def ended_attempts(events: Sequence[Record], steps: Mapping[int, int] | None = None) -> list[EndedAttempt]:
    """Return the attempts that are over, oldest first. `events` are in the order of time.

    `steps`: see `incidents`.
    """
    attempts = history.read(events)
    by_number = {attempt.number: attempt for attempt in attempts}
    ended = incidents(attempts, steps)
    return [_ended_attempt(incident, by_number[incident.attempt]) for incident in ended]


def _ended_attempt(incident: Incident, attempt: Attempt) -> EndedAttempt:
    decided = attempt.decisions
    replaced = tuple(
        (str(event.get("host")), str(event["by_host"]))
        for event in attempt.named("node_replaced")
        if "by_host" in event
    )
    if not decided:
        return EndedAttempt(incident, replaced=replaced)
    # A requeue is told twice: why it was decided, and by which job it goes on.
    last = decided[-1]
    first = next((event for event in decided if "rule" in event), last)
    decision = "requeue" if last["event"] == "requeued" else _text(last, "decision")
    wait_s = first.get("wait_s")
    return EndedAttempt(
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


def attempt_lines(attempts: Sequence[EndedAttempt]) -> list[str]:
    """Return what happened to the run, two or three lines an attempt, each of at most 80 columns.

    Nothing where there was one attempt and nothing was decided about it.
    """
    if len(attempts) < 2 and not any(ended.decision for ended in attempts):
        return []
    left_out = len(attempts) - _MOST_SHOWN
    lines = ["attempts"]
    for index, ended in enumerate(attempts):
        if left_out > 0 and 0 < index <= left_out:
            lines += [f"  … {left_out} more"] if index == 1 else []
            continue
        lines += _lines(ended)
    return lines


def _lines(ended: EndedAttempt) -> list[str]:
    incident = ended.incident
    lines = _wrapped(f"{_steps(incident)}{_what(incident)}", f"{incident.attempt:>3}  ")
    if ended.decision is None:
        return lines
    lines += _wrapped(f"{_decided(ended)}{_because(ended)}", "     → ", " " * (_INDENT + 2))
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


def _decided(ended: EndedAttempt) -> str:
    words = _WORDS_OF_DECISIONS.get(str(ended.decision), str(ended.decision))
    if ended.replaced:
        words += f" ({', '.join(f'{new} for {old}' for old, new in ended.replaced)})"
    if ended.wait_s:
        words += f" after {ended.wait_s:g} s"
    replaced = [old for old, _ in ended.replaced]
    others = [host for host in ended.exclude if host not in replaced]
    return words + (f", without {', '.join(others)}" if others else "")


def _because(ended: EndedAttempt) -> str:
    # An ordinary restart has no other reason than what is told above it.
    is_new = ended.reason is not None and not ended.reason.startswith(ended.incident.cause)
    reason = f": {ended.reason}" if is_new else ""
    return f"{reason} [{ended.rule}]" if ended.rule else reason


def _wrapped(text: str, head: str, indent: str = " " * _INDENT, *, keeps_words: bool = False) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=not keeps_words,
        break_on_hyphens=False,
    )


def _wrapped_node(text: str) -> list[str]:
    # Paths stay whole, to be copied.
    return _wrapped(text, " " * _INDENT, " " * (_INDENT + 2), keeps_words=True)


# Of a job with a thousand nodes that share one fault.
_MAX_NODES_SHOWN = 8


def node_lines(events: Sequence[Record]) -> list[str]:
    """Return what the node checks of the last job said against which node, and whether it was used.

    Nothing where all were sound.
    """
    checked = [event for event in events if event["event"] == "node_checked"]
    if not checked:
        return []
    last = checked[-1]
    reasons_of: dict[str, list[str]] = {}
    for host, words in [*_texts(last, "unfit"), *_texts(last, "doubt")]:
        reasons_of.setdefault(host, []).append(words)
    for event in events:
        if event["event"] == "node_slow" and event["time"] >= last["time"]:
            reasons_of.setdefault(str(event.get("host")), []).append(str(event.get("cause")))
    left_out = last.get("left_out")
    out = left_out if isinstance(left_out, list) else []
    lines = []
    for host, reasons in list(reasons_of.items())[:_MAX_NODES_SHOWN]:
        used = "left out" if host in out else "used all the same"
        lines += _wrapped_node(f"{host}, {used}: {'; '.join(reasons)}")
    if len(reasons_of) > _MAX_NODES_SHOWN:
        lines += _wrapped_node(f"… {len(reasons_of) - _MAX_NODES_SHOWN} more")
    lines += [line for host, off in _clocks(last) for line in _wrapped_node(f"{host}: its clock is {off}")]
    return ["nodes", *lines] if lines else []


def _texts(event: Record, key: str) -> list[tuple[str, str]]:
    value: Any = event.get(key)
    return [(host, str(words)) for host, words in value.items()] if isinstance(value, Mapping) else []


def _clocks(event: Record) -> list[tuple[str, str]]:
    clocks = []
    for host, text in _texts(event, "clock_off_s"):
        direction = "behind" if text.startswith("-") else "ahead of"
        clocks.append((host, f"{text.removeprefix('-')} s {direction} the others'"))
    return clocks
