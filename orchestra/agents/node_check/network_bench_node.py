"""`python -m orchestra.agents.node_check.network_bench_node FOLDER`: one node measures the network.

srun starts it on each node of a job for `orchestra bench network`. The nodes meet, start torchrun and watch
it as they do for a run (`orchestra.agents`), but nothing is restarted and no checkpoint is asked for: a
signal ends the ranks at once.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from launchers import LauncherError
from launchers.host_network import free_port
from launchers.node_agent import start_agent, supervise
from launchers.slurm.this_job import JobSignals, job_task
from orchestra.errors import EXIT_DONE, EXIT_FAILED, OrchestraError
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir
from orchestra.submit.launch import own_address, placed
from orchestra.submit.network_bench import Meeting, await_meeting, measuring_spec, publish

# So many requests to stop kill the ranks (`launchers.node_agent.supervise`).
_STOPS_AT_ONCE = 2


def main(argv: list[str]) -> int:
    """Take part and return the exit code: 0 where the ranks of this node ended well."""
    with JobSignals() as signals:
        try:
            return _attend(RunDir(Path(argv[0])), signals)
        except (OrchestraError, LauncherError, OSError) as error:
            sys.stderr.write(f"error: {error}\n")
            return EXIT_FAILED


def _attend(folder: RunDir, signals: JobSignals) -> int:
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
    meeting_id = f"{task.job}.{task.restart}"
    spec, place = placed(measuring_spec(config, folder), task.node, meeting.address, meeting.port, meeting_id)
    agent = start_agent(spec, place)
    ending = supervise(agent, lambda: _STOPS_AT_ONCE * signals.count(), lambda: None)
    return EXIT_DONE if ending.exit_code == EXIT_DONE else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
