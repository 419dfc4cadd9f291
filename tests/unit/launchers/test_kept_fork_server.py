"""A fork server outlives killed agents, and what was forked for them does not; one that fails is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_trials import Trial, environment, eventually, written

from launchers import processes
from launchers.fork_server.owner import OwnServer, ServerSettings
from launchers.processes import Process

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
    left = [it.pid for it in Trial(modules, "first").remaining()] if life else []
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
        found = json.loads(file.read_text())
        assert isinstance(found, dict)
        return found

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
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_stopped_or_killed_server_is_replaced_and_spares_nothing_that_it_forked(
    node: Node, number: signal.Signals
) -> None:
    server, agent = node.process(0, "server"), node.process(0, "agent")
    assert eventually(node.first.is_up)
    if number == signal.SIGKILL:
        # First the agent, or it would see the attempt's end.
        processes.send([agent], signal.SIGSTOP)
    processes.send([server], number)
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
    assert eventually(lambda: not any(processes.is_alive(it) for it in own))
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
    finally:
        assert owner.pid is not None
        owner.end(owner.pid)
    assert owner.exit_code(third.pid) == -signal.SIGKILL
