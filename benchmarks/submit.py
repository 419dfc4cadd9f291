"""How long the commands take that submit: one job, a small sweep, a thousand members.

Jobs are submitted to a development cluster of this machine, held so that nothing runs, and cancelled. It
needs root, to start the cluster, and Slurm's packages.

    python benchmarks/submit.py [--repeats 5] [--members 1000]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARRAY_SIZE = 500
SMALL_SWEEP = 12
HELD = (
    *("cluster.device=cpu", "cluster.gpus_per_node=2", "cluster.nodes=2", "wandb.mode=disabled"),
    *("cluster.slurm_extra.hold=true", "--json"),
)


def main() -> int:
    """Measure, print a table, return 0; 2 on a machine that cannot start the cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="of which the median is told (%(default)s)")
    parser.add_argument("--members", type=int, default=1000, help="of the large sweep (%(default)s)")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        print("this needs root and Slurm's packages: it starts a development cluster", file=sys.stderr)
        return 2
    with cluster() as environment:
        measure(environment, arguments.repeats, arguments.members)
    return 0


@contextmanager
def cluster() -> Iterator[dict[str, str]]:
    """Start a cluster whose arrays have at most 500 tasks; yield the environment of a shell on it."""
    with tempfile.TemporaryDirectory(prefix="orchestra-") as folder:
        # Slurm's daemons run as other users.
        Path(folder).chmod(0o755)
        state = Path(folder) / "cluster"
        devcluster(state, "up", "--nodes", "4", "--gpus", "0", "--set", f"MaxArraySize={ARRAY_SIZE}")
        try:
            runs = Path(folder) / "runs"
            runs.mkdir()
            settings = {"SLURM_CONF": str(state / "etc" / "slurm.conf"), "PYTHONPATH": str(ROOT)}
            yield {**os.environ, **settings, "PWD": str(runs)}
        finally:
            devcluster(state, "down")


def devcluster(state: Path, *words: str) -> None:
    """Run slurm/devcluster."""
    command = [sys.executable, str(ROOT / "slurm" / "devcluster"), "--state", str(state), *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(environment: dict[str, str], repeats: int, members: int) -> None:
    """Print a line for each command."""
    few = "train.seed=" + ",".join(map(str, range(SMALL_SWEEP)))
    many = f"train.seed=range(0,{members})"
    once = min(3, repeats)
    rows: list[tuple[str, Sequence[str], int, str]] = [
        ("submit, one job", ("submit",), repeats, "1.5 s"),
        (f"submit -m, {SMALL_SWEEP} members", ("submit", "-m", few, "--force"), repeats, "3.24 s"),
        (f"submit -m, {members} members", ("submit", "-m", many, "--force"), once, "20 s"),
        ("the same again, nothing missing", ("submit", "-m", many), once, "–"),
    ]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, arrays of at most {ARRAY_SIZE}\n")
    print("| command | wall, median | least | most | CPU of the command | to meet |")
    print("|---|---|---|---|---|---|")
    for name, words, number, limit in rows:
        timed = [seconds(words, environment) for _ in range(number)]
        walls, cpus = [wall for wall, _ in timed], [cpu for _, cpu in timed]
        figures = [f"{value:.2f} s" for value in (statistics.median(walls), min(walls), max(walls))]
        print(f"| {name} | {' | '.join(figures)} | {statistics.median(cpus):.2f} s | {limit} |", flush=True)


def seconds(words: Sequence[str], environment: dict[str, str]) -> tuple[float, float]:
    """Return how long a command took, on the wall and of the processor's time."""
    again = words[-1] != "--force" and words[:2] == ("submit", "-m") and "range" in words[2]
    before, begin = os.times(), time.perf_counter()
    command = [sys.executable, "-m", "orchestra", *words, *HELD]
    subprocess.run(command, env=environment, cwd=environment["PWD"], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begin, os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    if not again:
        # What a sweep would take over from the one before; the newest large one is left for the last row.
        subprocess.run(["scancel", "--user", "root"], env=environment, check=True)
    return wall, cpu


if __name__ == "__main__":
    sys.exit(main())
