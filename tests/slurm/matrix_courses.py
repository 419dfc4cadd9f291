"""Runs of the fault matrix: which blows befall one run after another, and the rows that are not tried here.

One run takes several blows, each in an attempt of its own, and is held to the oracle at its end. Planned
faults come first: their attempts and steps are known when the run is submitted.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import matrix_blows as blows
from matrix_blows import Blow, await_moment, strike
from matrix_field import Field, Subject
from matrix_oracle import References, cut_in_two, faults_of, left_behind

from orchestra.run.files import Record

STEPS = 600
LENGTH = (f"train.steps={STEPS}", "checkpoint.every_steps=10", "data.ledger=true")
# Node k has one rank.
QUICK = (
    *("cluster.gpus_per_node=1", "recovery.agent_timeout_s=5", "recovery.backoff_s=0.1"),
    *("recovery.heartbeat_timeout_s=6", "recovery.collective_timeout_s=120"),
)
# Steps between two planned faults: at least one checkpoint lies between them.
_APART = 20
_FIRST_AT = 15


@dataclass(frozen=True)
class Course:
    """One run's blows. `min_nodes`: fewer than `nodes` where it may shrink."""

    name: str
    nodes: int
    spares: int
    blows: tuple[Blow, ...]
    min_nodes: int | None = None
    more: tuple[str, ...] = ()

    def overrides(self, chance: random.Random) -> list[str]:
        """Return the run's own settings, with its planned faults."""
        own = [f"cluster.nodes={self.nodes}", f"cluster.spare_nodes={self.spares}", *self.more]
        if self.min_nodes is not None:
            own.append(f"recovery.min_nodes={self.min_nodes}")
        entries = list(self._planned(chance))
        return [*own, f"recovery.inject=[{','.join(entries)}]"] if entries else own

    def _planned(self, chance: random.Random) -> Iterator[str]:
        rank = chance.randrange(self.nodes)
        for attempt, blow in enumerate(self.blows):
            if blow.planned is None:
                continue
            # Never the same host twice in a row: it would be left out.
            rank = (rank + 1 + chance.randrange(max(1, self.nodes - 1))) % self.nodes
            at_step = _FIRST_AT + _APART * attempt + chance.randrange(4)
            values = {"attempt": attempt, "rank": rank, **blow.planned}
            if values.get("phase") == "restore":
                at_step = (_FIRST_AT + _APART * (attempt - 1)) // 10 * 10
            yield (
                "{"
                + ",".join(f"{key}:{value}" for key, value in {**values, "at_step": at_step}.items())
                + "}"
            )


@dataclass(frozen=True)
class Shown:
    """One line of the matrix's table."""

    row: str
    what: str
    result: str


QUICK_COURSES = (
    Course(
        "hands",
        nodes=2,
        spares=1,
        # Killed ranks and agents and a first node that is lost: test_recovery.
        blows=(
            blows.RANK_CRASHES,
            blows.LOCK_HELD,
            blows.DIES_IN_RESTORE,
            # At last: until its zombies have ended the run may reach its end.
            blows.FROZEN,
        ),
    ),
)
COURSES = (
    Course(
        "ranks",
        nodes=3,
        spares=1,
        blows=(
            blows.RANK_CRASHES,
            blows.RANK_EXITS,
            blows.DIES_IN_RESTORE,
            blows.RANK_KILLED,
            blows.AGENT_KILLED,
            blows.CONTROLLER_SILENT,
            blows.NODE_DOWN,
        ),
    ),
    Course(
        "hangs", nodes=2, spares=1, blows=(blows.LOCK_HELD, blows.LOOPS, blows.RANK_STOPPED, blows.FROZEN)
    ),
    Course("first", nodes=2, spares=2, blows=(blows.RANK_KILLED, blows.FIRST_DOWN, blows.FIRST_DOWN)),
    Course("lemon", nodes=2, spares=1, blows=blows.LEMON),
    Course("both", nodes=2, spares=2, blows=(blows.BOTH_DOWN,)),
    Course("start", nodes=2, spares=2, blows=(blows.RANK_KILLED, blows.DOWN_IN_START)),
    Course("network", nodes=2, spares=0, blows=(blows.CUT_SHORTLY,)),
    Course("mute", nodes=2, spares=1, blows=(blows.MUTE,), more=("recovery.setup_timeout_s=25",)),
    Course("shrink", nodes=3, spares=0, blows=(blows.NODE_DOWN,), min_nodes=1),
    Course("queue", nodes=2, spares=0, blows=(blows.NODE_DOWN,)),
    Course("power", nodes=2, spares=0, blows=(blows.POWER_CUT,)),
)


def go_through(course: Course, on: Field, references: References, seed: int) -> list[Shown]:
    """Let all blows of a course befall a run, and hold it to the oracle; return a line for each blow.

    Never raises for what the run does: what went wrong stands in the lines.
    """
    chance = random.Random(f"{course.name} {seed}")
    on.clear()
    name = f"{course.name}-{seed}-{time.time_ns() // 1_000_000}"
    run = on.submit(name, *LENGTH, *QUICK, *course.overrides(chance))
    shown = []
    last: str | None = None
    try:
        for number, blow in enumerate(course.blows):
            last, line = _befall(blow, run, chance, last, is_planned=blow.planned is not None, number=number)
            shown.append(line)
        run.wait(lambda: run.is_finished() or _gave_up(run), "the run ends", 180)
        run.wait(run.is_over, "its job ends", 60)
    except AssertionError as error:
        return [*shown, Shown("", f"{course.name}, seed {seed}", f"FAILED: {error}")]
    is_same = course.min_nodes is None
    whole = references.of(course.nodes)
    wrong = faults_of(run.run, whole, on, same_layout=is_same, freeze=run.frozen) + left_behind(on, run)
    seen = cut_in_two(run.run, run.frozen)
    result = f"FAILED: {'; '.join(wrong + seen)}" if wrong else "; ".join(["passed", *seen])
    return [*shown, Shown("", f"{course.name}, seed {seed}: the oracle", result)]


def _befall(
    blow: Blow, run: Subject, chance: random.Random, last: str | None, *, is_planned: bool, number: int
) -> tuple[str | None, Shown]:
    before = number if is_planned else len(_decisions(run))
    attempt, host = run.attempt(), last
    if not is_planned:
        await_moment(blow, run, max(attempt, 0))
        attempt = run.attempt()
        host = strike(blow, run, chance, last)
        since = time.time()
    if not blow.follows:
        run.wait_for_step(run.step() + 5, blow.within_s)
        went_on = run.attempt() == attempt
        # What no attempt failed of does not part two failures of one host.
        return last, Shown(blow.row, blow.what, "passed" if went_on else f"FAILED: {_decisions(run)[-1]}")
    if blow.by_slurm:
        run.wait(lambda: _trains_behind(run, attempt), f"{blow.what}: Slurm starts it again", blow.within_s)
        job = run.events("attempt_started")[-1]
        took = f"start {job['job_start']} of the job, {_trained_at(run, attempt) - since:.1f} s"
        return host, Shown(blow.row, blow.what, f"passed: {took}")
    run.wait(
        lambda: len(_decisions(run)) > before or run.is_finished(), f"{blow.what}: a decision", blow.within_s
    )
    if run.is_finished() and len(_decisions(run)) <= before:
        return host, Shown(blow.row, blow.what, "FAILED: nothing happened")
    decision = _decisions(run)[before]
    if is_planned:
        host = str(run.events("fault_injected")[-1]["host"])
    run.wait(lambda: _trains_behind(run, decision["attempt"]), f"{blow.what}: it goes on", blow.within_s)
    if blow.after is not None:
        blow.after(run)
    if not _trains_behind(run, decision["attempt"]) or _gave_up(run):
        return host, Shown(blow.row, blow.what, f"FAILED: it gave up: {_decisions(run)[-1]['reason']}")
    took = "" if is_planned else f", {_trained_at(run, decision['attempt']) - since:.1f} s"
    reason = f"{decision['decision']} ({decision['reason']})"
    is_right = decision["decision"] in blow.follows and blow.says in decision["reason"]
    return host, Shown(blow.row, blow.what, f"{'passed' if is_right else 'FAILED'}: {reason}{took}")


def _decisions(run: Subject) -> list[Record]:
    return run.events("restarting")


def _trains_behind(run: Subject, attempt: int) -> bool:
    return any(it["attempt"] > attempt for it in run.events("training_started")) or _gave_up(run)


def _trained_at(run: Subject, attempt: int) -> float:
    times = [it["time"] for it in run.events("training_started") if it["attempt"] > attempt]
    return float(min(times, default=float("nan")))


def _gave_up(run: Subject) -> bool:
    return any(it["decision"] == "give_up" for it in _decisions(run))


def table(lines: Iterable[Shown]) -> str:
    """Return the lines in Markdown."""
    rows = [f"| {it.row} | {it.what} | {' '.join(it.result.split())[:300]} |" for it in lines]
    return "\n".join(["| row | what | result |", "|---|---|---|", *rows])
