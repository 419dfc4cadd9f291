"""Says how a cluster fares: its hosts, their daemons, Slurm's view of the nodes. It changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slurm.cluster.commands import run
from slurm.cluster.errors import ClusterError
from slurm.cluster.hosts import host_state
from slurm.cluster.layout import CONTROLLER, ClusterLayout

WELL_STATES = {"idle", "mixed", "allocated", "completing", "planned", "reserved"}
ANSWER_WITHIN_S = 10.0


def node_states(layout: ClusterLayout) -> dict[str, str]:
    """Return Slurm's state of every node in its own words; an asterisk at the end marks a silent node.

    Raises:
        ClusterError: slurmctld does not answer.
    """
    command = ["sinfo", "--noheader", "--Node", "--format=%N %T"]
    answer = run(command, environment=layout.environment, timeout_s=ANSWER_WITHIN_S)
    return dict(line.split(maxsplit=1) for line in answer.splitlines())


def is_well(state: str) -> bool:
    """Whether a node in this state answers and runs jobs."""
    return state in WELL_STATES


def problems(layout: ClusterLayout) -> list[str]:
    """Return everything that is wrong, each as one clause; an empty list is a healthy cluster."""
    seen = [problem for host in layout.hosts for problem in _host_problems(layout, host)]
    try:
        states = node_states(layout)
    except ClusterError as error:
        return [*seen, f"slurmctld does not answer: {error}"]
    seen += [
        f"Slurm says {node} is {states.get(node, 'unknown')}"
        for node in layout.nodes
        if not _is_well(states, node)
    ]
    if layout.settings.accounting:
        seen += _accounting_problems(layout)
    return seen


def _is_well(states: dict[str, str], node: str) -> bool:
    return is_well(states.get(node, "unknown"))


def _host_problems(layout: ClusterLayout, host: str) -> Iterator[str]:
    state = host_state(layout, host)
    if state is None or not state.is_alive:
        yield f"{host} is off"
        return
    for service, fares in state.services.items():
        if fares not in ("running", "done"):
            yield f"{service} on {host} {fares}"
    # A bound file is gone once somebody has replaced the machine's own one.
    inside = Path(f"/proc/{state.pid}/root/etc/hosts")
    try:
        is_there = inside.read_text() == (layout.etc / "hosts").read_text()
    except PermissionError:
        return
    if not is_there:
        yield f"{host} has lost its /etc/hosts, because the machine's own was replaced: `down`, then `up`"


def _accounting_problems(layout: ClusterLayout) -> list[str]:
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "cluster", "format=cluster,controlhost"]
    try:
        answer = run(command, environment=layout.environment, timeout_s=ANSWER_WITHIN_S)
    except ClusterError as error:
        return [f"slurmdbd does not answer: {error}"]
    is_registered = f"devcluster|{layout.address(CONTROLLER)}" in answer.splitlines()
    return [] if is_registered else ["slurmctld has not registered with slurmdbd"]


def table(layout: ClusterLayout) -> str:
    """Return one line per host: name, address, Slurm's state, daemons."""
    try:
        states = node_states(layout)
    except ClusterError:
        states = {}
    lines = []
    for host in layout.hosts:
        state = host_state(layout, host)
        services = state.services if state and state.is_alive else {}
        daemons = ", ".join(f"{name} {fares}" for name, fares in services.items() if fares != "done") or "off"
        slurm_state = "-" if host == CONTROLLER else states.get(host, "unknown")
        lines.append(f"{host:<12}{layout.address(host)!s:<16}{slurm_state:<12}{daemons}")
    return "\n".join(lines)
