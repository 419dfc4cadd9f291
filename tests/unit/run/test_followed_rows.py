"""Rows of a run that is looked at again and again: what is folded says the same."""

from __future__ import annotations

import json
import random
from dataclasses import astuple
from pathlib import Path

import pytest
from support.long_runs import lines, long_run, row

from orchestra.recovery.accounting import STOOD_STILL, account
from orchestra.report.spending import spending
from orchestra.run.events import read_events
from orchestra.run.files import Record, read_json_lines
from orchestra.run.metrics_file import FollowedRows, rows_that_count

_BEGAN = 1000.0


def _eventful_run(draw: random.Random, num_steps: int) -> tuple[list[Record], list[Record]]:
    """Return the events and the rows of a run that went back to an earlier step every few thousand steps."""
    events: list[Record] = []
    rows: list[Record] = []
    now, step, attempt = _BEGAN, 0, -1
    while step < num_steps:
        attempt += 1
        now += 1.0
        told = {"attempt": attempt, "host": "a", "node": 0, "pid": 1, "pid_started": 1}
        events.append({"time": now, "event": "attempt_started", **told, "nodes": 1, "ranks_per_node": 2})
        now += 20.0
        events.append({"time": now, "event": "restored", "attempt": attempt, "step": step})
        events.append({"time": now, "event": "training_started", "attempt": attempt, "device": "H100"})
        for step in range(step + 1, min(num_steps, step + draw.randrange(4_000, 9_000)) + 1):  # noqa: B020
            seconds = draw.uniform(0.4, 0.6)
            now += seconds
            if draw.random() < 1 / 1500:
                now += 30.0
                events.append({"time": now, "event": STOOD_STILL, "attempt": attempt, "seconds": 30.0})
            if step % 700 == 0:
                now += 7.0
                events.append(
                    {"time": now, "event": "evaluated", "attempt": attempt, "step": step, "seconds": 7.0}
                )
            used = {"energy_j": draw.uniform(90, 110), "power_w": 400.0}
            rows.append(row(step, now, attempt, **{**used, "step_time_s": seconds}))
        now += 3.0
        events.append({"time": now, "event": "failed", "attempt": attempt, "host": "a", "code": 1})
        if step < num_steps:
            step -= draw.randrange(0, 300)
    return sorted(events, key=lambda event: event["time"]), rows


@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_folded_is_booked_as_before(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    events, rows = _eventful_run(draw, 30_000)
    file, seen = tmp_path / "metrics.jsonl", 0
    followed = FollowedRows(file)
    assert followed.read() == []
    while seen < len(rows):
        begin, seen = seen, seen + draw.choice([1, 300, 9_000])
        with file.open("a") as out:
            out.writelines(json.dumps(each) + "\n" for each in rows[begin:seen])
        found = followed.read()
    assert len(found) < 9_500
    assert found[-4_000:] == rows[-4_000:]
    booked, booked_before = (account(events, each) for each in (found, rows))
    # Within a hundred steps, those that a roll-back made void are not told apart by their times.
    assert astuple(booked) == pytest.approx(astuple(booked_before), rel=2e-3, abs=0.1)
    assert booked.wall_s == pytest.approx(booked_before.wall_s)
    used, used_before = (spending(events, each, 1, None, None) for each in (found, rows))
    assert used.joules == pytest.approx(used_before.joules)
    assert rows_that_count(found)[-4_000:] == rows_that_count(rows)[-4_000:]


def test_a_real_runs_rows_and_those_of_another_of_its_name(tmp_path: Path) -> None:
    run = long_run(tmp_path, steps=20_000, nodes=1)
    followed, events = FollowedRows(run.metrics), read_events(run)
    rows = list(read_json_lines(run.metrics))
    found = followed.read()
    assert len(found) < len(rows) // 2
    assert astuple(account(events, found)) == pytest.approx(astuple(account(events, rows)))
    # Removed and begun anew, with fewer rows or as another file.
    lines(run.metrics, rows[:10])
    assert followed.read() == rows[:10]
    run.metrics.unlink()
    assert followed.read() == []
    lines(run.metrics, rows[:20])
    assert followed.read() == rows[:20]


@pytest.mark.parametrize(
    "odd",
    [
        {"step_time_s": None},
        {"time": "late"},
        {"step": None},
        {"energy_j": 1e999},
        {"attempt": None},
        {"step": 2**70},
    ],
)
def test_odd_rows_are_kept_as_they_are(tmp_path: Path, odd: Record) -> None:
    rows = [row(step, step * 0.5, energy_j=None) for step in range(1, 9_001)]
    rows[100] |= odd
    file = tmp_path / "metrics.jsonl"
    lines(file, rows)
    found = FollowedRows(file).read()
    assert rows[100] in found
    assert found[0] == rows[0]
    assert len(found) < 6_000
