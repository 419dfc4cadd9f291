"""Checks Slurm as a user of it sees it: its commands, its controller, what it allows, its partitions."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launchers import LauncherError, SlurmMissing
from launchers.slurm.cluster import Partition, partitions
from launchers.slurm.commands import NO_CLUSTER, output_of, settings
from launchers.slurm.switches import fabric
from orchestra.doctor.check import Check, Finding, Mark, Subject, graded

if TYPE_CHECKING:
    from orchestra.recovery.excluded_hosts import ExcludeList, Listed


_COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
_SLOW_S = 5.0
# Below it SIGKILL comes before a process that heard SIGTERM could write its last words.
_SHORT_KILL_WAIT_S = 10
_UNUSABLE = re.compile(r"down|drain|fail|maint|unknown|not_?resp|power|\*$", re.IGNORECASE)


def _slurm(subject: Subject) -> Iterator[Finding]:
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        yield _missing(missing, subject)
        return
    begin = time.perf_counter()
    try:
        setup = settings()
    except LauncherError as error:
        yield _silent(str(error), subject)
        return
    seconds = time.perf_counter() - begin
    name, version = setup.get("ClusterName", "unnamed"), setup.get("SLURM_VERSION", "of unknown version")
    answered = f"{name}, Slurm {version}, answers in {1000 * seconds:.0f} ms"
    advice = "the controller is busy: `status` and `submit` will be as slow"
    yield graded("slurm", answered, is_bad=seconds >= _SLOW_S, advice=advice)
    yield _accounting(setup)
    yield from _rules(setup)
    yield _network()
    yield from _partitions(partitions(), subject)


def _missing(missing: Sequence[str], subject: Subject) -> Finding:
    if len(missing) == len(_COMMANDS) and not subject.needs_slurm:
        return Finding("slurm", Mark.note, "no Slurm here: `orchestra run` trains on this machine")
    advice = "run this on a login node, or load the module that has Slurm's commands"
    return Finding("slurm", Mark.failed, f"{', '.join(missing)} not found", advice)


def _silent(problem: str, subject: Subject) -> Finding:
    if NO_CLUSTER in problem:
        mark = Mark.failed if subject.needs_slurm else Mark.note
        unset = "Slurm's commands are here, but no configuration of a cluster"
        return Finding("slurm", mark, unset, "set SLURM_CONF where there is one")
    advice = "try again; if it goes on, tell the site. Training is not affected by a silent controller"
    return Finding("slurm", Mark.failed, problem, advice)


def _accounting(setup: Mapping[str, str]) -> Finding:
    kind = setup.get("AccountingStorageType", "").rpartition("/")[2]
    if kind in ("", "none", "(null)"):
        return Finding("accounting", Mark.note, "none: ended jobs are judged by the runs' own records alone")
    try:
        output_of(("sacct", "--noheader", "--allocations", "--starttime=now-1minute", "--format=JobID"))
    except SlurmMissing:
        return Finding("accounting", Mark.note, f"{kind}, but sacct is not on this machine")
    except LauncherError as error:
        advice = "runs are then judged by their own records alone; tell the site"
        return Finding("accounting", Mark.warning, str(error), advice)
    return Finding("accounting", Mark.ok, f"{kind}, sacct answers")


def _rules(setup: Mapping[str, str]) -> Iterator[Finding]:
    """Tell the settings that decide how a run goes on after its job was ended."""
    if setup.get("JobRequeue") == "1":
        yield Finding("requeueing", Mark.ok, "on (JobRequeue=1)")
    else:
        off = "off by default (JobRequeue=0); jobs ask for it themselves"
        yield Finding("requeueing", Mark.note, off, "where the site refuses that use cluster.requeue=chain")
    preempt, kind = setup.get("PreemptMode", "OFF"), setup.get("PreemptType", "")
    yield Finding("preemption", Mark.ok, f"{preempt} ({kind.rpartition('/')[2] or 'none'})")
    wait = _number(setup.get("KillWait"))
    is_short = wait is not None and wait < _SHORT_KILL_WAIT_S
    shown = "unknown" if wait is None else f"{wait} s from SIGTERM to SIGKILL"
    advice = "short: saves rely on the warning before the time limit"
    yield graded("kill wait", shown, is_bad=is_short, advice=advice, mark=Mark.note)
    size = _number(setup.get("MaxArraySize"))
    if size == 0:
        advice = "sweeps (`submit -m`) are refused here: submit the runs one by one, or ask for arrays"
        yield Finding("arrays", Mark.note, "not allowed (MaxArraySize=0)", advice)
    elif size == 1:
        advice = "each member of a sweep is an array of its own"
        yield Finding("arrays", Mark.note, "of one job alone (MaxArraySize=1)", advice)
    else:
        largest = f"up to index {size - 1} (MaxArraySize)" if size else "limit unknown"
        yield Finding("arrays", Mark.ok, largest)


def _network() -> Finding:
    """Tell the leaf switches or blocks, by which ranks are laid out."""
    name = "switches"
    try:
        known = fabric()
    except LauncherError as error:
        return Finding(name, Mark.note, f"not known: {error}")
    if known is None:
        return Finding(name, Mark.note, "Slurm knows no topology: ranks follow its own order of nodes")
    limit = "cluster.segment" if known.is_block else "cluster.max_switches"
    return Finding(name, Mark.ok, f"{known.words}: ranks are laid out by them, {limit} limits them")


def _number(text: str | None) -> int | None:
    match = re.match(r"\d+", text or "")
    return int(match[0]) if match else None


def _partitions(known: Sequence[Partition], subject: Subject) -> Iterator[Finding]:
    names = [partition.name for partition in known]
    wanted = subject.partition.split(",") if subject.partition else []
    for name in wanted:
        if name not in names:
            listed = f"there are {', '.join(names) or 'none'}"
            yield Finding("partition", Mark.failed, f"no partition {name}; {listed}", "set cluster.partition")
    for partition in known:
        is_meant = partition.name in wanted if wanted else partition.is_default
        yield _partition(partition, is_meant=is_meant)
    if not wanted and not any(partition.is_default for partition in known):
        yield Finding("partition", Mark.note, "no default partition", "name one: cluster.partition=…")


def _partition(partition: Partition, *, is_meant: bool) -> Finding:
    usable = sum(kind.num_nodes for kind in partition.kinds if not _UNUSABLE.search(kind.state))
    total = partition.num_nodes()
    gpus = f", up to {partition.most_gpus} GPUs a node" if partition.most_gpus else ", no GPUs"
    default = " (default)" if partition.is_default else ""
    facts = f"{partition.name}{default}: {usable} of {total} nodes usable{gpus}, limit {partition.time_limit}"
    mark = Mark.warning if is_meant else Mark.note
    if not partition.is_up:
        return Finding("partition", mark, f"{facts}; takes no jobs now")
    advice = "jobs will wait: see `sinfo -R` for the reasons" if is_meant else ""
    return graded("partition", facts, is_bad=not usable, advice=advice, mark=mark)


# Lists the nodes that failed twice and that jobs are submitted without, with the evidence against each.


_NAME = "left out"


def _left_out(subject: Subject) -> Iterator[Finding]:
    # Late: it knows the configuration's schema, which another package may shadow.
    from orchestra.recovery.excluded_hosts import all_lists

    runs = subject.run_dir.expanduser().absolute()
    for known in all_lists(runs):
        entries = known.entries(time.time())
        for entry in entries:
            advice = f"once it is repaired, or if it was not the cause: rm {known.file(entry.host)}"
            yield Finding(_NAME, Mark.warning, _words(entry, known), advice)
        if not entries:
            yield Finding(_NAME, Mark.ok, f"no node of cluster {known.cluster}")
        for file in known.unreadable():
            yield Finding(_NAME, Mark.note, f"{file} cannot be read", "it leaves out no node: remove it")


def _words(entry: Listed, known: ExcludeList) -> str:
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.expires))
    attempts = ", ".join(map(str, entry.attempts))
    causes = ", ".join(dict.fromkeys(entry.causes))
    evidence = f": attempts {attempts} of run {Path(entry.run).name} ({causes})" if attempts else ""
    return f"{entry.host} of cluster {known.cluster} until {until}{evidence}; {entry.reason}"


EXCLUDED_CHECKS = (Check(_NAME, _left_out),)
CHECKS = (Check("slurm", _slurm, limit_s=70.0), *EXCLUDED_CHECKS)
