"""Stacks of a real process that writes them as slowly as one does on a machine with other work."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launchers import process_stacks, processes
from launchers.process_stacks import StackRequest, write_stacks

# Three frames, between which it gets no processor.
_SLOW = """
import signal, sys, time
def answer(*_):
    with open(sys.argv[1], "a") as file:
        for frame in ("in first", "in second", "in third"):
            print(frame, file=file, flush=True)
            time.sleep(0.3)
signal.signal(signal.SIGUSR1, answer)
print("ready", flush=True)
while True:
    time.sleep(60)
"""


def test_stacks_that_are_written_slowly_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that a process which is starved besides is not taken for one that is through.
    monkeypatch.setattr(process_stacks, "_REST_S", 2.0)
    monkeypatch.setattr(process_stacks, "_LONGEST_S", 30.0)
    answer, target = tmp_path / "answer", tmp_path / "stacks"
    with subprocess.Popen(
        [sys.executable, "-c", _SLOW, str(answer)], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            process = processes.find(child.pid)
            assert process is not None
            request = StackRequest(process, answer, target, is_suspect=True, title="rank 1")
            assert write_stacks({1: request}, signal.SIGUSR1) == {1: target}
        finally:
            child.kill()
    title, *frames = target.read_text().splitlines()
    assert title.endswith("rank 1")
    assert frames[:3] == ["in first", "in second", "in third"]
