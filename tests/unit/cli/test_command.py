"""The command itself: verbs, usage errors, what it prints, and how fast it answers."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.other_file_system import other_file_system
from support.run_records import led_here

from orchestra import __version__
from orchestra.cli.look import logs_command
from orchestra.cli.text import describe
from orchestra.errors import EXIT_USAGE
from orchestra.recovery.incidents import Verdict
from orchestra.run.events import EventWriter, node_writer, rank_writer
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir

_ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def failed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs" / "broken-1")
    run.path.mkdir(parents=True)
    run.record.write_text(json.dumps({"created": time.time()}))
    node = EventWriter(run, node_writer(0, 0), 0)
    node.write("attempt_started", pid=os.getpid())
    trace = "Traceback (most recent call last):\n  …\nValueError: bad"
    rank = EventWriter(run, rank_writer(0, 1), 0, rank=1)
    rank.write("failed", code=1, cause="ValueError", message="bad", step=4, traceback=trace)
    node.write("failed", node=0, code=1, cause="ValueError")
    JsonLinesWriter(run.metrics).write({"step": 3, "loss": 2.5, "tokens_per_s": 1234.5, "mfu": None})
    run.attempt_logs(0).mkdir(parents=True)
    run.node_log(0, 0).write_text("torchrun says\n")
    run.rank_log(0, 0).write_text("rank 0 says\n")
    run.rank_log(0, 1).write_text("rank 1 says\n")
    return run


def test_version_says_which(orchestra: CommandLine) -> None:
    assert orchestra("--version").out.strip() == f"orchestra {__version__}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stauts"], "did you mean `orchestra status`"),
        (["zzz"], "the verbs are run, submit, plan, resume, status"),
        (["--json"], "takes a verb first"),
        (["data"], "expected `orchestra data pack`"),
        (["status", "--jsn"], "unrecognized arguments: --jsn"),
        (["why"], "required: RUN"),
        (["logs", "nothing"], "there is no run"),
        (["run", "--multirun", "train.seed=1,2", "cluster=slurm"], "`orchestra submit`"),
        (["run", "-m", "train.seed=1,2", "run.name=a,b"], "run.name"),
        (["run", "--force"], "single run"),
        (["run", "--dry"], "unrecognized arguments: --dry"),
    ],
)
def test_usage_errors_end_with_2_and_one_line(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, orchestra: CommandLine
) -> None:
    monkeypatch.chdir(tmp_path)
    output = orchestra(*words, code=EXIT_USAGE)
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert message in output.err
    assert len(output.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words", [("data", "verify", "~nobody-at-all/a"), ("run", "checkpoint.dir=~nobody-at-all/a", "--dry-run")]
)
def test_the_home_of_nobody_is_a_usage_error(words: tuple[str, ...], orchestra: CommandLine) -> None:
    refused = orchestra(*words, code=2)
    named = next(word for word in words if "~" in word)
    assert refused.err.startswith(f"error: {named}: nobody here has the name after ~")


def test_status_shows_a_run_and_says_the_same_as_json(failed_run: RunDir, orchestra: CommandLine) -> None:
    header, row = orchestra("status").out.splitlines()
    assert " ".join(header.split()) == "RUN STATE STEP LOSS TOK/S MFU SAVED ATTEMPTS ETA AGE"
    assert row.split()[:9] == ["broken-1", "failed", "3/?", "2.5000", "1.23k", "n/a", "-", "1", "-"]
    (state,) = orchestra.json("status", "bro")
    assert (state["name"], state["step"], state["mfu"], state["cause"]) == ("broken-1", 3, None, "ValueError")


def test_why_names_rank_host_step_traceback_and_log(failed_run: RunDir, orchestra: CommandLine) -> None:
    text = orchestra("why", "broken-1").out
    for words in ("exit code 1", "rank 1 on ", "at step 4", "ValueError: bad", "Traceback", "rank-00001.log"):
        assert words in text
    assert orchestra.json("why", "broken-1")["verdict"]["rank"] == 1


def test_an_error_that_explains_itself_comes_without_its_traceback(
    failed_run: RunDir, orchestra: CommandLine
) -> None:
    failed_run.event_file(rank_writer(0, 1)).unlink()
    rank = EventWriter(failed_run, rank_writer(0, 1), 0, rank=1)
    trace = "Traceback (most recent call last):\n  …"
    found = {"code": 93, "cause": "UnusableCheckpointError", "message": "another model", "explained": True}
    rank.write("failed", step=0, traceback=trace, **found)
    text = orchestra("why", "broken-1").out
    assert "UnusableCheckpointError: another model\nlog: " in text
    assert "Traceback" not in text
    assert "rank 1 says" not in text
    assert orchestra.json("why", "broken-1")["verdict"]["traceback"] == trace


def test_logs_show_node_rank_0_and_the_rank_that_failed(failed_run: RunDir, orchestra: CommandLine) -> None:
    text = orchestra("logs", "broken-1").out
    said = [line for line in text.splitlines() if line.endswith("says")]
    assert said == ["torchrun says", "rank 0 says", "rank 1 says"]
    assert orchestra("logs", "broken-1", "--rank", "1", "-f").out == "rank 1 says\n"


def test_a_log_that_ends_within_a_character_is_followed_without_breaking_it(
    failed_run: RunDir, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, words = failed_run.rank_log(0, 1), "0.5 µs – 1 ms\n"
    log.write_bytes(b"")
    shutil.rmtree(failed_run.events)
    pieces = iter(bytes([byte]) for byte in words.encode())

    def grow(_: float) -> None:
        with log.open("ab") as file:
            file.write(next(pieces, b""))
        if log.stat().st_size == len(words.encode()):
            led_here(failed_run, ended=1)

    me = {"name": "broken-1", "host": socket.gethostname(), "pid": os.getpid()}
    failed_run.record.write_text(json.dumps(me))
    monkeypatch.setattr(logs_command.time, "sleep", grow)
    monkeypatch.setattr(logs_command, "_CHUNK_BYTES", 4)
    assert orchestra("logs", "broken-1", "--rank", "1", "-f").out == words
    # What a rank that was killed left of one.
    log.write_bytes(b"whole \xc3")
    assert orchestra("logs", "broken-1", "--rank", "1").out == "whole \ufffd"


def test_logs_that_do_not_exist_say_which_do(failed_run: RunDir, orchestra: CommandLine) -> None:
    assert "rank-00001.log" in orchestra("logs", "broken-1", "--rank", "7", code=EXIT_USAGE).err
    assert "attempt-000" in orchestra("logs", "broken-1", "--attempt", "2", code=EXIT_USAGE).err


def test_logs_of_a_run_that_is_removed_are_not_waited_for(
    failed_run: RunDir, orchestra: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(failed_run.events)
    me = {"name": "broken-1", "host": socket.gethostname(), "pid": os.getpid()}
    failed_run.record.write_text(json.dumps(me))
    waits: list[float] = []

    def remove(wait_s: float) -> None:
        assert len(waits) < 3
        waits.append(wait_s)
        shutil.rmtree(failed_run.path, ignore_errors=True)

    monkeypatch.setattr(logs_command.time, "sleep", remove)
    out, err = orchestra("logs", "broken-1", "-f", code=1)
    assert "rank 0 says" in out
    assert "broken-1 was removed: there is nothing more to follow" in err
    verdict = Verdict(1, "run directory removed")
    assert describe.resume_lines(failed_run, verdict, []) == [], "nothing is left to resume"


def test_logs_of_a_run_whose_file_system_is_away_are_waited_for(
    orchestra: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_file_system(tmp_path / "runs") as mounted:
        run = led_here(RunDir(tmp_path / "runs" / "first"))
        story = iter((mounted.take_away, mounted.bring_back, lambda: led_here(run, ended=0)))
        monkeypatch.setattr(logs_command.time, "sleep", lambda _: next(story)())
        orchestra("logs", str(run.path), "-f")
        assert next(story, None) is None


def test_the_command_answers_from_a_bare_checkout_and_survives_a_closed_pipe(failed_run: RunDir) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = 'cd "$1" && "$0" -m orchestra status --dir "$2" | true; echo ${PIPESTATUS[0]}'
    words = [sys.executable, str(_ROOT), str(failed_run.path.parent)]
    done = subprocess.run(["bash", "-c", program, *words], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "0"
    assert done.stderr == ""


def test_help_and_status_import_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys; from orchestra.cli import main; main(['--help']); main(['status'])\n"
        "heavy = {'torch', 'hydra', 'rich', 'numpy', 'wandb'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("redirection", "encoding", "code"),
    [(">/dev/full", "utf-8", "1"), (">&-", "utf-8", "0"), (">/dev/null", "ascii", "0"), ("", "latin-1", "0")],
)
def test_output_that_cannot_be_written_is_told_in_one_line(
    failed_run: RunDir, redirection: str, encoding: str, code: str
) -> None:
    (failed_run.path / "config.yaml").write_text("…")
    failed_run.path.rename(failed_run.path.with_name("größe-λ"))
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONIOENCODING": encoding}
    program = f'"$0" -m orchestra status --dir "$1" {redirection}; echo $?'
    words = ["bash", "-c", program, sys.executable, str(failed_run.path.parent)]
    done = subprocess.run(words, env=environment, capture_output=True)
    assert done.stdout.splitlines()[-1].decode() == code
    assert done.stderr.decode() == ("error: No space left on device\n" if code == "1" else "")


def test_what_the_mirror_missed_is_told_with_its_advice() -> None:
    failed = {"event": "wandb_failed", "cause": "the server could not be reached", "advice": "wandb sync x"}
    (line,) = describe.mirror_lines([{"event": "other"}, failed])
    assert line == "wandb   incomplete: the server could not be reached; wandb sync x"
    assert describe.mirror_lines([{"event": "finished"}]) == []
    path = f"/{'long/' * 20}run"
    *lines, last = describe.mirror_lines([{**failed, "cause": "it did not end " * 8, "advice": path}])
    assert max(map(len, lines)) <= 80
    assert last.split()[-1] == path


def test_slow_attention_is_told_with_its_advice_until_an_attempt_has_none() -> None:
    fast = {"event": "attention", "backend": "cudnn", "cudnn": 91501}
    slow = {"event": "attention", "backend": "flash", "cudnn": 91002, "cause": "old", "advice": "unset it"}
    assert describe.attention_lines([fast, slow, {"event": "finished"}]) == ["warning old; unset it"]
    assert describe.attention_lines([slow, fast]) == describe.attention_lines([]) == []


def test_a_run_of_one_step_is_told_its_rate(
    orchestra: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = "rate    3e-05: a run of one step has only its schedule's end (optim.min_lr)\n"
    one = ("run", "train.steps=1", "--dry-run")
    assert told in orchestra(*one).out
    for words in ((*one, "optim.schedule=constant"), (*one, "optim.warmup_steps=1"), ("run", "--dry-run")):
        assert "rate    " not in orchestra(*words).out


def test_no_error_shows_a_password(orchestra: CommandLine) -> None:
    place = "ftp://me:s3cr3t@127.0.0.1:1/weights"
    err = orchestra("checkpoint", "import", place, code=1).err
    assert "ftp://me:…@127.0.0.1:1/weights" in err
    assert "s3cr3t" not in err
