"""What is started on which node, torchrun's command line for it, and what torchrun says of how it ended.

Plain values and text, shared by agents and their callers.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class LaunchSpec:
    """One attempt: the same module on every rank of every node."""

    # Run as `python -m module *arguments` by every rank; torchrun adds RANK, WORLD_SIZE and the like.
    module: str
    arguments: tuple[str, ...]
    # Added to the environment of the agent, and stronger than it.
    environment: Mapping[str, str]
    ranks_per_node: int
    # Where each node's agent and torchrun write their output; as many as there are nodes.
    node_logs: tuple[Path, ...]

    @property
    def num_nodes(self) -> int:
        return len(self.node_logs)

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True)
class LaunchPlace:
    """Where one agent stands in an attempt: its node's number, and where node 0 listens for the others."""

    node: int
    master_address: str
    master_port: int
    # This node's own address as the others reach it; None: torchrun finds one by this host's name.
    local_address: str | None = None
    # The same on all nodes and in no other attempt, so that ranks of two of them never meet.
    meeting_id: str | None = None


@dataclass(frozen=True)
class RankFailure:
    """A worker that ended with a code other than 0, as torchrun saw it."""

    rank: int
    local_rank: int
    pid: int
    # Negative: the number of the signal that ended it.
    exit_code: int
    # Ended by torchrun or by the agent because another rank had failed or a stop was asked for.
    cleaned_up: bool = False


@dataclass(frozen=True)
class Ending:
    """How one node's part of an attempt ended."""

    # torchrun's own code: 0, 1 for any failure of a worker, or minus the signal that ended torchrun itself.
    exit_code: int
    # Stop requests received: 0 none, 1 asked to stop, 2 or more told to stop at once.
    stops: int = 0
    failures: tuple[RankFailure, ...] = field(default_factory=tuple)
    # Processes that could not be ended, even by SIGKILL (uninterruptible sleep on a device or a file
    # system).
    survivors: tuple[int, ...] = field(default_factory=tuple)


_LOOPBACK = "127.0.0.1"


def command(spec: LaunchSpec, place: LaunchPlace, worker_launcher: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the command that starts and watches one node's ranks, each by the `worker_launcher` if given.

    torchrun never restarts workers itself (the agent's caller decides), writes no files of its own, and
    forwards only SIGQUIT: with SIGTERM left out it lives on when Slurm warns all processes of a job.
    """
    address = place.local_address or (_LOOPBACK if spec.num_nodes == 1 else None)
    local = ("--local-addr", address) if address is not None else ()
    meeting = ("--rdzv-id", place.meeting_id) if place.meeting_id is not None else ()
    return (
        sys.executable,
        *("-m", "launchers.bound_torchrun"),
        *("--nnodes", str(spec.num_nodes)),
        *("--node-rank", str(place.node)),
        *("--nproc-per-node", str(spec.ranks_per_node)),
        *("--rdzv-backend", "static"),
        *meeting,
        *("--master-addr", place.master_address),
        *("--master-port", str(place.master_port)),
        # Without it torchrun looks up this host's full name, which hangs where the name server does not
        # answer.
        *local,
        *("--max-restarts", "0"),
        *("--log-dir", os.devnull),
        "--signals-to-handle=SIGQUIT",
        *(("--no-python", *worker_launcher) if worker_launcher else ("-m",)),
        spec.module,
        *spec.arguments,
    )


_FAILURE = re.compile(
    r"rank\s*: (?P<rank>\d+) \(local_rank: (?P<local_rank>\d+)\)\s*"
    r"exitcode\s*: (?P<exit_code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
_CLOSING = re.compile(r"Sending process (\d+) closing signal")
_KILLING = re.compile(r"Unable to shutdown process (\d+) ")


def failures(log: str) -> tuple[RankFailure, ...]:
    """Return the failed workers in torchrun's closing report, as it names them.

    `log` is torchrun's output. A report that was cut off (torchrun was killed) yields nothing.
    """
    ended_by_torchrun = closing(log)
    return tuple(
        RankFailure(
            rank=int(match["rank"]),
            local_rank=int(match["local_rank"]),
            pid=int(match["pid"]),
            exit_code=int(match["exit_code"]),
            cleaned_up=int(match["pid"]) in ended_by_torchrun,
        )
        for match in _FAILURE.finditer(log)
    )


def closing(log: str) -> frozenset[int]:
    """Return the process ids of the workers that torchrun asked to end because another one had failed."""
    return frozenset(int(pid) for pid in _CLOSING.findall(log))


def killed(log: str) -> frozenset[int]:
    """Return the process ids of the workers that torchrun killed because they did not end when asked to."""
    return frozenset(int(pid) for pid in _KILLING.findall(log))
