"""What is to be started on which node, and how it ended: plain values that agents and their callers share."""

from __future__ import annotations

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
