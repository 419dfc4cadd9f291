"""Starts, finds and kills hosts from outside: each is one process with all its namespaces.

`host.py` is the inside.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slurm.cluster.commands import run
from slurm.cluster.errors import ClusterError
from slurm.cluster.layout import ClusterLayout, this_boot
from slurm.cluster.services import PATH, READY_WITHIN_S, host_plan

ROOT = Path(__file__).resolve().parents[2]
NAMESPACES = Path("/run/netns")
NEW_NAMESPACES = (
    "--fork",
    "--kill-child",
    "--pid",
    "--mount",
    "--uts",
    "--ipc",
    "--net",
    "--propagation",
    "slave",
)
POLL_S = 0.02
STOP_WITHIN_S = 20.0


@dataclass(frozen=True)
class HostState:
    """A host as its report and the process table show it."""

    pid: int
    is_alive: bool
    is_up: bool
    services: Mapping[str, str]


def host_state(layout: ClusterLayout, host: str) -> HostState | None:
    """Return how a host fares, or None where it was never started. Any user may ask."""
    try:
        report = json.loads((layout.host_folder(host) / "report.json").read_text())
    except FileNotFoundError:
        return None
    alive = layout.boot == this_boot() and start_ticks(report["pid"]) == report["start"]
    return HostState(report["pid"], alive, report["is_up"], report["services"])


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None where it is dead."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class StartingHost:
    """A host whose namespaces are there and whose daemons wait for `start_daemons`."""

    def __init__(self, layout: ClusterLayout, host: str) -> None:
        self.host = host
        self._layout = layout
        folder = layout.host_folder(host)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").unlink(missing_ok=True)
        plan_file = folder / "plan.json"
        host_plan(layout, host).save(plan_file)
        with Path(host_plan(layout, host).log).open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", *NEW_NAMESPACES, sys.executable, "-m", "slurm.cluster.host", str(plan_file)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={"PATH": PATH, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
                start_new_session=True,
            )

    def wait_for_namespaces(self) -> int:
        """Return the number of the host's first process once it exists.

        Raises:
            ClusterError: the host could not be started.
        """
        return self._wait(lambda _state: True).pid

    def start_daemons(self) -> None:
        """Let the daemons start, now that the network is there; `wait_until_up` waits for them."""
        assert self._process.stdin
        with suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(b"start\n")

    def wait_until_up(self) -> None:
        """Wait until every daemon is ready.

        Raises:
            ClusterError: one is not; the message holds the end of its log.
        """
        self._wait(lambda state: state.is_up)

    def _wait(self, is_reached: Callable[[HostState], bool]) -> HostState:
        deadline = time.monotonic() + 3 * READY_WITHIN_S
        while time.monotonic() < deadline:
            has_ended = self._process.poll() is not None
            state = host_state(self._layout, self.host)
            if state and is_reached(state):
                return state
            if has_ended:
                raise ClusterError(self._failure(state))
            time.sleep(POLL_S)
        raise ClusterError(self._failure(host_state(self._layout, self.host)))

    def _failure(self, state: HostState | None) -> str:
        services = state.services if state else {}
        culprit = next((name for name, fares in services.items() if fares not in ("running", "done")), "")
        fares = f"{culprit} {services[culprit]}" if culprit else "its namespaces could not be made"
        logs = [self._layout.log / f"{name}.log" for name in (self.host, culprit, f"{culprit}-{self.host}")]
        ends = [f"--- {log.name}\n{tail(log)}" for log in logs if log.exists() and tail(log)]
        return "\n".join([f"{self.host} did not start: {fares}", *ends])


def tail(path: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-12:])


def kill_host(layout: ClusterLayout, host: str) -> None:
    """End every process of a host at once, as a loss of power does, and remove its namespaces. Idempotent.

    Raises:
        ClusterError: it is still there after 20 s.
    """
    state = host_state(layout, host)
    if state and state.is_alive:
        # The kernel ends all other processes of a process namespace before its first one is gone.
        with suppress(ProcessLookupError):
            os.kill(state.pid, signal.SIGKILL)
        deadline = time.monotonic() + STOP_WITHIN_S
        while (after := host_state(layout, host)) and after.is_alive:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"process {state.pid} of {host} is still there {STOP_WITHIN_S:g} s after SIGKILL"
                )
            time.sleep(POLL_S)
    remove_name(layout, host)


def claim_names(layout: ClusterLayout) -> None:
    """Take the names of a cluster's hosts for `ip netns`, and with them its slot, before there are hosts."""
    NAMESPACES.mkdir(exist_ok=True)
    for host in layout.hosts:
        (NAMESPACES / layout.namespace(host)).touch(mode=0o444)


def give_name(layout: ClusterLayout, host: str, pid: int) -> None:
    """Make `ip netns` know a host's network namespace."""
    NAMESPACES.mkdir(exist_ok=True)
    name = NAMESPACES / layout.namespace(host)
    # There already where the cluster is new; not there where a node comes back.
    name.touch(mode=0o444)
    run(["mount", "--bind", f"/proc/{pid}/ns/net", str(name)])


def remove_name(layout: ClusterLayout, host: str) -> None:
    """Remove the name that `give_name` gave, if it is there."""
    name = NAMESPACES / layout.namespace(host)
    if name.exists():
        if is_namespace(name):
            run(["umount", "--lazy", str(name)])
        name.unlink()


def is_namespace(name: Path) -> bool:
    """Whether a file is a bound namespace: those lie on a file system of their own."""
    return name.stat().st_dev != NAMESPACES.stat().st_dev


def processes_on(layout: ClusterLayout, host: str) -> dict[int, str]:
    """Return the processes of a host by the machine's numbers, with their commands. *Root only.*"""
    state = host_state(layout, host)
    if not state or not state.is_alive:
        return {}
    namespace = Path(f"/proc/{state.pid}/ns/pid").readlink()
    commands = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # The machine's first process may be closed even to root.
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if (folder / "ns/pid").readlink() == namespace:
                commands[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ").strip()
    return commands


def enter(layout: ClusterLayout, host: str) -> list[str]:
    """Return the start of a command line that runs the rest on a host. *Root only.*

    Raises:
        ClusterError: the host is down.
    """
    state = host_state(layout, host)
    if not state or not state.is_alive:
        raise ClusterError(f"{host} is down; `slurm/devcluster heal-node` brings a node back")
    return ["nsenter", f"--target={state.pid}", "--pid", "--mount", "--uts", "--ipc", "--net", "--"]
