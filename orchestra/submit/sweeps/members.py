"""The states of a sweep's members, which of them need a job, and which runs of other sweeps it can take over.

Read from the runs' own records and Slurm's queue, which is asked once for all members. Where Slurm does not
answer, nothing may be submitted: a job that is not seen may still be there.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from checkpointing.catalog import read_manifest, split, stored_in
from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.storage import open_storage
from conf.schema import CheckpointConfig
from orchestra.data.token_files import TOKENS_FACT, tokens_fact
from orchestra.errors import ConfigError, LaunchError
from orchestra.recovery.history import last_attempt
from orchestra.report.run_state import RunState, read_state
from orchestra.report.scheduler import with_scheduler
from orchestra.run.control import stop_requests
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir, Sweep, SweepDir, SweepMember, is_sweep, read_sweep
from orchestra.run.record import RunPhase, checkpoint_places, read_record
from orchestra.run.run_lineage import read_lineage
from orchestra.submit.job_record import number_of_jobs
from orchestra.submit.submission import Submission
from orchestra.submit.wait import is_being_ended, settled, unclear

DONE = RunPhase.finished
# A member in one of these states is left alone; "unknown" and "unreadable" may be alive.
_LEFT_ALONE = (
    *(DONE, RunPhase.running, RunPhase.restarting, RunPhase.starting, RunPhase.queued),
    *(RunPhase.being_resumed, RunPhase.unknown, RunPhase.unreadable),
)
# Slurm may start the job of such a member again in the next moment.
_BEING_ENDED = RunPhase.being_ended


@dataclass(frozen=True)
class MemberRun:
    """A member of a sweep, its run, and the run's state."""

    member: SweepMember
    run: RunDir
    state: RunState
    # How many jobs were submitted for it when its state was read.
    num_jobs: int = 0

    @property
    def needs_job(self) -> bool:
        """Whether it is neither done nor, as far as anybody knows, alive."""
        return self.state.state not in (*_LEFT_ALONE, _BEING_ENDED)

    @property
    def is_own_and_alive(self) -> bool:
        """Whether it is this sweep's own run and has, or may have, a job that waits or runs."""
        return not self.needs_job and self.state.state != DONE and self.member.adopted is None

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is another sweep's run, which goes on from its checkpoints when that one is resumed."""
        return self.member.adopted is not None and self.run.path.exists()


@dataclass(frozen=True)
class ExistingSweep:
    """A sweep that exists, as it was read."""

    sweep: SweepDir
    record: Sweep


def sweeps_in(parent: Path) -> list[ExistingSweep]:
    """Return the sweeps in a folder, newest first; what is no sweep of this version is passed over."""
    found = []
    try:
        names = [entry.name for entry in os.scandir(parent) if not entry.name.startswith(".")]
    except OSError:
        return []
    for name in names:
        sweep = SweepDir(parent / name)
        if is_sweep(sweep.path):
            try:
                found.append(ExistingSweep(sweep, read_sweep(sweep)))
            except ConfigError:
                continue
    return sorted(found, key=lambda sweep: -sweep.record.created)


def same_sweep(plan: Submission, existing: Iterable[ExistingSweep]) -> ExistingSweep | None:
    """Return the newest sweep with the same members, and the same name where one is configured; none of
    whose members trained other tokens under the same path.

    Raises ConfigError where the sweep of a configured name did.
    """
    tokens = _TokensNow(plan)
    for other in existing:
        record = other.record
        if record.signature != plan.signature or plan.configured_name not in (None, record.name):
            continue
        if not any(tokens.differ(record.run(other.sweep, member), member) for member in record.members):
            return other
        if plan.configured_name is not None:
            raise ConfigError(
                f"run.name={record.name}: {other.sweep.path} has the same members, and they trained other "
                f"tokens than lie under data.path now; give another run.name to train these, or bring back "
                f"the token files that lay there"
            )
    return None


class _TokensNow:
    """Tells the members that trained other tokens than lie under the data.path of a plan's members now."""

    def __init__(self, plan: Submission) -> None:
        self._configs = {member.signature: member.config for member in plan.members}
        # By the path or blend: the members share most of them.
        self._known: dict[str, str | None] = {}

    def differ(self, run: RunDir, member: SweepMember) -> bool:
        """Whether a run that computes what a member of the plan does has a newest checkpoint of others.
        Without a checkpoint nobody can say.
        """
        config = self._configs[member.signature]
        key = repr(config.data)
        if key not in self._known:
            self._known[key] = tokens_fact(config.data)
        now = self._known[key]
        return now is not None and _trained_tokens(run, config.checkpoint) not in (None, now)


def _trained_tokens(run: RunDir, settings: CheckpointConfig) -> str | None:
    """Return the tokens that a run's newest checkpoint names; None where there is none, or it names none."""
    try:
        storages = [open_storage(place) for place in checkpoint_places(run, settings)]
        found = split(stored_in(storages), read_lineage(run))[0]
        state = read_manifest(storages[found[-1].place], found[-1]).state if found else {}
    except (CheckpointError, OSError):
        return None
    facts = state.get("config")
    trained = facts.get(TOKENS_FACT) if isinstance(facts, dict) else None
    return trained if isinstance(trained, str) else None


def adoptable_runs(plan: Submission, existing: Iterable[ExistingSweep]) -> dict[int, MemberRun]:
    """Return members of other sweeps that compute what members of the plan do and are done or alive.

    By the index in the plan; a finished one before one that runs. One of another cluster counts as alive
    unless its own records say that it ended. Raises LaunchError when Slurm is silent.
    """
    wanted, tokens = {member.signature for member in plan.members}, _TokensNow(plan)
    candidates = [
        (other.sweep, other.record, member)
        for other in existing
        for member in other.record.members
        if member.signature in wanted and not _was_changed(other.record.run(other.sweep, member))
    ]
    best: dict[str, MemberRun] = {}
    for candidate in _member_states(
        (record.run(sweep, member), member) for sweep, record, member in candidates
    ):
        signature = candidate.member.signature
        is_better = signature not in best or (
            candidate.state.state == DONE and best[signature].state.state != DONE
        )
        is_alive = not candidate.needs_job and candidate.state.state != _BEING_ENDED
        may_be_alive = (is_alive or unclear(candidate.state) is not None) and not _is_to_end(candidate)
        is_there = may_be_alive and candidate.run.path.exists()
        if is_there and is_better and not tokens.differ(candidate.run, candidate.member):
            best[signature] = candidate
    return {member.index: best[member.signature] for member in plan.members if member.signature in best}


def _was_changed(run: RunDir) -> bool:
    """Whether somebody resumed a run with other values than it was begun with."""
    resumes = read_record(run).get("resumes")
    entries = resumes if isinstance(resumes, list) else []
    return any(isinstance(entry, dict) and entry.get("overrides") for entry in entries)


def _is_to_end(candidate: MemberRun) -> bool:
    """Whether somebody cancelled a member that has not ended yet."""
    run = candidate.run
    if candidate.state.state == DONE or (asked := stop_requests.requested_attempt(run)) is None:
        return False
    last = last_attempt(read_events(run, ("attempt_started",)))
    is_past = last is not None and asked < last
    return not is_past and any(
        request.reason == stop_requests.CANCEL for request in stop_requests.read_requests(run, asked)
    )


def member_states(sweep: SweepDir, record: Sweep) -> list[MemberRun]:
    """Return the states of a sweep's members; those whose jobs are being ended are waited for, for a while.

    Raises LaunchError when Slurm cannot be asked about them, or is not the Slurm that has their jobs.
    """
    states = _member_states(((record.run(sweep, member), member) for member in record.members), waits=True)
    if problem := next((why for member in states if (why := unclear(member.state)) is not None), None):
        raise LaunchError(problem)
    return states


def _member_states(members: Iterable[tuple[RunDir, SweepMember]], *, waits: bool = False) -> list[MemberRun]:
    pairs = list(members)
    now = time.time()
    runs = [run for run, _ in pairs]
    # First: a job that is submitted later is then seen as a change.
    counts = [number_of_jobs(run) for run in runs]
    own = [read_state(run, now) for run in runs]
    states, problems = settled(runs, own) if waits else with_scheduler(runs, own)
    if problems:
        raise LaunchError(
            f"{'; '.join(problems)}: whether jobs of the sweep exist is not known, and nothing "
            f"was submitted; try again when Slurm answers"
        )
    states = [replace(state, state=_BEING_ENDED) if is_being_ended(state) else state for state in states]
    triples = zip(pairs, states, counts, strict=True)
    return [MemberRun(member, run, state, count) for (run, member), state, count in triples]


def counted(members: Sequence[MemberRun]) -> str:
    """Return how many are in which state, in words: 3 finished, 1 running."""
    counts = Counter(member.state.state for member in members)
    return ", ".join(f"{number} {state}" for state, number in counts.most_common())
