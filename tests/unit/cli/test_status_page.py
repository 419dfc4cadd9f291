"""`status`, `why`, `logs` and `cancel` of runs and sweeps as people read them, with stand-ins for Slurm."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.fake_slurm import FakeSlurm, queue_line
from support.run_records import started_elsewhere, submitted, submitted_sweep

from launchers import processes
from orchestra.cli.look.status_command import shortened
from orchestra.cli.run import sweep_here
from orchestra.cli.text import figures
from orchestra.cli.text.resolve import all_targets, resolve, resolve_target
from orchestra.errors import EXIT_USAGE, ConfigError
from orchestra.recovery.accounting import attempt_times
from orchestra.report.unwatched import beginner, begun_by_this
from orchestra.run.control.stop_requests import read_requests, user_name
from orchestra.run.events import EventWriter, node_writer, rank_writer
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir, Sweep, SweepDir, SweepMember, read_sweep, to_json
from orchestra.submit.hand_over import SweepLedger
from orchestra.submit.sweeps.members import member_states
from orchestra.submit.sweeps.submit_sweep import SweepAction, SweepResume

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def slurm(fake_slurm: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Stand-ins for Slurm's commands that know of nothing, in a working directory without runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("squeue", "sacct", "scancel", "scontrol"):
        fake_slurm.put(name)
    return fake_slurm


@pytest.fixture
def first(tmp_path: Path) -> RunDir:
    """A run that was submitted as job 7."""
    return submitted(tmp_path, "first")


def end(run: RunDir, code: int, message: str = "", loss: float = 2.0) -> None:
    """Let an attempt of a run end on another host."""
    node = started_elsewhere(run)
    if code not in (0, 75):
        rank = EventWriter(run, rank_writer(0, 1), 0, rank=1)
        rank.write("failed", code=code, cause="ValueError", message=message)
    node.write("finished" if code == 0 else "failed", node=0, code=code, cause="x")
    JsonLinesWriter(run.metrics).write({"step": 9, "loss": loss})


def queue(slurm: FakeSlurm, *jobs: tuple[str, str, str], name: str = "lr-sweep") -> None:
    """Let squeue tell of jobs: id, state, reason."""
    when = "2030-01-02T03:04:05"
    lines = [
        queue_line(job, state, name, reason=reason, start=when, token="(null)") for job, state, reason in jobs
    ]
    slurm.says("squeue", prints="\n".join(lines))


def test_a_sweep_is_one_row_and_its_members_are_not_runs(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    sweep = submitted_sweep(tmp_path, 4)
    end(sweep.member(0), 0)
    end(sweep.member(1), 1)
    queue(slurm, ("50_2", "RUNNING", "None"), ("50_3", "PENDING", "Resources"))
    _, row = orchestra("status").out.splitlines()
    assert row == "lr-sweep  4 members: 1 finished, 1 starting, 1 queued, 1 failed"
    (state,) = orchestra.json("status")
    assert (state["kind"], state["name"], len(state["members"])) == ("sweep", "lr-sweep", 4)
    assert state["members"][3]["job"] == "50_3"
    assert len(slurm.calls("squeue")) == 2


def test_a_sweep_by_name_is_the_table_of_its_members(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    sweep = submitted_sweep(tmp_path, 3)
    for index, loss in enumerate((2.0, 1.5)):
        end(sweep.member(index), 0, loss=loss)
    end(sweep.member(2), 1)
    head, titles, *rows, lowest, why, resume = orchestra("status", "lr").out.splitlines()
    assert head == "lr-sweep: 3 members: 2 finished, 1 failed"
    assert titles.split()[:5] == ["MEMBER", "lr", "tp", "STATE", "STEP"]
    assert rows[1].split()[:6] == ["001", "1e-4", "1", "finished", "9/9", "1.5000"]
    assert lowest == "lowest  lr-sweep/001 (optim.lr=1e-4 parallelism.tp=1): loss 1.5000"
    assert why == "next    `orchestra why lr-sweep`"
    assert resume == "resume  `orchestra resume lr-sweep` runs what is missing or failed"


def test_members_that_train_on_without_the_command_that_began_them_are_told(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command of a sweep on this machine was killed, and that of a member's own `resume` was not."""
    sweep = submitted_sweep(tmp_path, 3)
    said = "from orchestra.report.unwatched import begun_by_this as begun; print(*begun().values())"
    (variable,) = begun_by_this()
    gone = {variable: subprocess.check_output([sys.executable, "-c", said], text=True).strip()}
    leader = processes.find(os.getpid())
    assert leader is not None
    for index, environment in enumerate((gone, begun_by_this(), {})):
        run = sweep.member(index)
        run.record.write_text(json.dumps({**json.loads(run.record.read_text()), "jobs": []}))
        started = {"pid": leader.pid, "pid_started": leader.started, **beginner(environment)}
        EventWriter(run, node_writer(0, 0), 0).write("attempt_started", **started)
    head, *_, note = orchestra("status", "lr-sweep").out.splitlines()
    assert head == "lr-sweep: 3 members: 3 running"
    words = (
        "note    lr-sweep/000 trains on to its end by itself: the command that began it is gone; "
        "`orchestra cancel lr-sweep/000` stops it"
    )
    assert note == words
    # Who goes on with the sweep is told too.
    record = read_sweep(sweep)
    resume = SweepResume(sweep, record, (), is_here=True)
    action = SweepAction(sweep, [], member_states(sweep, record), resume=resume)
    assert sweep_here._train(action, SweepLedger(sweep, record), Namespace(json=False)) is None
    assert words in capsys.readouterr().out.splitlines()


def test_a_member_is_named_in_many_ways(tmp_path: Path, slurm: FakeSlurm) -> None:
    sweep, other = submitted_sweep(tmp_path, 3), submitted(tmp_path, "other")
    for text in ("lr-sweep/002", "lr-sweep/2", "lr/2", "runs/lr-sweep/002", "runs/lr-sweep/2"):
        assert resolve(text, Path("runs")) == sweep.member(2), text
    adopted = SweepMember(0, "0", (), adopted=str(other.path))
    sweep.record.write_text(to_json(Sweep("lr-sweep", "x", (), (adopted,))))
    assert resolve("lr-sweep/0", Path("runs")) == other


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    parent = tmp_path / "runs"
    for name in ("debug-1", "debug-12", "llama-a"):
        (parent / name).mkdir(parents=True)
        (parent / name / "run.json").write_text("{}")
    (parent / "notes").mkdir()
    (parent / ".debug-3.draft").mkdir()
    (parent / ".debug-3.draft" / "run.json").write_text("{}")
    return parent


def test_a_name_a_unique_start_and_a_path_all_work(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs.parent)
    wanted = runs / "llama-a"
    for text in ("llama-a", "ll", "runs/llama-a", str(wanted)):
        assert resolve(text, Path("runs")).path == wanted
    assert resolve("debug-1", runs).name == "debug-1", "an exact name wins over longer ones"


def test_what_names_no_run_is_refused_with_what_there_is(runs: Path) -> None:
    for text, message in (
        ("debug", r"2 runs have names that start so: .*debug-1.*type more"),
        ("lama-a", "nearest are llama-a"),
        ("日本", "newest are "),
        (str(runs / "notes"), r"neither run\.json"),
        ("./nothing", "does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve(text, runs)
    assert {run.name for run in all_targets(runs)} == {"debug-1", "debug-12", "llama-a"}


def test_no_runs_at_all(tmp_path: Path) -> None:
    assert all_targets(tmp_path / "runs") == []
    with pytest.raises(ConfigError, match="--dir"):
        resolve("x", tmp_path / "runs")
    with pytest.raises(ConfigError, match="give its path if it lies elsewhere"):
        resolve("x", tmp_path / "runs", takes_dir=False)


def test_verbs_for_one_run_say_what_to_type_for_a_sweep(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    sweep = submitted_sweep(tmp_path, 12)
    submitted(tmp_path, "lr-run")
    assert resolve_target("lr-sweep", Path("runs")) == sweep
    targets = all_targets(Path("runs"))
    assert len(targets) == 2
    assert set(targets) == {RunDir(Path("runs/lr-run")), SweepDir(Path("runs/lr-sweep"))}
    message = orchestra("logs", "lr-sweep", code=EXIT_USAGE).err
    assert "is a sweep of 12 runs; name one of them: lr-sweep/000, lr-sweep/001, …, lr-sweep/011" in message
    with pytest.raises(ConfigError, match="has no member 12; its members are lr-sweep/000 to lr-sweep/011"):
        resolve("lr-sweep/12", Path("runs"))
    with pytest.raises(ConfigError, match="2 runs have names that start so"):
        resolve_target("lr", Path("runs"))


def test_one_run_says_why_it_waits_where_and_what_to_type(
    first: RunDir, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    queue(slurm, ("7", "PENDING", "Resources"), name="first")
    assert orchestra("status", "first").out.splitlines()[2:] == [
        "reason  waits for nodes to become free",
        "job     7, PENDING on node1, expected to start 2030-01-02 03:04:05",
        "next    `orchestra logs first -f`",
    ]
    queue(slurm, ("7", "PENDING", "JobHeldUser"), name="first")
    note = orchestra("logs", "first").err
    assert "note: first: queued (job 7): held by its user; `scontrol release 7` lets it go" in note
    assert "`orchestra logs first -f` waits for it" in note


def test_a_job_that_never_reached_our_code_shows_its_log(
    first: RunDir, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    (first.job_logs / "7_0_log.out").write_text("module: command not found\n")
    queue(slurm, ("7", "FAILED", "NonZeroExitCode"), name="first")
    head, words, log, resume = orchestra("why", "first").out.splitlines()
    assert head == "first: failed: job 7 failed, and the run had not begun"
    assert words == "  module: command not found"
    assert log == "log: runs/first/logs/jobs/7_0_log.out"
    assert resume.startswith("resume  `orchestra resume first` starts again at step 1")
    queue(slurm, ("7", "NODE_FAIL", "None"), name="first")
    out, err = orchestra("logs", "first", "-f")
    assert "module: command not found" in out
    cause = "job 7 ended as NODE_FAIL: a node failed, and the run had not begun"
    assert err == f"note: first: died (job 7): {cause}\n", "it ends when Slurm says that the job is over"
    first.record.write_text("{}")
    assert "module: command not found" in orchestra("logs", "first").out, "whatever job wrote it"


def test_logs_of_a_member_that_never_began_are_its_jobs(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    sweep = submitted_sweep(tmp_path, 2)
    sweep.job_logs.mkdir(parents=True)
    for task in range(2):
        (sweep.job_logs / f"50_{task}_0_log.out").write_text(f"task {task} says\n")
    assert "task 1 says" in orchestra("logs", "lr-sweep/1").out
    assert "  task 1 says\n" in orchestra("why", "lr-sweep/1").out


def test_why_of_a_sweep_groups_members_by_cause(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    sweep = submitted_sweep(tmp_path, 5)
    for index, message in ((0, "bad value\nmore"), (1, "bad value\nother"), (3, "another")):
        end(sweep.member(index), 1, message)
    end(sweep.member(2), 0)
    queue(slurm, ("50_4", "TIMEOUT", "None"))
    assert orchestra("why", "lr-sweep").out.splitlines() == [
        "lr-sweep: 5 members: 1 finished, 3 failed, 1 died",
        "2 × failed: ValueError: bad value",
        "  000, 001: `orchestra why lr-sweep/000`",
        "1 × failed: ValueError: another",
        "  003: `orchestra why lr-sweep/003`",
        "1 × died: the job ended as TIMEOUT: it reached its time limit, and the run had not begun",
        "  004: `orchestra why lr-sweep/004`",
        "resume  `orchestra resume lr-sweep` runs what is missing or failed",
    ]
    assert orchestra.json("why", "lr-sweep")["failed"][0]["members"] == [0, 1]


def test_resume_of_a_finished_sweep_says_that_it_changes_nothing(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    slurm.put("sinfo", 'echo "main*|up|infinite|4|8|idle|(null)"')
    slurm.put("scontrol", 'echo "MaxArraySize = 1001"')
    sweep = submitted_sweep(tmp_path, 2)
    for index in range(2):
        end(sweep.member(index), 0)
    told, err = orchestra("resume", "lr-sweep", "cluster.time_limit=8:00:00")
    assert "nothing is missing: nothing was submitted" in told
    assert "note: cluster.time_limit=8:00:00 changes nothing: no member of lr-sweep is to be submitted" in err
    assert "changes nothing" not in orchestra("resume", "lr-sweep").err


def test_waiting_members_are_cancelled_in_one_and_recorded(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    sweep = submitted_sweep(tmp_path, 4)
    queue(slurm, ("50", "CANCELLED", "Priority"), ("50_3", "RUNNING", "None"))
    listed = slurm.folder / "squeue.out"
    after = listed.rename(tmp_path / "after")
    queue(slurm, *((f"50_{task}", "PENDING", "Priority") for task in range(3)), ("50_3", "RUNNING", "None"))
    slurm.put("squeue", f'case "$*" in *--states=PENDING*) echo 50_0 50_1 50_2;; *) cat {listed};; esac')
    slurm.put("scancel", f"cp {after} {listed}")
    plan = orchestra("cancel", "lr-sweep", "--dry-run").out
    assert "3 would be taken out of the queue, 1 would be asked to save" in plan
    assert slurm.calls("scancel") == []
    assert "3 taken out of the queue, 1 asked to save and stop" in orchestra("cancel", "lr-sweep").out
    assert slurm.calls("scancel") == ["scancel --state=PENDING 50"]
    assert [len(read_requests(sweep.member(index), 0)) for index in range(4)] == [0, 0, 0, 1]
    slurm.put("squeue", "exit 1")
    (state,) = orchestra.json("status", "lr-sweep")
    assert state["counts"] == {"not started": 1, "cancelled": 3}, "from the runs' own records"
    # The words hold for a member, too, that was taken off the list of a job which goes on.
    reason = f"asked for by {user_name()}, before job 50_0 took it up"
    assert reason in orchestra("status", f"{sweep.member(0).path}").out


def test_some_of_an_arrays_waiting_tasks_are_held_before_they_are_cancelled(
    tmp_path: Path, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    submitted_sweep(tmp_path, 3)
    queue(slurm, *((f"50_{task}", "PENDING", "Priority") for task in range(3)))
    begun = f'[ -e {tmp_path}/held ] && echo "50_0 50_2" || echo "50_0 50_1 50_2"'
    listed = slurm.folder / "squeue.out"
    slurm.put("squeue", f'case "$*" in *--states=PENDING*) {begun};; *) cat {listed};; esac')
    slurm.put("scontrol", f"touch {tmp_path}/held")
    orchestra("cancel", "lr-sweep/1", "lr-sweep/2", code=1)
    assert slurm.calls("scontrol") == ["scontrol hold 50_[1-2]", "scontrol release 50_[1]"]
    assert slurm.calls("scancel") == ["scancel 50_[2]"], "a task that began meanwhile is not killed"


def test_a_run_that_is_only_being_started_is_asked_and_ended_with_now(
    first: RunDir, slurm: FakeSlurm, orchestra: CommandLine
) -> None:
    queue(slurm, ("7", "RUNNING", "None"), name="first")
    orchestra("cancel", "first")
    assert (len(read_requests(first, 0)), slurm.calls("scancel")) == (1, [])
    assert "job 7 was ended by Slurm" in orchestra("cancel", "first", "--now").out
    assert slurm.calls("scancel") == ["scancel 7"]


def test_long_lists_keep_what_is_alive_then_what_is_newest() -> None:
    rows = ["done 1", "alive 1", "done 2", "done 3", "alive 2"]
    assert shortened(rows, 3, lambda row: row.startswith("alive")) == ["done 1", "alive 1", "alive 2"]
    assert shortened(rows, None, str.isupper) == rows


def test_tables_leave_out_columns_that_do_not_fit() -> None:
    rows = [("a-name", "1", "2", "3"), ("other", "a long text that goes over all columns")]
    whole = figures.fitting_table(("RUN", "B", "C", "D"), rows, None, ("C",))
    assert whole.splitlines()[2].startswith("other   a long text")
    assert figures.fitting_table(("RUN", "B", "C", "D"), rows, 12, ("C",)).splitlines()[:2] == [
        "RUN     B  D",
        "a-name  1  3",
    ]


def test_a_terminal_of_80_columns_gets_twenty_rows_that_fit(tmp_path: Path, slurm: FakeSlurm) -> None:
    for index in range(30):
        end(submitted(tmp_path, f"debug-20260101-{index:06d}-abcdef", str(index)), 1)
    primary, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    words = [sys.executable, "-m", "orchestra", "status"]
    subprocess.run(words, env=environment, stdout=terminal, check=True)
    os.close(terminal)
    *table, more = os.read(primary, 1 << 16).decode().splitlines()
    os.close(primary)
    assert (len(table), more) == (21, "and 10 more (10 failed): orchestra status --all")
    assert max(map(len, table)) <= 80


def test_a_run_that_somebody_went_on_with_was_resumed_and_not_restarted(
    orchestra: CommandLine, slurm: FakeSlurm, first: RunDir
) -> None:
    """Job 7 began again by itself, by Slurm, and in job 8, which it had asked for; 9 is somebody else's."""
    agents = [EventWriter(first, f"attempt-{attempt:03d}.node-000", attempt, node=0) for attempt in range(6)]

    def begins(attempt: int, job: str, job_start: int) -> None:
        agents[attempt].write("attempt_started", node=0, nodes=1, job=job, job_start=job_start)

    begins(0, "7", 0)
    agents[0].write("restarting", decision="restart", rule="restart_in_place", wait_s=0.0, exclude=[])
    begins(1, "7", 0)
    begins(2, "7", 1)
    agents[2].write("requeued", job="8", how="chain", reason="too few nodes")
    begins(3, "8", 0)
    agents[3].write("failed", node=0, code=1, cause="x")
    begins(4, "9", 0)
    assert "starts  5 attempts: 3 restarts, 1 resume" in orchestra("status", "first").out
    agents[4].write("requeued", job="10", how="chain", reason="too few nodes")
    # It was cancelled before that began.
    begins(5, "11", 0)
    assert "starts  6 attempts: 3 restarts, 2 resumes" in orchestra("status", "first").out


@pytest.mark.parametrize(
    ("after", "job", "is_resume"),
    [
        ("12_3", "12_3", False),
        ("12_3", "12_4", False),
        ("12_3", "13_3", True),
        (None, None, True),
        ("7", None, True),
    ],
)
def test_members_that_share_nodes_go_on_in_any_job_of_their_array(
    after: str | None, job: str | None, is_resume: bool
) -> None:
    starts = [
        {
            "event": "attempt_started",
            "time": float(number),
            "attempt": number,
            "node": 0,
            "job": name,
            "job_start": number,
        }
        for number, name in enumerate((after, job))
    ]
    before, now = attempt_times(starts, ())
    assert now.is_resume(before) is is_resume


def test_the_epoch_of_a_run_that_repeats_its_data_is_told(
    slurm: FakeSlurm, orchestra: CommandLine, tmp_path: Path
) -> None:
    run = submitted(tmp_path, "small")
    end(run, 0)
    assert "epoch" not in orchestra("status", "small").out
    assert "epoch" not in orchestra.json("status", "small")[0]
    EventWriter(run, rank_writer(0, 0), 0, rank=0).write("data_repeats", epochs={"wiki": 3.2})
    JsonLinesWriter(run.metrics).write({"step": 10, "loss": 2.0, "data/epoch": 1.2345})
    assert "data    epoch 1.23; it goes 3.2 times through wiki\n" in orchestra("status", "small").out
    assert orchestra.json("status", "small")[0]["epoch"] == 1.2345


def test_a_file_is_no_run(slurm: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"RUN \./notes.txt: it is no directory; give"):
        resolve_target("./notes.txt", tmp_path)
