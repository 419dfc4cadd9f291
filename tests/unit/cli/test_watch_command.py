"""`orchestra watch` as people and cron type it: what it says once, to whom, and what it ends with."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import shutil
import socketserver
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.other_file_system import other_file_system
from support.run_records import led_here, submitted_sweep
from support.waiting import eventually

from conf.schema import CheckpointConfig, Config, WandbConfig, WandbMode
from orchestra.alerts.observed import Limits
from orchestra.alerts.outlets import Printed
from orchestra.cli.look import watch_command
from orchestra.cli.look.watch_command import Watch
from orchestra.errors import EXIT_ALERT, EXIT_DONE, EXIT_UNSEEN, EXIT_USAGE
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir

# For whoever does not come, on a busy machine.
LIMIT_S = 60.0
# How full the disk is here is no matter.
DISK = ("--disk-gib", "0")
WATCH = ("watch", "first", *DISK)


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that this process leads and that trains, whose last row is an hour old."""
    monkeypatch.chdir(tmp_path)
    run = led_here(RunDir(tmp_path / "runs" / "first"))
    write_config(run.config, Config(checkpoint=CheckpointConfig(every_steps=None)))
    EventWriter(run, "attempt-000.rank-00000", 0, rank=0).write("training_started", world_size=1)
    add_rows(run, range(1, 31), time.time() - 3600)
    return run


def add_rows(run: RunDir, steps: range, last: float) -> None:
    """Append rows, a second apart, the last one at a time."""
    metrics = JsonLinesWriter(run.metrics)
    for step in steps:
        at = last - (steps[-1] - step)
        row = {"step": step, "time": at, "loss": 2.0, "step_time_s": 1.0, "tokens_per_s": 1e3, "attempt": 0}
        metrics.write(row)
    metrics.close()
    os.utime(run.metrics, (last, last))


class Posts:
    """What a web server on this machine was sent, and how it answers."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.answer = 200


@pytest.fixture
def posts() -> Iterator[tuple[Posts, str]]:
    received = Posts()

    class Handler(BaseHTTPRequestHandler):
        timeout = LIMIT_S

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if received.answer == 200:
                received.bodies.append(json.loads(body))
                received.paths.append(self.path)
            self.send_response(received.answer)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with served(HTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield received, f"http://127.0.0.1:{port}/services/secret-word"


@contextlib.contextmanager
def served(server: socketserver.TCPServer) -> Iterator[int]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_once_prints_all_that_is_wrong_each_time(orchestra: CommandLine, first: RunDir) -> None:
    for _ in range(2):
        said = orchestra(*WATCH, "--once", code=EXIT_ALERT).out
        assert "ALERT first: stall, since " in said
        assert re.search(r"step 30 was its last row 36\d\d s ago; rows came every 1 s", said)
        assert "-> `orchestra logs first`" in said
        assert "cannot see first: silence: no node wrote" not in said
        assert "cannot see first: throughput: no plan to compare with" in said
    (event,) = [event for event in read_events(first) if event["event"] == "alert_raised"]
    assert (event["key"], event["attempt"]) == ("stall", 0)


def test_a_webhook_is_told_once_and_that_it_is_over(
    orchestra: CommandLine, first: RunDir, posts: tuple[Posts, str], tmp_path: Path
) -> None:
    received, url = posts
    (tmp_path / "address").write_text(f"{url}\n")
    words = (*WATCH, "--once", "--webhook", "@address")
    for _ in range(2):
        orchestra(*words, code=EXIT_ALERT)
    (body,) = received.bodies
    assert (body["state"], body["detector"], body["run"]) == ("raised", "stall", "first")
    assert body["text"].startswith("ALERT first: stall, since ")
    add_rows(first, range(31, 51), time.time())
    assert "nothing fires" in orchestra(*words, code=EXIT_UNSEEN).out
    orchestra(*words, code=EXIT_UNSEEN)
    assert [each["state"] for each in received.bodies] == ["raised", "ended"]
    told = [path.read_text() for path in first.path.rglob("*") if path.is_file()]
    assert not any("secret-word" in text for text in told)


def test_an_outlet_that_fails_says_so_without_the_address_and_is_tried_again(
    orchestra: CommandLine, first: RunDir, posts: tuple[Posts, str]
) -> None:
    received, url = posts
    words = (*WATCH, "--once", "--webhook", url)
    for code in (503, 302, 307):
        received.answer = code
        said = orchestra(*words, code=EXIT_ALERT)
        assert f"note: first: stall was not told: webhook at 127.0.0.1: it answered {code}" in said.err
        assert "secret-word" not in said.out + said.err
    received.answer = 200
    orchestra(*words, code=EXIT_ALERT)
    orchestra(*words, code=EXIT_ALERT)
    assert len(received.bodies) == 1


def test_each_address_hears_the_beginning_and_the_end_whoever_recorded_it(
    orchestra: CommandLine, first: RunDir, posts: tuple[Posts, str]
) -> None:
    received, url = posts
    both = [(*WATCH, "--once", "--webhook", f"{url}/{name}") for name in "ab"]
    stream = io.StringIO()
    terminal = Watch(Limits(disk_free_bytes=0), [Printed(stream)])
    terminal.look([first])
    for words in both * 2:
        orchestra(*words, code=EXIT_ALERT)
    add_rows(first, range(31, 51), time.time())
    received.answer = 503
    assert "stall was not told" in orchestra(*both[0], code=EXIT_UNSEEN).err
    received.answer = 200
    for words in both * 2:
        orchestra(*words, code=EXIT_UNSEEN)
    heard = [(path[-1], body["state"]) for path, body in zip(received.paths, received.bodies, strict=True)]
    assert heard == [("a", "raised"), ("b", "raised"), ("a", "ended"), ("b", "ended")]
    terminal.look([first])
    add_rows(first, range(51, 71), time.time() - 3600)
    for _ in range(2):
        terminal.look([first])
    said = [line.split()[0] for line in stream.getvalue().splitlines() if not line.startswith(" ")]
    assert said == ["ALERT", "over:", "ALERT"]


def test_a_mail_goes_through_the_server_that_is_named(orchestra: CommandLine, first: RunDir) -> None:
    received: list[str] = []
    refusal: list[tuple[bytes, bytes]] = []

    class Session(socketserver.StreamRequestHandler):
        timeout = LIMIT_S

        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            for line in self.rfile:
                word = line[:4].upper()
                if refusal and word == refusal[0][0]:
                    self.wfile.write(refusal.pop()[1])
                    continue
                if word == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    received.append(b"".join(iter(self.rfile.readline, b".\r\n")).decode())
                self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 fine\r\n")
                if word == b"QUIT":
                    return

    with served(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session)) as port:
        smtp = ("--mail", "me@example.org", "--smtp", f"127.0.0.1:{port}")
        for word, answer, words in (
            (b"MAIL", b"530 5.7.0 log in first\r\n", "it answered 530 5.7.0 log in first (10 s"),
            (b"RCPT", b"550 unknown \xfc\x1b[31m\r\n", "it answered 550 unknown \ufffd [31m (10 s"),
        ):
            refusal.append((word, answer))
            assert words in orchestra(*WATCH, "--once", *smtp, code=EXIT_ALERT).err
        for _ in range(2):
            orchestra(*WATCH, "--once", *smtp, code=EXIT_ALERT)
    (message,) = received
    assert "Subject: orchestra alert: first: stall" in message
    assert "To: me@example.org" in message


def test_it_watches_until_the_run_ends_and_says_each_change_once(
    orchestra: CommandLine, first: RunDir
) -> None:
    def has_said(event: str) -> bool:
        return any(each["event"] == event for each in read_events(first))

    def story() -> None:
        try:
            if eventually(lambda: has_said("alert_raised"), LIMIT_S):
                add_rows(first, range(31, 51), time.time())
                eventually(lambda: has_said("alert_ended"), LIMIT_S)
        finally:
            # Whatever was said, or the watch would never end.
            end()

    def end() -> None:
        EventWriter(first, "attempt-000.node-000", 0).write("failed", node=0, code=1, cause="ValueError")

    teller = threading.Thread(target=story)
    teller.start()
    said = orchestra(*WATCH, "--every", "0.05", "--json", code=EXIT_ALERT)
    teller.join()
    lines = [json.loads(line) for line in said.out.splitlines()]
    changes = [(line["key"], line["state"]) for line in lines]
    assert changes == [("stall", "raised"), ("stall", "ended"), ("ended_badly", "raised")]


def test_wandbs_alert_needs_a_run_that_is_online(orchestra: CommandLine, first: RunDir) -> None:
    said = orchestra(*WATCH, "--once", "--wandb", code=EXIT_ALERT)
    assert "the run's wandb.mode is offline; its alerts need online" in said.err


def test_wandbs_alert_needs_a_run_that_trains(orchestra: CommandLine, first: RunDir) -> None:
    def told() -> list[tuple[str, str]]:
        changes = [event for event in read_events(first) if "wandb" in event.get("told", [])]
        return [(event["event"], event["key"]) for event in changes]

    write_config(first.config, Config(wandb=WandbConfig(mode=WandbMode.online)))
    watched = (*WATCH, "--once", "--wandb")
    assert "was not told" not in orchestra(*watched, code=EXIT_ALERT).err
    assert ("alert_raised", "stall") in told()
    before = told()
    EventWriter(first, "attempt-000.node-000", 0).write("failed", node=0, code=1, cause="ValueError")
    for _ in range(2):
        said = orchestra(*watched, code=EXIT_ALERT)
        assert "note: first: ended_badly was not told: wandb, ended_badly: the run does not train" in said.err
        assert "note: first: stall was not told" in said.err
    assert told() == before


def test_prometheus_gets_what_is_known_and_no_zero_for_what_is_not(
    orchestra: CommandLine, first: RunDir, tmp_path: Path
) -> None:
    file = tmp_path / "orchestra.prom"
    orchestra(*WATCH, "--once", "--prometheus", str(file), code=EXIT_ALERT)
    lines = file.read_text().splitlines()
    of_run = f'run="first",path="{first.path}"'
    assert f"orchestra_run_step{{{of_run}}} 30.0" in lines
    assert f'orchestra_run_alert{{{of_run},detector="stall",detail=""}} 1.0' in lines
    assert f'orchestra_run_state{{{of_run},state="running"}} 1.0' in lines
    assert not any("orchestra_run_mfu" in line for line in lines)
    assert all(re.fullmatch(r"#.*|\w+(\{.*\})? [-+.e\d]+", line) for line in lines)
    assert [path.name for path in tmp_path.iterdir() if "prom" in path.name] == ["orchestra.prom"]


def test_prometheus_gets_the_energy_by_its_own_rules(
    orchestra: CommandLine, first: RunDir, tmp_path: Path
) -> None:
    """Joules of all steps, retrained ones too, as a counter; watts only of a run that trains."""
    file = tmp_path / "orchestra.prom"

    def exported() -> list[str]:
        orchestra("watch", "first", *DISK, "--once", "--prometheus", str(file), code=EXIT_ALERT)
        return [line for line in file.read_text().splitlines() if "joules" in line or "watts" in line]

    assert exported() == []
    metrics = JsonLinesWriter(first.metrics)
    for step in (31, 32, 32):
        row = {"step": step, "time": time.time() - 3600, "energy_j": 600.0, "power_w": 75.0, "attempt": 0}
        metrics.write(row)
    metrics.close()
    # A part of the steps is not the whole, but the power now is known.
    assert [line.split()[-1] for line in exported() if line[0] != "#"] == ["75.0"]
    rows = [json.loads(line) for line in first.metrics.read_text().splitlines()]
    first.metrics.write_text("".join(json.dumps({"energy_j": 10.0, **row}) + "\n" for row in rows))
    of_run = f'{{run="first",path="{first.path}"}}'
    assert [line for line in exported() if not line.startswith("# HELP")] == [
        "# TYPE orchestra_run_energy_joules_total counter",
        f"orchestra_run_energy_joules_total{of_run} {30 * 10.0 + 3 * 600.0}",
        "# TYPE orchestra_run_gpu_power_watts gauge",
        f"orchestra_run_gpu_power_watts{of_run} 75.0",
    ]
    EventWriter(first, "attempt-000.node-000", 0, node=0).write("finished", node=0, code=0, cause="finished")
    orchestra("watch", "first", *DISK, "--once", "--prometheus", str(file))
    assert "energy_joules_total" in (text := file.read_text())
    assert "power_watts" not in text


def test_a_dry_run_sends_and_records_nothing(
    orchestra: CommandLine, first: RunDir, posts: tuple[Posts, str]
) -> None:
    received, url = posts
    before = sorted(path for path in first.path.rglob("*"))
    orchestra(*WATCH, "--once", "--dry-run", "--webhook", url, code=EXIT_ALERT)
    assert sorted(path for path in first.path.rglob("*")) == before
    assert received.bodies == []


def test_what_records_hold_cannot_draw_on_the_terminal(orchestra: CommandLine, first: RunDir) -> None:
    cause = "\x1b[2Jwiped\rover: first: \u202eall is well\nover: first: all is well"
    EventWriter(first, "attempt-000.node-000", 0).write("failed", node=0, code=1, cause=cause)
    for words in (("--once",), ("--mail", "me@example.org", "--smtp", "127.0.0.1:1")):
        said = orchestra(*WATCH, *words, code=EXIT_ALERT)
        assert "[2Jwiped over: first:  all is well over: first: all is well" in said.out
        assert all(line.isprintable() for line in (said.out + said.err).split("\n"))
        assert not any(line.startswith("over:") for line in said.out.split("\n"))


def test_a_finished_run_is_seen_whole(orchestra: CommandLine, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    led_here(RunDir(tmp_path / "runs" / "done"), ended=0)
    assert (
        "done: finished; all was seen, nothing fires"
        in orchestra("watch", "done", *DISK, "--once", code=EXIT_DONE).out
    )


def test_a_sweep_is_watched_with_its_members(
    orchestra: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = submitted_sweep(tmp_path, 3)
    led_here(sweep.member(0), ended=0)
    led_here(sweep.member(1), ended=1)
    (of_sweep, *_) = orchestra.json("watch", "lr-sweep", *DISK, "--once", "--dry-run", code=EXIT_ALERT)
    assert of_sweep["name"] == "lr-sweep"
    assert [alert["detector"] for alert in of_sweep["alerts"]] == ["sweep"]
    assert "1 of 2 members that ended went wrong" in of_sweep["alerts"][0]["evidence"]
    (_, waiting) = orchestra.json("watch", "lr-sweep", "--disk-gib", "1e9", "--once", code=EXIT_ALERT)
    assert (waiting["name"], [alert["detector"] for alert in waiting["alerts"]]) == (
        "lr-sweep/002",
        ["disk", "disk"],
    )
    assert read_events(RunDir(sweep.path), ("alert_raised",))
    assert not sweep.member(2).events.exists(), "its own to make"


_NOTED = ("sweep.json", "alerts cannot be recorded: File too large", "orchestra.prom")


def test_what_cannot_be_read_or_written_is_told_once_and_the_others_are_still_watched(
    orchestra: CommandLine, first: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep, stream = submitted_sweep(tmp_path, 1), io.StringIO()
    sweep.record.write_text("{")
    watch = Watch(Limits(disk_free_bytes=0), [Printed(stream)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, soft):
        # As on a full disk: not a byte more can be written.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            looks, goes_on = watch.look([sweep, first])
            unwritten = watch.export(tmp_path / "missing" / "orchestra.prom")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert goes_on
        assert [(each.name, bool(each.findings.alerts)) for each in looks] == [
            ("lr-sweep", False),
            ("first", True),
        ]
        assert [blind.detector for each in (looks[0], *unwritten) for blind in each.findings.unseen] == [
            "sweep",
            "prometheus",
        ]
        recorded = [event["key"] for event in read_events(first) if event["event"] == "alert_raised"]
        assert recorded == ([] if limit == 0 else ["stall"])
    assert stream.getvalue().count("ALERT first: stall") == 1
    notes = capsys.readouterr().err.splitlines()
    assert [next(i for i, note in enumerate(notes) if word in note) for word in _NOTED] == [0, 1, 2]
    assert len(notes) == len(_NOTED)
    file = str(tmp_path / "missing" / "orchestra.prom")
    said = orchestra(*WATCH, "--once", "--prometheus", file, code=EXIT_ALERT)
    assert f"note: {file}: No such file or directory" in said.err


def test_a_member_that_ends_takes_its_alert_along_and_keeps_its_numbers(
    first: RunDir, tmp_path: Path
) -> None:
    sweep, stream = submitted_sweep(tmp_path, 3), io.StringIO()
    for index in range(2):
        run = led_here(sweep.member(index))
        EventWriter(run, "attempt-000.rank-00000", 0, rank=0).write("training_started", world_size=1)
        add_rows(run, range(1, 31), time.time() - 3600)
    watch = Watch(Limits(disk_free_bytes=0), [Printed(stream)], is_exported=True)
    watch.look([sweep])
    led_here(sweep.member(1), attempt=1)
    led_here(sweep.member(0), ended=0)
    for _ in range(2):
        looks, _ = watch.look([sweep, sweep.member(0)])
        watch.export(file := tmp_path / "orchestra.prom")
        states = [line for line in file.read_text().splitlines() if line.startswith("orchestra_run_state{")]
        assert len(states) == 3
        assert f'path="{sweep.member(0).path}",state="finished"}} 1.0' in "\n".join(states)
    assert [each.name for each in looks].count("lr-sweep/000") == 1
    said = [line.split(",")[0] for line in stream.getvalue().splitlines() if "000: stall" in line]
    assert [line.split(" (")[0] for line in said] == [
        "ALERT lr-sweep/000: stall",
        "over: lr-sweep/000: stall",
    ]
    attempts = {event["event"]: event["attempt"] for event in read_events(sweep.member(1)) if "key" in event}
    assert attempts == {"alert_raised": 0, "alert_ended": 1}


def test_a_run_that_is_removed_is_said_once_and_the_others_are_watched_to_their_end(
    orchestra: CommandLine, first: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = led_here(RunDir(tmp_path / "runs" / "other"))
    story = iter(
        (
            lambda: shutil.rmtree(first.path),
            # What still writes makes the folder anew, without its records.
            lambda: first.times.mkdir(parents=True),
            lambda: led_here(other, ended=0),
        )
    )

    def sleep(_: float) -> None:
        next(story)()

    monkeypatch.setattr(watch_command.time, "sleep", sleep)
    said = orchestra("watch", "first", "other", *DISK, code=EXIT_UNSEEN)
    removed = "note: first cannot be seen: it was removed or renamed; it is watched no longer"
    assert said.err.splitlines() == [removed]
    assert next(story, None) is None


def test_a_run_that_is_removed_after_its_end_was_seen_and_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [led_here(RunDir(tmp_path / "runs" / name), ended=code) for name, code in (("a", 0), ("b", 1))]
    watch = Watch(Limits(disk_free_bytes=0), [])
    before = watch.look(runs)
    assert [len(each.findings.alerts) for each in before[0]] == [0, 1]
    for run in runs:
        shutil.rmtree(run.path)
    assert watch.look(runs) == before
    assert not watch.has_lost_one
    assert capsys.readouterr().err == ""


def unseen(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the notes about what cannot be seen; there is one about Slurm where there is none."""
    return [note for note in capsys.readouterr().err.splitlines() if " cannot be seen: " in note]


def test_sweeps_and_members_that_are_removed_are_said_once_and_not_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = submitted_sweep(tmp_path, 3)
    led_here(sweep.member(0))
    led_here(sweep.member(2), ended=0)
    # Nobody saw this one.
    shutil.rmtree(sweep.member(1).path)
    watch = Watch(Limits(disk_free_bytes=0), [])

    def notes_of_two_looks(goes_on: bool) -> list[str]:
        assert [watch.look([sweep])[1] for _ in range(2)] == [goes_on, goes_on]
        return [note.partition(" cannot")[0] for note in unseen(capsys)]

    assert notes_of_two_looks(goes_on=True) == ["note: lr-sweep/001"]
    shutil.rmtree(sweep.member(2).path)
    assert notes_of_two_looks(goes_on=True) == []
    shutil.rmtree(sweep.member(0).path)
    assert notes_of_two_looks(goes_on=False) == ["note: lr-sweep/000"]
    assert watch.has_lost_one
    watch = Watch(Limits(disk_free_bytes=0), [])
    sweep = submitted_sweep(tmp_path / "another", 1)
    led_here(sweep.member(0))
    assert notes_of_two_looks(goes_on=True) == []
    shutil.rmtree(sweep.path)
    assert notes_of_two_looks(goes_on=False) == [f"note: {sweep.path}"]
    assert watch.has_lost_one


def test_runs_and_sweeps_whose_file_system_is_away_are_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with other_file_system(tmp_path / "runs") as mounted:
        targets = [led_here(RunDir(tmp_path / "runs" / "first")), submitted_sweep(tmp_path, 1)]
        led_here(targets[1].member(0))
        watch = Watch(Limits(disk_free_bytes=0), [])
        assert watch.look(targets)[1]
        mounted.take_away()
        for _ in range(2):
            looks, goes_on = watch.look(targets)
            assert ([bool(each.findings.unseen) for each in looks], goes_on) == ([True, True], True)
        first_note, second_note = unseen(capsys)
        assert "first cannot be seen: its records are not there, and its file system may not" in first_note
        assert "lr-sweep cannot be seen: " in second_note
        mounted.bring_back()
        assert [each.state for each in watch.look(targets)[0]] == ["running", "1 running", "running"]
        shutil.rmtree(targets[0].path)
        shutil.rmtree(targets[1].path)
        assert not watch.look(targets)[1]
        assert watch.has_lost_one


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--webhook", "ftp://somewhere"), "expected an address that begins with https://"),
        (("--webhook", "https://[secret-word"), "expected an address that begins with https://"),
        (("--webhook", "https://here:secret-word/"), "expected an address that begins with https://"),
        (("--webhook", "https://here/secret-word x"), "holds a space or a control character"),
        (("--webhook", "https://here/secret-word\n"), "holds a space or a control character"),
        (("--webhook", "https://me:secret-word@here/"), "a user before its host"),
        (("--webhook", "https://here/secret-wörd"), "letters beyond ASCII"),
        (("--webhook", "@missing"), "cannot be read"),
        (("--mail", "me"), "expected an address such as"),
        (("--mail", "me@"), "expected an address such as"),
        (("--mail", "me@["), "expected an address such as"),
        (("--mail", "me@example.org", "--smtp", "here:65536"), "expected HOST or HOST:PORT"),
        (("--mail", "me@example.org", "--smtp", ":25"), "expected HOST or HOST:PORT"),
        (("--smtp", "host"), "add --mail ADDRESS"),
        (("--prometheus", "file.txt"), "node_exporter reads files that end with .prom"),
        (("--every", "0"), "expected seconds above 0"),
        (("--min-goodput", "80"), "--min-goodput 80: expected a share from 0 to 1"),
        (("--min-goodput", "nan"), "--min-goodput nan: expected a share from 0 to 1"),
        (("--disk-gib", "-1"), "--disk-gib -1: expected 0 or more"),
    ],
)
def test_wrong_options_say_what_is_expected(
    orchestra: CommandLine, first: RunDir, words: tuple[str, ...], problem: str
) -> None:
    said = orchestra(*WATCH, *words, code=EXIT_USAGE)
    assert problem in said.err
    assert "secret-word" not in said.out + said.err


def test_a_server_that_does_not_speak_http_is_told_by_the_type_of_its_failure(
    orchestra: CommandLine, first: RunDir
) -> None:
    class Session(socketserver.StreamRequestHandler):
        timeout = LIMIT_S

        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(b"secret-word of another protocol\r\n")

    with served(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Session)) as port:
        url = f"http://127.0.0.1:{port}/secret-word"
        said = orchestra(*WATCH, "--once", "--webhook", url, code=EXIT_ALERT)
    assert "stall was not told: webhook at 127.0.0.1: BadStatusLine" in said.err
    assert "secret-word" not in said.out + said.err
