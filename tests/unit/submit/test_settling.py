"""Before a run goes on: jobs that are still being ended are waited for, and nobody guesses about others."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support import run_records
from support.fake_slurm import ME, FakeSlurm, queue_line

from orchestra.config.machine import Situation
from orchestra.errors import ConfigError, LaunchError
from orchestra.report.run_state import read_state
from orchestra.report.scheduler import newest_job
from orchestra.run.control.stop_requests import CANCEL, write_request
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir, Sweep, SweepArray, SweepDir, SweepMember, to_json
from orchestra.submit import wait
from orchestra.submit.claims import take_turn, write_claim
from orchestra.submit.job import Share
from orchestra.submit.resume_run import ask_scheduler, plan_resume
from orchestra.submit.sweeps.members import member_states
from orchestra.submit.sweeps.submit_sweep import ResumedMember, SweepResume, submit_resumed


class Slurm(FakeSlurm):
    """A stand-in for Slurm: the queue says one word after the other, and the last one from then on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_called("alpha")
        self.put("sacct", "exit 1")

    def is_called(self, cluster: str) -> None:
        self.put("scontrol", f"echo 'ClusterName = {cluster}'")

    def tells(self, *states: str) -> None:
        lines = [queue_line("7", state, "one") if state else "" for state in states]
        (self.folder / "lines").write_text("\n".join(lines) + "\n")
        after = "[ $(wc -l < lines) -gt 1 ] && sed -i 1d lines; exit 0"
        self.put("squeue", f"cd {self.folder}; head -1 lines | grep .\n{after}")


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setattr(wait, "_POLL_S", 0.01)
    monkeypatch.setattr(wait, "_WAIT_S", 5.0)
    return Slurm(fake_slurm.folder)


def submitted(parent: Path, name: str = "one", *, code: int | None = None, **more: object) -> RunDir:
    """Return a run of parent/runs whose job had an attempt elsewhere, with its verdict where it has one."""
    of_job = {"cluster": "alpha", "submitted": time.time() - 100, "attempt": 0, **more}
    run = run_records.submitted(parent, name, **of_job)  # type: ignore[arg-type]
    events = run_records.started_elsewhere(run, job=str(more.get("job") or "7"))
    if code is not None:
        events.write("failed", node=0, code=code, cause="x")
    return run


@pytest.fixture
def stopped(tmp_path: Path) -> RunDir:
    return submitted(tmp_path, code=130)


def sweep_of(parent: Path, num_members: int, *arrays: SweepArray) -> tuple[SweepDir, Sweep]:
    """Return the sweep whose members are the runs 000, 001 … of parent/runs."""
    sweep = SweepDir(parent / "runs")
    members = tuple(SweepMember(index, str(index), ()) for index in range(num_members))
    record = Sweep("sweep", "x", (), members, arrays)
    sweep.record.write_text(to_json(record))
    return sweep, record


@pytest.mark.parametrize("last", ["", "CANCELLED"])
def test_a_job_that_is_being_ended_is_waited_for(
    stopped: RunDir, slurm: Slurm, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.tells("RUNNING", "COMPLETING", "COMPLETING", last)
    answer = ask_scheduler(stopped, time.time())
    assert answer.state is not None
    assert answer.state.state == "interrupted"
    assert "Slurm still ends job 7, which trained one" in capsys.readouterr().err


def test_whoever_is_cancelled_while_its_job_is_awaited_is_not_submitted(
    stopped: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_request(stopped, 0, CANCEL)
    slurm.tells("COMPLETING", "COMPLETING", "")
    assert ask_scheduler(stopped, time.time()).state is not None, (
        "that was before, and is what it goes on from"
    )
    monkeypatch.setattr(time, "sleep", lambda _seconds: write_request(stopped, 0, CANCEL))
    slurm.tells("COMPLETING", "COMPLETING", "")
    with pytest.raises(LaunchError, match="one was cancelled meanwhile"):
        ask_scheduler(stopped, time.time())


def test_a_job_that_is_queued_again_is_left_to_slurm(stopped: RunDir, slurm: Slurm) -> None:
    slurm.tells("COMPLETING", "PENDING")
    answer = ask_scheduler(stopped, time.time())
    with pytest.raises(ConfigError, match="job 7 is started again by Slurm itself"):
        plan_resume(stopped, [], Situation("resume"), time.time(), answer)


def test_a_job_that_does_not_end_is_an_error(
    stopped: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "_WAIT_S", 0.05)
    slurm.tells("COMPLETING")
    with pytest.raises(LaunchError, match=r"job 7 has not \(COMPLETING\)"):
        ask_scheduler(stopped, time.time())


def test_what_may_be_alive_on_another_cluster_is_refused_and_what_ended_is_not(
    tmp_path: Path, stopped: RunDir, slurm: Slurm
) -> None:
    slurm.tells("")
    slurm.is_called("beta")
    with pytest.raises(LaunchError, match=r"on cluster alpha; this machine asks cluster beta\. .* node of"):
        ask_scheduler(submitted(tmp_path, "two"), time.time())
    answer = ask_scheduler(stopped, time.time())
    assert answer.state is not None
    assert answer.state.state == "interrupted"


def test_of_a_sweep_what_is_being_ended_or_elsewhere_gets_no_job(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "_WAIT_S", 0.05)
    submitted(tmp_path, "000", code=75, token="orchestra:one")
    submitted(tmp_path, "001", code=1, job="8")
    sweep, record = sweep_of(tmp_path, 2)
    slurm.tells("COMPLETING")
    first, second = member_states(sweep, record)
    assert (first.state.state, first.needs_job, second.needs_job) == ("being ended", False, True)
    slurm.tells("")
    assert [member.needs_job for member in member_states(sweep, record)] == [True, True]
    slurm.is_called("beta")
    submitted(tmp_path, "002", job="9")
    with pytest.raises(LaunchError, match="job 9 is on cluster alpha"):
        member_states(*sweep_of(tmp_path, 3))


def test_a_run_whose_submitter_waits_for_slurm_is_not_resumed(tmp_path: Path) -> None:
    run = submitted(tmp_path, code=1, job=None)
    assert take_turn(run, 0, time.time()) is not None
    with pytest.raises(ConfigError, match="is being submitted by another command"):
        plan_resume(run, [], Situation("resume"), time.time())


def test_a_member_whose_array_is_being_submitted_is_not_resumed(tmp_path: Path) -> None:
    run = submitted(tmp_path, "000", code=1, job=None, task=0)
    sweep, _ = sweep_of(tmp_path, 1, SweepArray(0, "orchestra:000", 0, (0,), "000", ME, 0.0))
    sweep.control.mkdir()
    assert write_claim(sweep.claim(0))
    with pytest.raises(ConfigError, match="is being submitted by another command"):
        plan_resume(run, [], Situation("resume"), time.time())


def test_a_sweep_is_not_resumed_while_a_member_is(tmp_path: Path) -> None:
    run = submitted(tmp_path, "000", code=1)
    sweep, record = sweep_of(tmp_path, 1)
    (member,) = record.members
    resume = SweepResume(sweep, record, (ResumedMember(member, 1, num_jobs=1),), lambda _: Share(), 1000)
    turn = take_turn(run, 1, time.time())
    assert turn is not None
    with pytest.raises(ConfigError, match="runs/000 is being resumed by another command"):
        submit_resumed(resume, [])
    turn.unlink()
    changed = replace(resume, members=(ResumedMember(member, 1, num_jobs=0),))
    with pytest.raises(ConfigError, match="runs/000 is being resumed by another command"):
        submit_resumed(changed, [])
    assert [*run.control.iterdir(), *sweep.control.iterdir()] == [], "what was claimed is given back"


def test_of_two_jobs_the_one_that_trains_is_asked_about(tmp_path: Path, slurm: Slurm) -> None:
    run = submitted(tmp_path)
    record = json.loads(run.record.read_text())
    later = {**record["jobs"][0], "id": "9", "token": "orchestra:later"}
    run.record.write_text(json.dumps({**record, "jobs": [*record["jobs"], later]}))
    slurm.tells("RUNNING")
    state = run_records.state_by_slurm(run)
    assert (state.state, state.job, state.job_state) == ("running", "7", "RUNNING")
    EventWriter(run, node_writer(0, 0), 0, host="node1").write("failed", node=0, code=1)
    assert read_state(run, time.time()).submitted == newest_job(run)
