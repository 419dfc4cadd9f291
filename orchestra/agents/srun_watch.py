"""`python -m orchestra.agents.srun_watch RUN_DIR SHELL`: runs beside srun, and ends it where it waits for
nothing. The batch script runs `orchestra.agents.srun_failed` then.

- Where Slurm has taken a lost node out of the job before srun asks for the step, srun asks for ever for nodes
  that the job no longer has ("step creation temporarily disabled, retrying").
- Where a task of the step ends before its agent has joined the others (no interpreter there, no memory, no
  mount), srun says so and waits for the rest: they are told, who would wait for that agent for minutes.
- Where a node boots again before Slurm has noticed that it was gone, srun gives the step up, and waits half a
  minute for the task of the dead one while no agent lives any more.

SHELL: the process id of the batch script, whose child srun is. For an array of a sweep the arguments are
`SWEEP_DIR --first F SHELL`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from launchers import LauncherError
from launchers.node_group import NodeGroup
from launchers.slurm import this_job
from launchers.slurm.this_job import ended_tasks
from orchestra.agents.srun_failed import OUTPUT, Agents, group_of, of_batch_script, taken_nodes
from orchestra.errors import OrchestraError
from orchestra.run.config_file import read_config

_LOOK_S = 1.0
# Agents come within seconds; a controller that serves thousands of jobs is not asked before that.
_ASK_EVERY_S = 15.0


def main(argv: list[str]) -> int:
    """Watch until srun was ended or the batch script is over."""
    try:
        # Where this start of the job begins in the output of the batch script, into which srun writes.
        begin = OUTPUT.stat().st_size if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else 0
        run, task = of_batch_script(argv[:-1])
        group, shell = group_of(run, task), int(argv[-1])
        agents = Agents(group.folder, argv[:-1], read_config(run.config).recovery.agent_timeout_s)
        ended = EndedTasks(group, begin)
        if _is_step_refused(shell, ended, task.job) or _are_agents_dead(shell, agents, ended):
            _end_srun(shell)
    except (OrchestraError, LauncherError, OSError) as error:
        sys.stderr.write(f"warning: nobody ends an srun that waits for nothing: {error}\n")
    return 0


class EndedTasks:
    """Tells the agents of tasks that ended before their agents came, until the first order is given."""

    def __init__(self, group: NodeGroup, begin: int, output: Path = OUTPUT) -> None:
        """`begin`: where in `output`, in bytes, what is said of this start of the job begins."""
        self.group = group
        self._output = output
        self._next = begin
        self._is_over = False

    def look(self) -> None:
        """Read what srun wrote since the last look, in whole lines."""
        # Storage may fail for a moment, and Slurm be silent: the same lines are read again.
        with contextlib.suppress(OSError, LauncherError):
            self._is_over = self._is_over or self.group.newest_order() is not None
            if self._is_over:
                return
            with self._output.open("rb") as log:
                log.seek(self._next)
                said = log.read()
            lines = said[: said.rfind(b"\n") + 1]
            for task in ended_tasks(lines.decode(errors="replace")):
                self.group.tell_ended(task.number, task.host, task.how)
            self._next += len(lines)


def _is_step_refused(shell: int, ended: EndedTasks, job: str) -> bool:
    """Wait until an agent has come or the batch script is over; return True where none can come any more."""
    asked_at = time.monotonic()
    while os.getppid() == shell and not any(ended.group.folder.glob("member-*")):
        time.sleep(_LOOK_S)
        ended.look()
        if time.monotonic() - asked_at < _ASK_EVERY_S:
            continue
        asked_at = time.monotonic()
        # A controller that is silent is asked again.
        with contextlib.suppress(LauncherError):
            if gone := taken_nodes(os.environ["SLURM_JOB_NODELIST"], this_job.own_job(job).nodes):
                _say(f"{', '.join(gone)} lost before the job's step began; srun is ended")
                return True
    return False


def _are_agents_dead(shell: int, agents: Agents, ended: EndedTasks) -> bool:
    """Return True when no agent lives any more that did not leave, False when the batch script is over."""
    while os.getppid() == shell:
        time.sleep(_LOOK_S)
        ended.look()
        if agents.are_dead() and os.getppid() == shell:
            _say("no agent of the job lives any more; srun is ended")
            return True
    return False


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def _end_srun(shell: int) -> None:
    for pid in Path(f"/proc/{shell}/task/{shell}/children").read_text().split():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == "srun":
                os.kill(int(pid), signal.SIGTERM)
                time.sleep(_LOOK_S)
                # Asked once it may go on waiting for the dead.
                os.kill(int(pid), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
