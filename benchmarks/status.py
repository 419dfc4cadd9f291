"""Measures how long `orchestra status` takes over many recorded runs, and how often it asks Slurm.

    python benchmarks/status.py [--runs 1000] [--members 1000] [--repeats 5]

Three folders: runs in mixed states, a sweep, and both. Each run has its record, a frozen configuration, two
event files of twenty lines and three hundred rows of metrics. Stand-ins for squeue and sacct answer at once
for every job, and count how often they are called. Times are of whole commands, Python's start included.
"""

from __future__ import annotations

import argparse
import dataclasses
import getpass
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STEPS = 300
STATES = ("finished", "failed", "stopped", "queued", "running")
ME = getpass.getuser()


def record_run(
    path: Path, index: int, config: str, state: str, job: dict[str, object], **facts: object
) -> str:
    """Write a run in a state, and return the line that squeue prints for its job, if it is in the queue."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config)
    created = time.time() - 1e5 + index
    record = {"name": path.name, "created": created, "host": "login", "pid": None, "steps": STEPS}
    more = {"overrides": [f"optim.lr={index}e-6"], "command": ["orchestra", "submit"], "user": ME}
    (path / "run.json").write_text(json.dumps({**record, **more, **facts, "jobs": [job]}, indent=2))
    if state != "queued":
        _train(path, index, state)
    word = {"queued": "PENDING", "running": "RUNNING"}.get(state)
    label = job["id"] or f"500_{job['task']}"
    return f"{label}|{word}|{ME}|Priority|node1|N/A|{job['name']}|{job['token']}\n" if word else ""


def _train(path: Path, index: int, state: str) -> None:
    (path / "events").mkdir()
    now = time.time()
    stamp = {"time": now, "attempt": 0, "host": "node1"}
    node = [{**stamp, "event": "attempt_started", "node": 0, "pid": 1, "pid_started": 1, "nodes": 2}]
    node += [{**stamp, "event": "checkpoint_started", "node": 0, "step": step} for step in range(18)]
    ends = {"finished": ("finished", 0), "failed": ("failed", 1), "stopped": ("failed", 75)}
    if state in ends:
        event, code = ends[state]
        node.append({**stamp, "event": event, "node": 0, "code": code, "cause": state, "message": "x"})
    rank = [
        {**stamp, "event": "checkpoint_committed", "rank": 0, "step": step, "seconds": 0.5, "bytes": 1 << 30}
        for step in range(0, 200, 10)
    ]
    for name, events in (("node-000", node), ("rank-00000", rank)):
        lines = "".join(json.dumps(event, separators=(",", ":")) + "\n" for event in events)
        (path / "events" / f"attempt-000.{name}.jsonl").write_text(lines)
    numbers = {"loss": 2.5 + index / 1e6, "grad_norm": 1 / 3, "lr": 1e-3 / 7, "tokens_per_s": 1e5 / 7}
    more = {"mfu": 0.41 / 3, "hfu": 0.4 / 3, "step_time_s": 1 / 7, "memory_peak_bytes": 1 << 34}
    rows = [
        {"step": step, "time": now + step, **numbers, "mfu_convention": "palm", **more, "goodput": 0.99}
        for step in range(1, STEPS)
    ]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (path / "metrics.jsonl").write_text(text)


def make_runs(parent: Path, num_runs: int, config: str) -> str:
    """Write runs in mixed states, and return squeue's answer."""
    queue = ""
    for index in range(num_runs):
        name = f"debug-20260101-{index:06d}-abcdef"
        job = {"token": f"orchestra:{index:016x}", "id": str(1000 + index), "name": name, "user": ME}
        entry: dict[str, object] = {**job, "submitted": time.time() - 1e5, "attempt": 0, "task": None}
        queue += record_run(parent / name, index, config, STATES[index % len(STATES)], entry)
    return queue


def make_sweep(parent: Path, num_members: int, config: str) -> str:
    """Write a sweep of one array, and return squeue's answer."""
    from orchestra.run.paths import Sweep, SweepArray, SweepDir, SweepMember, to_json

    sweep = SweepDir(parent / "lr-sweep")
    token, submitted, queue = "orchestra:5eeb", time.time() - 1e5, ""
    for index in range(num_members):
        job: dict[str, object] = {"token": token, "id": None, "name": sweep.name, "user": ME, "task": index}
        facts = {"sweep": sweep.name, "member": index}
        state = STATES[index % len(STATES)]
        queue += record_run(
            sweep.member(index).path, index, config, state, {**job, "submitted": submitted}, **facts
        )
    members = tuple(
        SweepMember(index, f"{index:040x}", (f"optim.lr={index}e-6",)) for index in range(num_members)
    )
    array = SweepArray(0, token, 0, tuple(range(num_members)), sweep.name, ME, submitted, "500")
    sweep.record.write_text(to_json(Sweep(sweep.name, "x", ("optim.lr=…",), members, (array,), submitted)))
    return queue


def put_commands(folder: Path, queue: str) -> dict[str, str]:
    """Write stand-ins for Slurm's commands, and return the environment in which they come first."""
    folder.mkdir()
    (folder / "queue").write_text(queue)
    for name, text in (("squeue", f"cat {folder}/queue"), ("sacct", "true")):
        (folder / name).write_text(f"#!/bin/sh\necho {name} >> {folder}/calls\n{text}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder}:/usr/bin:/bin"}


def measured(
    words: list[str], environment: dict[str, str], commands: Path, repeats: int
) -> tuple[list[float], list[float], str]:
    """Return the seconds of each whole command, its CPU seconds, and which of Slurm's commands the last one
    called.
    """
    times, cpu = [], []
    for _ in range(repeats):
        (commands / "calls").unlink(missing_ok=True)
        began, cpu_before = time.perf_counter(), cpu_seconds()
        subprocess.run(
            [sys.executable, "-m", "orchestra", "status", *words],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        times.append(time.perf_counter() - began)
        cpu.append(cpu_seconds() - cpu_before)
    calls = (commands / "calls").read_text().split() if (commands / "calls").exists() else []
    return times, cpu, ", ".join(f"{calls.count(name)} {name}" for name in ("squeue", "sacct"))


def cpu_seconds() -> float:
    """Return the CPU seconds of all children so far: on a busy machine they say more than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    from conf.schema import Config
    from orchestra.run.config_file import to_yaml

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="make the folders here and leave them")
    arguments = parser.parse_args()
    config = Config()
    text = to_yaml(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=STEPS)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.keep or Path(scratch)
        queue_of_runs = make_runs(folder / "runs", arguments.runs, text)
        queue_of_sweep = make_sweep(folder / "sweeps", arguments.members, text)
        commands = folder / "bin"
        environment = put_commands(commands, queue_of_runs + queue_of_sweep)
        cases = {
            "nothing (Python's start)": ["--dir", str(folder / "none")],
            f"{arguments.runs} runs": ["--dir", str(folder / "runs")],
            f"{arguments.runs} runs, --json": ["--dir", str(folder / "runs"), "--json"],
            f"a sweep of {arguments.members}, one row": ["--dir", str(folder / "sweeps")],
            f"a sweep of {arguments.members}, its table": [str(folder / "sweeps" / "lr-sweep")],
            "one run": [str(folder / "runs" / "debug-20260101-000004-abcdef")],
        }
        print("| status of | median s | best s | worst s | CPU s | questions |\n|---|---|---|---|---|---|")
        for name, words in cases.items():
            times, cpu, calls = measured(words, environment, commands, arguments.repeats)
            numbers = (statistics.median(times), min(times), max(times), statistics.median(cpu))
            print(f"| {name} | {' | '.join(f'{number:.2f}' for number in numbers)} | {calls} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
