"""A rehearsal for people: what is about to befall it, how far it is, and what was seen. Pure text."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestra.cli import figures
from orchestra.cli.describe import invocation, shown
from orchestra.rehearsal.recoveries import STRETCHES, Recovery
from orchestra.report.state import recent_rows
from orchestra.rundir import RunDir

if TYPE_CHECKING:
    from orchestra.faults import PlannedFault
    from orchestra.rehearsal.oracle import Check
    from orchestra.rehearsal.plan import Rehearsal
    from orchestra.rehearsal.report import Judgement

_WIDTH = 80
# Lines about a run that does nothing but train.
_SHOW_S = 10.0
_WORDS = {True: "passed", False: "FAILED", None: "open"}


class Follower:
    """Says on stderr what becomes of a run in the foreground."""

    def __init__(self, run: RunDir, steps: int) -> None:
        self._run = run
        self._steps = steps
        self._said_at = time.monotonic()
        self.say("starts")

    def say(self, words: str) -> None:
        """Say something that happened to it."""
        print(f"{self._run.name}: {words}", file=sys.stderr, flush=True)

    def tick(self, _attempt: int, _stops: int) -> None:
        """Say now and then how far it is; called about ten times a second."""
        if time.monotonic() - self._said_at >= _SHOW_S:
            self._said_at = time.monotonic()
            rows = recent_rows(self._run)
            self.say(f"step {rows[-1]['step']} of {self._steps}" if rows else "starts its ranks")


def plan_lines(plan: Rehearsal) -> list[str]:
    """Return what is about to happen, a line for each fault."""
    cluster, course = plan.hurt.cluster, plan.schedule
    ranks = f"{cluster.gpus_per_node} rank{'' if cluster.gpus_per_node == 1 else 's'}"
    nodes = f"{cluster.nodes} node{'' if cluster.nodes == 1 else 's'} × {ranks}"
    spares = f", {cluster.spare_nodes} spare" if cluster.spare_nodes else ""
    length = f"{course.steps} steps, a checkpoint every {course.every_steps}"
    return [
        f"rehearsal of {plan.of}: {nodes}{spares}, {length}",
        f"  {plan.undisturbed.run.name}: nothing happens to it",
        f"  {plan.hurt.run.name}:",
        *(f"    step {it.at_step}: {it.fault.name} at rank {it.rank}" for it in course.faults),
    ]


def judgement_lines(found: Judgement) -> list[str]:
    """Return the tables, the claims, and what to do."""
    failed = [it for it in found.checks if it.is_true is False]
    hurt = [it for it in found.recoveries if not it.is_passed]
    lines = [*_tables(found.recoveries), "", *(_claim(it) for it in found.checks), ""]
    pair = found.pair
    if found.is_passed:
        lines.append(f"{pair.of} comes back from what was rehearsed")
    else:
        lines.append("what to do")
        advice = [*(_about(it, pair.hurt) for it in hurt), *(it.advice for it in failed)]
        for words in dict.fromkeys(filter(None, advice)):
            lines += _wrapped(words, "  ")
        lines += _wrapped(f"`{invocation('why', pair.hurt)}` tells what befell it, attempt by attempt", "  ")
    places = f"{shown(pair.undisturbed.path)} {shown(pair.hurt.path)}"
    return [*lines, f"remove  rm -r {places}"]


def _tables(recoveries: Sequence[Recovery]) -> list[str]:
    head = ("fault", "where", "answer", "rule", "new step", "lost steps", "verdict")
    rows = [_row(it) for it in recoveries]
    spent = [
        (_named(it.fault), *(_seconds(it.stretches.get(name)) for name in STRETCHES)) for it in recoveries
    ]
    lines = [*_aligned([head, *rows]), ""]
    return [*lines, *figures.table(("seconds until", *STRETCHES), spent).splitlines()]


def _row(it: Recovery) -> tuple[str, ...]:
    lost = "" if it.lost_steps is None else str(it.lost_steps)
    where = f"rank {it.fault.rank}" + (f" on {it.host}" if it.host else "")
    seconds = "" if it.seconds is None else f"{it.seconds:.1f} s"
    verdict = _WORDS[it.is_passed] + (f": {it.problem}" if it.problem else "")
    return (_named(it.fault), where, it.decision or "", it.rule or "", seconds, lost, verdict)


def _named(fault: PlannedFault) -> str:
    return f"{fault.fault.name}@{fault.at_step}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _claim(check: Check) -> str:
    return f"{_WORDS[check.is_true]:<7} {check.claim}: {check.found}"


def _about(it: Recovery, hurt: RunDir) -> str:
    """Return what to do about a fault that was not answered as it must."""
    name = _named(it.fault)
    if it.host is None:
        return f"{name}: {it.problem}; say another step or rank with --fault"
    if it.decision in ("give_up", "end"):
        return (
            f"{name}: the policy gave up by the rule {it.rule} ({it.reason}); see recovery.max_restarts, "
            f"recovery.min_nodes, cluster.spare_nodes and cluster.requeue"
        )
    log = shown(hurt.attempt_logs((it.fault.attempt or 0) + 1))
    return f"{name}: {it.problem}; the next attempt's logs are in {log}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
