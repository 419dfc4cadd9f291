"""Before a run goes on: jobs that are still being ended are waited for, and nobody guesses about others."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_slurm import FakeSlurm

from orchestra.config.machine import Situation
from orchestra.errors import ConfigError, LaunchError
from orchestra.report.run_state import read_state
from orchestra.report.scheduler import newest_job, with_scheduler
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir, Sweep, SweepArray, SweepDir, SweepMember, to_json
from orchestra.run.stop_requests import user_name
from orchestra.submit import wait
from orchestra.submit.claims import take_turn, write_claim
from orchestra.submit.job import Share
from orchestra.submit.resume_run import ask_scheduler, plan_resume
from orchestra.submit.sweeps.members import member_states
from orchestra.submit.sweeps.resume_sweep import ResumedMember, SweepResume, submit_resumed


class Slurm(FakeSlurm):
    """A stand-in for Slurm: the queue says one word after the other, and the last one from then on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.is_called("alpha")
        self.put("sacct", "exit 1")

    def is_called(self, cluster: str) -> None:
        self.put("scontrol", f"echo 'ClusterName = {cluster}'")

    def says(self, *words: str) -> None:
        (self.folder / "words").write_text("\n".join(words) + "\n")
        self.put(
            "squeue",
            f"cd {self.folder}; word=$(head -1 words)\n"
            "[ $(wc -l < words) -gt 1 ] && sed -i 1d words\n"
            f'[ -n "$word" ] && echo "7|$word|{user_name()}|None|node1|N/A|one|orchestra:one"; exit 0',
        )


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setattr(wait, "_POLL_S", 0.01)
    monkeypatch.setattr(wait, "_WAIT_S", 5.0)
    return Slurm(fake_slurm.folder)


def submitted(run: RunDir, *, code: int | None = None, **more: object) -> RunDir:
    """Record a job and an attempt of it on another host, with its verdict where it has one."""
    run.path.mkdir(parents=True)
    entry = {"token": "orchestra:one", "id": "7", "name": "one", "user": user_name(), "cluster": "alpha"}
    jobs = [{**entry, "submitted": time.time() - 100, "attempt": 0, **more}]
    run.record.write_text(json.dumps({"name": run.name, "created": 1.0, "pid": None, "jobs": jobs}))
    events = EventWriter(run, node_writer(0, 0), 0, host="node1")
    events.write("attempt_started", node=0, pid=1, job="7")
    if code is not None:
        events.write("failed", node=0, code=code, cause="x")
    return run


@pytest.fixture
def stopped(tmp_path: Path) -> RunDir:
    return submitted(RunDir(tmp_path / "one"), code=130)


@pytest.mark.parametrize("last", ["", "CANCELLED"])
def test_a_job_that_is_being_ended_is_waited_for(
    stopped: RunDir, slurm: Slurm, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.says("RUNNING", "COMPLETING", "COMPLETING", last)
    word = ask_scheduler(stopped, time.time())
    assert word.told is not None
    assert word.told.state == "interrupted"
    assert "Slurm still ends job 7, which trained one" in capsys.readouterr().err


def test_a_job_that_is_queued_again_is_left_to_slurm(stopped: RunDir, slurm: Slurm) -> None:
    slurm.says("COMPLETING", "PENDING")
    word = ask_scheduler(stopped, time.time())
    with pytest.raises(ConfigError, match="job 7 is started again by Slurm itself"):
        plan_resume(stopped, [], Situation("resume"), time.time(), word)


def test_a_job_that_does_not_end_is_an_error(
    stopped: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "_WAIT_S", 0.05)
    slurm.says("COMPLETING")
    with pytest.raises(LaunchError, match=r"job 7 has not \(COMPLETING\)"):
        ask_scheduler(stopped, time.time())


def test_what_may_be_alive_on_another_cluster_is_refused_and_what_ended_is_not(
    tmp_path: Path, stopped: RunDir, slurm: Slurm
) -> None:
    slurm.says("")
    slurm.is_called("beta")
    alive = submitted(RunDir(tmp_path / "two"))
    with pytest.raises(LaunchError, match=r"on cluster alpha; this machine asks cluster beta\. .* node of"):
        ask_scheduler(alive, time.time())
    word = ask_scheduler(stopped, time.time())
    assert word.told is not None
    assert word.told.state == "interrupted"


def test_of_a_sweep_what_is_being_ended_or_elsewhere_gets_no_job(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wait, "_WAIT_S", 0.05)
    sweep = SweepDir(tmp_path / "sweep")
    members = tuple(SweepMember(index, str(index), ()) for index in range(2))
    submitted(sweep.member(0), code=75)
    submitted(sweep.member(1), code=1, id="8", token="orchestra:two")
    record = Sweep("sweep", "x", (), members)
    slurm.says("COMPLETING")
    first, second = member_states(sweep, record)
    assert (first.state.state, first.needs_job, second.needs_job) == ("being ended", False, True)
    slurm.says("")
    first, second = member_states(sweep, record)
    assert (first.needs_job, second.needs_job) == (True, True)
    slurm.is_called("beta")
    three = Sweep("sweep", "x", (), (*members, SweepMember(2, "2", ())))
    submitted(sweep.member(2), id="9", token="orchestra:three")
    with pytest.raises(LaunchError, match="job 9 is on cluster alpha"):
        member_states(sweep, three)


def test_a_run_whose_submitter_waits_for_slurm_is_not_resumed(tmp_path: Path) -> None:
    run = submitted(RunDir(tmp_path / "one"), code=1, id=None)
    turn = take_turn(run, 0, time.time())
    with pytest.raises(ConfigError, match="is being submitted by another command"):
        plan_resume(run, [], Situation("resume"), time.time())
    assert turn is not None


def test_a_member_whose_array_is_being_submitted_is_not_resumed(tmp_path: Path) -> None:
    sweep = SweepDir(tmp_path / "sweep")
    run = submitted(sweep.member(0), code=1, id=None, task=0)
    array = SweepArray(0, "orchestra:one", 0, (0,), "one", user_name(), 0.0)
    sweep.record.write_text(to_json(Sweep("sweep", "x", (), (SweepMember(0, "0", ()),), (array,))))
    sweep.control.mkdir()
    assert write_claim(sweep.claim(0))
    with pytest.raises(ConfigError, match="is being submitted by another command"):
        plan_resume(run, [], Situation("resume"), time.time())


def test_a_sweep_is_not_resumed_while_a_member_is(tmp_path: Path) -> None:
    sweep = SweepDir(tmp_path / "sweep")
    member = SweepMember(0, "0", ())
    run = submitted(sweep.member(0), code=1)
    record = Sweep("sweep", "x", (), (member,))
    sweep.record.write_text(to_json(record))
    resume = SweepResume(sweep, record, (ResumedMember(member, 1, num_jobs=1),), lambda _: Share(), 1000)
    turn = take_turn(run, 1, time.time())
    with pytest.raises(ConfigError, match="sweep/000 is being resumed by another command"):
        submit_resumed(resume, [])
    assert turn is not None
    turn.unlink()
    changed = replace(resume, members=(ResumedMember(member, 1, num_jobs=0),))
    with pytest.raises(ConfigError, match="sweep/000 is being resumed by another command"):
        submit_resumed(changed, [])
    assert [*run.control.iterdir(), *sweep.control.iterdir()] == [], "what was claimed is given back"


def test_of_two_jobs_the_one_that_trains_is_asked_about(tmp_path: Path, slurm: Slurm) -> None:
    run = submitted(RunDir(tmp_path / "one"))
    record = json.loads(run.record.read_text())
    later = {**record["jobs"][0], "id": "9", "token": "orchestra:later"}
    run.record.write_text(json.dumps({**record, "jobs": [*record["jobs"], later]}))
    slurm.says("RUNNING")
    ((told,), _) = with_scheduler([run], [read_state(run, time.time())])
    assert (told.state, told.job, told.job_state) == ("running", "7", "RUNNING")
    EventWriter(run, node_writer(0, 0), 0, host="node1").write("failed", node=0, code=1)
    assert read_state(run, time.time()).submitted == newest_job(run)
