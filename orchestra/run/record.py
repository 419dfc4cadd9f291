"""A run's record, `run.json`, and the words for the state that a run is in. Standard library only."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from conf.schema import CheckpointConfig
from orchestra.run.control.chosen_alternative import in_order
from orchestra.run.files import Record, read_json, write_atomically
from orchestra.run.paths import RunDir, SweepMember


class RunPhase(StrEnum):
    """The state of a run, as `orchestra status` prints it; in the order in which counts of a sweep are told:
    what is done, what is under way, what needs somebody.
    """

    finished = "finished"
    # Its ranks are there, or will be in a moment.
    running = "running"
    # An attempt failed, and its leader waits to begin the next one.
    restarting = "restarting"
    # Slurm has started its job, and no agent has come yet.
    starting = "starting"
    # Its job waits in Slurm's queue.
    queued = "queued"
    not_started = "not started"
    # Somebody is submitting it once more.
    being_resumed = "being resumed"
    # Ended on request with a checkpoint, or at once.
    stopped = "stopped"
    interrupted = "interrupted"
    # Its job was taken out of the queue.
    cancelled = "cancelled"
    failed = "failed"
    # The process that led it is gone and left no verdict.
    died = "died"
    # Led from another host, and silent for long.
    unknown = "unknown"
    # Prepared, but Slurm has no job of it.
    not_submitted = "not submitted"
    # Its files may not be read.
    unreadable = "unreadable"
    # It is asked to stop, and Slurm may start its job again in the next moment.
    being_ended = "being ended"

    @property
    def is_alive(self) -> bool:
        """Whether it trains, or will without anybody's doing."""
        return self in _ALIVE

    @property
    def goes_on(self) -> bool:
        """Whether it is alive, or nobody can say that it is not."""
        return self.is_alive or self in (RunPhase.unknown, RunPhase.unreadable)

    @property
    def ended_badly(self) -> bool:
        """Whether something went wrong that somebody has to look at."""
        return self in (RunPhase.failed, RunPhase.died, RunPhase.not_submitted, RunPhase.unreadable)

    @property
    def ended_early(self) -> bool:
        """Whether its last attempt left a verdict before the last step."""
        return self in (RunPhase.stopped, RunPhase.failed, RunPhase.interrupted)

    @property
    def is_before_start(self) -> bool:
        """Whether it waits for its first start, or for its job's."""
        return self in (RunPhase.queued, RunPhase.not_started)

    @property
    def is_over(self) -> bool:
        """Whether its wall time is over until somebody goes on with it."""
        others = (RunPhase.being_resumed, RunPhase.being_ended, RunPhase.not_submitted)
        return not self.is_alive and self not in others


_ALIVE = frozenset(
    (RunPhase.running, RunPhase.restarting, RunPhase.starting, RunPhase.queued, RunPhase.not_started)
)


def read_record(run: RunDir) -> Record:
    """Return run.json; empty where it is missing or torn."""
    return in_order(run, read_json(run.record) or {})


def jobs_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a run's record says of its Slurm jobs, intents included, the newest last."""
    jobs = record.get("jobs")
    return [entry for entry in jobs if isinstance(entry, dict)] if isinstance(jobs, list) else []


def newest_job(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a run's record says of the job that was submitted last; None where none was."""
    return next(reversed(jobs_of(record)), None)


def overrides_in_force(run: RunDir, member: SweepMember, upcoming: Sequence[str] = ()) -> tuple[str, ...]:
    """Return what distinguishes a member of a sweep, with the values that resumes gave its keys since, and
    that an `upcoming` one will.
    """
    resumes = read_record(run).get("resumes")
    entries = resumes if isinstance(resumes, list) else []
    given = [entry.get("overrides") for entry in entries if isinstance(entry, dict)]
    texts = [text for some in given if isinstance(some, list) for text in some if isinstance(text, str)]
    newest = {_key(text): text for text in (*texts, *upcoming)}
    return tuple(newest.get(_key(text), text) for text in member.overrides)


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def write_record(run: RunDir, record: Mapping[str, Any], *, is_synced: bool = True) -> None:
    """Replace run.json as one act; `is_synced`: it is on the disk then. Raises OSError."""
    write_atomically(run.record, json.dumps(record, indent=2) + "\n", is_synced=is_synced)


def whole_record(run: RunDir) -> Record:
    """Return run.json. Raises OSError where it is missing, torn or cannot be read: then nothing is known, and
    not that it says nothing.
    """
    text = run.record.read_text(errors="replace")
    try:
        record = json.loads(text)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise OSError(errno.EIO, "holds no whole JSON object", str(run.record))
    return in_order(run, record)


def change_record(run: RunDir, change: Callable[[Record], Mapping[str, Any]]) -> None:
    """Replace run.json by what `change` makes of it. Raises OSError, also where it cannot be read: whatever
    else it says would be lost for ever.
    """
    write_record(run, change(whole_record(run)))


def wandb_id(run: RunDir) -> str | None:
    """Return the id under which Weights & Biases knows the run; None where the record has none."""
    known = read_record(run).get("wandb_id")
    return known if isinstance(known, str) else None


def checkpoint_places(run: RunDir, settings: CheckpointConfig) -> list[str]:
    """Return where a run's checkpoints lie: its own place, and the fallback where there is one."""
    places = (settings.dir or str(run.checkpoints), fallback_place(run, settings.fallback_dir))
    return [place for place in places if place is not None]


def fallback_place(run: RunDir, fallback_dir: str | None) -> str | None:
    """Return where in `checkpoint.fallback_dir` a run's checkpoints go: no two runs share it, and a run that
    was moved still finds it. None where there is no such folder.
    """
    if fallback_dir is None:
        return None
    record = read_record(run)
    own = wandb_id(run) or hashlib.sha256(str(run.path).encode()).hexdigest()[:8]
    return f"{fallback_dir.rstrip('/')}/{record.get('name') or run.name}-{own}"
