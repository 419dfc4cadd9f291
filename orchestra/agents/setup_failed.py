"""`python -m orchestra.agents.setup_failed RUN_DIR NUMBER CODE`: what a batch script becomes when one of its
set-up lines failed, the NUMBER-th of cluster.setup, with exit code CODE.

The run does not begin in a wrong environment: its records say which line it was, and the job ends with 93.
For an array of a sweep the arguments are `SWEEP_DIR --first F NUMBER CODE`. Where members share a node
(`SWEEP_DIR --at-once K --array N NUMBER CODE`) it is in nobody's records: other nodes may train them all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launchers import LauncherError
from orchestra.agents.agent import group_folder
from orchestra.agents.attempt_record import write_start_failed
from orchestra.agents.srun_failed import of_batch_script
from orchestra.errors import EXIT_DO_NOT_RESTART, OrchestraError
from orchestra.run.config_file import read_config


def main(argv: list[str]) -> int:
    """Write down that the line failed; return 93."""
    number, code = argv[-2:]
    if "--at-once" in argv:
        sys.stderr.write(f"error: line {number} of cluster.setup failed with exit code {code}\n")
        return EXIT_DO_NOT_RESTART
    try:
        run, task = of_batch_script(argv[:-2])
        cause = failed_line(read_config(run.config).cluster.setup, int(number), code)
        sys.stderr.write(f"error: {cause}\n")
        crew = group_folder(run.control, task.job, task.restart).name
        write_start_failed(run, crew, task.job, EXIT_DO_NOT_RESTART, cause)
    except (OrchestraError, LauncherError, OSError) as error:
        sys.stderr.write(f"error: set-up line {number} failed, which could not be recorded: {error}\n")
    return EXIT_DO_NOT_RESTART


def failed_line(setup: Sequence[str], number: int, code: str) -> str:
    """Return which line of cluster.setup failed, and what to do. `number` counts from 1."""
    lines = "\n".join(setup).split("\n")
    text = f" `{lines[number - 1].strip()}`" if 0 < number <= len(lines) else ""
    return (
        f"line {number} of cluster.setup{text} failed with exit code {code}; mend it and resume with "
        f"cluster.setup=[…], or pass over such lines with cluster.setup_may_fail=true"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
