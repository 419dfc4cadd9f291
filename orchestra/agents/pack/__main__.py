"""`python -m orchestra.agents.pack SWEEP_DIR --at-once K --array N`: what srun starts on a node that members
of a sweep share (`cluster.members_per_node`).

It keeps K of the members of the sweep's N-th array at work, each with its share of the cores and devices and
an agent of its own, which looks after it as in a job of its own. Whoever ends makes room for the next of the
array's list (`orchestra.run.control.member_places`), from which the array's other jobs take too. When nothing
is left to take, the job ends with 0: how its members ended their own records say. A warning of Slurm reaches
every process, so members save; then this job is queued again if any is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers import LauncherError, SlurmRefused, processes
from launchers.node_agent import StopRequests
from launchers.slurm import this_job
from launchers.slurm.queue import RUNNING
from launchers.slurm.this_job import JobSignals, JobTask, job_task
from orchestra.agents.agent import code_for_slurm
from orchestra.agents.pack.packed_job import PlaceOfAgent
from orchestra.agents.slurm_job import GoOnBy, StopFacts, continuation
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, OrchestraError
from orchestra.report.run_state import read_ending
from orchestra.run.config_file import read_config
from orchestra.run.control import stop_requests
from orchestra.run.control.member_places import MemberPlace, end_place, newest_place, take_place
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir, SweepArray, SweepDir, read_sweep
from orchestra.run.permissions import open_to_group
from orchestra.run.record import RunPhase, newest_job, read_record
from orchestra.submit.claims import upcoming_attempt
from orchestra.submit.sweeps.member_shares import MemberShare, on_cores, shares

_POLL_S = 0.2
# How often it looks for members while it has room, and asks Slurm about another job that has one.
_LOOK_S = 2.0
_ASK_S = 15.0
# So often in a row the agent of one member may be killed here.
_MOST_KILLS = 3
_LEFTOVERS_S = 30.0
# In the environment of whatever belongs to one place of a member.
_MARK = "ORCHESTRA_PLACE"


@dataclass(frozen=True)
class _Member:
    """A member that trains on this node."""

    run: RunDir
    place: PlaceOfAgent
    share: MemberShare
    process: subprocess.Popen[bytes]
    mark: str


class NodePack:
    """The members of one array that share this node, for one start of its job."""

    def __init__(self, sweep: SweepDir, array: SweepArray, at_once: int, task: JobTask) -> None:
        self._task = task
        self._array = array
        self._runs = [sweep.member(index) for index in array.members]
        self._config = read_config(self._runs[0].config)
        open_to_group(self._config.run.group)
        self._free = shares([self._config], at_once)
        self._at_work: list[_Member] = []
        # Those that nobody is to take any more, or not this job.
        self._passed: set[RunDir] = set()
        self._num_kills: dict[RunDir, int] = {}
        self._looked_at = 0.0
        # When Slurm was last asked about a start of another job.
        self._asked_at: dict[tuple[str, int], float] = {}

    def work(self, signals: StopRequests) -> int:
        """Train what is to be trained; return the exit code of the job."""
        while True:
            self._see_who_ended()
            if not signals.count() and self._free:
                self._take_more()
            if not self._at_work:
                break
            time.sleep(_POLL_S)
        return self._end(signals)

    # Taking members.

    def _take_more(self) -> None:
        now = time.monotonic()
        if self._at_work and now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        for run in self._runs:
            if not self._free:
                return
            if run not in self._passed and (place := self._taken(run)) is not None:
                self._start(run, place)

    def _taken(self, run: RunDir) -> PlaceOfAgent | None:
        """Take a member if it waits for a place; return that."""
        if not self._is_of_this_array(run):
            self._passed.add(run)
            return None
        newest = newest_place(run, self._array.number)
        number = 0 if newest is None else newest.number + 1
        if newest is not None and not newest.goes_on:
            if newest.end is not None or newest.job is None:
                self._passed.add(run)
                return None
            if not self._is_over(newest):
                return None
        place = PlaceOfAgent(self._array.number, number)
        is_taken = take_place(run, place.array, number, self._task.job, self._task.restart)
        return place if is_taken else None

    def _is_of_this_array(self, run: RunDir) -> bool:
        """Tell whether no later job was submitted for a member."""
        entry = newest_job(read_record(run)) or {}
        return entry.get("token") == self._array.token

    def _is_over(self, place: MemberPlace) -> bool:
        """Tell whether the start of a job that has a member is over, by Slurm's word alone."""
        assert place.job is not None
        holder, now = (place.job, place.start), time.monotonic()
        if holder == (self._task.job, self._task.restart):
            return False
        if place.job == self._task.job:
            # An earlier start of this very job.
            return True
        if now - self._asked_at.get(holder, -_ASK_S) < _ASK_S:
            return False
        self._asked_at[holder] = now
        try:
            job = this_job.own_job(place.job)
        except SlurmRefused as error:
            return "Invalid job id" in str(error)
        except LauncherError:
            return False
        # While Slurm cleans up, its processes may be there.
        return job.state not in RUNNING or (job.restarts > place.start and job.state != "COMPLETING")

    def _start(self, run: RunDir, place: PlaceOfAgent) -> None:
        share = self._free.pop(0)
        mark = f"{self._task.job}.{self._task.restart}:{run.name}.{place.number}"
        environment = {**os.environ, _MARK: mark}
        if share.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.devices)
        run.job_logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-u", "-m", "orchestra.agents", str(run.path), *place.words]
        with on_cores(share.cores), (run.job_logs / f"{self._task.job}_0_log.out").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self._at_work.append(_Member(run, place, share, process, f"{_MARK}={mark}"))
        devices = "" if share.devices is None else f", GPU {','.join(share.devices)}"
        _say(f"{run.name} begins on {len(share.cores)} cores{devices}")

    # Giving places back.

    def _see_who_ended(self) -> None:
        for member in [member for member in self._at_work if member.process.poll() is not None]:
            _end_leftovers(member.mark)
            self._at_work.remove(member)
            self._free.append(member.share)
            goes_on = self._goes_on(member)
            end_place(member.run, member.place.array, member.place.number, goes_on=goes_on)
            # The next look is now.
            self._looked_at = 0.0

    def _goes_on(self, member: _Member) -> bool:
        """Return whether a member waits for another place, and say how it ended."""
        run, code = member.run, member.process.returncode
        phase, _ = read_ending(run, read_events(run), time.time())
        if phase is RunPhase.queued:
            # This job has taken it for as long as it may, or its node does not suit it.
            self._passed.add(run)
            _say(f"{run.name} waits for another place")
            return True
        if code >= 0 or phase in (RunPhase.finished, RunPhase.stopped, RunPhase.interrupted):
            self._passed.add(run)
            _say(f"{run.name} is {phase}")
            return False
        number = self._num_kills[run] = self._num_kills.get(run, 0) + 1
        words = f"the agent of {run.name} was killed by signal {-code}"
        _say(f"{words}, time {number} of {_MOST_KILLS}")
        if number < _MOST_KILLS:
            return True
        self._passed.add(run)
        attempt = upcoming_attempt(run) - 1
        events = EventWriter(run, f"pack.{self._task.job}.{member.place.number}", attempt)
        events.write(
            "failed", node=0, code=EXIT_FAILED, cause="agent lost", message=f"{words}, {number} times"
        )
        events.close()
        return False

    # Ending.

    def _end(self, signals: StopRequests) -> int:
        """Have Slurm queue this job again where a signal ended it before its members were done."""
        first = signals.first
        if first is None:
            _say("nothing is left to take")
            return EXIT_DONE
        waiting = [run.name for run in self._runs if self._waits(run)]
        if not waiting:
            return EXIT_DONE
        job = None
        try:
            job = this_job.own_job(self._task.job)
        except LauncherError as error:
            _say(f"Slurm does not say what ended this job: {error}")
        reasons = frozenset({stop_requests.signal_reason(first)})
        plan = continuation(StopFacts(self._config.cluster.requeue, reasons, job, self._task.restart))
        _say(f"{len(waiting)} members wait for a place; {plan.how.value} ({plan.reason})")
        if plan.how is GoOnBy.requeue:
            try:
                this_job.requeue(self._task.job)
            except LauncherError as error:
                _say(f"not queued again: {error}; `orchestra resume` submits what is left")
        return code_for_slurm(EXIT_STOPPED, self._config)

    def _waits(self, run: RunDir) -> bool:
        newest = newest_place(run, self._array.number)
        return self._is_of_this_array(run) and (newest is None or newest.goes_on)


def _end_leftovers(mark: str) -> None:
    """Wait until nothing of a member's place is left: the next one must not meet it."""
    deadline = time.monotonic() + _LEFTOVERS_S
    while (left := processes.marked(mark)) and time.monotonic() < deadline:
        processes.send(left, signal.SIGKILL)
        time.sleep(_POLL_S)


def _say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def main(argv: Sequence[str]) -> int:
    """Train members on this node until none is left or Slurm ends the job; return the job's exit code."""
    place, _, at_once, _, number = argv
    try:
        with JobSignals() as signals:
            sweep = SweepDir(Path(place))
            array = next(array for array in read_sweep(sweep).arrays if array.number == int(number))
            return NodePack(sweep, array, int(at_once), job_task(os.environ)).work(signals)
    except (OrchestraError, LauncherError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
