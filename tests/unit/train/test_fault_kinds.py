"""What each planned fault does to a real process, and what is on record by then."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Fault, FaultPhase
from launchers import processes
from launchers.processes import Process
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir
from orchestra.run.planned_faults import (
    AGENT_VARIABLE,
    NODE_DOWN_VARIABLE,
    PlannedFault,
    planned_faults,
    still_to_come,
)
from orchestra.train.watch.inject_faults import Faults

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import sys
from pathlib import Path
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.planned_faults import planned_faults
from orchestra.run.paths import RunDir
from orchestra.train.watch.inject_faults import Faults

events = EventWriter(RunDir(Path(sys.argv[1])), rank_writer(0, 1), 0, rank=1)
faults = Faults(planned_faults([{"at_step": 4, "rank": 1, **eval(sys.argv[2])}]), 0, 1, events)
for step in range(1, 5):
    faults.strike("step", step)
    print(step, flush=True)
print("alive", flush=True)
sys.stdin.readline()
"""


def started(run: Path, entry: dict[str, object], **environment: str) -> subprocess.Popen[str]:
    """Start a process that the fault of an entry befalls in its fourth step."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", SCRIPT, str(run), repr(entry)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=variables, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        ({"fault": "sigkill"}, -signal.SIGKILL),
        ({"fault": "segfault"}, -signal.SIGSEGV),
        ({"fault": "exit"}, 1),
        ({"fault": "exit", "exit_code": 7}, 7),
        ({"fault": "exit", "exit_code": 0}, 0),
        ({"fault": "node_down"}, -signal.SIGKILL),
    ],
)
def test_a_fault_that_ends_the_process_is_on_record_before(
    tmp_path: Path, entry: dict[str, object], code: int
) -> None:
    # Nothing but this process bears the mark.
    child = started(tmp_path, entry, LAUNCHERS_MARK=f"test-{os.getpid()}")
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out.split()) == (code, ["1", "2", "3"])
    (event,) = read_events(RunDir(tmp_path))
    told = (event["event"], event["rank"], event["step"], event["pid"])
    assert told == ("fault_injected", 1, 4, child.pid)
    assert (event["fault"], event["phase"]) == (entry["fault"], "step")


def test_a_stopped_process_stands_still_until_it_is_continued(tmp_path: Path) -> None:
    child = started(tmp_path, {"fault": "sigstop"})
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    child.send_signal(signal.SIGCONT)
    out, _ = child.communicate("\n", timeout=60)
    assert out.split() == ["1", "2", "3", "4", "alive"]


@pytest.mark.parametrize("fault", ["hang", "gil"])
def test_a_hang_ends_by_itself_only_after_its_time(tmp_path: Path, fault: str) -> None:
    child = started(tmp_path, {"fault": fault, "seconds": 0.01})
    out, _ = child.communicate("\n", timeout=60)
    assert out.split() == ["1", "2", "3", "4", "alive"]
    (event,) = read_events(RunDir(tmp_path))
    assert event["seconds"] == 0.01


@pytest.mark.parametrize(
    ("fault", "error"), [("exception", "TrainingError: a planned fault of step 4"), ("oom", "memory")]
)
def test_an_error_is_raised_where_it_was_planned(tmp_path: Path, fault: str, error: str) -> None:
    child = started(tmp_path, {"fault": fault})
    out, words = child.communicate(timeout=60)
    assert (child.returncode, out.split()) == (1, ["1", "2", "3"])
    assert error in words


def test_the_agent_is_killed_and_the_rank_goes_on(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as agent:
        child = started(tmp_path, {"fault": "agent_kill"}, **{AGENT_VARIABLE: str(agent.pid)})
        assert agent.wait(timeout=60) == -signal.SIGKILL
        out, _ = child.communicate("\n", timeout=60)
    assert out.split()[-1] == "alive"


def test_without_the_agents_id_it_says_what_is_missing(tmp_path: Path) -> None:
    child = started(tmp_path, {"fault": "agent_kill"}, **{AGENT_VARIABLE: ""})
    _, words = child.communicate(timeout=60)
    assert f"needs the node agent's process id in {AGENT_VARIABLE}" in words


def test_a_node_goes_down_with_all_that_belongs_to_the_job_there_and_nothing_else(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": f"77{os.getpid()}", "SLURMD_NODENAME": "n1"}
    others = {"SLURM_JOB_ID": job["SLURM_JOB_ID"], "SLURMD_NODENAME": "n2"}
    with (
        subprocess.Popen(["sleep", "1000"], env={**os.environ, **job}) as of_the_job,
        subprocess.Popen(["sleep", "1000"], env={**os.environ, **others}) as elsewhere,
        subprocess.Popen(["sleep", "1000"]) as agent,
    ):
        child = started(tmp_path, {"fault": "node_down"}, **job, **{AGENT_VARIABLE: str(agent.pid)})
        codes = [it.wait(timeout=60) for it in (child, agent, of_the_job)]
        assert codes == [-signal.SIGKILL] * 3
        assert elsewhere.poll() is None
        elsewhere.kill()


def test_a_node_goes_down_by_the_command_that_was_given(tmp_path: Path) -> None:
    command = f"touch {tmp_path}/down"
    mark = {"LAUNCHERS_MARK": f"down-{os.getpid()}", NODE_DOWN_VARIABLE: command}
    child = started(tmp_path, {"fault": "node_down"}, **mark)
    child.communicate(timeout=60)
    assert (tmp_path / "down").exists()
    assert child.returncode == -signal.SIGKILL


def faults_of(tmp_path: Path, **entry: object) -> Faults:
    events = EventWriter(RunDir(tmp_path), "rank", 0)
    return Faults(planned_faults([{"at_step": 3, "rank": 0, **entry}]), 0, 0, events)


@pytest.mark.parametrize(("fault", "expected"), [("nan", math.nan), ("spike", 1e4)])
def test_a_poisoned_loss_is_that_of_one_step(tmp_path: Path, fault: str, expected: float) -> None:
    faults = faults_of(tmp_path, fault=fault)
    factors = []
    for step in range(1, 6):
        faults.strike("step", step)
        factors.append(faults.loss_factor(step))
    assert repr(factors) == repr([1.0, 1.0, expected, 1.0, 1.0])
    assert [event["step"] for event in read_events(RunDir(tmp_path))] == [3]


def test_a_slow_rank_sleeps_in_each_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    faults = faults_of(tmp_path, fault="slow", seconds=0.25, steps=2)
    counts = []
    for step in range(1, 7):
        before = sum(slept)
        faults.strike("step", step)
        faults.strike("forward", step)
        counts.append(sum(slept) - before)
    assert counts == [0.0, 0.0, 0.25, 0.25, 0.0, 0.0]
    assert len(read_events(RunDir(tmp_path))) == 1


def test_a_fault_of_all_attempts_befalls_each_of_them() -> None:
    (fault,) = planned_faults([{"at_step": 3, "rank": 1, "attempt": "all"}])
    assert all(fault.strikes(attempt, 1) for attempt in range(5))
    assert not fault.strikes(0, 0)


def test_what_comes_before_all_steps_needs_no_step() -> None:
    (fault,) = planned_faults([{"rank": "all", "phase": "setup", "fault": "exit", "exit_code": 3}])
    assert fault == PlannedFault(0, None, FaultPhase.setup, fault=Fault.exit, exit_code=3)


def test_of_earlier_attempts_nothing_is_to_come() -> None:
    later: list[dict[str, Any]] = [{"at_step": 2, "rank": 0, "attempt": it} for it in (1, 2, "all")]
    entries = [{"at_step": 1, "rank": 0}, *later]
    assert [it.get("attempt") for it in still_to_come(entries, 0)] == [None, 1, 2, "all"]
    assert [it.get("attempt") for it in still_to_come(entries, 2)] == [2, "all"]


def test_a_process_is_told_from_a_later_one_with_its_id() -> None:
    mine = processes.find(os.getpid())
    assert mine is not None
    assert processes.state(mine) == "R"
    assert processes.state(Process(mine.pid, mine.started + 1)) is None
