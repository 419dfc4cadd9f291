"""`python -m orchestra.submit.node RUN_DIR`: what srun starts on each node of a job.

Before anything else it replaces whatever handlers there are: Slurm's warning would kill a process that is
still importing. It alone turns signals into requests; its exit code is the verdict on the whole attempt.
"""

from __future__ import annotations

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

        try:
            return attend(RunDir(Path(argv[0])), signals)
        except OrchestraError as error:
            sys.stderr.write(f"error: {error}\n")
            return error.exit_code
        except (LauncherError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
