"""One node's part in an attempt over several nodes: meet, start torchrun, watch it, and end together.

Node 0 decides the attempt's number and where the ranks meet, and speaks for the whole at the end. All nodes
end with the same verdict, so that Slurm's word for the job is the run's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from conf.schema import Config
from launchers.agent import start_agent, supervise
from launchers.errors import LauncherError
from launchers.ports import free_port
from launchers.slurm.task import JobTask, job_task
from launchers.spec import Ending, LaunchSpec, Place
from launchers.stops import StopRequests
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, LaunchError, RivalError
from orchestra.events import node_writer
from orchestra.frozen import read_config
from orchestra.jsonl import Record, read_json_lines
from orchestra.report.verdict import node_verdict
from orchestra.rundir import RunDir
from orchestra.submit.claims import take_next
from orchestra.submit.continuation import GoingOn
from orchestra.submit.guard import refusal
from orchestra.submit.launch import launch_spec
from orchestra.submit.meeting import Meeting, await_meeting, is_there, publish, publish_refusal
from orchestra.submit.place import own_address, placed
from orchestra.submit.recording import AttemptRecord, announced, joined
from orchestra.submit.urgency import Urgency

# How often a node looks whether the attempt broke on another one.
_LOOK_S = 2.0
# How long nodes wait for each other's end; less where Slurm is about to kill (KillWait, 30 s by default).
_END_TIMEOUT_S = 120.0
_HURRIED_END_TIMEOUT_S = 15.0
_POLL_S = 0.2
# Node 0's last event. The other nodes wait for it: srun ends all tasks when the first one ends with a code.
_LAST_WORD = "node_left"


@dataclass(frozen=True)
class _Part:
    """This node's part in one attempt."""

    run: RunDir
    config: Config
    task: JobTask
    meeting: Meeting
    signals: StopRequests

    @property
    def attempt(self) -> int:
        return self.meeting.attempt


def attend(run: RunDir, signals: StopRequests) -> int:
    """Take part in the attempt that this start of the job makes, to its end; return the verdict's exit code.

    *Every node of a job's step.* Raises LaunchError, LauncherError and OSError when it cannot take part.
    """
    task = job_task(os.environ)
    config = read_config(run.config)
    if task.num_nodes != config.cluster.nodes:
        raise LaunchError(
            f"the job has {task.num_nodes} nodes, the run wants cluster.nodes={config.cluster.nodes}"
        )
    meeting = _meeting(run, config, task, signals)
    if meeting is None:
        _break_what_began(run, task)
        _say(task, f"{signals.first} came before the attempt began")
        return EXIT_STOPPED
    _say(task, f"attempt {meeting.attempt}, the ranks meet at {meeting.address}:{meeting.port}")
    part = _Part(run, config, task, meeting, signals)
    spec, place = _launch(part)
    record = _record(part, spec)
    try:
        return _train(part, record, spec, place)
    except (LauncherError, OSError) as error:
        record.write_failed(LaunchError(str(error)))
        _break(run, meeting.attempt)
        raise


def _meeting(run: RunDir, config: Config, task: JobTask, signals: StopRequests) -> Meeting | None:
    if task.node > 0:
        return await_meeting(run, task, lambda: signals.count() > 0)
    if (rival := refusal(run, task)) is not None:
        publish_refusal(run, task, rival)
        raise RivalError(rival)
    host = task.host or socket.gethostname()
    address = own_address(config.cluster.network, task)
    meeting = Meeting(take_next(run), address, free_port(), host, time.time())
    publish(run, task, meeting)
    return meeting


def _launch(part: _Part) -> tuple[LaunchSpec, Place]:
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    spec = launch_spec(part.config, part.run, part.attempt, path)
    return placed(spec, part.task, part.meeting)


def _record(part: _Part, spec: LaunchSpec) -> AttemptRecord:
    facts = {"job": part.task.job, "job_start": part.task.restart, "cluster": part.task.cluster}
    if part.task.node == 0:
        return announced(part.config, part.run, part.attempt, spec, **facts)
    record = joined(part.run, part.attempt, part.task.node)
    record.events.write("node_started", node=part.task.node, pid=os.getpid(), **facts)
    return record


def _train(part: _Part, record: AttemptRecord, spec: LaunchSpec, place: Place) -> int:
    urgency = Urgency(part.run, part.attempt, part.signals, part.config.recovery.stop_timeout_s)
    watch = _BreakWatch(part.run, part.attempt)
    agent = start_agent(spec, place)
    ending = supervise(agent, lambda: urgency.level() or int(watch.is_broken()), lambda: None)
    if ending.exit_code != EXIT_DONE:
        _break(part.run, part.attempt)
    # A full disk takes the record, not the verdict.
    with contextlib.suppress(OSError):
        if part.task.node > 0:
            record.write_killed_ranks(ending, was_stopped=ending.stops > 0)
        record.events.write("node_ended", node=part.task.node, code=ending.exit_code)
    if part.task.node > 0:
        return _code_of_node_0(part, ending)
    return _concluded(part, record, _of_all_nodes(part, record, ending), urgency.interruption)


def _concluded(part: _Part, record: AttemptRecord, ending: Ending, interruption: str | None) -> int:
    """Write the verdict, let the run go on where it is to, and return the verdict's code. *Node 0 only*."""
    going_on = GoingOn(part.run, part.config, part.task, part.attempt, record.events)
    verdict = record.conclude(ending, interruption, going_on.judged)
    _say(part.task, f"{verdict.state}: {verdict.message or verdict.cause}")
    if done := going_on.go_on(verdict):
        _say(part.task, done)
    with contextlib.suppress(OSError):
        record.events.write(_LAST_WORD, node=0)
    return verdict.code


def _break_what_began(run: RunDir, task: JobTask) -> None:
    """Let node 0 know that this node leaves: it may just have begun, and would wait for this one's ranks."""
    deadline = time.monotonic() + _LOOK_S
    met = await_meeting(run, task, lambda: time.monotonic() > deadline)
    if met is not None:
        _break(run, met.attempt)


def _break(run: RunDir, attempt: int) -> None:
    """Let the other nodes know that ranks of this one failed: theirs might wait for them until a time-out."""
    with contextlib.suppress(OSError):
        run.broken(attempt).touch()


@dataclass
class _BreakWatch:
    """Looks now and then whether the attempt broke on some node."""

    run: RunDir
    attempt: int
    _found: bool = False
    _looked_at: float = field(default_factory=time.monotonic)

    def is_broken(self) -> bool:
        now = time.monotonic()
        if not self._found and now - self._looked_at >= _LOOK_S:
            self._looked_at = now
            with contextlib.suppress(OSError):
                self._found = is_there(self.run.broken(self.attempt))
        return self._found


def _of_all_nodes(part: _Part, record: AttemptRecord, ending: Ending) -> Ending:
    """Wait for the other nodes' ends and return node 0's ending with their code where it is worse.

    A node that says nothing is written down as lost.
    """
    others = range(1, part.task.num_nodes)
    ends: dict[int, int] = {}

    def all_ended() -> bool:
        for node in others:
            if node not in ends and (found := _last(part, node, "node_ended", "failed")) is not None:
                ends[node] = int(found.get("code", EXIT_FAILED))
        return len(ends) == len(others)

    _wait(part, all_ended)
    for node in others:
        if node not in ends:
            with contextlib.suppress(OSError):
                record.events.write("node_lost", node=node, cause="its agent said nothing at the end")
            ends[node] = EXIT_FAILED
    worst = next((code for code in (ending.exit_code, *ends.values()) if code != EXIT_DONE), EXIT_DONE)
    return dataclasses.replace(ending, exit_code=worst)


def _code_of_node_0(part: _Part, ending: Ending) -> int:
    """Wait for the verdict and return its code; without one, whether this node's own part went well."""
    found: list[int] = []

    def has_left() -> bool:
        events = _events(part, 0)
        if (verdict := node_verdict(events)) is not None:
            found.append(verdict.code)
        return any(event["event"] == _LAST_WORD for event in events)

    _wait(part, has_left)
    return found[-1] if found else (EXIT_DONE if ending.exit_code == EXIT_DONE else EXIT_FAILED)


def _wait(part: _Part, is_over: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not is_over():
        limit = _HURRIED_END_TIMEOUT_S if part.signals.count() else _END_TIMEOUT_S
        if time.monotonic() - begin > limit:
            return
        time.sleep(_POLL_S)


def _events(part: _Part, node: int) -> list[Record]:
    return list(read_json_lines(part.run.event_file(node_writer(part.attempt, node))))


def _last(part: _Part, node: int, *names: str) -> Record | None:
    found = [event for event in _events(part, node) if event.get("event") in names and "rank" not in event]
    return found[-1] if found else None


def _say(task: JobTask, words: str) -> None:
    host = task.host or socket.gethostname()
    sys.stdout.write(
        f"job {task.job} start {task.restart} node {task.node} of {task.num_nodes} on {host}: {words}\n"
    )
    sys.stdout.flush()
