"""A warning of Slurm that comes while a job's nodes are still gathering: the run goes on where one goes on
that was warned while it trained. Real signals, real files; Slurm's commands are stand-ins.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_slurm_job import Slurm, job_of, jobs, requeued

from conf.schema import Requeue
from launchers.node_group import NodeGroup
from launchers.slurm.this_job import JobSignals
from orchestra.agents.context import AgentContext
from orchestra.agents.leader import Leader
from orchestra.agents.wait_for_nodes import called_off
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_STOPPED
from orchestra.run import stop_requests
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir
from orchestra.run.stop_requests import claimed_attempt
from orchestra.submit.claims import take_next, upcoming_attempt

HEARD = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return Slurm(folder, {"node1": "allocated", "node2": "allocated"})


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "mine")
    run.control.mkdir(parents=True)
    entry = {"token": "orchestra:0", "id": "12", "attempt": 0}
    run.record.write_text(json.dumps({"name": "mine", "jobs": [entry]}))
    return run


@pytest.fixture
def signals() -> Iterator[JobSignals]:
    # They are left ignored after a task's end, which is not this process's.
    before = {number: signal.getsignal(number) for number in HEARD}
    with JobSignals() as signals:
        yield signals
    for number, handler in before.items():
        signal.signal(number, handler)


def warned(
    run: RunDir, signals: JobSignals, number: int = signal.SIGUSR2, policy: Requeue = Requeue.requeue
) -> AgentContext:
    """Return the context of a job's first node, whose agent has heard a signal."""
    os.kill(os.getpid(), number)
    job = job_of(run, 2, requeue=policy)
    group = NodeGroup(run.control / "job-12.start-0", 0, 2, 5.0)
    return AgentContext(run, job._config, group, signals, job, lambda _: None)


def test_after_its_time_limit_the_job_is_started_again_and_trains_the_same_attempt(
    run: RunDir, slurm: Slurm, signals: JobSignals
) -> None:
    code, said = called_off(warned(run, signals))
    assert (code, said) == (EXIT_STOPPED, "SIGUSR2 came before the attempt began: requeued (time_limit)")
    assert slurm.calls("scontrol requeue") == ["scontrol requeue 12"]
    (event,) = requeued(run)
    assert (event["how"], event["reason"], event["job"]) == ("requeue", "time_limit", "12")
    # Nothing stands in the way of the next start: no claim that is waited for, no request that stops it.
    assert claimed_attempt(run) is None
    assert stop_requests.requested_attempt(run) is None
    assert take_next(run) == 0


def test_by_chain_another_job_is_submitted_for_it(run: RunDir, slurm: Slurm, signals: JobSignals) -> None:
    code, said = called_off(warned(run, signals, policy=Requeue.chain))
    assert (code, "job 20 goes on (time_limit)" in said) == (EXIT_STOPPED, True)
    assert [(it["id"], it["attempt"]) for it in jobs(run)] == [("12", 0), ("20", 0)]


def test_a_preemption_counts_like_the_time_limit(run: RunDir, slurm: Slurm, signals: JobSignals) -> None:
    slurm.tell("job-12", "JobId=12 JobState=RUNNING Reason=None Restarts=0 PreemptTime=2026-01-01T00:00:00\n")
    called_off(warned(run, signals, signal.SIGTERM))
    assert [event["reason"] for event in requeued(run)] == ["preempted"]


@pytest.mark.parametrize(
    ("number", "policy", "said"),
    [
        (signal.SIGUSR2, Requeue.never, "cluster.requeue=never (time_limit)"),
        (signal.SIGTERM, Requeue.requeue, "signal SIGTERM"),
    ],
)
def test_who_is_to_end_ends(
    run: RunDir, slurm: Slurm, signals: JobSignals, number: int, policy: Requeue, said: str
) -> None:
    code, words = called_off(warned(run, signals, number, policy))
    assert (code, requeued(run)) == (EXIT_STOPPED, [])
    assert said in words


def test_a_cancelled_run_does_not_go_on(run: RunDir, slurm: Slurm, signals: JobSignals) -> None:
    stop_requests.write_request(run, upcoming_attempt(run), stop_requests.CANCEL)
    _, said = called_off(warned(run, signals))
    assert "it was cancelled" in said
    assert requeued(run) == []


def test_a_cancel_that_somebody_resumed_from_is_no_reason(
    run: RunDir, slurm: Slurm, signals: JobSignals
) -> None:
    """The newest job was submitted for attempt 1, after attempt 0 had been cancelled."""
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started", node=0)
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    entry = {"token": "orchestra:0", "id": "12", "attempt": 1}
    run.record.write_text(json.dumps({"name": "mine", "jobs": [entry]}))
    called_off(warned(run, signals))
    assert [(event["attempt"], event["reason"]) for event in requeued(run)] == [(0, "time_limit")]


def test_jobs_that_are_over_before_anything_begins_are_not_started_for_ever(
    run: RunDir, slurm: Slurm, signals: JobSignals
) -> None:
    codes = [called_off(warned(run, signals))[0] for _ in range(4)]
    assert codes == [EXIT_STOPPED] * 3 + [EXIT_DO_NOT_RESTART]
    assert len(slurm.calls("scontrol requeue")) == 3
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started", node=0)
    assert called_off(warned(run, signals))[0] == EXIT_STOPPED, "an attempt that began is progress"


def test_the_leader_ends_the_job_with_that_word(run: RunDir, slurm: Slurm, signals: JobSignals) -> None:
    context = warned(run, signals)
    context.group.join("node1", "127.0.0.1", {"port": 1})
    try:
        Leader(context).look(None)
        order = context.group.newest_order()
    finally:
        context.group.leave()
    assert order is not None
    assert (order.action, order.facts["code"]) == ("end", EXIT_STOPPED)
    assert "requeued (time_limit)" in str(order.facts["said"])
