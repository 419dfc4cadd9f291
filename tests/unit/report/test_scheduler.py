"""Slurm's word on a run after the run's own, and a run between a failed attempt and the next one: what its
records, its leader's process and Slurm tell of it. Real event files and processes, a stand-in squeue.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.fake_slurm import ME, FakeSlurm, queue_line
from support.run_records import age_files, started_elsewhere, state_by_slurm, submitted

from launchers import processes
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.report.attempts import read_accounts
from orchestra.report.run_state import RunState, read_state
from orchestra.report.scheduler import newest_job
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.submit.cancel_jobs import Way, cancellations
from orchestra.submit.claims import take_next
from orchestra.submit.resume_run import ask_scheduler, plan_resume


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Stand-ins for Slurm's commands: there is no accounting, and no job in the queue."""
    monkeypatch.chdir(tmp_path)
    fake_slurm.put("sacct", "exit 1")
    fake_slurm.put("squeue")
    return fake_slurm


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that was submitted as job 7."""
    return submitted(tmp_path)


@pytest.fixture
def foreign(tmp_path: Path) -> RunDir:
    """A run whose job is on cluster alpha."""
    return submitted(tmp_path, cluster="alpha")


def queue(slurm: FakeSlurm, state: str, name: str = "one") -> None:
    slurm.says("squeue", prints=queue_line("7", state, name))


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
    run: RunDir, slurm: FakeSlurm, word: str, before: str, after: str
) -> None:
    queue(slurm, word)
    assert state_by_slurm(run).state == before
    started_elsewhere(run)
    state = state_by_slurm(run)
    assert (state.state, state.job, state.job_state) == (after, "7", word)


def test_a_job_of_which_nothing_comes_to_life_says_so(run: RunDir, slurm: FakeSlurm) -> None:
    def since(minutes: float) -> str | None:
        start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - 60 * minutes))
        slurm.says("squeue", prints=queue_line("7", "RUNNING", "one", start=start))
        state = state_by_slurm(run)
        assert state.state == "starting"
        return state.cause

    assert since(1) is None
    assert "nothing of it has started for 12 minutes" in (since(12) or "")
    (run.control / "job-7.start-0").mkdir(parents=True)
    assert since(12) is None


def test_a_verdict_of_the_run_is_stronger_but_a_stopped_run_may_wait_again(
    run: RunDir, slurm: FakeSlurm
) -> None:
    started_elsewhere(run).write("failed", node=0, code=75, cause="StopRequested")
    for word, state in (("RUNNING", "stopped"), ("CANCELLED", "stopped"), ("PENDING", "queued")):
        queue(slurm, word)
        assert state_by_slurm(run).state == state
    started_elsewhere(run).write("finished", node=0, code=0)
    assert state_by_slurm(run).state == "finished"


def test_silence_changes_nothing_and_is_said(run: RunDir, slurm: FakeSlurm, orchestra: CommandLine) -> None:
    slurm.says("squeue", complains="squeue: error: Unable to contact slurm controller", code=1)
    assert state_by_slurm(run).state == "not started"
    started_elsewhere(run)
    assert state_by_slurm(run).state == "running"
    assert "Unable to contact slurm controller" in orchestra("status").err


def test_a_lost_job_is_found_by_its_token_or_was_never_submitted(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = submitted(tmp_path, "lost", job=None)
    assert state_by_slurm(run).state == "not submitted"
    queue(slurm, "PENDING", "lost")
    assert (state_by_slurm(run).state, state_by_slurm(run).job) == ("queued", "7")
    assert state_by_slurm(submitted(tmp_path, "known", "8")).state == "died"


def test_runs_of_no_job_ask_nobody(run: RunDir, slurm: FakeSlurm) -> None:
    for jobs in ([], [{}], "x", [{"token": 1}]):
        run.record.write_text(json.dumps({"jobs": jobs}))
        assert newest_job(run) is None
        assert state_by_slurm(run) == read_state(run, time.time())
    assert slurm.calls("squeue") == []


def test_what_grows_has_not_died_because_slurm_does_not_know_its_job(run: RunDir, slurm: FakeSlurm) -> None:
    started_elsewhere(run)
    state = state_by_slurm(run)
    assert (state.state, state.job_state) == ("running", "UNKNOWN")
    assert state.cause == "Slurm does not know job 7, yet the run's files grow"
    age_files(run)
    EventWriter(run, "cancel.7", 0).write("cancelled", token="another")
    assert state_by_slurm(run).state == "died", "a command about the run is no sign of life"


@pytest.mark.parametrize(
    ("begun", "own"), [("no", "not started"), ("yes", "running"), ("stopped, and goes on", "queued")]
)
def test_a_job_of_another_cluster_is_not_gone(
    foreign: RunDir, slurm: FakeSlurm, begun: str, own: str
) -> None:
    slurm.says("scontrol", prints="ClusterName             = beta")
    if begun != "no":
        events = started_elsewhere(foreign)
        age_files(foreign)
        if begun != "yes":
            events.write("failed", node=0, code=130)
            events.write("requeued", job="7")
    for _ in range(2):
        state = state_by_slurm(foreign)
        assert (state.state, state.job_state, state.asked_cluster) == (own, "UNKNOWN", "beta")
        assert state.cause == "its job 7 is on cluster alpha; this machine asks cluster beta"
    assert len(slurm.calls("scontrol")) == 1, "once for all"


def test_the_clusters_name_is_asked_for_only_where_the_queue_leaves_it_open(
    foreign: RunDir, slurm: FakeSlurm
) -> None:
    slurm.says("scontrol", prints="ClusterName = alpha")
    queue(slurm, "PENDING")
    assert state_by_slurm(foreign).state == "queued"
    assert slurm.calls("scontrol") == []
    slurm.put("squeue")
    assert state_by_slurm(foreign).state == "died", "this cluster's job, and it is gone"
    assert len(slurm.calls("scontrol")) == 1


def test_where_nobody_says_which_cluster_this_is_nothing_is_known(foreign: RunDir, slurm: FakeSlurm) -> None:
    slurm.put("scontrol", "exit 1")
    state = state_by_slurm(foreign)
    assert (state.state, state.job_state) == ("not started", "UNKNOWN")


@pytest.mark.parametrize("has_accounting", [False, True])
def test_a_follow_up_that_slurm_could_not_place_has_failed_and_says_so(
    tmp_path: Path, slurm: FakeSlurm, has_accounting: bool
) -> None:
    run = submitted(tmp_path, attempt=1)
    events = started_elsewhere(run)
    events.write("failed", node=0, code=1, cause="node lost")
    events.write("requeued", job="7", how="chain", reason="requeued without it")
    queue(slurm, "PENDING")
    assert state_by_slurm(run).state == "queued"
    slurm.says("squeue", prints=queue_line("7", "FAILED", "one", reason="BadConstraints"))
    if has_accounting:
        now = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime())
        slurm.says("sacct", prints=f"7|FAILED|{ME}|1:0|None assigned|{now}|one|orchestra:one")
    state = state_by_slurm(run)
    assert (state.state, state.job_state) == ("failed", "FAILED")
    assert str(state.cause).startswith("Slurm could not place job 7: ")
    assert str(state.cause).endswith("(BadConstraints), and the run had not gone on")


CPU = Situation("resume", num_gpus=0)
REASON = "killed by SIGKILL at step 40; on the same nodes"


class Attempt:
    """An attempt that failed, in the words that its leader writes: here in this process, or on `host`."""

    def __init__(
        self, parent: Path, *, host: str | None = None, job: str | None = None, **facts: int
    ) -> None:
        self.run = submitted(parent, job=job, attempt=0)
        self.place = {} if host is None else {"host": host}
        self.facts: dict[str, Any] = {"pid": os.getpid(), "nodes": 1, **facts}
        if job is None:
            self.run.record.write_text(json.dumps({"name": "one", "created": time.time() - 60}))
        else:
            self.facts["job"] = job
        self.start(0)

    def start(self, number: int) -> None:
        process = processes.find(self.facts["pid"])
        self.events = EventWriter(self.run, node_writer(number, 0), number, **self.place)
        started = 1 if process is None else process.started
        self.events.write("attempt_started", node=0, pid_started=started, **self.facts)

    def fail(self, code: int = 1, **following: object) -> None:
        facts = {"cause": "killed by SIGKILL", "message": "from outside", **following}
        self.events.write("failed", node=0, code=code, **facts)

    def decide(self, decision: object = "restart", wait_s: float = 300.0) -> Attempt:
        self.fail()
        facts = {"decision": decision, "code": 1, "reason": REASON, "rule": "x", "exclude": []}
        self.events.write("restarting", **facts, wait_s=wait_s, after="killed by SIGKILL")
        return self


@pytest.fixture
def waiting(tmp_path: Path) -> RunDir:
    """A run whose leader, this process, waits to begin again."""
    return Attempt(tmp_path).decide().run


@pytest.fixture
def elsewhere(tmp_path: Path) -> RunDir:
    """A run whose leader waited on another host, in job 7."""
    return Attempt(tmp_path, host="node1", job="7").decide().run


def state_of(run: RunDir, later_s: float = 0.0) -> RunState:
    return read_state(run, time.time() + later_s)


@pytest.mark.parametrize("decision", ["restart", "replace", "shrink", "requeue"])
def test_a_run_whose_leader_waits_to_begin_again_is_restarting(tmp_path: Path, decision: str) -> None:
    run = Attempt(tmp_path).decide(decision).run
    state = state_of(run)
    assert (state.state, state.cause, state.eta_s) == ("restarting", REASON, None)
    assert state.state.is_alive
    assert state.restart is not None
    assert state.restart.due == pytest.approx(time.time() + 300, abs=30)
    assert state.to_json()["restart"]["decision"] == decision
    assert state_of(run, later_s=7200).state == "restarting", "a process that lives is believed"


@pytest.mark.parametrize("decision", ["give_up", "end", None, ["restart"]])
def test_decisions_that_begin_nothing_here_leave_the_verdict(tmp_path: Path, decision: object) -> None:
    state = state_of(Attempt(tmp_path).decide(decision).run)
    assert (state.state, state.restart, state.to_json()["restart"]) == ("failed", None, None)


def test_between_a_verdict_and_the_decision_the_run_is_restarting_already(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.fail(undecided=True)
    state = state_of(attempt.run)
    assert (state.state, state.cause) == ("restarting", "killed by SIGKILL")
    assert state.to_json()["restart"]["decision"] == "undecided"
    attempt.events.write("restarting", decision="give_up", code=1, reason=REASON)
    assert state_of(attempt.run).state == "failed"


def test_a_later_verdict_or_attempt_ends_the_waiting(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path).decide()
    attempt.fail(code=75)
    assert (state_of(attempt.run).state, state_of(attempt.run).restart) == ("stopped", None)
    attempt.start(1)
    assert state_of(attempt.run).state == "running"
    attempt.fail()
    assert state_of(attempt.run).state == "failed", "attempt 0's decision is not this one's"


@pytest.mark.parametrize("is_decided", [False, True])
def test_a_run_whose_leader_died_before_it_began_again_failed(tmp_path: Path, is_decided: bool) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    attempt = Attempt(tmp_path, pid=process.pid)
    attempt.decide() if is_decided else attempt.fail(undecided=True)
    state = state_of(attempt.run)
    assert (state.state, state.cause) == ("failed", "killed by SIGKILL")


@pytest.mark.parametrize("facts", [{"host": "elsewhere"}, {"nodes": 2, "pid": 2**22 + 1}])
def test_where_no_process_tells_the_wait_and_two_minutes_do(tmp_path: Path, facts: dict[str, Any]) -> None:
    run = Attempt(tmp_path, **facts).decide(wait_s=300.0).run
    assert state_of(run, later_s=400).state == "restarting"
    assert state_of(run, later_s=440).state == "failed"


def test_a_leader_that_took_over_is_not_sought_under_the_process_of_the_one_before(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, nodes=2)
    other = EventWriter(attempt.run, node_writer(0, 1), 0, host="elsewhere", node=1)
    other.write("failed", code=1, cause="node lost")
    other.write("restarting", decision="replace", reason=REASON, wait_s=10.0)
    assert state_of(attempt.run, later_s=100).state == "restarting"
    assert state_of(attempt.run, later_s=140).state == "failed"


def test_slurm_tells_whether_a_silent_leader_still_waits(elsewhere: RunDir, slurm: FakeSlurm) -> None:
    queue(slurm, "RUNNING")
    for later_s, own in ((0.0, "restarting"), (9000.0, "failed")):
        state = state_by_slurm(elsewhere, later_s)
        assert state_of(elsewhere, later_s).state == own
        assert (state.state, state.cause, state.job_state) == ("restarting", REASON, "RUNNING")
    age_files(elsewhere)
    for word, after in (("PENDING", "queued"), ("COMPLETING", "failed"), ("CANCELLED", "failed")):
        queue(slurm, word)
        state = state_by_slurm(elsewhere)
        assert state.state == after
    assert (state.cause, state.code) == ("killed by SIGKILL", 1)
    slurm.put("squeue")
    assert state_by_slurm(elsewhere).state == "failed", "Slurm has the job no more"
    slurm.put("squeue", "exit 1")
    assert state_by_slurm(elsewhere).state == "restarting", "nobody can tell, and it is not late"


def test_of_a_leader_in_the_foreground_an_older_jobs_end_says_nothing(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    attempt = Attempt(tmp_path, host="node1", job="7").decide()
    attempt.place = {}
    del attempt.facts["job"]
    attempt.start(1)
    attempt.decide()
    queue(slurm, "CANCELLED")
    assert state_by_slurm(attempt.run).state == "restarting"


def test_status_shows_the_reason_and_the_time_left_and_logs_says_when(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    Attempt(tmp_path, job="7").decide()
    queue(slurm, "RUNNING")
    page = orchestra("status", "one").out
    assert page.splitlines()[1].split()[:2] == ["one", "restarting"]
    assert f"reason  {REASON}" in page
    assert "restart in " in page
    assert "`orchestra logs one -f`" in page
    assert orchestra("why", "one").out.startswith(f"one: restarting: {REASON}")
    assert f"note: one: restarting (job 7): {REASON}; the next attempt" in orchestra("logs", "one").err
    (shown,) = orchestra.json("status", "one")
    assert (shown["state"], shown["restart"]["reason"]) == ("restarting", REASON)


def test_cancel_asks_the_attempt_that_failed_and_only_once(
    waiting: RunDir, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    assert "one: asked not to begin again after attempt 0; " in orchestra("cancel", "one").out
    (request,) = stop_requests.read_requests(waiting, 0)
    assert request.reason == stop_requests.CANCEL
    assert "was asked to stop 0s ago already" in orchestra("cancel", "one").out
    assert take_next(waiting) == 1
    ((plan,), _) = cancellations([waiting], time.time())
    assert (plan.attempt, plan.way) == (1, Way.request), "the attempt that the leader makes ready"


def test_a_waiting_leader_is_asked_and_a_silent_one_ended_with_its_job(
    elsewhere: RunDir, slurm: FakeSlurm
) -> None:
    queue(slurm, "RUNNING")
    for later_s, at_once, way in ((0, True, Way.request), (9000, False, Way.request), (9000, True, Way.kill)):
        ((plan,), _) = cancellations([elsewhere], time.time() + later_s, at_once=at_once)
        assert (plan.state, plan.attempt, plan.way) == ("restarting", 0, way)


@pytest.mark.parametrize("job", [None, "7"])
def test_a_restarting_run_is_not_resumed(tmp_path: Path, slurm: FakeSlurm, job: str | None) -> None:
    run = Attempt(tmp_path, job=job).decide().run
    queue(slurm, "RUNNING")
    now = time.time()
    with pytest.raises(ConfigError, match=r"is restarting after attempt 0: .* begins by itself"):
        plan_resume(run, [], CPU, now, ask_scheduler(run, now))
    assert not list(run.control.glob("*.claim"))


def test_the_wall_time_of_a_restarting_run_goes_on(waiting: RunDir) -> None:
    events, now = read_events(waiting), time.time() + 200
    going = read_accounts(waiting, events, [], RunPhase.restarting, now)
    over = read_accounts(waiting, events, [], RunPhase.failed, now)
    assert going.wall_s == pytest.approx(over.wall_s + 200, abs=30)


FOLLOW = "from orchestra.cli import main; raise SystemExit(main(['logs', 'one', '-f']))"
WAIT = """
import sys
from pathlib import Path
from orchestra.run.paths import RunDir
from orchestra.submit import wait
wait._ASK_S = 0.2
(result,) = wait.wait_for([RunDir(Path('runs/one').resolve())], 'loss')
print(result.state)
"""


@pytest.mark.parametrize(("script", "last_word"), [(FOLLOW, "note"), (WAIT, "stopped")])
def test_who_follows_or_waits_goes_on_until_the_run_is_over(
    tmp_path: Path, slurm: FakeSlurm, script: str, last_word: str
) -> None:
    attempt = Attempt(tmp_path).decide()
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    words, pipe = [sys.executable, "-c", script], subprocess.PIPE
    follower = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True)
    assert follower.stderr is not None
    assert any("restarting" in line for line in follower.stderr), "it says what it waits for"
    assert follower.poll() is None
    attempt.fail(code=75)
    out, err = follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert last_word in out + err
