"""`orchestra top` in a terminal of 80 × 24 that tmux keeps, and into a pipe."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.run_records import led_here

from conf.schema import Config
from orchestra.alerts.observed import NodeBeat, ObservedRun
from orchestra.cli.look.top_command import Top
from orchestra.cli.look.top_page import RunView, run_page
from orchestra.report.run_state import RunState
from orchestra.run.config_file import write_config
from orchestra.run.control.stop_requests import read_requests
from orchestra.run.events import EventWriter
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
# A command's start, on a busy machine.
LIMIT_S = 60.0


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """Two runs: one that this process leads and that trains, and one that failed."""
    monkeypatch.chdir(tmp_path)
    led_here(RunDir(tmp_path / "runs" / "broken"), ended=1)
    run = led_here(RunDir(tmp_path / "runs" / "first"))
    write_config(run.config, Config())
    EventWriter(run, "attempt-000.rank-00000", 0, rank=0).write("training_started", world_size=1)
    metrics, now = JsonLinesWriter(run.metrics), time.time()
    for step in range(1, 41):
        speed = {"tokens_per_s": 123e3, "mfu": 0.412, "step_time_s": 1.0}
        metrics.write({"step": step, "time": now - 40 + step, "loss": 5.0 - step / 20, "attempt": 0, **speed})
    run.heartbeats.mkdir()
    beat = (
        f'{{"time": {now}, "attempt": 0, "node": 0, "host": "node1", "phases": {{"forward": [0, 1, 2, 5]}}}}'
    )
    run.heartbeat(0).write_text(beat)
    return run


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Keys into `orchestra top` and, once `until` is in it, its screen, in tmux with a server of its own."""
    server = ["tmux", "-S", str(tmp_path / "tmux"), "-f", "/dev/null"]
    typed = f"PYTHONPATH={ROOT} LC_ALL=C.UTF-8 {sys.executable} -m orchestra top; echo ended with $?; cat"
    size = ["-x", "80", "-y", "24"]
    session = [*server, "-u", "new-session", "-d", *size, typed]
    subprocess.run(session, cwd=tmp_path, check=True, timeout=LIMIT_S)

    def screen() -> str:
        shown = [*server, "capture-pane", "-p"]
        return subprocess.run(shown, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout

    def press(*keys: str, until: str) -> str:
        if keys:
            subprocess.run([*server, "send-keys", *keys], check=True, timeout=LIMIT_S)
        assert eventually(lambda: until in screen(), LIMIT_S), screen()
        return screen()

    try:
        yield press
    finally:
        subprocess.run([*server, "kill-server"], check=True, timeout=LIMIT_S)


def test_keys_open_a_run_ask_before_they_cancel_it_and_leave_the_terminal_as_it_was(
    first: RunDir, terminal: Callable[..., str]
) -> None:
    listed = terminal(until="q quit")
    assert "1 failed" in listed
    lines = listed.splitlines()
    (row,) = [line for line in lines if line.startswith("first ")]
    assert all(word in row for word in ("running", "40/100", "3.000", "123k", "█", "▁"))
    down = ["j"] if lines.index(row) > 2 else []
    page = terminal(*down, "Enter", until="goodput")
    assert "123k tok/s  plan n/a  MFU 41.2%" in page
    assert "0 node1" in page
    assert "forward 0-2, 5" in page
    assert "training_started" in page
    assert len(page.splitlines()) <= 24
    assert max(map(len, page.splitlines())) <= 80

    terminal("c", until="cancel first? y: yes")
    terminal("n", until="l logs")
    assert read_requests(first, 0) == []
    terminal("w", until="orchestra why first")
    terminal("b", until="goodput")
    terminal("c", until="cancel first? y: yes")
    terminal("y", until="asked to save and stop")
    assert [request.reason for request in read_requests(first, 0)] == ["cancel"]
    terminal("b", until="goodput")
    left = terminal("q", until="ended with 0")
    assert "goodput" not in left, "the screen is the one from before"


def test_a_signal_that_ends_it_leaves_the_terminal_as_it_was(
    first: RunDir, terminal: Callable[..., str], tmp_path: Path
) -> None:
    terminal(until="q quit")
    server = ["tmux", "-S", str(tmp_path / "tmux")]
    asked = [*server, "list-panes", "-F", "#{pane_pid}"]
    shell = int(subprocess.run(asked, capture_output=True, check=True, timeout=LIMIT_S).stdout)
    (top,) = map(int, Path(f"/proc/{shell}/task/{shell}/children").read_text().split())
    os.kill(top, signal.SIGTERM)
    assert "q quit" not in terminal(until="ended with 130")


def test_into_a_pipe_it_prints_plain_text_once(orchestra: CommandLine, first: RunDir, tmp_path: Path) -> None:
    odd = led_here(RunDir(tmp_path / "runs" / "odd\x1b[31m"), ended=1)
    EventWriter(first, "attempt-000.node-000", 0).write("rank_failed", rank=1, cause="\x1b[2Jwiped\r\x9b1m")
    everything = orchestra("top").out
    assert "broken" in everything
    assert "first" in everything
    assert "odd [31m" in everything
    one = orchestra("top", "first").out
    assert all(word in one for word in ("step ", "loss ", "speed ", "saved ", "nodes ", "node1"))
    assert "cause  [2Jwiped" in one
    top = Top(tmp_path / "runs", odd)
    top.read()
    top.press("c", 24, lambda _: [])
    asked = [text for _, text in top.page(80, 24, has_blocks=True)]
    assert asked[-1].startswith("cancel odd [31m? y: yes")
    for text in (*everything.split("\n"), *one.split("\n"), *asked):
        assert text.isprintable()


def test_a_run_that_is_removed_while_it_is_shown_is_told_and_left(first: RunDir, tmp_path: Path) -> None:
    top = Top(tmp_path / "runs", first)
    top.read()
    assert any("40/" in text for _, text in top.page(80, 24, has_blocks=True))
    shutil.rmtree(first.path)
    top.read()
    page = [text for _, text in top.page(80, 24, has_blocks=True)]
    assert page[0].startswith("first ")
    assert page[1] == "its records are gone: it was removed or renamed"
    top.press("b", 24, lambda _: [])
    listed = "\n".join(text for _, text in top.page(80, 24, has_blocks=True))
    assert "broken" in listed
    assert "first" not in listed


@pytest.mark.parametrize("height", [8, 24, 50])
def test_a_page_never_exceeds_the_terminal_and_shows_silent_nodes_first(height: int) -> None:
    beats = [NodeBeat(n, f"node{n}", 1000.0 - (90 if n == 77 else 1), {}, 0.0) for n in range(100)]
    events = [{"time": 900.0 + n, "attempt": 0, "event": "x\x1b[31m", "cause": "y" * 200} for n in range(99)]
    start = {"time": 1.0, "attempt": 0, "event": "attempt_started", "nodes": 100}
    observed = ObservedRun("big", 1000.0, RunPhase.running, events=[start, *events], nodes=beats)
    state = RunState("big", "/nowhere/big", RunPhase.running, attempts=1)
    lines = run_page(RunView(state, observed), 80, height, has_blocks=True)
    assert len(lines) == height
    assert all(len(text) <= 80 and text.isprintable() for _, text in lines)
    if height >= 24:
        (at,) = [index for index, (_, text) in enumerate(lines) if "node77" in text]
        assert lines[at][1].startswith("nodes")
        assert any("more nodes, 0 of them silent" in text for _, text in lines)
