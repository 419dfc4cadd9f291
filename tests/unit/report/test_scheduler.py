"""Slurm's word on a run after the run's own: which one counts, from real records and a stand-in squeue."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from support.fake_slurm import ME, FakeSlurm, queue_line

from orchestra.cli import main
from orchestra.report.run_state import RunState, read_state
from orchestra.report.scheduler import newest_job, with_scheduler
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir

SILENT = "exec >&2; echo 'squeue: error: Unable to contact slurm controller (connect failure)'; exit 1"


@pytest.fixture
def slurm(fake_slurm: FakeSlurm) -> FakeSlurm:
    fake_slurm.put("sacct", "exit 1")
    return fake_slurm


def submitted(parent: Path, name: str, job: str | None = "7", **more: object) -> RunDir:
    run = RunDir(parent / "runs" / name)
    run.path.mkdir(parents=True)
    intent = {
        "token": f"orchestra:{name}",
        "id": job,
        "name": name,
        "user": ME,
        "submitted": time.time(),
        **more,
    }
    run.record.write_text(json.dumps({"name": name, "created": time.time(), "pid": None, "jobs": [intent]}))
    return run


def queue(slurm: FakeSlurm, name: str, state: str) -> None:
    slurm.says("squeue", prints=queue_line("7", state, name))


def told(run: RunDir) -> RunState:
    ((state,), _) = with_scheduler([run], [read_state(run, time.time())])
    return state


def elsewhere(run: RunDir) -> EventWriter:
    """Start an attempt on another host."""
    events = EventWriter(run, node_writer(0, 0), 0, host="node1")
    events.write("attempt_started", pid=1, pid_started=1)
    return events


@pytest.mark.parametrize(
    ("word", "before", "after"),
    [
        ("PENDING", "queued", "queued"),
        ("RUNNING", "starting", "running"),
        ("COMPLETING", "starting", "running"),
        ("NODE_FAIL", "died", "died"),
        ("CANCELLED", "cancelled", "cancelled"),
    ],
)
def test_slurm_tells_what_the_records_leave_open(
    tmp_path: Path, slurm: FakeSlurm, word: str, before: str, after: str
) -> None:
    run = submitted(tmp_path, "one")
    queue(slurm, "one", word)
    assert told(run).state == before
    elsewhere(run)
    state = told(run)
    assert (state.state, state.job, state.job_state) == (after, "7", word)


def test_a_job_of_which_nothing_comes_to_life_says_so(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = submitted(tmp_path, "one")

    def since(minutes: float) -> str | None:
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 60 * minutes))
        slurm.put("squeue", f"echo '7|RUNNING|{ME}|None|node1|{start}|one|orchestra:one'")
        state = told(run)
        assert state.state == "starting"
        return state.cause

    assert since(1) is None
    assert "nothing of it has come to life for 12 minutes" in (since(12) or "")
    (run.control / "job-7.start-0").mkdir(parents=True)
    assert since(12) is None


def test_a_verdict_of_the_run_is_stronger_but_a_stopped_run_may_wait_again(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = submitted(tmp_path, "one")
    elsewhere(run).write("failed", node=0, code=75, cause="StopRequested")
    for word, state in (("RUNNING", "stopped"), ("CANCELLED", "stopped"), ("PENDING", "queued")):
        queue(slurm, "one", word)
        assert told(run).state == state
    elsewhere(run).write("finished", node=0, code=0)
    assert told(run).state == "finished"


def test_silence_changes_nothing_and_is_said(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(tmp_path, "one")
    slurm.put("squeue", SILENT)
    assert told(run).state == "not started"
    elsewhere(run)
    assert told(run).state == "running"
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0
    assert "Unable to contact slurm controller" in capsys.readouterr().err


def test_a_lost_job_is_found_by_its_token_or_was_never_submitted(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = submitted(tmp_path, "lost", job=None)
    queue(slurm, "lost", "PENDING")
    assert (told(run).state, told(run).job) == ("queued", "7")
    slurm.put("squeue", "true")
    assert told(run).state == "not submitted"
    known = submitted(tmp_path, "known")
    assert told(known).state == "died"


def test_runs_of_no_job_ask_nobody(tmp_path: Path, slurm: FakeSlurm) -> None:
    slurm.put("squeue", f"touch {tmp_path}/asked")
    run = RunDir(tmp_path / "local")
    run.path.mkdir()
    for jobs in ([], [{}], "x", [{"token": 1}]):
        run.record.write_text(json.dumps({"jobs": jobs}))
        assert newest_job(run) is None
        assert told(run) == read_state(run, time.time())
    assert not (tmp_path / "asked").exists()


def still(run: RunDir) -> None:
    """Let the run's files be as old as those of an attempt that ended a while ago."""
    before = time.time() - 120
    for file in run.events.iterdir():
        os.utime(file, (before, before))


def test_what_grows_has_not_died_because_slurm_does_not_know_its_job(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = submitted(tmp_path, "one")
    slurm.put("squeue", "true")
    elsewhere(run)
    state = told(run)
    assert (state.state, state.job_state) == ("running", "UNKNOWN")
    assert state.cause == "Slurm does not know job 7, yet the run's files grow"
    still(run)
    EventWriter(run, "cancel.7", 0).write("cancelled", token="another")
    assert told(run).state == "died", "a command about the run is no sign of life"


@pytest.mark.parametrize(
    ("begun", "own"), [("no", "not started"), ("yes", "running"), ("stopped, and goes on", "queued")]
)
def test_a_job_of_another_cluster_is_not_gone(tmp_path: Path, slurm: FakeSlurm, begun: str, own: str) -> None:
    run = submitted(tmp_path, "one", cluster="alpha")
    slurm.put("squeue", "true")
    slurm.put("scontrol", f"echo asked >> {tmp_path}/calls; echo 'ClusterName             = beta'")
    if begun != "no":
        events = elsewhere(run)
        still(run)
        if begun != "yes":
            events.write("failed", node=0, code=130)
            events.write("requeued", job="7")
    for _ in range(2):
        state = told(run)
        assert (state.state, state.job_state, state.asked_cluster) == (own, "UNKNOWN", "beta")
        assert state.cause == "its job 7 is on cluster alpha; this machine asks cluster beta"
    assert (tmp_path / "calls").read_text() == "asked\n", "once for all"


def test_the_clusters_name_is_asked_for_only_where_the_queue_leaves_it_open(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = submitted(tmp_path, "one", cluster="alpha")
    slurm.put("scontrol", f"touch {tmp_path}/asked; echo 'ClusterName = alpha'")
    queue(slurm, "one", "PENDING")
    assert told(run).state == "queued"
    assert not (tmp_path / "asked").exists()
    slurm.put("squeue", "true")
    assert told(run).state == "died", "this cluster's job, and it is gone"
    assert (tmp_path / "asked").exists()


def test_where_nobody_says_which_cluster_this_is_nothing_is_known(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = submitted(tmp_path, "one", cluster="alpha")
    slurm.put("squeue", "true")
    slurm.put("scontrol", "exit 1")
    assert (told(run).state, told(run).job_state) == ("not started", "UNKNOWN")


@pytest.mark.parametrize("has_accounting", [False, True])
def test_a_follow_up_that_slurm_could_not_place_has_failed_and_says_so(
    tmp_path: Path, slurm: FakeSlurm, has_accounting: bool
) -> None:
    run = submitted(tmp_path, "one", attempt=1)
    events = elsewhere(run)
    events.write("failed", node=0, code=1, cause="node lost")
    events.write("requeued", job="7", how="chain", reason="requeued without it")
    queue(slurm, "one", "PENDING")
    assert told(run).state == "queued"
    slurm.put("squeue", f"echo '7|FAILED|{ME}|BadConstraints||N/A|one|orchestra:one'")
    if has_accounting:
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
        slurm.put("sacct", f"echo '7|FAILED|{ME}|1:0|None assigned|{now}|one|orchestra:one'")
    state = told(run)
    assert (state.state, state.job_state) == ("failed", "FAILED")
    assert str(state.cause).startswith("Slurm could not place job 7: ")
    assert str(state.cause).endswith("(BadConstraints), and the run had not gone on")
