"""Seconds from a fault to a step that was never trained before, on a cluster of four hosts of this machine.

Ranks, agents and hosts of a run are killed and stopped, and the run's own records tell where the time went.
Beside it the same faults befall a plain `torchrun --max-restarts` in a job of `sbatch --requeue`, on the same
cluster under the same Slurm settings. It needs root, to start the cluster, and Slurm's packages.

    python benchmarks/recovery.py [--repeats 3] [--only rank,agent] [--peer] [--folder /tmp/recovery]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "slurm")]

from recovery_times import MEANING, Births, Recovery, new_step, recovery, table  # noqa: E402
from recovery_torchrun import PEER_FAULTS, measure_peer  # noqa: E402
from sites import Site, SubmittedRun, opened_at, wait_until  # noqa: E402

LONG = ("train.steps=1000000", "checkpoint.every_steps=10", "cluster.gpus_per_node=1")
LIMIT_S = 240.0

# Returns when it befell the run (Unix seconds), None: when it was called.
Fault = Callable[[SubmittedRun], float | None]


def kill_rank(run: SubmittedRun) -> None:
    run.hit_rank(1)


def stop_rank(run: SubmittedRun) -> None:
    run.hit_rank(1, signal.SIGSTOP)


def kill_agent(run: SubmittedRun) -> None:
    run.hit_agent(1)


def lose_node(run: SubmittedRun) -> None:
    run.fail_node(1)


def lose_first_node(run: SubmittedRun) -> None:
    run.fail_node(0)


def first_node_returns(run: SubmittedRun) -> float:
    """Return when Slurm asked the job's processes to end, some seconds after the node is back."""
    host = run.fail_node(0)
    run.wait_for_attempt(1, LIMIT_S)
    run.wait_for_steps(3)
    run.site.heal(host)
    return float(run.wait_for_event("stop_requested", LIMIT_S)["time"])


def boot_node(run: SubmittedRun) -> None:
    run.site.heal(run.fail_node(1))


# Name, what happens, the run's own overrides. Each begins with all four hosts up.
CASES: dict[str, tuple[str, Fault, tuple[str, ...]]] = {
    "rank": ("rank SIGKILL", kill_rank, ("cluster.nodes=2",)),
    "agent": ("agent SIGKILL", kill_agent, ("cluster.nodes=2",)),
    "stop": ("rank SIGSTOP", stop_rank, ("cluster.nodes=2",)),
    "spare": ("node lost, a spare is there", lose_node, ("cluster.nodes=2", "cluster.spare_nodes=1")),
    "first": (
        "first node lost, a spare is there",
        lose_first_node,
        ("cluster.nodes=2", "cluster.spare_nodes=1"),
    ),
    "return": (
        "the lost first node comes back, and Slurm requeues the job",
        first_node_returns,
        ("cluster.nodes=2", "cluster.spare_nodes=1"),
    ),
    "copies": (
        "the only node lost, its copies are with a spare",
        lose_first_node,
        ("cluster.nodes=1", "cluster.spare_nodes=1", "recovery.memory_copy_every_steps=1"),
    ),
    "boot": (
        "node boots again within a second",
        boot_node,
        ("cluster.nodes=2", "cluster.spare_nodes=1"),
    ),
    "shrink": ("node lost, min_nodes=1", lose_node, ("cluster.nodes=2", "recovery.min_nodes=1")),
    "requeue": ("node lost, another job without it", lose_node, ("cluster.nodes=2",)),
}


def main() -> int:
    """Measure, print the table, return 0; 2 on a machine that cannot start the cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="faults of each kind (%(default)s)")
    parser.add_argument("--only", default=",".join(CASES), help="cases, comma-separated (%(default)s)")
    parser.add_argument("--peer", action="store_true", help="measure plain torchrun beside it")
    parser.add_argument("--peer-only", default=",".join(PEER_FAULTS), help="its cases (%(default)s)")
    parser.add_argument("--folder", type=Path, help="keep cluster and runs there; else all is removed")
    parser.add_argument(
        "--set", action="append", default=[], help="a further override of all runs; repeatable"
    )
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("this needs root: it starts a development cluster", file=sys.stderr)
        return 2
    found: list[Recovery] = []
    with opened_at(arguments.folder) as site:
        for name in filter(None, arguments.only.split(",")):
            found += measure(site, name, arguments.repeats, tuple(arguments.set))
        print(table(found) if found else "")
        if arguments.peer:
            for line in measure_peer(site, arguments.peer_only.split(","), arguments.repeats):
                print(line, flush=True)
    print("\n".join(f"- {mark}: {meaning}" for mark, meaning in MEANING.items()))
    return 0


def measure(site: Site, name: str, repeats: int, overrides: tuple[str, ...]) -> list[Recovery]:
    """Let one fault happen so often; print each recovery and return them."""
    what, fault, own = CASES[name]
    found: list[Recovery] = []
    for _ in range(repeats):
        # A run of its own each time: a host that failed twice would be left out.
        site.clear()
        run = site.submit_run(f"{name}-{time.time_ns()}", *LONG, *own, *overrides)
        births = Births(run.dir)
        births.start()
        try:
            run.wait_for_step(15, LIMIT_S)
            found.append(_recovery(run, what, fault, births))
        except AssertionError as error:
            print(f"{what}: {str(error)[:6000]}", file=sys.stderr)
        finally:
            births.close()
    site.clear()
    return found


def _recovery(run: SubmittedRun, what: str, fault: Fault, births: Births) -> Recovery:
    load = os.getloadavg()[0]
    since = time.time()
    since = fault(run) or since
    wait_until(lambda: new_step(run.dir, since) is not None, f"{what}: a new step", LIMIT_S)
    births.run_once()
    back = recovery(run.dir, what, since, births, load)
    stretches = {mark: round(seconds, 2) for mark, seconds in back.stretches().items()}
    facts = {**asdict(back), "at": {mark: round(at, 2) for mark, at in back.at.items()}}
    print(f"{what}: {back.total_s:.1f} s at load {load:.1f}: {stretches}", flush=True)
    print(json.dumps(facts), file=sys.stderr, flush=True)
    return back


if __name__ == "__main__":
    sys.exit(main())
