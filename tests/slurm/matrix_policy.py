"""Rows of the fault matrix about what a failure's repetition means: runs in the foreground, two ranks, no
cluster in between. Each is a plan of faults, the exit code that must follow, and how many attempts it takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from matrix_courses import LENGTH, Shown
from matrix_field import TINY, Field
from matrix_oracle import References, faults_of

from orchestra.run.events import read_events
from orchestra.run.paths import RunDir

_QUICK = ("recovery.backoff_s=0.1", "recovery.heartbeat_timeout_s=6", "cluster.gpus_per_node=2")


@dataclass(frozen=True)
class PolicyCase:
    """One plan. `attempts`: how many there must be at the end."""

    name: str
    row: str
    what: str
    inject: str
    code: int
    attempts: int
    says: str = ""
    overrides: tuple[str, ...] = ()
    # Whether the run must end as if nothing had happened.
    heals: bool = False


def _each(attempts: int, fault: str, *, apart: int = 20) -> str:
    return ",".join(
        f"{{attempt:{it},rank:{it % 2},at_step:{15 + apart * it},fault:{fault}}}" for it in range(attempts)
    )


POLICY_CASES = (
    PolicyCase(
        "same-step",
        "10",
        "an error always at the same step",
        "{attempt:all,rank:1,at_step:17,fault:exception}",
        code=93,
        attempts=2,
        says="bad data or code",
    ),
    PolicyCase(
        "before-first",
        "11",
        "an error before the first step",
        "{attempt:all,rank:1,phase:setup,fault:exception}",
        code=93,
        attempts=2,
        says="no node is blamed",
    ),
    PolicyCase(
        "alternating",
        "12",
        "causes that alternate, no progress",
        "{attempt:0,rank:0,at_step:5,fault:exit,exit_code:7},{attempt:1,rank:1,at_step:6,fault:sigkill},"
        "{attempt:2,rank:0,at_step:7,fault:exit,exit_code:7},{attempt:3,rank:1,at_step:8,fault:sigkill}",
        code=1,
        attempts=4,
        says="recovery.max_restarts=3",
    ),
    PolicyCase(
        "progress",
        "13",
        "a failure behind each progress, more often than max_restarts",
        _each(6, "sigkill"),
        code=0,
        attempts=7,
        heals=True,
    ),
    PolicyCase(
        "not-finite",
        "34",
        "a loss that is NaN once",
        "{attempt:0,rank:1,at_step:33,fault:nan}",
        code=93,
        attempts=1,
        overrides=("train.on_nonfinite=stop",),
    ),
    PolicyCase(
        "spike",
        "34",
        "a loss that leaps once",
        "{attempt:0,rank:1,at_step:133,fault:spike}",
        code=93,
        attempts=1,
        overrides=("recovery.loss_spike.action=stop",),
    ),
    PolicyCase(
        "rolled-back",
        "34",
        "a loss that leaps, rolled back",
        "{attempt:0,rank:1,at_step:133,fault:spike}",
        code=0,
        attempts=2,
        says="is left out",
        overrides=("recovery.loss_spike.action=roll_back",),
    ),
    PolicyCase(
        "flipped",
        "34",
        "a flipped bit of a gradient",
        "{attempt:0,rank:1,at_step:40,fault:flip}",
        code=0,
        attempts=2,
        says="it goes back to",
        overrides=("recovery.replay_every_steps=10",),
        heals=True,
    ),
    PolicyCase(
        "slow",
        "33",
        "a rank that is slow",
        "{attempt:0,rank:1,at_step:2,fault:slow,seconds:0.05,steps:200}",
        code=0,
        attempts=1,
        overrides=("recovery.straggler_every_steps=5",),
        heals=True,
    ),
)


def try_policy(case: PolicyCase, on: Field, references: References, seed: int) -> list[Shown]:
    """Train a run with a case's plan and return what became of it."""
    name = f"{case.name}-{seed}-{time.time_ns() // 1_000_000}"
    words = ("run", *TINY, *LENGTH, *_QUICK, f"run.name={name}", f"recovery.inject=[{case.inject}]")
    done = on.orchestra(*words, *case.overrides, check=False, timeout_s=300)
    run = RunDir(on.site.shared / "runs" / name)
    events = read_events(run)
    starts = [it for it in events if it["event"] == "attempt_started"]
    said = " ".join(str(it.get("reason")) for it in events if it["event"] == "restarting")
    wrong = []
    if done.returncode != case.code:
        wrong.append(f"exit code {done.returncode}, not {case.code}: {done.stderr[-500:]}")
    if len(starts) != case.attempts:
        wrong.append(f"{len(starts)} attempts, not {case.attempts}")
    if case.says not in said:
        wrong.append(f"it said {said!r}")
    if case.row == "33" and not any(
        it["event"] == "straggler_found" and it.get("rank") == 1 for it in events
    ):
        wrong.append("the slow rank is not told of")
    if case.heals and not wrong:
        wrong += faults_of(run, references.of(2), on)
    result = (
        f"FAILED: {'; '.join(wrong)}" if wrong else f"passed: exit code {case.code}, {len(starts)} attempts"
    )
    return [Shown(case.row, case.what, result)]
