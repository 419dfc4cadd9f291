"""Makes a run that exists ready for a new Slurm job and submits it: `orchestra resume` on a cluster.

The order is the contract: the turn is taken, then code, configuration and script are replaced (the older ones
kept), then the intent, then sbatch, then the job's id. Where Slurm refuses, all stands as before.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from launchers.errors import LauncherError, SlurmRefused
from launchers.slurm import script
from orchestra.errors import ConfigError, LaunchError
from orchestra.report.state import name_of, read_record
from orchestra.rundir import RunDir
from orchestra.submit.claims import take_turn, write_whole
from orchestra.submit.job import Share, batch_job, new_token
from orchestra.submit.resubmission import intent, submit_job
from orchestra.submit.resume import NextAttempt, freeze, number_of_jobs, pending_attempt, record_resume
from orchestra.submit.snapshot import take_snapshot


@dataclass(frozen=True)
class PlannedResume:
    """How a run goes on, and the token and the share of a node of the job that is to train it."""

    next: NextAttempt
    token: str
    share: Share

    @property
    def run(self) -> RunDir:
        return self.next.run

    def script(self) -> str:
        """Return the batch script, word for word."""
        return script.rendered(batch_job(self.next.config, self.run, self.token, self.share))


def planned_resume(plan: NextAttempt, share: Share) -> PlannedResume:
    """Return the job of a run that goes on. Starts and writes nothing."""
    return PlannedResume(plan, new_token(), share)


def submit_resume(plan: PlannedResume, command: Sequence[str]) -> str:
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
            entry = intent(run, plan.token, plan.next.number)
            job = _submitted(plan, entry, undo)
            undo.pop_all()
            return job
    except SlurmRefused as error:
        raise ConfigError(f"Slurm refuses the job: {error}") from error
    except LauncherError as error:
        raise LaunchError(f"{error}; nothing was submitted") from error
    except OSError as error:
        raise ConfigError(
            f"{run.path}: cannot be written: {error.strerror}; nothing was submitted"
        ) from error


def _submitted(plan: PlannedResume, entry: dict[str, object], undo: ExitStack) -> str:
    try:
        return submit_job(plan.run, plan.run.batch_script, entry)
    except LaunchError:
        # Slurm may have the job: what it needs stays.
        undo.pop_all()
        raise


def _has_changed(plan: NextAttempt) -> bool:
    """Whether somebody else went on with the run since the plan was made."""
    pending = pending_attempt(plan.run, plan.last_attempt, time.time())
    return pending is not None or number_of_jobs(plan.run) != plan.num_jobs


def _replace(plan: PlannedResume, undo: ExitStack) -> None:
    """Put code, configuration, script and record in place; `undo` brings back what was there."""
    run = plan.run
    undo.callback(_restorer(run.record))
    undo.callback(_restorer(run.config))
    undo.callback(_restorer(run.batch_script))
    _replace_code(plan.next, undo)
    run.job_logs.mkdir(parents=True, exist_ok=True)
    freeze(plan.next)
    write_whole(run.batch_script, plan.script())
    # No process of this machine leads it.
    record = {**read_record(run), "pid": None, "pid_started": None}
    write_whole(run.record, json.dumps(record, indent=2) + "\n")


def _restorer(file: Path) -> Callable[[], None]:
    text = file.read_text() if file.is_file() else None

    def restore() -> None:
        if text is None:
            file.unlink(missing_ok=True)
        elif not file.is_file() or file.read_text() != text:
            write_whole(file, text)

    return restore


def _replace_code(plan: NextAttempt, undo: ExitStack) -> None:
    """Take a snapshot of the code that is running here; the older one is kept where it differs."""
    run = plan.run
    draft = run.path / f".code.{secrets.token_hex(4)}"
    try:
        take_snapshot(draft)
        if run.code.is_dir() and _are_equal(filecmp.dircmp(run.code, draft, ignore=["__pycache__"])):
            shutil.rmtree(draft)
            return
        older = run.code_of_attempt(plan.last_attempt or 0)
        kept = run.code.is_dir()
        if kept:
            shutil.rmtree(older, ignore_errors=True)
            run.code.rename(older)
        draft.rename(run.code)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    undo.callback(_bring_back, run.code, older if kept else None)


def _bring_back(code: Path, older: Path | None) -> None:
    shutil.rmtree(code, ignore_errors=True)
    if older is not None:
        with contextlib.suppress(OSError):
            older.rename(code)


def _are_equal(found: filecmp.dircmp[str]) -> bool:
    names = found.left_only or found.right_only or found.funny_files
    _, different, unreadable = filecmp.cmpfiles(found.left, found.right, found.common_files, shallow=False)
    return not (names or different or unreadable) and all(_are_equal(it) for it in found.subdirs.values())
