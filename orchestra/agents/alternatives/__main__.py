"""`python -m orchestra.agents.alternatives RUN_DIR NUMBER`: what each job of a run that was submitted for
several kinds of nodes (`cluster.alternatives`) does first.

The first job that comes here is the one: a file in the run's folder decides, not the clock. It puts its own
configuration in place and withdraws the others from the queue, once. One that begins all the same ends at
once, with code 0. What goes on later (requeued, or as a further job) is of the same kind.
"""

from __future__ import annotations

import sys
import time

from launchers import LauncherError
from launchers.slurm import sbatch
from launchers.slurm.batch_script import NOT_THIS_JOB
from orchestra.agents.srun_failed import of_batch_script
from orchestra.errors import EXIT_DONE, EXIT_FAILED, LaunchError, OrchestraError
from orchestra.run.control.chosen_alternative import NONE, choose_alternative, chosen_alternative
from orchestra.run.events import EventWriter
from orchestra.run.files import write_atomically
from orchestra.run.paths import RunDir
from orchestra.run.record import jobs_of, newest_job, read_record

# A file system may keep what another node has made back for some seconds.
_MOST_READS, _READ_PAUSE_S = 20, 0.5


def main(argv: list[str]) -> int:
    """Return 0 where this job trains the run, `NOT_THIS_JOB` where another one does."""
    try:
        run, task = of_batch_script(argv[:-1])
        number = int(argv[-1])
        # Read first: a start after the first one needs no file made, which a full disk refuses.
        chosen = chosen_alternative(run)
        is_first = chosen is None and choose_alternative(run, number, task.job)
        if chosen is None:
            chosen = number if is_first else _chosen_by_another(run)
        if chosen != number:
            who = "was cancelled" if chosen == NONE else f"trains as its alternative {chosen}"
            _say(f"{run.name} {who}; this job, alternative {number}, has nothing to do")
            return NOT_THIS_JOB
        if (newest_job(read_record(run)) or {}).get("alternative") == number:
            # No later job was submitted, which may have changed it.
            text = run.config_of_alternative(number).read_text()
            if run.config.read_text() != text:
                write_atomically(run.config, text)
        if is_first:
            _withdraw_others(run, number, task.job)
    except (OrchestraError, LauncherError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED
    return EXIT_DONE


def _chosen_by_another(run: RunDir) -> int:
    """Return which alternative the file that another job has made names. Raises LaunchError where it cannot
    be read: whether this job trains the run stays unknown then.
    """
    for _ in range(_MOST_READS):
        if (chosen := chosen_alternative(run)) is not None:
            return chosen
        time.sleep(_READ_PAUSE_S)
    raise LaunchError(
        f"{run.alternative} is there and cannot be read: which job trains {run.name} is not known; "
        f"`orchestra resume {run.name}` submits it again"
    )


def _withdraw_others(run: RunDir, number: int, job: str) -> None:
    """Take the other jobs out of the queue; those without an id yet are their submitter's to take."""
    entries = [entry for entry in jobs_of(read_record(run)) if entry.get("alternative", number) != number]
    others = [str(entry["id"]) for entry in entries if entry.get("id")]
    events = EventWriter(run, f"submit.{job}.chosen", 0)
    events.write("alternative_chosen", job=job, alternative=number, withdrawn=others)
    events.close()
    _say(f"{run.name} trains here, as its alternative {number}")
    if others:
        try:
            sbatch.cancel(others)
        except LauncherError as error:
            _say(f"jobs {', '.join(others)} could not be withdrawn, and end when they begin: {error}")


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
