"""What a fork server refuses and why, how a worker launcher does without it, their messages, and its life.

A server outlives killed agents, and what was forked for them does not; one that fails is replaced.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_trials import Trial, environment, eventually, written

from launchers import processes
from launchers.fork_server import client, wire
from launchers.fork_server.client import WORKER_LAUNCHER, ForkServer, StartRefused
from launchers.fork_server.owner import OwnServer, ServerSettings
from launchers.fork_server.server import differing
from launchers.processes import Process


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave torch out: what is refused here does not depend on it, and it takes seconds."""
    monkeypatch.setattr(client, "_ALWAYS", ())


def _server(folder: Path, body: str, owner: OwnServer | None = None) -> ForkServer:
    (folder / "early.py").write_text(body)
    fork_server = ForkServer(("early",), environment(folder), folder / "logs" / "server.log", owner)
    fork_server.start()
    return fork_server


def _refused(fork_server: ForkServer, folder: Path, reason: str, **variables: str) -> None:
    """Have something forked, which is refused for a reason."""
    settings = {**os.environ, **environment(folder), **variables}
    with (folder / "log").open("wb") as log, pytest.raises(StartRefused, match=reason):
        fork_server.popen(("early",), settings, log)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A socket in the place of a server's, and its name."""
    name = f"launchers-test-{os.getpid()}-{tmp_path.name}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("\0" + name)
        listening.listen()
        yield name, listening


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
        _refused(fork_server, tmp_path, reason)
    finally:
        fork_server.close()


def test_an_importing_server_refuses_and_a_closed_one_is_gone(tmp_path: Path) -> None:
    fork_server = _server(tmp_path, "import time; time.sleep(60)")
    assert fork_server.pid is not None
    server = processes.find(fork_server.pid)
    assert server is not None
    _refused(fork_server, tmp_path, "still importing")
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
            _refused(fork_server, tmp_path, "has 2 threads")
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
        _refused(fork_server, tmp_path, "another OMP_NUM_THREADS", OMP_NUM_THREADS="2")
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
    listener: tuple[str, socket.socket], answers: list[tuple[int, int]], code: int
) -> None:
    # As torchrun's children are: deaf to what Slurm sends to all.
    launcher = subprocess.Popen(
        [*WORKER_LAUNCHER, "somebody"],
        env={**os.environ, wire.SOCKET_VARIABLE: listener[0]},
        preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    )
    channel, _ = listener[1].accept()
    with channel:
        request = wire.receive(channel)
        assert request is not None
        assert (request[0]["arguments"], request[0]["torchrun"]) == (["somebody"], os.getpid())
        for file in request[1]:
            os.close(file)
        for kind, number in answers:
            wire.send_pair(channel, kind, number)
            if kind == wire.FORKED:
                # This process is its parent, as torchrun would be.
                launcher.send_signal(signal.SIGTERM)
                assert wire.receive_pair(channel) == (wire.SIGNAL, signal.SIGTERM)
    assert launcher.wait(30) == code


def test_a_strangers_signal_is_not_passed_on(listener: tuple[str, socket.socket]) -> None:
    variables = {**os.environ, wire.SOCKET_VARIABLE: listener[0]}
    launcher = subprocess.Popen([*WORKER_LAUNCHER, "somebody"], env=variables)
    channel, _ = listener[1].accept()
    with channel:
        assert wire.receive(channel) is not None
        wire.send_pair(channel, wire.FORKED, 1)
        subprocess.run(["sh", "-c", f"kill -TERM {launcher.pid}"], check=True)
        assert processes.find(launcher.pid) is not None
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
        log = tmp_path / "logs" / "server.log"
        assert eventually(lambda: "its torchrun is not of this fork server" in log.read_text())
    finally:
        fork_server.close()


# A node's real keeper. Its agent trains a module, the first one until it is killed: it says what it found.
_NODE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fork_trials import Trial, environment
from launchers.fork_server import client
from orchestra.agents import __main__ as node

client._ALWAYS = ()
modules = Path(sys.argv[2])

def work(argv, signals, server):
    life = len(list(modules.glob("life-*")))
    fork_server = client.ForkServer((), environment(modules), modules / "server.log", server)
    left = [process.pid for process in Trial(modules, "first").remaining()] if life else []
    fork_server.start()
    is_ready = fork_server.await_ready(60)
    told = {"agent": os.getpid(), "server": fork_server.pid, "ready": is_ready, "left": left}
    (modules / "draft").write_text(json.dumps(told))
    (modules / "draft").rename(modules / f"life-{life}")
    return Trial(modules, ("first", "second")[life]).run(fork_server).exit_code

node._work = work
sys.exit(node.main([]))
"""


@dataclass
class Node:
    """A keeper at work, and what its agents said."""

    keeper: subprocess.Popen[bytes]
    modules: Path
    first: Trial

    def told(self, life: int) -> dict[str, object]:
        file = self.modules / f"life-{life}"
        assert eventually(file.exists), f"agent {life} says nothing"
        return dict(json.loads(file.read_text()))

    def process(self, life: int, what: str) -> Process:
        pid = self.told(life)[what]
        assert isinstance(pid, int)
        found = processes.find(pid)
        assert found is not None
        return found


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    first = written(tmp_path, "first", "time.sleep(600)")
    written(tmp_path, "second", "")
    words = [sys.executable, "-c", _NODE, str(Path(__file__).parent), str(tmp_path)]
    keeper = subprocess.Popen(words, env={**os.environ, **environment(tmp_path)})
    try:
        yield Node(keeper, tmp_path, first)
    finally:
        keeper.kill()
        keeper.wait()


@pytest.mark.slow
def test_a_killed_agents_successor_forks_from_the_same_server(node: Node) -> None:
    server, agent = node.process(0, "server"), node.process(0, "agent")
    assert eventually(node.first.is_up)
    processes.send([agent], signal.SIGKILL)
    told = node.told(1)
    assert (told["server"], told["ready"], told["left"]) == (server.pid, True, [])
    assert node.keeper.wait(60) == 0
    assert "(forked)" in Trial(node.modules, "second").log.read_text()
    assert eventually(lambda: not processes.is_alive(server))


@pytest.mark.slow
def test_a_stopped_server_is_replaced_and_spares_nothing_that_it_forked(node: Node) -> None:
    server, agent = node.process(0, "server"), node.process(0, "agent")
    assert eventually(node.first.is_up)
    processes.send([server], signal.SIGSTOP)
    processes.send([agent], signal.SIGKILL)
    told = node.told(1)
    assert (told["server"] != server.pid, told["ready"], told["left"]) == (True, True, [])
    assert not processes.is_alive(server)
    assert node.keeper.wait(60) == 0


@pytest.mark.slow
def test_all_die_with_a_killed_keeper(node: Node) -> None:
    own = [node.process(0, "server"), node.process(0, "agent")]
    assert eventually(node.first.is_up)
    node.keeper.kill()
    assert eventually(lambda: not any(processes.is_alive(process) for process in own))
    assert eventually(lambda: node.first.remaining() == [])


def test_a_server_is_kept_for_who_wants_the_same_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text("")
    settings = {**os.environ, **environment(tmp_path)}
    wanted = ServerSettings(("early",), settings, str(tmp_path / "logs" / "server.log"))
    owner = OwnServer()
    first = owner.provide(wanted)
    try:
        owner.note_ready(first.pid)
        # What only a forked process reads may differ.
        again = owner.provide(ServerSettings(("early",), {**settings, "RANK": "7"}, wanted.log))
        assert (again.pid, again.was_ready) == (first.pid, True)
        other = owner.provide(ServerSettings(("early",), {**settings, "OMP_NUM_THREADS": "2"}, wanted.log))
        assert (other.pid != first.pid, other.was_ready) == (True, False)
        assert owner.exit_code(first.pid) is None
        assert processes.find(first.pid) is None
        third = owner.provide(ServerSettings((), wanted.environment, wanted.log))
        assert owner.provide(ServerSettings((), wanted.environment, wanted.log)) == third
        # One that was killed is nobody's any more.
        os.kill(third.pid, signal.SIGKILL)
        assert owner.exit_code(third.pid) == -signal.SIGKILL
        fourth = owner.provide(ServerSettings((), wanted.environment, wanted.log))
        assert (fourth.pid != third.pid, fourth.was_ready) == (True, False)
    finally:
        assert owner.pid is not None
        owner.end(owner.pid)
    assert owner.exit_code(fourth.pid) == -signal.SIGKILL
