"""What the job of a run does first that begins after others: it begins, waits on in another job, or ends."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from job_in_slurm import COMMANDS, TASK, Slurm, jobs, options
from support.command_line import CommandLine
from support.fake_slurm import ME, queue_line
from support.run_records import led_here, started_elsewhere, submitted

from conf.schema import ClusterConfig, Config, RecoveryConfig
from launchers.slurm.batch_script import NOT_THIS_JOB
from orchestra.agents.follow import __main__ as follow
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from orchestra.report.run_state import read_state
from orchestra.run.config_file import write_config
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.submit.fair.predecessors import predecessor_of, record_of
from orchestra.submit.job_record import add_intent, chain


@pytest.fixture
def before(run: RunDir) -> RunDir:
    """The run that is to be done first: it was in job 7, and has gone on in job 8."""
    first = submitted(run.path.parent.parent, "first", "8")
    started_elsewhere(first, job="7").write("failed", node=0, code=75, cause="StopRequested")
    return first


@pytest.fixture(autouse=True)
def _in_its_job(run: RunDir, before: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(run.config, Config())
    entry = {"token": "orchestra:0", "id": "12", "name": "mine", "user": ME, "submitted": 1.0, "attempt": 0}
    record = {"name": "mine", "jobs": [entry], "after": record_of([predecessor_of(before)])}
    run.record.write_text(json.dumps(record))
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setattr(follow, "_BELIEVED_MOST_S", 0.2)
    monkeypatch.setattr(follow, "_SILENCE_S", 0.2)
    monkeypatch.setattr(follow, "_PAUSE_S", 0.05)
    slurm.put("sacct", "exit 1")


def goes_on(slurm: Slurm) -> None:
    slurm.tell("queue", queue_line("8", "PENDING", "first") + "\n")


def test_it_waits_on_behind_the_job_in_which_the_other_run_goes_on_once(run: RunDir, slurm: Slurm) -> None:
    goes_on(slurm)
    assert follow.main([str(run.path)]) == NOT_THIS_JOB
    # Started again, by an administrator perhaps.
    assert follow.main([str(run.path)]) == NOT_THIS_JOB
    (call,) = slurm.calls("sbatch")
    assert (options(call, "dependency"), options(call, "begin")) == ("afterany:8", None)
    assert call.endswith("/job.sbatch")
    assert [(job["id"], job["attempt"]) for job in jobs(run)] == [("12", 0), ("20", 0)]
    (event,) = (event for event in read_events(run) if event["event"] == "waits_on")
    assert (event["job"], event["instead_of"], event["behind"]) == ("20", "12", ["8"])
    assert not list(run.path.glob("events/*crew*"))


def test_it_begins_when_the_other_run_is_done_and_never_waits_again(
    run: RunDir, before: RunDir, slurm: Slurm
) -> None:
    started_elsewhere(before, 1, job="8").write("finished", node=0, code=0)
    slurm.tell("silent")
    assert follow.main([str(run.path)]) == EXIT_DONE
    led_here(run)
    started_elsewhere(before, 2, job="9").write("failed", node=0, code=93, cause="x")
    assert follow.main([str(run.path)]) == EXIT_DONE
    assert slurm.calls("sbatch") == []


def test_it_ends_with_93_where_the_other_run_ended_and_says_what_to_do(
    run: RunDir, slurm: Slurm, orchestra: CommandLine
) -> None:
    assert follow.main([str(run.path)]) == EXIT_DO_NOT_RESTART
    (event,) = (event for event in read_events(run) if event["event"] == "start_failed")
    assert event["cause"].startswith("it begins after first, which was stopped (exit code 75: ")
    words = "`orchestra resume first` first, then `orchestra resume mine`"
    assert words in " ".join(orchestra("why", str(run.path)).out.split())
    state = orchestra.json("status", str(run.path))[0]
    assert (state["state"], state["code"], words in state["cause"]) == ("failed", 93, True)
    assert slurm.calls("sbatch") == []


def test_an_end_is_believed_only_when_it_stands(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, progress = itertools.count(), follow.progress

    def look(*arguments: Any) -> Any:
        if next(looks) == 2:
            goes_on(slurm)
        return progress(*arguments)

    monkeypatch.setattr(follow, "progress", look)
    monkeypatch.setattr(follow, "_BELIEVED_MOST_S", 10.0)
    assert follow.main([str(run.path)]) == NOT_THIS_JOB


def test_an_end_is_believed_after_as_long_as_the_run_lets_nodes_and_ranks_be_silent(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(follow, "_BELIEVED_MOST_S", 90.0)
    monkeypatch.setattr(follow, "_settled", lambda _, believed_s: waits.append(believed_s) or ([], ["x"]))
    for recovery in (RecoveryConfig(), RecoveryConfig(agent_timeout_s=5, heartbeat_timeout_s=6)):
        write_config(run.config, replace(Config(), recovery=recovery))
        follow.main([str(run.path)])
    assert waits == [70.0, 11.0]


def test_a_record_that_cannot_be_read_begins_nothing_and_is_looked_at_again(
    run: RunDir, before: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, looks, look = run.record.read_text(), itertools.count(), follow.predecessors_in
    started_elsewhere(before, 1, job="8").write("finished", node=0, code=0)
    run.record.write_text(whole[:40])
    assert follow.main([str(run.path)]) == EXIT_FAILED
    (event,) = (event for event in read_events(run) if event["event"] == "start_failed")
    assert "run.json cannot be read, or does not say after which runs" in event["cause"]
    assert "`orchestra resume mine` tries again" in event["cause"]

    def later(record: Any) -> Any:
        if next(looks) == 2:
            run.record.write_text(whole)
        return look(record)

    monkeypatch.setattr(follow, "predecessors_in", later)
    monkeypatch.setattr(follow, "_SILENCE_S", 10.0)
    assert follow.main([str(run.path)]) == EXIT_DONE


def test_a_record_that_cannot_be_read_is_not_written_over(run: RunDir, slurm: Slurm) -> None:
    run.record.write_text("{")
    with pytest.raises(OSError, match="no whole JSON object"):
        add_intent(run, {"token": "orchestra:1"})
    with pytest.raises(OSError, match="no whole JSON object"):
        chain(run, TASK, 0, None)
    assert (run.record.read_text(), slurm.calls("sbatch")) == ("{", [])
    run.record.unlink()
    with pytest.raises(FileNotFoundError):
        add_intent(run, {"token": "orchestra:1"})


def test_where_nothing_can_be_waited_for_it_looks_again_later(
    run: RunDir, before: RunDir, slurm: Slurm
) -> None:
    led_here(before, 1)
    before.record.write_text(json.dumps({"name": "first", "jobs": []}))
    assert follow.main([str(run.path)]) == NOT_THIS_JOB
    (call,) = slurm.calls("sbatch")
    assert (options(call, "dependency"), options(call, "begin")) == (None, "now+600")


def test_a_job_for_which_slurm_did_not_wait_is_waited_for_with_a_pause(run: RunDir, slurm: Slurm) -> None:
    goes_on(slurm)
    events = EventWriter(run, "submit.11.follow", 0)
    events.write("waits_on", job="12", instead_of="11", behind=["8"], after=["first"])
    assert follow.main([str(run.path)]) == NOT_THIS_JOB
    (call,) = slurm.calls("sbatch")
    assert (options(call, "dependency"), options(call, "begin")) == ("afterany:8", "now+600")


def test_moving_on_is_tried_again_and_what_cannot_pass_is_recorded(
    run: RunDir, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on(slurm)
    # However long a busy machine takes for the first try.
    monkeypatch.setattr(follow, "_SILENCE_S", 60.0)
    accepts = COMMANDS["sbatch"].format(slurm.folder, "")
    full = "sbatch: error: QOSMaxSubmitJobPerUserLimit: Job violates accounting/QOS policy"
    once = f'test -e "{slurm.folder}/full" && rm "{slurm.folder}/full" && echo "{full}" >&2 && exit 1\n'
    slurm.tell("full")
    slurm.tell("silent")
    slurm.put("sbatch", once + accepts)
    assert follow.main([str(run.path)]) == NOT_THIS_JOB
    assert [job["id"] for job in jobs(run)] == ["12", "20"]


@pytest.mark.parametrize(
    "why", ["Invalid account or account/partition combination", "Job violates accounting/QOS policy"]
)
def test_a_follower_that_cannot_move_on_says_why(
    run: RunDir, slurm: Slurm, why: str, orchestra: CommandLine
) -> None:
    goes_on(slurm)
    slurm.says("sbatch", complains=f"sbatch: error: {why}", code=1)
    assert follow.main([str(run.path)]) == EXIT_FAILED
    (event,) = (event for event in read_events(run) if event["event"] == "start_failed")
    assert (why in event["cause"], "`orchestra resume mine` tries again" in event["cause"]) == (True, True)
    # The other one is tried again while there is time, which a busy machine may not have.
    assert len(slurm.calls("sbatch")) == 1 or (slurm.calls("sbatch") and not why.startswith("Invalid"))
    slurm.tell("queue")
    state = orchestra.json("status", str(run.path))[0]
    assert (state["state"], state["code"], why in state["cause"]) == ("failed", 1, True)


def test_a_cancelled_follower_ends_with_the_sites_code_and_never_begins(run: RunDir, slurm: Slurm) -> None:
    write_config(run.config, replace(Config(), cluster=ClusterConfig(stop_exit_code=0)))
    goes_on(slurm)
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    # The batch script ends with 0 then, and goes on after 0.
    assert follow.main([str(run.path)]) == NOT_THIS_JOB
    assert slurm.calls("sbatch") == []
    assert read_state(run, time.time()).state is RunPhase.cancelled


def test_a_follower_hears_a_second_cancel(run: RunDir, slurm: Slurm, orchestra: CommandLine) -> None:
    goes_on(slurm)
    for attempt in range(2):
        # It is looking.
        slurm.has_job("12")
        slurm.tell("queue", "\n".join([queue_line("8", "PENDING", "first"), mine("RUNNING")]) + "\n")
        assert "asked" in orchestra("cancel", str(run.path)).out
        assert follow.main([str(run.path)]) == EXIT_STOPPED
        record = json.loads(run.record.read_text())
        entry = {**record["jobs"][0], "attempt": attempt + 1, "token": f"orchestra:{attempt + 1}"}
        run.record.write_text(json.dumps({**record, "jobs": [entry]}))
    assert [len(stop_requests.read_requests(run, attempt)) for attempt in range(2)] == [1, 1]


def mine(state: str) -> str:
    return f"12|{state}|{ME}|None|node1|N/A|mine|"


def test_a_silent_slurm_and_a_cancel_start_nothing(run: RunDir, slurm: Slurm) -> None:
    (slurm.folder / "queue").unlink()
    assert follow.main([str(run.path)]) == EXIT_FAILED
    (event,) = (event for event in read_events(run) if event["event"] == "start_failed")
    assert "whether first is done is not known; `orchestra resume mine` tries again" in event["cause"]
    goes_on(slurm)
    stop_requests.write_request(run, 0, stop_requests.CANCEL)
    assert follow.main([str(run.path)]) == EXIT_STOPPED
    assert slurm.calls("sbatch") == []
    assert read_state(run, time.time()).state is RunPhase.cancelled
