"""The pages of `orchestra top` as lines: all runs, one run, a text to scroll through. Pure.

A page is at most `height` lines of at most `width` columns, the last one of keys; what does not fit is left
out from where it matters least. Without a height it is as long as it likes: for a pipe.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from orchestra.alerts.detect import Findings
from orchestra.alerts.observed import NodeBeat, ObservedRun
from orchestra.alerts.outlets import printable
from orchestra.cli.text import figures
from orchestra.report.run_state import RunState, SweepState
from orchestra.run.events import is_number
from orchestra.run.files import Record
from orchestra.run.record import RunPhase

# A node that is heard of so lately is well: its agent writes every ten seconds.
_FRESH_S = 30.0
_CURVE = 12
_NAME = 22
# Of an event, in the order in which they tell most.
_TOLD = ("rank", "host", "step", "cause", "decision", "reason", "key", "message", "ratio", "seconds")
# Events of every save and start that say nothing by themselves.
_QUIET = (
    *("checkpoint_started", "checkpoint_needs", "attention", "node_started", "save_interval"),
    "energy_unmeasured",
)
ALL_KEYS = "j k choose  Enter open  l logs  w why  r report  c cancel  q quit"
RUN_KEYS = "l logs  w why  r report  c cancel  b all runs  q quit"
TEXT_KEYS = "j k scroll  space page  b back  q quit"


class Style(Enum):
    """How a line stands out, as terminals have it (ECMA-48, SGR)."""

    plain = ""
    title = "1"
    chosen = "7"
    dim = "2"
    bad = "31"


Line = tuple[Style, str]


@dataclass(frozen=True)
class Entry:
    """A run or a sweep in the list, with its last losses."""

    state: RunState | SweepState
    losses: Sequence[float] = ()

    @property
    def name(self) -> str:
        return self.state.sweep.name if isinstance(self.state, SweepState) else self.state.name


@dataclass(frozen=True)
class RunView:
    """One run as its page shows it."""

    state: RunState
    observed: ObservedRun
    findings: Findings = field(default_factory=Findings)


def all_page(
    entries: Sequence[Entry], chosen: int, now: float, width: int, height: int | None, *, has_blocks: bool
) -> list[Line]:
    """Return the list of runs; `chosen` is marked where there is a height."""
    counts = ", ".join(f"{number} {word}" for word, number in _counts(entries).items())
    head = _spread("orchestra top", f"{counts or 'no runs'}  {_clock(now)}", width)
    columns = f"{'RUN':<{_NAME}} {'STATE':<9} {'STEP':>12} {'LOSS':>7} {'':<{_CURVE}} {'TOK/S':>6}"
    lines = [(Style.title, head), (Style.dim, f"{columns} {'ETA':>6}")]
    room = None if height is None else max(1, height - len(lines) - 1)
    first = 0 if room is None else max(0, min(chosen - room // 2, len(entries) - room))
    last = len(entries) if room is None else first + room
    for index, entry in enumerate(entries[first:last], first):
        text = _row(entry, has_blocks=has_blocks)
        is_bad = isinstance(entry.state, RunState) and entry.state.state.ended_badly
        is_chosen = height is not None and index == chosen
        lines.append((Style.chosen if is_chosen else Style.bad if is_bad else Style.plain, text))
    return _page(lines, width, height, ALL_KEYS)


def _counts(entries: Sequence[Entry]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for entry in entries:
        word = "sweeps" if isinstance(entry.state, SweepState) else str(entry.state.state)
        counts[word] = counts.get(word, 0) + 1
    return counts


def _row(entry: Entry, *, has_blocks: bool) -> str:
    state = entry.state
    name = _cut(entry.name, _NAME)
    if isinstance(state, SweepState):
        return f"{name:<{_NAME}} {state.problem or figures.counts(state.counts)}"
    step = f"{state.step or 0}/{'?' if state.steps is None else state.steps}"
    curve = figures.sparkline(entry.losses, _CURVE) if has_blocks else ""
    loss = "-" if state.loss is None else f"{state.loss:.3f}"
    speed, eta = figures.quantity(state.tokens_per_s), figures.duration(state.eta_s)
    numbers = f"{step:>12} {loss:>7} {curve:<{_CURVE}} {speed:>6} {eta:>6}"
    return f"{name:<{_NAME}} {_cut(str(state.state), 9):<9} {numbers}"


def run_page(view: RunView, width: int, height: int | None, *, has_blocks: bool) -> list[Line]:
    """Return all about one run: how far and how fast it is, its nodes, what is wrong, its last events."""
    state, run = view.state, view.observed
    age = figures.age(state.age_s)
    left = f"{state.name}  {state.state}, attempt {max(0, state.attempts - 1)}, {age} old"
    head = [(Style.title, _spread(left, _clock(run.now), width))]
    if state.cause and state.state is not RunPhase.finished:
        head.append((Style.bad, f"{_LABEL.format('cause')}{state.cause}"))
    head += [
        (Style.plain, _progress(state, width, has_blocks=has_blocks)),
        (Style.plain, f"{_LABEL.format('loss')}{_loss(run, state, width - 8, has_blocks=has_blocks)}"),
        (Style.plain, f"{_LABEL.format('speed')}{_speed(run, state)}"),
        (Style.plain, f"{_LABEL.format('time')}{_spent(run)}"),
        (Style.plain, f"{_LABEL.format('saved')}{_saved(run, state)}"),
    ]
    wrong = [
        (Style.bad, line)
        for alert in view.findings.alerts
        for line in textwrap.wrap(
            f"{_LABEL.format('alert')}{alert.key}: {alert.evidence}",
            width,
            subsequent_indent=" " * 8,
            max_lines=2,
        )
    ]
    blind = sorted(view.findings.blind)
    if blind:
        wrong.append((Style.dim, f"{_LABEL.format('unseen')}{', '.join(blind)}"))
    nodes = _nodes(run)
    events = [line for event in run.events if (line := _event(event)) is not None]
    if height is None:
        return _page([*head, *nodes, *wrong, *events[-20:]], width, None, RUN_KEYS)
    room = max(0, height - 1 - len(head) - len(wrong))
    # Nodes get half of what is left, events the rest.
    shown = nodes if len(nodes) <= room // 2 else [*nodes[: room // 2 - 1], _more(nodes, room // 2 - 1)]
    left_over = max(0, room - len(shown))
    return _page(
        [*head, *wrong, *shown, *(events[-left_over:] if left_over else [])], width, height, RUN_KEYS
    )


_LABEL = "{:<8}"


def _more(nodes: Sequence[Line], shown: int) -> Line:
    rest = nodes[max(0, shown) :]
    silent = sum(style is Style.bad for style, _ in rest)
    return Style.bad if silent else Style.dim, f"        and {len(rest)} more nodes, {silent} of them silent"


def _progress(state: RunState, width: int, *, has_blocks: bool) -> str:
    step, steps = state.step or 0, state.steps or 0
    share = min(1.0, step / steps) if steps else 0.0
    words = f" {step}/{state.steps if steps else '?'} {share:.1%}"
    words += f"  ETA {figures.duration(state.eta_s)}" if state.eta_s is not None else ""
    room = max(0, width - len(words) - 8)
    full, empty = ("━", "─") if has_blocks else ("#", ".")
    done = int(room * share)
    return f"{_LABEL.format('step')}{full * done}{empty * (room - done)}{words}"


def _loss(run: ObservedRun, state: RunState, width: int, *, has_blocks: bool) -> str:
    losses = [row["loss"] for row in run.rows if is_number(row.get("loss"))]
    if not losses:
        return "no step yet"
    named = {**state.train, **state.eval}
    more = f"  {figures.named_losses(named)}" if named else ""
    first, last = f"{losses[0]:.3f} ", f" {losses[-1]:.4f}{more}"
    room = width - len(first) - len(last)
    curve = figures.sparkline(losses, room) if has_blocks and room > 0 else "->"
    return f"{first}{curve}{last}"


def _speed(run: ObservedRun, state: RunState) -> str:
    words = [f"{figures.quantity(state.tokens_per_s)} tok/s"]
    if run.planned_tokens_per_s is not None and state.tokens_per_s is not None:
        share = state.tokens_per_s / run.planned_tokens_per_s
        words.append(f"{share:.0%} of its plan ({figures.quantity(run.planned_tokens_per_s)})")
    else:
        words.append("plan n/a")
    words.append(f"MFU {figures.percent(state.mfu)}")
    times = [row["step_time_s"] for row in run.rows[-1:] if is_number(row.get("step_time_s"))]
    return "  ".join([*words, *(f"{seconds:.3g} s a step" for seconds in times)])


def _spent(run: ObservedRun) -> str:
    spent = run.accounts
    if not spent.wall_s:
        return "nothing has begun"
    losses = {
        "lost": spent.lost_s,
        "saving": spent.checkpoint_s,
        "evaluating": spent.evaluation_s,
        "starts": spent.restart_s,
        "restores": spent.restore_s,
        "queue": spent.queue_s,
        "idle": spent.idle_s,
    }
    parts = [f"{word} {figures.duration(seconds)}" for word, seconds in losses.items() if seconds >= 1]
    whole = f"goodput {figures.percent(spent.goodput)} of {figures.duration(spent.wall_s)}"
    return f"{whole}{': ' if parts else ''}{', '.join(parts)}"


def _saved(run: ObservedRun, state: RunState) -> str:
    if state.checkpoint_step is None:
        return "nothing yet"
    commits = [
        event["time"]
        for event in run.events
        if event["event"] == "checkpoint_committed" and event.get("step") == state.checkpoint_step
    ]
    ago = f", {figures.age(run.now - commits[-1])} ago" if commits else ""
    failed = f"; {state.failed_saves.count} saves failed since" if state.failed_saves else ""
    return f"step {state.checkpoint_step}{ago}{failed}"


def _nodes(run: ObservedRun) -> list[Line]:
    """Return a line for each node: the age of its heartbeat, and what its ranks do. The oldest come first."""
    if run.state is not RunPhase.running:
        return []

    def line(index: int, beat: NodeBeat) -> Line:
        age_s = max(0.0, run.now - beat.heard)
        doing = ", ".join(
            f"{phase} {_ranges(ranks)}" if ranks else phase for phase, ranks in beat.phases.items()
        )
        silence = f"  silent {beat.longest_silence_s:.0f} s" if beat.longest_silence_s > _FRESH_S else ""
        label = _LABEL.format("nodes" if index == 0 else "")
        text = f"{label}{beat.node:>4} {_cut(beat.host, 20):<20} {age_s:>4.0f} s  {doing}{silence}"
        return Style.bad if age_s > _FRESH_S or silence else Style.plain, text

    oldest_first = sorted(run.nodes, key=lambda beat: (run.now - beat.heard < _FRESH_S, beat.node))
    if not oldest_first:
        return [(Style.dim, f"{_LABEL.format('nodes')}no heartbeat was written yet")]
    return [line(index, beat) for index, beat in enumerate(oldest_first)]


def _ranges(ranks: Sequence[int]) -> str:
    """Return "0-3, 7" for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def _event(event: Record) -> Line | None:
    name = str(event["event"])
    if name in _QUIET or (name == "finished" and "rank" in event):
        return None
    told = [f"{key} {_number(event[key])}" for key in _TOLD if event.get(key) not in (None, "")]
    text = f"{_clock(event['time'])} {name}: {' '.join(', '.join(told).split())}"
    is_bad = any(word in name for word in ("failed", "lost", "hang", "alert_raised", "stalled", "spike"))
    return Style.bad if is_bad else Style.dim, text


def _number(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def text_page(title: str, text: Sequence[str], first: int, width: int, height: int) -> list[Line]:
    """Return a part of a text, from its line `first` on; a tab counts as four columns."""
    shown = text[first : first + height - 2]
    where = f"{min(first + 1, len(text))}-{min(first + len(shown), len(text))} of {len(text)}"
    lines: list[Line] = [(Style.title, _spread(title, where, width))]
    lines += [(Style.plain, line.expandtabs(4)) for line in shown]
    return _page(lines, width, height, TEXT_KEYS)


def _page(lines: Sequence[Line], width: int, height: int | None, keys: str) -> list[Line]:
    if height is None:
        return [(style, printable(text).rstrip()) for style, text in lines]
    cut = [(style, _cut(printable(text), width)) for style, text in lines[: height - 1]]
    blank: list[Line] = [(Style.plain, "")] * (height - 1 - len(cut))
    return [*cut, *blank, (Style.dim, _cut(keys, width))]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(0, width - 1)]}~"


def _spread(left: str, right: str, width: int) -> str:
    room = width - len(right) - 2
    return f"{_cut(left, max(0, room)):<{max(0, room)}}  {right}"


def _clock(now: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(now))
    except (OverflowError, ValueError, OSError):
        # Of a record that somebody edited, or a disk damaged.
        return "?"
