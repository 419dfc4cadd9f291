"""Records anew what tests/golden compares: `python tests/golden/record_goldens.py [--only WORD …]`.

Run it only for a change that is meant to be seen, and name that change in the commit: `git diff` shows it.
`--only submit`, `plan`, `stored`, `offered` or `layouts` records one part. `--pack-runs FOLDER…` first stores
the runs that lie in folders.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import command_output
import fresh_runs
import stored_runs
from goldens import RECORDED, write

PARTS = {**command_output.PARTS, "layouts": (fresh_runs.recorded, ("layouts/*",))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pack-runs", type=Path, nargs="+", metavar="FOLDER")
    asked = parser.parse_args()
    if asked.pack_runs:
        stored_runs.pack([folder.resolve() for folder in asked.pack_runs])
    for part in asked.only:
        make, patterns = PARTS[part]
        with tempfile.TemporaryDirectory() as scratch:
            found = make(Path(scratch).resolve())
        for file in [file for pattern in patterns for file in RECORDED.glob(pattern)]:
            file.unlink()
        for name, value in found.items():
            write(name, value)


if __name__ == "__main__":
    main()
