"""A process of an attempt that a newer one has replaced publishes nothing: it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir

SAVES = """
import sys
from pathlib import Path
from orchestra.run.events import EventWriter
from orchestra.run.paths import RunDir
from orchestra.train.checkpoints import fenced
run = RunDir(Path(sys.argv[1]))
look = fenced(run, 3, EventWriter(run, "rank", 3), lambda phase, step: print(phase, flush=True))
for phase in ("staging", "mid_file", "before_vote", sys.argv[2], "after"):
    look(phase, 10)
"""


@pytest.mark.parametrize("phase", ["before_manifest", "before_prune"])
@pytest.mark.parametrize(
    ("claims", "is_begun", "is_void"),
    [((), True, False), ((2, 3), True, False), ((3, 4), True, True), ((3, 4), False, False)],
)
def test_a_rank_ends_before_it_publishes_when_a_newer_attempt_has_begun(
    tmp_path: Path, phase: str, claims: tuple[int, ...], is_begun: bool, is_void: bool
) -> None:
    run = RunDir(tmp_path / "run")
    for path in (run.control, run.events):
        path.mkdir(parents=True)
    for attempt in claims:
        run.claim(attempt).write_text("{}")
        if is_begun:
            EventWriter(run, f"node-{attempt}", attempt).write("attempt_started")
    words = [sys.executable, "-c", SAVES, str(run.path), phase]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    begun = ["staging", "mid_file", "before_vote", phase]
    assert done.stdout.split() == (begun if is_void else [*begun, "after"]), done.stderr
    assert done.returncode == (1 if is_void else 0)
    fenced = [event for event in read_events(run) if event["event"] == "fenced"]
    told = [(event["event"], event["newest"], event["phase"]) for event in fenced]
    assert told == ([("fenced", 4, phase)] if is_void else [])
