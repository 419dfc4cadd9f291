"""The first process of one host: sets up what is the host's own, starts its daemons, collects the dead.

`unshare` starts it in new namespaces (`hosts.py`). It waits for a line on its standard input, which says
that the network is there; should the input end without one, whoever was starting the host is gone, and so
goes the host. It restarts nothing: what has happened to its daemons stands
in its report.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from slurm.cluster.configuration import DAEMON_USER
from slurm.cluster.services import PATH, READY_WITHIN_S, HostPlan, Service, load_plan

POLL_S = 0.02
LISTENING_TCP = "0A"
LISTENING_UNIX = 0x10000


class Report:
    """The host's record for others: its process and how each daemon fares, replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # The old /proc is still mounted: these are the machine's numbers, by which others find this process.
        self._facts: dict[str, Any] = {
            "pid": int(Path("/proc/self").readlink().name),
            "start": own_start_ticks(),
        }
        self._services: dict[str, str] = {}
        self._is_up = False
        self.write()

    def note(self, service: str, state: str) -> None:
        self._services[service] = state
        self.write()

    def up(self) -> None:
        self._is_up = True
        self.write()

    def write(self) -> None:
        partial = self._path.with_suffix(".partial")
        partial.write_text(
            json.dumps(self._facts | {"is_up": self._is_up, "services": self._services}) + "\n"
        )
        partial.replace(self._path)


def own_start_ticks() -> int:
    """Return when this process started, in clock ticks since boot; with its number that is unique."""
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def main(plan_file: str) -> None:
    """Run a host until it is killed. Returns only where it could not be started."""
    plan = load_plan(Path(plan_file))
    report = Report(Path(plan.report))
    os.environ.clear()
    os.environ["PATH"] = PATH
    if plan.cores:
        # What runs here sees no others, and does not start threads for all of the machine's.
        os.sched_setaffinity(0, plan.cores)
    set_up(plan)
    if not sys.stdin.readline():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running = start_services(plan, report)
    if running is None:
        return
    report.up()
    collect_the_dead(running, report)


def set_up(plan: HostPlan) -> None:
    """Give the host its own name, /proc, /dev/shm, /etc/hosts, /etc/resolv.conf and file system in memory."""
    os.chdir("/")
    socket.sethostname(plan.name)
    mount("-t", "proc", "proc", "/proc")
    mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", "/dev/shm")
    mount("--bind", plan.hosts_file, "/etc/hosts")
    if Path("/etc/resolv.conf").exists():
        mount("--bind", plan.resolver_file, "/etc/resolv.conf")
    if plan.memory:
        mount("-t", "tmpfs", "-o", "mode=0755", "tmpfs", plan.memory)
        shutil.chown(plan.memory, DAEMON_USER, DAEMON_USER)
    for folder in plan.folders:
        Path(folder).mkdir()
        shutil.chown(folder, DAEMON_USER, DAEMON_USER)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def start_services(plan: HostPlan, report: Report) -> dict[int, Service] | None:
    """Start one service after the other and return them by process number, or None where one failed."""
    running = {}
    for service in plan.services:
        report.note(service.name, "starting")
        process = start(service, plan.log)
        failure = wait_until_ready(service, process)
        if failure:
            report.note(service.name, failure)
            return None
        report.note(service.name, "done" if service.once else "running")
        if not service.once:
            running[process.pid] = service
    return running


def start(service: Service, log: str) -> subprocess.Popen[bytes]:
    """Start one service in a session of its own, its output appended to the host's log."""
    with Path(log).open("ab") as output, Path(service.input_file).open("rb") as given:
        return subprocess.Popen(
            service.command,
            stdin=given,
            stdout=output,
            stderr=output,
            env=service.environment,
            start_new_session=True,
            user=service.user or None,
            group=service.user or None,
            extra_groups=() if service.user else None,
        )


def wait_until_ready(service: Service, process: subprocess.Popen[bytes]) -> str:
    """Wait until a service listens or a command has ended; returns what went wrong, or nothing."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            return "" if service.once and code == 0 else ending(code)
        if not service.once and is_listening(service):
            return ""
        time.sleep(POLL_S)
    return f"not ready after {READY_WITHIN_S:g} s"


def is_listening(service: Service) -> bool:
    """Whether a service accepts connections. Asks the kernel: a probing connection would fill the logs."""
    if service.socket:
        rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        return any(row[7:] == [service.socket] and int(row[3], 16) & LISTENING_UNIX for row in rows)
    tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
    rows = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return any(row[3] == LISTENING_TCP and int(row[1].rpartition(":")[2], 16) == service.port for row in rows)


def collect_the_dead(running: dict[int, Service], report: Report) -> NoReturn:
    """Reap every process that ends on this host, for ever, and report the daemons among them."""
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(1)  # A host without processes is still a host.
            continue
        if pid in running:
            report.note(running.pop(pid).name, ending(os.waitstatus_to_exitcode(status)))


def ending(code: int) -> str:
    """Say how a process ended."""
    return f"ended with {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


if __name__ == "__main__":
    main(sys.argv[1])
