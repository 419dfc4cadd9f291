"""Where everything of one cluster is: folders, host names, addresses, what was asked for. It starts nothing.

Everything lies in one folder, and every name that the machine itself sees (links, names of network
namespaces, the subnet) is derived from a *slot*, a small number, so that several clusters can run beside
each other.
"""

from __future__ import annotations

import dataclasses
import json
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from slurm.cluster.errors import UsageError

DEFAULT_STATE = Path("/var/lib/orchestra-devcluster")
CONTROLLER = "controller"
MAX_NODES = 200
# A unix socket's path has room for 107 bytes, and slurmd's is the longest below the state folder:
# /hosts/node200/spool/node200_4294967295.4294967295 takes 50.
MAX_STATE_LENGTH = 57
NUM_SLOTS = 16
# RFC 2544's range for benchmarks: no real network that the machine must reach lies in it.
SUBNETS = IPv4Network("198.19.0.0/16")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `up` was asked for. `slurm_lines` are further lines of slurm.conf, such as `MaxArraySize=500`."""

    nodes: int = 4
    gpus: int = 4
    cpus: int = 16
    accounting: bool = True
    site_defaults: bool = False
    slurm_lines: tuple[str, ...] = ()
    # tree or block; none: Slurm knows nothing of the network.
    topology: str = "none"

    def check(self) -> None:
        """Refuse what cannot be built.

        Raises:
            UsageError: a count is out of its range, or a line is not `KEY=VALUE`.
        """
        ranges = (
            ("--nodes", self.nodes, 1, MAX_NODES),
            ("--gpus", self.gpus, 0, 64),
            ("--cpus", self.cpus, 1, 1024),
        )
        for option, count, least, most in ranges:
            if not least <= count <= most:
                raise UsageError(f"{option} {count} is out of range; use {least} to {most}")
        for line in self.slurm_lines:
            key, equals, value = line.partition("=")
            if not (key.strip() and equals and value.strip()) or "\n" in line:
                raise UsageError(f"--set {line!r} is not KEY=VALUE, such as --set MaxArraySize=500")


@dataclasses.dataclass(frozen=True)
class ClusterLayout:
    """One cluster's names and paths."""

    state: Path
    slot: int
    settings: Settings
    boot: str

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(1, self.settings.nodes + 1))

    @property
    def hosts(self) -> tuple[str, ...]:
        return (CONTROLLER, *self.nodes)

    @property
    def subnet(self) -> IPv4Network:
        return list(SUBNETS.subnets(new_prefix=24))[self.slot]

    @property
    def login_address(self) -> IPv4Address:
        """The machine's own address on the cluster's network."""
        return self.subnet[254]

    @property
    def login_link(self) -> str:
        return f"devcluster{self.slot}"

    def address(self, host: str) -> IPv4Address:
        return self.subnet[250] if host == CONTROLLER else self.subnet[self.nodes.index(host) + 1]

    def namespace(self, host: str) -> str:
        """Return a host's name for `ip netns`."""
        return host if self.slot == 0 else f"dev{self.slot}-{host}"

    @property
    def etc(self) -> Path:
        return self.state / "etc"

    @property
    def slurm_conf(self) -> Path:
        return self.etc / "slurm.conf"

    @property
    def log(self) -> Path:
        return self.state / "log"

    @property
    def munge(self) -> Path:
        return self.state / "munge"

    @property
    def munge_socket(self) -> Path:
        return self.munge / "socket"

    @property
    def devices(self) -> Path:
        """The files that stand for the nodes' GPUs."""
        return self.state / "devices"

    def host_folder(self, host: str) -> Path:
        return self.state / "hosts" / host

    @property
    def memory(self) -> Path:
        """The controller's file system in memory, seen by it alone: database and Slurm's state."""
        return self.host_folder(CONTROLLER) / "memory"

    @property
    def database_socket(self) -> Path:
        return self.memory / "mariadb" / "socket"

    @property
    def environment(self) -> dict[str, str]:
        """What a shell or a process needs to use this cluster, beside its PATH."""
        return {"SLURM_CONF": str(self.slurm_conf)}

    def save(self) -> None:
        """Write the record that marks the folder as this cluster's."""
        record = {"slot": self.slot, "boot": self.boot, "settings": dataclasses.asdict(self.settings)}
        partial = self.state / "cluster.json.partial"
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(record_file(self.state))


def record_file(state: Path) -> Path:
    """Return the file that marks a folder as a cluster's."""
    return state / "cluster.json"


def load_layout(state: Path) -> ClusterLayout | None:
    """Return the cluster that a folder records, or None where it records none."""
    try:
        record = json.loads(record_file(state).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    settings = record["settings"] | {"slurm_lines": tuple(record["settings"]["slurm_lines"])}
    return ClusterLayout(state, record["slot"], Settings(**settings), record["boot"])


def this_boot() -> str:
    """Return the name of the time since the machine started; process numbers mean nothing beyond it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
