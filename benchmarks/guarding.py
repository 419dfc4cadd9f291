"""What being guarded costs a step: agents, a spare, heartbeats, straggler statistics, copies in memory.

    python benchmarks/guarding.py [--pairs 6] [--steps 400] [--folder /tmp/guarding]

The same run of two nodes is trained as `orchestra submit` does, with a spare and copies in memory every 20
steps, and by plain torchrun in a job of sbatch: the same trainer on the same cluster, and nobody watches.
They take turns. Printed are the mean times of a step in the last three quarters of each, and the median of
their ratios. It needs root, to start the cluster of `slurm/devcluster`, and Slurm's packages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "slurm")]

from sites import Site, SubmittedRun, opened_at, wait_until  # noqa: E402

from orchestra.run.metrics_file import read_metrics  # noqa: E402
from orchestra.run.paths import RunDir  # noqa: E402

# 50 to 60 ms a step for two ranks of one thread on the machine of RESULTS.md.
SHAPE = (
    *("model.hidden_size=128", "model.intermediate_size=352", "model.num_hidden_layers=2"),
    *("model.num_attention_heads=4", "model.num_key_value_heads=4", "train.seq_len=128"),
    *(
        "train.micro_batch_size=4",
        "cluster.nodes=2",
        "cluster.gpus_per_node=1",
        "checkpoint.every_steps=null",
    ),
)
GUARDED = ("cluster.spare_nodes=1", "recovery.memory_copy_every_steps=20")
LIMIT_S = 300.0
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --job-name=plain --output={run}/plain.txt
export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) OMP_NUM_THREADS=1
export PYTHONPATH={run}/code GLOO_SOCKET_IFNAME=eth0
srun bash -c 'exec {python} -m torch.distributed.run --nnodes=2 --nproc-per-node=1 \\
  --node-rank=$SLURM_PROCID --master-addr=$HEAD --master-port=29517 -m orchestra.train {run} --attempt 0'
"""


def main() -> int:
    """Measure and print; return 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--folder", type=Path, help="keep cluster and runs there; else all is removed")
    arguments = parser.parse_args()
    with opened_at(arguments.folder) as site:
        ratios = [_pair(site, number, arguments.steps) for number in range(arguments.pairs)]
    middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"median ratio of {len(ratios)}: {middle:.4f} ({least:.4f} to {most:.4f})")
    return 0


def _pair(site: Site, number: int, steps: int) -> float:
    """Train both, every other time the other one first; return guarded ÷ plain."""
    seconds = {}
    for how in ("guarded", "plain")[:: 1 if number % 2 else -1]:
        site.clear()
        name = f"{how}-{number}"
        run = _guarded(site, name, steps) if how == "guarded" else _plain(site, name, steps)
        seconds[how] = statistics.mean(
            row["step_time_s"] for row in read_metrics(run) if row["step"] > steps // 4
        )
    ratio = seconds["guarded"] / seconds["plain"]
    times = ", ".join(f"{how} {1e3 * mean:.2f} ms" for how, mean in sorted(seconds.items()))
    print(f"pair {number}: {times} a step, ratio {ratio:.4f}, load {os.getloadavg()[0]:.1f}", flush=True)
    return ratio


def _guarded(site: Site, name: str, steps: int) -> RunDir:
    submitted = site.submit_run(name, *SHAPE, *GUARDED, f"train.steps={steps}")
    wait_until(submitted.is_over, f"{name} ends", LIMIT_S)
    return _whole(submitted, steps)


def _plain(site: Site, name: str, steps: int) -> RunDir:
    """Have the run's directory made by a job that never begins, and train it by torchrun alone."""
    submitted = site.submit_run(name, *SHAPE, f"train.steps={steps}", "+cluster.slurm_extra.hold=true")
    site.run("scancel", submitted.job)
    run = submitted.dir
    run.attempt_logs(0).mkdir(parents=True)
    script = run.path / "plain.sbatch"
    script.write_text(SCRIPT.format(run=run.path, python=sys.executable))
    job = site.submit(str(script))
    wait_until(
        lambda: site.job_state(job) not in ("PENDING", "RUNNING", "COMPLETING"), f"{name} ends", LIMIT_S
    )
    return _whole(submitted, steps)


def _whole(submitted: SubmittedRun, steps: int) -> RunDir:
    """Return the run, which has trained all of its steps; what its logs say otherwise."""
    deadline = time.monotonic() + 10
    while submitted.step() < steps:
        if time.monotonic() > deadline:
            plain = submitted.dir.path / "plain.txt"
            output = plain.read_text() if plain.exists() else ""
            raise SystemExit(
                f"{submitted.dir.name} ended at step {submitted.step()}:\n{output}{submitted.logs()}"
            )
        time.sleep(0.1)
    return submitted.dir


if __name__ == "__main__":
    sys.exit(main())
