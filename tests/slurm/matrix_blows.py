"""What can befall a run: blows from outside and planned faults, as values with what must follow them.

A blow waits for an event of the run, never for a clock. Which one is tried where is `matrix_courses`' to say.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from matrix_field import Freeze, Subject, until

# How far an attempt is trained before a blow: far enough for a checkpoint of its own.
STEPS_BEFORE = 12
# Shorter than what the course takes for a hang, with the time that TCP then waits before it tries again.
_CUT_S = 2.0


@dataclass(frozen=True)
class Blow:
    """One fault and what must follow. `row`: its number in the matrix."""

    row: str
    what: str
    # Decisions of the policy that are right; empty: the attempt must go on.
    follows: tuple[str, ...]
    # Strikes from outside, with the run, a source of chance and the node that it is meant for.
    do: Callable[[Subject, int], None] | None = None
    # Or an entry of recovery.inject, without rank, step and attempt.
    planned: Mapping[str, Any] | None = None
    # What the reason of the decision must hold.
    says: str = ""
    # "training", or "starting": as soon as the attempt's ranks are there.
    moment: str = "training"
    # Whether its victim may be on any node, or is on the first one.
    node: int | None = None
    # What is left to be done once the next attempt trains, and must have followed.
    after: Callable[[Subject], None] | None = None
    # Whether nobody is left to decide: Slurm starts the job again.
    by_slurm: bool = False
    # How long the next attempt's first step may take.
    within_s: float = 90.0


def _signal_rank(number: int) -> Callable[[Subject, int], None]:
    return lambda run, node: run.hit_rank(node, number)


def _fail(run: Subject, node: int) -> None:
    run.fail_node(node)


def _fail_all(run: Subject, _: int) -> None:
    for node in reversed(range(len(run.hosts()))):
        run.fail_node(node)


def _kill_agent(run: Subject, node: int) -> None:
    run.hit_agent(node)


def freeze(run: Subject, node: int) -> None:
    """Stop every process of the run on a node, as a host that is suspended."""
    host = run.hosts()[node]
    run.frozen = Freeze(host, sorted(run.own_processes(host)), time.time())
    run.blows.append((run.frozen.since, f"{host} is frozen"))
    _send(run.frozen.pids, signal.SIGSTOP)
    # What comes after the look is the writing of the manifest.
    manifests = run.run.checkpoints.glob(".step-*.tmp/*manifest.json*")
    run.frozen.publishing = frozenset(int(it.parent.name.split(".")[1].split("-")[1]) for it in manifests)


def thaw(run: Subject) -> None:
    """Let a frozen host's processes go on, and see them end."""
    assert run.frozen is not None
    host = run.frozen.host
    run.frozen.until = time.time()
    _send(run.frozen.pids, signal.SIGCONT)
    path = str(run.run.path)
    run.wait(lambda: not run.own_processes(host), f"the zombies of {path} on {host} have ended", 60)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _cut_for_a_while(run: Subject, node: int) -> None:
    host = run.hosts()[node]
    run.on.inside(host, "ip", "link", "set", "eth0", "down")
    time.sleep(_CUT_S)
    run.on.inside(host, "ip", "link", "set", "eth0", "up")


def mute(run: Subject, node: int) -> None:
    """Let a host hear all others and be heard by none: its frames go to an address that nobody has."""
    host = run.hosts()[node]
    layout = run.on.layout
    for other in layout.hosts:
        if other != host:
            address = str(layout.address(other))
            words = ("ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "dev", "eth0")
            run.on.inside(host, *words, "nud", "permanent")
    run.blows.append((time.time(), f"{host} is not heard"))


def _stop_controller(run: Subject, _: int) -> None:
    lines = run.on.site.processes_on("controller").items()
    (pid,) = [pid for pid, line in lines if "slurmctld" in line]
    os.kill(pid, signal.SIGSTOP)
    try:
        run.wait_for_step(run.step() + 20)
    finally:
        os.kill(pid, signal.SIGCONT)


RANK_KILLED = Blow("1", "rank gets SIGKILL", ("restart",), _signal_rank(signal.SIGKILL), says="SIGKILL")
RANK_CRASHES = Blow(
    "1", "rank crashes in native code", ("restart",), planned={"fault": "segfault"}, says="SIGSEGV"
)
RANK_EXITS = Blow(
    "1", "rank ends with code 7", ("restart",), planned={"fault": "exit", "exit_code": 7}, says="exit code 7"
)
RANK_STOPPED = Blow("2", "rank gets SIGSTOP", ("restart",), _signal_rank(signal.SIGSTOP), says="hang")
LOCK_HELD = Blow(
    "3", "rank holds the interpreter's lock", ("restart",), planned={"fault": "gil"}, says="hang"
)
LOOPS = Blow("3", "rank loops in Python", ("restart",), planned={"fault": "hang"}, says="hang")
AGENT_KILLED = Blow("4", "agent gets SIGKILL", ("restart",), _kill_agent, says="agent lost")
NODE_DOWN = Blow("5", "node loses power", ("replace", "shrink", "requeue"), _fail, says="gone")
FIRST_DOWN = Blow("6", "first node loses power", ("replace", "shrink", "requeue"), _fail, says="gone", node=0)
BOTH_DOWN = Blow("7", "two nodes lose power at once", ("replace", "requeue"), _fail_all)
POWER_CUT = Blow("16", "all nodes of the job lose power at once", ("requeue",), _fail_all, by_slurm=True)
DOWN_IN_START = Blow(
    "7", "node loses power as an attempt starts", ("replace", "requeue"), _fail, moment="starting"
)
CUT_SHORTLY = Blow("8", f"node is cut off for {_CUT_S:g} s", (), _cut_for_a_while)
MUTE = Blow("9", "node hears and is not heard", ("replace", "restart", "requeue"), mute, within_s=150)
# Its peers may be the first to tell, of a connection that broke.
DIES_IN_RESTORE = Blow(
    "26", "rank dies in the midst of a restore", ("restart",), planned={"phase": "restore"}
)
CONTROLLER_SILENT = Blow("30", "slurmctld is silent", (), _stop_controller)
LEMON = (
    replace(RANK_KILLED, row="14", what="rank on one node gets SIGKILL", node=1),
    replace(RANK_KILLED, row="14", what="and on the same node again", node=1, follows=("replace",)),
)
FROZEN = Blow("31", "node is frozen, and thawed behind the next start", ("replace",), freeze, after=thaw)


def strike(blow: Blow, run: Subject, chance: random.Random, last_host: str | None) -> str | None:
    """Let a blow from outside happen to a node that was not hit last; return that node's host."""
    nodes = range(len(run.hosts()))
    free = [node for node in nodes if run.hosts()[node] != last_host] or list(nodes)
    # The first node is hit only where that is meant: it is a case of its own.
    others = [node for node in free if node] or free
    node = blow.node if blow.node is not None else chance.choice(others if blow.row in ("5", "7") else free)
    host = run.hosts()[node]
    assert blow.do is not None
    blow.do(run, node)
    return host


def await_moment(blow: Blow, run: Subject, attempt: int) -> None:
    """Wait for the event that a blow follows."""
    if blow.moment == "starting":
        logs = run.run.attempt_logs(attempt)
        until(lambda: logs.exists() and any(logs.glob("rank-*.log")), f"the ranks of attempt {attempt}", 90)
        return
    run.wait_for_attempt(attempt, blow.within_s)
    run.wait_for_step(run.step() + STEPS_BEFORE)
