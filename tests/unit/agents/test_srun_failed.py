"""A batch script and its srun: one that waits for lost nodes is ended, and where it failed the run goes on.

The processes and the agents' files are real; Slurm's commands are stand-ins.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from job_in_slurm import NODES, TASK, Slurm, jobs, options, requeued
from support.waiting import eventually

from conf.schema import ClusterConfig, Config, Device, Requeue
from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup, Order
from orchestra.agents import srun_failed
from orchestra.agents.agent import group_folder
from orchestra.agents.context import END, REFUSE, START, AgentContext
from orchestra.agents.leader import Leader
from orchestra.agents.slurm_job import SlurmJob
from orchestra.agents.srun_failed import Agents
from orchestra.agents.srun_watch import EndedTasks
from orchestra.errors import LaunchError
from orchestra.recovery.history import attempt_of
from orchestra.recovery.incidents import node_verdict
from orchestra.run.config_file import to_yaml
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.paths import RunDir, SweepDir


@pytest.fixture(autouse=True)
def _in_batch_script(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.config.write_text(to_yaml(Config()))
    for name, value in {"JOB_ID": TASK.job, "JOB_NUM_NODES": "2", "JOB_NODELIST": NODES}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def moved(run: RunDir) -> str | None:
    return srun_failed.move_run(run, TASK, NODES, run.path / "output")


def came(run: RunDir, *nodes: int) -> NodeGroup:
    """Let the agents of some nodes join, and end without a word."""
    for node in nodes:
        group = NodeGroup(group_folder(run.control, TASK.job, TASK.restart), node, 2, 60.0)
        group.join(f"node{node + 1}", "127.0.0.1", {})
        group._is_over.set()
    return group


def test_the_node_that_never_came_is_left_out_of_the_next_job(run: RunDir, slurm: Slurm) -> None:
    came(run, 0)
    assert moved(run) == "job 20 goes on (lost while the job's step was starting: node2)"
    (call,) = slurm.calls("sbatch")
    assert options(call, "exclude") == "node2"
    (event,) = requeued(run)
    assert (event["rule"], event["attempt"], event["before_start"]) == ("step_not_started", -1, True)
    assert [job["id"] for job in jobs(run)] == ["12", "20"]


def test_where_no_agent_came_srun_names_the_node(run: RunDir, slurm: Slurm) -> None:
    said = "srun: error: Task launch for StepId=12.0 failed on node node2: Communication connection failure"
    (run.path / "output").write_text(f"{said}\nsrun: error: Application launch failed\n")
    assert "starting: node2)" in (moved(run) or "")


def test_where_no_agent_came_slurm_says_who_is_gone(run: RunDir, slurm: Slurm) -> None:
    assert moved(run) is None
    slurm.has_nodes(node1="down*", node2="allocated", node3="idle", node4="idle")
    assert "starting: node1)" in (moved(run) or "")


def test_where_no_agent_came_the_node_that_slurm_took_away_is_named(run: RunDir, slurm: Slurm) -> None:
    slurm.has_job("12", NodeList="node2")
    slurm.tell("job-node2", "node2\n")
    assert "starting: node1)" in (moved(run) or "")


@pytest.mark.parametrize("action", [REFUSE, END])
def test_what_an_agent_decided_is_left_alone(run: RunDir, slurm: Slurm, action: str) -> None:
    came(run, 0).publish(Order(0, action, (0, 1)))
    assert moved(run) is None
    assert requeued(run) == []


@pytest.mark.parametrize("nodes", [(0, 1), (0,)])
def test_agents_that_were_all_killed_before_an_attempt_leave_no_node_out(
    run: RunDir, slurm: Slurm, nodes: tuple[int, ...]
) -> None:
    """srun was killed, and its helper ended the step; a job of one node has one agent."""
    came(run, *nodes)
    allocated = NODES if len(nodes) == 2 else "node1"
    slurm.tell("job-node1", "node1\n")
    said = srun_failed.move_run(run, TASK, allocated, run.path / "output")
    assert said == "job 20 goes on (srun gave up the job's step before an attempt began)"
    (event,) = requeued(run)
    assert (event["rule"], event["exclude"], event["before_start"]) == ("step_not_started", [], True)


def test_agents_that_ended_by_themselves_before_an_attempt_are_not_followed(
    run: RunDir, slurm: Slurm
) -> None:
    came(run, 0).leave()
    came(run, 1).leave()
    assert moved(run) is None


def test_agents_that_gave_up_over_a_dead_node_are_not_followed_without_the_healthy_ones(
    run: RunDir, slurm: Slurm
) -> None:
    """Three jobs did no better. The dead node's name is the only one that is left on the list."""
    before = EventWriter(run, "crew.before", -1, before_start=True)
    for _ in range(3):
        before.write("requeued", rule="nodes_unfit")
    dead = came(run, 1)
    dead.step_down({})
    config = Config(cluster=ClusterConfig(nodes=2, gpus_per_node=1, device=Device.cpu))
    healthy = came(run, 0)
    context = AgentContext(run, config, healthy, StopRequests(), SlurmJob(run, config, TASK), print)
    Leader(context).look(None)
    healthy.leave()
    assert moved(run) is None
    assert slurm.calls("sbatch") == []
    (failed,) = [event for event in read_events(run) if event["event"] == "start_failed"]
    assert (failed["unfit"], failed["cause"]) == (
        ["node2"],
        "node2: its agent fell silent before the first attempt",
    )


def test_a_run_that_may_not_go_on_says_why(run: RunDir, slurm: Slurm) -> None:
    """Never an attempt without an end, or a start without a word."""
    run.config.write_text(to_yaml(Config(cluster=ClusterConfig(requeue=Requeue.never))))
    came(run, 0, 1)
    with pytest.raises(LaunchError, match=r"cluster\.requeue=never"):
        moved(run)
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started")
    NodeGroup(group_folder(run.control, TASK.job, TASK.restart), 0, 2, 60.0).publish(Order(0, START, (0, 1)))
    with pytest.raises(LaunchError, match=r"cluster\.requeue=never"):
        moved(run)
    events = read_events(run)
    start, attempt = (next(it for it in events if it["event"] == name) for name in ("start_failed", "failed"))
    assert (start["job"], start["before_start"], "step before an attempt" in start["cause"]) == (
        "12",
        True,
        True,
    )
    verdict = node_verdict(attempt_of(events, 0))
    assert verdict is not None
    assert (attempt["code"], verdict.cause) == (1, "srun gave up the job's step")
    assert "cluster.requeue=never" in verdict.message


def attempted(run: RunDir) -> None:
    """Let an attempt begin, and all agents go in it."""
    run.attempt_logs(0).mkdir(parents=True)
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started")
    came(run, 0, 1).publish(Order(0, START, (0, 1)))


def test_an_attempt_whose_agents_went_with_srun_is_followed_by_another(run: RunDir, slurm: Slurm) -> None:
    attempted(run)
    assert moved(run) == "job 20 goes on (srun gave up the job's step)"
    (event,) = requeued(run)
    assert (event["rule"], event["attempt"], event["exclude"]) == ("step_lost", 0, [])
    assert not event["before_start"]


def test_an_srun_that_gives_up_again_and_again_is_no_loop(run: RunDir, slurm: Slurm) -> None:
    attempted(run)
    lost = EventWriter(run, "crew.before", 0)
    for number in range(3):
        lost.write("requeued", rule="step_lost", job=str(number))
    with pytest.raises(LaunchError, match="4 times with no checkpoint committed in between"):
        moved(run)
    EventWriter(run, node_writer(0, 1), 0).write("checkpoint_committed", step=10)
    assert moved(run) is not None


def test_an_attempt_that_was_to_be_cancelled_is_not_followed(run: RunDir, slurm: Slurm) -> None:
    attempted(run)
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    assert moved(run) is None


@pytest.mark.slow
def test_the_job_is_held_for_an_agent_that_lives_and_ends_with_its_word(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
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


@pytest.mark.parametrize(("state", "restarts"), [("COMPLETING", 0), ("RUNNING", 1)])
def test_a_job_that_slurm_ends_or_starts_again_is_left_alone(
    run: RunDir, slurm: Slurm, state: str, restarts: int
) -> None:
    came(run, 0)
    slurm.has_job("12", state, restarts)
    assert moved(run) is None


def test_three_jobs_in_a_row_are_enough_until_an_attempt_begins(run: RunDir, slurm: Slurm) -> None:
    came(run, 0)
    before = EventWriter(run, "crew.before", -1, before_start=True)
    for _ in range(3):
        before.write("requeued", rule="step_not_started")
    with pytest.raises(LaunchError, match="4 times with no attempt started in between"):
        moved(run)
    EventWriter(run, node_writer(0, 0), 0).write("attempt_started")
    assert moved(run) is not None


def test_srun_failing_is_told_by_its_own_code(
    run: RunDir, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    came(run, 0)
    assert srun_failed.main([str(run.path), "233"]) == 233
    assert "job 20 goes on" in capsys.readouterr().out
    slurm.tell("silent")
    assert srun_failed.main([str(run.path), "233"]) == 233
    assert "error: srun failed, and the run does not go on by itself: " in capsys.readouterr().err


def test_a_member_of_a_sweep_is_found_by_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    member = SweepDir(tmp_path).member(5)
    member.path.mkdir()
    member.config.write_text(to_yaml(Config()))
    run, task = srun_failed.of_batch_script([str(tmp_path), "--first", "3"])
    assert (run, task.job) == (member, "12")


# A batch script in short: the watch beside it, an srun that asks for ever, and its exit code.
SCRIPT = """
"$PYTHON" -c "import sys; from orchestra.agents import srun_failed, srun_watch as watch
watch._LOOK_S, watch._ASK_EVERY_S, srun_failed._LOOKS_WITHOUT_BEAT = 0.05, 0.1, 40
sys.exit(watch.main(sys.argv[1:]))" "$RUN" "$$" &
srun 60
code=$?
exit "$code"
"""


def batch_script(run: RunDir, slurm: Slurm) -> subprocess.Popen[str]:
    # A program of that name, as the real one is: a script would be called by its interpreter.
    (slurm.folder / "srun").symlink_to("/bin/sleep")
    slurm.tell("job-node1", "node1\n")
    environment = {**os.environ, "PYTHON": sys.executable, "RUN": str(run.path)}
    return subprocess.Popen(
        ["bash", "-c", SCRIPT], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_an_srun_that_waits_for_a_lost_node_is_ended(run: RunDir, slurm: Slurm) -> None:
    slurm.has_job("12", NodeList="node1")
    script = batch_script(run, slurm)
    assert script.communicate(timeout=60)[0] == "node2 lost before the job's step began; srun is ended\n"
    assert script.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("state", ["whole", "silent"])
def test_any_other_srun_is_left_alone(run: RunDir, slurm: Slurm, state: str) -> None:
    slurm.has_job("12", NodeList=NODES)
    if state == "silent":
        slurm.tell("silent")
    script = batch_script(run, slurm)
    assert eventually(lambda: len(slurm.calls("scontrol")) >= 6, 60)
    assert is_left_alone(script)


def is_left_alone(script: subprocess.Popen[str]) -> bool:
    """End a batch script; tell whether it still ran, and nothing was said."""
    is_running = script.poll() is None
    os.killpg(script.pid, signal.SIGTERM)
    return is_running and script.communicate(timeout=60)[0] == ""


def looks(run: RunDir) -> int:
    """Return when the watch last looked for beats, in nanoseconds; 0 before."""
    file = group_folder(run.control, TASK.job, TASK.restart) / "srun-watch"
    return file.stat().st_mtime_ns if file.exists() else 0


def test_agents_are_told_of_tasks_that_ended_before_theirs_came(run: RunDir, slurm: Slurm) -> None:
    slurm.tell("job-node[3-4]", "node3\nnode4\n")
    output = run.path / "output"
    before = "srun: error: node1: task 0: Killed\n"
    output.write_text(before)
    watch = EndedTasks(came(run, 0, 1), len(before), output)
    with output.open("a") as log:
        log.write("slurmstepd: error: execve(): python: No such file\nsrun: error: node2: task 1: Kil")
        log.flush()
        watch.look()
        assert not list(watch.group.folder.glob("ended-*"))
        log.write("led\nsrun: error: node[3-4]: tasks 2-3: Exited with exit code 127\n")
    watch.look()
    # The agent of node 1 had come: whatever became of it is told by its beat.
    assert watch.group.never_come() == {f"node{node}": "Exited with exit code 127" for node in (3, 4)}
    watch.group.publish(Order(0, START, (0, 1)))
    output.write_text(output.read_text() + "srun: error: node5: task 4: Killed\n")
    watch.look()
    assert "node5" not in watch.group.never_come()


@pytest.mark.parametrize("needed", [2, 1])
def test_nobody_waits_for_a_node_whose_task_ended_before_its_agent_came(
    run: RunDir, slurm: Slurm, needed: int
) -> None:
    """Where the others suffice they begin, else the run goes on in another job without that node."""
    config = Config(cluster=ClusterConfig(nodes=needed, gpus_per_node=1, device=Device.cpu))
    group = NodeGroup(group_folder(run.control, TASK.job, TASK.restart), 0, 2, 60.0)
    group.join("node1", "127.0.0.1", {"port": 1})
    try:
        leader = Leader(AgentContext(run, config, group, StopRequests(), SlurmJob(run, config, TASK), print))
        leader.look(None)
        assert group.newest_order() is None
        group.tell_ended(1, "node2", "Exited with exit code 127")
        leader.look(None)
        order = group.newest_order()
    finally:
        group.leave()
    assert order is not None
    if needed == 1:
        assert (order.action, order.nodes, requeued(run)) == (START, (0,), [])
    else:
        said = "job 20 goes on (node2: its task ended before its agent had come (Exited with exit code 127))"
        assert (order.action, order.facts["said"]) == (END, said)
        assert [(event["rule"], event["exclude"]) for event in requeued(run)] == [("nodes_unfit", ["node2"])]


def test_a_warning_that_ended_the_tasks_before_their_agents_came_costs_a_job(
    run: RunDir, slurm: Slurm
) -> None:
    (run.path / "output").write_text("srun: error: node[1-2]: tasks 0-1: User defined signal 2\n")
    assert moved(run) == (
        "job 20 goes on (Slurm's warning came while the job's tasks were starting, and ended them)"
    )
    (event,) = requeued(run)
    assert (event["rule"], event["exclude"], event["before_start"]) == ("step_not_started", [], True)


def test_an_srun_is_ended_when_no_agent_lives_and_not_before(run: RunDir, slurm: Slurm) -> None:
    folder = came(run, 0).folder
    # As the agent's process looks to the kernel; its beat stands still.
    words = ("-c", "import time; time.sleep(600)", "-m", "orchestra.agents", str(run.path))
    agent = subprocess.Popen([sys.executable, *words])
    try:
        script = batch_script(run, slurm)
        # Longer than it takes where no agent's process is here.
        time.sleep(6)
        assert script.poll() is None
    finally:
        agent.kill()
        agent.wait()
    assert script.communicate(timeout=60)[0] == "no agent of the job lives any more; srun is ended\n"
    assert script.returncode == 128 + signal.SIGTERM
    assert (folder / "beat-000").exists()


def test_an_srun_is_left_alone_while_a_beat_moves_and_after_all_have_left(run: RunDir, slurm: Slurm) -> None:
    group = came(run, 0)
    script = batch_script(run, slurm)
    beat = group.folder / "beat-000"
    assert eventually(lambda: looks(run), 60)
    for number in range(70):
        beat.write_text(f"another {number}\n")
        time.sleep(0.05)
    assert script.poll() is None
    group.leave()
    first = looks(run)
    assert eventually(lambda: looks(run) > first + 3 * 10**9, 60)
    assert is_left_alone(script)


def seen(agents: Agents, num_looks: int) -> list[bool]:
    """Return whether they are dead, look by look."""
    return [agents.are_dead() for _ in range(num_looks)]


def test_agents_that_live_elsewhere_alone_have_as_long_as_they_give_each_other(run: RunDir) -> None:
    """The one of this host stepped down: a pause of the others is no end of the step."""
    beat = came(run, 1).folder / "beat-001"
    agents = Agents(beat.parent, [str(run.path)], 10.0)
    assert not agents.are_dead()
    beat.write_text("another\n")
    assert seen(agents, 11) == [False] * 10 + [True]


def test_agents_that_went_with_the_one_of_this_host_are_waited_for_shortly(run: RunDir) -> None:
    agents = Agents(came(run, 1).folder, [str(run.path)], 10.0)
    assert seen(agents, 5) == [False] * 4 + [True]
