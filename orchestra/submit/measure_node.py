"""`python -m orchestra.submit.measure_node FOLDER`: what srun starts on each node to measure the network.

The nodes meet, start torchrun and watch it as they do for a run (`orchestra.submit.node`), but nothing is
restarted and nobody asks for a checkpoint: a signal ends the ranks at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from launchers.slurm.signals import JobSignals

if TYPE_CHECKING:
    from orchestra.rundir import RunDir

_TOLD_AT_ONCE = 2


def main(argv: list[str]) -> int:
    """Take part and return the exit code: 0 where the ranks of this node ended well."""
    with JobSignals() as signals:
        from pathlib import Path

        from launchers.errors import LauncherError
        from orchestra.errors import EXIT_FAILED, OrchestraError
        from orchestra.rundir import RunDir

        try:
            return _attend(RunDir(Path(argv[0])), signals)
        except (OrchestraError, LauncherError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_FAILED


def _attend(folder: RunDir, signals: JobSignals) -> int:
    import os
    import time

    from launchers.agent import start_agent, supervise
    from launchers.ports import free_port
    from launchers.slurm.task import job_task
    from orchestra.errors import EXIT_DONE, EXIT_FAILED
    from orchestra.frozen import read_config
    from orchestra.submit.measure import measuring_spec
    from orchestra.submit.meeting import Meeting, await_meeting, publish
    from orchestra.submit.place import own_address, placed

    task = job_task(os.environ)
    config = read_config(folder.config)
    if task.node > 0:
        meeting = await_meeting(folder, task, lambda: signals.count() > 0)
        if meeting is None:
            return EXIT_FAILED
    else:
        address = own_address(config.cluster.network, task)
        meeting = Meeting(0, address, free_port(), task.host, time.time())
        publish(folder, task, meeting)
    spec, place = placed(measuring_spec(config, folder), task, meeting)
    agent = start_agent(spec, place)
    ending = supervise(agent, lambda: _TOLD_AT_ONCE * signals.count(), lambda: None)
    return EXIT_DONE if ending.exit_code == EXIT_DONE else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
