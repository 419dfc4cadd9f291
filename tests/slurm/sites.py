"""One development cluster as tests, the fault matrix and benchmarks use it, and the runs submitted there.

A `Site` has the commands of the cluster and those of the user who submits there; a `SubmittedRun` has a run's
records and processes, and injects faults into it. What must follow a fault is not known here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestra.recovery.excluded_hosts import excluded_folder
from orchestra.run.events import read_events
from orchestra.run.files import Record, read_last_lines
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from slurm.cluster.errors import ClusterError
from slurm.cluster.hosts import enter, processes_on, start_ticks
from slurm.cluster.layout import ClusterLayout, load_layout
from slurm.cluster.operations import fail_node, heal_node
from tests.support.tiny import TINY_MODEL

ROOT = Path(__file__).parents[2]

TINY = (*TINY_MODEL, "cluster.gpus_per_node=2")
# For a run that trains until a test ends it: about ten steps a second leave the processors to others.
ENDLESS = (
    "train.steps=1000000",
    "recovery.inject=[{at_step: 1, rank: all, fault: slow, seconds: 0.08, attempt: all}]",
)
# So that the first attempt is not over before a fault is injected, however fast the machine is.
SLOW_FIRST_ATTEMPT = "recovery.inject=[{at_step: 1, rank: 0, fault: slow, seconds: 0.1}]"
# A job that waits in the queue until it is released.
HELD = "cluster.slurm_extra.hold=true"

_POLL_S = 0.05
# Between two looks, as a multiple of what a look takes.
_LOOK_SHARE = 4
_POLL_AT_MOST_S = 3.0
# Long enough that the clock's whole second is another one.
_PAST_THE_SECOND_S = 1.1
# Between two tries to start a job: mostly in another second than the one in which its nodes were cleared.
_TRY_EVERY_S = 2.5
# A host's own first process and its daemon.
_OF_THE_HOST = ("slurm.cluster.host", "slurmd -D")
_JOB_IS_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
# As much of the metrics as holds their last row.
_ROW_BYTES = 1 << 14
# Of each log, where a test fails.
_LOG_CHARACTERS = 3000


def slow_attempts(count: int, seconds: float) -> str:
    """Return the setting by which rank 0 takes its time in each step of the first attempts alone."""
    fault = f"at_step: 1, rank: 0, fault: slow, seconds: {seconds:g}"
    return f"recovery.inject=[{', '.join(f'{{{fault}, attempt: {number}}}' for number in range(count))}]"


class TooLateError(AssertionError):
    """What was waited for did not come within its limit."""


def wait_until(is_true: Callable[[], object], what: str, within_s: float = 90) -> None:
    """Wait until something is true. Raises TooLateError with its name.

    A look that starts a process is repeated more rarely: the processors are for what is waited for.
    """
    deadline = time.monotonic() + within_s
    while True:
        looked = time.monotonic()
        if is_true():
            return
        now = time.monotonic()
        if now > deadline:
            raise TooLateError(f"not within {within_s:g} s: {what}")
        time.sleep(max(_POLL_S, min(_LOOK_SHARE * (now - looked), _POLL_AT_MOST_S)))


class Site:
    """A cluster below one folder, and an ordinary user on it.

    `folder/shared` belongs to the user and is the same on all hosts, as a home on a real cluster is.
    """

    def __init__(self, folder: Path, user: pwd.struct_passwd) -> None:
        self.folder = folder
        self.user = user
        self.state = folder / "cluster"
        self.shared = folder / "shared"
        folder.chmod(0o755)
        self.shared.mkdir(exist_ok=True)
        os.chown(self.shared, user.pw_uid, user.pw_gid)

    @property
    def layout(self) -> ClusterLayout:
        layout = load_layout(self.state)
        assert layout, f"no cluster in {self.state}"
        return layout

    @property
    def runs(self) -> Path:
        return self.shared / "runs"

    @property
    def environment(self) -> dict[str, str]:
        """The ordinary user's whole environment in a shell on the login node."""
        path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        who = {"HOME": str(self.shared), "USER": self.user.pw_name, "LOGNAME": self.user.pw_name}
        return {"PATH": path, "LANG": "C.UTF-8", **who, **self.layout.environment}

    # The cluster.

    def devcluster(
        self, *arguments: str, check: bool = True, timeout_s: float = 110
    ) -> subprocess.CompletedProcess[str]:
        """Run `slurm/devcluster` on this cluster as root."""
        command = [sys.executable, str(ROOT / "slurm" / "devcluster"), "--state", str(self.state), *arguments]
        return _finished(subprocess.run(command, capture_output=True, text=True, timeout=timeout_s), check)

    def as_root(self, *command: str, host: str = "controller", check: bool = True) -> str:
        """Run a command as root on a host and return what it printed."""
        return self.devcluster("exec", host, "--", *command, check=check).stdout

    def inside(self, host: str, *command: str) -> None:
        """Run a command as root inside a host's namespaces, without the start of another Python."""
        layout = self.layout
        environment = os.environ | layout.environment
        words = [*enter(layout, host), *command]
        subprocess.run(words, env=environment, check=True, capture_output=True, text=True)

    def fail(self, node: str) -> None:
        """Cut a node off and end everything on it."""
        fail_node(self.layout, node)

    def heal(self, node: str) -> None:
        """Start a node again and wait until Slurm gives it jobs."""
        heal_node(self.layout, node)

    @contextlib.contextmanager
    def silent_controller(self) -> Iterator[None]:
        """Stop slurmctld as a hanging file server would stop it: its port is open and nothing answers."""
        (pid,) = [pid for pid, line in self.processes_on("controller").items() if "slurmctld" in line]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def unreachable_controller(self) -> dict[str, str]:
        """Return what a command's environment holds for Slurm's commands to reach no controller."""
        text = self.layout.slurm_conf.read_text()
        line = next(line for line in text.splitlines() if line.startswith("SlurmctldHost="))
        file = self.shared / "unreachable.conf"
        file.write_text(text.replace(line, "SlurmctldHost=localhost\nSlurmctldPort=1\nMessageTimeout=2"))
        return {"SLURM_CONF": str(file)}

    def lost_answer_of_sbatch(self) -> dict[str, str]:
        """Return what a command's environment holds for a job to be submitted and the answer to be lost."""
        wrappers = self.shared / "wrappers"
        wrappers.mkdir(exist_ok=True)
        sbatch = wrappers / "sbatch"
        error = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
        real = shutil.which("sbatch")
        sbatch.write_text(f"#!/bin/sh\n{real} \"$@\" > /dev/null 2>&1\necho '{error}' >&2\nexit 1\n")
        sbatch.chmod(0o755)
        return {"PATH": f"{wrappers}:{self.environment['PATH']}"}

    # Commands of the user.

    def as_user(self, **environment: str) -> dict[str, Any]:
        """Return the arguments with which `subprocess` starts a command of the user in the shared folder."""
        who = {"user": self.user.pw_uid, "group": self.user.pw_gid, "extra_groups": []}
        return {"cwd": self.shared, "env": self.environment | environment, "text": True, **who}

    def run(
        self, *command: str, check: bool = True, timeout_s: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command as the ordinary user, in the shared folder."""
        options = self.as_user(**environment)
        return _finished(subprocess.run(command, capture_output=True, timeout=timeout_s, **options), check)

    def orchestra(
        self,
        *words: str,
        root: Path = ROOT,
        check: bool = True,
        timeout_s: float = 120,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run our command as the ordinary user on the login node, from the tree at `root`."""
        command = (sys.executable, "-m", "orchestra", *words)
        return self.run(*command, check=check, timeout_s=timeout_s, PYTHONPATH=str(root), **environment)

    def refused(self, code: int, words: str, *command: str, **environment: str) -> str:
        """Run our command, which must end with `code` and say `words`; return its standard output."""
        done = self.orchestra(*command, check=False, **environment)
        assert (done.returncode, words in done.stderr) == (code, True), done.stdout + done.stderr
        return done.stdout

    def start_orchestra(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start our command as the ordinary user and do not wait for it."""
        command = (sys.executable, "-u", "-m", "orchestra", *words)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, **self.as_user(PYTHONPATH=str(ROOT)), **{**pipes, **options})

    def submit_run(self, name: str, *overrides: str, root: Path = ROOT, **environment: str) -> SubmittedRun:
        """Submit a small run."""
        words = ("submit", *TINY, f"run.name={name}", *overrides, "--json")
        facts = json.loads(self.orchestra(*words, root=root, **environment).stdout)
        return SubmittedRun(self, RunDir(Path(facts["path"])), str(facts["job"]))

    def train_here(self, name: str, *overrides: str, timeout_s: float = 300) -> RunDir:
        """Train a small run on the login node to its end."""
        self.orchestra("run", *TINY, f"run.name={name}", *overrides, timeout_s=timeout_s)
        return RunDir(self.runs / name)

    def status(self, name: str) -> Record:
        """Return what `orchestra status` says of a run or a sweep."""
        (state,) = json.loads(self.orchestra("status", name, "--json").stdout)
        return dict(state)

    def copy_of_the_code(self, name: str) -> Path:
        """Return a copy of our packages that the user may change."""
        tree = self.shared / name
        for package in ("conf", "orchestra", "launchers", "checkpointing"):
            shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
        self.as_root("chown", "-R", self.user.pw_name, str(tree))
        return tree

    # Jobs and nodes, as Slurm sees them.

    def submit(self, *options: str) -> str:
        """Run sbatch as the ordinary user and return the job's id."""
        return self.run("sbatch", "--parsable", *options).stdout.strip()

    def queue(self, *options: str) -> list[str]:
        """Return the lines that squeue prints, without a heading."""
        return self.run("squeue", "--noheader", *options).stdout.splitlines()

    def job_state(self, job: str) -> str:
        """Return Slurm's word for a job's state, asking no accounting."""
        return self._job(job)["JobState"]

    def exit_code(self, job: str) -> str:
        return self._job(job)["ExitCode"]

    def _job(self, job: str) -> dict[str, str]:
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return dict(field.split("=", 1) for field in shown.split() if "=" in field)

    def ended(self, job: str) -> str:
        """Wait for a job's end and return Slurm's word for it."""
        wait_until(lambda: self.job_state(job) in _JOB_IS_OVER, f"job {job} ends", 100)
        return self.job_state(job)

    def start_again_now(self, job: str, *changes: str) -> None:
        """Wait until a job was put back into the queue, and spare it the time that Slurm holds it there.
        `changes` are made to it before it starts, as `scontrol update` takes them.
        """
        # Its nodes are cleared first, which takes minutes on a machine that is busy throughout.
        try:
            wait_until(lambda: self.job_state(job) == "PENDING", f"job {job} is in the queue again", 150)
        except TooLateError as error:
            raise TooLateError(f"{error}; it is {self.job_state(job)}") from None
        # Slurm's daemons count in whole seconds: a start in the second in which the nodes were cleared is
        # taken for the attempt that ended then, and fails.
        time.sleep(_PAST_THE_SECOND_S)

        tried = -math.inf

        def is_started() -> bool:
            # Refused or written over while the job is still taken off its nodes: said until it counts.
            nonlocal tried
            if time.monotonic() > tried + _TRY_EVERY_S:
                tried = time.monotonic()
                with contextlib.suppress(subprocess.CalledProcessError):
                    words = ("scontrol", "update", f"JobId={job}", "StartTime=now", *changes)
                    self.inside("controller", *words)
            return self.job_state(job) != "PENDING"

        wait_until(is_started, f"job {job} starts again")
        if (state := self.job_state(job)) in ("FAILED", "NODE_FAIL"):
            raise AssertionError(f"job {job} started again and ended at once as {state}")

    def cancel_all_jobs(self) -> None:
        """End all of the user's jobs, and wait until no node holds any of them."""
        self.run("scancel", "--user", self.user.pw_name)
        wait_until(lambda: not self.queue(), "all jobs have ended")

    def about_node(self, node: str, column: str) -> str:
        """Return a column of sinfo for a node: %T its state, with an asterisk where it is silent, %E why."""
        query = ["sinfo", "--noheader", "--partition=main", f"--nodes={node}", f"--format={column}"]
        return self.run(*query).stdout.strip()

    def is_node_down(self, node: str) -> bool:
        """Whether Slurm has given a silent node up.

        Slurm 22.05 can go on calling such a node `mixed*`: it counts the CPUs in use at most once a second,
        and misses a change in the second of its last count. The reason is always set.
        """
        return self.about_node(node, "%E") == "Not responding"

    # Processes.

    def processes_on(self, host: str) -> dict[int, str]:
        """Return the processes in a host's namespaces by the machine's numbers, with their commands."""
        return processes_on(self.layout, host)

    def processes_of_jobs(self, host: str) -> dict[int, str]:
        """Return those of `processes_on` that are not the host's own."""
        processes = self.processes_on(host).items()
        return {pid: line for pid, line in processes if line and not any(own in line for own in _OF_THE_HOST)}

    def busy_nodes(self) -> dict[str, dict[int, str]]:
        """Return the processes of jobs on each node that has any."""
        processes = {node: self.processes_of_jobs(node) for node in self.layout.nodes}
        return {node: busy for node, busy in processes.items() if busy}

    def nodes_with(self, words: str) -> set[str]:
        """Return the nodes on which a process of a job has these words on its command line."""
        busy = self.busy_nodes().items()
        return {node for node, processes in busy if any(words in line for line in processes.values())}

    def wait_until_clean(self, within_s: float = 30) -> None:
        """Wait until no node has a process of any job; ranks have ten seconds when they are ended."""
        with contextlib.suppress(TooLateError):
            wait_until(lambda: not self.busy_nodes(), "no process of a job is left", within_s)
        assert self.busy_nodes() == {}

    def clear(self) -> None:
        """End all jobs, bring back all nodes, and wait until nothing is left of them."""
        for node in self.layout.nodes:
            # What a fault may have done to its network; a host that is down forgot it.
            with contextlib.suppress(subprocess.CalledProcessError, ClusterError):
                self.inside(node, "ip", "neigh", "flush", "dev", "eth0", "nud", "permanent")
        # Hosts that failed twice would be left out of the next run too.
        shutil.rmtree(excluded_folder(self.runs), ignore_errors=True)
        self.cancel_all_jobs()
        words = ("up", "--nodes", str(len(self.layout.nodes)), "--gpus", "4")
        # A controller that asks a dead node something may not answer for a while.
        wait_until(lambda: self.devcluster(*words, check=False).returncode == 0, "the cluster is up", 120)
        self.wait_until_clean(60)


@contextlib.contextmanager
def opened_at(folder: Path | None, nodes: int = 4) -> Iterator[Site]:
    """Yield a cluster of root's: below `folder` one that stays, without it one that ends.

    Whoever starts a cluster is root, and needs no other user then.
    """
    # A cluster outlives whoever is ended by a signal that nobody handles.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="orchestra-") as temporary:
        place = folder or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        site = Site(place, pwd.getpwuid(0))
        site.devcluster("up", "--nodes", str(nodes), "--gpus", "4")
        try:
            yield site
        finally:
            if folder is None:
                site.devcluster("down")
            else:
                site.clear()


@dataclass
class Freeze:
    """All processes of a run on a host, stopped and later continued (Unix seconds)."""

    host: str
    pids: list[int]
    since: float
    until: float = math.inf


@dataclass
class SubmittedRun:
    """One submitted run. Ranks are named by their number in the newest attempt."""

    site: Site
    dir: RunDir
    job: str
    # What was done to it, when (Unix seconds).
    injected: list[tuple[float, str]] = field(default_factory=list)
    frozen: Freeze | None = None

    # What its records say.

    def events(self, *names: str) -> list[Record]:
        """Return its events of these names (all), oldest first."""
        return [event for event in read_events(self.dir, names) if not names or event["event"] in names]

    def steps(self) -> list[int]:
        """Return the steps of its rows, without those that a rollback made void."""
        return [row["step"] for row in read_metrics(self.dir)]

    def step(self) -> int:
        """Return the step that the last row tells of; 0 before the first."""
        rows = read_last_lines(self.dir.metrics, 1, _ROW_BYTES)
        return next((int(row["step"]) for row in rows if "step" in row), 0)

    def attempt(self) -> int:
        """Return the newest attempt that was started; -1 before the first."""
        return max((event["attempt"] for event in self.events("attempt_started")), default=-1)

    def hosts(self, attempt: int | None = None) -> list[str]:
        """Return an attempt's hosts in the order of its nodes; of the newest one by default."""
        wanted = self.attempt() if attempt is None else attempt
        (start,) = (event for event in self.events("attempt_started") if event["attempt"] == wanted)
        return list(start["hosts"])

    def is_finished(self) -> bool:
        return any("node" in event for event in self.events("finished"))

    def is_over(self) -> bool:
        """Tell whether no job of it is left in the queue or at work."""
        return not self.site.queue(f"--name={self.dir.name}")

    def status(self) -> Record:
        """Return what `orchestra status` says of it."""
        return self.site.status(self.dir.name)

    def logs(self) -> str:
        """Return the ends of its agents' logs and of its newest attempt's."""
        newest = self.dir.attempt_logs(max(0, self.attempt()))
        files = (*sorted(self.dir.job_logs.glob("*")), *sorted(newest.glob("*.log")))
        texts = [(file.name, file.read_text(errors="replace")) for file in files]
        return "\n".join(f"==> {name} <==\n{text[-_LOG_CHARACTERS:]}" for name, text in texts if text)

    # Its processes.

    def processes(self, host: str) -> dict[int, str]:
        """Return what of it runs on a host, its fork server and torchrun included."""
        path, processes = str(self.dir.path), self.site.processes_of_jobs(host)
        own = {pid for pid, line in processes.items() if path in line}
        return {pid: line for pid, line in processes.items() if pid in own or parent(pid) in own}

    def rank_pids(self, host: str) -> list[int]:
        """Return its ranks on a host, lowest first."""
        others = ("launchers.bound_torchrun", "fork_server/worker_launcher.py")
        lines = self.processes(host).items()
        ranks = {pid: line for pid, line in lines if "-m orchestra.train " in line}
        return by_age(
            pid
            for pid, line in ranks.items()
            if not line.startswith("srun ") and not any(other in line for other in others)
        )

    def agent_pid(self, host: str) -> int:
        """Return its agent on a host: the youngest of the two processes that look like it."""
        lines = self.processes(host).items()
        agents = {pid: line for pid, line in lines if "-m orchestra.agents " in line}
        return by_age(pid for pid, line in agents.items() if not line.startswith("srun "))[-1]

    # What is done to it.

    def hit_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank of the newest attempt."""
        per_node = int(self.events("attempt_started")[-1]["ranks_per_node"])
        host = self.hosts()[rank // per_node]
        pid = self.rank_pids(host)[rank % per_node]
        self._inject(
            f"rank {rank} on {host} gets {signal.Signals(number).name}", lambda: os.kill(pid, number)
        )

    def hit_agent(self, node: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the agent of a node of the newest attempt."""
        host = self.hosts()[node]
        pid = self.agent_pid(host)
        self._inject(f"the agent on {host} gets {signal.Signals(number).name}", lambda: os.kill(pid, number))

    def fail_node(self, node: int) -> str:
        """Take a node of the newest attempt down; return its host."""
        host = self.hosts()[node]
        self._inject(f"{host} goes down", lambda: self.site.fail(host))
        return host

    def _inject(self, what: str, do: Callable[[], None]) -> None:
        self.injected.append((time.time(), what))
        # It may have ended by itself in this moment.
        with contextlib.suppress(ProcessLookupError):
            do()

    # Waiting for it.

    def wait(self, is_true: Callable[[], object], what: str, within_s: float = 90) -> None:
        """Wait until something is true; what its logs hold comes with the failure."""
        try:
            wait_until(is_true, f"{self.dir.name}: {what}", within_s)
        except TooLateError as error:
            raise TooLateError(f"{error}\n{self.logs()}") from None

    def wait_for_step(self, step: int, within_s: float = 90) -> None:
        self.wait(lambda: self.step() >= step, f"step {step}", within_s)

    def wait_for_steps(self, count: int, within_s: float = 90) -> None:
        """Wait until so many more steps are trained than now."""
        self.wait_for_step(self.step() + count, within_s)

    def wait_for_attempt(self, attempt: int, within_s: float = 90) -> None:
        """Wait until an attempt trains."""
        self.wait(
            lambda: any(event["attempt"] >= attempt for event in self.events("training_started")),
            f"attempt {attempt} trains",
            within_s,
        )

    def wait_for_event(self, name: str, within_s: float = 90) -> Record:
        """Wait until an event was written; return the newest of its name."""
        self.wait(lambda: self.events(name), name, within_s)
        return self.events(name)[-1]

    def wait_until_finished(self, within_s: float = 90) -> None:
        """Wait until its agents say so: the first rank that ends says `finished` before the others."""
        self.wait(self.is_finished, "it is finished", within_s)

    def assert_job_ends(self, state: str, exit_code: str | None = None, job: str | None = None) -> None:
        """Wait for a job's end (its own by default), which must be the given one in Slurm."""
        asked = self.job if job is None else job
        assert self.site.ended(asked) == state, self.logs()
        assert exit_code in (None, self.site.exit_code(asked)), self.logs()

    def assert_state(self, state: str, within_s: float = 90) -> None:
        """Wait until `orchestra status` says that the run is in this state."""
        if state == "finished":
            # A look at its events starts no process.
            self.wait_until_finished(within_s)
        self.wait(lambda: self.status()["state"] == state, f"it is {state}", within_s)


def by_age(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that live, the oldest first: their numbers begin again after 32,768."""
    began = ((start_ticks(pid), pid) for pid in pids)
    return [pid for _, pid in sorted((ticks, pid) for ticks, pid in began if ticks is not None)]


def parent(pid: int) -> int:
    """Return the number of a process's parent; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _finished(done: subprocess.CompletedProcess[str], check: bool) -> subprocess.CompletedProcess[str]:
    assert not check or done.returncode == 0, (
        f"{done.stderr.strip() or done.stdout.strip()}\n{done.args} ended with {done.returncode}"
    )
    return done
