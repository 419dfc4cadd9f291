"""Members of a sweep that share nodes, with a stand-in for Slurm: who takes whom, what the last job does."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from job_in_slurm import NODES, SILENT, Slurm

from conf.schema import Config, Requeue
from launchers.node_agent import StopRequests
from launchers.slurm.this_job import JobTask
from orchestra.agents.pack import __main__ as pack
from orchestra.agents.pack import last_of_array
from orchestra.agents.pack.__main__ import NodePack
from orchestra.agents.pack.packed_job import PackedJob, PlaceOfAgent, request_for_another
from orchestra.agents.wait_for_nodes import MOST_MOVES, UNFIT
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from orchestra.recovery.incidents import Verdict
from orchestra.recovery.policy import Action, Decision
from orchestra.run.config_file import write_config
from orchestra.run.control import stop_requests
from orchestra.run.control.member_places import MemberPlace, newest_place, take_place
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir, SweepArray, SweepDir

TASK = JobTask("12_0", 0, 0, 1, "node1", None, "alps")
TOKEN = "orchestra:0"
PLACE = PlaceOfAgent(0, 0)


@pytest.fixture
def signals() -> Iterator[StopRequests]:
    with StopRequests() as signals:
        yield signals


@pytest.fixture
def sweep(tmp_path: Path, slurm: Slurm) -> SweepDir:
    slurm.has_job("12_0")
    slurm.tell("queue", "12_0|RUNNING\n")
    sweep = SweepDir(tmp_path / "runs" / "sweep")
    sweep.path.mkdir(parents=True)
    return sweep


def members(sweep: SweepDir, number: int, config: Config | None = None) -> tuple[SweepArray, list[RunDir]]:
    """Return an array whose jobs take these members, and their runs, which have only been submitted."""
    runs = [sweep.member(index) for index in range(number)]
    for run in runs:
        run.control.mkdir(parents=True)
        run.record.write_text(json.dumps({"jobs": [{"token": TOKEN, "id": None, "attempt": 0, "pack": 0}]}))
        write_config(run.config, config or Config())
    return SweepArray(0, TOKEN, 0, (0, 1), "sweep", "me", 0.0, "12", tuple(range(number))), runs


def agents_do(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let a shell script be the agents: $4 is the run."""
    file = folder / "agent"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def asking(run: RunDir, place: PlaceOfAgent, attempt: int) -> tuple[PackedJob, EventWriter]:
    return PackedJob(run, Config(), TASK, place), EventWriter(run, "crew", attempt, before_start=True)


def test_a_member_that_is_called_off_before_its_attempt_asks_for_another_place(run: RunDir) -> None:
    job, events = asking(run, PLACE, -1)
    reasons = frozenset({stop_requests.TIME_LIMIT})
    job.go_on(Verdict(EXIT_STOPPED, "StopRequested"), -1, events, lambda: reasons)
    assert request_for_another(read_events(run), PLACE)
    # It says nothing of the place that follows, nor once a later agent of the place has begun.
    assert request_for_another(read_events(run), PlaceOfAgent(0, 1)) is None
    EventWriter(run, "later", 0).write("attempt_started")
    assert request_for_another(read_events(run), PLACE) is None


def test_a_cancelled_member_asks_for_no_other_place(run: RunDir) -> None:
    job, events = asking(run, PLACE, -1)
    reasons = frozenset({stop_requests.TIME_LIMIT, stop_requests.CANCEL})
    job.go_on(Verdict(EXIT_STOPPED, "StopRequested"), -1, events, lambda: reasons)
    assert request_for_another(read_events(run), PLACE) is None


def test_an_unfit_node_takes_no_more_and_the_last_job_is_queued_again_without_it(
    sweep: SweepDir,
    slurm: Slurm,
    signals: StopRequests,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    array, (done, damaged, unlucky, waiting) = members(sweep, 4)
    damaged.control.rmdir()
    damaged.control.write_text("in the way")
    job, events = asking(RunDir(tmp_path / "other"), PLACE, -1)
    job.requeue(Decision(Action.requeue, EXIT_FAILED, "no GPU", rule=UNFIT, exclude=("node1",)), -1, events)
    # The agent says so when it runs.
    said = (tmp_path / "other" / "events" / "crew.jsonl").read_text()
    line = re.sub(r'"time":[^,]*', "\"time\":'$(date +%s.%N)'", said.strip())
    agents_do(
        tmp_path,
        monkeypatch,
        f"case $4 in *002) mkdir $4/events; echo '{line}' > $4/events/crew.jsonl;; esac",
    )
    assert NodePack(sweep, array, 1, TASK).work(signals) == EXIT_STOPPED
    assert newest_place(done, 0) == MemberPlace(0, "12_0", 0, "over")
    assert newest_place(unlucky, 0) == MemberPlace(0, "12_0", 0, "goes on")
    assert newest_place(waiting, 0) is None
    printed = capsys.readouterr().out
    assert "001 is passed over for now" in printed
    assert "node1 is unfit, and takes no more members" in printed
    assert "3 members wait for a place, and no other job takes them" in printed
    asked = [call for call in slurm.calls("scontrol") if "show" not in call]
    assert asked == ["scontrol requeue 12_0", "scontrol update JobId=12_0 ExcNodeList=node1"]


@pytest.mark.parametrize("silent", ["", "slurmctld", "sinfo"])
def test_a_job_that_is_queued_again_keeps_away_from_nodes_that_it_left_out_before(
    sweep: SweepDir,
    slurm: Slurm,
    signals: StopRequests,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    silent: str,
) -> None:
    """An earlier start left one out, or Slurm itself did; in this moment Slurm may be silent."""
    monkeypatch.setattr(pack, "_SILENCE_S", 0.0)
    array, (run,) = members(sweep, 1)
    if silent == "slurmctld":
        slurm.tell("silent", SILENT)
    elif silent:
        slurm.put("sinfo", f'echo "{SILENT}" >&2; exit 1')
    slurm.has_job("12_0", ExcNodeList=NODES.replace("1-2", "2-3"))
    slurm.tell("job-node[2-3]", "node2\nnode3\n")
    job, events = asking(RunDir(tmp_path / "other"), PLACE, -1)
    job.requeue(
        Decision(Action.requeue, EXIT_FAILED, "hung", rule="suspects", exclude=("node1",)), -1, events
    )
    said = (tmp_path / "other" / "events" / "crew.jsonl").read_text()
    agents_do(tmp_path, monkeypatch, f"mkdir $4/events; echo '{said.strip()}' > $4/events/crew.jsonl")
    assert NodePack(sweep, array, 1, TASK).work(signals) == EXIT_STOPPED
    assert newest_place(run, 0) == MemberPlace(0, "12_0", 0, "goes on")
    (update,) = (call for call in slurm.calls("scontrol") if "update" in call)
    assert update == "scontrol update JobId=12_0 ExcNodeList=node1,node2,node3"


def test_members_that_wait_are_not_left_behind_because_slurm_is_silent_for_a_moment(
    sweep: SweepDir, slurm: Slurm, signals: StopRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "_SILENCE_S", 0.0)
    array, (run,) = members(sweep, 1)
    run.control.rmdir()
    run.control.write_text("in the way")
    once = (
        f'test -e "{slurm.folder}/asked" || {{ touch "{slurm.folder}/asked"; echo "{SILENT}" >&2; exit 1; }}'
    )
    slurm.put("squeue", f'{once}; cat "{slurm.folder}/queue"')
    assert NodePack(sweep, array, 1, TASK).work(signals) == EXIT_STOPPED
    assert "scontrol requeue 12_0" in slurm.calls("scontrol")
    # One that does not come back is an error.
    monkeypatch.setattr(pack, "_PATIENCE_S", 0.0)
    slurm.put("squeue", f'echo "{SILENT}" >&2; exit 1')
    assert NodePack(sweep, array, 1, TASK).work(signals) == EXIT_FAILED


def test_members_that_wait_are_left_to_another_job_of_the_array_else_it_is_an_error(
    sweep: SweepDir, slurm: Slurm, signals: StopRequests, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = replace(Config().cluster, requeue=Requeue.never)
    array, (run,) = members(sweep, 1, replace(Config(), cluster=cluster))
    run.control.rmdir()
    run.control.write_text("in the way")
    slurm.tell("queue", "12_0|RUNNING\n12_1|PENDING\n")
    assert NodePack(sweep, array, 1, TASK).work(signals) == EXIT_DONE
    slurm.tell("queue", "12_0|RUNNING\n")
    assert NodePack(sweep, array, 1, TASK).work(signals) == EXIT_FAILED
    assert "1 members wait for a place (000), and this job ends: no job may follow" in capsys.readouterr().out


def test_a_member_that_ended_while_slurm_was_asked_is_not_trained_again(
    sweep: SweepDir, slurm: Slurm, signals: StopRequests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, (run,) = members(sweep, 1)
    take_place(run, 0, 0, "12_1")
    ends = f"""echo '{json.dumps({"end": "over"})}' > {run.place_end(0, 0)}"""
    slurm.put("scontrol", f"{ends}\necho JobId=12 JobState=COMPLETED Restarts=0")
    agents_do(tmp_path, monkeypatch, "exit 1")
    assert NodePack(sweep, array, 1, TASK).work(signals) == EXIT_DONE
    assert newest_place(run, 0) == MemberPlace(0, "12_1", 0, "over")


def test_a_silent_slurm_is_asked_again_before_a_member_is_left_behind(
    sweep: SweepDir, slurm: Slurm, signals: StopRequests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "_ASK_S", 0.0)
    monkeypatch.setattr(pack, "_LOOK_S", 0.0)
    array, (run,) = members(sweep, 1)
    take_place(run, 0, 0, "12_1")
    slurm.has_job("12_1", "NODE_FAIL")
    slurm.tell("silent", SILENT)
    agents_do(tmp_path, monkeypatch, "exit 0")
    assert NodePack(sweep, array, 1, TASK).work(signals) == EXIT_DONE
    assert newest_place(run, 0) == MemberPlace(1, "12_0", 0, "over")


def test_of_jobs_that_end_together_one_sees_that_it_is_the_last(sweep: SweepDir, slurm: Slurm) -> None:
    slurm.has_job("12_1", restarts=1)
    slurm.tell("queue", "12_0|RUNNING\n12_1|RUNNING\n")
    other = replace(TASK, job="12_1")
    # What an earlier start of it said counts no more.
    last_of_array.say_left(sweep, 0, other)
    assert not last_of_array.is_last(sweep, 0, TASK)
    last_of_array.say_left(sweep, 0, replace(other, restart=1))
    assert last_of_array.is_last(sweep, 0, TASK)
    slurm.tell("queue", "12_0|RUNNING\n12_1|COMPLETING\n")
    assert last_of_array.is_last(sweep, 0, TASK)


def test_a_job_is_not_queued_again_for_ever(sweep: SweepDir) -> None:
    newest = replace(TASK, restart=MOST_MOVES)
    for start in range(MOST_MOVES):
        assert not last_of_array.is_too_often(sweep, 0, newest)
        last_of_array.say_left(sweep, 0, replace(TASK, restart=start), is_again=True)
    assert last_of_array.is_too_often(sweep, 0, newest)
    # One that ended by its time limit in between.
    last_of_array.say_left(sweep, 0, replace(TASK, restart=1))
    assert not last_of_array.is_too_often(sweep, 0, newest)


def test_how_a_member_ended_is_written_as_soon_as_it_can_be(
    sweep: SweepDir, signals: StopRequests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, (run, other) = members(sweep, 2)
    # The first one's folder is away when it has ended, until the second one begins.
    away = 'case $4 in *000) mv "$4/control" "$4/away"; touch "$4/control";;'
    back = '*) rm "${4%1}0/control"; mv "${4%1}0/away" "${4%1}0/control";; esac'
    agents_do(tmp_path, monkeypatch, f"{away} {back}")
    assert NodePack(sweep, array, 1, TASK).work(signals) == EXIT_DONE
    assert newest_place(run, 0) == MemberPlace(0, "12_0", 0, "over")
    assert newest_place(other, 0) == MemberPlace(0, "12_0", 0, "over")
