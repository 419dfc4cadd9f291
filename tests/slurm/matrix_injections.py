"""Faults of the matrix, injected into one run after another, as values with what must follow them.

A fault comes from outside or was planned (recovery.inject), and waits for an event of the run, never for a
clock. One run takes several, each in an attempt of its own, and is held to the oracle at its end. Planned
faults come first: their attempts and steps are known when the run is submitted.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from matrix_oracle import References, differences, left_over, void_saves
from sites import Freeze, Site, SubmittedRun, wait_until

from orchestra.run.files import Record

LENGTH = ("train.steps=600", "checkpoint.every_steps=10", "data.ledger=true")
# Node k has one rank.
QUICK = (
    *("cluster.gpus_per_node=1", "recovery.agent_timeout_s=5", "recovery.backoff_s=0.1"),
    *("recovery.heartbeat_timeout_s=6", "recovery.collective_timeout_s=120"),
)
# How far an attempt is trained before a fault: far enough for a checkpoint of its own.
STEPS_BEFORE = 12
# Steps between two planned faults: at least one checkpoint lies between them.
_APART = 20
_FIRST_AT = 15
# How long a save stands between two of its phases, and how late in the next attempt it goes on.
_HELD_S = 2.0
_THAWED_WITHIN_S = 6.0
# Where it stands: most often between the look for a newer attempt and the commit.
_HELD_IN = (
    "before_manifest",
    "before_manifest",
    "before_manifest",
    "mid_file",
    "before_vote",
    "before_prune",
)
# Shorter than what the run takes for a hang, with the time that TCP then waits before it tries again.
_CUT_S = 2.0


@dataclass(frozen=True)
class Injection:
    """One fault and what must follow. `row`: its number in the matrix."""

    row: str
    what: str
    # Decisions of the policy that are right; empty: the attempt must go on.
    follows: tuple[str, ...]
    # What is done from outside, to the run and the node that it is meant for.
    do: Callable[[SubmittedRun, int], object] | None = None
    # Or an entry of recovery.inject, without rank, step and attempt.
    planned: Mapping[str, Any] | None = None
    # What the reason of the decision must hold.
    reason: str = ""
    # Whether it comes as soon as the attempt's ranks are there, and not while they train.
    is_at_start: bool = False
    # Whether its victim may be on any node, or is on this one.
    node: int | None = None
    # What is left to be done once the next attempt trains, and must have followed.
    after: Callable[[SubmittedRun], None] | None = None
    # Whether nobody is left to decide: Slurm starts the job again.
    by_slurm: bool = False
    # Whether a save of rank 0 is held for a moment, for the fault to strike in its midst.
    holds_save: bool = False
    # How long the next attempt's first step may take.
    within_s: float = 90.0


def _fail_all(run: SubmittedRun, _: int) -> None:
    for node in reversed(range(len(run.hosts()))):
        run.fail_node(node)


def freeze(run: SubmittedRun, node: int) -> None:
    """Stop every process of the run on a node, as a host that is suspended."""
    host = run.hosts()[node]
    run.frozen = Freeze(host, sorted(run.processes(host)), time.time())
    run.injected.append((run.frozen.since, f"{host} is frozen"))
    _send(run.frozen.pids, signal.SIGSTOP)


def freeze_in_save(run: SubmittedRun, node: int) -> None:
    """Freeze a node at some moment of a save of its rank that is held."""
    run.wait(lambda: bool(run.events("fault_injected")), "a save is held", 120)
    time.sleep(_moment(run, "freeze") * _HELD_S)
    freeze(run, node)


def thaw_some_time(run: SubmittedRun) -> None:
    """Let a frozen host go on at some moment of the next attempt's first steps."""
    time.sleep(_moment(run, "thaw") * _THAWED_WITHIN_S)
    thaw(run)


def _moment(run: SubmittedRun, what: str) -> float:
    """Return a number in [0, 1) that depends on the run's name without its time: on its seed."""
    return random.Random(f"{what} {run.dir.name.rpartition('-')[0]}").random()


def thaw(run: SubmittedRun) -> None:
    """Let a frozen host's processes go on, and see them end."""
    assert run.frozen is not None
    host = run.frozen.host
    run.frozen.until = time.time()
    _send(run.frozen.pids, signal.SIGCONT)

    def zombies() -> list[str]:
        # srun, and who watches it, are the job's: on its first host they stay as long as it.
        return [line for line in run.processes(host).values() if "srun" not in line]

    run.wait(lambda: not zombies(), f"the zombies on {host} have ended", 60)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _cut_for_a_while(run: SubmittedRun, node: int) -> None:
    host = run.hosts()[node]
    run.site.inside(host, "ip", "link", "set", "eth0", "down")
    time.sleep(_CUT_S)
    run.site.inside(host, "ip", "link", "set", "eth0", "up")


def mute(run: SubmittedRun, node: int) -> None:
    """Let a host hear all others and be heard by none: its frames go to an address that nobody has."""
    host = run.hosts()[node]
    layout = run.site.layout
    for other in layout.hosts:
        if other != host:
            address = str(layout.address(other))
            words = ("ip", "neigh", "replace", address, "lladdr", "02:00:00:00:00:99", "dev", "eth0")
            run.site.inside(host, *words, "nud", "permanent")
    run.injected.append((time.time(), f"{host} is not heard"))


def _stop_controller(run: SubmittedRun, _: int) -> None:
    with run.site.silent_controller():
        run.wait_for_steps(20)


_kill_rank = SubmittedRun.hit_rank
_fail = SubmittedRun.fail_node
_stop_rank = partial(SubmittedRun.hit_rank, number=signal.SIGSTOP)
_AWAY = ("replace", "shrink", "requeue")

RANK_KILLED = Injection("1", "rank gets SIGKILL", ("restart",), _kill_rank, reason="SIGKILL")
RANK_CRASHES = Injection(
    "1", "rank crashes in native code", ("restart",), planned={"fault": "segfault"}, reason="SIGSEGV"
)
RANK_EXITS = Injection(
    *("1", "rank ends with code 7", ("restart",)),
    planned={"fault": "exit", "exit_code": 7},
    reason="exit code 7",
)
RANK_STOPPED = Injection("2", "rank gets SIGSTOP", ("restart",), _stop_rank, reason="hang")
LOCK_HELD = Injection(
    "3", "rank holds the interpreter's lock", ("restart",), planned={"fault": "gil"}, reason="hang"
)
LOOPS = Injection("3", "rank loops in Python", ("restart",), planned={"fault": "hang"}, reason="hang")
AGENT_KILLED = Injection("4", "agent gets SIGKILL", ("restart",), SubmittedRun.hit_agent, reason="agent lost")
NODE_DOWN = Injection("5", "node loses power", _AWAY, _fail, reason="gone")
FIRST_DOWN = Injection("6", "first node loses power", _AWAY, _fail, reason="gone", node=0)
BOTH_DOWN = Injection("7", "two nodes lose power at once", ("replace", "requeue"), _fail_all)
POWER_CUT = Injection("16", "all nodes of the job lose power at once", ("requeue",), _fail_all, by_slurm=True)
DOWN_IN_START = Injection(
    "7", "node loses power as an attempt starts", ("replace", "requeue"), _fail, is_at_start=True
)
CUT_SHORTLY = Injection("8", f"node is cut off for {_CUT_S:g} s", (), _cut_for_a_while)
MUTE = Injection("9", "node hears and is not heard", ("replace", "restart", "requeue"), mute, within_s=150)
# Its peers may be the first to tell, of a connection that broke.
DIES_IN_RESTORE = Injection(
    "26", "rank dies in the midst of a restore", ("restart",), planned={"phase": "restore"}
)
CONTROLLER_SILENT = Injection("30", "slurmctld is silent", (), _stop_controller)
SAME_HOST_TWICE = (
    replace(RANK_KILLED, row="14", what="rank on one node gets SIGKILL", node=1),
    replace(RANK_KILLED, row="14", what="and on the same node again", node=1, follows=("replace",)),
)
FROZEN = Injection("31", "node is frozen, and thawed after the next start", ("replace",), freeze, after=thaw)
HANDS = Injection(
    *("31", "node is frozen in the midst of a save, and thawed in the next attempt's first steps"),
    follows=("replace",),
    do=freeze_in_save,
    after=thaw_some_time,
    holds_save=True,
    node=0,
)


@dataclass(frozen=True)
class FaultyRun:
    """One run's faults. `min_nodes`: fewer than `nodes` where it may shrink."""

    name: str
    nodes: int
    spares: int
    faults: tuple[Injection, ...]
    min_nodes: int | None = None
    more: tuple[str, ...] = ()

    def overrides(self, chance: random.Random) -> list[str]:
        """Return the run's own settings, with its planned faults."""
        own = [f"cluster.nodes={self.nodes}", f"cluster.spare_nodes={self.spares}", *self.more]
        if self.min_nodes is not None:
            own.append(f"recovery.min_nodes={self.min_nodes}")
        entries = list(self._planned(chance))
        return [*own, f"recovery.inject=[{','.join(entries)}]"] if entries else own

    def _planned(self, chance: random.Random) -> Iterator[str]:
        rank = chance.randrange(self.nodes)
        for attempt, fault in enumerate(self.faults):
            if fault.holds_save:
                at, phase = 10 * chance.randrange(2, 5), chance.choice(_HELD_IN)
                entry = f"attempt:{attempt},rank:0,at_step:{at},phase:{phase},fault:hang,seconds:{_HELD_S:g}"
                yield f"{{{entry}}}"
            if fault.planned is None:
                continue
            # Never the same host twice in a row: it would be left out.
            rank = (rank + 1 + chance.randrange(max(1, self.nodes - 1))) % self.nodes
            at_step = _FIRST_AT + _APART * attempt + chance.randrange(4)
            if fault.planned.get("phase") == "restore":
                at_step = (_FIRST_AT + _APART * (attempt - 1)) // 10 * 10
            entry = {"attempt": attempt, "rank": rank, **fault.planned, "at_step": at_step}
            yield f"{{{','.join(f'{key}:{value}' for key, value in entry.items())}}}"


@dataclass(frozen=True)
class ShownRow:
    """One line of the matrix's table."""

    row: str
    what: str
    result: str


# Killed ranks and agents and a first node that is lost: test_recovery. The frozen one at last: until its
# zombies have ended the run may reach its end.
QUICK_RUN = FaultyRun("quick", 2, 1, (RANK_CRASHES, LOCK_HELD, DIES_IN_RESTORE, FROZEN))
FAULTY_RUNS = (
    FaultyRun(
        "ranks",
        nodes=3,
        spares=1,
        faults=(
            *(RANK_CRASHES, RANK_EXITS, DIES_IN_RESTORE, RANK_KILLED),
            *(AGENT_KILLED, CONTROLLER_SILENT, NODE_DOWN),
        ),
    ),
    FaultyRun("hangs", 2, 1, (LOCK_HELD, LOOPS, RANK_STOPPED, FROZEN)),
    # The killed one is not on the node that is lost next: that would have failed twice.
    FaultyRun("first", 2, 2, (replace(RANK_KILLED, node=1), FIRST_DOWN, FIRST_DOWN)),
    # No save is passed over, however busy the machine is: the one to be held would be missing.
    FaultyRun("hands", 2, 1, (HANDS,), more=("checkpoint.when_busy=wait",)),
    FaultyRun("same-host", 2, 1, SAME_HOST_TWICE),
    FaultyRun("both", 2, 2, (BOTH_DOWN,)),
    FaultyRun("start", 2, 2, (RANK_KILLED, DOWN_IN_START)),
    FaultyRun("network", 2, 0, (CUT_SHORTLY,)),
    FaultyRun("mute", 2, 1, (MUTE,), more=("recovery.setup_timeout_s=25",)),
    FaultyRun("shrink", 3, 0, (NODE_DOWN,), min_nodes=1),
    FaultyRun("queue", 2, 0, (NODE_DOWN,)),
    FaultyRun("power", 2, 0, (POWER_CUT,)),
)


def train_with_faults(faulty: FaultyRun, site: Site, references: References, seed: int) -> list[ShownRow]:
    """Train a run with all its faults, and hold it to the oracle; return a line for each fault.

    Never raises for what the run does: what went wrong stands in the lines.
    """
    chance = random.Random(f"{faulty.name} {seed}")
    site.clear()
    name = f"{faulty.name}-{seed}-{time.time_ns() // 1_000_000}"
    run = site.submit_run(name, *LENGTH, *QUICK, *faulty.overrides(chance))
    shown = []
    last_host: str | None = None
    try:
        for number, fault in enumerate(faulty.faults):
            last_host, line = _injected(fault, run, chance, last_host, number)
            shown.append(line)
        run.wait(lambda: run.is_finished() or _gave_up(run), "the run ends", 180)
        run.wait(run.is_over, "its job ends", 60)
    except AssertionError as error:
        return [*shown, ShownRow("", f"{faulty.name}, seed {seed}", f"FAILED: {error}")]
    wrong = differences(run.dir, references.of(faulty.nodes), site, same_layout=faulty.min_nodes is None)
    wrong += left_over(run)
    void = void_saves(run.dir)
    result = f"FAILED: {'; '.join(wrong + void)}" if wrong else "; ".join(["passed", *void])
    return [*shown, ShownRow("", f"{faulty.name}, seed {seed}: the oracle", result)]


def _injected(
    fault: Injection, run: SubmittedRun, chance: random.Random, last_host: str | None, number: int
) -> tuple[str | None, ShownRow]:
    """Let one fault happen and wait for what follows; return the host that it hit, and the line for it."""
    is_planned = fault.planned is not None
    num_before = number if is_planned else len(_decisions(run))
    attempt, host = run.attempt(), last_host
    if not is_planned:
        _wait_for_moment(fault, run, max(attempt, 0))
        attempt = run.attempt()
        host = _strike(fault, run, chance, last_host)
        since = time.time()
    if not fault.follows:
        run.wait_for_step(run.step() + 5, fault.within_s)
        went_on = run.attempt() == attempt
        # What no attempt failed of does not part two failures of one host.
        result = "passed" if went_on else f"FAILED: {_decisions(run)[-1]}"
        return last_host, ShownRow(fault.row, fault.what, result)
    if fault.by_slurm:
        run.wait(lambda: _trains_after(run, attempt), f"{fault.what}: Slurm starts it again", fault.within_s)
        job = run.events("attempt_started")[-1]
        took = f"start {job['job_start']} of the job, {_trained_at(run, attempt) - since:.1f} s"
        return host, ShownRow(fault.row, fault.what, f"passed: {took}")
    run.wait(
        lambda: len(_decisions(run)) > num_before or run.is_finished(),
        f"{fault.what}: a decision",
        fault.within_s,
    )
    if run.is_finished() and len(_decisions(run)) <= num_before:
        return host, ShownRow(fault.row, fault.what, "FAILED: nothing happened")
    decision = _decisions(run)[num_before]
    if is_planned:
        host = str(run.events("fault_injected")[-1]["host"])
    run.wait(lambda: _trains_after(run, decision["attempt"]), f"{fault.what}: it goes on", fault.within_s)
    if fault.after is not None:
        fault.after(run)
    if not _trains_after(run, decision["attempt"]) or _gave_up(run):
        result = f"FAILED: it gave up: {_decisions(run)[-1]['reason']}"
        return host, ShownRow(fault.row, fault.what, result)
    took = "" if is_planned else f", {_trained_at(run, decision['attempt']) - since:.1f} s"
    reason = f"{decision['decision']} ({decision['reason']})"
    is_right = decision["decision"] in fault.follows and fault.reason in decision["reason"]
    return host, ShownRow(fault.row, fault.what, f"{'passed' if is_right else 'FAILED'}: {reason}{took}")


def _wait_for_moment(fault: Injection, run: SubmittedRun, attempt: int) -> None:
    """Wait for the event that a fault follows."""
    if fault.is_at_start:
        logs = run.dir.attempt_logs(attempt)
        is_started = lambda: logs.exists() and any(logs.glob("rank-*.log"))  # noqa: E731
        wait_until(is_started, f"the ranks of attempt {attempt}", 90)
        return
    run.wait_for_attempt(attempt, fault.within_s)
    run.wait_for_steps(STEPS_BEFORE)


def _strike(fault: Injection, run: SubmittedRun, chance: random.Random, last_host: str | None) -> str:
    """Inject a fault from outside into a node that was not hit last; return that node's host."""
    hosts = run.hosts()
    nodes = range(len(hosts))
    free = [node for node in nodes if hosts[node] != last_host] or list(nodes)
    # The first node is hit only where that is meant: it is a case of its own.
    others = [node for node in free if node] or free
    node = (
        fault.node if fault.node is not None else chance.choice(others if fault.row in ("5", "7") else free)
    )
    assert fault.do is not None
    fault.do(run, node)
    return hosts[node]


def _decisions(run: SubmittedRun) -> list[Record]:
    return run.events("restarting")


def _trains_after(run: SubmittedRun, attempt: int) -> bool:
    """Tell whether a later attempt trains, or none will."""
    return any(event["attempt"] > attempt for event in run.events("training_started")) or _gave_up(run)


def _trained_at(run: SubmittedRun, attempt: int) -> float:
    times = [event["time"] for event in run.events("training_started") if event["attempt"] > attempt]
    return float(min(times, default=float("nan")))


def _gave_up(run: SubmittedRun) -> bool:
    return any(decision["decision"] == "give_up" for decision in _decisions(run))


def table(lines: Iterable[ShownRow]) -> str:
    """Return the lines in Markdown."""
    rows = [f"| {line.row} | {line.what} | {' '.join(line.result.split())[:300]} |" for line in lines]
    return "\n".join(["| row | what | result |", "|---|---|---|", *rows])
