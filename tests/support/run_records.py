"""Runs and sweeps as commands leave them on disk, and attempts as an agent on another host writes them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from support.fake_slurm import ME

from launchers import processes
from orchestra.report.run_state import RunState, read_state
from orchestra.report.scheduler import with_scheduler
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir, Sweep, SweepArray, SweepDir, SweepMember, to_json

TOKEN = "orchestra:aa"


def submitted(parent: Path, name: str = "one", job: str | None = "7", **more: object) -> RunDir:
    """Return a run in parent/runs that was submitted as `job` (None: its id was lost), `more` of the job."""
    run = RunDir(parent / "runs" / name)
    run.job_logs.mkdir(parents=True)
    now = time.time()
    entry = {"token": f"orchestra:{name}", "id": job, "name": name, "user": ME, "submitted": now, **more}
    run.record.write_text(json.dumps({"name": name, "created": now, "pid": None, "jobs": [entry]}))
    return run


def submitted_sweep(parent: Path, num_members: int, array: str | None = "50") -> SweepDir:
    """Return parent/runs/lr-sweep, submitted as one array; None: the array's id was lost."""
    sweep, now = SweepDir(parent / "runs" / "lr-sweep"), time.time()
    job = {"token": TOKEN, "id": None, "name": sweep.name, "user": ME, "submitted": now}
    members = []
    for index in range(num_members):
        run = sweep.member(index)
        run.path.mkdir(parents=True)
        jobs = [{**job, "task": index}]
        record = {"sweep": sweep.name, "member": index, "pid": None, "steps": 9, "jobs": jobs}
        run.record.write_text(json.dumps(record))
        overrides = (f"optim.lr={index}e-4", f"parallelism.tp={index}")
        members.append(SweepMember(index, str(index), overrides))
    arrays = (SweepArray(0, TOKEN, 0, tuple(range(num_members)), sweep.name, ME, now, array),)
    sweep.record.write_text(to_json(Sweep(sweep.name, "x", (), tuple(members), arrays, now)))
    return sweep


def started_elsewhere(run: RunDir, attempt: int = 0, **more: object) -> EventWriter:
    """Start an attempt on another host; return its leader's writer."""
    events = EventWriter(run, node_writer(attempt, 0), attempt, host="node1")
    events.write("attempt_started", pid=1, pid_started=1, **more)
    return events


def state_by_slurm(run: RunDir, later_s: float = 0.0) -> RunState:
    """Return a run's state so much later, after Slurm was asked about it."""
    ((state,), _) = with_scheduler([run], [read_state(run, time.time() + later_s)])
    return state


def led_here(run: RunDir, attempt: int = 0, ended: int | None = None, **place: str) -> RunDir:
    """Start an attempt that this very process leads; it has ended where there is a code. Return the run."""
    if not run.record.exists():
        run.path.mkdir(parents=True)
        run.record.write_text(json.dumps({"name": run.name, "created": time.time(), "pid": None, "jobs": []}))
    leader = processes.find(os.getpid())
    assert leader is not None
    events = EventWriter(run, node_writer(attempt, 0), attempt, **place)
    events.write("attempt_started", pid=leader.pid, pid_started=leader.started)
    if ended is not None:
        events.write("failed" if ended else "finished", node=0, code=ended, cause="x")
    return run


def age_files(run: RunDir, by_s: float = 120.0) -> None:
    """Let the run's events be as old as those of an attempt that ended a while ago."""
    before = time.time() - by_s
    for file in run.events.iterdir():
        os.utime(file, (before, before))
