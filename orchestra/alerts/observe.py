"""Reads what the detectors look at: a run's records, its nodes' heartbeats, the disks that it writes to.

Called by `orchestra watch` and `orchestra top`. What cannot be read is said in the place of what it would
have told. It writes nothing and starts nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from conf.schema import Config
from orchestra.alerts.observed import Disk, NodeBeat, ObservedRun
from orchestra.errors import ConfigError
from orchestra.recovery.accounting import account
from orchestra.recovery.history import newest_attempt
from orchestra.report.layouts import prediction_of
from orchestra.report.run_state import RunState
from orchestra.report.spending import held_until, spending
from orchestra.run.config_file import read_config
from orchestra.run.events import is_number, is_whole, read_events
from orchestra.run.files import names_in, read_json
from orchestra.run.metrics_file import FollowedRows, rows_that_count, wall_begin
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase, read_record
from orchestra.run.run_lineage import lineage_of


def observe(
    state: RunState, now: float, commands: Mapping[str, str], rows_read: FollowedRows | None = None
) -> ObservedRun:
    """Read a run whose state is known, at Unix time `now`; `commands`: what to type for it, by verb;
    `rows_read`: its rows, where it was looked at before.

    A run that cannot be read has the state "unreadable", and the cause says why.
    """
    run = RunDir(Path(state.path))
    try:
        events = read_events(run)
        rows = (rows_read or FollowedRows(run.metrics)).read()
        attempt = newest_attempt(events)
        nodes = () if attempt is None else node_beats(run, attempt.number)
    except OSError as error:
        return ObservedRun(state.name, now, RunPhase.unreadable, cause=str(error), commands=commands)
    config, no_config = _config(run)
    began = wall_begin(events, read_record(run))
    counting = rows_that_count(rows, lineage_of(events))
    tokens = counting[-1].get("tokens") if counting else None
    until = held_until(state.state, now)
    planned, no_plan = (None, no_config) if config is None else _planned(run, run.config.stat().st_mtime_ns)
    return ObservedRun(
        name=state.name,
        now=now,
        state=state.state,
        # Somebody edited a row without a time, or a disk damaged it.
        rows=[row for row in counting if is_number(row.get("time"))],
        rows_heard=_modified(run),
        events=events,
        nodes=nodes,
        used=spending(events, rows, tokens if is_whole(tokens) else None, config, until),
        accounts=account(events, rows, began=began, now=None if state.state.is_over else now),
        config=config,
        no_config=no_config,
        cause=state.cause,
        planned_tokens_per_s=planned,
        no_plan=no_plan,
        disks=(_disk(str(run.path)), _disk(_place_of_checkpoints(run, config))),
        commands=commands,
    )


def _modified(run: RunDir) -> float:
    """Return when the file server saw rows last; 0.0 where it does not say."""
    try:
        return run.metrics.stat().st_mtime
    except OSError:
        return 0.0


def _config(run: RunDir) -> tuple[Config | None, str]:
    try:
        return read_config(run.config), ""
    except ConfigError as error:
        return None, str(error)


@functools.lru_cache(maxsize=64)
def _planned(run: RunDir, _modified: int) -> tuple[float | None, str]:
    """Return the tokens/s that the planner expects of a run as it began last; else why it expects nothing."""
    try:
        return prediction_of(run).tokens_per_s, ""
    except ConfigError as error:
        return None, "; ".join(error.problems)


def node_beats(run: RunDir, attempt: int) -> tuple[NodeBeat, ...]:
    """Return what the nodes of an attempt wrote last of their ranks, by node. Raises OSError."""
    beats = []
    for name in sorted(names_in(run.heartbeats)):
        path = run.heartbeats / name
        summary = read_json(path) if name.startswith("node-") and name.endswith(".json") else None
        if summary is None or summary.get("attempt") != attempt or not is_whole(summary.get("node")):
            continue
        silence_s, phases, written = (summary.get(key) for key in ("longest_silence_s", "phases", "time"))
        # By the node's clock or by the file server's, whichever is later: they may differ.
        heard = max(path.stat().st_mtime, float(written) if is_number(written) else 0.0)
        beats.append(
            NodeBeat(
                node=summary["node"],
                host=str(summary.get("host")),
                heard=heard,
                phases=phases if isinstance(phases, dict) else {},
                longest_silence_s=float(silence_s) if is_number(silence_s) else 0.0,
            )
        )
    return tuple(sorted(beats, key=lambda beat: beat.node))


def _place_of_checkpoints(run: RunDir, config: Config | None) -> str:
    place = None if config is None else config.checkpoint.dir
    return str(run.checkpoints) if place is None else place


def _disk(place: str) -> Disk:
    url = urlsplit(place)
    if url.scheme not in ("", "file"):
        return Disk(place, unseen=f"nobody says how much room is left at {url.scheme}://")
    path = Path(url.path)
    # The checkpoints' folder is made by the first of them.
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), path)
    try:
        found = os.statvfs(existing)
    except OSError as error:
        return Disk(place, unseen=error.strerror or str(error))
    inodes = found.f_favail if found.f_files else None
    return Disk(place, free_bytes=found.f_bavail * found.f_frsize, free_inodes=inodes)
