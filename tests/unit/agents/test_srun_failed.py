"""What a batch script does when srun failed: who decides, and where nobody can, how the run goes on. The
agents' files are real; Slurm's commands are stand-ins.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from test_slurm_job import TASK, Slurm, jobs, options, requeued

from conf.schema import Config
from launchers.node_group import NodeGroup, Order
from orchestra.agents import srun_failed
from orchestra.agents.agent import group_folder
from orchestra.agents.context import END, REFUSE, START
from orchestra.run import stop_requests
from orchestra.run.config_file import to_yaml
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir, SweepDir

NODES = "node[1-2]"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(srun_failed, "_BEATS_S", 0.01)
    slurm = Slurm(folder, {f"node{number}": "allocated" for number in (1, 2, 3, 4)})
    # What the stand-in prints for its last word.
    slurm.tell(f"job-{NODES}", "node1\nnode2\n")
    return slurm


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "mine")
    run.control.mkdir(parents=True)
    run.config.write_text(to_yaml(Config()))
    run.record.write_text('{"name": "mine", "jobs": [{"token": "orchestra:0", "id": "12"}]}')
    return run


def came(run: RunDir, *nodes: int) -> NodeGroup:
    """Let the agents of some nodes join, and end without a word."""
    for node in nodes:
        group = NodeGroup(group_folder(run.control, TASK.job, TASK.restart), node, 2, 60.0)
        group.join(f"node{node + 1}", "127.0.0.1", {})
        group._is_over.set()
    return group


def test_the_node_that_never_came_is_left_out_of_the_next_job(run: RunDir, slurm: Slurm) -> None:
    came(run, 0)
    said = srun_failed.move_run(run, TASK, NODES, run.path / "output")
    assert said == "job 20 goes on (lost while the job's step was starting: node2)"
    (call,) = slurm.calls("sbatch")
    assert options(call, "exclude") == "node2"
    (event,) = requeued(run)
    assert (event["rule"], event["attempt"], event["before_start"]) == ("step_not_started", -1, True)
    assert [it["id"] for it in jobs(run)] == ["12", "20"]


def test_where_no_agent_came_srun_names_the_node(run: RunDir, slurm: Slurm) -> None:
    said = "srun: error: Task launch for StepId=12.0 failed on node node2: Communication connection failure"
    (run.path / "output").write_text(f"{said}\nsrun: error: Application launch failed\n")
    assert "starting: node2)" in (srun_failed.move_run(run, TASK, NODES, run.path / "output") or "")


def test_where_no_agent_came_slurm_says_who_is_gone(run: RunDir, slurm: Slurm) -> None:
    assert srun_failed.move_run(run, TASK, NODES, run.path / "output") is None
    slurm.tell("nodes", "node1|main*|down*\nnode2|main*|allocated\nnode3|main*|idle\nnode4|main*|idle\n")
    assert "starting: node1)" in (srun_failed.move_run(run, TASK, NODES, run.path / "output") or "")


def test_where_no_agent_came_the_node_that_slurm_took_away_is_named(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("job-12", "JobId=12 JobState=RUNNING Restarts=0 Reason=None NodeList=node2\n")
    slurm.tell("job-node2", "node2\n")
    assert "starting: node1)" in (srun_failed.move_run(run, TASK, NODES, run.path / "output") or "")


@pytest.mark.parametrize("action", [REFUSE, END])
def test_what_an_agent_decided_is_left_alone(run: RunDir, slurm: Slurm, action: str) -> None:
    came(run, 0).publish(Order(0, action, (0, 1)))
    assert srun_failed.move_run(run, TASK, NODES, run.path / "output") is None
    assert requeued(run) == []


def attempted(run: RunDir) -> None:
    """Let an attempt begin, and all agents go in it."""
    run.attempt_logs(0).mkdir(parents=True)
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started")
    came(run, 0, 1).publish(Order(0, START, (0, 1)))


def test_an_attempt_whose_agents_went_with_srun_is_followed_by_another(run: RunDir, slurm: Slurm) -> None:
    attempted(run)
    said = srun_failed.move_run(run, TASK, NODES, run.path / "output")
    assert said == "job 20 goes on (srun gave up the job's step)"
    (event,) = requeued(run)
    assert (event["rule"], event["attempt"], event["exclude"]) == ("step_lost", 0, [])
    assert not event["before_start"]


def test_an_srun_that_gives_up_again_and_again_is_no_loop(run: RunDir, slurm: Slurm) -> None:
    attempted(run)
    lost = EventWriter(run, "crew.before", 0)
    for number in range(3):
        lost.write("requeued", rule="step_lost", job=str(number))
    assert srun_failed.move_run(run, TASK, NODES, run.path / "output") is None
    EventWriter(run, node_writer(0, 1), 0).write("checkpoint_committed", step=10)
    assert srun_failed.move_run(run, TASK, NODES, run.path / "output") is not None


def test_an_attempt_that_was_to_be_cancelled_is_not_followed(run: RunDir, slurm: Slurm) -> None:
    attempted(run)
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    assert srun_failed.move_run(run, TASK, NODES, run.path / "output") is None


def as_batch_script(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "12", "JOB_NUM_NODES": "2", "JOB_NODELIST": NODES}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.slow
def test_the_job_is_held_for_an_agent_that_lives_and_ends_with_its_word(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(srun_failed, "_BEATS_S", 2.0)
    as_batch_script(monkeypatch)
    group = NodeGroup(group_folder(run.control, TASK.job, TASK.restart), 0, 2, 60.0)
    group.join("node1", "127.0.0.1", {})
    group.publish(Order(0, START, (0, 1)))
    ends = threading.Timer(5.0, lambda: group.publish(Order(1, END, facts={"code": 75})))
    ends.start()
    try:
        assert srun_failed.main([str(run.path), "137"]) == 75
        assert not ends.is_alive()
    finally:
        group.leave()
    assert requeued(run) == []


@pytest.mark.parametrize("word", ["JobState=COMPLETING Restarts=0", "JobState=RUNNING Restarts=1"])
def test_a_job_that_slurm_ends_or_starts_again_is_left_alone(run: RunDir, slurm: Slurm, word: str) -> None:
    came(run, 0)
    slurm.tell("job-12", f"JobId=12 {word} Reason=None\n")
    assert srun_failed.move_run(run, TASK, NODES, run.path / "output") is None


def test_three_jobs_in_a_row_are_enough_until_an_attempt_begins(run: RunDir, slurm: Slurm) -> None:
    came(run, 0)
    before = EventWriter(run, "crew.before", -1, before_start=True)
    for _ in range(3):
        before.write("requeued", rule="step_not_started")
    assert srun_failed.move_run(run, TASK, NODES, run.path / "output") is None
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started")
    assert srun_failed.move_run(run, TASK, NODES, run.path / "output") is not None


def test_srun_failing_is_told_by_its_own_code(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    came(run, 0)
    as_batch_script(monkeypatch)
    assert srun_failed.main([str(run.path), "233"]) == 233
    assert "job 20 goes on" in capsys.readouterr().out
    slurm.tell("silent")
    assert srun_failed.main([str(run.path), "233"]) == 233
    assert "error: srun failed, and the run does not go on by itself: " in capsys.readouterr().err


def test_a_member_of_a_sweep_is_found_by_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    run, task = srun_failed.of_batch_script([str(tmp_path), "--first", "3"])
    assert (run, task.job) == (SweepDir(tmp_path).member(5), "12")
