"""Stops runs wherever they are: attempts through their control/ folder, jobs that wait by taking them out of
Slurm's queue. It waits for nothing.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launchers import LauncherError, SlurmRefused
from launchers.slurm import sbatch
from launchers.slurm.queue import GONE, RUNNING, UNKNOWN, find_by_token
from orchestra.errors import ConfigError, OrchestraError
from orchestra.recovery.history import last_attempt
from orchestra.report.run_state import RunState, read_state
from orchestra.report.scheduler import with_scheduler
from orchestra.run.config_file import read_config
from orchestra.run.control import stop_requests
from orchestra.run.control.chosen_alternative import NONE, choose_alternative
from orchestra.run.control.member_places import end_place, newest_place, take_place
from orchestra.run.control.stop_requests import StopRequest, user_name
from orchestra.run.events import EventWriter, is_whole, read_events
from orchestra.run.paths import RunDir, SweepDir, read_sweep
from orchestra.run.permissions import who_may_write
from orchestra.run.record import RunPhase, jobs_of, newest_job, read_record
from orchestra.submit.claims import upcoming_attempt
from orchestra.submit.resume_run import is_being_submitted, pending_attempt

# States of runs that may hear a request: of a silent one on another host nobody knows.
_MAY_HEAR = (RunPhase.running, RunPhase.restarting, RunPhase.not_started, RunPhase.unknown, RunPhase.starting)
# Own records that say nothing new, and Slurm's word that the job lives all the same.
_SILENT = ((RunPhase.unknown, RunPhase.running), (RunPhase.failed, RunPhase.restarting))


class Way(enum.Enum):
    """How a run is stopped."""

    nothing = "nothing runs that could be stopped"
    # Its attempt reads the request, or will.
    request = "a request in its control/ folder"
    # It waits for a place in jobs that others share.
    place = "it is taken off the list of its sweep's jobs"
    # Its job waits in Slurm's queue.
    queue = "its job is taken out of the queue"
    # --now, and its records say nothing of what its job does.
    kill = "its job is ended by Slurm"


@dataclass(frozen=True)
class Cancellation:
    """What stopping a run comes to."""

    run: RunDir
    name: str
    state: RunPhase
    way: Way = Way.nothing
    # The attempt that is meant; None where there is nothing that could be stopped.
    attempt: int | None = None
    # A request that says as much as the one that is asked for stands already.
    earlier: StopRequest | None = None
    # The job's id as Slurm writes it, and what it is known by.
    job: str | None = None
    token: str | None = None
    # Those that wait beside it, where the first one that starts is to train the run.
    other_jobs: tuple[str, ...] = ()
    # By what those are known whose id was not recorded.
    other_tokens: tuple[str, ...] = ()
    # Slurm could not be asked whether a job waits; and afterwards: it could not be taken out of the queue.
    is_unreached: bool = False
    # Slurm's words where it refused to, as for a job of somebody else's, and whose job it is.
    refusal: str | None = None
    user: str | None = None
    # Why it could not be asked, or recorded what was done: an error, told after the others.
    problem: str | None = None


def cancellations(
    runs: Sequence[RunDir], now: float, *, at_once: bool = False
) -> tuple[list[Cancellation], list[str]]:
    """Return what requests to stop `runs` would do at Unix time `now`, and why Slurm could not be asked if it
    could not. Reads only; Slurm is asked once for all.
    """
    own = [read_state(run, now) for run in runs]
    states, problems = with_scheduler(runs, own)
    triples = zip(runs, own, states, strict=True)
    return [_planned(run, before, state, now, at_once) for run, before, state in triples], problems


def _planned(run: RunDir, own: RunState, state: RunState, now: float, at_once: bool) -> Cancellation:
    token = None if own.submitted is None else own.submitted.token
    user = None if own.submitted is None else own.submitted.user
    plan = Cancellation(run, state.name, state.state, job=state.job, token=token, user=user)
    if state.state.goes_on and (original := _copied_from(own, run)) is not None:
        problem = (
            f"{state.name} is a copy of {original.path}, and job {state.job or '?'} is that run's: "
            f"`orchestra cancel {original.path}` stops it"
        )
        return replace(plan, attempt=upcoming_attempt(run), problem=problem)
    is_shared = own.submitted is not None and own.submitted.is_shared
    if own.submitted is not None and own.submitted.alternatives:
        jobs = (own.submitted, *own.submitted.alternatives)
        labels = [job.label for job in jobs if job.label not in (None, state.job)]
        tokens = [job.token for job in jobs if job.label is None]
        plan = replace(plan, other_jobs=tuple(map(str, labels)), other_tokens=tuple(tokens))
    last, following = last_attempt(read_events(run, ("attempt_started",))), upcoming_attempt(run)
    if state.state is RunPhase.queued:
        reachable = state.job is not None and state.job_state != UNKNOWN
        way = Way.place if is_shared else Way.queue if reachable else Way.request
        plan = replace(plan, attempt=following, way=way)
    elif (pending := pending_attempt(run, last, now)) is not None:
        plan = replace(plan, attempt=pending, way=Way.request, state=RunPhase.being_resumed)
    elif state.state in _MAY_HEAR:
        attempt = following if last is None or own.state is RunPhase.queued else last
        silent = state.state is RunPhase.starting or (own.state, state.state) in _SILENT
        # Its processes stand still and would read a request only when they go on.
        silent |= state.job_state == "SUSPENDED"
        way = Way.kill if at_once and silent and state.job and not is_shared else Way.request
        plan = replace(plan, attempt=attempt, way=way)
    elif own.state is RunPhase.stopped and state.job_state in RUNNING:
        # Its job is about to end or to go on by itself, which it does not do when it finds the request.
        plan = replace(plan, attempt=last, way=Way.request)
    if plan.attempt is None and is_being_submitted(run, now):
        # Slurm may have its job any moment: that reads the request when it begins.
        plan = replace(plan, attempt=following, way=Way.request, state=RunPhase.being_resumed)
    if plan.attempt is None:
        return plan
    requests = stop_requests.read_requests(run, plan.attempt)
    # Only another cancel says as much: after a warning before the time limit the run goes on by itself.
    cancels = [request for request in requests if request.reason == stop_requests.CANCEL]
    earlier = next((request for request in cancels if request.at_once or not at_once), None)
    unreached = state.job_state == UNKNOWN and own.state.is_before_start
    # What has not begun may still wait for a job: with no answer, that is tried as well.
    return replace(plan, earlier=earlier, is_unreached=unreached)


def _copied_from(own: RunState, run: RunDir) -> RunDir | None:
    """Return the run whose job a copy of its directory names as well; None where this is no copy: a run that
    was merely renamed or moved lies in one place. Members of sweeps, of which there may be thousands, are
    not looked at: each takes the reading of a configuration, 60 ms.
    """
    job = own.submitted
    if job is None or job.task is not None or job.is_shared:
        return None
    try:
        frozen = read_config(run.config).run
    except (OSError, ConfigError):
        return None
    if frozen.name is None:
        return None
    original = RunDir(Path(frozen.dir) / frozen.name)
    is_its = any(entry.get("token") == job.token for entry in jobs_of(read_record(original)))
    return original if is_its and not original.path.samefile(run.path) else None


def carry_out(plans: Sequence[Cancellation], *, at_once: bool = False) -> list[Cancellation]:
    """Do what the plans say, and return what became of each: one that had just begun was asked instead.

    What cannot be written is the `problem` of its plan.
    """
    plans = [
        _of_none(plan) if plan.way is Way.queue and (plan.other_jobs or plan.other_tokens) else plan
        for plan in plans
    ]
    of_slurm = [plan for plan in plans if plan.way in (Way.queue, Way.kill)]
    is_refused, refusal = False, None
    if of_slurm:
        try:
            jobs = [job for plan in of_slurm for job in (plan.job, *plan.other_jobs) if job]
            sbatch.cancel(jobs, only_waiting=not at_once)
        except LauncherError as error:
            is_refused, refusal = True, str(error) if isinstance(error, SlurmRefused) else None
    runs = [plan.run for plan in of_slurm]
    states, _ = with_scheduler(runs, [read_state(run, time.time()) for run in runs])
    pairs = zip(of_slurm, states, strict=True)
    after = {
        plan: _after(replace(plan, refusal=refusal), state, is_refused=is_refused) for plan, state in pairs
    }
    done = [_off_the_list(plan) if plan.way is Way.place else after.get(plan, plan) for plan in plans]
    _empty_jobs([plan for plan in done if plan.way is Way.place])
    return [_written(plan, at_once) for plan in done]


def _written(plan: Cancellation, at_once: bool) -> Cancellation:
    """Write what a plan comes to, and return it with the problem where that cannot be: the others of a sweep
    are stopped all the same.
    """
    try:
        if plan.problem is not None:
            return plan
        if plan.way is Way.request:
            _ask(plan, at_once)
        elif plan.way in (Way.place, Way.queue, Way.kill):
            _record(plan)
    except OrchestraError as error:
        return replace(plan, problem=str(error))
    return plan


def _of_none(plan: Cancellation) -> Cancellation:
    """Let none of a run's jobs train it; where one was faster its attempt is asked instead."""
    if not choose_alternative(plan.run, NONE, str(plan.job)):
        return replace(plan, way=Way.request, other_jobs=(), state=RunPhase.starting)
    found: list[str] = []
    for token in plan.other_tokens:
        # One that is not found ends when it begins.
        with contextlib.suppress(LauncherError):
            found += filter(None, [find_by_token(token)])
    return replace(plan, other_jobs=tuple(dict.fromkeys([*plan.other_jobs, *found])))


def _off_the_list(plan: Cancellation) -> Cancellation:
    """Take the place of a member that waits for one; where a job was faster its attempt is asked instead."""
    array = (newest_job(read_record(plan.run)) or {}).get("pack")
    assert is_whole(array)
    newest = newest_place(plan.run, array)
    number = 0 if newest is None else newest.number + 1
    is_free = newest is None or newest.goes_on
    try:
        if is_free and take_place(plan.run, array, number, job=None):
            end_place(plan.run, array, number, goes_on=False)
            return plan
    except OSError as error:
        return replace(plan, problem=f"{plan.name} could not be taken off the list of its array: {error}")
    return replace(plan, way=Way.request, state=RunPhase.starting)


def _empty_jobs(plans: Sequence[Cancellation]) -> None:
    """Take jobs out of the queue that have no member left; one that begins all the same ends at once."""
    for path, job in {(plan.run.path.parent, plan.job) for plan in plans if plan.job is not None}:
        sweep = SweepDir(path)
        array = next((array for array in read_sweep(sweep).arrays if array.id == job), None)
        runs = [] if array is None else [sweep.member(index) for index in array.members]
        places = [newest_place(run, array.number) for run in runs if array is not None]
        if all(place is not None and place.end is not None and not place.goes_on for place in places):
            with contextlib.suppress(LauncherError):
                sbatch.cancel([job])


def _after(plan: Cancellation, state: RunState, *, is_refused: bool) -> Cancellation:
    """Return the plan as Slurm tells of it after the job was to be cancelled; `is_refused`: or silent."""
    if state.job_state in ("CANCELLED", GONE) or (plan.way is Way.kill and not is_refused):
        return plan
    if state.state is RunPhase.queued or state.job_state == UNKNOWN:
        return replace(plan, way=Way.request, is_unreached=True)
    # It began just before: the attempt reads the request as soon as it can.
    return replace(plan, way=Way.request, state=state.state)


def _ask(plan: Cancellation, at_once: bool) -> None:
    """Write the request, unless one that says as much stands already."""
    if plan.attempt is None or plan.earlier is not None:
        return
    try:
        stop_requests.write_request(plan.run, plan.attempt, stop_requests.CANCEL, at_once=at_once)
    except OSError as error:
        is_gone = False
        with contextlib.suppress(OSError):
            is_gone = not plan.run.has_records()
        if is_gone:
            raise OrchestraError(
                f"{plan.run.path} was removed or renamed; what may still train it ends within a minute"
            ) from error
        remedy = "send SIGTERM to the process that leads it"
        if isinstance(error, PermissionError):
            remedy = who_may_write(plan.run.path)
        raise OrchestraError(
            f"{plan.name} could not be asked to stop: {plan.run.control}: {error.strerror}; {remedy}"
        ) from error


def _record(plan: Cancellation) -> None:
    """Write that the job was taken away: neither the queue nor the accounting tells so for ever."""
    try:
        events = EventWriter(plan.run, f"cancel.{plan.job}", plan.attempt or 0)
        events.write("cancelled", job=plan.job, token=plan.token, user=user_name())
        events.close()
    except OSError as error:
        raise OrchestraError(
            f"{plan.name}: job {plan.job} is cancelled, but that could not be recorded: "
            f"{plan.run.events}: {error.strerror}"
        ) from error
