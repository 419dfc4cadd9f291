"""One agent's life: join the crew, carry out one order after another, lead when it is its turn, and leave."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from conf.schema import Config
from launchers.fork_server.client import WarmHost
from launchers.fork_server.owner import Owner
from launchers.host_network import free_port
from launchers.launch_errors import LauncherError
from launchers.node_agent import StopRequests
from launchers.node_group import Crew, Order
from launchers.slurm.this_job import JobTask, job_task
from orchestra.agents.attempt import perform
from orchestra.agents.context import END, REFUSE, SURROUNDINGS_S, Station
from orchestra.agents.leader import GATHER_TIMEOUT_S, Leading
from orchestra.agents.node_check.after_hang import Asking
from orchestra.agents.node_check.agent_part import fitness_of
from orchestra.agents.node_copies import COPIES, keep, open_copies
from orchestra.agents.slurm_job import SlurmJob
from orchestra.errors import EXIT_FAILED, LaunchError, RivalError
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir
from orchestra.submit.launch import worker_environment

_POLL_S = 0.2
# Agents that have nothing to do look less often: there may be thousands of them.
_IDLE_POLL_S = 1.0
_MANY_NODES = 64
# How long an agent waits for an order that nobody gives, once it has carried out the one before.
_ORPHAN_TIMEOUT_S = 900.0
# How often it looks whether it has been forgotten: that lists a file for each node.
_CHECK_S = 30.0
# Giving back the memory of copies may take so long.
_CLOSE_S = 900.0
# How long an agent that is warned before the first order waits for the leader, whom Slurm warns with it.
_WARNED_TIMEOUT_S = 20.0
# How long the last agent gives the others to leave before it ends the job.
_LEAVE_TIMEOUT_S = 15.0


def attend(station: Station) -> int:
    """Take part in all attempts of this start of the job; return the exit code that the last order names.

    *Every node*, main thread only. Raises RivalError when something else trains the run, LaunchError,
    LauncherError and OSError when this node cannot take part.
    """
    surroundings = station.surroundings
    address, fitness = surroundings.own_address(), station.fitness
    offered = {} if fitness is None else fitness.offers(address)
    station.crew.join(surroundings.host, address, {"port": free_port(), **offered})
    try:
        if fitness is not None:
            fitness.begin()
        if station.warm is not None:
            station.run.logs.mkdir(exist_ok=True)
            station.warm.start()
        station.copies = open_copies(station)
        if station.copies is not None:
            station.crew.tell({COPIES: station.copies.address})
        return _Agent(station).work()
    finally:
        station.crew.allow(_CLOSE_S)
        if station.copies is not None:
            station.copies.close()
        if fitness is not None:
            fitness.close()
        if station.warm is not None:
            station.warm.close()
        station.crew.leave()


class _Agent:
    def __init__(self, station: Station) -> None:
        self._station = station
        self._crew = station.crew
        self._leading = Leading(station)
        self._asking = Asking(station)
        # The newest order that this agent has dealt with.
        self._done = -1
        self._idle_since = self._checked_at = time.monotonic()
        # When a signal was first seen before the first order.
        self._warned_at: float | None = None

    def work(self) -> int:
        """Carry out orders until one ends the job."""
        while True:
            self._crew.progress()
            order = self._crew.newest_order()
            if order is not None and order.number > self._done:
                self._done = order.number
                if order.action in (END, REFUSE):
                    return self._ended(order)
                self._take_part(order)
                if self._station.untold is not None:
                    return self._station.untold.code
                self._idle_since = time.monotonic()
                continue
            if self._crew.leads:
                self._leading.look(order)
            elif self._station.signals.count() and order is None:
                self._wait_for_the_leaders_word()
            self._refuse_to_wait_for_ever(order)
            self._pause(order)

    def _wait_for_the_leaders_word(self) -> None:
        """Refuse to wait long for who was warned too, and says what that leads to. Raises LaunchError."""
        now = time.monotonic()
        self._warned_at = self._warned_at or now
        if now - self._warned_at > _WARNED_TIMEOUT_S:
            raise LaunchError(f"{self._station.signals.first} came before the first order")

    def _take_part(self, order: Order) -> None:
        if order.is_for(self._station.member):
            perform(self._station, order)
        elif self._station.node not in order.nodes:
            keep(self._station, order)
        elif not self._crew.reports(order.number, [self._crew.node]):
            # The agent before this one had a part in it, and died.
            self._crew.mark_broken(order.number, {"cause": "agent lost", "host": self._station.member.host})
            copies = self._station.copies
            held = {} if copies is None else {COPIES: copies.held()}
            self._crew.report(order.number, {"code": EXIT_FAILED, "cause": "agent lost", **held})

    def _ended(self, order: Order) -> int:
        if order.action == REFUSE:
            raise RivalError(str(order.facts.get("message")))
        if self._crew.leads:
            self._release(order)
        return int(order.facts.get("code", EXIT_FAILED))

    def _release(self, order: Order) -> None:
        """Give the job back where whoever would have done it is gone, after the others have left."""
        lost = {int(node) for node in order.facts.get("lost", [])}
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        if self._station.is_alone:
            return
        self._crew.allow(SURROUNDINGS_S)
        while time.monotonic() < deadline:
            members = self._crew.members()
            # Those that were lost in earlier attempts too: they never took their names off the list.
            lost.update(self._crew.silent(members))
            if members.keys() <= {self._station.node, *lost}:
                break
            time.sleep(_POLL_S)
        with contextlib.suppress(LauncherError):
            self._station.surroundings.release(sorted(lost))

    def _refuse_to_wait_for_ever(self, order: Order | None) -> None:
        now = time.monotonic()
        if now - self._checked_at < _CHECK_S:
            return
        self._checked_at = now
        limit = GATHER_TIMEOUT_S + _ORPHAN_TIMEOUT_S if order is None else _ORPHAN_TIMEOUT_S
        is_busy = order is not None and len(self._crew.reports(order.number, order.nodes)) == 0
        if is_busy or self._crew.leads:
            self._idle_since = now
        if now - self._idle_since > limit:
            raise LaunchError(
                f"nobody has said for {limit:g} s what is to come next ({self._crew.folder}); the other "
                "nodes' logs tell what became of them"
            )

    def _pause(self, order: Order | None) -> None:
        self._station.tick(-1)
        is_spare = order is not None and self._station.node not in order.nodes
        is_awaited = self._asking.look(order)
        if self._station.fitness is not None:
            self._station.fitness.tick(is_idle=is_spare)
        is_patient = not is_awaited and (is_spare or self._crew.num_nodes > _MANY_NODES)
        time.sleep(_IDLE_POLL_S if is_patient and not self._crew.leads else _POLL_S)


def crew_folder(control: Path, job: str, restart: int) -> Path:
    """Return where the agents of one start of a job meet."""
    return control / f"job-{job}.start-{restart}"


# Which process is kept warm on a node: one that has imported what every rank of a run imports first.


# The last two are imported by torch itself when an optimizer and a mesh are made: a second per rank.
_WORKER_MODULES = ("orchestra.train.trainer", "torch._dynamo", "torch.distributed.tensor")


def warm_host(
    config: Config, run: RunDir, search_path: Sequence[str] = (), owner: Owner | None = None
) -> WarmHost | None:
    """Return what starts this node's ranks without importing torch again; None where it is not wanted.

    Without an `owner` the process is this one's own, and ends with it.
    """
    if not config.recovery.warm_start:
        return None
    ranks = int(config.cluster.gpus_per_node)
    environment = worker_environment(config, ranks, search_path=search_path)
    return WarmHost(_WORKER_MODULES, environment, run.logs / "warm.log", owner)


# Makes the station of a Slurm task: from Slurm's variables and a run directory to an agent at its place.


def station(run: RunDir, signals: StopRequests, zygote: Owner) -> Station:
    """Return this task's station, its warm process held by `zygote`.

    Raises LaunchError and LauncherError outside a job that fits the run.
    """
    task = job_task(os.environ)
    config = read_config(run.config)
    wanted = config.cluster.nodes + config.cluster.spare_nodes
    if task.num_nodes != wanted:
        raise LaunchError(
            f"the job has {task.num_nodes} nodes, the run wants {wanted} (cluster.nodes="
            f"{config.cluster.nodes}, cluster.spare_nodes={config.cluster.spare_nodes})"
        )
    folder = crew_folder(run.control, task.job, task.restart)
    crew = Crew(folder, task.node, task.num_nodes, config.recovery.agent_timeout_s, _end_this_agent)
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    surroundings = SlurmJob(run, config, task)

    def say(words: str) -> None:
        _say(task, surroundings.host, words)

    say("joins the others")
    warm = warm_host(config, run, path, zygote)
    fitness = fitness_of(config, run, crew)
    return Station(run, config, crew, signals, surroundings, say, path, warm=warm, fitness=fitness)


def _end_this_agent() -> None:
    """End this process, whose main thread stands still: whoever keeps this node's agent starts another."""
    sys.stderr.write("error: this node's agent stands still, and is ended where it is:\n")
    faulthandler.dump_traceback(sys.stderr)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _say(task: JobTask, host: str, words: str) -> None:
    where = f"node {task.node} of {task.num_nodes} on {host}"
    sys.stdout.write(f"job {task.job} start {task.restart} {where}: {words}\n")
    sys.stdout.flush()
