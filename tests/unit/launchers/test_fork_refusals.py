"""What a fork server refuses and why, how a worker launcher does without it, and their messages."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from fork_trials import environment, eventually

from launchers import processes
from launchers.fork_server import client, wire
from launchers.fork_server.client import WORKER_LAUNCHER, ForkServer, StartRefused
from launchers.fork_server.owner import OwnServer
from launchers.fork_server.server import differing


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave torch out: what is refused here does not depend on it, and it takes seconds."""
    monkeypatch.setattr(client, "_ALWAYS", ())


def _server(folder: Path, body: str, owner: OwnServer | None = None) -> ForkServer:
    (folder / "early.py").write_text(body)
    fork_server = ForkServer(("early",), environment(folder), folder / "logs" / "server.log", owner)
    fork_server.start()
    return fork_server


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise RuntimeError('no such device')", "cannot import early: RuntimeError: no such device"),
        ("import sys; sys.exit(4)", "cannot import early: SystemExit: 4"),
        ("import os; os._exit(4)", "the fork server ended with 4"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
            "the fork server has 2 threads",
        ),
    ],
)
def test_what_cannot_be_forked_from_is_refused_with_the_reason(
    tmp_path: Path, body: str, reason: str
) -> None:
    fork_server = _server(tmp_path, body)
    try:
        assert not fork_server.await_ready(60)
        with (tmp_path / "log").open("wb") as log, pytest.raises(StartRefused, match=reason):
            fork_server.popen(("early",), {**os.environ, **environment(tmp_path)}, log)
    finally:
        fork_server.close()


def test_an_importing_server_refuses_and_a_closed_one_is_gone(tmp_path: Path) -> None:
    fork_server = _server(tmp_path, "import time; time.sleep(60)")
    assert fork_server.pid is not None
    server = processes.find(fork_server.pid)
    assert server is not None
    with (tmp_path / "log").open("wb") as log, pytest.raises(StartRefused, match="still importing"):
        fork_server.popen(("early",), {}, log)
    assert not fork_server.is_ready()
    fork_server.close()
    assert not processes.is_alive(server)


LATE_THREAD = """
import signal, threading, time
def begin(number, frame): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
signal.signal(signal.SIGALRM, begin)
"""


@pytest.mark.parametrize("by", ["the agent that forks", "the next agent that calls"])
def test_a_server_that_has_begun_a_thread_is_replaced(tmp_path: Path, by: str) -> None:
    owner = OwnServer()
    fork_server = _server(tmp_path, LATE_THREAD, owner)
    try:
        assert fork_server.await_ready(60), fork_server.trouble()
        first = owner.pid
        assert first is not None
        os.kill(first, signal.SIGALRM)
        assert eventually(lambda: len(list(Path(f"/proc/{first}/task").iterdir())) == 2)
        if by == "the agent that forks":
            with (tmp_path / "log").open("wb") as log, pytest.raises(StartRefused, match="has 2 threads"):
                fork_server.popen(("early",), {**os.environ, **environment(tmp_path)}, log)
            fork_server.start()
        else:
            fork_server = _server(tmp_path, LATE_THREAD, owner)
        assert fork_server.await_ready(60), fork_server.trouble()
        assert fork_server.pid != first
        assert processes.find(first) is None
    finally:
        fork_server.close()


def test_another_environment_is_refused_before_anything_is_forked(tmp_path: Path) -> None:
    fork_server = _server(tmp_path, "")
    try:
        assert fork_server.await_ready(60), fork_server.trouble()
        other = {**os.environ, **environment(tmp_path), "OMP_NUM_THREADS": "2"}
        with (
            (tmp_path / "log").open("wb") as log,
            pytest.raises(StartRefused, match="another OMP_NUM_THREADS"),
        ):
            fork_server.popen(("early",), other, log)
        assert fork_server.pid is not None
        assert processes.children(fork_server.pid) == []
    finally:
        fork_server.close()


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "LD_PRELOAD", "PYTHONHASHSEED", "TORCH_LOGS"])
def test_a_variable_that_is_read_at_the_start_cannot_differ(name: str) -> None:
    assert differing({name: "1"}, {}) == name
    assert differing({}, {name: "1"}) == name
    assert differing({name: "1"}, {name: "2"}) == name
    assert differing({name: "1", "RANK": "1"}, {name: "1", "CUDA_VISIBLE_DEVICES": "2"}) is None


@pytest.mark.parametrize("name", [None, "launchers-of-nobody"])
def test_a_worker_launcher_without_a_server_becomes_the_worker_itself(
    tmp_path: Path, name: str | None
) -> None:
    report = "print(os.getpid(), sys.argv[1:], signal.pthread_sigmask(0, ()), flush=True)"
    (tmp_path / "alone.py").write_text(f"import os, signal, sys\n{report}\nsys.exit(6)\n")
    settings = {**os.environ, **environment(tmp_path)}
    if name is not None:
        settings[wire.SOCKET_VARIABLE] = name
    command = [*WORKER_LAUNCHER, "alone", "--word", "two words"]
    launcher = subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True)
    said, _ = launcher.communicate(timeout=60)
    assert said == f"{launcher.pid} ['--word', 'two words'] set()\n"
    assert launcher.returncode == 6


@pytest.mark.parametrize(
    ("answers", "code"),
    [
        ([(wire.FORKED, 1), (wire.ENDED, 0)], 0),
        ([(wire.FORKED, 1), (wire.ENDED, 9)], 9),
        ([(wire.FORKED, 1), (wire.ENDED, -signal.SIGABRT)], -signal.SIGABRT),
        ([(wire.FORKED, 1), (wire.ENDED, -signal.SIGTERM)], -signal.SIGTERM),
        # The server died, and with it the worker.
        ([(wire.FORKED, 1)], -signal.SIGKILL),
    ],
)
def test_a_worker_launcher_ends_as_its_worker(
    tmp_path: Path, answers: list[tuple[int, int]], code: int
) -> None:
    name = f"launchers-test-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        settings = {**os.environ, wire.SOCKET_VARIABLE: name}
        # As torchrun's children are: deaf to what Slurm sends to all.
        launcher = subprocess.Popen(
            [*WORKER_LAUNCHER, "somebody"],
            env=settings,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        )
        channel, _ = listener.accept()
        with channel:
            request = wire.receive(channel)
            assert request is not None
            assert request[0]["arguments"] == ["somebody"]
            assert request[0]["torchrun"] == os.getpid()
            for file in request[1]:
                os.close(file)
            for kind, number in answers:
                wire.send_pair(channel, kind, number)
                if kind == wire.FORKED:
                    # This process is its parent, as torchrun would be.
                    launcher.send_signal(signal.SIGTERM)
                    assert wire.receive_pair(channel) == (wire.SIGNAL, signal.SIGTERM)
        assert launcher.wait(30) == code


def test_a_strangers_signal_is_not_passed_on(tmp_path: Path) -> None:
    name = f"launchers-test-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + name)
        listener.listen()
        launcher = subprocess.Popen(
            [*WORKER_LAUNCHER, "somebody"], env={**os.environ, wire.SOCKET_VARIABLE: name}
        )
        channel, _ = listener.accept()
        with channel:
            assert wire.receive(channel) is not None
            wire.send_pair(channel, wire.FORKED, 1)
            subprocess.run(["sh", "-c", f"kill -TERM {launcher.pid}"], check=True)
            found = processes.find(launcher.pid)
            assert found is not None
            launcher.send_signal(signal.SIGINT)
            assert wire.receive_pair(channel) == (wire.SIGNAL, signal.SIGINT)
            wire.send_pair(channel, wire.ENDED, 0)
        assert launcher.wait(30) == 0


def test_a_message_arrives_whole_with_its_descriptors(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    # Larger than a socket's buffer, and with a byte that is no UTF-8.
    message = {"environment": {"LONG": "x" * (1 << 20), "ODD": os.fsdecode(b"\xff/")}}
    with ours, theirs, (tmp_path / "file").open("wb") as file:
        sender = threading.Thread(target=wire.send, args=(ours, message, (file.fileno(),)))
        sender.start()
        found = wire.receive(theirs)
        sender.join()
        assert found is not None
        assert found[0] == message
        os.write(found[1][0], b"through the copy")
        os.close(found[1][0])
        ours.close()
        assert wire.receive(theirs) is None
        assert wire.receive_pair(theirs) is None
    assert (tmp_path / "file").read_bytes() == b"through the copy"


def test_a_worker_of_somebody_elses_torchrun_is_not_forked(tmp_path: Path) -> None:
    fork_server = _server(tmp_path, "")
    (tmp_path / "alone.py").write_text("import os\nprint(os.getppid())\n")
    try:
        assert fork_server.await_ready(60), fork_server.trouble()
        settings = {**os.environ, **environment(tmp_path), wire.SOCKET_VARIABLE: fork_server.socket_name}
        done = subprocess.run(
            [*WORKER_LAUNCHER, "alone"], env=settings, capture_output=True, text=True, timeout=60
        )
        assert done.stdout == f"{os.getpid()}\n"
        assert eventually(
            lambda: (
                "its torchrun is not of this fork server" in (tmp_path / "logs" / "server.log").read_text()
            )
        )
    finally:
        fork_server.close()
