"""What one node's agent works with: the run, its crew, and what started it. Plain values and a protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from conf.schema import Config
from launchers.fork_server.client import WarmHost
from launchers.memory_store.node_store import NodeCopies
from launchers.node_agent import StopRequests
from launchers.node_group import Crew, Member, Order
from orchestra.agents.attempt_record import AttemptRecord, joined
from orchestra.agents.node_check.agent_part import Fitness
from orchestra.recovery.incidents import Incident, Verdict
from orchestra.recovery.policy import Decision
from orchestra.run.events import EventWriter
from orchestra.run.paths import RunDir

# The actions of an order.
START = "start"
END = "end"
REFUSE = "refuse"
# What is asked of the surroundings may take so long: a controller that does not answer is asked again.
SURROUNDINGS_S = 900.0


# Return why a run was stopped: the reasons of requests (orchestra.run.stop_requests).
Reasons = Callable[[], frozenset[str]]


class Surroundings(Protocol):
    """What started the agents: a Slurm job, or a command in the foreground."""

    @property
    def host(self) -> str:
        """This node's name."""

    @property
    def can_requeue(self) -> bool:
        """Whether the run can go on in another job."""

    def facts(self) -> dict[str, Any]:
        """Return what the start of an attempt records of it."""

    def own_address(self) -> str:
        """Return the address at which this node meets the others. Raises LaunchError."""

    def refusal(self) -> str | None:
        """Return why this run must not be trained here now; None where it may."""

    def judged(self, verdict: Verdict, attempt: int, events: EventWriter, /) -> Verdict:
        """Return the verdict on an attempt that stopped on request, or another in its place."""

    def go_on(
        self, verdict: Verdict, attempt: int, events: EventWriter, reasons: Reasons | None = None, /
    ) -> str:
        """Let a run that was stopped go on where it is to; return in a few words what was done.

        `reasons` are asked for why it stopped; None: what the requests to stop the attempt say.
        """

    def requeue(self, decision: Decision, attempt: int, events: EventWriter, /) -> str:
        """Let the run go on in another job after a failure; return in a few words what was done.

        Raises LauncherError, LaunchError and OSError.
        """

    def excluded(self) -> Mapping[str, str]:
        """Return the hosts on the cluster's list of those that failed twice, and why."""

    def exclude(self, decision: Decision, log: Sequence[Incident], /) -> None:
        """Put the hosts that a decision lists onto the cluster's list. Raises OSError."""

    def release(self, lost: Sequence[int], /) -> None:
        """Give back what nobody else does, when all is over. `lost`: nodes that are gone."""


@dataclass
class Station:
    """One node's agent at work. `tick` is called about ten times a second with the attempt that is on."""

    run: RunDir
    config: Config
    crew: Crew
    signals: StopRequests
    surroundings: Surroundings
    say: Callable[[str], None]
    search_path: Sequence[str] = ()
    tick: Callable[[int], None] = lambda _: None
    warm: WarmHost | None = None
    # None: nodes are not looked at.
    fitness: Fitness | None = None
    copies: NodeCopies | None = None
    # The first attempt where it is claimed already.
    first_attempt: int | None = None
    # Of an attempt whose end nobody could be told: the run directory is gone or its disk is full.
    untold: Verdict | None = None
    began: float = field(default_factory=time.time)
    _records: dict[int, AttemptRecord] = field(default_factory=dict)

    @property
    def node(self) -> int:
        return self.crew.node

    @property
    def is_alone(self) -> bool:
        return self.crew.num_nodes == 1

    @property
    def member(self) -> Member:
        assert self.crew.member is not None
        return self.crew.member

    @property
    def last_attempt(self) -> int | None:
        """The newest attempt that this agent had to do with."""
        return max(self._records, default=None)

    def record(self, attempt: int) -> AttemptRecord:
        """Return this node's record of an attempt: one writer for each file. Raises LaunchError."""
        if attempt not in self._records:
            for number in [it for it in self._records if it < attempt]:
                self._records.pop(number).events.close()
            self._records[attempt] = joined(self.run, attempt, self.node)
        return self._records[attempt]


def attempt_of(order: Order) -> int:
    """Return the attempt that an order starts or ends."""
    return int(order.facts["attempt"])


def host_of(order: Order, node: int) -> str:
    """Return what the host of a node was called when the order was given."""
    hosts: Mapping[str, str] = order.facts.get("hosts", {})
    return hosts.get(str(node), f"node {node}")
