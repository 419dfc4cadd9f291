"""Which hosts a job is submitted without: those of the configuration, and those on the cluster's list.

The list is beside the runs (`orchestra.recovery.excluded`). Its hosts go into the batch script and not into
the frozen configuration: whatever is submitted later asks the list again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config
from launchers.errors import LauncherError
from launchers.slurm.site import node_names
from orchestra.recovery.excluded import ExcludeList, Listed, shared_folder
from orchestra.rundir import RunDir


@dataclass(frozen=True)
class LeftOut:
    """Whom a job does not get because of the list, and what is to be told about that."""

    entries: tuple[Listed, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(entry.host for entry in self.entries)


def left_out(runs: Path, cluster: str | None, partition: str | None, wanted: int) -> LeftOut:
    """Return whom a job of `wanted` nodes is submitted without, and why; `runs` is the folder of the runs.

    Asks Slurm only where somebody is on the list: names that it does not know any more it would refuse, and
    so many that too few nodes remain would make the job wait for ever.
    """
    entries = ExcludeList(runs, cluster).entries(time.time())
    if not entries:
        return LeftOut()
    try:
        names = node_names(partition)
    except LauncherError as error:
        return LeftOut((), (f"nodes that failed before are not left out: {error}",))
    return chosen(entries, names, wanted)


def hosts_without(config: Config, run: RunDir, cluster: str | None) -> tuple[str, ...]:
    """Return all hosts that the next job of a run is submitted without, by its configuration and by the list;
    none where the list adds nobody, since the script says the configuration's.
    """
    if config.recovery.exclude_hours <= 0:
        return ()
    own = config.cluster
    found = left_out(shared_folder(run.path.parent), cluster, own.partition, own.nodes + own.spare_nodes)
    return tuple(dict.fromkeys([*own.exclude, *found.hosts])) if found.hosts else ()


def chosen(entries: Sequence[Listed], names: frozenset[str], wanted: int) -> LeftOut:
    """Return those that Slurm knows, the newest first, as long as `wanted` of the nodes remain. A pure
    function.
    """
    known = [entry for entry in entries if entry.host in names]
    room = max(0, len(names) - wanted)
    notes = [f"without {entry.host}: {words(entry)}" for entry in known[:room]]
    if len(known) > room:
        hosts = ", ".join(entry.host for entry in known[room:])
        notes.append(f"{hosts} failed before, and may be used: too few other nodes are there")
    return LeftOut(tuple(known[:room]), tuple(notes))


def words(entry: Listed) -> str:
    """Return in a line why a host is on the list, and for how long."""
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.expires))
    return f"{entry.reason} (run {Path(entry.run).name}; until {until})"
