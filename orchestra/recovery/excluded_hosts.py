"""Which hosts failed twice and are left out of further jobs for a while: one small file per host and cluster.

<runs>/.orchestra/excluded/<cluster>/<host>.json lies beside the runs, so that all runs and whoever submits
them share it, without a lock: a file is written whole, read whole, and counts until its time is over. Whoever
reads one later removes it. A person takes a host off by removing its file.

`orchestra.recovery.policy` decides who is listed; the leader of a job writes the entry, and whoever submits
or starts a job reads the list.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from urllib.parse import quote, unquote

from orchestra.recovery.incidents import Incident
from orchestra.recovery.policy import Decision
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import read_json, write_atomically
from orchestra.run.paths import RunDir, SweepDir

_HOUR_S = 3600.0
# Slurm's name of the cluster is not always to be had.
_UNNAMED = "unnamed"
# A clock that ran far ahead must not keep a host out for ever.
_LONGEST_S = 90 * 24 * _HOUR_S


@dataclass(frozen=True)
class Listed:
    """A host that is left out, and why. Times are Unix seconds."""

    host: str
    reason: str
    # The run that it failed.
    run: str
    attempts: tuple[int, ...]
    # What ended these attempts, in their order.
    causes: tuple[str, ...]
    time: float
    expires: float


class ExcludeList:
    """The list of one cluster, beside the runs in `runs`. *Any process*; it waits for nobody."""

    def __init__(self, runs: Path, cluster: str | None) -> None:
        self.cluster = cluster or _UNNAMED
        self.folder = excluded_folder(runs) / _file_name(self.cluster)

    def file(self, host: str) -> Path:
        """Return the file of a host: removing it takes the host off the list."""
        return self.folder / f"{_file_name(host)}.json"

    def add(self, entry: Listed) -> None:
        """Put a host on the list, unless it is there for longer. Raises OSError."""
        place = self.file(entry.host)
        known = _read(place)
        if known is not None and known.expires >= entry.expires:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(place, json.dumps(asdict(entry), indent=2) + "\n")

    def entries(self, now: float) -> list[Listed]:
        """Return who is on the list, the newest first; those whose time is over are removed.

        A file that cannot be read leaves nobody out (`unreadable` names it).
        """
        listed = []
        for place in self._files():
            entry = self._entry(place)
            if entry is None:
                continue
            if entry.time - _LONGEST_S < now < min(entry.expires, entry.time + _LONGEST_S):
                listed.append(entry)
            else:
                _remove(place, now)
        return sorted(listed, key=lambda entry: (-entry.time, entry.host))

    def unreadable(self) -> list[Path]:
        """Return the files that say nothing: damaged, somebody else's, or written by hand."""
        return [place for place in self._files() if self._entry(place) is None]

    def _entry(self, place: Path) -> Listed | None:
        """Return what a file says of the host that it is named after."""
        entry = _read(place)
        return entry if entry is not None and place == self.file(entry.host) else None

    def _files(self) -> list[Path]:
        return [place for place in _visible(self.folder) if place.name.endswith(".json")]


def excluded_folder(runs: Path) -> Path:
    """Return where the lists of all clusters lie."""
    return runs / ".orchestra" / "excluded"


def all_lists(runs: Path) -> list[ExcludeList]:
    """Return the lists of all clusters that runs in this folder were trained on."""
    try:
        folders = [place for place in _visible(excluded_folder(runs)) if place.is_dir()]
    except OSError:
        # Somebody else's, or a storage that does not answer.
        return []
    return [ExcludeList(runs, unquote(folder.name)) for folder in folders]


def _visible(folder: Path) -> list[Path]:
    """Return what lies in a folder, by name; nothing where it cannot be read."""
    try:
        return sorted(place for place in folder.iterdir() if not place.name.startswith("."))
    except OSError:
        return []


def shared_folder(parent: Path) -> Path:
    """Return where runs share what they know: the folder that holds them, and beside a sweep of theirs."""
    return parent.parent if SweepDir(parent).record.exists() else parent


def entries_of(
    decision: Decision, incidents: Sequence[Incident], run: RunDir, now: float, hours: float
) -> list[Listed]:
    """Return the entries of the hosts that a decision lists, with the evidence of the last two incidents."""
    entries = []
    for host in decision.listed:
        blamed = [incident for incident in incidents if host in incident.blamed][-2:]
        attempts = tuple(incident.attempt for incident in blamed)
        causes = tuple(incident.cause for incident in blamed)
        expires = now + hours * _HOUR_S
        entries.append(
            Listed(host, decision.reason, str(run.path.absolute()), attempts, causes, now, expires)
        )
    return entries


def _file_name(name: str) -> str:
    """Return a name as one of a file that is neither hidden nor outside its folder."""
    quoted = quote(name, safe="")
    return f"%2E{quoted[1:]}" if quoted.startswith(".") else quoted


def _remove(place: Path, now: float) -> None:
    """Remove a file whose time is over, and no other that took its place meanwhile."""
    aside = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(OSError):
        place.rename(aside)
        entry = _read(aside)
        if entry is not None and entry.expires > now:
            # Listed anew in this very moment; where it was listed once more since, that one stays.
            with contextlib.suppress(FileExistsError):
                os.link(aside, place)
        aside.unlink()


def _read(place: Path) -> Listed | None:
    """Return what a file says; None where something is missing or of another kind."""
    record = read_json(place) or {}
    known = {field.name: record.get(field.name) for field in fields(Listed)}
    attempts, causes = known["attempts"], known["causes"]
    is_sound = (
        all(isinstance(known[name], str) for name in ("host", "reason", "run"))
        and is_number(known["time"])
        and is_number(known["expires"])
        and isinstance(attempts, list)
        and all(is_whole(number) for number in attempts)
        and isinstance(causes, list)
        and all(isinstance(cause, str) for cause in causes)
    )
    if not is_sound:
        return None
    return Listed(**{**known, "attempts": tuple(attempts), "causes": tuple(causes)})  # type: ignore[arg-type]
