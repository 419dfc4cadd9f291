"""`python -m orchestra.agents.srun_failed RUN_DIR CODE`: what a batch script does when srun failed.

Whatever srun says, the agents decide: as long as any of them lives the job is kept, and the exit code is the
one that they agreed on. Where all are gone without one, the run goes on in another job:

- Slurm starts a step on all nodes or on none: where one is lost in that moment, srun kills the agents that
  are there already ("Task launch failed …: Communication connection failure"). The next job does without the
  nodes that never came (rule step_not_started).
- srun gives up a whole step that runs, `--no-kill` or not, when a node of it boots again before Slurm has
  noticed that it was gone ("Aborting, step missing and io error") (rule step_lost).
- The warning before the time limit comes while the tasks' interpreters start, and ends them (rule
  step_not_started).
- srun is killed: its helper process, where that lives, kills the whole step at once. Before the first attempt
  that is rule step_not_started, with no node to blame, and after it step_lost.

Where the run does not go on the records say why, and nobody's code is blamed.

For an array of a sweep the arguments are `SWEEP_DIR --first F CODE`.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conf.schema import Config
from launchers import LauncherError
from launchers.node_group import NodeGroup
from launchers.slurm import this_job
from launchers.slurm.cluster import is_usable, node_states
from launchers.slurm.this_job import JobTask, job_task, names_of
from orchestra.agents.agent import code_for_slurm, group_folder, run_of
from orchestra.agents.context import END, REFUSE
from orchestra.agents.slurm_job import SlurmJob
from orchestra.agents.wait_for_nodes import MOST_MOVES, moves
from orchestra.errors import EXIT_FAILED, LaunchError, OrchestraError
from orchestra.recovery.history import attempt_of
from orchestra.recovery.policy import Action, Decision
from orchestra.run.config_file import read_config
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.run.permissions import open_to_group
from orchestra.submit.claims import upcoming_attempt

_UNSTARTED, _LOST = "step_not_started", "step_lost"
_LOOK_S = 1.0
# So many looks in a row without a beat: agents that live write one a second.
_LOOKS_WITHOUT_BEAT = 4
# So many looks in a row may fail: no job is held for ever.
_MOST_FAILURES = 600
_LAUNCH_FAILED = re.compile(r"Task launch for \S+ failed on node ([^\s:]+)")
# What srun writes is in the output of the batch script, which is that of this process too.
OUTPUT = Path("/proc/self/fd/1")
_OUTPUT_BYTES = 1 << 16
_WARNED = re.compile(r"^srun: error: \S+: tasks? \S+: User defined signal", re.MULTILINE)


def main(argv: list[str]) -> int:
    """Wait for the agents, and let the run go on in another job where none of them could; return the code
    that the agents agreed on, else the given one. For a stop on request it is cluster.stop_exit_code.
    """
    code = int(argv[-1])
    try:
        run, task = of_batch_script(argv[:-1])
        group = group_of(run, task)
        agents = Agents(group.folder, argv[:-1], read_config(run.config).recovery.agent_timeout_s)
        # A run is not over because srun is.
        while (agreed := _agreed(group)) is None and not agents.are_over():
            time.sleep(_LOOK_S)
        if agreed is not None:
            return code_for_slurm(agreed, read_config(run.config))
        outcome = move_run(run, task, os.environ["SLURM_JOB_NODELIST"], OUTPUT)
    except (OrchestraError, LauncherError, OSError) as error:
        sys.stderr.write(f"error: srun failed, and the run does not go on by itself: {error}\n")
        return code
    if outcome:
        sys.stdout.write(outcome + "\n")
    return code


def of_batch_script(words: list[str]) -> tuple[RunDir, JobTask]:
    """Return the run that a batch script is to train, by what it passes on, and its job. Raises ConfigError,
    LauncherError and OSError.
    """
    num_nodes = os.environ.get("SLURM_JOB_NUM_NODES", os.environ.get("SLURM_NNODES", "1"))
    # As the step's first task would see them: one task on each node.
    of_step = {"SLURM_NTASKS": num_nodes, "SLURM_NNODES": num_nodes, "SLURM_PROCID": "0"}
    task = job_task({**os.environ, **of_step})
    run = run_of(words)
    # Set-up lines may have changed the umask.
    open_to_group(read_config(run.config).run.group)
    return run, task


def group_of(run: RunDir, task: JobTask) -> NodeGroup:
    """Return the agents' folder, to be read only."""
    timeout_s = read_config(run.config).recovery.agent_timeout_s
    return NodeGroup(group_folder(run.control, task.job, task.restart), 0, task.num_nodes, timeout_s)


def _agreed(group: NodeGroup) -> int | None:
    """Return the exit code on which the agents ended; None where they have not."""
    order = group.newest_order()
    return int(order.facts["code"]) if order is not None and order.action == END else None


def move_run(run: RunDir, task: JobTask, nodes: str, output: Path) -> str | None:
    """Submit the run again; return what was done, None where that is not to be: somebody decided already, or
    the step ended by itself. No agent lives any more. `nodes`: the job's, as Slurm writes them; `output`:
    where srun wrote. Raises LauncherError, LaunchError and OSError; what keeps the run from going on is
    written down before.
    """
    config = read_config(run.config)
    slurm, group, own = SlurmJob(run, config, task), group_of(run, task), this_job.own_job(task.job)
    order, attempt = group.newest_order(), upcoming_attempt(run) - 1
    # Slurm ends it, or starts it again by itself.
    if own.is_ending or own.restarts > task.restart:
        return None
    if order is None:
        missing = _missing(group, nodes, own.nodes, output, config)
        decision = _of_unstarted(missing, has_agents=bool(group.members()), was_warned=_was_warned(output))
    else:
        decision = None if order.action in (END, REFUSE) else _OF_LOST
    # Where no attempt began, requests name the one to come.
    asked = stop_requests.read_requests(run, attempt + (order is None))
    if decision is None or any(request.reason == stop_requests.CANCEL for request in asked):
        return None
    # Where no attempt began, this follows the one before, and the number is free.
    writer = EventWriter(run, f"crew.{group.folder.name}", attempt, before_start=order is None)
    events = read_events(run)
    try:
        _refuse_to_move(slurm, decision, events)
        return slurm.requeue(decision, attempt, writer)
    except (LauncherError, LaunchError) as error:
        why = f"{decision.reason}, and the run does not go on by itself: {error}"
        if order is not None and attempt_of(events, attempt).starts:
            writer.write("failed", node=0, code=EXIT_FAILED, cause=decision.reason, message=why)
        else:
            writer.write("start_failed", job=task.job, code=EXIT_FAILED, cause=why)
        raise
    finally:
        writer.close()


_OF_LOST = Decision(Action.requeue, EXIT_FAILED, "srun gave up the job's step", rule=_LOST)


def _of_unstarted(missing: tuple[str, ...], *, has_agents: bool, was_warned: bool) -> Decision | None:
    """Return what follows where no attempt began; None where the step ended by itself. Agents that end by
    themselves take their names off the list: those on it were killed with the step.
    """
    if missing:
        reason = f"lost while the job's step was starting: {', '.join(missing)}"
    elif has_agents:
        reason = "srun gave up the job's step before an attempt began"
    elif was_warned:
        reason = "Slurm's warning came while the job's tasks were starting, and ended them"
    else:
        return None
    return Decision(Action.requeue, EXIT_FAILED, reason, rule=_UNSTARTED, exclude=missing)


def _refuse_to_move(slurm: SlurmJob, decision: Decision, events: Sequence[Record]) -> None:
    """Raise LaunchError where no job may follow, or several of them got no further."""
    if not slurm.can_requeue:
        raise LaunchError("no other job may follow (cluster.requeue=never)")
    since = "checkpoint_committed" if decision.rule == _LOST else "attempt_started"
    if moves(events, since, rule=decision.rule) >= MOST_MOVES:
        raise LaunchError(
            f"that happened {MOST_MOVES + 1} times with no {since.replace('_', ' ')} in between"
        )


def _missing(group: NodeGroup, nodes: str, left: str, output: Path, config: Config) -> tuple[str, ...]:
    """Return the hosts whose agents never came; none where no host is to blame: then the step ended by
    itself. `nodes`: what the job began with, `left`: what it has now.
    """
    there = {member.host for member in group.members().values()}
    hosts = names_of(nodes)
    if there:
        return tuple(host for host in hosts if host not in there)
    # No agent had the time to come: srun or Slurm must tell which node is to blame.
    if taken := taken_nodes(nodes, left):
        return tuple(taken)
    named = _named_by_srun(output)
    if named.intersection(hosts):
        return tuple(host for host in hosts if host in named)
    states = node_states(config.cluster.partition)
    return tuple(host for host in hosts if host in states and not is_usable(states[host]))


def taken_nodes(nodes: str, left: str) -> list[str]:
    """Return the hosts of `nodes`, a job's as it began, that it does not have any more; `left`: what it has,
    none where that is not known. Raises LauncherError.
    """
    has_still = frozenset(names_of(left)) if left else None
    return [] if has_still is None else [host for host in names_of(nodes) if host not in has_still]


def _named_by_srun(output: Path) -> frozenset[str]:
    """Return the hosts on which it could not start its task; none where what it wrote cannot be read."""
    return frozenset(_LAUNCH_FAILED.findall(_end_of(output)))


def _was_warned(output: Path) -> bool:
    """Tell whether tasks ended by the signal that warns of the time limit: nobody was there to hear it."""
    return _WARNED.search(_end_of(output)) is not None


def _end_of(output: Path) -> str:
    try:
        with output.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _OUTPUT_BYTES))
            return log.read().decode(errors="replace")
    except OSError:
        return ""


class Agents:
    """The agents of a start of a job, seen from the host of its batch script, where one of them lives, unless
    it stepped down or was killed too often: the others go on then, and only their beats tell.

    It is asked once a second.
    """

    def __init__(self, folder: Path, words: Sequence[str], timeout_s: float) -> None:
        """`folder`: where they meet; `words`: what names the run on the command line of each; `timeout_s`:
        how long they wait for each other's beats (recovery.agent_timeout_s).
        """
        self._folder = folder
        # As many looks in a row as agents have that live elsewhere alone.
        self._looks_elsewhere = max(_LOOKS_WITHOUT_BEAT, math.ceil(timeout_s / _LOOK_S))
        self._live_elsewhere = False
        self._ending = os.fsencode("\0".join(["", "-m", "orchestra.agents", *words, ""]))
        self._job = os.fsencode(f"SLURM_JOB_ID={os.environ.get('SLURM_JOB_ID')}")
        self._process: Path | None = None
        self._before: dict[str, bytes] | None = None
        self._num_looks = 0
        self._num_failures = 0

    def are_dead(self) -> bool:
        """Tell whether the beats of some that did not leave stand still, those of the others too."""
        return bool(self._still_beats())

    def are_over(self) -> bool:
        """Tell whether none lives any more, whether it left or not."""
        return self._still_beats() is not None

    def _still_beats(self) -> dict[str, bytes] | None:
        """Return the beats where none has moved lately; None: not known yet. A look counts only when the file
        system takes a word of this process's, and when no agent is here.
        """
        try:
            if self._is_here():
                self._num_looks, self._before, self._live_elsewhere = 0, None, False
                return None
            (self._folder / "srun-watch").touch()
            files = [file for file in self._folder.iterdir() if file.name.startswith("beat-")]
            now = {file.name: file.read_bytes() for file in files}
        except OSError:
            # One left in this moment, or no beat can be written either.
            self._num_failures += 1
            return {} if self._num_failures > _MOST_FAILURES else None
        self._num_looks = self._num_looks + 1 if now == self._before else 0
        # One that moves while none is here: they were not all killed with the one that was.
        before = self._before or {}
        self._live_elsewhere |= any(before.get(name, beat) != beat for name, beat in now.items())
        self._before, self._num_failures = now, 0
        enough = self._looks_elsewhere if self._live_elsewhere else _LOOKS_WITHOUT_BEAT
        return now if self._num_looks >= (enough if now else 1) else None

    def _is_here(self) -> bool:
        if self._process is not None and self._is_agent(self._process):
            return True
        folders = (file.parent for file in Path("/proc").glob("[0-9]*/cmdline"))
        self._process = next((folder for folder in folders if self._is_agent(folder)), None)
        return self._process is not None

    def _is_agent(self, process: Path) -> bool:
        try:
            command = (process / "cmdline").read_bytes()
            # srun's own ends with the same words, and so do the agents of an array's other members.
            name = Path(os.fsdecode(command.split(b"\0", 1)[0])).name
            is_ours = command.endswith(self._ending) and name != "srun"
            return is_ours and self._job in (process / "environ").read_bytes().split(b"\0")
        except OSError:
            return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
