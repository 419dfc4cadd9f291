"""The daemons of each host, in the order they start, and when each is ready. It starts nothing itself."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from slurm.cluster.configuration import DAEMON_USER
from slurm.cluster.layout import CONTROLLER, ClusterLayout

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
READY_WITHIN_S = 60.0


@dataclasses.dataclass(frozen=True)
class Service:
    """One daemon, or with `once` a command that has to end with 0 before the next one starts.

    It is ready when it listens on `port` or `socket`. It runs as root where `user` is empty.
    """

    name: str
    command: list[str]
    environment: dict[str, str]
    user: str = ""
    port: int = 0
    socket: str = ""
    once: bool = False
    input_file: str = "/dev/null"


@dataclasses.dataclass(frozen=True)
class HostPlan:
    """Everything that a host's first process must know, as one JSON file.

    `memory` is a folder to mount a file system in memory on (or empty) and `folders` are made in it for the
    daemons' user.
    """

    name: str
    report: str
    log: str
    hosts_file: str
    resolver_file: str
    memory: str
    folders: list[str]
    services: list[Service]
    # Of the machine's processor cores; empty: all.
    cores: list[int] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def load_plan(path: Path) -> HostPlan:
    """Return the plan that `HostPlan.save` wrote."""
    fields = json.loads(path.read_text())
    return HostPlan(**fields | {"services": [Service(**service) for service in fields["services"]]})


def host_plan(layout: ClusterLayout, host: str) -> HostPlan:
    """Return the plan of the controller or of a node."""
    is_controller = host == CONTROLLER
    folders = ["mariadb", "slurmctld"] if is_controller else []
    return HostPlan(
        name=host,
        report=str(layout.host_folder(host) / "report.json"),
        log=str(layout.log / f"{host}.log"),
        hosts_file=str(layout.etc / "hosts"),
        resolver_file=str(layout.etc / "resolv.conf"),
        memory=str(layout.memory) if is_controller else "",
        folders=[str(layout.memory / folder) for folder in folders],
        services=controller_services(layout) if is_controller else node_services(layout),
        cores=[] if is_controller else cores_of(int(host.removeprefix("node")), layout.settings.nodes),
    )


def cores_of(node: int, num_nodes: int) -> list[int]:
    """Return node `node`'s share of this machine's cores, of 1 to `num_nodes`: one at least, and no two nodes
    the same while there are enough.
    """
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // num_nodes)
    first = (node - 1) * share
    return [cores[(first + index) % len(cores)] for index in range(share)]


def controller_services(layout: ClusterLayout) -> list[Service]:
    """Return munged, which serves all hosts by its socket's file, the database if any, and slurmctld."""
    environment = {"PATH": PATH, **layout.environment}
    accounting = _accounting_services(layout, environment) if layout.settings.accounting else []
    slurmctld = Service("slurmctld", ["slurmctld", "-D"], environment, port=6817)
    return [_munged(layout, environment), *accounting, slurmctld]


def node_services(layout: ClusterLayout) -> list[Service]:
    """Return a node's one daemon."""
    return [Service("slurmd", ["slurmd", "-D"], {"PATH": PATH, **layout.environment}, port=6818)]


def _munged(layout: ClusterLayout, environment: dict[str, str]) -> Service:
    command = [
        "munged",
        "--foreground",
        f"--socket={layout.munge_socket}",
        f"--key-file={layout.munge}/key",
        f"--pid-file={layout.munge}/pid",
        f"--seed-file={layout.munge}/seed",
    ]
    return Service("munged", command, environment, user=DAEMON_USER, socket=str(layout.munge_socket))


def _accounting_services(layout: ClusterLayout, environment: dict[str, str]) -> list[Service]:
    server = [
        "mariadbd",
        "--no-defaults",
        f"--datadir={layout.memory}/mariadb",
        "--innodb-log-file-size=16M",
        "--innodb-buffer-pool-size=64M",
        "--innodb-lock-wait-timeout=900",
    ]
    socket = str(layout.database_socket)
    listening = [
        *server,
        "--skip-networking",
        f"--socket={socket}",
        f"--pid-file={layout.memory}/mariadb/pid",
    ]
    # libmariadb takes the socket's place from this variable: slurmdbd.conf has no line for it.
    with_socket = environment | {"MYSQL_UNIX_PORT": socket}
    sql = str(layout.etc / "accounting.sql")
    bootstrap = [*server, "--bootstrap"]
    cluster = ["sacctmgr", "--immediate", "add", "cluster", "devcluster"]
    return [
        Service("mariadbd's bootstrap", bootstrap, environment, user=DAEMON_USER, once=True, input_file=sql),
        Service("mariadbd", listening, environment, user=DAEMON_USER, socket=socket),
        Service("slurmdbd", ["slurmdbd", "-D"], with_socket, user=DAEMON_USER, port=6819),
        Service("sacctmgr add cluster", cluster, environment, once=True),
    ]
