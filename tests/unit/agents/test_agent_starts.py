"""A node's agent that is killed is started again: not for ever, but a long life makes up for earlier ends.

One that stands still ends itself, and is started again too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# A node's first process, whose agent does this `work` instead of its own.
_NODE = """
import os, signal, sys, time
from pathlib import Path
from launchers import node_group
from orchestra.agents import __main__ as node, agent
{}
node._work = work
sys.exit(node.main([]))
"""


def ended(work: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run a node's first process to its end."""
    command = [sys.executable, "-c", _NODE.format(work), *map(str, words)]
    return subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False, timeout=120)


# The agent writes down that it lives, and is killed so often.
_KILLED = """
place, num_deaths = Path(sys.argv[1]), int(sys.argv[2])
node._LONG_LIFE_S = float(sys.argv[3])

def work(argv, signals, owner):
    with place.open("a") as file:
        file.write("x")
    if len(place.read_text()) <= num_deaths:
        os.kill(os.getpid(), 9)
    return 0
"""


@pytest.mark.parametrize(
    ("num_deaths", "long_life_s", "num_starts", "code"),
    [(0, 600, 1, 0), (4, 600, 5, 0), (5, 600, 5, 1), (8, 0, 9, 0)],
)
def test_deaths_count_until_an_agent_lives_for_long(
    tmp_path: Path, num_deaths: int, long_life_s: int, num_starts: int, code: int
) -> None:
    place = tmp_path / "lives"
    done = ended(_KILLED, place, num_deaths, long_life_s)
    assert done.returncode == code, done.stderr
    assert len(place.read_text()) == num_starts
    assert ("is not started again" in done.stderr) == (code == 1)


# The first agent never comes back from its work, though its other threads go on.
_STANDING_STILL = """
place = Path(sys.argv[1])
node_group._LEAST_STALL_S, node_group._STALL_TIMEOUTS = 1.0, 0

def work(argv, signals, owner):
    me = node_group.NodeGroup(place, 0, 1, 10.0, agent._end_this_agent)
    me.join("host", "127.0.0.1", {})
    with (place / "lives").open("a") as file:
        file.write("x")
    me.progress()
    if len((place / "lives").read_text()) == 1:
        time.sleep(600)
    me.leave()
    return 0
"""


def test_an_agent_that_stands_still_ends_itself_and_is_started_again(tmp_path: Path) -> None:
    done = ended(_STANDING_STILL, tmp_path / "crew")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "crew" / "lives").read_text() == "xx"
    assert "stands still" in done.stderr
    assert "was killed by signal 9" in done.stderr
    # Where it stood.
    assert "in work" in done.stderr


# The job is warned while the node's first process still imports.
_EARLY = """
def work(argv, signals, owner):
    deadline = time.monotonic() + 30
    while not signals.count() and time.monotonic() < deadline:
        time.sleep(0.01)
    return {"SIGUSR2": 7}.get(signals.first, 1)

node.importlib.import_module = lambda name: os.kill(os.getpid(), signal.SIGUSR2)
"""


def test_a_signal_that_comes_before_there_is_an_agent_is_handed_on() -> None:
    assert ended(_EARLY).returncode == 7
