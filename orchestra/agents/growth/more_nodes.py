"""Jobs that wait in the queue for nodes which a run lacks, and cost nothing until they get them.

One waits at a time. Which ones were submitted stands in the run's events (`nodes_asked`), so that another
agent goes on where this one dies. Such a job carries a token like any other, and is found again by it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

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
from orchestra.report.run_state import name_of
from orchestra.run.events import EventWriter, is_whole, read_events
from orchestra.run.files import Record, write_atomically
from orchestra.run.paths import RunDir
from orchestra.submit.hosts_to_avoid import hosts_without
from orchestra.submit.job import batch_job, new_token
from orchestra.submit.site import ask

# The events before and after such a job is submitted.
WANTED, ASKED = "nodes_wanted", "nodes_asked"
# How often Slurm is asked what became of a job that waits; twice as long after each job that was in vain.
_EVERY_S = 30.0
_MOST_ASKED = 5
# What the submission of one may take.
_SUBMIT_S = 60.0
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
        self._is_over = False
        # The attempt that was asked for last, when it may be asked for again, and how often that was in vain.
        self._attempt = -1
        self._due = 0.0
        self._num_asked = 0
        # When a job was first seen to run.
        self._began: dict[str, float] = {}

    def ask(self, wanted: WantedNodes) -> None:
        """See to it, on a thread of its own, that a job waits for them."""
        now = time.monotonic()
        if wanted.attempt != self._attempt:
            self._attempt, self._due, self._num_asked = wanted.attempt, now, 0
        is_busy = self._thread is not None and self._thread.is_alive()
        if now < self._due or is_busy or self._is_over or self._num_asked > _MOST_ASKED:
            return
        self._due = now + _EVERY_S
        self._thread = threading.Thread(target=self._ask, args=(wanted,), name="asks-for-nodes", daemon=True)
        self._thread.start()

    def withdraw(self, *, for_good: bool) -> None:
        """Take all jobs back that still wait to help this run, of its earlier jobs too. `for_good`: none is
        asked for after that. Raises LauncherError.
        """
        self._is_over = self._is_over or for_good
        if self._thread is not None and for_good:
            self._thread.join(_SUBMIT_S)
        if jobs := [str(event["job"]) for event in read_events(self._run) if event["event"] == ASKED]:
            sbatch.cancel(jobs)

    def _ask(self, wanted: WantedNodes) -> None:
        try:
            asked = [event for event in read_events(self._run) if self._is_of_here(event)]
            newest = next((event for event in reversed(asked) if event["event"] == ASKED), None)
            if newest is not None and self._is_coming(newest):
                return
            self._submit(wanted, asked)
        except (LauncherError, OrchestraError, OSError) as error:
            _say(f"no more nodes are asked for: {error}")
        # A job that ends before its agents come, or is refused, is not asked for over and over.
        self._num_asked += 1
        self._due = time.monotonic() + _EVERY_S * 2**self._num_asked
        if self._num_asked > _MOST_ASKED:
            _say(f"attempt {wanted.attempt} asks for no more nodes: {_MOST_ASKED} jobs were in vain")

    def _is_of_here(self, event: Record) -> bool:
        """Tell whether an event says what was asked for on behalf of this start of the job."""
        numbers = (event.get("first_node"), event.get("most"))
        is_meant = event["event"] in (WANTED, ASKED) and event.get("crew") == self._group
        return is_meant and all(map(is_whole, numbers))

    def _is_coming(self, asked: Record) -> bool:
        """Tell whether a job waits for its nodes, or has them since a moment ago."""
        job = str(asked["job"])
        try:
            state = this_job.own_job(job).state
        except SlurmRefused:
            return False
        if state not in RUNNING:
            return state in WAITING
        began = self._began.setdefault(job, time.monotonic())
        nodes = range(asked["first_node"], asked["first_node"] + asked["most"])
        folder = self._run.control / self._group
        came = any((folder / f"member-{node:03d}.json").exists() for node in nodes)
        return not came and time.monotonic() - began < _COMING_S

    def _submit(self, wanted: WantedNodes, asked: Sequence[Record]) -> None:
        ends = [int(event["first_node"]) + int(event["most"]) for event in asked]
        first = max([self._task.num_nodes, *ends])
        token = new_token()
        script = self._run.control / f"more-nodes-{first:03d}.sbatch"
        self._run.job_logs.mkdir(parents=True, exist_ok=True)
        write_atomically(script, rendered(self._job(token, HelpedGroup(self._group, first), wanted)))
        facts = {"fewest": wanted.fewest, "most": wanted.most, "first_node": first, "token": token}
        writer = EventWriter(self._run, f"crew.{self._group}.more-nodes", wanted.attempt)
        with contextlib.closing(writer):
            # Before it is submitted: no two jobs may take the same numbers, whatever is lost after that.
            writer.write(WANTED, crew=self._group, **facts)
            job = sbatch.submit(script, token, sbatch.begin_of_next(script, int(wanted.delay_s)))
            sbatch.release(script, job)
            try:
                writer.write(ASKED, crew=self._group, job=job, **facts)
            except OSError:
                sbatch.cancel([job], only_waiting=False)
                raise
        _say(f"job {job} waits for {wanted.number} more node(s)")

    def _job(self, token: str, helped: HelpedGroup, wanted: WantedNodes) -> BatchJob:
        """Return the run's own job, on so many nodes, which begins nothing by itself."""
        config, task = self._config, self._task
        share = ask(folder=self._run.path).share_of_nodes(config)
        here = {"job": task.job, "job_start": task.restart}
        bad = excluded_hosts(read_events(self._run), here, config.recovery.exclude_hours)
        listed = hosts_without(config, self._run, task.cluster)
        # Where nodes are shared Slurm might give it one that the run has.
        without = dict.fromkeys([*listed, *sorted(bad), *wanted.without])
        job = batch_job(config, self._run, token, replace(share, without=tuple(without)))
        # The code that trains: a run that was resumed, and a member of a sweep, have it elsewhere.
        path = os.environ.get("PYTHONPATH") or job.exports["PYTHONPATH"]
        # It is too few nodes for whole segments.
        options = {name: value for name, value in job.options.items() if name != "segment"}
        prefix = (f"PYTHONPATH={path}" if word.startswith("PYTHONPATH=") else word for word in job.prefix)
        return replace(
            job,
            # As people name the run: the folder of a member of a sweep has a number for a name.
            name=f"{name_of(self._run)}+",
            num_nodes=wanted.number,
            requeue=False,
            beside_step=(),
            after_failure=(),
            setup_failed=(),
            prefix=tuple(prefix),
            options=options,
            exports={**job.exports, "PYTHONPATH": path, HELPS_VARIABLE: str(helped)},
        )


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()
