"""`python -m orchestra.agents.srun_watch RUN_DIR SHELL`: runs beside srun until the first agent has come.

Where Slurm has taken a lost node out of the job before srun asks for the step, srun asks for ever for nodes
that the job no longer has ("step creation temporarily disabled, retrying"). It is ended then, and the batch
script runs `orchestra.agents.srun_failed`. SHELL: the process id of the batch script, whose child srun is.
For an array of a sweep the arguments are `SWEEP_DIR --first F SHELL`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from launchers import LauncherError
from launchers.slurm import this_job
from orchestra.agents.agent import group_folder
from orchestra.agents.srun_failed import of_batch_script, taken_nodes
from orchestra.errors import OrchestraError

_LOOK_S = 1.0
# Agents come within seconds; a controller that serves thousands of jobs is not asked before that.
_ASK_EVERY_S = 15.0


def main(argv: list[str]) -> int:
    """Watch until an agent has come, srun was ended, or the batch script is over."""
    try:
        run, task = of_batch_script(argv[:-1])
        _watch(int(argv[-1]), group_folder(run.control, task.job, task.restart), task.job)
    except (OrchestraError, LauncherError, OSError) as error:
        sys.stderr.write(f"warning: it is not watched whether the job's step begins: {error}\n")
    return 0


def _watch(shell: int, group: Path, job: str) -> None:
    asked_at = time.monotonic()
    while os.getppid() == shell and not any(group.glob("member-*")):
        time.sleep(_LOOK_S)
        if time.monotonic() - asked_at < _ASK_EVERY_S:
            continue
        asked_at = time.monotonic()
        # A controller that is silent is asked again.
        with contextlib.suppress(LauncherError):
            if gone := taken_nodes(os.environ["SLURM_JOB_NODELIST"], this_job.own_job(job).nodes):
                sys.stdout.write(f"{', '.join(gone)} lost before the job's step began; srun is ended\n")
                sys.stdout.flush()
                _end_srun(shell)
                return


def _end_srun(shell: int) -> None:
    for pid in Path(f"/proc/{shell}/task/{shell}/children").read_text().split():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "srun":
                os.kill(int(pid), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
