"""Makes the station of a Slurm task: from Slurm's variables and a run directory to an agent at its place."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys

from launchers.crew import Crew
from launchers.slurm.task import JobTask, job_task
from launchers.stops import StopRequests
from launchers.warm.owner import Owner
from orchestra.crew.attend import crew_folder
from orchestra.crew.fitness import fitness_of
from orchestra.crew.slurm_job import SlurmJob
from orchestra.crew.station import Station
from orchestra.crew.warming import warm_host
from orchestra.errors import LaunchError
from orchestra.frozen import read_config
from orchestra.rundir import RunDir


def station(run: RunDir, signals: StopRequests, zygote: Owner) -> Station:
    """Return this task's station, its warm process held by `zygote`.

    Raises LaunchError and LauncherError outside a job that fits the run.
    """
    task = job_task(os.environ)
    config = read_config(run.config)
    wanted = config.cluster.nodes + config.cluster.spare_nodes
    if task.num_nodes != wanted:
        raise LaunchError(
            f"the job has {task.num_nodes} nodes, the run wants {wanted} (cluster.nodes="
            f"{config.cluster.nodes}, cluster.spare_nodes={config.cluster.spare_nodes})"
        )
    folder = crew_folder(run.control, task.job, task.restart)
    crew = Crew(folder, task.node, task.num_nodes, config.recovery.agent_timeout_s, _end_this_agent)
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    surroundings = SlurmJob(run, config, task)

    def say(words: str) -> None:
        _say(task, surroundings.host, words)

    say("joins the others")
    warm = warm_host(config, run, path, zygote)
    fitness = fitness_of(config, run, crew)
    return Station(run, config, crew, signals, surroundings, say, path, warm=warm, fitness=fitness)


def _end_this_agent() -> None:
    """End this process, whose main thread stands still: whoever keeps this node's agent starts another."""
    sys.stderr.write("error: this node's agent stands still, and is ended where it is:\n")
    faulthandler.dump_traceback(sys.stderr)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _say(task: JobTask, host: str, words: str) -> None:
    where = f"node {task.node} of {task.num_nodes} on {host}"
    sys.stdout.write(f"job {task.job} start {task.restart} {where}: {words}\n")
    sys.stdout.flush()
