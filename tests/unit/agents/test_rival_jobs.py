"""Which job may train a run: the newest, and none beside another that lives. And which attempt comes next."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from job_in_slurm import SILENT, Slurm, record
from job_in_slurm import TASK as TASK_OF_ALPS

from conf.schema import Config
from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup, Order
from launchers.slurm.this_job import JobTask
from orchestra.agents import rival_jobs
from orchestra.agents.agent import attend, group_folder
from orchestra.agents.context import REFUSE, AgentContext, Scheduler
from orchestra.agents.rival_jobs import refusal
from orchestra.errors import RivalError
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir
from orchestra.submit.claims import next_attempt_number, take_next

TASK = replace(TASK_OF_ALPS, cluster=None)
HERE = replace(TASK, cluster="here")


def recorded(run: RunDir, *jobs: str | None, task: int | None = None, cluster: str | None = None) -> None:
    place = {"task": task, "cluster": cluster}
    record(run, *({"token": f"orchestra:{number}", "id": job, **place} for number, job in enumerate(jobs)))


def began(run: RunDir, attempt: int, job: str | None = None, cluster: str | None = None) -> EventWriter:
    events = EventWriter(run, node_writer(attempt, 0), attempt)
    facts = {} if job is None else {"job": job, "cluster": cluster}
    events.write("attempt_started", node=0, pid=1, **facts)
    return events


def after_quiet(run: RunDir, task: JobTask = TASK) -> str | None:
    """Return why a job may not train after the run's files have stood still for a moment."""
    return refusal(run, task, quiet_s=0.1)


def while_somebody(does: Callable[[], object], run: RunDir, task: JobTask = TASK) -> str:
    """Return why a job may not train while somebody else does something for the run, once it is watched."""
    with pytest.MonkeyPatch.context() as patch:
        looked, has_acted = rival_jobs._states, False

        def states(run: RunDir) -> dict[Path, tuple[int, int]]:
            nonlocal has_acted
            found = looked(run)
            if not has_acted:
                has_acted = True
                does()
            return found

        patch.setattr(rival_jobs, "_states", states)
        return str(refusal(run, task, quiet_s=30))


def test_the_newest_job_trains_and_so_does_its_next_start(run: RunDir, slurm: Slurm) -> None:
    recorded(run, "11", "12")
    assert refusal(run, TASK) is None
    began(run, 0, "12")
    assert refusal(run, replace(TASK, restart=1)) is None


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "REQUEUE_HOLD", "CANCELLED", "forgotten"])
def test_an_older_job_steps_back_for_the_newest_even_where_that_is_over(
    run: RunDir, slurm: Slurm, state: str
) -> None:
    recorded(run, "12", "15")
    if state != "forgotten":
        slurm.has_job("15", state)
    found = str(refusal(run, replace(TASK, restart=1)))
    assert "job 12 (start 1) does not train mine: job 15 was submitted for it later" in found


def test_the_same_number_on_another_cluster_is_another_job(run: RunDir, slurm: Slurm) -> None:
    recorded(run, "12", cluster="there")
    assert "job 12 on cluster there was submitted for it later" in str(refusal(run, HERE))
    recorded(run, "12", cluster="Here")
    assert refusal(run, HERE) is None
    slurm.has_job("12", "RUNNING", Comment="orchestra:0")
    recorded(run, "12", cluster="there")
    assert refusal(run, HERE) is None, "its token says that clusters work together here"


@pytest.mark.parametrize("cluster", ["there", "here", None])
def test_an_attempt_of_a_job_that_slurm_does_not_know_is_watched(
    run: RunDir, slurm: Slurm, cluster: str | None
) -> None:
    recorded(run, "12")
    began(run, 0, "77", cluster=cluster)
    assert after_quiet(run, HERE) is None
    assert "leads attempt 0" in while_somebody(lambda: run.metrics.write_text("{}\n"), run, HERE)


def test_a_forgotten_job_whose_files_are_long_still_is_not_waited_for(run: RunDir, slurm: Slurm) -> None:
    recorded(run, "12")
    began(run, 0, "77")
    long_ago = time.time() - 3600
    for file in run.events.iterdir():
        os.utime(file, (long_ago, long_ago))
    assert refusal(run, TASK, quiet_s=3600) is None


def test_a_later_job_without_a_number_is_this_one_or_one_that_slurm_may_never_have_had(
    run: RunDir, slurm: Slurm
) -> None:
    recorded(run, "12", None)
    assert after_quiet(run) is None
    recorded(run, "11", None)
    slurm.has_job("12", "RUNNING", Comment="orchestra:1")
    assert after_quiet(run) is None


def test_a_task_of_an_array_is_known_by_its_token_and_its_number(run: RunDir, slurm: Slurm) -> None:
    recorded(run, None, task=3)
    slurm.has_job("20_3", "RUNNING", Comment="orchestra:0")
    assert refusal(run, replace(TASK, job="20_3")) is None
    recorded(run, "20", "21", task=3)
    slurm.has_job("21_3", "RUNNING")
    assert "job 21_3" in str(refusal(run, replace(TASK, job="20_3")))
    assert refusal(run, replace(TASK, job="21_3")) is None


def test_an_attempt_of_another_job_that_runs_is_left_alone(run: RunDir, slurm: Slurm) -> None:
    recorded(run, "12")
    began(run, 3, "9")
    slurm.has_job("9", "RUNNING")
    assert "job 9 trains it, attempt 3" in str(refusal(run, TASK))
    slurm.has_job("9", "NODE_FAIL")
    assert refusal(run, TASK) is None
    began(run, 4, "10").write("failed", node=0, code=75)
    slurm.has_job("10", "RUNNING")
    assert refusal(run, TASK) is None, "its verdict stands"


@pytest.mark.parametrize("leader", ["9", None])
def test_where_nobody_can_say_growing_files_do(run: RunDir, slurm: Slurm, leader: str | None) -> None:
    recorded(run, "12")
    slurm.tell("otherwise", f"slurm_load_jobs error: {SILENT}")
    began(run, 0, leader)
    assert after_quiet(run) is None
    assert "and the run's files grow" in while_somebody(lambda: run.metrics.write_text("{}\n"), run)
    # Of a long step nothing grows but the time of the node's heartbeat.
    run.heartbeats.mkdir()
    beat = run.heartbeat(0)
    beat.write_text("{}")
    assert after_quiet(run) is None
    assert "and the run's files grow" in while_somebody(lambda: beat.write_text("{}"), run)


def test_a_claim_of_somebody_who_said_nothing_yet_is_waited_for(run: RunDir, slurm: Slurm) -> None:
    recorded(run, "12")
    take_next(run)
    assert after_quiet(run) is None
    assert "attempt 0 was claimed by another process" in while_somebody(lambda: began(run, 0), run)


WHY = "another job trains it"


class Rivalled(Scheduler):
    """Scheduler in which somebody else trains the run."""

    def refusal(self) -> str | None:
        return WHY


@pytest.mark.parametrize("node", [0, 1])
def test_the_leader_refuses_for_all_agents_and_nothing_else_is_written(run: RunDir, node: int) -> None:
    folder = group_folder(run.control, "12", 0)
    other = NodeGroup(folder, 1 - node, 2, 60.0)
    other.join("other", "127.0.0.1", {"port": 1})
    if node == 1:
        # The other one leads, and has said so.
        assert other.publish(Order(0, REFUSE, facts={"message": WHY}))
    group = NodeGroup(folder, node, 2, 60.0)
    with pytest.raises(RivalError, match=WHY):
        attend(AgentContext(run, Config(), group, StopRequests(), Rivalled(), lambda _: None))
    other.leave()
    assert not run.events.exists()
    assert [file.name for file in sorted(folder.rglob("*")) if file.is_file()] == ["0000.json"]


# Which attempt comes next: none that was started, claimed, or asked to stop before it began.


def test_a_job_hears_that_it_was_cancelled_while_it_waited(run: RunDir) -> None:
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    assert stop_requests.read_request(run, take_next(run)) is not None


def test_a_resume_lies_behind_a_request_that_nobody_heard(run: RunDir) -> None:
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    number = next_attempt_number(run, None)
    record(run, {"token": "orchestra:1", "attempt": number})
    attempt = take_next(run)
    assert (number, attempt) == (1, 1)
    assert stop_requests.read_request(run, attempt) is None
