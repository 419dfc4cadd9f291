"""`python -m orchestra.agents.follow RUN_DIR`: what the job of a run does first that begins after others
(`orchestra submit --after`).

Slurm started it because their jobs of the time are over. Their own records tell what that means. All are
done: the run begins. One goes on in another job: the run gets another job behind that one, once, and this one
ends; no attempt was begun, so no restart is charged. One ended otherwise: the run does not begin, and its
records say which one it was and what to do; so too where nobody can say how one stands, or where the run
cannot be put behind it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from conf.schema import Config
from launchers import LauncherError, SlurmRefused
from launchers.slurm import sbatch
from launchers.slurm.batch_script import NOT_THIS_JOB
from launchers.slurm.commands import is_full
from launchers.slurm.this_job import JobTask, own_job
from orchestra.agents.agent import code_for_slurm, group_folder
from orchestra.agents.attempt_record import write_start_failed
from orchestra.agents.srun_failed import of_batch_script
from orchestra.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_STOPPED,
    LaunchError,
    OrchestraError,
)
from orchestra.report.run_state import name_of
from orchestra.run.config_file import read_config
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.record import newest_job, read_record
from orchestra.submit.claims import upcoming_attempt
from orchestra.submit.fair.predecessors import (
    PredecessorProgress,
    Stand,
    has_begun,
    predecessors_in,
    progress,
)
from orchestra.submit.job_record import chain

# An end is believed when it stands for as long as the run itself gives nodes and ranks to be heard of, but no
# longer than this: a network file system may keep what another node has written back for a minute.
_BELIEVED_MOST_S = 90.0
# How long Slurm, and files that cannot be read, are asked again.
_SILENCE_S = 120.0
# Each look asks Slurm, and many may follow one run.
_PAUSE_S = 5.0
# When is looked again for a run that goes on where no job of this cluster can be waited for, as in the
# foreground, or where waiting for its job was over at once.
_LOOK_AGAIN_S = 600


def main(argv: list[str]) -> int:
    """Return 0 where the run begins, `NOT_THIS_JOB` where another job waits on, 93 where it does not."""
    try:
        run, task = of_batch_script(argv)
        config = read_config(run.config)
    except (OrchestraError, LauncherError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    try:
        if has_begun(run):
            return EXIT_DONE
        return _begin_or_wait(run, task, config)
    except (OrchestraError, LauncherError, OSError, ValueError) as error:
        cause = f"it could not go on waiting for the runs that it begins after: {error}; {_again(run)}"
        return _not_begun(run, task, EXIT_FAILED, cause)


def _begin_or_wait(run: RunDir, task: JobTask, config: Config) -> int:
    recovery = config.recovery
    believed_s = min(_BELIEVED_MOST_S, recovery.agent_timeout_s + recovery.heartbeat_timeout_s)
    found, problems = _settled(run, believed_s)
    going = [one for one in found if one.stand is Stand.goes_on]
    ended = [one for one in found if one.stand is Stand.ended]
    if problems:
        names = _names(found) or "what it begins after"
        cause = f"{'; '.join(problems)}: whether {names} is done is not known; {_again(run)}"
        return _not_begun(run, task, EXIT_FAILED, cause)
    if ended:
        return _not_begun(run, task, EXIT_DO_NOT_RESTART, _ending(run, ended))
    if not going:
        _say(f"{_named(found)}: {name_of(run)} begins")
        return EXIT_DONE
    if not _is_cancelled(run):
        job = _moved(run, task, going)
        if not _is_cancelled(run):
            return NOT_THIS_JOB
        # In this very moment.
        sbatch.cancel([job])
    newest = newest_job(read_record(run)) or {}
    events = EventWriter(run, f"cancel.{task.job}", upcoming_attempt(run))
    events.write("cancelled", job=newest.get("id"), token=newest.get("token"), user=stop_requests.user_name())
    events.close()
    _say(f"{name_of(run)} was cancelled while it waited")
    # A site's 0 would let it begin.
    return code_for_slurm(EXIT_STOPPED, config) or NOT_THIS_JOB


def _ending(run: RunDir, ended: Sequence[PredecessorProgress]) -> str:
    """Return why a run does not begin, and what to do."""
    resumes = ", ".join(f"`orchestra resume {one.predecessor.name}`" for one in ended)
    return (
        f"it begins after {_named(ended)}: not done; {resumes} first, then `orchestra resume "
        f"{name_of(run)}`, which waits for that again"
    )


def _names(found: Sequence[PredecessorProgress]) -> str:
    return " and ".join(one.predecessor.name for one in found)


def _named(found: Sequence[PredecessorProgress]) -> str:
    return "; ".join(f"{one.predecessor.name}, which {one.words}" for one in found)


def _again(run: RunDir) -> str:
    return f"`orchestra resume {name_of(run)}` tries again"


def _settled(run: RunDir, believed_s: float) -> tuple[list[PredecessorProgress], list[str]]:
    """Return how the predecessors stand, and what keeps that from being known. What ended is looked at again
    for a while; so are a silent Slurm and files that cannot be read.
    """
    began = time.monotonic()
    while True:
        found, problems = _look(run)
        has_ended = any(one.stand is Stand.ended for one in found)
        limit_s = _SILENCE_S if problems else believed_s if has_ended else 0.0
        if time.monotonic() - began >= limit_s:
            return found, problems
        time.sleep(_PAUSE_S)


def _look(run: RunDir) -> tuple[list[PredecessorProgress], list[str]]:
    predecessors = predecessors_in(read_record(run))
    if not predecessors:
        # Nobody starts this for a run that begins after none.
        return [], [f"{run.record} cannot be read, or does not say after which runs it begins"]
    found, problems = progress(predecessors, time.time())
    is_open = any(one.stand is not Stand.done for one in found)
    return found, problems if is_open else []


def _is_cancelled(run: RunDir) -> bool:
    requests = stop_requests.read_requests(run, upcoming_attempt(run))
    return any(request.reason == stop_requests.CANCEL for request in requests)


def _moved(run: RunDir, task: JobTask, going: Sequence[PredecessorProgress]) -> str:
    """Put the run behind the jobs that its predecessors go on in; return the one that waits now. Where Slurm
    or a file system does not let it, that is tried again for a while. Raises as `chain` does.
    """
    began = time.monotonic()
    while True:
        try:
            return _move(run, task, going)
        except (LauncherError, LaunchError, OSError) as error:
            is_final = isinstance(error, SlurmRefused) and not is_full(str(error))
            if is_final or time.monotonic() - began >= _SILENCE_S:
                raise
            sys.stderr.write(f"{error}: trying again\n")
        time.sleep(_PAUSE_S)


def _move(run: RunDir, task: JobTask, going: Sequence[PredecessorProgress]) -> str:
    behind = tuple(dict.fromkeys(job for one in going for job in one.jobs))
    moves = [event for event in read_events(run, ("waits_on",)) if event["event"] == "waits_on"]
    has_to_pause = not all(one.jobs for one in going) or _was_behind(task, moves, behind)
    delay_s = _LOOK_AGAIN_S if has_to_pause else 0
    attempt = upcoming_attempt(run)
    script = own_job(task.job).script
    job = chain(run, task, attempt, script, at_once=True, delay_s=delay_s, behind=behind)
    # An earlier start of this job may have submitted it.
    if not any(event.get("job") == job for event in moves):
        events = EventWriter(run, f"submit.{task.job}.follow", attempt)
        names = [one.predecessor.name for one in going]
        events.write("waits_on", job=job, instead_of=task.job, behind=list(behind), after=names)
        events.close()
    later = f", and looks again in {_LOOK_AGAIN_S // 60} minutes" if delay_s else ""
    _say(f"{_named(going)}: job {job} waits on in the place of this one{later}")
    return job


def _was_behind(task: JobTask, moves: Sequence[Record], behind: Sequence[str]) -> bool:
    """Whether the run was put behind one of these jobs not long ago: then Slurm does not make it wait."""
    since = time.time() - 2 * _LOOK_AGAIN_S
    earlier = [move for move in moves if move["time"] > since and move.get("instead_of") != task.job]
    return any(job in behind for move in earlier for job in move.get("behind") or ())


def _not_begun(run: RunDir, task: JobTask, code: int, cause: str) -> int:
    sys.stderr.write(f"error: {cause}\n")
    crew = group_folder(run.control, task.job, task.restart).name
    try:
        write_start_failed(run, crew, task.job, code, cause)
    except OSError as error:
        sys.stderr.write(f"warning: {run.events}: that could not be recorded: {error.strerror}\n")
    return code


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
