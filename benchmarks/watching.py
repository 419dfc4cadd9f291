"""Counts the processor time that watching takes inside a rank's step, by the clocks of its threads.

    python benchmarks/watching.py [--ranks 2] [--steps 300] [--overrides …]
    python benchmarks/watching.py --overrides recovery.straggler_every_steps=1

Real ranks of the model `debug` over gloo, with a row for each step, heartbeats, the own time of one step in
ten, and wandb's mirror beside rank 0 (a process of its own, not counted). Counted on the training thread
(`time.thread_time`, less what reading it costs) is all that the loop and the step spend in hooks and records:
heartbeats, own step times, profiler, guards, rows. What threads of ours take beside it is shown apart, over
all steps, from /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

ALL_ON = ("train.log_every=1", "wandb.mode=offline")
SHAPE = ("model=debug", "checkpoint.every_steps=null", "cluster.device=cpu", "train.compile=false")
# Threads of ours that watch, by their names.
THREADS = ("stragglers", "step times", "energy", "tensorboard")
_WARM, _TRIES = 20, 2_000


class Count:
    """The training thread's seconds within what is counted, of the step under way and of each before."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        # Of all steps: seconds and calls by what is counted.
        self.by_name: dict[str, list[float]] = {}
        self._now = self._clock_s = 0.0
        self._depth = 0
        for _ in range(_TRIES):
            with self.on("nothing"):
                pass
        # What an empty block counts: the clock's own cost, which differs by a hundred between machines.
        self._clock_s = self.by_name.pop("nothing")[0] / _TRIES
        self._now = 0.0

    @contextlib.contextmanager
    def on(self, name: str) -> Iterator[None]:
        if self._depth:
            yield
            return
        self._depth += 1
        began = time.thread_time()
        try:
            yield
        finally:
            spent = time.thread_time() - began - self._clock_s
            self._now += spent
            self._depth -= 1
            named = self.by_name.setdefault(name, [0.0, 0.0])
            named[0] += spent
            named[1] += 1

    def end_step(self) -> None:
        self.steps.append(self._now)
        self._now = 0.0

    def call(self, owner: type, name: str, after: Callable[[], None] = lambda: None) -> None:
        """Count all calls of a method."""
        whole = getattr(owner, name)

        @functools.wraps(whole)
        def counted(*args: Any, **named: Any) -> Any:
            with self.on(name):
                answer = whole(*args, **named)
            after()
            return answer

        setattr(owner, name, counted)

    def edges(self, owner: type, name: str) -> None:
        """Count the beginning and the end of a context, and not what is in it."""
        whole = getattr(owner, name)

        @contextlib.contextmanager
        def counted(*args: Any, **named: Any) -> Iterator[Any]:
            with self.on(name):
                context = whole(*args, **named)
                inside = context.__enter__()
            try:
                yield inside
            finally:
                with self.on(name):
                    context.__exit__(None, None, None)

        setattr(owner, name, counted)


def train_rank(run_dir: Path) -> int:
    """Train as a rank with everything counted, and write what was."""
    from orchestra.run.heartbeat import FOLDER_VARIABLE, beats_folder, open_heart
    from orchestra.run.paths import RunDir
    from orchestra.train.hooks import StepHooks
    from orchestra.train.metrics import MetricsLog
    from orchestra.train.trainer import Trainer, run_rank
    from orchestra.train.watch.stragglers import HostClock

    count, rank = Count(), int(os.environ["RANK"])
    for name in ("around_step", "around_backward"):
        count.edges(StepHooks, name)
    for name in ("enter", "before_forward", "loss_factor", "after_backward", "after_step", "verdict"):
        count.call(StepHooks, name)
    count.edges(HostClock, "communicating")
    count.call(MetricsLog, "add")
    count.call(Trainer, "_record_and_save", count.end_step)
    beside: dict[str, float] = {}
    stop_threads = Trainer.stop_threads

    def read_threads(trainer: Trainer) -> None:
        for thread in threading.enumerate():
            if thread.name in THREADS and thread.native_id is not None:
                spent = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
                beside[thread.name] = int(spent) / 1e9
        stop_threads(trainer)

    Trainer.stop_threads = read_threads  # type: ignore[method-assign]
    run = RunDir(run_dir)
    os.environ[FOLDER_VARIABLE] = str(beats_folder(run))
    code = run_rank(run, 0, None, open_heart(run, 0, rank))
    (run_dir / f"count-{rank}.json").write_text(
        json.dumps({"steps": count.steps, "by_name": count.by_name, "beside": beside})
    )
    return code


def prepared(folder: Path, ranks: int, steps: int, overrides: list[str]) -> Path:
    """Return the directory of a run that is ready to be trained."""
    from orchestra.config.compose import compose
    from orchestra.config.machine import this_machine
    from orchestra.run.config_file import write_config

    words = [*SHAPE, *ALL_ON, f"train.steps={steps}", f"cluster.gpus_per_node={ranks}", *overrides]
    write_config(folder / "config.yaml", compose(words, this_machine()).config)
    (folder / "run.json").write_text(json.dumps({"name": "counted", "wandb_id": "counted", "jobs": []}))
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return train_rank(arguments.rank)
    with tempfile.TemporaryDirectory() as name:
        folder = prepared(Path(name), arguments.ranks, arguments.steps, arguments.overrides)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, *torchrun, __file__, "--rank", str(folder)], check=True, env=environment
        )
        for rank in range(arguments.ranks):
            counted = json.loads((folder / f"count-{rank}.json").read_text())
            steps = sorted(counted["steps"][_WARM:])
            median, late = statistics.median(steps), steps[int(0.99 * len(steps))]
            words = f"median {1e6 * median:.0f} µs, mean {1e6 * statistics.mean(steps):.0f}"
            print(f"rank {rank}: {words}, 99th percentile {1e6 * late:.0f}, of {len(steps)} steps")
            for name, (seconds, calls) in counted["by_name"].items():
                number = len(counted["steps"])
                print(f"  {name}: {1e6 * seconds / number:.1f} µs in {calls / number:.1f} calls a step")
            for thread, seconds in counted["beside"].items():
                print(f"  thread '{thread}': {1e6 * seconds / len(counted['steps']):.0f} µs a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
