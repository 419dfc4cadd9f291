"""One agent from start to end: it joins the others, carries out orders, and leads when it is its turn.

`attend` is the same on every node of a Slurm job, where `orchestra.agents.__main__` calls it with what
`context_of_task` returns, and in the foreground, where `train_here` trains a run on this machine alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config, Device, Recompute
from launchers import LauncherError
from launchers.fork_server.client import ForkServer
from launchers.fork_server.owner import ServerOwner
from launchers.host_network import free_port
from launchers.memory_store.exchange import NodeCopyPlan
from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup, Order
from launchers.slurm.this_job import JobTask, job_task
from orchestra.agents.attempt import perform
from orchestra.agents.context import END, REFUSE, SCHEDULER_S, START, AgentContext, Scheduler, attempt_number
from orchestra.agents.growth.helper_job import HelperJob, group_name, helped_group
from orchestra.agents.leader import Leader
from orchestra.agents.node_check.after_hang import RingMeasurement
from orchestra.agents.node_check.own_check import node_check_of
from orchestra.agents.node_copies import COPIES, open_copies
from orchestra.agents.pack.packed_job import PackedJob, place_of
from orchestra.agents.slurm_job import SlurmJob
from orchestra.agents.wait_for_nodes import NODES_TIMEOUT_S
from orchestra.data.block_checks import forget_blocks
from orchestra.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, LaunchError, RivalError
from orchestra.recovery.history import attempt_of
from orchestra.recovery.incidents import Verdict, node_verdict
from orchestra.run.config_file import read_config
from orchestra.run.events import read_events
from orchestra.run.heartbeat import beats_folder
from orchestra.run.paths import RunDir, SweepDir
from orchestra.run.permissions import open_to_group
from orchestra.sizes.compilation import is_wanted
from orchestra.submit.launch import binding_here, worker_environment

_POLL_S = 0.2
# Agents that have nothing to do look less often: there may be thousands of them.
_IDLE_POLL_S = 1.0
_MANY_NODES = 64
# How long an agent waits for an order that nobody gives, once it has carried out the one before.
_ORPHAN_TIMEOUT_S = 900.0
# As long as one that trains waits for a directory that was removed or renamed.
_REMOVED_TIMEOUT_S = 30.0
# How often it looks whether it has been forgotten: that lists a file for each node.
_CHECK_S = 30.0
# Giving back the memory of copies may take so long.
_CLOSE_S = 900.0
# How long an agent that is warned before the first order waits for the leader, whom Slurm warns with it.
_WARNED_TIMEOUT_S = 20.0
# How long the last agent gives the others to leave before it ends the job.
_LEAVE_TIMEOUT_S = 15.0
# What the process that ranks are forked from imports ahead: the trainer, and torch's compiler, a second of a
# rank's start, where torch itself will ask for it.
_TRAINER, _COMPILER = "orchestra.train.trainer", "torch._dynamo"

# Called about ten times a second with the number of the attempt that is on; -1 between two.
Tick = Callable[[int], None]


@dataclass(frozen=True)
class AttendResult:
    """How an agent's part in a job ended."""

    # The exit code that the last order names.
    code: int
    # The newest attempt that this agent took part in; None where there was none.
    last_attempt: int | None = None
    # The verdict on it where it could not be written: the run directory is gone or its disk is full.
    unwritten: Verdict | None = None


def attend(
    context: AgentContext, *, tick: Tick = lambda _: None, first_attempt: int | None = None
) -> AttendResult:
    """Take part in all attempts of this start of the job, to its end.

    *Every node*, main thread only. `first_attempt`: where the caller has claimed it already. Raises
    RivalError when something else trains the run, LaunchError, LauncherError and OSError when this node
    cannot take part.
    """
    address, node_check = context.scheduler.own_address(), context.node_check
    offered = {} if node_check is None else node_check.offers(address)
    facts = {"port": free_port(), **context.scheduler.place(), **offered}
    context.group.join(context.scheduler.host, address, facts)
    try:
        if node_check is not None:
            node_check.begin()
        if context.fork_server is not None:
            context.run.logs.mkdir(exist_ok=True)
            context.fork_server.start()
        context = dataclasses.replace(context, copies=open_copies(context))
        if context.copies is not None:
            context.group.tell({COPIES: context.copies.address})
        return _Agent(context, tick, first_attempt).work()
    finally:
        context.group.allow(_CLOSE_S)
        if context.copies is not None:
            context.copies.close()
        if node_check is not None:
            node_check.close()
        if context.fork_server is not None:
            context.fork_server.close()
        with contextlib.suppress(OSError):
            forget_blocks(beats_folder(context.run))
        context.group.leave()


def code_for_slurm(code: int, config: Config) -> int:
    """Return what a job ends with whose agents ended with `code`."""
    return config.cluster.stop_exit_code if code == EXIT_STOPPED else code


class _Agent:
    def __init__(self, context: AgentContext, tick: Tick, first_attempt: int | None) -> None:
        self._context = context
        self._tick = tick
        self._group = context.group
        self._leader = Leader(context, first_attempt)
        self._ring_measurement = RingMeasurement(context)
        # The newest order that this agent has carried out.
        self._done = -1
        self._last_attempt: int | None = None
        self._idle_since = self._checked_at = time.monotonic()
        # Since when the run's directory is not there.
        self._gone_since: float | None = None
        # When a signal was first seen before the first order.
        self._warned_at: float | None = None

    def work(self) -> AttendResult:
        """Carry out orders until one ends the job."""
        while True:
            self._group.progress()
            order = self._group.newest_order()
            if order is not None and order.number > self._done:
                self._done = order.number
                if order.action in (END, REFUSE):
                    return AttendResult(self._ended(order), self._last_attempt)
                unwritten = self._take_part(order)
                if unwritten is not None:
                    return AttendResult(unwritten.code, self._last_attempt, unwritten)
                self._idle_since = time.monotonic()
                continue
            if self._context.scheduler.is_helper and self._context.signals.count():
                # Its job is about to be ended, and the run goes on without it.
                return AttendResult(EXIT_DONE, self._last_attempt)
            if self._group.leads:
                if self._context.scheduler.is_helper:
                    raise LaunchError(f"the job that this one helps is over ({self._group.folder.name})")
                self._leader.look(order)
                if self._leader.has_stepped_down:
                    return AttendResult(EXIT_DONE, self._last_attempt)
            elif self._context.signals.count() and order is None:
                self._wait_for_the_leader()
            self._end_where_forgotten(order)
            self._pause(order)

    def _wait_for_the_leader(self) -> None:
        """Wait for the leader, which was warned too and orders what follows, but not for long.

        Raises LaunchError.
        """
        now = time.monotonic()
        self._warned_at = self._warned_at or now
        if now - self._warned_at > _WARNED_TIMEOUT_S:
            raise LaunchError(
                f"{self._context.signals.first} came before the first order, and the leader did not say "
                f"within {_WARNED_TIMEOUT_S:g} s what follows; the log of the job's first node tells why"
            )

    def _take_part(self, order: Order) -> Verdict | None:
        """Carry out this node's part of an attempt; return the verdict where it could not be written."""
        if order.is_for(self._context.member):
            self._last_attempt = attempt_number(order)
            return perform(self._context, order, self._tick)
        if self._context.node not in order.nodes:
            if self._context.copies is not None and order.action == START:
                # A spare keeps copies of the others'.
                self._context.copies.begin(NodeCopyPlan(attempt_number(order), range(0)))
        elif not self._group.reports(order.number, [self._group.node]):
            # The agent before this one took part in it, and died.
            lost = {"cause": "agent lost", "host": self._context.member.host}
            self._group.mark_broken(order.number, lost)
            copies = self._context.copies
            held = {} if copies is None else {COPIES: copies.held()}
            self._group.report(order.number, {"code": EXIT_FAILED, "cause": "agent lost", **held})
        return None

    def _ended(self, order: Order) -> int:
        if order.action == REFUSE:
            raise RivalError(str(order.facts.get("message")))
        if self._group.leads:
            self._release(order)
        return int(order.facts.get("code", EXIT_FAILED))

    def _release(self, order: Order) -> None:
        """Give the job back where the node that would have done it is gone, after the others have left."""
        lost = {int(node) for node in order.facts.get("lost", [])}
        deadline = time.monotonic() + _LEAVE_TIMEOUT_S
        if self._context.is_alone:
            return
        self._group.allow(SCHEDULER_S)
        while time.monotonic() < deadline:
            members = self._group.members()
            # Those that were lost in earlier attempts too: they never took their names off the list.
            lost.update(self._group.silent(members))
            if members.keys() <= {self._context.node, *lost}:
                break
            time.sleep(_POLL_S)
        with contextlib.suppress(LauncherError):
            self._context.scheduler.release(sorted(lost))

    def _end_where_forgotten(self, order: Order | None) -> None:
        """Raise LaunchError where no agent has given an order for too long: this one would wait for ever."""
        now = time.monotonic()
        if now - self._checked_at < _CHECK_S:
            return
        self._checked_at = now
        # Its orders lay there, and nobody can give another one.
        with contextlib.suppress(OSError):
            is_gone = not self._context.run.has_records()
            self._gone_since = (self._gone_since or now) if is_gone else None
        if self._gone_since is not None and now - self._gone_since > _REMOVED_TIMEOUT_S:
            raise LaunchError(f"{self._context.run.path} was removed or renamed while nothing of it trained")
        limit = NODES_TIMEOUT_S + _ORPHAN_TIMEOUT_S if order is None else _ORPHAN_TIMEOUT_S
        is_busy = order is not None and len(self._group.reports(order.number, order.nodes)) == 0
        if is_busy or self._group.leads:
            self._idle_since = now
        if now - self._idle_since > limit:
            raise LaunchError(
                f"no agent has said for {limit:g} s what comes next ({self._group.folder}); the logs of the "
                "other nodes tell what became of them"
            )

    def _pause(self, order: Order | None) -> None:
        self._tick(-1)
        is_spare = order is not None and self._context.node not in order.nodes
        is_awaited = self._ring_measurement.look(order)
        if self._context.node_check is not None:
            self._context.node_check.tick(is_idle=is_spare)
        is_patient = not is_awaited and (is_spare or self._group.num_nodes > _MANY_NODES)
        time.sleep(_IDLE_POLL_S if is_patient and not self._group.leads else _POLL_S)


def run_of(words: Sequence[str]) -> RunDir:
    """Return the run that a batch script names to the programs that it starts: `RUN_DIR`, or for an array of
    a sweep `SWEEP_DIR --first F`, where task t trains the member with index F + t; of a member that shares
    its node `RUN_DIR --place N.P`.
    """
    if len(words) == 1 or place_of(words) is not None:
        return RunDir(Path(words[0]))
    path, _, first = words
    return SweepDir(Path(path)).member(int(first) + int(os.environ["SLURM_ARRAY_TASK_ID"]))


def group_folder(control: Path, job: str, restart: int) -> Path:
    """Return where the agents of one start of a job meet."""
    return control / group_name(job, restart)


def fork_server_of(
    config: Config, run: RunDir, search_path: Sequence[str] = (), owner: ServerOwner | None = None
) -> ForkServer | None:
    """Return what starts this node's ranks without importing torch again; None where it is not wanted
    (`recovery.warm_start`).

    Without an `owner` the process is this one's own, and ends with it.
    """
    if not config.recovery.warm_start:
        return None
    ranks = int(config.cluster.gpus_per_node)
    environment = worker_environment(config, ranks, search_path=search_path, binding=binding_here(config))
    modules = (_TRAINER, _COMPILER) if _needs_compiler(config) else (_TRAINER,)
    return ForkServer(modules, environment, run.logs / "warm.log", owner)


def _needs_compiler(config: Config) -> bool:
    """Whether ranks will import torch's compiler: for blocks that are compiled, and because torch's
    checkpoints of activations, its optimizers and operators of one's own ask whether they are being compiled.
    """
    train, device = config.train, "cpu" if config.cluster.device is Device.cpu else "cuda"
    recomputes = train.recompute is not Recompute.none or train.recompute_budget_gib is not None
    has_operators = config.model.num_experts > 0 or config.optim.target is not None
    return is_wanted(train.compile, device) or recomputes or has_operators


def context_of_task(words: Sequence[str], signals: StopRequests, owner: ServerOwner) -> AgentContext:
    """Return what the agent of this Slurm task works with; `words` are what it was started with, and `owner`
    holds the process that ranks are forked from.

    Raises LaunchError and LauncherError outside a job that fits the run.
    """
    run, place = run_of(words), place_of(words)
    task = job_task(os.environ)
    config = read_config(run.config)
    open_to_group(config.run.group)
    helped = helped_group(os.environ)
    scheduler: Scheduler
    if helped is None:
        _require_nodes(run, config, task)
        name, first = group_name(task.job, task.restart), 0
        scheduler = SlurmJob(run, config, task) if place is None else PackedJob(run, config, task, place)
        if place is not None:
            # A job may have a member twice.
            name = f"{name}.place-{place.number}"
    else:
        name, first = helped.name, helped.first_node
        scheduler = HelperJob(config, task)
        if not (run.control / name).is_dir():
            raise LaunchError(f"there is no job to help: {run.control / name} is gone")
    node, num_nodes = first + task.node, first + task.num_nodes
    group = NodeGroup(
        run.control / name,
        node,
        num_nodes,
        config.recovery.agent_timeout_s,
        _end_this_agent,
        may_grow=config.cluster.nodes > 1,
    )
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]

    where = f"node {node} of {num_nodes} on {scheduler.host}"

    def say(words: str) -> None:
        sys.stdout.write(f"job {task.job} start {task.restart} {where}: {words}\n")
        sys.stdout.flush()

    say("joins the others")
    fork_server = fork_server_of(config, run, path, owner)
    node_check = node_check_of(config, run, group)
    return AgentContext(
        run, config, group, signals, scheduler, say, path, fork_server=fork_server, node_check=node_check
    )


def _require_nodes(run: RunDir, config: Config, task: JobTask) -> None:
    """Raise LaunchError where a job has another number of nodes than its run needs."""
    cluster = config.cluster
    most = cluster.nodes + cluster.spare_nodes
    fewest = most if cluster.min_nodes is None else cluster.min_nodes + cluster.spare_nodes
    if config.recovery.min_nodes is not None:
        # A job that follows asks for no more nodes than there are, where the run can go on with those.
        fewest = min(fewest, config.recovery.min_nodes)
    if not fewest <= task.num_nodes <= most:
        needed = f"{most}" if fewest == most else f"{fewest} to {most}"
        raise LaunchError(
            f"the job has {task.num_nodes} nodes, the run needs {needed} (cluster.nodes="
            f"{cluster.nodes}, cluster.spare_nodes={cluster.spare_nodes}); "
            f"`orchestra resume {run.name}` submits it again"
        )


def _end_this_agent() -> None:
    """End this process, whose main thread stands still: the process that keeps it starts another."""
    sys.stderr.write("error: this node's agent makes no progress, and is ended; it stands still in:\n")
    faulthandler.dump_traceback(sys.stderr)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def train_here(
    config: Config,
    run: RunDir,
    attempt: int,
    *,
    tick: Callable[[int, int], None],
    search_path: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> tuple[int, Verdict]:
    """Train to the end on this machine; return the last attempt and its verdict. No process of it is left.

    A failure that may pass begins another attempt, as `orchestra.recovery.policy` says. SIGINT, SIGTERM,
    SIGHUP and requests in control/ stop it after a step, with a checkpoint; a second signal ends it at once
    (`orchestra.agents.attempt.StopDeadline`). Main thread only. `config` is resolved; `tick` is
    called about ten times a second with the attempt (-1 between two) and the number of stop requests so far.
    Raises LaunchError when torchrun cannot be started or the run directory not be written.
    """
    open_to_group(config.run.group)
    with StopRequests() as signals:
        try:
            group = NodeGroup(group_folder(run.control, f"here-{os.getpid()}", attempt), 0, 1, 60.0)
            fork_server = fork_server_of(config, run, search_path)
            scheduler = Scheduler()
            context = AgentContext(
                run, config, group, signals, scheduler, say, search_path, fork_server=fork_server
            )
            result = attend(context, tick=lambda number: tick(number, signals.count()), first_attempt=attempt)
        except (LauncherError, OSError) as error:
            raise LaunchError(str(error)) from error
    last = attempt if result.last_attempt is None else result.last_attempt
    verdict = result.unwritten or node_verdict(attempt_of(read_events(run, attempt=last), last))
    return last, verdict or Verdict(result.code, "no verdict", "the attempt left no record of its end")
