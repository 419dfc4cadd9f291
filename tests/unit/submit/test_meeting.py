"""How the nodes of one start of a job come to the same attempt, and each attempt to one leader."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path

import pytest

from launchers.slurm.this_job import JobTask
from orchestra.errors import LaunchError
from orchestra.run.control.stop_requests import claimed_attempt
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir
from orchestra.submit.claims import take, take_next, take_turn
from orchestra.submit.network_bench import Meeting, await_meeting, publish

TASK = JobTask("12", 0, 1, 2, "node2", None)
MEETING = Meeting(3, "10.0.0.1", 20001, "node1", 1e9)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path)
    run.control.mkdir()
    return run


def test_nodes_read_what_node_0_decided_for_this_start_of_the_job(run: RunDir) -> None:
    for job, restart in (("11", 0), ("12", 1)):
        other = dataclasses.replace(TASK, job=job, restart=restart)
        publish(run, other, dataclasses.replace(MEETING, attempt=9))
    timer = threading.Timer(0.1, publish, (run, TASK, MEETING))
    timer.start()
    assert await_meeting(run, TASK, lambda: False, timeout_s=10) == MEETING
    timer.join()


def test_silence_of_node_0_has_an_end(run: RunDir) -> None:
    with pytest.raises(LaunchError, match=r"node 0 of job 12 has not said within 0\.1 s"):
        await_meeting(run, TASK, lambda: False, timeout_s=0.1)
    assert await_meeting(run, TASK, lambda: True) is None


def test_damaged_word_is_no_word(run: RunDir) -> None:
    for text in ("", "[]", '{"attempt": 1}', "{"):
        run.meeting("12", 0).write_text(text)
        with pytest.raises(LaunchError):
            await_meeting(run, TASK, lambda: False, timeout_s=0.0)


def test_each_attempt_is_claimed_once_and_follows_all_before(run: RunDir) -> None:
    assert [take_next(run), take_next(run)] == [0, 1]
    EventWriter(run, node_writer(4, 0), 4).write("attempt_started")
    assert take_next(run) == 5
    assert (claimed_attempt(run), take(run, 5), take(run, 6)) == (5, False, True)


def test_a_job_is_submitted_by_one_command_unless_that_died(run: RunDir) -> None:
    now = time.time()
    first = take_turn(run, 1, now)
    assert first is not None
    assert (take_turn(run, 1, now), take_turn(run, 2, now) is None) == (None, False)
    first.write_text(json.dumps({**json.loads(first.read_text()), "pid_started": -1}))
    assert take_turn(run, 1, now) is not None
    assert take_turn(run, 1, now) is None
