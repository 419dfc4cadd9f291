"""A job that helps another one: its agents join those of a job that trains, as nodes that came late.

It trains nothing of its own. Its nodes have numbers of their own among the agents of the job that they help,
never lead, and leave with it. Where Slurm warns such a job, the run goes on without its nodes.
"""

from __future__ import annotations

import dataclasses
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.schema import Config
from launchers import LauncherError
from launchers.host_network import interface_of
from launchers.slurm.this_job import JobTask
from orchestra.agents.context import Scheduler
from orchestra.agents.growth.held_nodes import HELD_SINCE
from orchestra.run.control import stop_requests
from orchestra.submit.launch import own_address

# What the agents of such a job find in their environment: where those of the other job meet, and which number
# its own first node has among them.
HELPS_VARIABLE = "ORCHESTRA_HELPS"
_HELPS = re.compile(r"(job-[^/:]+):(\d+)")


@dataclass(frozen=True)
class HelpedGroup:
    """Which job's agents a helping job joins: the name of their folder, and its own first node's number."""

    name: str
    first_node: int

    def __str__(self) -> str:
        return f"{self.name}:{self.first_node}"


def group_name(job: str, restart: int) -> str:
    """Return what the folder is called in which the agents of one start of a job meet."""
    return f"job-{job}.start-{restart}"


def helped_group(environment: Mapping[str, str]) -> HelpedGroup | None:
    """Return whom this job helps; None where it trains a run itself. Raises LauncherError."""
    words = environment.get(HELPS_VARIABLE)
    if not words:
        return None
    match = _HELPS.fullmatch(words)
    if match is None:
        raise LauncherError(f"{HELPS_VARIABLE}={words}: expected job-ID.start-N:FIRST_NODE")
    return HelpedGroup(match[1], int(match[2]))


class HelperJob(Scheduler):
    """A helping job, as one of its tasks sees it: it decides nothing."""

    is_helper = True

    def __init__(self, config: Config, task: JobTask) -> None:
        self._config = config
        self._task = task
        self._began = time.time()

    @property
    def host(self) -> str:
        return self._task.host or socket.gethostname()

    def own_address(self) -> str:
        # The others' nodes are not its own job's.
        return own_address(self._config.cluster.network, dataclasses.replace(self._task, num_nodes=2))

    def place(self) -> dict[str, Any]:
        # Before this process began nodes were got ready, and images pulled.
        held = self._began if self._task.job_began is None else self._task.job_began
        interface = interface_of(self.own_address())
        return {"switches": list(self._task.switches), "interface": interface, HELD_SINCE: held}

    def stop_reason(self, _signal: str) -> str:
        """Return what a warning to this job asks for: that the run goes on without its nodes."""
        return stop_requests.RESIZE
