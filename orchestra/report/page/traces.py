"""The traces that lie in a run's folder, as a page links to them. Read-only."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from orchestra.run.files import Record
from orchestra.run.paths import RunDir

# As orchestra.train.watch.profile names them.
_NAME = re.compile(r"^rank-(\d{5,9})-steps-(\d{1,12})-(\d{1,12})(\.json\.gz|\.txt|-memory\.pickle)$")
_KINDS = {".json.gz": "trace", ".txt": "table of operations", "-memory.pickle": "memory history"}


def trace_rows(run: RunDir, page_folder: Path | None) -> list[Record]:
    """Return a row for each file, by steps and rank. `link` leads there from a page in `page_folder`; null
    where nobody knows where the page will lie (None).
    """
    try:
        files = [(entry, entry.stat().st_size) for entry in os.scandir(run.profile)]
    except OSError:
        return []
    rows = []
    for entry, size in files:
        if (match := _NAME.match(entry.name)) is None:
            continue
        row = {"rank": int(match[1]), "first_step": int(match[2]), "last_step": int(match[3])}
        link = None if page_folder is None else _link(Path(entry.path), page_folder)
        rows.append({**row, "kind": _KINDS[match[4]], "name": entry.name, "bytes": size, "link": link})
    return sorted(rows, key=lambda row: (row["first_step"], row["last_step"], row["rank"], row["name"]))


def _link(file: Path, page_folder: Path) -> str:
    relative = os.path.relpath(file.resolve(), page_folder.resolve())
    # So that no folder's name is read as a scheme.
    return f"./{quote(relative)}"
