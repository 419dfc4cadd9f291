"""Makes the next attempt of a run ready: which one it is, from where, with which configuration; once only.

It decides from the run's records, and lists the checkpoints of a place that is new to the run. Their
content is read by the ranks.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import CheckpointError
from checkpointing.shelf.catalog import committed_steps
from checkpointing.storage import open_storage
from conf.schema import Config
from launchers import processes
from launchers.slurm.states import SubmittedJob
from orchestra.config.change import changed_config
from orchestra.config.situation import Situation
from orchestra.errors import ConfigError, LaunchError
from orchestra.events import read_events
from orchestra.frozen import read_config, to_yaml
from orchestra.jsonl import Record
from orchestra.report.checkpoints import newest_checkpoint
from orchestra.report.state import RunState, job_of_record, name_of, read_ending, read_record, read_state
from orchestra.report.verdict import last_attempt
from orchestra.rundir import RunDir
from orchestra.submit.claims import (
    claimed_attempt,
    is_held,
    next_attempt_number,
    read_claim,
    take,
    write_whole,
)
from orchestra.submit.environment import source_root
from orchestra.submit.launch import WORKER_MODULE
from orchestra.submit.revision import code_revision
from orchestra.submit.settling import is_being_ended, settled, unclear
from orchestra.sweepdir import SweepDir, read_sweep

# Ranks end with whoever leads them, but not within the same instant.
_ORPHANS_END_S = 10.0
_POLL_S = 0.1
_ALIVE = ("running", "not started")
_ENDED = ("stopped", "failed", "interrupted")
# Slurm's job is to begin it, or has.
_OF_A_JOB = ("queued", "starting")


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
    # Jobs that were submitted for it so far.
    num_jobs: int = 0


@dataclass(frozen=True)
class Word:
    """What was found out about a run before it is to go on: its state with Slurm asked (None: it was never
    submitted), and how many jobs it had before that was asked.
    """

    told: RunState | None
    num_jobs: int


def next_attempt(
    run: RunDir, overrides: Sequence[str], situation: Situation, now: float, word: Word | None = None
) -> NextAttempt:
    """Return how `run` would go on. Reads only.

    `word` is from `asked`, for a run that may have been submitted. `is_finished` says that nothing is left to
    train. Raises ConfigError when the run is alive, when overrides cannot be applied, or when the rules
    refuse the result on this machine.
    """
    word = word or Word(None, number_of_jobs(run))
    told = word.told
    _refuse_being_submitted(run, now)
    events = read_events(run)
    state = _state(read_ending(run, events, now)[0], events, told)
    if state in _OF_A_JOB and told is not None:
        raise ConfigError(_has_job(run, told))
    if state in _ALIVE:
        raise ConfigError(_alive(run, events, state))
    last = last_attempt(events)
    if (pending := pending_attempt(run, last, now)) is not None:
        raise ConfigError(_being_resumed(run, pending))
    number = next_attempt_number(run, last)
    before = read_config(run.config)
    config = changed_config(_without_past_faults(before, number), overrides, situation)
    step = newest_checkpoint(events)
    is_finished = state == "finished" and config.train.steps <= before.train.steps
    if not is_finished:
        _refuse_impossible(run, config, step, is_finished_before=state == "finished")
        if step is not None and config.checkpoint.dir != before.checkpoint.dir:
            _refuse_empty_place(run, before, config, step)
    return NextAttempt(run, number, before, config, tuple(overrides), step, last, is_finished, word.num_jobs)


def asked(run: RunDir, now: float) -> Word:
    """Return what Slurm says of a run, if it was submitted.

    Waits a while for the end of a job whose attempt has ended: Slurm may be about to queue it again. Raises
    LaunchError when Slurm cannot be asked, or is not the Slurm that has the job: nobody knows then whether a
    job of the run waits or trains.
    """
    # First: a job that is submitted later is then seen as a change.
    num_jobs = number_of_jobs(run)
    own = read_state(run, now)
    if own.submitted is None or own.state == "finished":
        return Word(None, num_jobs)
    (told,), problems = settled([run], [own])
    if problems and shutil.which("squeue") is None and own.state in _ENDED:
        # A machine without the cluster, and the run's own last word is that it ended.
        return Word(None, num_jobs)
    if problems:
        why = "; ".join(problems)
        raise LaunchError(f"{why}: whether a job trains {name_of(run)} is not known; nothing was done")
    if (why_unclear := unclear(told)) is not None:
        raise LaunchError(why_unclear)
    if is_being_ended(told):
        raise LaunchError(
            f"{name_of(run)}: its attempt has ended, its job {told.job} has not ({told.job_state}): Slurm "
            f"may start it again, so nothing was done. Try again when `squeue --jobs={told.job}` shows it "
            f"no more"
        )
    return Word(told, num_jobs)


def number_of_jobs(run: RunDir) -> int:
    """Return how many jobs were submitted for a run, intents included."""
    jobs = read_record(run).get("jobs")
    return len(jobs) if isinstance(jobs, list) else 0


def _state(own: str, events: list[Record], told: RunState | None) -> str:
    """Return a run's state; of an attempt in the foreground Slurm knows nothing."""
    if told is None:
        return own
    last = last_attempt(events)
    starts = [it for it in events if it["event"] == "attempt_started" and it["attempt"] == last]
    is_in_foreground = bool(starts) and "job" not in starts[-1]
    return own if own in _ALIVE and is_in_foreground and told.state not in _OF_A_JOB else told.state


def _has_job(run: RunDir, told: RunState) -> str:
    job = f"job {told.job}" if told.job else "a job"
    waits = "waits in Slurm's queue for it" if told.state == "queued" else "is being started for it"
    if told.state == "queued" and told.attempts and told.submitted and _began_it(run, told.submitted):
        waits = "is started again by Slurm itself"
    why = f" ({told.cause})" if told.cause else ""
    return (
        f"{name_of(run)}: {job} {waits}{why}, and goes on from its newest checkpoint; to change "
        f"something, take it out of the queue first: `orchestra cancel {name_of(run)}`, then resume it"
    )


def _began_it(run: RunDir, job: SubmittedJob) -> bool:
    starts = read_events(run, ("attempt_started",))
    return any(it["event"] == "attempt_started" and it.get("job") == job.label for it in starts)


def _refuse_being_submitted(run: RunDir, now: float) -> None:
    """Raise ConfigError while a living process waits for Slurm's answer about the run's newest job."""
    if any(is_held(file, now) for file in _claims_of_submitter(run)):
        raise ConfigError(
            f"{name_of(run)} is being submitted by another command, which waits for Slurm's answer; see "
            f"`orchestra status {name_of(run)}`"
        )


def _claims_of_submitter(run: RunDir) -> list[Path]:
    """Return the claims of whoever submits the run's newest job; none where its number is known."""
    record = read_record(run)
    job = job_of_record(run, record)
    if job is None or job.job is not None:
        return []
    if job.task is None:
        number = len(record["jobs"]) - 1
        return sorted(run.control.glob(f"{run.turn(number, 0).name.rpartition('-')[0]}-*.claim"))
    sweep = SweepDir(run.path.parent)
    try:
        return [sweep.claim(it.number) for it in read_sweep(sweep).arrays if it.token == job.token]
    except (OSError, ConfigError):
        return []


def _without_past_faults(config: Config, number: int) -> Config:
    """Drop rehearsed failures of earlier attempts: they may name ranks and steps that are no more."""
    to_come = [entry for entry in config.recovery.inject if entry.get("attempt", 0) >= number]
    return dataclasses.replace(config, recovery=dataclasses.replace(config.recovery, inject=to_come))


def _refuse_impossible(run: RunDir, config: Config, step: int | None, *, is_finished_before: bool) -> None:
    steps = config.train.steps
    if step is None and is_finished_before:
        raise ConfigError(
            f"{name_of(run)} is finished and recorded no checkpoint, so there is nothing to go on from; "
            f"train.steps={steps} needs a new run"
        )
    if step is not None and steps < step:
        raise ConfigError(
            f"train.steps={steps} ends before step {step}, which the newest checkpoint of {name_of(run)} "
            f"holds; use more than {step}"
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
            f"checkpoint.dir={new} holds no checkpoint, but {name_of(run)} goes on from step {step}, which "
            f"lies in {old}; copy that folder there first, or leave checkpoint.dir as it is"
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
        f"{name_of(run)} {what}: {leader}; let it "
        f"end, or stop it first: `orchestra cancel` (which saves), or Ctrl-C there"
    )


def pending_attempt(run: RunDir, last: int | None, now: float) -> int | None:
    """Return the attempt after `last`, the newest begun, which somebody is making ready; None without one."""
    claimed = claimed_attempt(run)
    if claimed is None or (last is not None and claimed <= last):
        return None
    return claimed if is_held(run.claim(claimed), now) else None


def _being_resumed(run: RunDir, attempt: int) -> str:
    claim = read_claim(run, attempt)
    return (
        f"{name_of(run)} is being resumed already: process {claim.get('pid', '?')} on "
        f"{claim.get('host', '?')} starts attempt {attempt}"
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
        if number_of_jobs(run) != plan.num_jobs:
            raise ConfigError(
                f"{name_of(run)} is being resumed already: a job was submitted for it meanwhile"
            )
        _await_end_of_orphans(run)
        freeze(plan)
        record_resume(plan, command)
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
                f"{name_of(run)}: processes of the attempt before still run ({pids}); end them first"
            )
        time.sleep(_POLL_S)


def freeze(plan: NextAttempt) -> None:
    """Put the new configuration in place as one act; the older stays beside it, under its last attempt."""
    run = plan.run
    if plan.config == plan.before:
        return
    if plan.last_attempt is not None and not run.config_of_attempt(plan.last_attempt).exists():
        write_whole(run.config_of_attempt(plan.last_attempt), run.config.read_text())
    write_whole(run.config, to_yaml(plan.config))


def record_resume(plan: NextAttempt, command: Sequence[str]) -> None:
    """Write into the run's record who goes on with it, how, and with which code."""
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
