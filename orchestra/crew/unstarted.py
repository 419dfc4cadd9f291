"""`python -m orchestra.crew.unstarted RUN_DIR CODE`: what a batch script does when srun failed.

Slurm starts a step on all nodes or on none: where one is lost in that moment, srun kills the agents that are
there already (seen after 24 s: "Task launch failed …: Communication connection failure"), and nobody is left
who could let the run go on. It goes on in another job then, without the nodes that never came. For an array
of a sweep the arguments are `SWEEP_DIR --first F CODE`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from launchers.crew import Crew
from launchers.errors import LauncherError
from launchers.slurm import own_job
from launchers.slurm.commands import output_of
from launchers.slurm.site import is_usable, node_states
from launchers.slurm.task import JobTask, job_task
from orchestra.crew.attend import crew_folder
from orchestra.crew.preflight import MOST_MOVES, moves
from orchestra.crew.slurm_job import SlurmJob
from orchestra.crew.station import END, REFUSE
from orchestra.errors import EXIT_FAILED, OrchestraError
from orchestra.events import EventWriter, read_events
from orchestra.frozen import read_config
from orchestra.recovery.decisions import Action, Decision
from orchestra.rundir import RunDir
from orchestra.submit.claims import upcoming_attempt
from orchestra.sweepdir import SweepDir

_RULE = "step_not_started"
# Agents that live write a beat every second.
_BEATS_S = 5.0
_QUESTION_TIMEOUT_S = 30.0
_LAUNCH_FAILED = re.compile(r"Task launch for \S+ failed on node ([^\s:]+)")
# What srun says stands in the batch script's own output, which is this process's.
_OUTPUT = Path("/proc/self/fd/1")
_OUTPUT_BYTES = 1 << 16


def main(argv: list[str]) -> int:
    """Let the run go on in another job if its step was never started; return the given code."""
    code = int(argv[-1])
    try:
        run, task = of_batch_script(argv[:-1])
        said = moved(run, task, os.environ["SLURM_JOB_NODELIST"], _OUTPUT)
    except (OrchestraError, LauncherError, OSError) as error:
        sys.stderr.write(f"error: the run does not go on by itself: {error}\n")
        return code
    if said:
        sys.stdout.write(said + "\n")
    return code


def of_batch_script(words: list[str]) -> tuple[RunDir, JobTask]:
    """Return the run that a batch script is to train, by what it passes on, and its job. Raises
    LauncherError and OSError.
    """
    task = job_task(_as_task(os.environ))
    if len(words) == 1:
        return RunDir(Path(words[0])), task
    path, _, first = words
    return SweepDir(Path(path)).member(int(first) + int(os.environ["SLURM_ARRAY_TASK_ID"])), task


def _as_task(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the batch script's variables as the step's first task would see them: one task on each node."""
    num_nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    return {**environment, "SLURM_NTASKS": num_nodes, "SLURM_NNODES": num_nodes, "SLURM_PROCID": "0"}


def moved(run: RunDir, task: JobTask, nodes: str, output: Path) -> str | None:
    """Submit the run again without the nodes that never came; return what was done, None where that is not
    to be. `nodes`: the job's, as Slurm writes them; `output`: where srun wrote. Raises LauncherError,
    LaunchError and OSError.
    """
    config, events = read_config(run.config), read_events(run)
    slurm = SlurmJob(run, config, task)
    timeout_s = config.recovery.agent_timeout_s
    crew = Crew(crew_folder(run.control, task.job, task.restart), 0, task.num_nodes, timeout_s)
    word = own_job.own_job(task.job)
    # Slurm ends it, or starts it again by itself.
    if word.is_ending or word.restarts > task.restart:
        return None
    missing = _missing(crew, nodes, word.nodes, output, config.cluster.partition)
    if not missing or not slurm.can_requeue or moves(events, _RULE) >= MOST_MOVES or _is_alive(crew):
        return None
    # What follows the attempt before: this one never was, and its number is free.
    attempt = upcoming_attempt(run) - 1
    reason = f"lost while the job's step was starting: {', '.join(missing)}"
    decision = Decision(Action.requeue, EXIT_FAILED, reason, rule=_RULE, exclude=missing)
    writer = EventWriter(run, f"crew.{crew.folder.name}", attempt, before_start=True)
    try:
        return slurm.requeue(decision, attempt, writer)
    finally:
        writer.close()


def _missing(crew: Crew, nodes: str, left: str, output: Path, partition: str | None) -> tuple[str, ...]:
    """Return the hosts whose agents never came; none where somebody decided already, or where no host is to
    blame: then the step ended by itself. `nodes`: what the job began with, `left`: what it has now.
    """
    members, order = crew.members(), crew.newest_order()
    if order is not None and order.action in (END, REFUSE):
        return ()
    there = {member.host for member in members.values()}
    hosts = names_of(nodes)
    if there:
        return tuple(host for host in hosts if host not in there)
    # No agent had the time to come: srun or Slurm must say whose fault that is.
    if left and (taken := [host for host in hosts if host not in names_of(left)]):
        return tuple(taken)
    if named := [host for host in hosts if host in _named_by_srun(output)]:
        return tuple(named)
    states = node_states(partition)
    return tuple(host for host in hosts if host in states and not is_usable(states[host]))


def names_of(nodes: str) -> list[str]:
    """Return the hosts in a list as Slurm writes it. Raises LauncherError."""
    return output_of(("scontrol", "show", "hostnames", nodes), timeout_s=_QUESTION_TIMEOUT_S).split()


def _named_by_srun(output: Path) -> frozenset[str]:
    """Return the hosts on which it could not start its task; none where what it wrote cannot be read."""
    try:
        with output.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
            return frozenset(_LAUNCH_FAILED.findall(log.read().decode(errors="replace")))
    except OSError:
        return frozenset()


def _is_alive(crew: Crew) -> bool:
    """Whether any agent still beats: what this job started goes on without srun."""
    before = _beats(crew)
    time.sleep(_BEATS_S)
    return _beats(crew) != before


def _beats(crew: Crew) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(crew.folder.glob("beat-*"))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
