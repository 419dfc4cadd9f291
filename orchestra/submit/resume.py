"""Makes the next attempt of a run ready: which one it is, from where, with which configuration; once only.

It decides from the run's records, and lists the checkpoints of a place that is new to the run. Their
content is read by the ranks.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.errors import CheckpointError
from checkpointing.shelf.catalog import committed_steps
from checkpointing.storage import open_storage
from conf.schema import Config
from launchers import processes
from orchestra.config.change import changed_config
from orchestra.config.situation import Situation
from orchestra.errors import ConfigError
from orchestra.events import is_number, is_whole, read_events
from orchestra.frozen import read_config, to_yaml
from orchestra.jsonl import Record
from orchestra.report.checkpoints import newest_checkpoint
from orchestra.report.state import read_ending, read_record
from orchestra.report.verdict import last_attempt
from orchestra.rundir import RunDir
from orchestra.submit.claims import claimed_attempt, read_claim, take, write_whole
from orchestra.submit.environment import source_root
from orchestra.submit.launch import WORKER_MODULE
from orchestra.submit.revision import code_revision

# Ranks end with whoever leads them, but not within the same instant.
_ORPHANS_END_S = 10.0
_POLL_S = 0.1
# A claim of another host, or one that cannot be read yet, counts for so long.
_CLAIM_COUNTS_S = 600.0
_ALIVE = ("running", "not started")


@dataclass(frozen=True)
class NextAttempt:
    """How a run goes on: the attempt's number, the configuration before and now, and the newest checkpoint's
    step (None: from step 1).
    """

    run: RunDir
    number: int
    before: Config
    config: Config
    overrides: tuple[str, ...]
    checkpoint_step: int | None
    last_attempt: int | None
    is_finished: bool = False


def next_attempt(run: RunDir, overrides: Sequence[str], situation: Situation, now: float) -> NextAttempt:
    """Return how `run` would go on. Reads only.

    `is_finished` says that nothing is left to train. Raises ConfigError when the run is alive, when overrides
    cannot be applied, or when the rules refuse the result on this machine.
    """
    events = read_events(run)
    state, _ = read_ending(run, events, now)
    if state in _ALIVE:
        raise ConfigError(_alive(run, events, state))
    claimed = claimed_attempt(run)
    last = last_attempt(events)
    if (pending := pending_attempt(run, last, now)) is not None:
        raise ConfigError(_being_resumed(run, pending))
    number = max([-1, *(number for number in (last, claimed) if number is not None)]) + 1
    before = read_config(run.config)
    config = changed_config(_without_past_faults(before, number), overrides, situation)
    step = newest_checkpoint(events)
    is_finished = state == "finished" and config.train.steps <= before.train.steps
    if not is_finished:
        _refuse_impossible(run, config, step, is_finished_before=state == "finished")
        if step is not None and config.checkpoint.dir != before.checkpoint.dir:
            _refuse_empty_place(run, before, config, step)
    return NextAttempt(run, number, before, config, tuple(overrides), step, last, is_finished)


def _without_past_faults(config: Config, number: int) -> Config:
    """Drop rehearsed failures of earlier attempts: they may name ranks and steps that are no more."""
    to_come = [entry for entry in config.recovery.inject if entry.get("attempt", 0) >= number]
    return dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, inject=to_come))


def _refuse_impossible(run: RunDir, config: Config, step: int | None, *, is_finished_before: bool) -> None:
    steps = config.train.steps
    if step is None and is_finished_before:
        raise ConfigError(
            f"{run.name} is finished and recorded no checkpoint, so there is nothing to go on from; "
            f"train.steps={steps} needs a new run"
        )
    if step is not None and steps < step:
        raise ConfigError(
            f"train.steps={steps} ends before step {step}, which the newest checkpoint of {run.name} holds; "
            f"use more than {step}"
        )


def _refuse_empty_place(run: RunDir, before: Config, config: Config, step: int) -> None:
    """Look into a new checkpoint.dir before it is frozen: a run that goes on needs its checkpoints there."""
    old, new = (it.checkpoint.dir or str(run.checkpoints) for it in (before, config))
    try:
        newest = max(committed_steps(open_storage(new)), default=None)
    except CheckpointError as error:
        raise ConfigError(f"checkpoint.dir={new}: it cannot be looked into: {error}") from error
    if newest is None:
        raise ConfigError(
            f"checkpoint.dir={new} holds no checkpoint, but {run.name} goes on from step {step}, which lies "
            f"in {old}; copy that folder there first, or leave checkpoint.dir as it is"
        )
    if newest > config.train.steps:
        raise ConfigError(
            f"train.steps={config.train.steps} ends before step {newest}, which checkpoint.dir={new} holds; "
            f"use more than {newest}"
        )


def _alive(run: RunDir, events: list[Record], state: str) -> str:
    last = last_attempt(events)
    started = [it for it in events if it.get("event") == "attempt_started" and it.get("attempt") == last]
    record = started[-1] if started else read_record(run)
    what = "is being started" if state == "not started" else f"is running, attempt {last}"
    leader = f"process {record.get('pid', '?')} on {record.get('host', '?')} leads it"
    if not started and record.get("jobs"):
        leader = "a Slurm job is to start it (`orchestra status` tells more)"
    return (
        f"{run.name} {what}: {leader}; let it "
        f"end, or stop it first: `orchestra cancel` (which saves), or Ctrl-C there"
    )


def pending_attempt(run: RunDir, last: int | None, now: float) -> int | None:
    """Return the attempt after `last`, the newest begun, which somebody is making ready; None without one."""
    claimed = claimed_attempt(run)
    if claimed is None or (last is not None and claimed <= last):
        return None
    return claimed if _counts(run, claimed, now) else None


def _counts(run: RunDir, attempt: int, now: float) -> bool:
    """Whether the process that claimed an attempt, of which nothing was heard since, may still begin it."""
    claim = read_claim(run, attempt)
    pid, started = claim.get("pid"), claim.get("pid_started")
    if claim.get("host") == socket.gethostname() and is_whole(pid):
        process = processes.find(pid)
        return process is not None and (started is None or process.started == started)
    try:
        made = claim["time"] if is_number(claim.get("time")) else run.claim(attempt).stat().st_mtime
    except OSError:
        return False
    return now - float(made) < _CLAIM_COUNTS_S


def _being_resumed(run: RunDir, attempt: int) -> str:
    claim = read_claim(run, attempt)
    return (
        f"{run.name} is being resumed already: process {claim.get('pid', '?')} on {claim.get('host', '?')} "
        f"starts attempt {attempt}"
    )


def claim(plan: NextAttempt, command: Sequence[str]) -> None:
    """Take the attempt for this process and freeze its configuration, so that it can be started.

    Of several processes that want the same attempt one gets it; the others, and who finds ranks of the
    attempt before still alive, get a ConfigError. Whatever goes wrong later leaves a claim that the next
    resume passes over.
    """
    run = plan.run
    try:
        run.control.mkdir(exist_ok=True)
        _take(plan)
        _await_end_of_orphans(run)
        if plan.config != plan.before:
            _replace_config(plan)
        _record_resume(plan, command)
    except OSError as error:
        raise ConfigError(f"{run.path}: cannot be written: {error.strerror}; nothing was started") from error


def _take(plan: NextAttempt) -> None:
    if not take(plan.run, plan.number):
        raise ConfigError(_being_resumed(plan.run, plan.number))


def _await_end_of_orphans(run: RunDir) -> None:
    """Ranks of a command that was killed end by themselves; two attempts must not write at the same time."""
    deadline = time.monotonic() + _ORPHANS_END_S
    while orphans := processes.with_words(WORKER_MODULE, str(run.path)):
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in orphans)
            raise ConfigError(
                f"{run.name}: processes of the attempt before still run ({pids}); end them first"
            )
        time.sleep(_POLL_S)


def _replace_config(plan: NextAttempt) -> None:
    """Put the new configuration in place as one act; the older stays beside it, under its last attempt."""
    run = plan.run
    if plan.last_attempt is not None and not run.config_of_attempt(plan.last_attempt).exists():
        write_whole(run.config_of_attempt(plan.last_attempt), run.config.read_text())
    write_whole(run.config, to_yaml(plan.config))


def _record_resume(plan: NextAttempt, command: Sequence[str]) -> None:
    record = read_record(plan.run)
    revision = code_revision(source_root())
    resumes = record.get("resumes")
    entry = {
        "attempt": plan.number,
        "time": time.time(),
        "host": socket.gethostname(),
        "overrides": list(plan.overrides),
        "command": list(command),
        "code_revision": None if revision is None else dataclasses.asdict(revision),
    }
    record["resumes"] = [*(resumes if isinstance(resumes, list) else []), entry]
    write_whole(plan.run.record, json.dumps(record, indent=2) + "\n")
