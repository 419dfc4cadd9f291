"""`python -m orchestra.agents.pack SWEEP_DIR --at-once K --array N`: what srun starts on a node that members
of a sweep share (`cluster.members_per_node`).

It keeps K of the members of the sweep's N-th array at work, each with its share of the cores and devices and
an agent of its own, which looks after it as in a job of its own. Whoever ends makes room for the next of the
array's list (`orchestra.run.control.member_places`), from which the array's other jobs take too. When nothing
is left to take, the job ends with 0: how its members ended their own records say. A warning of Slurm reaches
every process, so members save; then this job is queued again if any is left. So it is where members wait
that this node does not suit, and no other job of the array is there to take them. What goes wrong with one
member's files ends no other's training.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Requeue
from launchers import LauncherError, SlurmRefused, SlurmSilent, processes
from launchers.node_agent import StopRequests
from launchers.slurm import this_job
from launchers.slurm.queue import RUNNING
from launchers.slurm.this_job import JobSignals, JobTask, job_task
from orchestra.agents.agent import code_for_slurm
from orchestra.agents.pack import last_of_array
from orchestra.agents.pack.packed_job import PlaceOfAgent, request_for_another
from orchestra.agents.slurm_job import GoOnBy, StopFacts, continuation
from orchestra.agents.wait_for_nodes import MOST_MOVES, UNFIT
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, LaunchError, OrchestraError
from orchestra.report.run_state import read_ending
from orchestra.run.config_file import read_config
from orchestra.run.control import stop_requests
from orchestra.run.control.member_places import MemberPlace, end_place, newest_place, take_place
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir, SweepArray, SweepDir, read_sweep
from orchestra.run.permissions import open_to_group
from orchestra.run.record import RunPhase, newest_job, read_record
from orchestra.submit.claims import upcoming_attempt
from orchestra.submit.hosts_to_avoid import hosts_of_next_job
from orchestra.submit.sweeps.member_shares import MemberShare, on_cores, shares

_POLL_S = 0.2
# How often it looks for members while it has room, and asks Slurm about another job that has one.
_LOOK_S = 2.0
_ASK_S = 15.0
# So often in a row the agent of one member may be killed here.
_MOST_KILLS = 3
_LEFTOVERS_S = 30.0
# A member whose files cannot be read or written is passed over for so long.
_TROUBLE_S = 60.0
# With nobody at work the node is kept for so long where Slurm does not say whether another job has left a
# member, or where it cannot be written how members ended.
_PATIENCE_S = 120.0
_SILENCE_S = 2.0
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
    # Unix seconds.
    began: float


class NodePack:
    """The members of one array that share this node, for one start of its job."""

    def __init__(self, sweep: SweepDir, array: SweepArray, at_once: int, task: JobTask) -> None:
        self._task = task
        self._sweep = sweep
        self._array = array
        self._runs = [sweep.member(index) for index in array.members]
        self._config = read_config(self._runs[0].config)
        open_to_group(self._config.run.group)
        self._free = shares([self._config], at_once)
        self._at_work: list[_Member] = []
        # Those that nobody is to take any more, or not this job.
        self._passed: set[RunDir] = set()
        self._num_kills: dict[RunDir, int] = {}
        # Those that are to be passed over until then.
        self._troubled: dict[RunDir, float] = {}
        # Those that have left, while it cannot be read how they ended, and how others did, not written yet.
        self._gone: list[_Member] = []
        self._ends: list[tuple[RunDir, PlaceOfAgent, bool]] = []
        # Whether this node was found unfit, and whether members leave it because of it.
        self._is_unfit = self._is_blamed = False
        self._looked_at = -_LOOK_S
        self._last_at_work = time.monotonic()
        # When Slurm was last asked about a start of another job, and of which it did not say if it is over.
        self._asked_at: dict[tuple[str, int], float] = {}
        self._unanswered: set[tuple[str, int]] = set()
        # Members that such a start has.
        self._unclear: set[RunDir] = set()

    def work(self, signals: StopRequests) -> int:
        """Train what is to be trained; return the exit code of the job."""
        while True:
            self._see_who_ended()
            if not signals.count() and not self._is_unfit:
                self._take_more()
            if self._at_work:
                self._last_at_work = time.monotonic()
            elif not self._is_patient(signals):
                break
            time.sleep(_POLL_S)
        return self._end(signals)

    def _is_patient(self, signals: StopRequests) -> bool:
        """Tell whether it is worth waiting although nobody is at work."""
        is_open = self._gone or self._ends or (self._unclear and not self._is_unfit)
        is_late = time.monotonic() - self._last_at_work > _PATIENCE_S
        return bool(is_open) and not signals.count() and not is_late

    # Taking members.

    def _take_more(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        for run in self._runs:
            if not self._free:
                return
            if run in self._passed or self._troubled.get(run, now) > now:
                continue
            try:
                if (place := self._taken(run)) is not None:
                    self._start(run, place)
            except (OrchestraError, OSError) as error:
                self._troubled[run] = now + _TROUBLE_S
                _say(f"{run.name} is passed over for now: {error}")

    def _taken(self, run: RunDir) -> PlaceOfAgent | None:
        """Take a member if it waits for a place; return that. Raises OSError."""
        self._unclear.discard(run)
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
                if (newest.job, newest.start) in self._unanswered:
                    self._unclear.add(run)
                return None
            if newest_place(run, self._array.number) != newest:
                # Its end was written before Slurm let that job go.
                return None
        place = PlaceOfAgent(self._array.number, number)
        is_taken = take_place(run, place.array, number, self._task.job, self._task.restart)
        return place if is_taken else None

    def _is_of_this_array(self, run: RunDir) -> bool:
        """Tell whether no later job was submitted for a member. Raises OSError where that cannot be read."""
        entry = newest_job(read_record(run))
        if entry is None and run.path.is_dir():
            raise OSError(f"{run.record}: the record cannot be read, or names no job")
        return entry is not None and entry.get("token") == self._array.token

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
        self._unanswered.add(holder)
        try:
            job = this_job.own_job(place.job)
        except SlurmRefused as error:
            return "Invalid job id" in str(error)
        except LauncherError:
            return False
        if job.state != "COMPLETING":
            self._unanswered.discard(holder)
        # While Slurm cleans up, its processes may be there.
        return job.state not in RUNNING or (job.restarts > place.start and job.state != "COMPLETING")

    def _start(self, run: RunDir, place: PlaceOfAgent) -> None:
        """Start the agent of a member that was taken. Raises OSError, and then gives the place back."""
        share = self._free.pop(0)
        mark = f"{self._task.job}.{self._task.restart}:{run.name}.{place.number}"
        environment = {**os.environ, _MARK: mark, **share.environment}
        began = time.time()
        command = [sys.executable, "-u", "-m", "orchestra.agents", str(run.path), *place.words]
        try:
            run.job_logs.mkdir(parents=True, exist_ok=True)
            with on_cores(share.cores), (run.job_logs / f"{self._task.job}_0_log.out").open("ab") as log:
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        except OSError:
            self._free.append(share)
            self._passed.add(run)
            self._ends.append((run, place, True))
            raise
        self._at_work.append(_Member(run, place, share, process, f"{_MARK}={mark}", began))
        devices = "" if share.devices is None else f", GPU {','.join(share.devices)}"
        _say(f"{run.name} begins on {len(share.cores)} cores{devices}")

    # Giving places back.

    def _see_who_ended(self) -> None:
        for member in [member for member in self._at_work if member.process.poll() is not None]:
            with contextlib.suppress(OSError):
                _end_leftovers(member.mark)
            self._at_work.remove(member)
            self._free.append(member.share)
            self._gone.append(member)
            # The next look is now.
            self._looked_at = -_LOOK_S
        # What cannot be read or written now is tried again each time.
        for member in list(self._gone):
            with contextlib.suppress(OrchestraError, OSError):
                self._ends.append((member.run, member.place, self._goes_on(member)))
                self._gone.remove(member)
        for end in list(self._ends):
            run, place, goes_on = end
            with contextlib.suppress(OSError):
                end_place(run, place.array, place.number, goes_on=goes_on)
                self._ends.remove(end)

    def _goes_on(self, member: _Member) -> bool:
        """Return whether a member waits for another place, and say how it ended. Raises OSError."""
        run, code = member.run, member.process.returncode
        events = read_events(run)
        self._blame_node([event for event in events if event["time"] >= member.began])
        if (asked := request_for_another(events, member.place)) is not None:
            # This job has taken it for as long as it may, or its node does not suit it.
            self._passed.add(run)
            _say(f"{run.name} waits for another place")
            self._is_blamed = self._is_blamed or self._is_named(asked, "exclude")
            return True
        phase, _ = read_ending(run, events, time.time())
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
        with contextlib.suppress(OSError):
            attempt = upcoming_attempt(run) - 1
            writer = EventWriter(run, f"pack.{self._task.job}.{member.place.number}", attempt)
            facts = {"code": EXIT_FAILED, "cause": "agent lost", "message": f"{words}, {number} times"}
            writer.write("failed", node=0, **facts)
            writer.close()
        return False

    def _blame_node(self, events: Sequence[Record]) -> None:
        """Take no more members where the node was found unfit: it would go through all of them."""
        moved = [event for event in events if event["event"] == "requeued" and event.get("rule") == UNFIT]
        failed = [event for event in events if event["event"] == "start_failed"]
        is_unfit = any(self._is_named(event, "exclude") for event in moved)
        if not self._is_unfit and (is_unfit or any(self._is_named(event, "unfit") for event in failed)):
            self._is_unfit = self._is_blamed = True
            _say(f"{self._host} is unfit, and takes no more members")

    def _is_named(self, event: Record, key: str) -> bool:
        hosts = event.get(key)
        return isinstance(hosts, list) and self._host in hosts

    @property
    def _host(self) -> str:
        return self._task.host or socket.gethostname()

    # Ending.

    def _end(self, signals: StopRequests) -> int:
        """Have Slurm queue this job again where members wait whom nobody else takes."""
        first = signals.first
        self._say_left()
        waiting = [run.name for run in self._runs if self._waits(run)]
        for run in [*(member.run for member in self._gone), *(run for run, _, _ in self._ends)]:
            _say(f"error: how {run.name} ended could not be written: {run.control}")
        if not waiting:
            _say("nothing is left to take")
            return EXIT_FAILED if self._gone or self._ends else EXIT_DONE
        if first is None:
            return self._end_before_others(waiting, signals)
        job = this_job.own_job_surely(self._task.job)
        if job is None:
            _say("Slurm does not say what ended this job")
        reasons = frozenset({stop_requests.signal_reason(first)})
        plan = continuation(StopFacts(self._config.cluster.requeue, reasons, job, self._task.restart))
        _say(f"{len(waiting)} members wait for a place; {plan.how.value} ({plan.reason})")
        if plan.how is GoOnBy.requeue:
            try:
                this_job.requeue_surely(self._task.job, self._task.restart)
            except LauncherError as error:
                _say(f"not queued again: {error}; `orchestra resume` submits what is left")
        return code_for_slurm(EXIT_STOPPED, self._config)

    def _end_before_others(self, waiting: Sequence[str], signals: StopRequests) -> int:
        """Leave members that wait to the array's other jobs; where there are none, have Slurm queue this one
        again, without its node where that is to blame. Return the job's exit code. A Slurm that does not
        answer is asked again for `_PATIENCE_S`: else they would be left behind.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return self._leave(waiting)
            except SlurmSilent as error:
                if signals.count():
                    return self._end(signals)
                if time.monotonic() < deadline:
                    time.sleep(_SILENCE_S)
                    continue
                reason = str(error)
            except (OrchestraError, LauncherError, OSError) as error:
                reason = str(error)
            _say(
                f"error: {len(waiting)} members wait for a place ({', '.join(waiting)}), and this job ends: "
                f"{reason}; `orchestra resume {self._sweep.name}` submits what is left"
            )
            return EXIT_FAILED

    def _leave(self, waiting: Sequence[str]) -> int:
        """Raises SlurmSilent where Slurm does not answer, OrchestraError, LauncherError and OSError."""
        if not last_of_array.is_last(self._sweep, self._array.number, self._task):
            _say(f"{len(waiting)} members wait for a place in the array's other jobs")
            return EXIT_DONE
        if self._config.cluster.requeue is Requeue.never:
            raise LaunchError("no job may follow (cluster.requeue=never)")
        if last_of_array.is_too_often(self._sweep, self._array.number, self._task):
            raise LaunchError(f"this job was queued again {MOST_MOVES} times in a row because of that")
        own = this_job.own_job(self._task.job)
        # A request that got no answer may have been heard.
        if not own.is_ending and own.restarts <= self._task.restart:
            # What is said to Slurm takes the place of what the job leaves out already.
            before = this_job.names_of(own.excluded) if own.excluded else []
            blamed, cluster = [self._host] if self._is_blamed else [], self._task.cluster
            hosts = hosts_of_next_job(self._config, self._runs[0], cluster, blamed, before, kept=before)
            self._say_left(is_again=True)
            _say(f"{len(waiting)} members wait for a place, and no other job takes them: queued again")
            this_job.requeue(self._task.job, hosts.exclude)
        return code_for_slurm(EXIT_STOPPED, self._config)

    def _say_left(self, *, is_again: bool = False) -> None:
        # Without it another job may think that this one takes members still.
        with contextlib.suppress(OSError):
            last_of_array.say_left(self._sweep, self._array.number, self._task, is_again=is_again)

    def _waits(self, run: RunDir) -> bool:
        """Tell whether a member waits for a place, as far as can be told."""
        try:
            newest = newest_place(run, self._array.number)
            # The next start of this job sees that a place of this one has ended.
            is_left = any(goes_on for other, _, goes_on in self._ends if other == run)
            is_free = newest is None or newest.goes_on or is_left or run in self._unclear
            return is_free and self._is_of_this_array(run)
        except OSError:
            return True


def _end_leftovers(mark: str) -> None:
    """Wait until nothing of a member's place is left: the next one must not meet it."""
    deadline = time.monotonic() + _LEFTOVERS_S
    while (left := processes.marked(mark)) and time.monotonic() < deadline:
        processes.send(left, signal.SIGKILL)
        time.sleep(_POLL_S)


def _say(words: str) -> None:
    # The disk of the log may be full.
    with contextlib.suppress(OSError):
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
