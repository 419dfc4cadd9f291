"""Goes on with a sweep that exists: members that are neither done nor alive are submitted again.

They become new arrays of the same sweep, and train on in the same run directories, with the code as it is
now.

Which members those are is decided elsewhere (`standing`).
"""

from __future__ import annotations

import itertools
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conf.schema import Config
from orchestra.config.compose import changed_config
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.recovery.history import last_attempt
from orchestra.run.config_file import read_config, to_yaml
from orchestra.run.events import read_events
from orchestra.run.files import write_atomically
from orchestra.run.paths import RunDir, Sweep, SweepDir, SweepMember, to_json
from orchestra.run.planned_faults import still_to_come
from orchestra.run.record import read_record
from orchestra.run.stop_requests import user_name
from orchestra.sizes.units import first_few
from orchestra.submit.claims import next_attempt_number, take_turn
from orchestra.submit.code_snapshot import is_snapshot, take_snapshot
from orchestra.submit.hand_over import Outcome, SweepLedger, hand_over, record_jobs, write_member
from orchestra.submit.job import Share
from orchestra.submit.job_record import JobEntry, member_intent, number_of_jobs, write_member_record
from orchestra.submit.new_run import made_as_one, origin
from orchestra.submit.submission import PlannedMember
from orchestra.submit.sweeps import lock
from orchestra.submit.sweeps.arrays import (
    Numbering,
    PlannedArray,
    Templates,
    planned_arrays,
    template_of,
    with_code,
)
from orchestra.submit.sweeps.members import Standing


@dataclass(frozen=True)
class Returning:
    """A member that is to be submitted again, and how it goes on."""

    member: SweepMember
    # The attempt that it goes on with.
    attempt: int
    # The configuration where overrides change it, or where the run is made anew; None: as it is frozen.
    config: Config | None = None
    # Whether it was another sweep's run, and gets a directory of its own now.
    is_new: bool = False
    # How many jobs it had when this was decided.
    num_jobs: int = 0


@dataclass(frozen=True)
class Comeback:
    """What of a sweep is to be submitted again."""

    sweep: SweepDir
    # As it was read, before its members' states were asked for.
    record: Sweep
    members: tuple[Returning, ...]
    share: Callable[[Config], Share]
    array_size: int

    def code(self, number: int) -> Path:
        """Return the snapshot that the members train on with: the newest, or one of the code as it is now."""
        newest = self.sweep.newest_code()
        return newest if is_snapshot(newest) else self.sweep.code_of_array(number)

    def templates(self, code: Path) -> dict[int, str]:
        """Return the template of each member's script: the one it was submitted with unless it changes."""
        made = Templates(self.sweep)
        before = _templates_before(self.sweep, self.record)
        found = {}
        for it in self.members:
            index = it.member.index
            if it.config is None and index in before:
                found[index] = before[index]
            else:
                config = it.config or read_config(self.sweep.member(index).config)
                found[index] = made.of(config, self.share(config))
        return {index: with_code(template, self.sweep, code) for index, template in found.items()}


def _templates_before(sweep: SweepDir, record: Sweep) -> dict[int, str]:
    """Return what members were submitted with last; without those whose script cannot be read."""
    found: dict[int, str] = {}
    for array in record.arrays:
        try:
            template = template_of(sweep.script(array.number).read_text())
        except OSError:
            continue
        found.update(dict.fromkeys(array.members, template))
    return found


@dataclass(frozen=True)
class Changes:
    """What changes about members that go on."""

    overrides: tuple[str, ...]
    situation: Situation
    # Configurations by signature, for members whose run another sweep made and somebody removed.
    composed: Mapping[str, Config]

    def made_to(self, config: Config) -> Config:
        """Return a frozen configuration with the changes. Raises ConfigError where it may not change so."""
        return changed_config(config, self.overrides, self.situation) if self.overrides else config


def returning(standings: Sequence[Standing], changes: Changes) -> tuple[Returning, ...]:
    """Return how members go on. Raises ConfigError with what they may not change, each problem once."""
    problems: dict[str, list[str]] = {}
    found = []
    for it in standings:
        try:
            found.append(_returning(it, changes))
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(f"{it.member.index:03d}")
    if problems:
        raise ConfigError([f"member {first_few(members)}: {text}" for text, members in problems.items()])
    return tuple(found)


def _returning(standing: Standing, changes: Changes) -> Returning:
    member, run = standing.member, standing.run
    attempt = next_attempt_number(run, last_attempt(read_events(run)))
    is_new = member.adopted is not None
    if not changes.overrides and not is_new:
        return Returning(member, attempt, num_jobs=standing.num_jobs)
    before = changes.composed.get(member.signature) if is_new else None
    if before is None and not run.path.exists():
        raise ConfigError(
            f"{run.path}, which this sweep took over, is gone; submit the sweep again with its own values "
            f"(`orchestra submit -m …`)"
        )
    before = before or read_config(run.config)
    # Rehearsed failures of earlier attempts may name ranks and steps that are no more.
    inject = still_to_come(before.recovery.inject, 0 if is_new else attempt)
    config = changes.made_to(replace(before, recovery=replace(before.recovery, inject=inject)))
    return Returning(member, 0 if is_new else attempt, config, is_new, standing.num_jobs)


def go_on(comeback: Comeback, command: Sequence[str]) -> tuple[SweepLedger, Outcome]:
    """Submit the members again; return the sweep's records and what became of the arrays.

    Raises ConfigError when another command is doing the same, `RefusedError` and LaunchError as `hand_over`
    does.
    """
    sweep, record = comeback.sweep, comeback.record
    claimed = [lock.take(sweep, record)]
    turns: list[Path] = []
    try:
        _take_turns(comeback, turns)
        arrays = _planned(comeback, claimed)
        record = _written(comeback, arrays, command)
    except BaseException as error:
        lock.release(sweep, claimed)
        for turn in turns:
            turn.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise ConfigError(
                f"{sweep.path}: cannot be written: {error.strerror}; nothing was submitted"
            ) from error
        raise
    ledger = SweepLedger(sweep, record, {it.member.index: it.attempt for it in comeback.members})
    return ledger, hand_over(ledger, arrays)


def _take_turns(comeback: Comeback, turns: list[Path]) -> None:
    """Claim each member's next job. Raises ConfigError where somebody resumes, or resumed, one by itself."""
    now = time.time()
    for it in comeback.members:
        if it.is_new:
            continue
        run = comeback.sweep.member(it.member.index)
        if (turn := take_turn(run, it.num_jobs, now)) is not None:
            turns.append(turn)
        if turn is None or number_of_jobs(run) != it.num_jobs:
            name = f"{comeback.sweep.name}/{run.name}"
            raise ConfigError(
                f"{name} is being resumed by another command, and nothing was submitted by this one: look at "
                f"it (`orchestra status {name}`) and try again"
            )


def planned_again(comeback: Comeback) -> list[PlannedArray]:
    """Return the arrays that `go_on` would submit, for a dry run."""
    begin = max((array.number for array in comeback.record.arrays), default=-1) + 1
    templates = comeback.templates(comeback.code(begin))
    return planned_arrays(templates, _numbering(comeback), itertools.count(begin))


def _planned(comeback: Comeback, claimed: list[int]) -> list[PlannedArray]:
    def numbers() -> Iterator[int]:
        yield claimed[0]
        for number in lock.numbers(comeback.sweep, comeback.record):
            claimed.append(number)
            yield number

    code = comeback.code(claimed[0])
    _ensure_snapshot(code)
    return planned_arrays(comeback.templates(code), _numbering(comeback), numbers())


def _ensure_snapshot(code: Path) -> None:
    if code.exists() and is_snapshot(code):
        return
    draft = code.with_name(f".{code.name}.{secrets.token_hex(4)}")
    try:
        take_snapshot(draft)
        # Of a command that ended before it submitted anything.
        shutil.rmtree(code, ignore_errors=True)
        draft.rename(code)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _numbering(comeback: Comeback) -> Numbering:
    throttle = comeback.record.facts.get("array_throttle")
    changed = [it.config.cluster.array_throttle for it in comeback.members if it.config is not None]
    given = [number for number in changed if number is not None]
    return Numbering(
        comeback.sweep.name,
        user_name(),
        time.time(),
        comeback.array_size,
        min(given) if given else throttle,
    )


def _written(comeback: Comeback, arrays: Sequence[PlannedArray], command: Sequence[str]) -> Sweep:
    """Write all that is to be on disk before sbatch; return the sweep's new record."""
    sweep, record = comeback.sweep, comeback.record
    jobs = {index: it.array for it in arrays for index in it.array.members}
    for it in comeback.members:
        index = it.member.index
        if it.is_new:
            _make_member(it, sweep, record, member_intent(jobs[index], index, it.attempt))
        elif it.config is not None:
            _replace_config(sweep.member(index), it)
    made = {it.member.index for it in comeback.members if it.is_new}
    members = (replace(it, adopted=None) if it.index in made else it for it in record.members)
    now = {"time": time.time(), "command": list(command), "code_revision": origin()["code_revision"]}
    resumes = [*record.facts.get("resumes", []), now]
    new = replace(
        record,
        members=tuple(members),
        arrays=(*record.arrays, *(it.array for it in arrays)),
        facts={**record.facts, "resumes": resumes},
    )
    for planned in arrays:
        sweep.script(planned.array.number).write_text(planned.script())
    write_atomically(sweep.record, to_json(new))
    attempts = {it.member.index: it.attempt for it in comeback.members}
    for planned in arrays:
        record_jobs(sweep, planned.array, attempts, but=made)
    for it in comeback.members:
        if it.config is not None and not it.is_new:
            _record_change(sweep.member(it.member.index), it.config, {**now, "attempt": it.attempt})
    return new


def _make_member(it: Returning, sweep: SweepDir, record: Sweep, entry: JobEntry) -> None:
    assert it.config is not None
    member = PlannedMember(
        it.member.index, it.member.signature, record.overrides, it.member.overrides, it.config, Share()
    )

    def write(draft: Path, _: Path) -> None:
        # The draft of this one member's folder.
        write_member(member, RunDir(draft), sweep, record, entry)

    if made_as_one(sweep.member(it.member.index).path, write, may_rename=False) is None:
        raise ConfigError(f"{sweep.member(it.member.index).path} is in the way; remove it")


def _record_change(run: RunDir, config: Config, resume: dict[str, Any]) -> None:
    record = read_record(run)
    resumes = [*(record.get("resumes") or []), resume]
    write_member_record(run, {**record, "steps": config.train.steps, "resumes": resumes})


def _replace_config(run: RunDir, it: Returning) -> None:
    """Put a changed configuration in place as one act; the older stays beside it, under its last attempt."""
    assert it.config is not None
    text = to_yaml(it.config)
    before = run.config.read_text()
    if text == before:
        return
    if it.attempt > 0 and not run.config_of_attempt(it.attempt - 1).exists():
        write_atomically(run.config_of_attempt(it.attempt - 1), before)
    write_atomically(run.config, text)
