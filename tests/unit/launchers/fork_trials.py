"""Worker modules for forked starts, in a folder that the server imports from, and what became of them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launchers import processes
from launchers.fork_server.client import ForkServer
from launchers.host_network import free_port
from launchers.node_agent import NodeAgent, Patience, start_agent, supervise
from launchers.processes import Process
from launchers.torchrun import Ending, LaunchPlace, LaunchSpec
from tests.support import waiting

_ROOT = Path(__file__).resolve().parents[3]
_WAIT_S = 30.0
_SHORT = Patience(stop_s=1.0, failed_peer_s=1.0, linger_s=0.2)
# Every rank writes its process id before anything else and waits for the other one's.
_PROLOGUE = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
here = pathlib.Path(sys.argv[1])
(here / f"draft-{rank}").write_text(f"{os.getpid()} {os.environ['LAUNCHERS_MARK']}")
(here / f"draft-{rank}").rename(here / f"pid-{rank}")
while len(list(here.glob("pid-*"))) < 2: time.sleep(0.01)
"""


def eventually(claim: Callable[[], bool]) -> bool:
    """Wait until a claim holds; return whether it does."""
    return waiting.eventually(claim, _WAIT_S)


def environment(folder: Path) -> dict[str, str]:
    """Return what workers in `folder` and their server are started with."""
    return {"PYTHONPATH": f"{folder}{os.pathsep}{_ROOT}", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


@dataclass
class Trial:
    """One attempt of a worker module on two ranks."""

    # Of all modules; the trial's own files are in a folder of the module's name below it.
    modules: Path
    name: str

    @property
    def folder(self) -> Path:
        return self.modules / f"files-{self.name}"

    @property
    def log(self) -> Path:
        return self.folder / "node.log"

    @property
    def spec(self) -> LaunchSpec:
        return LaunchSpec(self.name, (str(self.folder),), environment(self.modules), 2, (self.log,))

    def start(self, fork_server: ForkServer | None, patience: Patience = _SHORT) -> NodeAgent:
        starter = None if fork_server is None else fork_server.start_torchrun
        return start_agent(self.spec, LaunchPlace(0, "127.0.0.1", free_port()), patience, starter)

    def run(
        self,
        fork_server: ForkServer | None,
        tick: Callable[[], None] = lambda: None,
        stops: Callable[[], int] = lambda: 0,
        patience: Patience = _SHORT,
    ) -> Ending:
        return supervise(self.start(fork_server, patience), stops, tick)

    def pids(self) -> list[int]:
        return [int(file.read_text().split()[0]) for file in sorted(self.folder.glob("pid-*"))]

    def is_up(self) -> bool:
        return len(self.pids()) == 2

    def files(self, name: str) -> list[Path]:
        """Return the files that its ranks have written under this name."""
        return sorted(self.folder.glob(f"{name}-*"))

    def remaining(self) -> list[Process]:
        """Return whatever lives that belongs to this attempt, whoever its parent is."""
        mark = next(self.folder.glob("pid-*")).read_text().split()[1]
        return processes.marked(f"LAUNCHERS_MARK={mark}")


def written(modules: Path, name: str, body: str) -> Trial:
    """Write the module of a new trial; `body` follows the prologue."""
    trial = Trial(modules, name)
    trial.folder.mkdir()
    (modules / f"{name}.py").write_text(_PROLOGUE + textwrap.dedent(body))
    return trial
