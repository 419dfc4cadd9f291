"""The runs after which another one begins (`orchestra submit --after RUN`): how they stand, and for which
jobs Slurm is to wait.

A run is done when its own records say so. That one of its jobs ended says little: it may go on in another one
(requeued, chained, resumed), or have stopped with exit code 0. So Slurm only keeps the follower in the queue
until the jobs of the moment are over (`afterany`), and what its job does first is to look again here
(`orchestra.agents.follow`). Read-only. Called by the commands that submit, resume and cancel, and by that
job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from launchers.slurm.queue import RUNNING, WAITING, job_and_tasks
from orchestra.errors import ConfigError, LaunchError
from orchestra.recovery.history import last_attempt
from orchestra.report.run_state import RunState, SweepState, is_run, name_of, read_state
from orchestra.report.scheduler import read_states
from orchestra.run.events import read_events
from orchestra.run.files import Record, names_in
from orchestra.run.paths import RunDir, SweepDir, is_sweep
from orchestra.run.record import RunPhase, read_record
from orchestra.sizes.units import first_few
from orchestra.submit.site import note

_WAS = frozenset({RunPhase.stopped, RunPhase.interrupted, RunPhase.cancelled})


@dataclass(frozen=True)
class Predecessor:
    """A run, or a sweep, that is to be done first."""

    name: str
    path: Path

    @property
    def place(self) -> RunDir | SweepDir | None:
        """Its directory; None where that is gone."""
        if is_sweep(self.path):
            return SweepDir(self.path)
        return RunDir(self.path) if is_run(self.path) else None


class Stand(Enum):
    """Whether a follower begins, waits or ends; where that is not known it does none of it yet."""

    done = "done"
    goes_on = "goes on"
    ended = "ended"
    not_known = "not known"


@dataclass(frozen=True)
class PredecessorProgress:
    """How a predecessor stands."""

    predecessor: Predecessor
    stand: Stand
    # In words that follow its name, as "failed (exit code 93: NonFiniteError)".
    words: str
    # Slurm's jobs that it is in, or that are to go on with it; none where it needs none, or none is known
    # here.
    jobs: tuple[str, ...] = ()


def predecessor_of(target: RunDir | SweepDir) -> Predecessor:
    """Return a run or a sweep as what a follower's record says of it."""
    return Predecessor(target.name if isinstance(target, SweepDir) else name_of(target), target.path)


def predecessors_in(record: Mapping[str, Any]) -> tuple[Predecessor, ...]:
    """Return the runs after which the run with this record begins."""
    known = record.get("after")
    entries = [entry for entry in known if isinstance(entry, dict)] if isinstance(known, list) else []
    return tuple(Predecessor(str(entry.get("name")), Path(str(entry.get("path")))) for entry in entries)


def record_of(predecessors: Iterable[Predecessor]) -> list[Record]:
    """Return what run.json says of them."""
    return [{"name": each.name, "path": str(each.path)} for each in predecessors]


def progress(predecessors: Sequence[Predecessor], now: float) -> tuple[list[PredecessorProgress], list[str]]:
    """Return how each stands at Unix time `now`, and what keeps that from being known: Slurm that could not
    be asked, or records that cannot be read.
    """
    places = [each.place for each in predecessors]
    states, problems = read_states([place for place in places if place is not None], now)
    known = iter(states)
    found = [
        _without_record(each) if place is None else _of_state(each, next(known))
        for each, place in zip(predecessors, places, strict=True)
    ]
    unknown = [f"{one.predecessor.name} {one.words}" for one in found if one.stand is Stand.not_known]
    return found, [*problems, *unknown]


def _without_record(predecessor: Predecessor) -> PredecessorProgress:
    """Return how a run stands in whose directory none was found: gone, if that can be listed."""
    try:
        run, sweep = RunDir(predecessor.path), SweepDir(predecessor.path)
        records = {run.record.name, run.config.name, sweep.record.name}
        is_gone = not records.intersection(names_in(predecessor.path))
    except OSError:
        is_gone = False
    if is_gone:
        return PredecessorProgress(predecessor, Stand.ended, "is gone: its directory holds no run any more")
    return PredecessorProgress(predecessor, Stand.not_known, f"cannot be read: {predecessor.path}")


def _of_state(predecessor: Predecessor, state: RunState | SweepState) -> PredecessorProgress:
    if isinstance(state, RunState):
        return _of_run(predecessor, state)
    if state.problem is not None:
        return PredecessorProgress(predecessor, Stand.not_known, f"cannot be read ({state.problem})")
    if not state.members:
        return PredecessorProgress(predecessor, Stand.ended, "has no members")
    each = [(f"{member.member.index:03d}", _of_run(predecessor, member.state)) for member in state.members]
    if going := [one for _, one in each if one.stand is Stand.goes_on]:
        # Of tasks (12_3) the whole array: words for a thousand tasks are more than Slurm takes.
        jobs = dict.fromkeys(job_and_tasks(job)[0] for one in going for job in one.jobs)
        return PredecessorProgress(predecessor, Stand.goes_on, f"has {len(going)} members to go", tuple(jobs))
    if unknown := [f"{number} {one.words}" for number, one in each if one.stand is Stand.not_known]:
        words = f"has members of which nothing is known: {first_few(unknown)}"
        return PredecessorProgress(predecessor, Stand.not_known, words)
    if bad := [f"{number} {one.words}" for number, one in each if one.stand is Stand.ended]:
        return PredecessorProgress(
            predecessor, Stand.ended, f"has members that are not done: {first_few(bad)}"
        )
    return PredecessorProgress(predecessor, Stand.done, "is done")


def _of_run(predecessor: Predecessor, state: RunState) -> PredecessorProgress:
    if state.state is RunPhase.finished:
        return PredecessorProgress(predecessor, Stand.done, "is done")
    # A verdict stands, and the job is still being ended: whether it goes on is not known before.
    is_being_ended = state.job_state in RUNNING
    if state.state.is_alive or is_being_ended:
        words = "is still being ended by Slurm" if not state.state.is_alive else f"is {state.state}"
        return PredecessorProgress(predecessor, Stand.goes_on, words, _jobs(state))
    if state.state.goes_on:
        why = state.cause or "led from another host, and silent for long"
        words = (
            f"cannot be read ({why})" if state.state is RunPhase.unreadable else f"is {state.state} ({why})"
        )
        return PredecessorProgress(predecessor, Stand.not_known, words)
    facts = [f"exit code {state.code}" if state.code is not None else "", state.cause or ""]
    why = ": ".join(filter(None, facts))
    verb = f"was {state.state}" if state.state in _WAS else str(state.state)
    if state.state not in (*_WAS, RunPhase.failed, RunPhase.died):
        verb = f"is {state.state}"
    return PredecessorProgress(predecessor, Stand.ended, f"{verb} ({why})" if why else verb)


def _jobs(state: RunState) -> tuple[str, ...]:
    """Return the jobs that a run is in or waits for, by Slurm's word: the end of any other one has been, and
    says nothing of it.
    """
    if state.submitted is None or state.job_state not in (*WAITING, *RUNNING):
        return ()
    labels = (state.job, *(one.label for one in (*state.submitted.alternatives, state.submitted)))
    # Of several kinds one trains: where none has begun yet, all of them are waited for.
    several = labels if state.submitted.alternatives else labels[:1]
    return tuple(dict.fromkeys(label for label in several if label is not None))


@dataclass(frozen=True)
class Following:
    """After which runs another one begins, and the jobs that Slurm is to wait for."""

    predecessors: tuple[Predecessor, ...] = ()
    # Those that are not done, by name.
    awaited: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()

    def to_json(self) -> Record:
        """Return what `--json` prints of it."""
        runs = record_of(self.predecessors)
        return {"runs": runs, "awaited": list(self.awaited), "jobs": list(self.jobs)}


def following(predecessors: Sequence[Predecessor], now: float, *, is_dry: bool = False) -> Following:
    """Return for which jobs a run has to wait that begins after others.

    Raises ConfigError where one of those ended otherwise, or has no job of this cluster, and LaunchError
    where Slurm does not say; a dry run only notes that.
    """
    found, problems = progress(predecessors, now)
    waits = [one for one in found if one.stand is not Stand.done]
    if waits and problems:
        if not is_dry:
            silent = f"how {waits[0].predecessor.name} stands is not known; nothing was submitted"
            raise LaunchError(f"{'; '.join(problems)}: {silent}")
        note(f"{'; '.join(problems)}: how {waits[0].predecessor.name} stands was not checked")
    refused = [words for one in waits if (words := _refused(one)) and not (is_dry and problems)]
    if refused:
        raise ConfigError(refused)
    jobs = dict.fromkeys(job for one in waits for job in one.jobs)
    names = tuple(one.predecessor.name for one in waits)
    return Following(tuple(predecessors), names, tuple(jobs))


def _refused(one: PredecessorProgress) -> str | None:
    """Return why Slurm cannot wait for a predecessor that is not done; None where it can."""
    name = one.predecessor.name
    if one.stand is Stand.ended:
        return (
            f"after {name}: it {one.words}, and does not go on by itself, so nothing would begin; "
            f"`orchestra resume {name}` first"
        )
    if not one.jobs:
        return (
            f"after {name}: it {one.words}, and has no job of this cluster that Slurm could wait for (it "
            f"trains in the foreground, on another cluster, or is just being submitted); try again when it "
            "is done"
        )
    return None


def refuse_cycle(run: RunDir, predecessors: Sequence[Predecessor]) -> None:
    """Raise ConfigError where one of these runs waits, over others perhaps, for `run`."""
    own, seen = run.path.resolve(), set()
    to_see = [(each, each.name) for each in predecessors]
    while to_see:
        each, trail = to_see.pop()
        path = each.path.resolve()
        if path == own:
            raise ConfigError(f"after {trail}: {run.name} would wait for itself; name another run")
        if path not in seen:
            seen.add(path)
            further = predecessors_in(read_record(RunDir(each.path)))
            to_see += [(other, f"{trail}, which begins after {other.name}") for other in further]


def has_begun(run: RunDir) -> bool:
    """Whether a run has trained: then it waits for no other one any more."""
    return last_attempt(read_events(run, ("attempt_started",))) is not None


def followers_of(place: RunDir | SweepDir, candidates: Iterable[RunDir | SweepDir], now: float) -> list[str]:
    """Return the names of those among `candidates` that wait for a run, for a sweep or a member of it."""
    own = place.path.resolve()
    names = []
    for run in candidates:
        if not isinstance(run, RunDir):
            continue
        paths = [each.path.resolve() for each in predecessors_in(read_record(run))]
        is_follower = any(own in (path, path.parent) for path in paths)
        if is_follower and read_state(run, now).state is RunPhase.not_started:
            names.append(name_of(run))
    return names
