"""The rest of the fault matrix: a storm of restarts, and which rows are shown elsewhere or cannot be here."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from matrix_courses import Shown
from matrix_field import TINY, Field
from sites import ROOT

from orchestra.run.events import read_events
from orchestra.run.paths import RunDir

STORM_RESTARTS = 100
_EVERY = 2
# What a hundred restarts may add at most: a leak of one per restart would be ten times that.
_MORE_FILES = 10
_MORE_THREADS = 4
_MORE_SHARED_FILES = 10
_LOG_BYTES_PER_RESTART = 64_000

ELSEWHERE = (
    Shown("8", "30 % of packets lost, 500 ms of delay", "cannot be shown here: needs the kernel's sch_netem"),
    Shown("15", "killed at each moment of a save", "tests/e2e/kill_points.py (make torture)"),
    Shown("17-24", "full disks, damage, other layouts, the ledger", "tests/e2e, tests/ranks"),
    Shown("27-29", "warning, time limit, preemption, requeue", "tests/slurm/test_requeue.py"),
    Shown("32", "two runs on the same nodes", "tests/slurm/test_survival.py"),
    Shown("35", "wandb away, killed, resumed", "tests/e2e"),
    Shown("36", "a clock jumps", "cannot be shown here: Linux's time namespaces do not move the time of day"),
    Shown("37", "a stale shared file system", "cannot be shown here: needs NFS or Lustre"),
)


@dataclass(frozen=True)
class _Gauge:
    """What an agent and its fork server hold on to."""

    files: int
    threads: int
    shared_files: int


def storm(on: Field, restarts: int) -> list[Shown]:
    """Let a run in the foreground fail so often in a row, each time behind progress; watch what it holds."""
    name = f"storm-{time.time_ns() // 1_000_000}"
    plan = ",".join(
        f"{{attempt:{it},rank:{it % 2},at_step:{_EVERY * (it + 1) + 1}}}" for it in range(restarts)
    )
    words = (
        "run",
        *TINY,
        f"run.name={name}",
        f"train.steps={_EVERY * (restarts + 3)}",
        "cluster.gpus_per_node=2",
    )
    more = (f"checkpoint.every_steps={_EVERY}", "recovery.backoff_s=0.1", f"recovery.inject=[{plan}]")
    command = (sys.executable, "-m", "orchestra", *words, *more)
    run = RunDir(on.site.shared / "runs" / name)
    environment = {**on.site.environment, "PYTHONPATH": str(ROOT)}
    begin = time.monotonic()
    with (on.site.shared / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=on.site.shared, env=environment, stdout=log, stderr=log, user=on.site.user.pw_uid
        )
        gauges: dict[int, _Gauge] = {}
        while process.poll() is None:
            attempt = sum(it["event"] == "attempt_started" for it in read_events(run))
            gauges.setdefault(attempt, _gauge(process.pid))
            time.sleep(0.5)
    took = time.monotonic() - begin
    return [
        Shown("40", f"{restarts} restarts in a row", _told(run, process.returncode, gauges, restarts, took))
    ]


def _told(run: RunDir, code: int, gauges: dict[int, _Gauge], restarts: int, took: float) -> str:
    early = gauges[min(number for number in gauges if number >= min(3, restarts))]
    late = gauges[max(gauges)]
    logs = sum(file.stat().st_size for file in run.logs.rglob("*") if file.is_file())
    attempts = sum(it["event"] == "attempt_started" for it in read_events(run))
    wrong = []
    if (code, attempts) != (0, restarts + 1):
        wrong.append(f"exit code {code} after {attempts} attempts")
    for what, least, most, allowed in (
        ("open files", early.files, late.files, _MORE_FILES),
        ("threads", early.threads, late.threads, _MORE_THREADS),
        ("files in /dev/shm", early.shared_files, late.shared_files, _MORE_SHARED_FILES),
    ):
        if most - least > allowed:
            wrong.append(f"{what} grew from {least} to {most}")
    if logs > _LOG_BYTES_PER_RESTART * (restarts + 1):
        wrong.append(f"{logs} bytes of logs")
    held = f"{late.files} files, {late.threads} threads, {logs:,} bytes of logs"
    facts = f"{took / max(1, attempts):.1f} s each; {held}"
    return f"FAILED: {'; '.join(wrong)}" if wrong else f"passed: {facts}"


def _gauge(pid: int) -> _Gauge:
    """Count what the command and its children hold; the ranks come and go and are left out."""
    files = threads = 0
    for one in (pid, *_fork_servers(pid)):
        try:
            files += _num_entries(f"/proc/{one}/fd")
            threads += _num_entries(f"/proc/{one}/task")
        except OSError:
            continue
    return _Gauge(files, threads, _num_entries("/dev/shm"))


def _num_entries(folder: str) -> int:
    return sum(1 for _ in Path(folder).iterdir())


def _fork_servers(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [int(it) for it in children if "fork_server.server" in Path(f"/proc/{it}/cmdline").read_text()]
    except OSError:
        return []
