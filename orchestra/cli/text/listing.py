"""Tables of runs and sweeps for people: what is alive, what is newest, and only what fits. Pure text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TypeVar

from orchestra.cli.text import figures
from orchestra.cli.text.describe import invocation
from orchestra.report.run_state import RunState
from orchestra.report.sweeps import MemberState, SweepState, counted
from orchestra.run.record import RunPhase

HEADER = ("RUN", "STATE", "STEP", "LOSS", "TOK/S", "MFU", "SAVED", "ATTEMPTS", "ETA", "AGE")
# Left out first where a terminal is too narrow.
_DROPPED = ("MFU", "ATTEMPTS", "SAVED", "TOK/S", "LOSS")
_MEMBER_HEADER = ("STATE", "STEP", "LOSS", "TOK/S", "SAVED", "ATTEMPTS", "ETA")
# Rows on a terminal.
_LIMIT = 20

Row = TypeVar("Row")


def of_all(
    states: Sequence[RunState | SweepState], width: int | None, limit: int | None = _LIMIT
) -> list[str]:
    """Return the table of runs and sweeps, in their order.

    `width` is the terminal's, None: no terminal, so that every row and every column is shown.
    """
    chosen = shortened(states, None if width is None else limit, _is_alive)
    rows = [_sweep_row(state) if isinstance(state, SweepState) else _row(state) for state in chosen]
    lines = figures.fitting_table(HEADER, rows, width, _DROPPED).splitlines()
    kept = {id(state) for state in chosen}
    rest = [state for state in states if id(state) not in kept]
    runs = counted(state for state in rest if isinstance(state, RunState))
    sweeps = sum(isinstance(state, SweepState) for state in rest)
    if rest:
        told = [text for text in (figures.counts(runs), f"{sweeps} sweeps" if sweeps else "") if text]
        last = f"and {len(rest)} more ({', '.join(told)}): orchestra status --all"
        lines += [last] if width is None else textwrap.wrap(last, width)
    return lines


def shortened(rows: Sequence[Row], limit: int | None, is_wanted: Callable[[Row], bool]) -> list[Row]:
    """Return at most `limit` of the rows, in their order: those that are wanted, then the first ones."""
    if limit is None or len(rows) <= limit:
        return list(rows)
    wanted = [index for index, row in enumerate(rows) if is_wanted(row)]
    others = [index for index, row in enumerate(rows) if not is_wanted(row)]
    return [rows[index] for index in sorted([*wanted, *others][:limit])]


def _is_alive(state: RunState | SweepState) -> bool:
    if isinstance(state, SweepState):
        return any(phase.is_alive for phase in state.counts)
    return state.state.is_alive


def _row(state: RunState) -> tuple[str, ...]:
    return (
        state.name,
        state.state,
        _step(state),
        figures.loss(state.loss),
        figures.quantity(state.tokens_per_s),
        figures.percent(state.mfu),
        _saved(state),
        str(state.attempts),
        figures.duration(state.eta_s),
        figures.age(state.age_s),
    )


def _step(state: RunState) -> str:
    return f"{state.step or 0}/{'?' if state.steps is None else state.steps}"


def _saved(state: RunState) -> str:
    return "-" if state.checkpoint_step is None else str(state.checkpoint_step)


def _sweep_row(state: SweepState) -> tuple[str, ...]:
    return state.sweep.name, state.problem or summary(state)


def summary(state: SweepState) -> str:
    """Return "12 members: 8 finished, 2 running, 2 queued"."""
    number = len(state.members)
    told = f": {figures.counts(state.counts)}" if number else ""
    return f"{number} member{'' if number == 1 else 's'}{told}"


def of_sweep(state: SweepState, width: int | None) -> list[str]:
    """Return a sweep's counts, the table of its members, the best of them, and what to type next."""
    if state.problem is not None:
        return [f"{state.sweep.name}: {state.problem}"]
    keys = _swept_keys(state.members)
    titles = _short(keys)
    header = ("MEMBER", *titles, *_MEMBER_HEADER)
    chosen = shortened(state.members, None if width is None else 2 * _LIMIT, _is_of_interest)
    rows = [(f"{each.member.index:03d}", *_values(each, keys), *_member_row(each.state)) for each in chosen]
    table = figures.fitting_table(header, rows, width, ("ATTEMPTS", "SAVED", "TOK/S"))
    left = len(state.members) - len(chosen)
    more = [f"and {left} more: {invocation('status', state.sweep)} --all"] if left else []
    return [f"{state.sweep.name}: {summary(state)}", *table.splitlines(), *more, *_best(state), *_next(state)]


def _is_of_interest(member: MemberState) -> bool:
    return member.state.state is not RunPhase.finished


def _member_row(state: RunState) -> tuple[str, ...]:
    return (
        state.state,
        _step(state),
        figures.loss(state.loss),
        figures.quantity(state.tokens_per_s),
        _saved(state),
        str(state.attempts),
        figures.duration(state.eta_s),
    )


def _swept_keys(members: Sequence[MemberState]) -> list[str]:
    """Return the keys that distinguish the members, in the order in which they were typed."""
    keys = (override.partition("=")[0] for each in members for override in each.member.overrides)
    return list(dict.fromkeys(keys))


def _short(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, the whole key where two would be the same."""
    last = [key.rpartition(".")[2].lstrip("+") for key in keys]
    taken = {title.lower() for title in _MEMBER_HEADER}
    return [
        key if last.count(tail) > 1 or tail in taken else tail for key, tail in zip(keys, last, strict=True)
    ]


def _values(member: MemberState, keys: Sequence[str]) -> list[str]:
    pairs = (override.partition("=") for override in member.member.overrides)
    values = {key: value for key, _, value in pairs}
    return [values.get(key, "-") for key in keys]


def _best(state: SweepState) -> list[str]:
    """Name the finished member with the lowest last loss, where there are several to compare."""
    done = [
        each
        for each in state.members
        if each.state.state is RunPhase.finished and each.state.loss is not None
    ]
    if len(done) < 2:
        return []
    best = min(done, key=lambda each: each.state.loss or 0.0)
    values = " ".join(best.member.overrides)
    return [f"lowest  {best.state.name} ({values}): loss {figures.loss(best.state.loss)}"]


def _next(state: SweepState) -> list[str]:
    lines = []
    if any(phase.ended_badly for phase in state.counts):
        lines.append(f"next    `{invocation('why', state.sweep)}`")
    if any(phase.is_to_be_resumed for phase in state.counts):
        lines.append(f"resume  `{invocation('resume', state.sweep)}` runs what is missing or failed")
    return lines
