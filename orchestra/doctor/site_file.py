"""The text of a site file (a preset of the group `cluster`), and where each of its values comes from.

Called by `orchestra site init`. `asked` asks Slurm, the other functions are pure.
"""

from __future__ import annotations

import getpass
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launchers import LauncherError
from launchers.slurm.cluster import Partition, partitions
from launchers.slurm.commands import output_of, settings
from orchestra.sizes.units import MIB, binary, first_few

_NO_LIMIT = ("infinite", "unlimited")
_NAMED = 6
_WIDTH = 100


@dataclass(frozen=True)
class NodeSize:
    """What the smallest node of a partition has, as sinfo says; None where it does not."""

    memory_bytes: int | None = None
    num_cpus: int | None = None


@dataclass(frozen=True)
class SiteFacts:
    """What a cluster says of itself."""

    partitions: tuple[Partition, ...]
    # scontrol show config.
    settings: Mapping[str, str]
    node_sizes: Mapping[str, NodeSize]
    # Of this user: accounts, the default one first, and QOS; none where sacctmgr does not say.
    accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The cluster's name, fit for a file."""
        return re.sub(r"[^\w.-]+", "-", self.settings.get("ClusterName", "")).strip("-.") or "slurm"


def asked() -> SiteFacts:
    """Ask Slurm. Raises SlurmMissing, SlurmRefused and SlurmSilent; without accounting some things are left
    out.
    """
    known = partitions()
    sizes = output_of(("sinfo", "--noheader", "--exact", "--format=%P|%m|%c"))
    accounts, qos = _associations()
    return SiteFacts(known, settings(), node_sizes(sizes), accounts, qos)


def _associations() -> tuple[tuple[str, ...], tuple[str, ...]]:
    who = f"user={getpass.getuser()}"
    words = ("sacctmgr", "--noheader", "--parsable2", "show")
    try:
        default = output_of((*words, "user", who, "format=defaultaccount")).split()
        rows = output_of((*words, "associations", who, "format=account,qos"))
    except LauncherError:
        return (), ()
    return associations(default[0] if default else None, rows)


def associations(default: str | None, rows: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a user's accounts, the default one first, and QOS in sacctmgr's answer."""
    pairs = [row.partition("|") for row in rows.splitlines() if row.strip()]
    accounts = dict.fromkeys(
        [*([default] if default else []), *(account for account, _, _ in pairs if account)]
    )
    qos = dict.fromkeys(name for _, _, names in pairs for name in names.split(",") if name)
    return tuple(accounts), tuple(qos)


def node_sizes(text: str) -> dict[str, NodeSize]:
    """Return the size of each partition's smallest node in what sinfo printed."""
    found: dict[str, NodeSize] = {}
    for line in text.splitlines():
        name, *numbers = line.strip().split("|")
        megabytes, cpus = ([*map(_number, numbers), None, None])[:2]
        before = found.get(name := name.removesuffix("*"), NodeSize())
        memory = None if megabytes is None else megabytes * MIB
        found[name] = NodeSize(_least(before.memory_bytes, memory), _least(before.num_cpus, cpus))
    return found


def _number(text: str) -> int | None:
    match = re.match(r"\d+", text.strip())
    return int(match[0]) if match else None


def _least(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def best_partition(known: Sequence[Partition]) -> Partition | None:
    """Return where one would train: an open partition with GPUs before one without, then the default one,
    then that with the most GPUs.
    """

    def worth(partition: Partition) -> tuple[bool, bool, bool, int]:
        gpus = sum(kind.num_nodes * kind.num_gpus for kind in partition.kinds)
        return partition.is_up, partition.most_gpus > 0, partition.is_default, gpus

    return max(known, key=worth, default=None)


def slurm_site(name: str, facts: SiteFacts, head: Sequence[str], nccl: Sequence[str] = ()) -> str:
    """Return the file for a cluster. `head`: sentences of its first comment. `nccl`: what would name this
    machine's adapters to NCCL.
    """
    lines = [*_comment(*head), "defaults: [slurm]"]
    lines += _entry("name", name, f"scontrol calls the cluster {facts.name}")
    partition = best_partition(facts.partitions)
    if partition is not None:
        lines += _of_partition(partition, facts)
    lines += [*_of_account(facts), *_of_settings(facts.settings)]
    lines += _comment("Lines of the batch script before anything of ours: modules, environments, variables.")
    lines.append("setup: []")
    if nccl:
        export = json.dumps(f"export {' '.join(nccl)}")
        lines += _comment(f"doctor, of the adapters of this machine: setup: [{export}]")
    lines.append("network:")
    lines += _comment("Ranks find the interface that leads to the other nodes; docs/networks.md.", indent=2)
    lines.append("  interface: null")
    return "\n".join(lines) + "\n"


def _comment(*sentences: str, indent: int = 0) -> list[str]:
    margin = f"{' ' * indent}# "
    return textwrap.wrap(
        " ".join(sentences), _WIDTH, initial_indent=margin, subsequent_indent=margin, break_long_words=False
    )


def _entry(key: str, value: object, source: str) -> list[str]:
    """Return a line below its comment; JSON is YAML, and 4:00:00 without quotes would be a number."""
    shown = "null" if value is None else json.dumps(value) if isinstance(value, str) else str(value)
    return [*_comment(f"{source}."), f"{key}: {shown}"]


def _of_partition(chosen: Partition, facts: SiteFacts) -> Iterator[str]:
    others = [_described(other) for other in facts.partitions if other is not chosen]
    more = f"; others: {first_few(others, _NAMED)}" if others else ""
    yield from _entry("partition", chosen.name, f"sinfo: {_described(chosen)}{more}")
    counts = sorted({kind.num_gpus for kind in chosen.kinds})
    if chosen.most_gpus:
        kinds = sorted({word for kind in chosen.kinds for word in kind.gpu_types})
        words = f" of type {first_few(kinds)}" if kinds else ""
        mixed = f"; not all nodes are alike: {first_few(counts, _NAMED)}" if len(counts) > 1 else ""
        yield from _entry("device", "cuda", "sinfo: its nodes have GPUs")
        yield from _entry("gpus_per_node", chosen.most_gpus, f"sinfo: GPUs per node{words}{mixed}")
    else:
        yield from _entry("device", "cpu", "sinfo: its nodes have no GPUs")
    size = facts.node_sizes.get(chosen.name, NodeSize())
    memory = binary(size.memory_bytes) if size.memory_bytes else "unknown"
    yield from _comment(
        f"sinfo: a node has {size.num_cpus or 'unknown'} cores, memory {memory}. A job takes the cores that "
        "go with its GPUs, and all memory where it takes them all, unless slurm_extra: {mem: 200G} says it."
    )
    if chosen.time_limit.lower() in _NO_LIMIT:
        yield from _entry("time_limit", None, "sinfo: the partition has none")
    else:
        source = "sinfo: the partition's limit; shorter jobs start sooner"
        yield from _entry("time_limit", chosen.time_limit, source)


def _described(partition: Partition) -> str:
    gpus = f"{partition.most_gpus} GPUs a node" if partition.most_gpus else "no GPUs"
    default = " (default)" if partition.is_default else ""
    limit = partition.time_limit + ("" if partition.is_up else ", takes no jobs now")
    return f"{partition.name}{default} {partition.num_nodes()} nodes, {gpus}, limit {limit}"


def _of_account(facts: SiteFacts) -> Iterator[str]:
    if facts.accounts:
        others = f"; you may also use {first_few(facts.accounts[1:], _NAMED)}" if facts.accounts[1:] else ""
        yield from _entry("account", facts.accounts[0], f"sacctmgr: your default account{others}")
    else:
        yield from _entry("account", None, "sacctmgr does not say which accounts you have")
    listed = f"sacctmgr: you may use {first_few(facts.qos, _NAMED)}" if facts.qos else "sacctmgr names none"
    yield from _entry("qos", None, f"{listed}; null is the site's default")


def _of_settings(setup: Mapping[str, str]) -> Iterator[str]:
    requeue, preempt, wait = (setup.get(key, "unknown") for key in ("JobRequeue", "PreemptMode", "KillWait"))
    said = f"scontrol: JobRequeue={requeue}, PreemptMode={preempt}, KillWait={wait}"
    advice = "" if requeue == "1" else "; jobs ask for it themselves: where the site refuses, use chain"
    yield from _entry("requeue", "requeue", f"{said}{advice}")
    source = "75: Slurm calls a job that was stopped on request FAILED; 0 where the site sends mail then"
    yield from _entry("stop_exit_code", 75, source)
    default = next(
        (f"{key}={value}" for key, value in setup.items() if key.startswith("DefMemPer")), "no default"
    )
    yield from _comment(
        "Any other option of sbatch by its long name: {exclusive: true, reservation: NAME}.",
        f"scontrol: {default} of memory.",
    )
    yield "slurm_extra: {}"


def local_site(name: str, num_gpus: int, head: Sequence[str]) -> str:
    """Return the file for a machine without Slurm."""
    lines = [*_comment(*head), "defaults: [local]", f"name: {json.dumps(name)}"]
    if num_gpus:
        lines += _entry("device", "cuda", "this machine has GPUs")
        lines += _entry("gpus_per_node", num_gpus, "GPUs that a process here sees, one rank each")
    else:
        lines += _entry("device", "cpu", "this machine has no GPU that a process here sees")
        lines += _entry("gpus_per_node", "auto", "2 CPU ranks")
    return "\n".join(lines) + "\n"
