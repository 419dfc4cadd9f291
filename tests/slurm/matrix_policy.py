"""Rows of the fault matrix about what a failure's repetition means: runs in the foreground, two ranks, no
cluster in between. Each is a plan of faults, the exit code that must follow, and how many attempts it takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from matrix_injections import LENGTH, ShownRow
from matrix_oracle import References, differences
from sites import TINY, Site

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
    # What the reason of a decision must hold.
    reason: str = ""
    overrides: tuple[str, ...] = ()
    # Whether the run must end as if nothing had happened.
    heals: bool = False


def _each(attempts: int, fault: str) -> str:
    return ",".join(
        f"{{attempt:{attempt},rank:{attempt % 2},at_step:{15 + 20 * attempt},fault:{fault}}}"
        for attempt in range(attempts)
    )


POLICY_CASES = (
    PolicyCase(
        "same-step",
        "10",
        "an error always at the same step",
        "{attempt:all,rank:1,at_step:17,fault:exception}",
        code=93,
        attempts=2,
        reason="bad data or code",
    ),
    PolicyCase(
        "before-first",
        "11",
        "an error before the first step",
        "{attempt:all,rank:1,phase:setup,fault:exception}",
        code=93,
        attempts=2,
        reason="no node is blamed",
    ),
    PolicyCase(
        "alternating",
        "12",
        "causes that alternate, no progress",
        "{attempt:0,rank:0,at_step:5,fault:exit,exit_code:7},{attempt:1,rank:1,at_step:6,fault:sigkill},"
        "{attempt:2,rank:0,at_step:7,fault:exit,exit_code:7},{attempt:3,rank:1,at_step:8,fault:sigkill}",
        code=1,
        attempts=4,
        reason="recovery.max_restarts=3",
    ),
    PolicyCase(
        "progress",
        "13",
        "a failure after each progress, more often than max_restarts",
        _each(2, "sigkill"),
        code=0,
        attempts=3,
        overrides=("recovery.max_restarts=1",),
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
        reason="is left out",
        overrides=("recovery.loss_spike.action=roll_back",),
    ),
    PolicyCase(
        "flipped",
        "34",
        "a flipped bit of a gradient",
        "{attempt:0,rank:1,at_step:40,fault:flip}",
        code=0,
        attempts=2,
        reason="it goes back to",
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


def try_policy(case: PolicyCase, site: Site, references: References, seed: int) -> ShownRow:
    """Train a run with a case's plan and return what became of it."""
    name = f"{case.name}-{seed}-{time.time_ns() // 1_000_000}"
    words = ("run", *TINY, *LENGTH, *_QUICK, f"run.name={name}", f"recovery.inject=[{case.inject}]")
    done = site.orchestra(*words, *case.overrides, check=False, timeout_s=300)
    run = RunDir(site.runs / name)
    events = read_events(run)
    num_starts = sum(event["event"] == "attempt_started" for event in events)
    reasons = " ".join(str(event.get("reason")) for event in events if event["event"] == "restarting")
    wrong = []
    if done.returncode != case.code:
        wrong.append(f"exit code {done.returncode}, not {case.code}: {done.stderr[-500:]}")
    if num_starts != case.attempts:
        wrong.append(f"{num_starts} attempts, not {case.attempts}")
    if case.reason not in reasons:
        wrong.append(f"the decisions' reasons are {reasons!r}")
    if case.row == "33" and not any(
        event["event"] == "straggler_found" and event.get("rank") == 1 for event in events
    ):
        wrong.append("the slow rank is not reported")
    if case.heals and not wrong:
        wrong += differences(run, references.of(2), site)
    passed = f"passed: exit code {case.code}, {num_starts} attempts"
    return ShownRow(case.row, case.what, f"FAILED: {'; '.join(wrong)}" if wrong else passed)
