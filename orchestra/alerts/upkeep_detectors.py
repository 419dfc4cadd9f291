"""Detectors of what a run costs and what it could lose: restarts, goodput, checkpoints, disks; and of sweeps
whose members fail. Pure; see `orchestra.alerts.observed`.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from conf.schema import Config
from orchestra.alerts.observed import Alert, Finding, Limits, ObservedRun
from orchestra.recovery import history
from orchestra.recovery.incidents import Incident, incidents
from orchestra.report.run_state import SweepState, failed_saves, waits_for_storage
from orchestra.run.events import is_number, is_whole
from orchestra.run.record import RunPhase
from orchestra.sizes.units import first_few

_HOUR_S = 3600.0
_NAMED = 4
# For writing a checkpoint once it is due.
_WRITING_S = 60.0
_ROWS = 20
_GIB = 1 << 30
# What loses most of a run's time, and what helps against it.
_HELP = {
    "lost_s": (
        "trained again",
        "save more often: checkpoint.every_steps=auto, recovery.memory_copy_every_steps",
    ),
    "checkpoint_s": (
        "waits for saves",
        "checkpoint.async_save=true, or save less often: checkpoint.every_steps=auto",
    ),
    "evaluation_s": (
        "evaluations",
        "evaluate less often (eval.every_steps), or on fewer batches (eval.steps)",
    ),
    "restart_s": (
        "starts",
        "recovery.warm_start=true, cluster.spare_nodes; `orchestra why` tells what failed",
    ),
    "restore_s": ("restores", "recovery.memory_copy_every_steps, checkpoint.restore=broadcast"),
}


def restart_storm(run: ObservedRun, limits: Limits) -> Sequence[Finding]:
    """Fire where attempts fail often: so many within the last hour, or in a row without a new checkpoint."""
    if not run.state.goes_on:
        return []
    ended = [each for each in incidents(history.read(run.events)) if each.is_failure]
    lately = [each for each in ended if run.now - each.time <= _HOUR_S]
    saves = [event["time"] for event in run.events if event["event"] == "checkpoint_committed"]
    fruitless = [] if ended and max(saves, default=0.0) > ended[-1].time else _fruitless(ended)
    storm = max(lately, fruitless, key=len)
    if len(storm) < limits.restarts:
        return []
    causes = [f"{count} × {cause}" for cause, count in Counter(each.cause for each in storm).most_common()]
    hosts = Counter(host for each in storm for host in each.blamed)
    blamed = (
        f"; blamed: {first_few([f'{host} ({n} ×)' for host, n in hosts.most_common()], _NAMED)}"
        if hosts
        else ""
    )
    how = "in the last hour" if storm is lately else "in a row without a new checkpoint"
    evidence = f"{len(storm)} attempts failed {how}: {first_few(causes, _NAMED)}{blamed}"
    advice = f"{run.command('why')} shows each with what was decided; {run.command('cancel')} stops it"
    return [run.alert("restart_storm", evidence, storm[0].time, advice)]


def _fruitless(ended: Sequence[Incident]) -> list[Incident]:
    """Return the last failures in a row between which nothing was committed."""
    last: list[Incident] = []
    for each in reversed(ended):
        if last and each.committed != last[0].committed:
            break
        last.insert(0, each)
    return last


def goodput(run: ObservedRun, limits: Limits) -> Sequence[Finding]:
    """Fire where too little of the time in which a run had its nodes went into steps that count."""
    if not run.state.is_alive or run.attempt is None:
        return []
    spent = run.accounts
    had_s = spent.wall_s - spent.queue_s - spent.idle_s
    if had_s < limits.goodput_after_s:
        words = f"{had_s:.0f} of {limits.goodput_after_s:.0f} s on its nodes so far"
        return [run.cannot_see("goodput", words)]
    share = spent.productive_s / had_s
    if share >= limits.goodput:
        return []
    parts = sorted(((getattr(spent, key), key) for key in _HELP), reverse=True)
    words = ", ".join(f"{_HELP[key][0]} {seconds:.0f} s" for seconds, key in parts if seconds >= 1)
    evidence = f"{share:.1%} of {had_s:.0f} s on its nodes went into steps that count; {words}"
    begins = [event["time"] for event in run.events if event["event"] == "attempt_started"]
    return [run.alert("goodput", evidence, min(begins), _HELP[parts[0][1]][1])]


def checkpoint_age(run: ObservedRun, limits: Limits) -> Sequence[Finding]:
    """Fire where the newest checkpoint is older than it should be, saves fail, or the storage does not
    answer.
    """
    attempt = run.attempt
    if run.state is not RunPhase.running or attempt is None:
        return []
    if (waits := waits_for_storage(attempt)) is not None:
        since = attempt.named("restore_waits")[0]["time"]
        return [run.alert("checkpoint", waits, since, "see whether the storage answers", "storage")]
    findings: list[Finding] = []
    if (failed := failed_saves(run.events)) is not None:
        evidence = f"saves that failed in a row: {failed.count}; {failed.why}"
        advice = "free the storage or checkpoint.dir of what stops them: a failure now loses all since then"
        findings.append(run.alert("checkpoint", evidence, failed.since, advice, "failing"))
    training = run.training
    if training is None:
        return findings
    due_s, why = _seconds_between_saves(run, run.config)
    if due_s is None:
        return [*findings, *([run.cannot_see("checkpoint", why)] if why else [])]
    committed = training.named("checkpoint_committed")
    newest = committed[-1] if committed else training.training_started or training.start
    age_s = run.now - newest["time"]
    if age_s > limits.checkpoint_factor * due_s + _WRITING_S:
        what = f"the checkpoint of step {newest.get('step')} is" if committed else "nothing was saved in"
        evidence = f"{what} {age_s:.0f} s{' old' if committed else ''}, where one is due every {due_s:.0f} s"
        advice = (
            f"{run.command('logs')} tells of its saves; {run.command('checkpoint ls')} lists what is there"
        )
        findings.append(run.alert("checkpoint", evidence, newest["time"] + due_s, advice, "age"))
    return findings


def _seconds_between_saves(run: ObservedRun, config: Config | None) -> tuple[float | None, str]:
    """Return how often a checkpoint is due; None where none is, or, with the reason, where nobody can say."""
    if config is None:
        return None, run.no_config
    settings = config.checkpoint
    if settings.every_s is not None:
        return settings.every_s, ""
    every = settings.every_steps
    if every is None:
        return None, ""
    if not isinstance(every, int):
        chosen = [event.get("every_steps") for event in run.events if event["event"] == "save_interval"]
        every = chosen[-1] if chosen else None
        if not is_whole(every):
            return None, "checkpoint.every_steps=auto has not been decided yet"
    times = [row["step_time_s"] for row in run.own_rows[-_ROWS:] if is_number(row.get("step_time_s"))]
    if not times:
        return None, "no step was timed in this attempt"
    seconds = every * statistics.median(times)
    if config.eval.every_steps is not None:
        # Those between two saves, which are no part of steps.
        known = [event.get("seconds") for event in run.events if event["event"] == "evaluated"]
        longest = max(filter(is_number, known), default=0.0)
        seconds += -(-every // config.eval.every_steps) * longest
    return seconds, ""


def disk(run: ObservedRun, limits: Limits) -> Sequence[Finding]:
    """Fire where a place that the run writes to has no room for two more checkpoints, or hardly any room."""
    if not run.state.is_alive:
        return []
    needs = [event for event in run.events if event["event"] == "checkpoint_needs"]
    size = needs[-1].get("checkpoint_bytes") if needs else None
    findings: list[Finding] = []
    for index, each in enumerate(run.disks):
        if each.unseen:
            findings.append(run.cannot_see("disk", f"{each.place}: {each.unseen}"))
            continue
        # The last one is where checkpoints go.
        is_of_checkpoints = index == len(run.disks) - 1
        wanted = max(limits.disk_free_bytes, 2 * size if is_of_checkpoints and is_number(size) else 0)
        is_full = each.free_inodes is not None and each.free_inodes < 1_000
        if each.free_bytes >= wanted and not is_full:
            continue
        free = f"{each.free_inodes} more files" if is_full else f"{each.free_bytes / _GIB:.2f} GiB"
        evidence = f"{each.place} has room for {free}, where {wanted / _GIB:.2f} GiB should be free"
        advice = "make room, lower checkpoint.keep_last, or let checkpoint.fallback_dir name another storage"
        findings.append(
            run.alert("disk", evidence, run.now, advice, "checkpoints" if is_of_checkpoints else "run")
        )
    return findings


def failing_members(sweep: SweepState, limits: Limits, now: float, why: str) -> Sequence[Alert]:
    """Fire where a share of a sweep's members that have ended went wrong. `why`: what tells the causes."""
    failed = [each for each in sweep.members if each.state.state.ended_badly]
    ended = len(failed) + sum(each.state.state is RunPhase.finished for each in sweep.members)
    if not failed or len(failed) < limits.failing_members * ended:
        return []
    causes = Counter(each.state.cause or str(each.state.state) for each in failed)
    words = first_few([f"{count} × {cause}" for cause, count in causes.most_common()], _NAMED)
    names = first_few([f"{each.member.index:03d}" for each in failed], _NAMED)
    evidence = f"{len(failed)} of {ended} members that ended went wrong: {words}; {names}"
    # When each ended stands in its own records.
    return [Alert("sweep", sweep.sweep.name, evidence, now, f"`{why}` groups them by cause")]
