"""Slurm's word on runs, after their own records: who waits and for what, who is being started, who was ended
silently.

What a run wrote itself comes first; then the queue; then the accounting. Where Slurm cannot be asked nothing
changes. It asks Slurm once for all runs, and only those that it may know more about.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from launchers.slurm.queue import GONE, PACKED, RUNNING, UNKNOWN, WAITING, JobState, Questions, SubmittedJob
from orchestra.errors import ConfigError
from orchestra.report.run_state import (
    RunState,
    SweepState,
    job_of_record,
    last_growth,
    read_state,
    read_sweep_state,
)
from orchestra.run.control.stop_requests import user_name
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.record import RunPhase, read_record

# Why a Slurm job waits or what it is doing, in words that help, and what to type. Pure text.


# From a job's start to its first agent: images are pulled, set-up lines run.
_SILENT_S = 600.0
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
_HELD = "held by {}; `scontrol release {job}` lets it go"
_DEPENDENCY = "Dependency"
# Slurm's reasons (squeue %r) in words; {job} is the job's id.
_REASONS = {
    "Resources": "waits for nodes to become free",
    "Priority": "waits behind jobs of higher priority",
    _DEPENDENCY: "waits for another job to end",
    "DependencyNeverSatisfied": "waits for a job that did not end as it had to, and never starts: cancel it",
    "BeginTime": "may not start yet: it is to begin later, or Slurm holds it back after it was requeued",
    "JobHeldUser": _HELD.format("its user", job="{job}"),
    "JobHeldAdmin": "held by an administrator, who can let it go: `scontrol release {job}`",
    PACKED: "waits for a place on a node that its sweep's members share",
    "JobArrayTaskLimit": "waits for other members of its sweep (the array's throttle)",
    "ReqNodeNotAvail": "a node that it asks for is down, drained or reserved",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition takes no jobs at the moment",
    "PartitionNodeLimit": "asks for more nodes than its partition has or allows: it will not start as it is",
    "PartitionTimeLimit": "asks for more time than its partition allows: it will not start as it is",
    "Reservation": "waits for its reservation",
    "Licenses": "waits for licences",
    "Cleaning": "was requeued, and its last start is still being cleaned up",
    "Prolog": "the nodes are being made ready (prolog)",
    "AccountNotAllowed": "its account may not use this partition: it will not start as it is",
    "QOSNotAllowed": "its QOS may not be used in this partition: it will not start as it is",
    "MaxMemPerLimit": "asks for more memory than a job may have: it will not start as it is",
    "JobHoldMaxRequeue": "was requeued too often, and Slurm holds it; `scontrol release {job}` lets it go",
    "InvalidAccount": "its account is not valid: it will not start as it is",
    "InvalidQOS": "its QOS is not valid: it will not start as it is",
    "launch_failed_requeued_held": "a start failed, and Slurm holds it; `scontrol release {job}` tries again",
    "job_requeued_in_held_state": "was requeued and is held; `scontrol release {job}` lets it go",
}
# Limits of a single job, such as QOSMaxNodePerJobLimit, AssocMaxGRESPerNode, QOSMinGRES: no waiting helps.
_OF_ONE_JOB = re.compile(r"(?P<of>QOS|Assoc)(?P<limit>Max\w+Per(Job|Node)(Limit)?|Min\w+)")
_WHOSE = {"QOS": "QOS", "Assoc": "account"}
# Reasons that start so: Slurm has one for each limit.
_STARTS = {
    "QOS": "waits for a limit of its QOS ({reason})",
    "Assoc": "waits for a limit of its account ({reason})",
    "Nodes_required_for_job_are": "nodes that it needs are down, drained or kept for jobs of higher priority",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved ({reason})",
}
_STATES = {
    "COMPLETING": "Slurm is ending it and cleaning its nodes up",
    "CONFIGURING": "its nodes are being made ready (booting, prolog)",
    "SUSPENDED": "suspended by Slurm: its processes stand still; `scontrol resume {job}`, or whoever "
    "suspended it, lets them go on",
    "STOPPED": "stopped by a signal: its processes stand still",
    "REQUEUED": "is being requeued",
    "REQUEUE_HOLD": "held by an administrator or after a failed start; `scontrol release {job}` lets it go",
    "SPECIAL_EXIT": "held after a special exit; `scontrol release {job}` lets it go",
    "RESV_DEL_HOLD": "held, since its reservation was removed; `scontrol release {job}` lets it go",
    "SIGNALING": "is being signalled",
    "STAGE_OUT": "its files are being moved out of the burst buffer",
    "RESIZING": "a node is being cut off",
}
# Why Slurm let a job fail that never began.
_NOT_PLACED = {
    "BadConstraints": "no nodes have what it asks for, or too few are left beside those that it leaves out",
}
_ENDS = {
    "OUT_OF_MEMORY": "the kernel killed it because its memory ran out on a node (ask for more with "
    "cluster.slurm_extra.mem, or make the batch smaller)",
    "NODE_FAIL": "a node failed",
    "TIMEOUT": "it reached its time limit",
    "DEADLINE": "it could not end before its deadline",
    "BOOT_FAIL": "its nodes did not boot",
    "PREEMPTED": "a job of higher priority took its nodes",
    "LAUNCH_FAILED": "Slurm could not start it on its nodes",
    "COMPLETED": "it ended with exit code 0",
}


def why_it_waits(word: JobState) -> str:
    """Return what keeps a job from training, as a part of a sentence; empty where nothing does."""
    if word.state in _STATES:
        return _STATES[word.state].format(job=word.job)
    if word.state == "RUNNING" or word.reason in ("", "None"):
        return ""
    return _reason(word.reason).format(job=word.job, reason=word.reason)


def why_nothing_begins(word: JobState, now: float) -> str:
    """Return what may be the matter with a running job of which no agent has ever come; empty while that is
    nothing unusual.
    """
    try:
        since_s = now - time.mktime(time.strptime(word.start, _TIME_FORMAT))
    except (ValueError, OverflowError):
        return ""
    if since_s < _SILENT_S:
        return ""
    return (
        f"nothing of it has started for {since_s / 60:.0f} minutes: its set-up lines still run, or the node "
        "that ran them is lost, and the job holds the others until its time limit; `orchestra cancel` and "
        "then `orchestra resume` start it again"
    )


def _reason(reason: str) -> str:
    if reason in _REASONS:
        return _REASONS[reason]
    name = reason.partition(",")[0].strip("()").replace(" ", "_")
    if (limit := _OF_ONE_JOB.fullmatch(name)) is not None:
        how = "less" if limit["limit"].startswith("Min") else "more"
        whose = _WHOSE[limit["of"]]
        return f"asks for {how} than its {whose} allows a job: it will not start as it is ({{reason}})"
    known = _REASONS.get(name) or next(
        (text for start, text in _STARTS.items() if name.startswith(start)), None
    )
    return known or "waits ({reason})"


def how_it_ended(word: JobState) -> str:
    """Return what Slurm says of a job that is over, as a sentence."""
    if word.state == "CANCELLED":
        by = f" by {user_name(word.cancelled_by)}" if word.cancelled_by else ""
        return f"job {word.job} was cancelled{by}"
    code, _, signal = word.exit_code.partition(":")
    if word.state == "FAILED" and word.reason in _NOT_PLACED:
        return f"Slurm could not place job {word.job}: {_NOT_PLACED[word.reason]} ({word.reason})"
    if word.state == "FAILED":
        exit_code = f" with exit code {code}" if code not in ("", "0") else ""
        killed = f" by signal {signal}" if signal not in ("", "0") else ""
        return f"job {word.job} failed{exit_code}{killed}"
    meaning = _ENDS.get(word.state)
    return f"job {word.job} ended as {word.state}{': ' + meaning if meaning else ''}"


# Own records that leave open what became of the job.
OPEN = (
    *(RunPhase.not_started, RunPhase.running, RunPhase.restarting),
    *(RunPhase.unknown, RunPhase.died, RunPhase.queued),
)
# What wrote so lately is alive, whatever Slurm does not know.
_GROWS_S = 60.0
# A requeued job is still running, or being cleaned up, for a moment after its attempt ended.
_ENDING = ("COMPLETING", "REQUEUED", "SIGNALING", "STAGE_OUT", "RESIZING")
# Its processes are gone: what led a run there begins nothing any more.
_LEFT = ("COMPLETING", "STAGE_OUT")


def read_states(
    targets: Sequence[RunDir | SweepDir], now: float, questions: Questions | None = None
) -> tuple[list[RunState | SweepState], list[str]]:
    """Return the states of runs and sweeps, and why Slurm could not be asked if it could not.

    Slurm is asked once for all of them; `questions`: see `with_scheduler`.
    """
    own = [_own_state(target, now) for target in targets]
    pairs: list[tuple[RunDir, RunState]] = []
    for state in own:
        if isinstance(state, SweepState):
            pairs += [(member.run, member.state) for member in state.members]
        else:
            pairs.append((RunDir(Path(state.path)), state))
    told, problems = with_scheduler([run for run, _ in pairs], [state for _, state in pairs], questions)
    words = iter(told)
    states: list[RunState | SweepState] = []
    for state in own:
        if isinstance(state, SweepState):
            members = tuple(replace(member, state=next(words)) for member in state.members)
            states.append(replace(state, members=members))
        else:
            states.append(next(words))
    return states, problems


def _own_state(target: RunDir | SweepDir, now: float) -> RunState | SweepState:
    if isinstance(target, RunDir):
        return read_state(target, now)
    try:
        return read_sweep_state(target, now)
    except ConfigError as error:
        return SweepState(target, (), problem=str(error))


def newest_job(run: RunDir) -> SubmittedJob | None:
    """Return the job that was submitted last for a run; None for a run that never was."""
    return job_of_record(run, read_record(run))


def with_scheduler(
    runs: Sequence[RunDir], states: Sequence[RunState], questions: Questions | None = None
) -> tuple[list[RunState], list[str]]:
    """Return the states with Slurm's word where it says more, and why it could not be asked if it could not.

    `states` are those of `runs`, from their own records. Whoever asks again and again hands in the same
    `questions` each time.
    """
    # Of a verdict that stands too: the same job may wait to be started again.
    jobs = {
        index: state.submitted
        for index, state in enumerate(states)
        if state.submitted is not None and (state.state in OPEN or state.state.ended_early)
    }
    wanted = [job for index, job in jobs.items() if states[index].state in OPEN]
    words, problems = (questions or Questions()).states(_each(jobs.values()), past=_each(wanted))
    both = list(states)
    for index, job in jobs.items():
        word = min((words[one] for one in _each([job])), key=_comes_first)
        both[index] = _with_word(runs[index], states[index], job, word)
        if job.alternatives and both[index].state is RunPhase.queued:
            count = len(job.alternatives) + 1
            cause = f"{both[index].cause or 'waits'}; of its {count} jobs the first to start trains"
            both[index] = replace(both[index], cause=cause)
    return both, problems


def _each(jobs: Iterable[SubmittedJob]) -> list[SubmittedJob]:
    return [one for job in jobs for one in (*job.alternatives, job)]


def _comes_first(word: JobState) -> int:
    """Order what Slurm says of several jobs that are to train one run."""
    return next((at for at, states in enumerate((RUNNING, WAITING, (UNKNOWN,))) if word.state in states), 3)


def _with_word(run: RunDir, own: RunState, job: SubmittedJob, word: JobState) -> RunState:
    if own.state in OPEN and word.is_over:
        # It may have ended, with a verdict, between reading its records and asking Slurm.
        own = replace(read_state(run, time.time()), name=own.name)
    may_be_led = own.state is RunPhase.restarting and _is_of_leader(own, job, word)
    is_led = own.state is RunPhase.running or may_be_led
    if is_led and word.state == GONE and abs(time.time() - last_growth(run)) < _GROWS_S:
        cause = f"Slurm does not know job {job.label or 'with its token'}, yet the run's files grow"
        return replace(own, job=word.job, job_state=UNKNOWN, cause=cause)
    state = _merged(own, job, word)
    if state.state is not RunPhase.starting or state.cause:
        return state
    # Each start of the job leaves a file when its first agent comes.
    has_come = any(run.control.glob(f"job-{word.job}.start-*"))
    return state if has_come else replace(state, cause=why_nothing_begins(word, time.time()) or None)


def _merged(own: RunState, job: SubmittedJob, word: JobState) -> RunState:
    if word.state == UNKNOWN:
        cause = elsewhere(job, word.asked) if own.state in OPEN else None
        asked = word.asked or None
        return replace(own, job=word.job, job_state=word.state, cause=cause or own.cause, asked_cluster=asked)
    start = None if word.start in ("", "N/A", "Unknown", "None") else word.start
    nodes = None if word.nodes in ("", "None assigned") else word.nodes
    state = replace(own, job=word.job, job_state=word.state, job_nodes=nodes, job_start=start)
    waits = why_it_waits(word) or None
    if word.state in WAITING:
        if own.after and word.reason == _DEPENDENCY:
            waits = f"waits until {' and '.join(own.after)} {'is' if len(own.after) == 1 else 'are'} done"
        return replace(state, state=RunPhase.queued, cause=waits, eta_s=None)
    if own.restart is not None and _is_of_leader(own, job, word):
        return _of_a_restart(state, word, waits)
    if own.state is RunPhase.restarting:
        # Its leader is in no job, or in another one, of which this one's state says nothing.
        return own
    if own.state not in OPEN:
        return state
    if word.state in RUNNING:
        return _of_a_running_job(state, word, waits)
    return replace(state, state=_end(own, job, word), cause=_cause(own, job, word), code=None, eta_s=None)


def _is_of_leader(own: RunState, job: SubmittedJob, word: JobState) -> bool:
    """Whether the job is the one whose leader decided to begin another attempt."""
    leader = None if own.restart is None else own.restart.job
    return leader is not None and leader in (job.label, word.job)


def _of_a_restart(own: RunState, word: JobState, waits: str | None) -> RunState:
    """Return the state of a run whose leader waits to begin again, for as long as its job runs."""
    restart = own.restart
    if restart is not None and word.state in RUNNING and word.state not in _LEFT:
        return replace(own, state=RunPhase.restarting, cause=waits or restart.reason)
    cause = own.cause if restart is None or own.state is not RunPhase.restarting else restart.after
    return replace(own, state=RunPhase.failed, cause=cause)


def _of_a_running_job(own: RunState, word: JobState, waits: str | None) -> RunState:
    if own.state.is_before_start:
        is_ending = own.state is RunPhase.queued and word.state in _ENDING
        return replace(own, state=RunPhase.queued if is_ending else RunPhase.starting, cause=waits)
    return replace(own, state=RunPhase.running, cause=waits or own.cause)


def _end(own: RunState, job: SubmittedJob, word: JobState) -> RunPhase:
    if not own.state.is_before_start:
        return RunPhase.cancelled if word.state == "CANCELLED" else RunPhase.died
    if own.state is RunPhase.not_started and job.job is None and word.state == GONE:
        return RunPhase.not_submitted
    return {"CANCELLED": RunPhase.cancelled, "FAILED": RunPhase.failed}.get(word.state, RunPhase.died)


def _cause(own: RunState, job: SubmittedJob, word: JobState) -> str:
    began = {
        RunPhase.not_started: "the run had not begun",
        RunPhase.queued: "the run had not gone on",
    }.get(own.state, "the run left no verdict")
    if word.state == GONE:
        named = "a job with its token" if job.job is None else f"job {job.label} any more"
        return f"Slurm does not have {named}, and {began}"
    return f"{how_it_ended(word)}, and {began}"


def elsewhere(job: SubmittedJob, asked: str | None) -> str | None:
    """Return that a job belongs to another cluster than the one that was asked; None where it does not."""
    if not asked or job.cluster is None:
        return None
    its = f"its job {job.label}" if job.label else "its job"
    return f"{its} is on cluster {job.cluster}; this machine asks cluster {asked}"


def job_logs(run: RunDir, job: SubmittedJob | None) -> list[Path]:
    """Return what the newest job of a run wrote itself, node by node; that of all its jobs while its id is
    not known.

    The jobs of a sweep's members write into the sweep's folder.
    """
    if job is not None and job.is_shared and (files := sorted(run.job_logs.glob("*_log.out"))):
        # What each start of it wrote, on whatever node.
        return files
    if job is not None and (job.task is not None or job.is_shared):
        folder, pattern = (
            RunDir(run.path.parent).job_logs,
            f"{job.label or '*_' + str(job.task or '')}_*_log.out",
        )
    else:
        folder, pattern = run.job_logs, f"{job.label}_*_log.out" if job and job.label else "*"
    files = sorted(folder.glob(pattern), key=lambda file: (len(file.name), file.name))
    return files or (
        sorted(folder.glob("*")) if job is None or (job.task is None and not job.is_shared) else []
    )
