"""Which hosts a job is submitted without: those of the configuration, and those on the cluster's list.

The list lies beside the runs (`orchestra.recovery.excluded_hosts`). Its hosts go into the batch script and
not into the frozen configuration: whatever is submitted later asks the list again. Called by the commands
that submit, and by the leading agent of a job that submits its run again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from conf.schema import Config
from launchers import LauncherError
from launchers.slurm.cluster import is_usable, node_states
from orchestra.recovery.excluded_hosts import ExcludeList, Listed, shared_folder
from orchestra.run.paths import RunDir


@dataclass(frozen=True)
class LeftOutHosts:
    """Whom a job does not get because of the list, and what is to be told about that."""

    hosts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class NextJobHosts:
    """Whom the next job of a run does not get, and whom it gets though it should not."""

    # Empty where the job's own script says enough.
    exclude: tuple[str, ...] = ()
    # Hosts that failed just now, that Slurm still gives to jobs, and that too few others are there without.
    missed: tuple[str, ...] = ()
    # Whether so few others are there that the job must be content with fewer nodes than it wants.
    is_short: bool = False


def left_out(
    runs: Path, cluster: str | None, partition: str | None, wanted: int, without: Iterable[str] = ()
) -> LeftOutHosts:
    """Return whom a job of `wanted` nodes is submitted without, and why; `runs` is the folder of the runs.
    `without`: hosts that it does not get anyway.

    Asks Slurm only where somebody is on the list: names that it does not know any more it would refuse, and
    so many that too few nodes remain would make the job wait for ever.
    """
    entries = ExcludeList(runs, cluster).entries(time.time())
    if not entries:
        return LeftOutHosts()
    try:
        names = frozenset(node_states(partition))
    except LauncherError as error:
        return LeftOutHosts((), (f"nodes that failed before are not left out: {error}",))
    return chosen_to_leave_out(entries, names.difference(without), wanted)


def hosts_without(config: Config, run: RunDir, cluster: str | None) -> tuple[str, ...]:
    """Return all hosts that the next job of a run is submitted without, by its configuration and by the list;
    none where the list adds nobody, since the script says the configuration's.
    """
    if config.recovery.exclude_hours <= 0:
        return ()
    own = config.cluster
    runs, wanted = shared_folder(run.path.parent), own.nodes + own.spare_nodes
    listed = left_out(runs, cluster, own.partition, wanted, own.exclude).hosts
    return tuple(dict.fromkeys([*own.exclude, *listed])) if listed else ()


def hosts_of_next_job(
    config: Config,
    run: RunDir,
    cluster: str | None,
    failed: Sequence[str],
    of_run: Iterable[str],
    kept: Sequence[str] = (),
    fewest: int | None = None,
) -> NextJobHosts:
    """Return whom the next job of a run is submitted without: `failed` just now, then `of_run`, which failed
    it before, then those on the list. Where Slurm cannot be asked about its nodes: `failed`, and `kept`,
    which the job would go on to leave out if nothing were said. `fewest`: with so many nodes the run can go
    on (None: with all that it wants).
    """
    own, listed = config.cluster, []
    wanted = own.nodes + own.spare_nodes
    fewest = wanted if fewest is None else fewest
    if config.recovery.exclude_hours > 0:
        listed = ExcludeList(shared_folder(run.path.parent), cluster).entries(time.time())
    before = [*of_run, *(entry.host for entry in listed)]
    if not failed and not before and fewest == wanted:
        return NextJobHosts()
    try:
        states = node_states(own.partition)
    except LauncherError:
        hosts = NextJobHosts(tuple(dict.fromkeys([*failed, *kept])))
    else:
        others = {name: state for name, state in states.items() if name not in own.exclude}
        hosts = bounded(failed, before, others, wanted, fewest)
    # What is said to sbatch takes the place of what the script says.
    exclude = tuple(dict.fromkeys([*own.exclude, *hosts.exclude])) if hosts.exclude else ()
    return replace(hosts, exclude=exclude)


def bounded(
    failed: Iterable[str],
    before: Iterable[str],
    states: Mapping[str, str],
    wanted: int,
    fewest: int | None = None,
) -> NextJobHosts:
    """Return whom a job of `wanted` nodes is submitted without, `failed` first, so that as many nodes remain
    which Slurm can give it; without those that failed `fewest` will do (None: `wanted`). `states`: Slurm's
    words for the nodes it may have. A pure function.

    Slurm lets a job fail that too few nodes are left for, and one that needs a node which is down waits for
    it: only where there are enough without them nobody is missed who may come back.
    """
    failed, fewest = tuple(dict.fromkeys(failed)), wanted if fewest is None else min(fewest, wanted)
    usable = {name for name, state in states.items() if is_usable(state)}
    num_left = len(usable)
    exclude: list[str] = []
    for host in dict.fromkeys([*failed, *before]) if num_left >= fewest else ():
        needed = fewest if host in failed else wanted
        if host in states and (host not in usable or num_left > needed):
            exclude.append(host)
            num_left -= host in usable
    missed = tuple(host for host in failed if host in usable - set(exclude))
    return NextJobHosts(tuple(exclude), missed, is_short=fewest <= num_left < wanted)


def chosen_to_leave_out(entries: Sequence[Listed], names: frozenset[str], wanted: int) -> LeftOutHosts:
    """Return those that Slurm knows, the newest first, as long as `wanted` of the nodes remain. A pure
    function.
    """
    known = [entry for entry in entries if entry.host in names]
    room = max(0, len(names) - wanted)
    notes = [f"without {entry.host}: {words(entry)}" for entry in known[:room]]
    if len(known) > room:
        hosts = ", ".join(entry.host for entry in known[room:])
        notes.append(f"{hosts} failed before, and may be used: too few other nodes are there")
    return LeftOutHosts(tuple(entry.host for entry in known[:room]), tuple(notes))


def words(entry: Listed) -> str:
    """Return in a line why a host is on the list, and for how long."""
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.expires))
    return f"{entry.reason} (run {Path(entry.run).name}; until {until})"
