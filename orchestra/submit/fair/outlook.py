"""What jobs will cost the account at most, and how the account stands: told where runs are submitted.

The cost is arithmetic on the very scripts that Slurm gets. What only Slurm can tell is asked for within
seconds; where it does not answer the reason stands in its place. Nothing here keeps a job back.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from conf.schema import ClusterConfig, Requeue
from launchers import LauncherError
from launchers.slurm.commands import settings
from launchers.slurm.fair_share import (
    Counted,
    PartitionTerms,
    Standing,
    billing,
    counted,
    partition_terms,
    standings,
)
from orchestra.run.files import Record
from orchestra.sizes.units import slurm_time_s
from orchestra.submit.site import Site
from orchestra.submit.sweeps.arrays import PlannedArray

_OPTION = re.compile(r"^#SBATCH --([\w-]+)(?:=(.*))?$", re.MULTILINE)
# One entry of --gres or --tres-per-node: gpu, gpu:4, gpu:a100, gres/gpu:a100:4, gres:gpu=4(S:0).
_GPUS = re.compile(r"(?:gres[:/])?gpu(?:[:=](?P<words>[^(]*))?(?:\(.*\))?")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?")
_MEGABYTES = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
# Options in a site's own words by which a job may get GPUs; only --gres and
# --tres-per-node say how many of a node's.
_OTHER_GPUS = ("gpus", "gpus-per-task", "gpus-per-socket", "tres-per-task")
_ASK_S = 5.0


@dataclass(frozen=True)
class JobCost:
    """What one kind of jobs asks for and costs at most, each job alone; None: not known."""

    num_jobs: int
    # Equal unless it begins with any number of nodes between the two.
    fewest_nodes: int
    most_nodes: int
    # 0: none.
    gpus_per_node: int | None
    cores_per_node: int | None
    # The time limit, its own or the partition's.
    limit_s: int | None
    constraint: str | None = None
    # What a job bills at a time, with all its nodes, and what is not counted in it.
    billing: float | None = None
    not_billed: tuple[str, ...] = ()

    def hours(self, per_node: float) -> float | None:
        """Return the hours that one job takes of what a node gives it so many of, on all its nodes."""
        return None if self.limit_s is None else per_node * self.most_nodes * self.limit_s / 3600

    @property
    def gpu_hours(self) -> float | None:
        return None if self.gpus_per_node is None else self.hours(self.gpus_per_node)

    def to_json(self) -> Record:
        """Return all fields and what follows from them; hours are those of one job."""
        billed = None if self.billing is None or self.limit_s is None else self.billing * self.limit_s / 3600
        cores = None if self.cores_per_node is None else self.hours(self.cores_per_node)
        hours = {"gpu_hours": self.gpu_hours, "node_hours": self.hours(1), "core_hours": cores}
        return {**dataclasses.asdict(self), **hours, "billing_hours": billed}


@dataclass(frozen=True)
class Outlook:
    """What is told of jobs before they are submitted."""

    costs: tuple[JobCost, ...]
    # Of several kinds one trains, the others are withdrawn.
    are_alternatives: bool
    # Whether a run goes on in another job, at its cost, where the limit or a preemption ends one.
    goes_on: bool
    price_per_gpu_hour: float | None
    currency: str | None
    # The site's weights; empty where it has none.
    weights: str
    # In the account that is asked for, in several where none is.
    standings: tuple[Standing, ...]
    # Why there are none, or nothing is known of weights.
    no_standing: str | None = None
    no_weights: str | None = None

    @property
    def gpu_hours(self) -> float | None:
        """All jobs' GPU-hours at most; None where one of them is not known."""
        each = [(cost.gpu_hours, cost.num_jobs) for cost in self.costs]
        known = [hours * number for hours, number in each if hours is not None]
        if len(known) < len(each) or not known:
            return None
        return max(known) if self.are_alternatives else sum(known)

    @property
    def price(self) -> float | None:
        hours = self.gpu_hours
        return None if hours is None or self.price_per_gpu_hour is None else hours * self.price_per_gpu_hour

    def to_json(self) -> Record:
        """Return what `--json` prints of it."""
        cost: Record = {
            "jobs": [each.to_json() for each in self.costs],
            "gpu_hours": self.gpu_hours,
            "price": self.price,
            "currency": self.currency,
            "billing_weights": self.weights or None,
            "unknown": self.no_weights,
        }
        accounts = [dataclasses.asdict(standing) for standing in self.standings]
        return {"cost": cost, "share": {"accounts": accounts, "unknown": self.no_standing}}


def outlook(arrays: Sequence[PlannedArray], cluster: ClusterConfig, site: Site) -> Outlook:
    """Ask Slurm, for seconds at most, and return what jobs will cost; `cluster` is the configuration that
    they have in common.
    """
    scripts = {planned.template: planned.script() for planned in arrays}
    partitions = {template: _options(script).get("partition") for template, script in scripts.items()}
    terms = {name: _terms(site, name) for name in dict.fromkeys(partitions.values())}
    has_weights = any(known.weights for known, _ in terms.values())
    counts = _counted() if has_weights else Counted.all
    kinds: dict[str, int] = {}
    for planned in arrays:
        kinds[planned.template] = kinds.get(planned.template, 0) + len(planned.array.tasks)
    costs = [
        cost_of(scripts[template], number, terms[partitions[template]][0], counts)
        for template, number in kinds.items()
    ]
    account = _options(next(iter(scripts.values()), "")).get("account")
    known, no_standing = _standings(site, account)
    return Outlook(
        costs=tuple(costs),
        are_alternatives=bool(cluster.alternatives),
        goes_on=cluster.requeue is not Requeue.never,
        price_per_gpu_hour=cluster.price_per_gpu_hour,
        currency=cluster.currency,
        weights=", or ".join(dict.fromkeys(known.words for known, _ in terms.values() if known.words)),
        standings=tuple(known),
        no_standing=no_standing,
        no_weights=next((why for _, why in terms.values() if why is not None), None),
    )


def cost_of(
    script: str, num_jobs: int = 1, terms: PartitionTerms | None = None, counts: Counted = Counted.all
) -> JobCost:
    """Return what the jobs of a batch script ask for and cost at most."""
    options, terms = _options(script), terms or PartitionTerms()
    fewest, _, most = options.get("nodes", "1").partition("-")
    nodes, gpus = int(most or fewest), _gpus(options)
    # Alone on its nodes a job has, and is billed, all their cores.
    cores = "" if options.get("exclusive") == "" else options.get("cpus-per-task", "")
    cost = JobCost(
        num_jobs=num_jobs,
        fewest_nodes=int(fewest),
        most_nodes=nodes,
        gpus_per_node=gpus,
        cores_per_node=int(cores) if cores.isdecimal() else None,
        limit_s=_limit_s(options.get("time"), terms),
        constraint=options.get("constraint"),
    )
    if not terms.weights:
        return cost
    per_node = {"node": 1.0, "cpu": cost.cores_per_node, "gres/gpu": gpus, "mem": _memory(options)}
    amounts = {name: amount * nodes for name, amount in per_node.items() if amount is not None}
    left_out = tuple(name for name in terms.weights if name not in amounts)
    bills = billing(terms.weights, amounts, counts)
    return dataclasses.replace(cost, billing=bills, not_billed=left_out)


def _options(script: str) -> dict[str, str]:
    return {name: value.strip("'\"") for name, value in _OPTION.findall(script)}


def _gpus(options: dict[str, str]) -> int | None:
    """Return the GPUs of each node; None where the script says them in a way that leaves it open."""
    if "gpus-per-node" in options:
        return sum(_count(kind) for kind in options["gpus-per-node"].split(","))
    if any(name in options for name in _OTHER_GPUS):
        return None
    entries = [entry for name in ("gres", "tres-per-node") for entry in options.get(name, "").split(",")]
    matches = (_GPUS.fullmatch(entry.strip()) for entry in entries)
    return sum(_count(match["words"] or "") for match in matches if match is not None)


def _count(words: str) -> int:
    """Return how many GPUs are asked for by `4`, `a100:4` or `a100`: one where there is no number."""
    number = re.split("[:=]", words)[-1]
    return int(number) if number.isdecimal() else 1


def _memory(options: dict[str, str]) -> float | None:
    """Return the megabytes of each node; None where nothing or all of a node's is asked for."""
    match = _MEMORY.fullmatch(options.get("mem", ""))
    return None if match is None or match[1] == "0" else int(match[1]) * _MEGABYTES[match[2]]


def _limit_s(asked: str | None, terms: PartitionTerms) -> int | None:
    """Return the time limit; 0 and UNLIMITED ask for none, and end with the partition's longest one."""
    return _seconds(terms.time_limit) if asked is None else _seconds(asked) or _seconds(terms.longest)


def _seconds(text: str | None) -> int | None:
    try:
        return None if text is None else slurm_time_s(text)
    except ValueError:
        return None


def _terms(site: Site, partition: str | None) -> tuple[PartitionTerms, str | None]:
    """Return the terms of a partition or of several (None: the default one), and why they are not known."""
    if site.partitions is None:
        return PartitionTerms(), "Slurm was not asked"
    default = [known.name for known in site.partitions if known.is_default]
    names = default if partition is None else partition.split(",")
    try:
        found = [partition_terms(name) for name in names]
    except LauncherError as error:
        return PartitionTerms(), str(error)
    limit, longest = _same(each.time_limit for each in found), _same(each.longest for each in found)
    if len({each.words for each in found}) > 1:
        why = f"partitions {', '.join(names)} differ, and any of them may take the job"
        return PartitionTerms(limit, longest), why
    shared = dataclasses.replace(found[0], time_limit=limit, longest=longest) if found else PartitionTerms()
    return shared, None


def _same(texts: Iterable[str | None]) -> str | None:
    """Return what all of them say; None where they differ."""
    known = set(texts)
    return known.pop() if len(known) == 1 else None


def _counted() -> Counted:
    try:
        return counted(settings(_ASK_S).get("PriorityFlags", ""))
    except LauncherError:
        return Counted.all


def _standings(site: Site, account: str | None) -> tuple[list[Standing], str | None]:
    if site.partitions is None:
        return [], "Slurm was not asked"
    try:
        known = standings()
    except LauncherError as error:
        return [], str(error)
    if not known:
        return [], "this cluster keeps no accounts of users, or does not schedule by them"
    own = [standing for standing in known if standing.account == account]
    if account is not None and not own:
        return [], f"sshare lists no account {account} of yours"
    return own or known, None
