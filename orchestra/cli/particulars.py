"""What `orchestra status RUN` says of one run beyond its row: why, where, since when, what to type. It reads
the run's events."""

from __future__ import annotations

import time
from pathlib import Path

from orchestra.cli import figures
from orchestra.cli.describe import invocation, resume_line
from orchestra.cli.spent import spent_lines
from orchestra.errors import EXIT_DO_NOT_RESTART
from orchestra.events import read_events
from orchestra.report.state import RunState
from orchestra.report.sweeps import ALIVE, ENDED_BADLY
from orchestra.report.verdict import Verdict, last_attempt, node_verdict, of_attempt
from orchestra.roll_backs import RollBack, roll_backs
from orchestra.rundir import RunDir

_WAITING = ("queued", "not started")
# By the decision that another attempt follows: on which nodes.
_NODES = {"replace": ", on other nodes where these failed", "shrink": ", on fewer nodes"}


def of_run(state: RunState) -> list[str]:
    """Return lines of a word and a text, the command to type next last."""
    run = RunDir(Path(state.path))
    events = read_events(run) if state.state != "unreadable" else []
    attempt = last_attempt(events)
    current = [] if attempt is None else of_attempt(events, attempt)
    hosts = sorted({str(event["host"]) for event in current if "host" in event and "node" in event})
    facts = {
        "reason": _reason(state, node_verdict(current)),
        "restart": _restart(state, time.time()),
        "job": _job(state),
        # Where Slurm names the nodes they stand with the job.
        "nodes": ", ".join(hosts) if state.state == "running" and not state.job_nodes else "",
        "saved": _saved(state),
        "starts": _starts(state),
        "back": _back(roll_backs(events)),
    }
    spent = spent_lines(run, events, state.state, time.time()) if events else []
    return [*(f"{word:<7} {text}" for word, text in facts.items() if text), *spent, *_next(state, run)]


def _reason(state: RunState, verdict: Verdict | None) -> str:
    if state.cause is None or state.state == "finished":
        return ""
    message = verdict.message if verdict is not None and verdict.cause == state.cause else ""
    first_line = message.partition("\n")[0]
    return f"{state.cause}: {first_line}" if first_line else state.cause


def _restart(state: RunState, now: float) -> str:
    if state.state != "restarting" or state.restart is None:
        return ""
    left = state.restart.due - now
    when = "now" if left < 1 else f"in {figures.duration(left)}"
    return f"{when}{_NODES.get(state.restart.decision, '')}"


def _job(state: RunState) -> str:
    if state.job is None:
        return ""
    if state.job_state in (None, "UNKNOWN"):
        return f"{state.job}, of which Slurm tells nothing here"
    where = f" on {state.job_nodes}" if state.job_nodes else ""
    if state.state not in ALIVE or state.job_start is None:
        return f"{state.job}, {state.job_state}{where}"
    start = state.job_start.replace("T", " ")
    when = f", expected to start {start}" if state.state in _WAITING else f" since {start}"
    return f"{state.job}, {state.job_state}{where}{when}"


def _saved(state: RunState) -> str:
    if state.checkpoint_step is None:
        return "nothing yet" if state.attempts else ""
    return f"step {state.checkpoint_step}"


def _starts(state: RunState) -> str:
    if state.attempts < 2:
        return ""
    restarts = state.attempts - 1
    return f"{state.attempts} attempts: {restarts} restart{'' if restarts == 1 else 's'}"


def _back(found: list[RollBack]) -> str:
    if not found:
        return ""
    times = "1 roll-back" if len(found) == 1 else f"{len(found)} roll-backs"
    steps = [f"{it.data_steps[0]} to {it.data_steps[1]}" for it in found if it.data_steps is not None]
    return times + (f": the data of steps {', '.join(steps)} is left out" if steps else "")


def _next(state: RunState, run: RunDir) -> list[str]:
    if state.state in ALIVE:
        eta = f"; {figures.duration(state.eta_s)} left" if state.eta_s is not None else ""
        return [f"next    `{invocation('logs', run)} -f`{eta}"]
    lines = [f"next    `{invocation('why', run)}`"] if state.state in (*ENDED_BADLY, "unknown") else []
    if state.state in ("finished", "unknown", "unreadable") or state.code == EXIT_DO_NOT_RESTART:
        return lines
    return [*lines, resume_line(run, state.checkpoint_step)]
