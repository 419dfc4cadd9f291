"""How long the next attempt takes to its first step: torchrun and two ranks in new interpreters, or forked.

Each start trains the smallest model for one step on this machine's processor. The two ways take turns, since
shared machines drift; told are medians and the ratio of each pair.

    python benchmarks/restart.py [--repeats 7] [--ranks 2]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from launchers.fork_server.client import ForkServer
from launchers.host_network import free_port
from launchers.node_agent import start_agent, supervise
from launchers.torchrun import LaunchPlace, LaunchSpec
from orchestra.config.compose import compose
from orchestra.config.machine import signature, this_machine
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir
from orchestra.submit.claims import take_next
from orchestra.submit.launch import launch_spec
from orchestra.submit.new_run import RunRequest, planned_run, prepare

TINY = (
    *("model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=1"),
    *("model.num_attention_heads=2", "model.num_key_value_heads=1", "train.seq_len=16"),
    *("train.global_batch_size=4", "train.steps=1", "train.log_every=1", "wandb.mode=disabled"),
    *("cluster.device=cpu", "cluster.threads_per_rank=1", "cluster.peak_tflops=1"),
)
# What the worker imports, now or at its first step.
MODULES = ("orchestra.train.trainer", "torch._dynamo", "torch.distributed.tensor")


def main() -> int:
    """Measure in turns, print a table, return 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="of which the median is told (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on this machine (%(default)s)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orchestra-") as folder:
        overrides = [*TINY, f"cluster.gpus_per_node={arguments.ranks}", f"run.dir={folder}"]
        _, spec = prepared([*overrides, "run.name=first"])
        server = ForkServer(MODULES, spec.environment, Path(folder) / "server.log")
        begin = time.monotonic()
        server.start()
        if not server.await_ready(120):
            print(server.trouble(), file=sys.stderr)
            return 1
        print(f"importing once: {time.monotonic() - begin:.2f} s, {spent(server.pid):.2f} CPU-s")
        pairs = [
            (
                measured([*overrides, f"run.name=plain-{number}"], None),
                measured([*overrides, f"run.name=forked-{number}"], server),
            )
            for number in range(arguments.repeats)
        ]
        server.close()
    tell("seconds to the first step", [(plain[0], forked[0]) for plain, forked in pairs])
    tell("CPU-seconds of the attempt", [(plain[1], forked[1]) for plain, forked in pairs])
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    return 0


def prepared(overrides: list[str]) -> tuple[RunDir, LaunchSpec]:
    """Write a run directory and return it with the specification of its first attempt."""
    config = compose(overrides, this_machine(starts=True)).config
    request = RunRequest(config, signature(config), overrides, sys.argv)
    run = prepare(request, planned_run(request, time.time()))
    return run, launch_spec(read_config(run.config), run, take_next(run))


def measured(overrides: list[str], server: ForkServer | None) -> tuple[float, float]:
    """Run one attempt; return the seconds to its first step and the CPU-seconds of all its processes."""
    run, spec = prepared(overrides)
    first: list[float] = []

    def look() -> None:
        if not first and run.metrics.exists() and run.metrics.stat().st_size:
            first.append(time.monotonic() - begin)

    parent = server.pid if server is not None else os.getpid()
    before = spent(parent, only_children=True)
    begin = time.monotonic()
    starter = None if server is None else server.start_torchrun
    agent = start_agent(spec, LaunchPlace(0, "127.0.0.1", free_port()), None, starter)
    ending = supervise(agent, lambda: 0, look)
    if ending.exit_code != 0:
        raise SystemExit(spec.node_logs[0].read_text())
    look()
    return first[0], spent(parent, only_children=True) - before


def spent(pid: int | None, *, only_children: bool = False) -> float:
    """Return a process's CPU-seconds, its ended children's included (fields 14 to 17 of /proc/PID/stat)."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    ticks = [int(field) for field in stat[stat.rindex(")") + 2 :].split()[11:15]]
    return sum(ticks[2:] if only_children else ticks) / os.sysconf("SC_CLK_TCK")


def tell(what: str, pairs: Sequence[tuple[float, float]]) -> None:
    """Print both medians, least to most, and the median of the ratios."""
    plain, forked = ([pair[side] for pair in pairs] for side in (0, 1))
    ratio = statistics.median(one / other for one, other in pairs)
    shown = (
        f"{statistics.median(side):.2f} ({min(side):.2f} to {max(side):.2f})" for side in (plain, forked)
    )
    print(f"{what}: plain {next(shown)}, forked {next(shown)}; {ratio:.1f} times less")


if __name__ == "__main__":
    sys.exit(main())
