"""States of a sweep's members: found by the array's id and the task's number, counted, and told as one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.fake_slurm import ME, FakeSlurm, queue_line
from support.run_records import TOKEN, started_elsewhere, state_by_slurm, submitted_sweep

from launchers.slurm.queue import GONE, UNKNOWN, JobState, Questions, SubmittedJob, job_and_tasks, joined
from orchestra.report.run_state import SweepState, read_state
from orchestra.report.scheduler import how_it_ended, read_states, why_it_waits, with_scheduler
from orchestra.run.paths import SweepDir


@pytest.fixture
def slurm(fake_slurm: FakeSlurm) -> FakeSlurm:
    fake_slurm.says("squeue")
    fake_slurm.says("sacct")
    return fake_slurm


def line(label: str, state: str, reason: str = "Priority", token: str = TOKEN) -> str:
    return queue_line(label, state, "lr-sweep", reason=reason, token=token) + "\n"


def state_of(sweep: SweepDir) -> SweepState:
    ((state,), _) = read_states([sweep], time.time())
    assert isinstance(state, SweepState)
    return state


def test_each_member_is_its_task_whatever_became_of_the_comment(tmp_path: Path, slurm: FakeSlurm) -> None:
    sweep = submitted_sweep(tmp_path, 4)
    for comment in (TOKEN, "(null)"):
        lines = line("50_0", "RUNNING", token=comment) + line("50_2", "PENDING", token=comment)
        slurm.says("squeue", prints=lines)
        states = state_of(sweep).members
        assert [each.state.state for each in states] == ["starting", "died", "queued", "died"]
        assert [each.state.job for each in states][::2] == ["50_0", "50_2"]
    assert states[0].state.name == "lr-sweep/000"
    assert len(slurm.calls("squeue")) == 2


def test_an_array_whose_id_was_lost_is_found_by_its_token(tmp_path: Path, slurm: FakeSlurm) -> None:
    sweep = submitted_sweep(tmp_path, 2, array=None)
    slurm.says("squeue", prints=line("50_0", "RUNNING") + line("50_1", "PENDING"))
    assert state_of(sweep).counts == {"starting": 1, "queued": 1}


def test_tasks_that_were_cancelled_before_they_began_are_one_line(tmp_path: Path, slurm: FakeSlurm) -> None:
    sweep = submitted_sweep(tmp_path, 3)
    slurm.says("squeue", prints=line("50", "CANCELLED") + line("50_0", "RUNNING"))
    assert state_of(sweep).counts == {"starting": 1, "cancelled": 2}
    assert state_of(sweep).to_json()["members"][2]["overrides"] == ["optim.lr=2e-4", "parallelism.tp=2"]


def test_accounting_is_asked_by_array_and_its_ranges_are_read(tmp_path: Path, slurm: FakeSlurm) -> None:
    sweep = submitted_sweep(tmp_path, 1000)
    lines = [
        f"50_[5-999%2]|CANCELLED by 0|{ME}|0:0|None assigned|2999-01-01T00:00:00|lr-sweep|",
        f"50_0|OUT_OF_MEMORY|{ME}|0:125|node1|2999-01-01T00:00:00|lr-sweep|",
        f"50_1|RUNNING|{ME}|0:0|node1|2999-01-01T00:00:00|lr-sweep|",
        f"50_2|FAILED|{ME}|3:0|node1|1999-01-01T00:00:00|lr-sweep|",
        f"50_3|FAILED|{ME}|3:0|node1|2999-01-01T00:00:00|lr-sweep|orchestra:bb",
        f"50_4|FAILED|{ME}|3:0|node1|2999-01-01T00:00:00|lr-sweep|",
    ]
    slurm.says("sacct", prints="\n".join(lines))
    state = state_of(sweep)
    assert state.counts == {"cancelled": 995, "failed": 1, "died": 4}
    causes = [member.state.cause or "" for member in state.members]
    assert "the kernel killed it because its memory ran out" in causes[0]
    assert all("Slurm does not have job 50_" in cause for cause in causes[1:4]), "stale, recycled, another's"
    assert causes[4] == "job 50_4 failed with exit code 3, and the run had not begun"
    assert causes[5] == "job 50_5 was cancelled by root, and the run had not begun"
    (question,) = slurm.calls("sacct")
    assert "--jobs=50 " in question
    assert len(slurm.calls("squeue")) == 1


def test_ranges_of_tasks_come_and_go() -> None:
    assert job_and_tasks("12") == ("12", None)
    assert job_and_tasks("12_4") == ("12", (4,))
    assert job_and_tasks("12_[1-3,7,10-14:2%5]") == ("12", (1, 2, 3, 7, 10, 12, 14))
    assert job_and_tasks("12_[1,3,...]") == ("12", (1, 3))
    assert joined(["12_4", "12_1", "13", "12_2"]) == ["12_[1-2,4]", "13"]


def test_slurm_is_asked_again_only_after_a_pause_and_newer_jobs_are_unknown_until_then(
    slurm: FakeSlurm,
) -> None:
    first = SubmittedJob(TOKEN, "11", "a", ME, time.time() - 5)
    questions = Questions()
    slurm.says("squeue", prints=queue_line("11", "RUNNING", "a", token=TOKEN))
    for _ in range(3):
        assert questions.states([first], [first])[0][first].state == "RUNNING"
    later = SubmittedJob("orchestra:bb", "12", "b", ME, time.time() + 1)
    gone = SubmittedJob("orchestra:cc", "13", "c", ME, time.time() - 5)
    words, _ = questions.states([first, later, gone], [])
    assert (words[later].state, words[gone].state) == (UNKNOWN, GONE)
    assert len(slurm.calls("squeue")) == 1
    eager = Questions(pause_s=0.0)
    eager.states([first], [])
    eager.states([first], [])
    assert len(slurm.calls("squeue")) == 3
    assert eager.states([], []) == ({}, [])


def test_a_run_that_goes_on_by_itself_is_queued_until_its_next_attempt(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = submitted_sweep(tmp_path, 1).member(0)
    events = started_elsewhere(run)
    events.write("failed", node=0, code=75, cause="StopRequested")
    assert read_state(run, time.time()).state == "stopped"
    events.write("requeued", job="50_0", how="requeue", reason="time_limit")
    assert read_state(run, time.time()).state == "queued"
    for word, expected in (("COMPLETING", "queued"), ("PENDING", "queued"), ("RUNNING", "starting")):
        slurm.says("squeue", prints=line("50_0", word, "BeginTime"))
        assert state_by_slurm(run).state == expected
    slurm.says("squeue")
    state = state_by_slurm(run)
    assert state.state == "died"
    assert state.cause == "Slurm does not have job 50_0 any more, and the run had not gone on"
    slurm.says("squeue", code=1)
    ((state,), problems) = with_scheduler([run], [read_state(run, time.time())])
    assert (state.state, len(problems)) == ("queued", 1)
    started_elsewhere(run, attempt=1)
    assert read_state(run, time.time()).state == "running"


def test_reasons_are_told_in_words() -> None:
    for reason, words in {
        "Resources": "nodes to become free",
        "Priority": "higher priority",
        "Dependency": "another job to end",
        "BeginTime": "after it was requeued",
        "JobHeldAdmin": "held by an administrator, who can let it go: `scontrol release 7`",
        "QOSMaxCpuPerUserLimit": "a limit of its QOS (QOSMaxCpuPerUserLimit)",
        "AssocGrpNodeLimit": "waits for a limit of its account",
        "QOSMaxNodePerJobLimit": "more than its QOS allows a job: it will not start as it is",
        "AssocMaxGRESPerNode": "more than its account allows a job: it will not start",
        "QOSMinGRES": "asks for less than its QOS allows a job: it will not start",
        "AccountNotAllowed": "may not use this partition: it will not start",
        "Something New": "waits (Something New)",
    }.items():
        assert words in why_it_waits(JobState("7", "PENDING", reason))
    assert "scontrol release 7" in why_it_waits(JobState("7", "REQUEUE_HOLD", "x"))
    assert "stand still" in why_it_waits(JobState("7", "SUSPENDED", "None"))
    assert "being made ready" in why_it_waits(JobState("7", "CONFIGURING", "None"))
    assert "cleaning its nodes up" in why_it_waits(JobState("7", "COMPLETING", "None"))
    assert why_it_waits(JobState("7", "RUNNING", "None")) == "", "what trains waits for nothing"


def test_ends_are_told_with_who_and_what() -> None:
    assert how_it_ended(JobState("7", "CANCELLED", cancelled_by="0")) == "job 7 was cancelled by root"
    assert how_it_ended(JobState("7", "TIMEOUT")) == "job 7 ended as TIMEOUT: it reached its time limit"
    assert how_it_ended(JobState("7", "FAILED", exit_code="0:9")) == "job 7 failed by signal 9"
