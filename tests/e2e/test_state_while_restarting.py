"""What `orchestra status` reads of a run at any moment of its restarts: never `failed` while it goes on."""

from __future__ import annotations

import time
from pathlib import Path

from commands import TINY, start

from orchestra.report.run_state import read_state
from orchestra.run.paths import RunDir

FAULTS = "recovery.inject=[{at_step: 6, rank: 1}, {attempt: 1, at_step: 12, rank: 0, fault: exception}]"


def test_a_run_that_begins_again_is_never_seen_as_failed(tmp_path: Path) -> None:
    length = ("train.steps=20", "checkpoint.every_steps=5", "run.name=seen")
    process = start(tmp_path, "run", *TINY, *length, FAULTS)
    run = RunDir(tmp_path / "runs" / "seen")
    seen: list[str] = []
    while process.poll() is None:
        if run.record.exists():
            state = read_state(run, time.time()).state
            seen += [state] if seen[-1:] != [state] else []
        time.sleep(0.002)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    kept = [state for state in seen if state != "not started"]
    assert kept[:5] == ["running", "restarting", "running", "restarting", "running"], seen
    assert set(kept[5:]) <= {"finished"}, seen
