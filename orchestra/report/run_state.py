"""The state of a run or a sweep as its records tell it: alive or how it ended, how far, how fast. Read-only.

Read by every command that shows, resumes or cancels runs; `report.scheduler` adds Slurm's word. A run
without a verdict counts as running while the process that leads it lives; on another host, while its files
still grow. One that was prepared here and whose preparing process is gone died before it started. One that
stopped and goes on by itself is queued until its next attempt starts; one whose leader waits after a failure
to begin again is restarting. YAML is not parsed: a thousand runs are read in less than a second.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import socket
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers import processes
from launchers.slurm.queue import SubmittedJob, job_and_tasks
from orchestra.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError
from orchestra.recovery.history import Attempt, newest_attempt
from orchestra.recovery.incidents import Verdict, first_failure, judge, node_verdict
from orchestra.run.control.chosen_alternative import chosen_alternative
from orchestra.run.control.member_places import newest_place
from orchestra.run.events import event_files, is_number, is_whole, read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import EPOCH, RECENT_ROWS, recent_rows, train_losses
from orchestra.run.paths import RunDir, Sweep, SweepDir, SweepMember, read_sweep
from orchestra.run.record import RunPhase, jobs_of, newest_job, overrides_in_force, read_record
from orchestra.run.run_lineage import EVENTS as OF_LINEAGE
from orchestra.run.run_lineage import lineage_of, newest_checkpoint


def was_verified(events: Iterable[Record], step: int, created: float) -> bool:
    """Return whether all bytes of the checkpoint of `step`, written at `created`, were found intact."""
    verdicts = [
        event.get("intact")
        for event in events
        if event.get("event") == "checkpoint_verified"
        and (event.get("step"), event.get("created")) == (step, created)
    ]
    return bool(verdicts) and verdicts[-1] is True


def failed_save(event: Record) -> str:
    """Return in a sentence what a `checkpoint_failed` event tells."""
    reasons = event.get("reasons")
    # Most failures are the same one on every rank.
    ranks_of: dict[str, list[str]] = defaultdict(list)
    for rank, reason in reasons.items() if isinstance(reasons, dict) else ():
        ranks_of[str(reason)].append(str(rank))
    texts = [f"{reason} (rank {', '.join(ranks)})" for reason, ranks in ranks_of.items()]
    why = "; ".join(texts) or str(event.get("message") or event.get("reason") or reasons or "no reason given")
    return f"the checkpoint of step {event.get('step', '?')} was not saved: {why}"


@dataclass(frozen=True)
class FailedSaves:
    """The saves since the last one that was committed: how many failed, since when (Unix seconds), and what
    the newest says.
    """

    count: int
    since: float
    why: str


def failed_saves(events: Iterable[Record]) -> FailedSaves | None:
    """Return the saves in a row that failed at the end of a run's events; None where the newest did not."""
    of_rank: dict[Any, list[Record]] = defaultdict(list)
    for event in events:
        if event.get("event") == "checkpoint_committed":
            of_rank.clear()
        elif event.get("event") == "checkpoint_failed" and is_number(event.get("time")):
            of_rank[event.get("rank")].append(event)
    if not of_rank:
        return None
    # Every rank tells of every save; one that was cut off tells of fewer.
    failed = max(of_rank.values(), key=len)
    return FailedSaves(len(failed), float(failed[0]["time"]), failed_save(failed[-1]))


def outage(event: Record) -> str:
    """Return in a sentence what an event tells of a storage that does not answer, or of a fallback."""
    why = str(event.get("why", "no reason given"))
    if event.get("event") == "restore_waits":
        return f"waits for the storage of its checkpoints, {event.get('patience_s', 0):g} s at most: {why}"
    return f"checkpoint.fallback_dir cannot be used as it is now: {why}"


def waits_for_storage(attempt: Attempt) -> str | None:
    """Return what a run waits for whose attempt has not come to restore yet; None where it does not wait."""
    waits = attempt.named("restore_waits")
    is_over = attempt.restored is not None or attempt.training_started is not None
    return None if not waits or is_over or attempt.verdict is not None else outage(waits[-1])


def fallback_of(events: Iterable[Record], step: int | None) -> str | None:
    """Return where the checkpoint of `step` lies, if that is in checkpoint.fallback_dir."""
    commits = [event for event in events if event.get("event") == "checkpoint_committed"]
    newest = next((event for event in reversed(commits) if event.get("step") == step), {})
    return str(newest["fallback"]) if "fallback" in newest else None


def passed_over(event: Record) -> list[str]:
    """Return a sentence for each newer checkpoint that a `restored` event says was not taken."""
    skipped = event.get("skipped")
    return [
        f"the checkpoint of step {entry.get('step', '?')} was passed over: "
        f"{entry.get('reason', 'no reason given')}"
        for entry in (skipped if isinstance(skipped, list) else [])
        if isinstance(entry, dict)
    ]


def read_twice(event: Record) -> list[str]:
    """Return a sentence about what a `restored` event says came with a wrong checksum at first."""
    found = event.get("read_twice")
    if not isinstance(found, list) or not found:
        return []
    others = f" (and {len(found) - 1} more like it)" if len(found) > 1 else ""
    what = "the storage or the network to it gave wrong bytes, which were right when they were read again"
    return [f"{what}: {found[0]}{others}"]


# Decisions that another attempt by the same agents follows, and the one that another job does; after the
# others the leader ends.
_GO_ON = ("restart", "replace", "shrink", "grow", "requeue")
# A verdict carries this while its leader has yet to say what follows.
_UNDECIDED = "undecided"
# Where nobody can tell whether the leader lives, it may begin the next attempt so long after it is due.
_LATE_S = 120.0


@dataclass(frozen=True)
class Restart:
    """Another attempt is to begin once a failed one's leader has waited for a while."""

    # The policy's action, or "undecided" for the moment before it says.
    decision: str
    reason: str
    # Unix seconds: when it was decided, and when the next attempt is to begin.
    decided: float
    due: float
    # What the attempt failed of.
    after: str | None
    # The Slurm job that the attempt belongs to; None in the foreground.
    job: str | None


def restart_to_come(attempt: Attempt) -> Restart | None:
    """Return what its leader decided after an attempt's last verdict, if that is that another one begins, or
    that it has yet to decide.

    `attempt` is the run's newest. Whether the leader still lives is another question: `is_awaited`.
    """
    word = attempt.last_word
    if word is None:
        return None
    is_decided = word["event"] == "restarting"
    if not (word.get("decision") in _GO_ON if is_decided else word.get(_UNDECIDED) is True):
        return None
    wait_s, decided = word.get("wait_s"), float(word["time"])
    reason, after = (
        word.get("reason" if is_decided else "cause"),
        word.get("after" if is_decided else "cause"),
    )
    job = attempt.starts[-1].get("job") if attempt.starts else None
    return Restart(
        decision=str(word["decision"]) if is_decided else _UNDECIDED,
        reason=reason if isinstance(reason, str) else "",
        decided=decided,
        due=decided + (max(0.0, float(wait_s)) if is_number(wait_s) else 0.0),
        after=after if isinstance(after, str) else None,
        job=job if isinstance(job, str) else None,
    )


def is_awaited(restart: Restart, attempt: Attempt, now: float, last_growth: float) -> bool:
    """Tell whether the leader that decided on `restart` lives, and so begins another attempt.

    On its own host its process tells; elsewhere it counts as alive until it is late by two minutes, counted
    from the last word of the run, at `last_growth` by the file server's clock.
    """
    start = attempt.starts[-1] if attempt.starts else None
    decided = attempt.last_word or {}
    if start is not None and is_of_this_host(start) and _is_same_leader(start, decided):
        lives = leader_lives(start)
        # Of several nodes the next one's agent leads where this one's is gone.
        if lives or start.get("nodes", 1) == 1:
            return lives
    wait_s = restart.due - restart.decided
    return now - max(restart.decided, last_growth) < wait_s + _LATE_S


def is_of_this_host(record: Record) -> bool:
    """Tell whether what wrote a record ran, or runs, on this host."""
    return record.get("host") == socket.gethostname()


def leader_lives(start: Record) -> bool:
    """Tell whether the process that `start` names (`pid`, `pid_started`) still runs on this host."""
    pid, started = start.get("pid"), start.get("pid_started")
    if not is_whole(pid):
        return False
    process = processes.find(pid)
    return process is not None and (started is None or process.started == started)


def _is_same_leader(start: Record, decided: Record) -> bool:
    """Of several nodes another one may have led at the end; of its process nothing is known."""
    return all(
        key not in start or key not in decided or start[key] == decided[key] for key in ("host", "node")
    )


# A run led from another host counts as running until its files have been silent for this long.
_SILENCE_S = 600.0
# The events that a state is made of.
_EVENTS = (
    *("attempt_started", "restarting", "requeued", "cancelled", "finished", "failed", "rank_failed"),
    *("checkpoint_committed", "checkpoint_failed", "start_failed", "evaluated"),
    *OF_LINEAGE,
)
# The writers of events that stand for a command, not for an attempt.
_OF_COMMANDS = ("submit.", "cancel.", "verify.", "watch.")
_ATTEMPT = re.compile(r"attempt-(\d+)")
# In a frozen configuration: the key `steps` of the section `train`, which is written by OmegaConf.
_STEPS = re.compile(r"^train:\n(?:[ #].*\n)*?  steps: (\d{1,18})$", re.MULTILINE)


@dataclass(frozen=True)
class RunState:
    """One row of `orchestra status`; None where the records do not say."""

    name: str
    path: str
    state: RunPhase
    attempts: int
    steps: int | None = None
    step: int | None = None
    loss: float | None = None
    # The newest held-out losses by source; empty where nothing was evaluated.
    eval: Mapping[str, float] = field(default_factory=dict)
    # The training losses of a blend's parts in the last row; empty without a blend.
    train: Mapping[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None
    mfu: float | None = None
    # Steps without an update since the run began, by the last row: their loss or gradient was not finite.
    nonfinite_steps: int | None = None
    # How often it has gone through its data, of a blend through the part that is repeated most; None where
    # nothing is repeated.
    epoch: float | None = None
    eta_s: float | None = None
    age_s: float | None = None
    code: int | None = None
    cause: str | None = None
    # The step that a resume would go on from.
    checkpoint_step: int | None = None
    # Where that checkpoint lies, if in checkpoint.fallback_dir.
    checkpoint_fallback: str | None = None
    # Saves in a row that failed since then.
    failed_saves: FailedSaves | None = None
    # The scheduler's job, its word for it, where it runs, and since when or when it is expected to start, in
    # local time; where it was asked (orchestra.report.scheduler).
    job: str | None = None
    job_state: str | None = None
    job_nodes: str | None = None
    job_start: str | None = None
    # The cluster that was asked, where the job belongs to another one.
    asked_cluster: str | None = None
    # What was submitted last for this run.
    submitted: SubmittedJob | None = None
    # The runs that it begins after, by name, while it has not begun.
    after: tuple[str, ...] = ()
    # What its leader decided after a failure; whether that leader lives, `state` says: restarting or failed.
    restart: Restart | None = None

    def to_json(self) -> Record:
        """Return what `--json` prints: all but how the job is found again."""
        record = dataclasses.asdict(dataclasses.replace(self, submitted=None))
        record.pop("submitted")
        for name in ("eval", "train", "after", "epoch"):
            if not record[name]:
                record.pop(name)
        if self.state is not RunPhase.restarting:
            record["restart"] = None
        return record


def is_run(path: Path) -> bool:
    """Tell whether a directory is a run's; one that may not be read counts as none."""
    try:
        return RunDir(path).record.is_file() or RunDir(path).config.is_file()
    except OSError:
        return False


def name_of(run: RunDir, record: Record | None = None) -> str:
    """Return the name that means a run: for a member of a sweep with the sweep's in front.

    `record` is the run's, where it was read already.
    """
    sweep = (read_record(run) if record is None else record).get("sweep")
    return f"{sweep}/{run.name}" if isinstance(sweep, str) and run.path.parent.name == sweep else run.name


def read_state(run: RunDir, now: float) -> RunState:
    """Read the state of a run at Unix time `now`; damaged records make fields None, never an error.

    A run whose files may not be read has the state "unreadable", and the cause says why.
    """
    try:
        return _read_state(run, now)
    except OSError as error:
        return RunState(run.name, str(run.path), RunPhase.unreadable, attempts=0, cause=str(error))


def _read_state(run: RunDir, now: float) -> RunState:
    record = read_record(run)
    events = read_events(run, _EVENTS, newest_ranks=True)
    rows = recent_rows(run, lineage_of(events))
    state, verdict = read_ending(run, events, now, record)
    steps = _steps(run, record)
    last = rows[-1] if rows else {}
    attempt = newest_attempt(events)
    may_restart = (
        state in (RunPhase.restarting, RunPhase.failed) and start_failure(run, events, record) is None
    )
    restart = restart_to_come(attempt) if attempt is not None and may_restart else None
    created = record.get("created")
    return RunState(
        name=name_of(run, record),
        path=str(run.path),
        state=state,
        attempts=len({event["attempt"] for event in events if event.get("event") == "attempt_started"}),
        steps=steps,
        step=last.get("step"),
        loss=last.get("loss"),
        eval=held_out_losses(events),
        train=train_losses(last),
        tokens_per_s=median_of(rows, "tokens_per_s"),
        mfu=median_of(rows, "mfu"),
        nonfinite_steps=last["nonfinite_steps"] if is_whole(last.get("nonfinite_steps")) else None,
        epoch=last[EPOCH] if is_number(last.get(EPOCH)) else None,
        eta_s=seconds_left(rows, steps, _tokens(record, steps)) if state is RunPhase.running else None,
        age_s=now - created if is_number(created) else None,
        code=verdict.code if verdict is not None else None,
        cause=restart.reason if restart and state is RunPhase.restarting else _cause(state, verdict, events),
        checkpoint_step=newest_checkpoint(events),
        checkpoint_fallback=fallback_of(events, newest_checkpoint(events)),
        failed_saves=failed_saves(events),
        submitted=_job_to_ask_about(run, record, events, state),
        restart=restart,
        after=() if attempt is not None else _names_of_predecessors(record),
    )


def _names_of_predecessors(record: Record) -> tuple[str, ...]:
    after = record.get("after")
    entries = after if isinstance(after, list) else []
    return tuple(str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry)


def held_out_losses(events: Sequence[Record]) -> dict[str, float]:
    """Return the newest held-out losses on the run's line, by source."""
    lineage = lineage_of([*events])
    for event in reversed(events):
        losses = event.get("losses")
        if event["event"] != "evaluated" or not isinstance(losses, dict) or not is_whole(event.get("step")):
            continue
        if lineage.is_on_line(event["step"], event["attempt"]):
            return {str(name): loss for name, loss in losses.items() if is_number(loss)}
    return {}


def _job_to_ask_about(
    run: RunDir, record: Record, events: list[Record], state: RunPhase
) -> SubmittedJob | None:
    """Return the job that decides about a run: the newest, or the one of an attempt that has not ended.

    A later job may end without a word of the run, refused because of that attempt. None where that attempt is
    in the foreground, or in a job that somebody submitted by hand: the recorded ones say nothing of it.
    """
    newest = job_of_record(run, record)
    starts = [event for event in events if event["event"] == "attempt_started"]
    if state in (RunPhase.running, RunPhase.unknown, RunPhase.restarting) and starts:
        leader = max(starts, key=lambda start: int(start["attempt"])).get("job")
        for entry in reversed(record.get("jobs") or []):
            job = _job_of_entry(run, entry)
            if job is not None and job.label == leader:
                return job
        meant = (newest_job(record) or {}).get("attempt")
        # A task may have taken a shared one's place, and an id may be lost.
        is_known = newest is not None and newest.label is not None and not newest.is_shared
        if is_whole(meant) and is_known:
            return None
    return newest


def _cause(state: RunPhase, verdict: Verdict | None, events: list[Record]) -> str | None:
    if state is RunPhase.cancelled:
        last = [event for event in events if event["event"] == "cancelled"][-1]
        return f"asked for by {last.get('user', '?')}, before job {last.get('job', '?')} took it up"
    return verdict.cause if verdict is not None else None


def _steps(run: RunDir, record: Record) -> int | None:
    """Return train.steps: as run.json says unless a resume may have changed it, else as config.yaml says."""
    steps = record.get("steps")
    if is_whole(steps) and not record.get("resumes"):
        return steps
    try:
        found = _STEPS.search(run.config.read_text())
    except (OSError, ValueError):
        return None
    return None if found is None else int(found[1])


def _tokens(record: Record, steps: int | None) -> int | None:
    """Return the tokens of a whole run with a ramp of its batch, where run.json still says its last step."""
    tokens = record.get("tokens")
    return tokens if is_whole(tokens) and record.get("steps") == steps else None


def job_of_record(run: RunDir, record: Record) -> SubmittedJob | None:
    """Return the job that run.json says was submitted last; None for a run that never was.

    The array's id of a member of a sweep stands in the sweep's record, under the same token.
    """
    newest = newest_job(record)
    job = _job_of_entry(run, newest)
    if newest is None or job is None or "alternative" not in newest or chosen_alternative(run) is not None:
        return job
    others = [entry for entry in jobs_of(record)[:-1] if "alternative" in entry]
    found = (_job_of_entry(run, entry) for entry in others)
    return dataclasses.replace(job, alternatives=tuple(each for each in found if each is not None))


def _job_of_entry(run: RunDir, entry: Any) -> SubmittedJob | None:
    if not isinstance(entry, dict):
        return None
    token, job, name, user, task = (entry.get(key) for key in ("token", "id", "name", "user", "task"))
    submitted = entry.get("submitted")
    texts = isinstance(token, str) and isinstance(name, str) and isinstance(user, str)
    if not texts or not is_number(submitted) or not isinstance(job, str | None):
        return None
    array = entry.get("pack")
    if job is None and (is_whole(task) or is_whole(array)):
        job = array_ids(SweepDir(run.path.parent)).get(str(token))
    cluster = entry.get("cluster")
    cluster = cluster if isinstance(cluster, str) else None
    task = task if is_whole(task) else None
    found = SubmittedJob(str(token), job, str(name), str(user), float(submitted), task, cluster)
    return _in_its_place(run, array, found) if is_whole(array) else found


def _in_its_place(run: RunDir, array: int, job: SubmittedJob) -> SubmittedJob:
    """Return the job of a member that shares its node: the one that has taken it, or any of its array."""
    job = dataclasses.replace(job, is_shared=True)
    place = newest_place(run, array)
    if place is None or place.job is None or place.goes_on:
        return job
    number, tasks = job_and_tasks(place.job)
    task = tasks[0] if tasks else None
    return dataclasses.replace(job, job=number, task=task, has_left=place.end is not None)


def array_ids(sweep: SweepDir) -> dict[str, str]:
    """Return the known ids of a sweep's arrays by their tokens; none for what is no sweep."""
    try:
        return _array_ids(sweep, sweep.record.stat().st_mtime_ns)
    except (OSError, ConfigError):
        return {}


@functools.lru_cache(maxsize=64)
def _array_ids(sweep: SweepDir, _modified: int) -> dict[str, str]:
    return {array.token: array.id for array in read_sweep(sweep).arrays if array.id is not None}


def median_of(rows: Sequence[Record], key: str) -> float | None:
    """Return the median of a key over the rows that have a number there."""
    values = [row[key] for row in rows if is_number(row.get(key))]
    return statistics.median(values) if values else None


def seconds_left(rows: Sequence[Record], steps: int | None, tokens: int | None = None) -> float | None:
    """Extrapolate the recent median step time to the end of the run; where later steps are longer, `tokens`
    is what the run consumes in all, and the recent speed counts.
    """
    speed, trained = median_of(rows[-RECENT_ROWS:], "tokens_per_s"), rows[-1].get("tokens") if rows else None
    if tokens is not None and speed and is_whole(trained):
        return max(0, tokens - trained) / speed
    step_time_s = median_of(rows[-RECENT_ROWS:], "step_time_s")
    if step_time_s is None or steps is None:
        return None
    return max(0, steps - int(rows[-1]["step"])) * step_time_s


def read_ending(
    run: RunDir, events: list[Record], now: float, record: Record | None = None
) -> tuple[RunPhase, Verdict | None]:
    """Return a run's state, and the verdict of its last attempt where there is one; see `name_of`."""
    record = read_record(run) if record is None else record
    attempt = newest_attempt(events)
    if _is_cancelled(record, events, None if attempt is None else attempt.number):
        return RunPhase.cancelled, None
    if (failure := start_failure(run, events, record)) is not None:
        return failure.state, failure
    if attempt is None:
        if _may_still_start(record):
            return RunPhase.not_started, None
        # The sweep on this machine ended before it was this member's turn.
        return (RunPhase.interrupted if record.get("jobs") == [] else RunPhase.died), None
    verdict = node_verdict(attempt)
    meant = (newest_job(record) or {}).get("attempt")
    if is_whole(meant) and meant > attempt.number:
        # A job was submitted for an attempt after the last one that began.
        return RunPhase.queued, verdict
    if verdict is not None:
        restart = restart_to_come(attempt)
        if restart is not None and is_awaited(restart, attempt, now, last_growth(run)):
            return RunPhase.restarting, verdict
        is_requeued = attempt.decision is not None and attempt.decision["event"] == "requeued"
        goes_on = verdict.code in (EXIT_STOPPED, EXIT_INTERRUPTED) and is_requeued
        return (RunPhase.queued if goes_on else verdict.state), verdict
    if not is_of_this_host(attempt.start):
        # A step may take longer than that, but its node's agent says every few seconds that it lives.
        is_heard = any(now - _written(file) < _SILENCE_S for file in attempt_files(run))
        return (RunPhase.running if is_heard else RunPhase.unknown), None
    if leader_lives(attempt.start):
        return RunPhase.running, None
    return _without_leader(attempt)


def start_failure(run: RunDir, events: list[Record], record: Record | None = None) -> Verdict | None:
    """Return why the run's newest job ended before an attempt of it began; None where it did not.

    `record` is the run's, where it was read already.
    """
    starts = [event for event in events if event["event"] in ("attempt_started", "start_failed")]
    if not starts or starts[-1]["event"] != "start_failed":
        return None
    job = job_of_record(run, read_record(run) if record is None else record)
    if job is None or job.label is None or job.label != starts[-1].get("job"):
        return None
    return Verdict(int(starts[-1].get("code", EXIT_FAILED)), str(starts[-1].get("cause")), explained=True)


def _is_cancelled(record: Record, events: list[Record], attempt: int | None) -> bool:
    """Whether the newest job was taken out of the queue before it began the attempt that it was for."""
    token = (newest_job(record) or {}).get("token")
    began = -1 if attempt is None else attempt
    return token is not None and any(
        event["event"] == "cancelled" and event["attempt"] > began and event.get("token") == token
        for event in events
    )


def _without_leader(attempt: Attempt) -> tuple[RunPhase, Verdict | None]:
    """The leading process died without a verdict of its own; what the ranks wrote still counts."""
    is_finished = 0 in attempt.finished_ranks
    if is_finished or first_failure(attempt) is not None:
        verdict = judge(attempt, exit_code=0 if is_finished else 1, interruption=None)
        return verdict.state, verdict
    return RunPhase.died, None


def _may_still_start(record: Record) -> bool:
    """Whoever prepares a run starts it; whether that process is gone can be told on its own host only."""
    if not is_of_this_host(record) or not is_whole(record.get("pid")):
        return True
    return leader_lives(record)


def attempt_files(run: RunDir) -> Iterator[Path]:
    """Yield the files that the run's newest two attempts write while they live, those first that are written
    most often; those of commands about the run left out.
    """
    yield run.metrics
    yield from run.heartbeats.glob("node-*.json")
    # Whoever asks about a run of a thousand ranks does not ask for the files of all its attempts.
    own = [file for file in event_files(run) if not file.name.startswith(_OF_COMMANDS)]
    yield from _of_newest(own)
    for folder in _of_newest([*run.logs.glob("attempt-*")]):
        yield from folder.glob("*.log")


def _of_newest(files: Sequence[Path]) -> list[Path]:
    """Return those files that do not belong to attempts before the newest two."""
    numbers = [int(match[1]) if (match := _ATTEMPT.match(file.name)) else None for file in files]
    last = max((number for number in numbers if number is not None), default=0)
    return [file for file, number in zip(files, numbers, strict=True) if number is None or number >= last - 1]


def last_growth(run: RunDir) -> float:
    """Return when an attempt of the run last wrote something, in Unix seconds; 0 where none ever did."""
    return max(map(_written, attempt_files(run)))


def _written(file: Path) -> float:
    """Return when a file was written; 0 for one that cannot be seen."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


@dataclass(frozen=True)
class MemberState:
    """One member of a sweep: which, what distinguishes it, and the state of its run."""

    member: SweepMember
    run: RunDir
    state: RunState


@dataclass(frozen=True)
class SweepState:
    """A sweep as `orchestra status` tells of it; `problem` says why its record could not be read."""

    sweep: SweepDir
    members: tuple[MemberState, ...]
    created: float = 0.0
    problem: str | None = None

    @property
    def counts(self) -> dict[RunPhase, int]:
        """How many members are in which state, in the order of the states."""
        return by_phase(member.state for member in self.members)

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints: all members with what distinguishes them."""
        return {
            "kind": "sweep",
            "name": self.sweep.name,
            "path": str(self.sweep.path),
            "created": self.created,
            "counts": self.counts,
            "problem": self.problem,
            "members": [
                {"index": each.member.index, "overrides": list(each.member.overrides), **each.state.to_json()}
                for each in self.members
            ],
        }


def by_phase(states: Iterable[RunState]) -> dict[RunPhase, int]:
    """Return how many there are of each state, in the order of the states."""
    counts = Counter(state.state for state in states)
    return {phase: counts[phase] for phase in RunPhase if counts[phase]}


def read_sweep_state(sweep: SweepDir, now: float) -> SweepState:
    """Read a sweep's record and the states of its members. Raises ConfigError when there is no record."""
    record = read_sweep(sweep)
    members = []
    for member, run in runs_of(sweep, record):
        name = f"{sweep.name}/{member.index:03d}"
        member = dataclasses.replace(member, overrides=overrides_in_force(run, member))
        members.append(MemberState(member, run, dataclasses.replace(read_state(run, now), name=name)))
    return SweepState(sweep, tuple(members), record.created)


def runs_of(sweep: SweepDir, record: Sweep) -> list[tuple[SweepMember, RunDir]]:
    """Return the members with their runs, wherever these lie."""
    return [(member, record.run(sweep, member)) for member in record.members]
