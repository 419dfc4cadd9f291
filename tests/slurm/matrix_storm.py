"""The storm of the fault matrix: a hundred restarts in a row, after which nothing may have leaked."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from matrix_injections import ShownRow
from sites import TINY, Site

from orchestra.run.events import read_events
from orchestra.run.paths import RunDir

STORM_RESTARTS = 100
_EVERY = 2
# What a hundred restarts may add at most: a leak of one per restart would be ten times that.
_MORE_AT_MOST = {"open files": 10, "threads": 4, "files in /dev/shm": 10}
_LOG_BYTES_PER_RESTART = 64_000


def storm(site: Site, restarts: int) -> ShownRow:
    """Let a run in the foreground fail so often in a row, each time after progress; watch what it holds."""
    name = f"storm-{time.time_ns() // 1_000_000}"
    plan = ",".join(
        f"{{attempt:{attempt},rank:{attempt % 2},at_step:{_EVERY * (attempt + 1) + 1}}}"
        for attempt in range(restarts)
    )
    length = (f"train.steps={_EVERY * (restarts + 3)}", f"checkpoint.every_steps={_EVERY}")
    faults = ("recovery.backoff_s=0.1", f"recovery.inject=[{plan}]")
    run = RunDir(site.runs / name)
    begin = time.monotonic()
    with (site.shared / f"{name}.log").open("wb") as log:
        words = ("run", *TINY, f"run.name={name}", *length, *faults)
        process = site.start_orchestra(*words, stdout=log, stderr=subprocess.STDOUT)
        gauges: dict[int, dict[str, int]] = {}
        while process.poll() is None:
            gauges.setdefault(_num_starts(run), _gauge(process.pid))
            time.sleep(0.5)
    took = time.monotonic() - begin
    result = _result(run, process.returncode, gauges, restarts, took)
    return ShownRow("40", f"{restarts} restarts in a row", result)


def _num_starts(run: RunDir) -> int:
    return sum(event["event"] == "attempt_started" for event in read_events(run))


def _result(run: RunDir, code: int, gauges: dict[int, dict[str, int]], restarts: int, took: float) -> str:
    early = gauges[min(number for number in gauges if number >= min(3, restarts))]
    late = gauges[max(gauges)]
    logs = sum(file.stat().st_size for file in run.logs.rglob("*") if file.is_file())
    attempts = _num_starts(run)
    wrong = []
    if (code, attempts) != (0, restarts + 1):
        wrong.append(f"exit code {code} after {attempts} attempts")
    for what, allowed in _MORE_AT_MOST.items():
        if late[what] - early[what] > allowed:
            wrong.append(f"{what} grew from {early[what]} to {late[what]}")
    if logs > _LOG_BYTES_PER_RESTART * (restarts + 1):
        wrong.append(f"{logs} bytes of logs")
    held = ", ".join(f"{count} {what}" for what, count in late.items())
    facts = f"{took / max(1, attempts):.1f} s each; {held}, {logs:,} bytes of logs"
    return f"FAILED: {'; '.join(wrong)}" if wrong else f"passed: {facts}"


def _gauge(pid: int) -> dict[str, int]:
    """Count what the command and its fork servers hold; the ranks come and go and are left out."""
    files = threads = 0
    for process in (pid, *_fork_servers(pid)):
        try:
            files += _num_entries(f"/proc/{process}/fd")
            threads += _num_entries(f"/proc/{process}/task")
        except OSError:
            continue
    return {"open files": files, "threads": threads, "files in /dev/shm": _num_entries("/dev/shm")}


def _num_entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _fork_servers(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [
            int(child)
            for child in children
            if "fork_server.server" in Path(f"/proc/{child}/cmdline").read_text()
        ]
    except OSError:
        return []
