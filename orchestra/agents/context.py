"""What one node's agent works with: the run, the agents of the other nodes, and what started it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.schema import Config
from launchers.fork_server.client import ForkServer
from launchers.memory_store.exchange import NodeCopies
from launchers.node_agent import StopRequests
from launchers.node_group import GroupMember, NodeGroup, Order
from orchestra.agents.attempt_record import AttemptRecord, AttemptRecords
from orchestra.agents.growth.wanted_nodes import WantedNodes
from orchestra.agents.node_check.own_check import NodeCheck
from orchestra.errors import LaunchError
from orchestra.recovery.incidents import Incident, Verdict
from orchestra.recovery.policy import Decision
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter
from orchestra.run.paths import RunDir

# The actions of an order.
START = "start"
END = "end"
REFUSE = "refuse"
# What is asked of the scheduler may take so long: a controller that does not answer is asked again.
SCHEDULER_S = 900.0
_LOOPBACK = "127.0.0.1"


# Returns why a run was stopped: the reasons of requests (orchestra.run.control.stop_requests).
Reasons = Callable[[], frozenset[str]]


class Scheduler:
    """What started the agents. As it stands a command in the foreground: there is no other job to go on in.

    `orchestra.agents.slurm_job.SlurmJob` is a job of Slurm's, and says all of it itself.
    """

    # Whether its agents help those of another job (orchestra.agents.growth), and never lead.
    is_helper = False

    @property
    def host(self) -> str:
        """This node's name."""
        return socket.gethostname()

    @property
    def can_requeue(self) -> bool:
        """Whether the run can go on in another job."""
        return False

    def facts(self) -> dict[str, Any]:
        """Return what the start of an attempt records of it."""
        return {}

    def place(self) -> dict[str, Any]:
        """Return where this node is in the network, for the others to know."""
        return {}

    def own_address(self) -> str:
        """Return the address at which this node meets the others. Raises LaunchError."""
        return _LOOPBACK

    def refusal(self) -> str | None:
        """Return why this run must not be trained here now; None where it may."""
        return None

    def final_verdict(self, verdict: Verdict, _attempt: int, _events: EventWriter, /) -> Verdict:
        """Return the verdict on an attempt that stopped on request, or another in its place."""
        return verdict

    def go_on(
        self, _verdict: Verdict, _attempt: int, _events: EventWriter, _reasons: Reasons | None = None, /
    ) -> str:
        """Let a run that was stopped go on where it is to; return in a few words what was done.

        `_reasons` are asked for why it stopped; None: what the requests to stop the attempt say.
        """
        return ""

    def requeue(self, _decision: Decision, _attempt: int, _events: EventWriter, /) -> str:
        """Let the run go on in another job after a failure; return in a few words what was done.

        Raises LauncherError, LaunchError and OSError.
        """
        raise LaunchError("a run in the foreground has no other job to go on in")

    def moved_to(self) -> str | None:
        """Return in a few words what an agent did that led before this one and did not live to say so: let
        the run go on in another job. None where none did.
        """
        return None

    def complete_history(self) -> None:
        """Write down how this job came to train the run, where nobody lived to. Raises LauncherError and
        OSError.
        """

    def excluded(self) -> Mapping[str, str]:
        """Return the hosts on the cluster's list of those that failed twice, and why."""
        return {}

    def exclude(self, decision: Decision, log: Sequence[Incident], /) -> None:
        """Put the hosts that a decision lists onto the cluster's list. Raises OSError."""

    def let_go(self, hosts: Collection[str], /) -> None:
        """Give back lost hosts, whatever becomes of them: this start of the job goes on without. Returns at
        once.
        """

    def stop_reason(self, signal: str, /) -> str:
        """Return the reason of the request that a signal such as "SIGTERM" to this agent leads to."""
        return stop_requests.signal_reason(signal)

    def ask_for_nodes(self, wanted: WantedNodes, /) -> None:
        """Have more nodes join this attempt's when they are free; to be asked again and again while they are
        missing. Returns at once.
        """

    def withdraw(self, *, for_good: bool) -> None:
        """Take back what was asked for and has not come; `for_good`: the run asks for no more. Raises
        LauncherError and OSError.
        """

    def release(self, lost: Sequence[int], /) -> None:
        """Give back what nobody else does, when all is over. `lost`: nodes that are gone."""


@dataclass(frozen=True)
class AgentContext:
    """What one node's agent works with: the run, the other agents, what started it, and what it looks after.

    It does not change: what an attempt leads to is returned by whoever carries it out.
    """

    run: RunDir
    config: Config
    group: NodeGroup
    signals: StopRequests
    scheduler: Scheduler
    say: Callable[[str], None]
    # Follows the packages' own folder in the ranks' PYTHONPATH.
    search_path: Sequence[str] = ()
    # Has imported torch already, and forks the ranks. None: they are started plainly.
    fork_server: ForkServer | None = None
    # None: nodes are not checked.
    node_check: NodeCheck | None = None
    # Copies of the ranks' state in this node's memory; None where none are made.
    copies: NodeCopies | None = None
    records: AttemptRecords = field(default_factory=AttemptRecords)

    @property
    def node(self) -> int:
        return self.group.node

    @property
    def is_alone(self) -> bool:
        return self.group.num_nodes == 1

    @property
    def member(self) -> GroupMember:
        assert self.group.member is not None
        return self.group.member

    def record(self, attempt: int) -> AttemptRecord:
        """Return this node's record of an attempt: one writer for each file. Raises LaunchError."""
        return self.records.of(self.run, attempt, self.node)


def attempt_number(order: Order) -> int:
    """Return the attempt that an order starts or ends."""
    return int(order.facts["attempt"])


def host_of(order: Order, node: int) -> str:
    """Return what the host of a node was called when the order was given."""
    hosts: Mapping[str, str] = order.facts.get("hosts", {})
    return hosts.get(str(node), f"node {node}")
