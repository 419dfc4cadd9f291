"""Finding and signalling real processes, and the tether that ends them with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from fork_trials import eventually

from launchers import processes


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """A shell with a child of its own session below it; both carry a mark."""
    process = subprocess.Popen(
        ["sh", "-c", "setsid sleep 60 & wait"], env={**os.environ, "TEST_MARK": str(os.getpid())}
    )
    assert eventually(lambda: len(processes.children(process.pid)) == 1)
    yield process
    processes.send(processes.children(process.pid), signal.SIGKILL)
    process.kill()
    process.wait()


def test_a_child_is_found_in_a_session_of_its_own_and_by_its_mark_when_its_parent_is_gone(
    family: subprocess.Popen[bytes],
) -> None:
    orphan = processes.children(family.pid)[0]
    assert eventually(lambda: os.getsid(orphan.pid) != os.getsid(family.pid))
    family.kill()
    family.wait()
    assert orphan in processes.marked(f"TEST_MARK={os.getpid()}")
    processes.send([orphan], signal.SIGKILL)
    assert eventually(lambda: not processes.is_alive(orphan))
    assert processes.marked(f"TEST_MARK={os.getpid()}") == []


def test_a_zombie_is_gone_and_a_reused_id_is_another_process() -> None:
    process = subprocess.Popen(["sleep", "60"])
    found = processes.find(process.pid)
    assert found is not None
    assert not processes.is_alive(processes.Process(found.pid, found.started - 1))
    process.kill()
    assert eventually(lambda: not processes.is_alive(found))
    process.wait()


def test_ignored_signals_are_seen() -> None:
    process = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 60"])
    try:
        found = processes.find(process.pid)
        assert found is not None
        assert eventually(lambda: processes.ignores(found, signal.SIGTERM))
        # Not SIGINT: a shell without job control ignores it in whatever it starts with `&`, tests included.
        assert not processes.ignores(found, signal.SIGALRM)
    finally:
        processes.send(processes.children(process.pid), signal.SIGKILL)
        process.kill()
        process.wait()


def test_a_tethered_command_dies_with_its_parent_and_ignores_the_schedulers_signals() -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "tether = [sys.executable, '-m', 'launchers.processes', str(os.getpid()), '/bin/sleep', '60']\n"
        "child = subprocess.Popen(tether, start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent.stdout:
        child = processes.find(int(parent.stdout.readline()))
    assert child is not None
    try:
        assert eventually(lambda: processes.ignores(child, signal.SIGUSR2))
        assert processes.ignores(child, signal.SIGTERM)
        assert processes.ignores(child, signal.SIGUSR1)
    finally:
        parent.kill()
        parent.wait()
    assert eventually(lambda: not processes.is_alive(child))


def test_a_tether_whose_parent_is_already_gone_starts_nothing() -> None:
    command = [sys.executable, "-m", "launchers.processes", "1", "/bin/echo", "started"]
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stdout) == (127, b"")
