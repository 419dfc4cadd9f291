"""The text of every configuration file of a cluster, as pure functions of its layout."""

from __future__ import annotations

from slurm.cluster.layout import CONTROLLER, ClusterLayout

# Everything but slurmd and the jobs runs as this user, which Debian's packages make.
DAEMON_USER = "slurm"

# Slurm's own values suit a cluster on which a lost minute is cheap. These make a lost node, a requeued job
# and a healed node show within seconds: cred_expire is how long a requeued job is held (120 s by default),
# SlurmdTimeout how long a silent node counts as up (300 s), and the scheduler otherwise looks only every 30
# to 60 s.
QUICK_LINES = """\
SlurmdTimeout=10
ReturnToService=2
SchedulerParameters=bf_interval=5,sched_interval=5
"""


def slurm_conf(layout: ClusterLayout, memory_mib: int) -> str:
    """Return slurm.conf; each node claims `memory_mib` MiB of memory."""
    settings = layout.settings
    hosts = layout.host_folder("%n")
    gres = f" Gres=gpu:{settings.gpus}" if settings.gpus else ""
    last = settings.nodes
    first_address = str(layout.address("node1")).rpartition(".")[0]
    quick = "" if settings.site_defaults else QUICK_LINES
    expiry = "" if settings.site_defaults else ",cred_expire=10"
    named = () if settings.topology == "none" else (f"TopologyPlugin=topology/{settings.topology}",)
    lines = "".join(f"{line}\n" for line in (*named, *settings.slurm_lines))
    return f"""\
# Written by slurm/devcluster: a cluster for development, all of it on one machine.
ClusterName=devcluster
SlurmctldHost={CONTROLLER}({layout.address(CONTROLLER)})
SlurmUser={DAEMON_USER}
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}{expiry}
StateSaveLocation={layout.memory}/slurmctld
SlurmctldPidFile={layout.memory}/slurmctld/pid
SlurmctldLogFile={layout.log}/slurmctld.log
SlurmdSpoolDir={hosts}/spool
SlurmdPidFile={hosts}/spool/pid
SlurmdLogFile={layout.log}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MailProg=/bin/true
{quick}{_accounting_lines(layout)}
# The partition `urgent` preempts jobs of `main`, which are requeued.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# A node may claim more CPUs than the machine has.
SlurmdParameters=config_overrides
NodeName=node[1-{last}] NodeAddr={first_address}.[1-{last}] CPUs={settings.cpus} \
RealMemory={memory_mib}{gres} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=30 MaxTime=INFINITE DefaultTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=INFINITE DefaultTime=60
{lines}"""


def _accounting_lines(layout: ClusterLayout) -> str:
    if not layout.settings.accounting:
        return ""
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={layout.address(CONTROLLER)}
AccountingStoragePass={layout.munge_socket}
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
"""


def gres_conf(layout: ClusterLayout) -> str:
    """Return gres.conf. A count without files leaves nodes drained, so every GPU has a file."""
    if not layout.settings.gpus:
        return "# no GPUs\n"
    return f"Name=gpu File={layout.devices}/gpu[0-{layout.settings.gpus - 1}]\n"


def topology_conf(layout: ClusterLayout) -> str:
    """Return topology.conf. Neighbours by name are on different leaves: Slurm's own order of nodes, by name,
    then crosses between leaves as often as it can.
    """
    halves = [",".join(layout.nodes[start::2]) for start in range(min(2, len(layout.nodes)))]
    if layout.settings.topology == "block":
        lines = [f"BlockName=block{number} Nodes={nodes}" for number, nodes in enumerate(halves, 1)]
        return "\n".join([*lines, f"BlockSizes={max(1, len(layout.nodes) // 2)}", ""])
    lines = [f"SwitchName=leaf{number} Nodes={nodes}" for number, nodes in enumerate(halves, 1)]
    return "\n".join([*lines, f"SwitchName=spine Switches=leaf[1-{len(halves)}]", ""])


def cgroup_conf() -> str:
    """Return cgroup.conf.

    Nothing is constrained, so no cgroup is made; the plugin for version 1 then starts on every machine,
    while the one for version 2 wants systemd.
    """
    return "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


def slurmdbd_conf(layout: ClusterLayout) -> str:
    """Return slurmdbd.conf; slurmdbd refuses it unless it belongs to its user alone."""
    return f"""\
DbdHost={CONTROLLER}
SlurmUser={DAEMON_USER}
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={DAEMON_USER}
PidFile={layout.memory}/slurmdbd.pid
LogFile={layout.log}/slurmdbd.log
"""


def hosts_file(layout: ClusterLayout, login: str) -> str:
    """Return the nodes' /etc/hosts; `login` is the machine's own host name."""
    lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost", f"{layout.login_address} login {login}"]
    lines += [f"{layout.address(host)} {host}" for host in layout.hosts]
    return "".join(f"{line}\n" for line in lines)


def resolver_file() -> str:
    """Return the nodes' /etc/resolv.conf.

    Nobody listens there, so a look-up fails at once. With a server that does not answer each one costs 10 s,
    and torch looks every peer's address up backwards.
    """
    return "nameserver 127.0.0.1\noptions attempts:1 timeout:1\n"


def database_sql(system_tables: str) -> str:
    """Return what makes an empty MariaDB one that slurmdbd can use; each command has its own line."""
    return f"""\
create database mysql;
use mysql;
{system_tables}
flush privileges;
create user {DAEMON_USER}@localhost identified via unix_socket;
grant all on *.* to {DAEMON_USER}@localhost;
"""
