"""Jobs that wait in the queue for nodes which a run lacks, and cost nothing until they get them.

One waits at a time. Which ones were submitted stands in the run's events (`nodes_asked`), so that another
agent goes on where this one dies. Such a job carries a token like any other, and is found again by it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from conf.schema import Config
from launchers import LauncherError, SlurmRefused
from launchers.slurm import sbatch, this_job
from launchers.slurm.batch_script import BatchJob, rendered
from launchers.slurm.queue import RUNNING, WAITING
from launchers.slurm.this_job import JobTask
from orchestra.agents.choose_nodes import excluded_hosts
from orchestra.agents.growth.helper_job import HELPS_VARIABLE, HelpedGroup
from orchestra.agents.growth.wanted_nodes import WantedNodes
from orchestra.errors import OrchestraError
from orchestra.run.events import EventWriter, is_whole, read_events
from orchestra.run.files import Record, write_atomically
from orchestra.run.paths import RunDir
from orchestra.submit.hosts_to_avoid import hosts_without
from orchestra.submit.job import batch_job, new_token
from orchestra.submit.site import ask

ASKED = "nodes_asked"
# How often Slurm is asked what became of a job that waits.
_EVERY_S = 30.0
# From the start of a job to its agents' first word: images are pulled, Python is loaded by many.
_COMING_S = 300.0


class MoreNodes:
    """What one agent asks Slurm for on behalf of its run."""

    def __init__(self, run: RunDir, config: Config, task: JobTask, group: str) -> None:
        """`group`: the name of the folder in which this start of the job's agents meet."""
        self._run = run
        self._config = config
        self._task = task
        self._group = group
        self._thread: threading.Thread | None = None
        self._looked_at = -_EVERY_S
        self._last: tuple[int, int] | None = None

    def ask(self, wanted: WantedNodes) -> None:
        """See to it, on a thread of its own, that a job waits for them."""
        now = time.monotonic()
        is_new = (wanted.attempt, wanted.most) != self._last
        is_due = is_new or now - self._looked_at >= _EVERY_S
        if not is_due or (self._thread is not None and self._thread.is_alive()):
            return
        self._looked_at, self._last = now, (wanted.attempt, wanted.most)
        self._thread = threading.Thread(target=self._ask, args=(wanted,), name="asks-for-nodes", daemon=True)
        self._thread.start()

    def withdraw(self) -> None:
        """Take the jobs back that still wait. Raises LauncherError."""
        if jobs := [str(asked["job"]) for asked in self._asked()]:
            sbatch.cancel(jobs)

    def _ask(self, wanted: WantedNodes) -> None:
        try:
            if not any(self._is_coming(asked) for asked in self._asked()):
                self._submit(wanted)
        except (LauncherError, OrchestraError, OSError) as error:
            _say(f"no more nodes are asked for: {error}")

    def _is_coming(self, asked: Record) -> bool:
        """Tell whether a job waits for its nodes, or has them since a moment ago."""
        try:
            state = this_job.own_job(str(asked["job"])).state
        except SlurmRefused:
            return False
        if state in RUNNING:
            first, most = asked["first_node"], asked["most"]
            came = any(self._member(node).exists() for node in range(first, first + most))
            return not came and time.time() - float(asked["time"]) < _COMING_S
        return state in WAITING

    def _member(self, node: int) -> Path:
        return self._run.control / self._group / f"member-{node:03d}.json"

    def _asked(self) -> Iterator[Record]:
        """Yield what was asked for on behalf of this start of the job."""
        for event in read_events(self._run):
            is_whole_record = all(is_whole(event.get(key)) for key in ("first_node", "most"))
            if event["event"] == ASKED and event.get("crew") == self._group and is_whole_record:
                yield event

    def _submit(self, wanted: WantedNodes) -> None:
        first = max(
            (int(asked["first_node"]) + int(asked["most"]) for asked in self._asked()),
            default=self._task.num_nodes,
        )
        token = new_token()
        script = self._run.control / f"more-nodes-{first:03d}.sbatch"
        text = rendered(self._job(token, HelpedGroup(self._group, first), wanted))
        write_atomically(script, text)
        later = (f"--begin=now+{int(wanted.delay_s)}",) if wanted.delay_s >= 1 else ()
        job = sbatch.submit(script, token, later)
        facts = {"job": job, "fewest": wanted.fewest, "most": wanted.most, "first_node": first}
        writer = EventWriter(self._run, f"crew.{self._group}.more-nodes", wanted.attempt)
        with contextlib.closing(writer):
            writer.write(ASKED, crew=self._group, token=token, **facts)
        _say(f"job {job} waits for {wanted.number} more node(s)")

    def _job(self, token: str, helped: HelpedGroup, wanted: WantedNodes) -> BatchJob:
        """Return the run's own job, on so many nodes, which begins nothing by itself."""
        config, task = self._config, self._task
        share = ask(folder=self._run.path).share_of_nodes(config)
        here = {"job": task.job, "job_start": task.restart}
        bad = excluded_hosts(read_events(self._run), here)
        listed = hosts_without(config, self._run, task.cluster)
        # Where nodes are shared Slurm might give it one that the run has.
        without = dict.fromkeys([*listed, *sorted(bad), *wanted.without])
        job = batch_job(config, self._run, token, replace(share, without=tuple(without)))
        return replace(
            job,
            name=f"{job.name}+",
            num_nodes=wanted.number,
            requeue=False,
            beside_step=(),
            after_failure=(),
            setup_failed=(),
            exports={**job.exports, HELPS_VARIABLE: str(helped)},
        )


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()
