"""Records anew what tests/golden compares: `python tests/golden/record_goldens.py [--only WORD …]`.

Run it only for a change that is meant to be seen, and name that change in the commit: `git diff` shows it.
`--only submit`, `plan`, `stored`, `offered` or `layouts` records one part. `--make-runs FOLDER` trains the
stored runs in a new folder, and `--pack-runs FOLDER…` stores what lies in folders.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import command_output
import fresh_runs
import stored_runs
from goldens import RECORDED, write

PARTS = {
    "submit": (command_output.submitted, ("submit",)),
    "plan": (command_output.planned, ("plan",)),
    "stored": (command_output.told_of_stored_runs, ("status", "why", "checkpoint-ls", "resume")),
    "offered": (command_output.offered, ()),
    "layouts": (fresh_runs.recorded, ("layouts",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--make-runs", type=Path, metavar="FOLDER")
    parser.add_argument("--pack-runs", type=Path, nargs="+", metavar="FOLDER")
    asked = parser.parse_args()
    if asked.make_runs:
        asked.make_runs.mkdir(parents=True)
        stored_runs.make(asked.make_runs.resolve())
        return
    if asked.pack_runs:
        stored_runs.pack([folder.resolve() for folder in asked.pack_runs])
    for part in asked.only:
        make, folders = PARTS[part]
        with tempfile.TemporaryDirectory() as scratch:
            found = make(Path(scratch).resolve())
        for folder in folders:
            shutil.rmtree(RECORDED / folder, ignore_errors=True)
        for name, value in found.items():
            write(name, value)


if __name__ == "__main__":
    main()
