"""`python -m orchestra.submit.node RUN_DIR`: what srun starts on each node of a job.

For an array of a sweep it is `SWEEP_DIR --first F`: task t trains the member with index F + t.

Before anything else it replaces whatever handlers there are: Slurm's warning would kill a process that is
still importing. It alone turns signals into requests; its exit code is the verdict on the whole attempt.
"""

from __future__ import annotations

import os
import sys

from launchers.slurm.signals import JobSignals


def main(argv: list[str]) -> int:
    """Take part in the attempt that this start of the job makes; return the verdict's exit code."""
    with JobSignals() as signals:
        from pathlib import Path

        from launchers.errors import LauncherError
        from orchestra.errors import EXIT_FAILED, OrchestraError
        from orchestra.rundir import RunDir
        from orchestra.submit.attend import attend
        from orchestra.sweepdir import SweepDir

        try:
            if len(argv) == 1:
                return attend(RunDir(Path(argv[0])), signals)
            path, _, first = argv
            task = int(os.environ["SLURM_ARRAY_TASK_ID"])
            return attend(SweepDir(Path(path)).member(int(first) + task), signals)
        except OrchestraError as error:
            sys.stderr.write(f"error: {error}\n")
            return error.exit_code
        except (LauncherError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
