"""Planned faults: whom they strike, what each does to a real process, and what is on record by then."""

from __future__ import annotations

import itertools
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
    evidence = {"event": "fault_injected", "rank": 1, "step": 4, "pid": child.pid, "phase": "step"}
    assert event.items() >= {**evidence, "fault": entry["fault"]}.items()


def assert_goes_on(child: subprocess.Popen[str]) -> None:
    out, _ = child.communicate("\n", timeout=60)
    assert out.split() == ["1", "2", "3", "4", "alive"]


def test_a_stopped_process_stands_still_until_it_is_continued(tmp_path: Path) -> None:
    child = started(tmp_path, {"fault": "sigstop"})
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    child.send_signal(signal.SIGCONT)
    assert_goes_on(child)


@pytest.mark.parametrize("fault", ["hang", "gil"])
def test_a_hang_ends_by_itself_only_after_its_time(tmp_path: Path, fault: str) -> None:
    assert_goes_on(started(tmp_path, {"fault": fault, "seconds": 0.01}))
    (event,) = read_events(RunDir(tmp_path))
    assert event["seconds"] == 0.01


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("exception", "TrainingError: a planned fault of step 4"),
        ("oom", "memory"),
        ("agent_kill", f"needs the node agent's process id in {AGENT_VARIABLE}"),
    ],
)
def test_an_error_is_raised_where_it_was_planned(tmp_path: Path, fault: str, error: str) -> None:
    child = started(tmp_path, {"fault": fault}, **{AGENT_VARIABLE: ""})
    out, words = child.communicate(timeout=60)
    assert (child.returncode, out.split()) == (1, ["1", "2", "3"])
    assert error in words


def test_the_agent_is_killed_and_the_rank_goes_on(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as agent:
        child = started(tmp_path, {"fault": "agent_kill"}, **{AGENT_VARIABLE: str(agent.pid)})
        assert agent.wait(timeout=60) == -signal.SIGKILL
        assert_goes_on(child)


def test_a_node_goes_down_with_all_that_belongs_to_the_job_there_and_nothing_else(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": f"77{os.getpid()}", "SLURMD_NODENAME": "n1"}
    other_node = {**job, "SLURMD_NODENAME": "n2"}
    with (
        subprocess.Popen(["sleep", "1000"], env={**os.environ, **job}) as of_the_job,
        subprocess.Popen(["sleep", "1000"], env={**os.environ, **other_node}) as elsewhere,
        subprocess.Popen(["sleep", "1000"]) as agent,
    ):
        child = started(tmp_path, {"fault": "node_down"}, **job, **{AGENT_VARIABLE: str(agent.pid)})
        codes = [process.wait(timeout=60) for process in (child, agent, of_the_job)]
        assert codes == [-signal.SIGKILL] * 3
        assert elsewhere.poll() is None
        elsewhere.kill()


# Starts processes all the time, as an agent's guard starts a new agent.
SPAWNER = """
import subprocess, time
while True:
    subprocess.Popen(["sleep", "100"], stdout=subprocess.DEVNULL)
    print("started", flush=True)
    time.sleep(0.001)
"""


def test_nothing_that_is_started_while_a_node_goes_down_outlives_it(tmp_path: Path) -> None:
    mark = f"spawned-{os.getpid()}"
    environment = {**os.environ, "LAUNCHERS_MARK": mark}
    command = [sys.executable, "-c", SPAWNER]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as spawner:
        assert spawner.stdout is not None
        assert spawner.stdout.readline() == "started\n"
        child = started(tmp_path, {"fault": "node_down"}, LAUNCHERS_MARK=mark)
        spawner.stdout.read()
        assert [process.wait(timeout=60) for process in (child, spawner)] == [-signal.SIGKILL] * 2
    left = processes.marked(f"LAUNCHERS_MARK={mark}")
    processes.send(left, signal.SIGKILL)
    assert left == []


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


def test_a_rank_that_goes_on_behind_the_first_slow_step_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    faults = faults_of(tmp_path, fault="slow", seconds=0.25, steps=5)
    for step in range(6, 10):
        faults.strike("forward", step)
    assert slept == [0.25, 0.25]
    assert [event["step"] for event in read_events(RunDir(tmp_path))] == [6]


def test_an_entry_becomes_a_value_with_the_defaults_filled_in() -> None:
    entries: list[dict[str, Any]] = [
        {"at_step": 3, "rank": 1},
        {"at_step": 20, "rank": "all", "fault": "sigkill", "phase": "mid_file", "attempt": 2},
        # What comes before all steps needs no step.
        {"rank": "all", "phase": "setup", "fault": "exit", "exit_code": 3, "attempt": "all"},
    ]
    assert planned_faults(entries) == [
        PlannedFault(at_step=3, rank=1, phase=FaultPhase.step, attempt=0, fault=Fault.sigkill),
        PlannedFault(at_step=20, rank=None, phase=FaultPhase.mid_file, attempt=2),
        PlannedFault(0, None, FaultPhase.setup, attempt=None, fault=Fault.exit, exit_code=3),
    ]


@pytest.mark.parametrize(
    ("of_rank", "of_attempt", "struck"),
    [(1, 0, {(1, 0)}), (None, 1, {(0, 1), (1, 1)}), (1, None, {(1, 0), (1, 1), (1, 2)})],
)
def test_a_fault_befalls_its_ranks_in_its_attempts_alone(
    of_rank: int | None, of_attempt: int | None, struck: set[tuple[int, int]]
) -> None:
    fault = PlannedFault(at_step=3, rank=of_rank, attempt=of_attempt)
    moments = itertools.product(range(2), range(3))
    assert {(rank, attempt) for rank, attempt in moments if fault.strikes(attempt, rank)} == struck


def test_of_earlier_attempts_nothing_is_to_come() -> None:
    later: list[dict[str, Any]] = [{"at_step": 2, "rank": 0, "attempt": number} for number in (1, 2, "all")]
    entries = [{"at_step": 1, "rank": 0}, *later]
    assert still_to_come(entries, 0) == entries
    assert still_to_come(entries, 2) == later[1:]


def test_a_process_is_told_from_a_later_one_with_its_id() -> None:
    mine = processes.find(os.getpid())
    assert mine is not None
    assert processes.state(mine) == "R"
    assert processes.state(Process(mine.pid, mine.started + 1)) is None
