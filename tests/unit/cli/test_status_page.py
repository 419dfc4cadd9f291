"""`status`, `why`, `logs` and `cancel` of runs and sweeps as people read them, with stand-ins for Slurm."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.fake_slurm import ME, FakeSlurm

from orchestra.cli import main
from orchestra.cli.text import figures
from orchestra.cli.text.listing import shortened
from orchestra.cli.text.resolve import all_sweeps, all_targets, resolve, resolve_target
from orchestra.errors import EXIT_USAGE, ConfigError
from orchestra.run.events import EventWriter, node_writer, rank_writer
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir, Sweep, SweepArray, SweepDir, SweepMember, to_json
from orchestra.run.stop_requests import read_requests

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "orchestra:aa"


@pytest.fixture
def work(tmp_path: Path, fake_slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a working directory with stand-ins for Slurm's commands that know of nothing."""
    monkeypatch.chdir(tmp_path)
    for name in ("squeue", "sacct", "scancel", "scontrol"):
        fake_slurm.put(name)
    return tmp_path


def put(work: Path, name: str, script: str) -> None:
    FakeSlurm(work / "bin").put(name, script)


def calls(work: Path, name: str) -> list[str]:
    return FakeSlurm(work / "bin").calls(name)


def sweep_of(work: Path, num_members: int, name: str = "lr-sweep") -> SweepDir:
    sweep = SweepDir(work / "runs" / name)
    now = time.time()
    job = {"token": TOKEN, "id": None, "name": name, "user": ME, "submitted": now}
    for index in range(num_members):
        run = sweep.member(index)
        run.path.mkdir(parents=True)
        record = {"sweep": name, "member": index, "pid": None, "steps": 9, "jobs": [{**job, "task": index}]}
        run.record.write_text(json.dumps(record))
    members = tuple(
        SweepMember(index, str(index), (f"optim.lr={index}e-4", f"parallelism.tp={index}"))
        for index in range(num_members)
    )
    arrays = (SweepArray(0, TOKEN, 0, tuple(range(num_members)), name, ME, now, "50"),)
    sweep.record.write_text(to_json(Sweep(name, "x", (), members, arrays, now)))
    return sweep


def end(run: RunDir, code: int, message: str = "", loss: float = 2.0) -> None:
    """Let an attempt of a run end on another host."""
    node = EventWriter(run, node_writer(0, 0), 0, host="node1")
    node.write("attempt_started", pid=1, pid_started=1)
    if code not in (0, 75):
        rank = EventWriter(run, rank_writer(0, 1), 0, rank=1)
        rank.write("failed", code=code, cause="ValueError", message=message)
    node.write("finished" if code == 0 else "failed", node=0, code=code, cause="x")
    JsonLinesWriter(run.metrics).write({"step": 9, "loss": loss})


def submitted(work: Path, name: str, job: str = "7") -> RunDir:
    run = RunDir(work / "runs" / name)
    run.job_logs.mkdir(parents=True)
    intent = {"token": f"orchestra:{name}", "id": job, "name": name, "user": ME, "submitted": time.time()}
    run.record.write_text(json.dumps({"name": name, "pid": None, "jobs": [intent]}))
    return run


def queue(work: Path, *lines: tuple[str, str, str, str]) -> None:
    """Let squeue tell of jobs: id, state, reason, name."""
    text = [
        f"{job}|{state}|{ME}|{reason}|node1|2030-01-02T03:04:05|{name}|(null)"
        for job, state, reason, name in lines
    ]
    (work / "queue").write_text("\n".join(text) + "\n")
    put(work, "squeue", f"cat {work}/queue")


def test_a_sweep_is_one_row_and_its_members_are_not_runs(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(work, 4)
    end(sweep.member(0), 0)
    end(sweep.member(1), 1)
    queue(work, ("50_2", "RUNNING", "None", "lr-sweep"), ("50_3", "PENDING", "Resources", "lr-sweep"))
    assert main(["status"]) == 0
    _, row = capsys.readouterr().out.splitlines()
    assert row == "lr-sweep  4 members: 1 finished, 1 starting, 1 queued, 1 failed"
    assert main(["status", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["name"], len(told["members"])) == ("sweep", "lr-sweep", 4)
    assert told["members"][3]["job"] == "50_3"
    assert len(calls(work, "squeue")) == 2


def test_a_sweep_by_name_is_the_table_of_its_members(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = sweep_of(work, 3)
    for index, loss in enumerate((2.0, 1.5)):
        end(sweep.member(index), 0, loss=loss)
    end(sweep.member(2), 1)
    assert main(["status", "lr"]) == 0
    head, titles, *rows, lowest, why, resume = capsys.readouterr().out.splitlines()
    assert head == "lr-sweep: 3 members: 2 finished, 1 failed"
    assert titles.split()[:5] == ["MEMBER", "lr", "tp", "STATE", "STEP"]
    assert rows[1].split()[:6] == ["001", "1e-4", "1", "finished", "9/9", "1.5000"]
    assert lowest == "lowest  lr-sweep/001 (optim.lr=1e-4 parallelism.tp=1): loss 1.5000"
    assert why == "next    `orchestra why lr-sweep`"
    assert resume == "resume  `orchestra resume lr-sweep` runs what is missing or failed"


@pytest.mark.parametrize(
    "text", ["lr-sweep/002", "lr-sweep/2", "lr/2", "runs/lr-sweep/002", "runs/lr-sweep/2"]
)
def test_a_member_is_named_in_many_ways(work: Path, text: str) -> None:
    sweep = sweep_of(work, 3)
    assert resolve(text, Path("runs")) == sweep.member(2)


def test_an_adopted_member_is_the_run_elsewhere(work: Path) -> None:
    sweep, other = sweep_of(work, 1), submitted(work, "other")
    member = SweepMember(0, "0", (), adopted=str(other.path))
    sweep.record.write_text(to_json(Sweep("lr-sweep", "x", (), (member,))))
    assert resolve("lr-sweep/0", Path("runs")) == other


def test_verbs_for_one_run_say_what_to_type_for_a_sweep(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(work, 12)
    submitted(work, "lr-run")
    assert resolve_target("lr-sweep", Path("runs")) == sweep
    run, swept = RunDir(Path("runs/lr-run")), SweepDir(Path("runs/lr-sweep"))
    assert len(all_targets(Path("runs"))) == 2
    assert set(all_targets(Path("runs"))) == {run, swept}
    assert all_sweeps(Path("runs")) == [swept]
    assert main(["logs", "lr-sweep"]) == EXIT_USAGE
    told = capsys.readouterr().err
    assert "is a sweep of 12 runs; name one of them: lr-sweep/000, lr-sweep/001, …, lr-sweep/011" in told
    with pytest.raises(ConfigError, match="has no member 12; its members are lr-sweep/000 to lr-sweep/011"):
        resolve("lr-sweep/12", Path("runs"))
    with pytest.raises(ConfigError, match="2 runs start so"):
        resolve_target("lr", Path("runs"))


def test_one_run_says_why_it_waits_where_and_what_to_type(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    submitted(work, "first")
    queue(work, ("7", "PENDING", "Resources", "first"))
    assert main(["status", "first"]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "reason  waits for nodes to become free",
        "job     7, PENDING on node1, expected to start 2030-01-02 03:04:05",
        "next    `orchestra logs first -f`",
    ]


def test_why_of_a_job_that_never_reached_our_code_shows_its_log(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(work, "first")
    (run.job_logs / "7_0_log.out").write_text("module: command not found\n")
    queue(work, ("7", "FAILED", "NonZeroExitCode", "first"))
    assert main(["why", "first"]) == 0
    head, words, log, resume = capsys.readouterr().out.splitlines()
    assert head == "first: failed: job 7 failed, and the run had not begun"
    assert words == "  module: command not found"
    assert log == "log: runs/first/logs/jobs/7_0_log.out"
    assert resume.startswith("resume  `orchestra resume first` starts again at step 1")


def test_logs_of_a_member_that_never_began_are_its_jobs(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(work, 2)
    sweep.job_logs.mkdir(parents=True)
    for task in range(2):
        (sweep.job_logs / f"50_{task}_0_log.out").write_text(f"task {task} says\n")
    assert main(["logs", "lr-sweep/1"]) == 0
    assert "task 1 says" in capsys.readouterr().out
    assert main(["why", "lr-sweep/1"]) == 0
    assert "  task 1 says\n" in capsys.readouterr().out


def test_logs_of_a_queued_run_say_what_it_waits_for(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    submitted(work, "first")
    queue(work, ("7", "PENDING", "JobHeldUser", "first"))
    assert main(["logs", "first"]) == 0
    told = capsys.readouterr().err
    assert "note: first: queued (job 7): held by its user; `scontrol release 7` lets it go" in told
    assert "`orchestra logs first -f` waits for it" in told


def test_followed_logs_end_when_slurm_says_that_the_job_is_over(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(work, "first")
    (run.job_logs / "7_0_log.out").write_text("module: command not found\n")
    queue(work, ("7", "NODE_FAIL", "None", "first"))
    assert main(["logs", "first", "-f"]) == 0
    out, err = capsys.readouterr()
    assert "module: command not found" in out
    assert err == (
        "note: first: died (job 7): job 7 ended as NODE_FAIL: a node failed, and the run had not begun\n"
    )


def test_why_of_a_sweep_groups_members_by_cause(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = sweep_of(work, 5)
    for index, message in ((0, "bad value\nmore"), (1, "bad value\nother"), (3, "another")):
        end(sweep.member(index), 1, message)
    end(sweep.member(2), 0)
    queue(work, ("50_4", "TIMEOUT", "None", "lr-sweep"))
    assert main(["why", "lr-sweep"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "lr-sweep: 5 members: 1 finished, 3 failed, 1 died",
        "2 × failed: ValueError: bad value",
        "  000, 001: `orchestra why lr-sweep/000`",
        "1 × failed: ValueError: another",
        "  003: `orchestra why lr-sweep/003`",
        "1 × died: the job ended as TIMEOUT: it reached its time limit, and the run had not begun",
        "  004: `orchestra why lr-sweep/004`",
        "resume  `orchestra resume lr-sweep` runs what is missing or failed",
    ]
    assert main(["why", "lr-sweep", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failed"][0]["members"] == [0, 1]


def test_waiting_members_are_cancelled_in_one_and_recorded(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(work, 4)
    waiting = [(f"50_{task}", "PENDING", "Priority", "lr-sweep") for task in range(3)]
    queue(work, *waiting, ("50_3", "RUNNING", "None", "lr-sweep"))
    put(
        work,
        "squeue",
        f'case "$*" in *--states=PENDING*) echo 50_0 50_1 50_2;; *) cat {work}/queue;; esac',
    )
    done = (("50", "CANCELLED"), ("50_3", "RUNNING"))
    lines = [f"{job}|{state}|{ME}|Priority|node1|N/A|lr-sweep|(null)\n" for job, state in done]
    (work / "after").write_text("".join(lines))
    put(work, "scancel", f"cp {work}/after {work}/queue")
    assert main(["cancel", "lr-sweep", "--dry-run"]) == 0
    assert "3 would be taken out of the queue, 1 would be asked to save" in capsys.readouterr().out
    assert calls(work, "scancel") == []
    assert main(["cancel", "lr-sweep"]) == 0
    assert "3 taken out of the queue, 1 asked to save and stop" in capsys.readouterr().out
    assert calls(work, "scancel") == ["scancel --state=PENDING 50"]
    assert [len(read_requests(sweep.member(index), 0)) for index in range(4)] == [0, 0, 0, 1]
    put(work, "squeue", "exit 1")
    main(["status", "lr-sweep", "--json"])
    (told,) = json.loads(capsys.readouterr().out)
    assert told["counts"] == {"not started": 1, "cancelled": 3}, "from the runs' own records"


def test_some_of_an_arrays_waiting_tasks_are_held_before_they_are_cancelled(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_of(work, 3)
    queue(work, *[(f"50_{task}", "PENDING", "Priority", "lr-sweep") for task in range(3)])
    begun = f'[ -e {work}/held ] && echo "50_0 50_2" || echo "50_0 50_1 50_2"'
    put(work, "squeue", f'case "$*" in *--states=PENDING*) {begun};; *) cat {work}/queue;; esac')
    put(work, "scontrol", f"touch {work}/held")
    assert main(["cancel", "lr-sweep/1", "lr-sweep/2"]) == 1
    assert calls(work, "scontrol") == ["scontrol hold 50_[1-2]", "scontrol release 50_[1]"]
    assert calls(work, "scancel") == ["scancel 50_[2]"], "a task that began meanwhile is not killed"


def test_a_queue_that_cannot_be_reached_is_said_and_the_request_is_left(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(work, "first")
    put(work, "squeue", "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1")
    assert main(["cancel", "first"]) == 1
    assert "job 7 may still wait in the queue" in capsys.readouterr().out
    assert len(read_requests(run, 0)) == 1


def test_a_run_that_is_only_being_started_is_asked_and_ended_with_now(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = submitted(work, "first")
    queue(work, ("7", "RUNNING", "None", "first"))
    assert main(["cancel", "first"]) == 0
    assert (len(read_requests(run, 0)), calls(work, "scancel")) == (1, [])
    assert main(["cancel", "first", "--now"]) == 0
    assert "job 7 was ended by Slurm" in capsys.readouterr().out
    assert calls(work, "scancel") == ["scancel 7"]


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


def test_a_terminal_of_80_columns_gets_twenty_rows_that_fit(work: Path) -> None:
    for index in range(30):
        end(submitted(work, f"debug-20260101-{index:06d}-abcdef", str(index)), 1)
    primary, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    words = [sys.executable, "-m", "orchestra", "status"]
    subprocess.run(words, env=environment, stdout=terminal, check=True)
    os.close(terminal)
    text = os.read(primary, 1 << 16).decode()
    os.close(primary)
    *table, more = text.splitlines()
    assert (len(table), more) == (21, "and 10 more (10 failed): orchestra status --all")
    assert max(map(len, table)) <= 80
