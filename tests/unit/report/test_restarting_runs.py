"""A run between a failed attempt and the next one: what its records, its leader's process and Slurm tell of
it, and what the verbs make of that. Real event files, real processes, a stand-in squeue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fake_slurm import ME, FakeSlurm, queue_line

from launchers import processes
from orchestra.cli import main
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.report.accounts import read_accounts
from orchestra.report.run_state import RunState, read_state
from orchestra.report.scheduler import with_scheduler
from orchestra.run import stop_requests
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.submit.cancel_jobs import Way, cancellations
from orchestra.submit.claims import take_next
from orchestra.submit.resume_run import ask_scheduler, plan_resume

CPU = Situation("resume", num_gpus=0)
REASON = "killed by SIGKILL at step 40; on the same nodes"


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.chdir(tmp_path)
    fake_slurm.put("sacct", "exit 1")
    fake_slurm.put("squeue")
    return fake_slurm


def queue(slurm: FakeSlurm, state: str) -> None:
    slurm.says("squeue", prints=queue_line("7", state, "mine"))


def gone() -> int:
    """Return the id of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


class Attempt:
    """An attempt that failed, in the words that its leader writes."""

    def __init__(
        self,
        parent: Path,
        *,
        pid: int | None = None,
        host: str | None = None,
        job: str | None = None,
        nodes: int = 1,
    ) -> None:
        self.run = RunDir(parent / "runs" / "mine")
        self.run.path.mkdir(parents=True)
        intent = {"token": "orchestra:mine", "id": job, "name": "mine", "user": ME, "submitted": time.time()}
        jobs = [{**intent, "attempt": 0}] if job else []
        self.run.record.write_text(json.dumps({"name": "mine", "created": time.time() - 60, "jobs": jobs}))
        self.place = {} if host is None else {"host": host}
        self.pid = os.getpid() if pid is None else pid
        self.facts = {"nodes": nodes, **({} if job is None else {"job": job})}
        self.start(0)

    def start(self, number: int) -> None:
        process = processes.find(self.pid)
        self.events = EventWriter(self.run, node_writer(number, 0), number, **self.place)
        started = 1 if process is None else process.started
        self.events.write("attempt_started", node=0, pid=self.pid, pid_started=started, **self.facts)

    def fail(self, code: int = 1, **following: object) -> None:
        facts = {"cause": "killed by SIGKILL", "message": "from outside", **following}
        self.events.write("failed", node=0, code=code, **facts)

    def decide(self, decision: str = "restart", wait_s: float = 300.0) -> Attempt:
        self.fail()
        facts = {"decision": decision, "code": 1, "reason": REASON, "rule": "x", "exclude": []}
        self.events.write("restarting", **facts, wait_s=wait_s, after="killed by SIGKILL")
        return self


def state_of(run: RunDir, later_s: float = 0.0) -> RunState:
    return read_state(run, time.time() + later_s)


def told(run: RunDir, later_s: float = 0.0) -> RunState:
    ((state,), _) = with_scheduler([run], [state_of(run, later_s)])
    return state


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
    run = Attempt(tmp_path).decide(decision).run  # type: ignore[arg-type]
    assert (state_of(run).state, state_of(run).restart) == ("failed", None)
    assert state_of(run).to_json()["restart"] is None


def test_between_a_verdict_and_the_decision_the_run_is_restarting_already(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    attempt.fail(undecided=True)
    state = state_of(attempt.run)
    assert (state.state, state.cause) == ("restarting", "killed by SIGKILL")
    assert state.to_json()["restart"]["decision"] == "undecided"
    attempt.events.write("restarting", decision="give_up", code=1, reason=REASON)
    assert state_of(attempt.run).state == "failed"


def test_a_leader_that_died_before_it_could_decide_leaves_a_failed_run(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, pid=gone())
    attempt.fail(undecided=True)
    assert state_of(attempt.run).state == "failed"


def test_a_later_verdict_or_attempt_ends_the_waiting(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path).decide()
    attempt.fail(code=75)
    assert (state_of(attempt.run).state, state_of(attempt.run).restart) == ("stopped", None)
    attempt.start(1)
    assert state_of(attempt.run).state == "running"
    attempt.fail()
    assert state_of(attempt.run).state == "failed", "attempt 0's decision is not this one's"


def test_a_run_whose_leader_died_while_it_waited_failed(tmp_path: Path) -> None:
    run = Attempt(tmp_path, pid=gone()).decide().run
    assert (state_of(run).state, state_of(run).cause) == ("failed", "killed by SIGKILL")


@pytest.mark.parametrize("facts", [{"host": "elsewhere"}, {"nodes": 2, "pid": 2**22 + 1}])
def test_where_no_process_tells_the_wait_and_two_minutes_do(tmp_path: Path, facts: dict[str, object]) -> None:
    run = Attempt(tmp_path, **facts).decide(wait_s=300.0).run  # type: ignore[arg-type]
    assert state_of(run, later_s=400).state == "restarting"
    assert state_of(run, later_s=440).state == "failed"


def test_a_leader_that_took_over_is_not_sought_under_the_process_of_the_one_before(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, nodes=2)
    other = EventWriter(attempt.run, node_writer(0, 1), 0, host="elsewhere", node=1)
    other.write("failed", code=1, cause="node lost")
    other.write("restarting", decision="replace", reason=REASON, wait_s=10.0)
    assert state_of(attempt.run, later_s=100).state == "restarting"
    assert state_of(attempt.run, later_s=140).state == "failed"


def test_slurm_tells_whether_a_silent_leader_still_waits(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = Attempt(tmp_path, host="node1", job="7").decide().run
    queue(slurm, "RUNNING")
    for later_s, own in ((0.0, "restarting"), (9000.0, "failed")):
        state = told(run, later_s)
        assert state_of(run, later_s).state == own
        assert (state.state, state.cause, state.job_state) == ("restarting", REASON, "RUNNING")
    before = time.time() - 120
    for file in run.events.iterdir():
        os.utime(file, (before, before))
    for word, after in (("PENDING", "queued"), ("COMPLETING", "failed"), ("CANCELLED", "failed")):
        queue(slurm, word)
        assert told(run).state == after
    assert (told(run).cause, told(run).code) == ("killed by SIGKILL", 1)
    slurm.put("squeue", "true")
    assert told(run).state == "failed", "Slurm has the job no more"
    slurm.put("squeue", "exit 1")
    assert told(run).state == "restarting", "nobody can tell, and it is not late"


def test_of_a_leader_in_the_foreground_an_older_jobs_end_says_nothing(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    attempt = Attempt(tmp_path, host="node1", job="7").decide()
    attempt.place, attempt.facts = {}, {}
    attempt.start(1)
    attempt.decide()
    queue(slurm, "CANCELLED")
    assert told(attempt.run).state == "restarting"


def test_status_shows_the_reason_and_the_time_left_and_logs_says_when(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    Attempt(tmp_path, job="7").decide()
    queue(slurm, "RUNNING")
    assert main(["status", "mine"]) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[1].split()[:2] == ["mine", "restarting"]
    assert f"reason  {REASON}" in page
    assert "restart in " in page
    assert "`orchestra logs mine -f`" in page
    assert main(["why", "mine"]) == 0
    assert capsys.readouterr().out.startswith(f"mine: restarting: {REASON}")
    assert main(["logs", "mine"]) == 0
    assert (
        "note: mine: restarting (job 7): killed by SIGKILL at step 40; on the same nodes; the next attempt"
        in (capsys.readouterr().err)
    )
    assert main(["status", "mine", "--json"]) == 0
    (told_,) = json.loads(capsys.readouterr().out)
    assert (told_["state"], told_["restart"]["reason"]) == ("restarting", REASON)


def test_cancel_asks_the_attempt_that_failed_and_only_once(
    tmp_path: Path, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Attempt(tmp_path).decide().run
    assert main(["cancel", "mine"]) == 0
    assert "mine: asked not to begin again after attempt 0; " in capsys.readouterr().out
    (request,) = stop_requests.read_requests(run, 0)
    assert request.reason == stop_requests.CANCEL
    assert main(["cancel", "mine"]) == 0
    assert "was asked to stop 0s ago already" in capsys.readouterr().out


def test_a_waiting_leader_is_asked_and_a_silent_one_ended_with_its_job(
    tmp_path: Path, slurm: FakeSlurm
) -> None:
    run = Attempt(tmp_path, host="node1", job="7").decide().run
    queue(slurm, "RUNNING")
    for later_s, at_once, way in ((0, True, Way.request), (9000, False, Way.request), (9000, True, Way.kill)):
        ((plan,), _) = cancellations([run], time.time() + later_s, at_once=at_once)
        assert (plan.state, plan.attempt, plan.way) == ("restarting", 0, way)


def test_the_attempt_that_the_leader_makes_ready_is_asked_instead(tmp_path: Path, slurm: FakeSlurm) -> None:
    run = Attempt(tmp_path).decide().run
    assert take_next(run) == 1
    ((plan,), _) = cancellations([run], time.time())
    assert (plan.attempt, plan.way) == (1, Way.request)


@pytest.mark.parametrize("job", [None, "7"])
def test_a_restarting_run_is_not_resumed(tmp_path: Path, slurm: FakeSlurm, job: str | None) -> None:
    run = Attempt(tmp_path, job=job).decide().run
    queue(slurm, "RUNNING")
    now = time.time()
    with pytest.raises(ConfigError, match=r"is restarting after attempt 0: .* begins by itself"):
        plan_resume(run, [], CPU, now, ask_scheduler(run, now))
    assert not list(run.control.glob("*.claim"))


def test_the_wall_time_of_a_restarting_run_goes_on(tmp_path: Path) -> None:
    run = Attempt(tmp_path).decide().run
    events, now = read_events(run), time.time() + 200
    going = read_accounts(run, events, RunPhase.restarting, now)
    over = read_accounts(run, events, RunPhase.failed, now)
    assert going.wall_s == pytest.approx(over.wall_s + 200, abs=30)


FOLLOW = "import sys; from orchestra.cli import main; sys.exit(main(['logs', 'mine', '-f']))"
WAIT = """
import sys
from pathlib import Path
from orchestra.run.paths import RunDir
from orchestra.submit import wait
wait._ASK_S = 0.2
(result,) = wait.wait_for([RunDir(Path('runs/mine').resolve())], 'loss')
print(result.state)
"""


@pytest.mark.parametrize(("script", "last_word"), [(FOLLOW, "note"), (WAIT, "stopped")])
def test_who_follows_or_waits_goes_on_until_the_run_is_over(
    tmp_path: Path, slurm: FakeSlurm, script: str, last_word: str
) -> None:
    attempt = Attempt(tmp_path).decide()
    root = str(Path(__file__).resolve().parents[3])
    environment = {**os.environ, "PYTHONPATH": root}
    follower = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert follower.stderr is not None
    assert any("restarting" in line for line in follower.stderr), "it says what it waits for"
    assert follower.poll() is None
    attempt.fail(code=75)
    out, err = follower.communicate(timeout=60)
    assert follower.returncode == 0
    assert last_word in out + err
