"""Lists the nodes that failed twice and that jobs are submitted without, with the evidence against each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.doctor.check import Check, Finding, Mark, Subject

if TYPE_CHECKING:
    from orchestra.recovery.excluded import ExcludeList, Listed

_NAME = "left out"


def _left_out(subject: Subject) -> Iterator[Finding]:
    # Late: it knows the configuration's schema, which another package may shadow.
    from orchestra.recovery.excluded import all_lists

    runs = subject.run_dir.expanduser().absolute()
    for known in all_lists(runs):
        entries = known.entries(time.time())
        for entry in entries:
            advice = f"when it is repaired, or was not to blame: rm {known.file(entry.host)}"
            yield Finding(_NAME, Mark.warning, _words(entry, known), advice)
        if not entries:
            yield Finding(_NAME, Mark.ok, f"no node of cluster {known.cluster}")
        for file in known.unreadable():
            yield Finding(_NAME, Mark.note, f"{file} says nothing", "it leaves nobody out: remove it")


def _words(entry: Listed, known: ExcludeList) -> str:
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.expires))
    attempts = ", ".join(map(str, entry.attempts))
    causes = ", ".join(dict.fromkeys(entry.causes))
    evidence = f": attempts {attempts} of run {Path(entry.run).name} ({causes})" if attempts else ""
    return f"{entry.host} of cluster {known.cluster} until {until}{evidence}; {entry.reason}"


CHECKS = (Check(_NAME, _left_out),)
