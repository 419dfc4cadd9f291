"""How a run goes on: its next attempt, planned from its records, then claimed here or submitted as a job.

`plan_resume` decides which attempt it is, from which checkpoint and with which configuration; it writes
nothing, and leaves reading the checkpoints to the ranks. `claim` takes the attempt for this process
(`orchestra resume` in the foreground). `submit_resume` submits a further job, in an order that is the
contract: the turn is taken; code, configuration and script are replaced (the older ones kept); then the
intent, sbatch, and the job's id. Where Slurm refuses, everything is put back as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from checkpointing.catalog import committed_steps, split, stored_in
from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.lineage import Lineage
from checkpointing.storage import open_storage
from conf.schema import Config
from launchers import LauncherError, processes
from orchestra.config.compose import changed_config
from orchestra.config.keys import shown
from orchestra.config.machine import Situation
from orchestra.config.plugin_facts import plugin_facts
from orchestra.errors import ConfigError, LaunchError
from orchestra.recovery.history import last_attempt
from orchestra.report.run_state import RunState, job_of_record, name_of, read_ending, read_state
from orchestra.run.config_file import read_config, to_yaml
from orchestra.run.control import stop_requests
from orchestra.run.events import read_events
from orchestra.run.files import Record, write_atomically
from orchestra.run.paths import RunDir, SweepDir, read_sweep
from orchestra.run.permissions import close_to_others, open_to_group
from orchestra.run.planned_faults import still_to_come
from orchestra.run.record import (
    RunPhase,
    change_record,
    checkpoint_places,
    fallback_place,
    jobs_of,
    read_record,
)
from orchestra.run.run_lineage import lineage_of, newest_checkpoint
from orchestra.submit.claims import is_held, next_attempt_number, read_claim, take, take_turn
from orchestra.submit.fair.predecessors import Following, following, has_begun, predecessors_in
from orchestra.submit.hand_over import RunLedger, hand_over
from orchestra.submit.job import Share
from orchestra.submit.job_record import add_intent, intent, number_of_jobs
from orchestra.submit.launch import WORKER_MODULE
from orchestra.submit.new_run import code_revision, renew_snapshot, share_checkpoints
from orchestra.submit.resume_changes import ResumeChanges
from orchestra.submit.sweeps.arrays import Numbering, PlannedArray, job_of_run
from orchestra.submit.wait import is_being_ended, settled, unclear

# Ranks end with whoever leads them, but not within the same instant.
_ORPHANS_END_S = 10.0
_POLL_S = 0.1
_ALIVE = (RunPhase.running, RunPhase.restarting, RunPhase.not_started)
# Slurm's job is to begin it, or has.
_OF_A_JOB = (RunPhase.queued, RunPhase.starting)


@dataclass(frozen=True)
class ResumePlan:
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

    @property
    def changes(self) -> ResumeChanges:
        """What it will do otherwise than before."""
        return ResumeChanges(without_past_faults(self.before, self.number), self.config, self.checkpoint_step)


@dataclass(frozen=True)
class SchedulerAnswer:
    """What Slurm says of a run that is to go on: its state (None: it was never submitted), and how many jobs
    it had before Slurm was asked.
    """

    state: RunState | None
    num_jobs: int


def plan_resume(
    run: RunDir,
    overrides: Sequence[str],
    situation: Situation,
    now: float,
    answer: SchedulerAnswer | None = None,
    *,
    accepts_jump: bool = False,
) -> ResumePlan:
    """Return how `run` would go on. Reads only.

    `answer` is from `ask_scheduler`, for a run that may have been submitted. `accepts_jump`: of the learning
    rate, by a changed schedule. `is_finished` says that nothing is left to train. Raises ConfigError when the
    run is alive, when overrides cannot be applied, or when the rules refuse the result on this machine.
    """
    answer = answer or SchedulerAnswer(None, number_of_jobs(run))
    _refuse_being_submitted(run, now)
    events = read_events(run)
    state = read_ending(run, events, now)[0] if answer.state is None else answer.state.state
    if state in _OF_A_JOB and answer.state is not None:
        raise ConfigError(_has_job(run, answer.state))
    if state in _ALIVE and not _is_started_by_parent(run, state):
        raise ConfigError(_alive(run, events, state))
    last = last_attempt(events)
    if (pending := pending_attempt(run, last, now)) is not None:
        raise ConfigError(_being_resumed(run, pending))
    number = next_attempt_number(run, last)
    before, step = read_config(run.config), newest_checkpoint(events)
    if state is RunPhase.finished and not overrides:
        # Nothing is checked, and no cluster is asked, for a run that has nothing left to train.
        return ResumePlan(run, number, before, before, (), step, last, True, answer.num_jobs)
    here = dataclasses.replace(situation, from_step=step or 0)
    config = changed_config(without_past_faults(before, number), overrides, here)
    is_finished = state is RunPhase.finished and config.train.steps <= before.train.steps
    if not is_finished:
        _refuse_impossible(run, config, step, is_finished_before=state is RunPhase.finished)
        _refuse_left_behind(run, before, lineage_of(events))
        if step is not None:
            _refuse_other_state(before, config)
        if step is not None and config.checkpoint.dir != before.checkpoint.dir:
            _refuse_empty_place(run, before, config, step, lineage_of(events))
        if config.checkpoint.fallback_dir != before.checkpoint.fallback_dir:
            _refuse_lost_fallback(run, before, config, lineage_of(events))
    plan = ResumePlan(run, number, before, config, tuple(overrides), step, last, is_finished, answer.num_jobs)
    if not is_finished:
        plan.changes.refuse_other_past(run)
        plan.changes.refuse_jump(accepts_jump)
    return plan


def ask_scheduler(run: RunDir, now: float) -> SchedulerAnswer:
    """Return what Slurm says of a run, if it was submitted.

    Waits a while for the end of a job whose attempt has ended: Slurm may be about to queue it again. Raises
    LaunchError when Slurm cannot be asked, or is not the Slurm that has the job: nobody knows then whether a
    job of the run waits or trains.
    """
    # First: a job that is submitted later is then seen as a change.
    num_jobs = number_of_jobs(run)
    own = read_state(run, now)
    if own.submitted is None or own.state is RunPhase.finished:
        return SchedulerAnswer(None, num_jobs)
    (state,), problems = settled([run], [own])
    if problems and shutil.which("squeue") is None and own.state.ended_early:
        # A machine without the cluster, and the run's own last word is that it ended.
        return SchedulerAnswer(None, num_jobs)
    if problems:
        why = "; ".join(problems)
        raise LaunchError(f"{why}: whether a job trains {name_of(run)} is not known; nothing was done")
    if (why_unclear := unclear(state)) is not None:
        raise LaunchError(why_unclear)
    if is_being_ended(state):
        raise LaunchError(
            f"{name_of(run)}: its attempt has ended, its job {state.job} has not ({state.job_state}): Slurm "
            f"may start it again, so nothing was done. Try again when `squeue --jobs={state.job}` shows it "
            f"no more"
        )
    return SchedulerAnswer(state, num_jobs)


def _is_started_by_parent(run: RunDir, state: RunPhase) -> bool:
    """Whether this process is how a sweep on this machine starts the run for the first time."""
    return state is RunPhase.not_started and read_record(run).get("pid") == os.getppid()


def _has_job(run: RunDir, state: RunState) -> str:
    job = f"job {state.job}" if state.job else "a job"
    waits = "is being started for it"
    if state.state is RunPhase.queued:
        label = state.submitted.label if state.submitted else None
        starts = read_events(run, ("attempt_started",)) if state.attempts and label else []
        is_again = any(event["event"] == "attempt_started" and event.get("job") == label for event in starts)
        waits = "is started again by Slurm itself" if is_again else "waits in Slurm's queue for it"
    why = f" ({state.cause})" if state.cause else ""
    return (
        f"{name_of(run)}: {job} {waits}{why}, and goes on from its newest checkpoint; to change "
        f"something, take it out of the queue first: `orchestra cancel {name_of(run)}`, then resume it"
    )


def _refuse_being_submitted(run: RunDir, now: float) -> None:
    """Raise ConfigError while a living process waits for Slurm's answer about the run's newest job."""
    if is_being_submitted(run, now):
        raise ConfigError(
            f"{name_of(run)} is being submitted by another command, which waits for Slurm's answer; see "
            f"`orchestra status {name_of(run)}`"
        )


def is_being_submitted(run: RunDir, now: float) -> bool:
    """Tell whether a living process waits for Slurm's answer about the run's newest job."""
    return any(is_held(file, now) for file in _claims_of_submitter(run))


def _claims_of_submitter(run: RunDir) -> list[Path]:
    """Return the claims of whoever submits the run's newest job; none where its number is known."""
    record = read_record(run)
    job = job_of_record(run, record)
    if job is None or job.job is not None:
        return []
    if job.task is None:
        number = len(jobs_of(record)) - 1
        return sorted(run.control.glob(f"{run.turn(number, 0).name.rpartition('-')[0]}-*.claim"))
    sweep = SweepDir(run.path.parent)
    try:
        return [sweep.claim(array.number) for array in read_sweep(sweep).arrays if array.token == job.token]
    except (OSError, ConfigError):
        return []


def without_past_faults(config: Config, number: int) -> Config:
    """Drop rehearsed failures of earlier attempts: they may name ranks and steps that are no more."""
    to_come = still_to_come(config.recovery.inject, number)
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


def _refuse_other_state(before: Config, config: Config) -> None:
    """Ask a plugged optimizer whose options change what state it keeps with them: ranks cannot restore more
    or less of it than the checkpoints hold.
    """
    if before.optim.target is None or before.optim.options == config.optim.options:
        return
    was, becomes = (plugin_facts(each).state_bytes for each in (before, config))
    if was is not None and becomes is not None and was != becomes:
        options, kept = shown(config.optim.options), shown(before.optim.options)
        raise ConfigError(
            f"optim.options={options}: {config.optim.target} keeps {becomes:g} bytes of state for each "
            f"parameter with them, and {was:g} with optim.options={kept}, of which the checkpoints are; "
            "leave those that decide on its state as they are, or begin a new run"
        )


def _refuse_empty_place(run: RunDir, before: Config, config: Config, step: int, lineage: Lineage) -> None:
    """Look into a new checkpoint.dir before it is frozen: a run that goes on needs its checkpoints there."""
    old, new = (each.checkpoint.dir or str(run.checkpoints) for each in (before, config))
    try:
        newest = max(_steps_in(run, config, lineage), default=None)
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


def _refuse_left_behind(run: RunDir, before: Config, lineage: Lineage) -> None:
    """Look whether the newest checkpoint lies where the run's folder was, which was renamed while it trained:
    its ranks went on saving there.
    """
    if before.checkpoint.dir is not None or before.run.name is None:
        return
    old = RunDir(Path(before.run.dir) / before.run.name)
    if not old.checkpoints.is_dir() or old.has_records():
        return
    # What cannot be looked into is left to the ranks, which wait for it.
    with contextlib.suppress(CheckpointError):
        there = committed_steps(open_storage(str(old.checkpoints)), lineage)
        here = max(_steps_in(run, before, lineage), default=0)
        if there and there[-1] > here:
            raise ConfigError(
                f"step {there[-1]}, the newest checkpoint of {name_of(run)}, lies in {old.checkpoints}: the "
                f"run was renamed to {run.path} while it trained, and that folder has step {here}; move what "
                f"is in {old.checkpoints} to {run.checkpoints} first, or remove it to go on from step {here}"
            )


def _refuse_lost_fallback(run: RunDir, before: Config, config: Config, lineage: Lineage) -> None:
    """Look whether the newest checkpoint lies in the fallback that the run is no longer to have."""
    old, new = (fallback_place(run, each.checkpoint.fallback_dir) for each in (before, config))
    # One that cannot be looked into may be given up.
    with contextlib.suppress(CheckpointError):
        there = committed_steps(open_storage(old), lineage) if old is not None else []
        if there and there[-1] > max(_steps_in(run, config, lineage), default=0):
            given, target = config.checkpoint.fallback_dir, new or config.checkpoint.dir or run.checkpoints
            raise ConfigError(
                f"checkpoint.fallback_dir={given or 'null'}: the newest checkpoint of {name_of(run)}, step "
                f"{there[-1]}, lies in {old}; copy what is in that folder to {target} first, or leave "
                "checkpoint.fallback_dir as it is"
            )


def _steps_in(run: RunDir, config: Config, lineage: Lineage) -> list[int]:
    """Return the steps on the line in all places of a run, ascending."""
    found = stored_in([open_storage(place) for place in checkpoint_places(run, config.checkpoint)])
    return [checkpoint.step for checkpoint in split(found, lineage)[0]]


def _alive(run: RunDir, events: list[Record], state: RunPhase) -> str:
    last = last_attempt(events)
    started = [
        event for event in events if event.get("event") == "attempt_started" and event.get("attempt") == last
    ]
    record = started[-1] if started else read_record(run)
    what = "is being started" if state is RunPhase.not_started else f"is running, attempt {last}"
    leader = f"process {record.get('pid', '?')} on {record.get('host', '?')} leads it"
    if not started and jobs_of(record):
        leader = "a Slurm job is to start it (`orchestra status` tells more)"
    if state is RunPhase.restarting:
        return (
            f"{name_of(run)} is restarting after attempt {last}: {leader}, and the next begins by itself; "
            f"to change something, stop it first: `orchestra cancel {name_of(run)}`"
        )
    if last is not None and stop_requests.read_request(run, last) is not None:
        return f"{name_of(run)} {what}: {leader}; it was asked to stop already: let it save and end"
    return (
        f"{name_of(run)} {what}: {leader}; let it "
        f"end, or stop it first: `orchestra cancel {name_of(run)}` (which saves), or Ctrl-C there"
    )


def pending_attempt(run: RunDir, last: int | None, now: float) -> int | None:
    """Return the attempt after `last`, the newest begun, which somebody is making ready; None without one."""
    claimed = stop_requests.claimed_attempt(run)
    if claimed is None or (last is not None and claimed <= last):
        return None
    return claimed if is_held(run.claim(claimed), now) else None


def _being_resumed(run: RunDir, attempt: int) -> str:
    claim = read_claim(run.claim(attempt))
    return (
        f"{name_of(run)} is being resumed already: process {claim.get('pid', '?')} on "
        f"{claim.get('host', '?')} starts attempt {attempt}"
    )


def claim(plan: ResumePlan, command: Sequence[str]) -> None:
    """Take the attempt for this process and freeze its configuration, so that it can be started.

    Of several processes that want the same attempt one gets it; the others, and who finds ranks of the
    attempt before still alive, get a ConfigError. Whatever goes wrong later leaves a claim that the next
    resume passes over.
    """
    run = plan.run
    try:
        _close(run, plan.config)
        run.control.mkdir(exist_ok=True)
        if not take(run, plan.number):
            raise ConfigError(_being_resumed(run, plan.number))
        if number_of_jobs(run) != plan.num_jobs:
            raise ConfigError(
                f"{name_of(run)} is being resumed already: a job was submitted for it meanwhile"
            )
        _await_end_of_orphans(run)
        _freeze(plan)
        record_resume(plan, command)
    except OSError as error:
        raise ConfigError(
            f"{run.path}: cannot be read or written: {error.strerror}; nothing was started"
        ) from error


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


def freeze_config(run: RunDir, config: Config, last_attempt: int | None) -> None:
    """Put a changed configuration in place as one act; the older stays beside it, under its last attempt."""
    before, text = run.config.read_text(), to_yaml(config)
    if text == before:
        return
    if last_attempt is not None and not run.config_of_attempt(last_attempt).exists():
        write_atomically(run.config_of_attempt(last_attempt), before)
    write_atomically(run.config, text)


def _freeze(plan: ResumePlan) -> None:
    """Freeze the plan's configuration; one without changes stays as an older version wrote it."""
    if plan.config != plan.before:
        freeze_config(plan.run, plan.config, plan.last_attempt)


def record_resume(plan: ResumePlan, command: Sequence[str]) -> None:
    """Write into the run's record who goes on with it, how, and with which code."""
    entry = {
        "attempt": plan.number,
        "time": time.time(),
        "host": socket.gethostname(),
        "overrides": list(plan.overrides),
        "command": list(command),
        "code_revision": code_revision(),
    }

    def with_entry(record: Record) -> Record:
        resumes = record.get("resumes")
        return {**record, "resumes": [*(resumes if isinstance(resumes, list) else []), entry]}

    change_record(plan.run, with_entry)


@dataclass(frozen=True)
class ResumeJob:
    """How a run goes on, and the job that is to train it."""

    next: ResumePlan
    job: PlannedArray

    @property
    def run(self) -> RunDir:
        return self.next.run

    @property
    def token(self) -> str:
        return self.job.array.token

    def script(self) -> str:
        """Return the batch script, answer for answer."""
        return self.job.script()


def resume_job(plan: ResumePlan, share: Share, following: Following | None = None) -> ResumeJob:
    """Return the job of a run that goes on, or that is still to begin after others. Starts and writes
    nothing.
    """
    numbering = Numbering(
        plan.run.name, stop_requests.user_name(), time.time(), following=following or Following()
    )
    return ResumeJob(plan, job_of_run(plan.config, plan.run, share, numbering))


def following_still(run: RunDir, now: float, *, is_dry: bool = False) -> Following:
    """Return what a run waits for that has not begun and is to begin after others. Raises as `following`
    does.
    """
    predecessors = () if has_begun(run) else predecessors_in(read_record(run))
    return following(predecessors, now, is_dry=is_dry) if predecessors else Following()


def submit_resume(plan: ResumeJob, command: Sequence[str]) -> str:
    """Submit the job and return its id; of several processes that want to, one does.

    Raises ConfigError where another one does it, where Slurm refuses, or where nothing can be written: all is
    then as it was; LaunchError when it stays unknown whether Slurm has the job.
    """
    run = plan.run
    try:
        turn = take_turn(run, plan.next.num_jobs, time.time())
        if turn is None or _has_changed(plan.next):
            if turn is not None:
                turn.unlink(missing_ok=True)
            raise ConfigError(
                f"{name_of(run)} is being resumed already by another command; see `orchestra status`"
            )
        with ExitStack() as undo:
            undo.callback(turn.unlink, missing_ok=True)
            _replace(plan, undo)
            record_resume(plan.next, command)
            add_intent(run, intent(run.name, plan.token, plan.next.number))
            try:
                outcome = hand_over(RunLedger(run, plan.next.number), [plan.job])
            except (LaunchError, KeyboardInterrupt):
                # Slurm may have the job: what it needs stays.
                undo.pop_all()
                raise
            undo.pop_all()
            return str(outcome.accepted[0].id)
    except LauncherError as error:
        raise LaunchError(f"{error}; nothing was submitted") from error
    except OSError as error:
        raise ConfigError(
            f"{run.path}: cannot be read or written: {error.strerror}; nothing was submitted"
        ) from error


def _close(run: RunDir, config: Config) -> None:
    """Let others write nothing that the next attempt executes or obeys: older runs took any umask."""
    open_to_group(config.run.group)
    close_to_others((run.path, run.control, run.code, run.batch_script, run.config), config.run.group)
    share_checkpoints(run, config)


def _has_changed(plan: ResumePlan) -> bool:
    """Whether somebody else went on with the run since the plan was made."""
    pending = pending_attempt(plan.run, plan.last_attempt, time.time())
    return pending is not None or number_of_jobs(plan.run) != plan.num_jobs


def _replace(plan: ResumeJob, undo: ExitStack) -> None:
    """Put code, configuration, script and record in place; `undo` brings back what was there."""
    run = plan.run
    _close(run, plan.next.config)
    undo.callback(_restorer(run.record))
    undo.callback(_restorer(run.config))
    undo.callback(_restorer(run.batch_script))
    older = run.code_of_attempt(plan.next.last_attempt or 0) if run.code.is_dir() else None
    if renew_snapshot(run.code, older):
        undo.callback(_bring_back, run.code, older)
    run.job_logs.mkdir(parents=True, exist_ok=True)
    _freeze(plan.next)
    write_atomically(run.batch_script, plan.script())
    # No process of this machine leads it.
    change_record(run, lambda record: {**record, "pid": None, "pid_started": None})


def _restorer(file: Path) -> Callable[[], None]:
    text = file.read_text() if file.is_file() else None

    def restore() -> None:
        if text is None:
            file.unlink(missing_ok=True)
        elif not file.is_file() or file.read_text() != text:
            write_atomically(file, text)

    return restore


def _bring_back(code: Path, older: Path | None) -> None:
    shutil.rmtree(code, ignore_errors=True)
    if older is not None:
        with contextlib.suppress(OSError):
            older.rename(code)
