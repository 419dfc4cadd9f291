"""Agents whose nodes are processes of this machine: `python local_agents.py RUN_DIR NODE NUM_NODES`.

Each finds in its own environment what makes nodes differ: TMPDIR is one of the places that a node looks at,
and with LOSE_TMPDIR it goes away as soon as an attempt is on.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup
from orchestra.agents.agent import attend, group_folder
from orchestra.agents.context import AgentContext
from orchestra.agents.foreground import Foreground
from orchestra.agents.node_check.own_check import node_check_of
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir


class Node(Foreground):
    """One of several nodes on this machine."""

    @property
    def host(self) -> str:
        return f"node{int(sys.argv[2]) + 1}"


def main() -> int:
    """Be one node's agent to the end."""
    run, node, num_nodes = RunDir(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    config = read_config(run.config)
    with StopRequests() as signals:
        group = NodeGroup(group_folder(run.control, "here", 0), node, num_nodes, 15.0)
        node_check = node_check_of(config, run, group)
        context = AgentContext(run, config, group, signals, Node(), _say, node_check=node_check)
        return attend(context, tick=_tick).code


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _tick(attempt: int) -> None:
    if attempt >= 0 and "LOSE_TMPDIR" in os.environ and (place := Path(os.environ["TMPDIR"])).exists():
        place.rmdir()


if __name__ == "__main__":
    sys.exit(main())
