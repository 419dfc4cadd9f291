"""A cluster on which runs are hurt on purpose: what the fault matrix, the soak and the benchmark share.

It submits runs, finds their processes on the hosts, and hurts hosts and processes. What is to follow is not
known here.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sites import ROOT, Site

from orchestra.recovery.excluded_hosts import excluded_folder
from orchestra.run.events import read_events
from orchestra.run.files import Record, read_last_lines
from orchestra.run.paths import RunDir
from slurm.cluster.errors import ClusterError
from slurm.cluster.hosts import enter
from slurm.cluster.operations import fail_node, heal_node

# A model of 11,056 parameters: what takes time is starting the ranks.
TINY = (
    *("model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=1"),
    *("model.num_attention_heads=2", "model.num_key_value_heads=1", "train.seq_len=16"),
    *("wandb.mode=disabled", "cluster.device=cpu", "cluster.threads_per_rank=1", "cluster.peak_tflops=1"),
)
AGENT = "-m orchestra.agents "
RANK = "-m orchestra.train "
# A host's own first process and its daemon.
_OF_THE_HOST = ("slurm.cluster.host", "slurmd -D")
_POLL_S = 0.05
# As much of the metrics as holds their last row.
_ROW_BYTES = 1 << 14
# Of each log, where a test fails.
_SAID_CHARACTERS = 1000


class TooLateError(AssertionError):
    """What was waited for did not come within its limit."""


class Field:
    """A development cluster and a user's runs on it.

    Root is the user by default: whoever starts a cluster is root, and needs no other user then.
    """

    def __init__(self, site: Site) -> None:
        self.site = site
        self.layout = site.layout

    @classmethod
    def open(cls, folder: Path, nodes: int = 4) -> Field:
        """Return root's field below `folder`, with a cluster that is brought up if it is not."""
        folder.mkdir(parents=True, exist_ok=True)
        site = Site(folder, pwd.getpwuid(0))
        site.devcluster("up", "--nodes", str(nodes), "--gpus", "4")
        return cls(site)

    def close(self) -> None:
        self.site.devcluster("down")

    def orchestra(
        self, *words: str, check: bool = True, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run the command as the field's user, from this tree."""
        command = (sys.executable, "-m", "orchestra", *words)
        return self.site.run(*command, check=check, timeout_s=timeout_s, PYTHONPATH=str(ROOT))

    def submit(self, name: str, *overrides: str) -> Subject:
        """Submit a small run."""
        said = self.orchestra("submit", *TINY, f"run.name={name}", *overrides, "--json").stdout
        facts = json.loads(said)
        return Subject(self, RunDir(Path(facts["path"])), str(facts["job"]))

    def train_here(self, name: str, *overrides: str, timeout_s: float = 300) -> RunDir:
        """Train a small run on the login node to its end."""
        self.orchestra("run", *TINY, f"run.name={name}", *overrides, timeout_s=timeout_s)
        return RunDir(self.site.shared / "runs" / name)

    # Hosts.

    def fail(self, node: str) -> None:
        """Cut a node off and end everything on it."""
        fail_node(self.layout, node)

    def heal(self, node: str) -> None:
        """Start a node again and wait until Slurm gives it jobs."""
        heal_node(self.layout, node)

    def inside(self, host: str, *command: str) -> None:
        """Run a command as root inside a host's namespaces."""
        words = [*enter(self.layout, host), *command]
        subprocess.run(words, check=True, capture_output=True, text=True)

    def processes(self, host: str) -> dict[int, str]:
        """Return the processes of jobs on a host by the machine's numbers, with their commands."""
        found = self.site.processes_on(host).items()
        return {pid: line for pid, line in found if line and not any(it in line for it in _OF_THE_HOST)}

    def at_work(self) -> dict[str, dict[int, str]]:
        """Return the processes of jobs on each node that has any."""
        found = {node: self.processes(node) for node in self.layout.nodes}
        return {node: busy for node, busy in found.items() if busy}

    def clear(self) -> None:
        """End all jobs, bring back all nodes, and wait until nothing is left of them."""
        for node in self.layout.nodes:
            # What a course may have done to its network; a host that is down forgot it.
            with contextlib.suppress(subprocess.CalledProcessError, ClusterError):
                self.inside(node, "ip", "neigh", "flush", "dev", "eth0", "nud", "permanent")
        # Hosts that failed twice would be left out of the next run too.
        shutil.rmtree(excluded_folder(self.site.shared / "runs"), ignore_errors=True)
        self.site.cancel_all_jobs()
        words = ("up", "--nodes", str(len(self.layout.nodes)), "--gpus", "4")
        # A controller that asks a dead node something may not answer for a while.
        until(lambda: self.site.devcluster(*words, check=False).returncode == 0, "the cluster is up", 120)
        until(lambda: not self.at_work(), "no process of a job is left", 60)


@dataclass
class Freeze:
    """All processes of a run on a host, stopped and later continued (Unix seconds).

    `publishing`: the steps whose save had made its last look for a newer attempt, and was not committed yet.
    """

    host: str
    pids: list[int]
    since: float
    publishing: frozenset[int] = frozenset()
    until: float = math.inf


@dataclass
class Subject:
    """One submitted run. Ranks are named by their number in the newest attempt."""

    on: Field
    run: RunDir
    job: str
    # What was done to it, when (Unix seconds).
    blows: list[tuple[float, str]] = field(default_factory=list)
    frozen: Freeze | None = None

    # What its records say.

    def events(self, *names: str) -> list[Record]:
        """Return its events of these names (all), oldest first."""
        return [it for it in read_events(self.run, names) if not names or it["event"] in names]

    def step(self) -> int:
        """Return the step that the last row tells of; 0 before the first."""
        rows = read_last_lines(self.run.metrics, 1, _ROW_BYTES)
        return next((int(row["step"]) for row in rows if "step" in row), 0)

    def attempt(self) -> int:
        """Return the newest attempt that was started; -1 before the first."""
        return max((it["attempt"] for it in self.events("attempt_started")), default=-1)

    def hosts(self, attempt: int | None = None) -> list[str]:
        """Return an attempt's hosts in the order of its nodes; of the newest one by default."""
        wanted = self.attempt() if attempt is None else attempt
        (start,) = (it for it in self.events("attempt_started") if it["attempt"] == wanted)
        return list(start["hosts"])

    def is_over(self) -> bool:
        """Tell whether no job of it is left in the queue or at work."""
        return not self.on.site.run("squeue", "--noheader", f"--name={self.run.name}").stdout.strip()

    def said(self) -> str:
        """Return the ends of what its agents said and of its newest attempt's logs."""
        newest = self.run.attempt_logs(max(0, self.attempt()))
        files = (*sorted(self.run.job_logs.glob("*")), *sorted(newest.glob("*.log")))
        texts = [(file.name, file.read_text(errors="replace")) for file in files]
        return "\n".join(f"==> {name} <==\n{text[-_SAID_CHARACTERS:]}" for name, text in texts if text)

    # Its processes.

    def rank_pids(self, host: str) -> list[int]:
        """Return its ranks on a host, lowest first."""
        lines = self.own_processes(host).items()
        others = ("torch.distributed.run", "fork_server/worker_launcher.py", "srun")
        return sorted(pid for pid, line in lines if RANK in line and not any(it in line for it in others))

    def agent_pid(self, host: str) -> int:
        """Return its agent on a host: the youngest of the two processes that look like it."""
        return max(
            pid for pid, line in self.own_processes(host).items() if AGENT in line and "srun" not in line
        )

    def own_processes(self, host: str) -> dict[int, str]:
        """Return what of it runs on a host, its fork server and torchrun included."""
        path, found = str(self.run.path), self.on.processes(host)
        own = {pid for pid, line in found.items() if path in line}
        return {pid: line for pid, line in found.items() if pid in own or parent(pid) in own}

    # What is done to it.

    def hit_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to a rank of the newest attempt."""
        hosts, per_node = self.hosts(), self._ranks_per_node()
        host = hosts[rank // per_node]
        pid = self.rank_pids(host)[rank % per_node]
        self._hit(f"rank {rank} on {host} gets {signal.Signals(number).name}", lambda: os.kill(pid, number))

    def hit_agent(self, node: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to the agent of a node of the newest attempt."""
        host = self.hosts()[node]
        pid = self.agent_pid(host)
        self._hit(f"the agent on {host} gets {signal.Signals(number).name}", lambda: os.kill(pid, number))

    def fail_node(self, node: int) -> str:
        """Take a node of the newest attempt down; return its host."""
        host = self.hosts()[node]
        self._hit(f"{host} goes down", lambda: self.on.fail(host))
        return host

    def _hit(self, what: str, do: Callable[[], None]) -> None:
        self.blows.append((time.time(), what))
        # It may have ended by itself in this moment.
        with contextlib.suppress(ProcessLookupError):
            do()

    def _ranks_per_node(self) -> int:
        return int(self.events("attempt_started")[-1]["ranks_per_node"])

    # Waiting for it.

    def wait(self, is_true: Callable[[], object], what: str, within_s: float = 90) -> None:
        """Wait until something is true; what its logs hold comes with the failure."""
        try:
            until(is_true, f"{self.run.name}: {what}", within_s)
        except TooLateError as error:
            raise TooLateError(f"{error}\n{self.said()}") from None

    def wait_for_step(self, step: int, within_s: float = 90) -> None:
        self.wait(lambda: self.step() >= step, f"step {step}", within_s)

    def wait_for_attempt(self, attempt: int, within_s: float = 90) -> None:
        """Wait until an attempt trains."""
        self.wait(
            lambda: any(it["attempt"] >= attempt for it in self.events("training_started")),
            f"attempt {attempt} trains",
            within_s,
        )

    def wait_for_event(self, name: str, count: int = 1, within_s: float = 90) -> Record:
        """Wait until an event was written so often; return the last of them."""
        self.wait(lambda: len(self.events(name)) >= count, f"{count} × {name}", within_s)
        return self.events(name)[-1]

    def is_finished(self) -> bool:
        return any("node" in it for it in self.events("finished"))


def parent(pid: int) -> int:
    """Return the number of a process's parent; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def until(is_true: Callable[[], object], what: str, within_s: float = 90) -> None:
    """Wait until something is true. Raises TooLateError with its name."""
    deadline = time.monotonic() + within_s
    while True:
        looked = time.monotonic()
        if is_true():
            return
        now = time.monotonic()
        if now > deadline:
            raise TooLateError(f"not within {within_s:g} s: {what}")
        time.sleep(max(_POLL_S, now - looked))


@contextlib.contextmanager
def opened_at(folder: Path | None, nodes: int = 4) -> Iterator[Field]:
    """Yield root's field: below `folder` one that stays, without it one that ends."""
    with tempfile.TemporaryDirectory(prefix="orchestra-") as temporary:
        found = Field.open(folder or Path(temporary), nodes)
        try:
            yield found
        finally:
            found.clear() if folder is not None else found.close()
