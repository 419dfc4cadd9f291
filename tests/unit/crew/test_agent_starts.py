"""A node's agent that is killed is started again: not for ever, but a long life makes up for earlier ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The agent writes down that it lives, and is killed so often.
_NODE = """
import os, sys
from pathlib import Path
from orchestra.crew import __main__ as node

place, num_deaths = Path(sys.argv[1]), int(sys.argv[2])
node._LONG_LIFE_S = float(sys.argv[3])

def work(argv, signals):
    with place.open("a") as file:
        file.write("x")
    if len(place.read_text()) <= num_deaths:
        os.kill(os.getpid(), 9)
    return 0

node._work = work
sys.exit(node.main([]))
"""


@pytest.mark.parametrize(
    ("num_deaths", "long_life_s", "num_starts", "code"),
    [(0, 600, 1, 0), (4, 600, 5, 0), (5, 600, 5, 1), (8, 0, 9, 0)],
)
def test_deaths_count_until_an_agent_lives_for_long(
    tmp_path: Path, num_deaths: int, long_life_s: int, num_starts: int, code: int
) -> None:
    place = tmp_path / "lives"
    words = [sys.executable, "-c", _NODE, str(place), str(num_deaths), str(long_life_s)]
    done = subprocess.run(words, env=os.environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stderr
    assert len(place.read_text()) == num_starts
    assert ("is not started again" in done.stderr) == (code == 1)
