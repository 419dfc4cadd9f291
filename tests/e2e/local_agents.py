"""Agents whose nodes are processes of this machine: tests start them with `train_on_nodes`, and each is
`python local_agents.py RUN_DIR NODE NUM_NODES`.

Each finds in its own environment what makes nodes differ: TMPDIR is one of the places that a node looks at.
With NUM_GPUS it looks for so many devices too, which are those that the nvidia-smi found there tells of.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from commands import ROOT

from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup
from orchestra.agents.agent import attend, fork_server_of, group_folder
from orchestra.agents.context import AgentContext, Scheduler
from orchestra.agents.node_check.own_check import NodeCheck, ProbeProcess, node_check_of, wishes_of
from orchestra.config.compose import compose
from orchestra.config.machine import Situation, signature
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir
from orchestra.submit.new_run import RunRequest, planned_run, prepare

TIMEOUT_S = 240.0


def prepared(folder: Path, *overrides: str) -> RunDir:
    """Prepare a run for nodes with CPUs as `orchestra submit` does."""
    words = ["cluster=slurm", "cluster.device=cpu", "run.name=mine", f"run.dir={folder}", *overrides]
    config = compose(words, Situation("submit")).config
    request = RunRequest(config, signature(config), words)
    return prepare(request, planned_run(request, 0.0))


def train_on_nodes(
    run: RunDir, num_nodes: int, environments: Mapping[int, dict[str, str]], codes: list[int]
) -> list[str]:
    """Let agents train a run to the end, each with an environment of its own; they must end with these exit
    codes. Return what they printed.
    """
    agents = [
        subprocess.Popen(
            [sys.executable, __file__, str(run.path), str(node), str(num_nodes)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environments.get(node, {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(num_nodes)
    ]
    try:
        printed = [agent.communicate(timeout=TIMEOUT_S)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == codes, printed
    return printed


class Node(Scheduler):
    """One of several nodes on this machine."""

    @property
    def host(self) -> str:
        return f"node{int(sys.argv[2]) + 1}"


def main() -> int:
    """Be one node's agent to the end."""
    run, node, num_nodes = RunDir(Path(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    config = read_config(run.config)
    with StopRequests() as signals:
        timeout_s = config.recovery.agent_timeout_s
        group = NodeGroup(group_folder(run.control, "here", 0), node, num_nodes, timeout_s)
        node_check = node_check_of(config, run, group)
        if node_check is not None and "NUM_GPUS" in os.environ:
            wishes = {**wishes_of(config, run), "gpus": int(os.environ["NUM_GPUS"])}
            node_check = NodeCheck(group, ProbeProcess(wishes))
        warm = fork_server_of(config, run)
        context = AgentContext(
            run, config, group, signals, Node(), _say, fork_server=warm, node_check=node_check
        )
        return attend(context).code


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
