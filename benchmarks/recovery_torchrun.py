"""The same faults under plain torchrun in a job of `sbatch --requeue`: what a user has without orchestra."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sites import Site, TooLateError, wait_until

from orchestra.run.files import read_json_lines

PEER = Path(__file__).with_name("recovery_peer.py")
PEER_FAULTS = ("rank", "agent", "stop", "node", "first")
LIMIT_S = 300.0
# A rank that is stopped is noticed by nothing but the time-out of a collective: half an hour by default.
_STOPPED_LIMIT_S = 120.0
SCRIPT = """#!/bin/bash
#SBATCH --requeue --nodes=2 --ntasks-per-node=1 --open-mode=append --job-name=peer
#SBATCH --chdir={folder} --output={folder}/log.txt
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) OMP_NUM_THREADS=1
srun --unbuffered bash -c 'exec {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 \\
  --max-restarts=10 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29511 \\
  --rdzv-id=$SLURM_JOB_ID-${{SLURM_RESTART_COUNT:-0}} {peer} {folder}'
"""


def measure_peer(site: Site, faults: list[str], repeats: int) -> Iterator[str]:
    """Let each fault happen so often, each in a job of its own; yield a line for each."""
    for fault in faults:
        for _ in range(repeats):
            site.clear()
            yield _measured(site, fault)
    site.clear()


def _measured(site: Site, fault: str) -> str:
    folder = site.shared / f"peer-{fault}-{time.time_ns()}"
    folder.mkdir(parents=True)
    script = folder / "job.sbatch"
    script.write_text(SCRIPT.format(folder=folder, python=sys.executable, peer=PEER))
    job = site.submit(str(script))
    try:
        wait_until(lambda: _step(folder) > 15, "the peer trains", LIMIT_S)
    except TooLateError as error:
        return f"torchrun, {fault}: {error}; its log: {(folder / 'log.txt').read_text()[-2000:]}"
    hosts = _hosts(site, job)
    load = os.getloadavg()[0]
    since = time.time()
    _hit(site, fault, hosts)
    limit = _STOPPED_LIMIT_S if fault == "stop" else LIMIT_S
    before = len(_rows(folder))
    first_pid = _rows(folder)[-1]["pid"]
    try:
        wait_until(lambda: _back_at(folder, before, first_pid) is not None, "a new step", limit)
    except TooLateError:
        on = _step(folder) - _rows(folder)[before - 1]["step"]
        what = f"its ranks trained on unwatched ({on} steps)" if on > 5 else "no new step"
        return f"torchrun, {fault}: {what} within {limit:g} s at load {load:.1f}"
    back = _back_at(folder, before, first_pid)
    assert back is not None
    return f"torchrun, {fault}: {back - since:.1f} s at load {load:.1f}"


def _hosts(site: Site, job: str) -> list[str]:
    shown = site.run("scontrol", "--oneliner", "show", "job", job).stdout
    names = dict(part.split("=", 1) for part in shown.split() if "=" in part)["NodeList"]
    return site.run("scontrol", "show", "hostnames", names).stdout.split()


def _hit(site: Site, fault: str, hosts: list[str]) -> None:
    if fault in ("node", "first"):
        site.fail(hosts[1 if fault == "node" else 0])
        return
    lines = site.processes_of_jobs(hosts[1]).items()
    is_agent = "torch.distributed.run"
    wanted = [
        pid for pid, line in lines if "recovery_peer" in line and (is_agent in line) == (fault == "agent")
    ]
    with contextlib.suppress(ProcessLookupError):
        os.kill(max(wanted), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)


def _rows(folder: Path) -> list[dict[str, float]]:
    file = folder / "rows.jsonl"
    return list(read_json_lines(file)) if file.exists() else []


def _step(folder: Path) -> int:
    return int(max((row["step"] for row in _rows(folder)), default=0))


def _back_at(folder: Path, before: int, old_pid: float) -> float | None:
    """Return when another process of rank 0 trained a step that none before it had trained."""
    rows = _rows(folder)
    highest = max(row["step"] for row in rows if row["pid"] == old_pid)
    later = (row for row in rows[before:] if row["pid"] != old_pid and row["step"] > highest)
    return next((row["time"] for row in later), None)
