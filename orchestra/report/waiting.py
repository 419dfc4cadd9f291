"""Why a Slurm job waits or what it is doing, in words that help, and what to type. Pure text."""

from __future__ import annotations

import time
from collections.abc import Callable

from launchers.slurm.states import JobState

# From a job's start to its first agent: images are pulled, set-up lines run.
_SILENT_S = 600.0
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
_HELD = "held by {}; `scontrol release {job}` lets it go"
# Slurm's reasons (squeue %r) in words; {job} is the job's id.
_REASONS = {
    "Resources": "waits for nodes to become free",
    "Priority": "waits behind jobs of higher priority",
    "Dependency": "waits for another job to end",
    "DependencyNeverSatisfied": "waits for a job that did not end as it had to, and never starts: cancel it",
    "BeginTime": "may not start yet: it is to begin later, or Slurm holds it back after it was requeued",
    "JobHeldUser": _HELD.format("its user", job="{job}"),
    "JobHeldAdmin": "held by an administrator, who can let it go: `scontrol release {job}`",
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
    "InvalidAccount": "its account is not valid: it will not start as it is",
    "InvalidQOS": "its QOS is not valid: it will not start as it is",
    "launch_failed_requeued_held": "a start failed, and Slurm holds it; `scontrol release {job}` tries again",
    "job_requeued_in_held_state": "was requeued and is held; `scontrol release {job}` lets it go",
}
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
        f"nothing of it has come to life for {since_s / 60:.0f} minutes: its set-up lines still run, or the "
        "node that ran them is lost, and the job holds the others until its time limit; `orchestra cancel` "
        "and `orchestra resume` begin it anew"
    )


def _reason(reason: str) -> str:
    if reason in _REASONS:
        return _REASONS[reason]
    name = reason.partition(",")[0].strip("()").replace(" ", "_")
    known = _REASONS.get(name) or next(
        (text for start, text in _STARTS.items() if name.startswith(start)), None
    )
    return known or "waits ({reason})"


def how_it_ended(word: JobState, user_of: Callable[[str], str]) -> str:
    """Return what Slurm says of a job that is over, as a sentence; `user_of` names a user's number."""
    if word.state == "CANCELLED":
        by = f" by {user_of(word.cancelled_by)}" if word.cancelled_by else ""
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
