"""Measures how long the ranks of a pipeline wait, beside what the schedule says.

    python benchmarks/pipeline_bubble.py                 stages that sleep, on 2 and on 4 ranks
    python benchmarks/pipeline_bubble.py --real          stages that compute, on 2 ranks with a thread each

Ranks are processes over gloo with orchestra's own executor: sends and receives are real. A stage that sleeps
takes its time in a pass without a core, so that more ranks than cores can be looked at. The bubble is the
share of all ranks' time in which they wait, from the moment all begin to the last one's end; expected is what
`orchestra.sizes.pipeline_check` says for the passes' own times, given or measured in the same steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config, ModelConfig, PipelineSchedule
from orchestra.parallel.marks import time_communication
from orchestra.parallel.pipeline.passes import PassHooks
from orchestra.sizes.pipeline_check import PassTimes, check
from orchestra.sizes.pipeline_schedule import Pass, StagePass, pipeline_shape, schedule
from orchestra.train.build import Training

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ranks"), str(ROOT / "tests")]

from pool import RankPool  # noqa: E402  found by the line above
from small_trainings import config_of, start  # noqa: E402  as is this one

KINDS = (("afab", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 1))
STEPS = 5


class _Sleep(torch.autograd.Function):
    """Takes its time forward, and backward for the gradient of its input; that of weights may come later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, put: Callable[[Callable[[], None]], None]) -> Tensor:
        ctx.seconds, ctx.put = seconds, put
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.seconds)
        ctx.put(lambda: time.sleep(ctx.seconds))
        return grads[0], None, None


def let_sleep(training: Training, seconds: float) -> None:
    """Have each layer sleep in each of its three kinds of passes."""
    later = training.parallelized.stage.gradients.later

    def put(take: Callable[[], None]) -> None:
        if later.is_open:
            later.put(take)
        else:
            take()

    for layer in training.parallelized.model.layers:
        inner = layer.forward

        def forward(*arguments: Any, inner: Any = inner) -> Tensor:
            out: Tensor = _Sleep.apply(inner(*arguments), seconds, put)  # type: ignore[no-untyped-call]
            return out

        layer.forward = forward


@dataclass
class Watch:
    """Adds up a rank's waits, and the own times of its passes by stage and kind."""

    waited_s: float = 0.0
    own_s: dict[tuple[int, Pass], list[float]] = field(default_factory=lambda: defaultdict(list))
    _now: StagePass | None = None
    _since: tuple[float, float] = (0.0, 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began

    def enter(self, action: StagePass | None, _: int = 0) -> None:
        now = time.perf_counter()
        if self._now is not None:
            began, waited_s = self._since
            self.own_s[self._now.stage, self._now.kind].append(now - began - (self.waited_s - waited_s))
        self._now, self._since = action, (now, self.waited_s)


def measured(
    rank: int, world: int, config: Config, sleeps_s: float | None
) -> list[tuple[float, float, dict[tuple[int, Pass], float]]]:
    """Return of each step when the rank's passes were over, how long it waited, and its passes' own times."""
    training, mesh = start(rank, world, config)
    if sleeps_s is not None:
        let_sleep(training, sleeps_s)
    batch = training.batch
    shape = (batch.accumulation, batch.micro_batch_size, batch.seq_len + 1)
    tokens = torch.zeros(shape, dtype=torch.int64)
    pipeline = training.parallelized.pipeline
    assert pipeline is not None
    rows = []
    for step in range(STEPS + 1):
        watch = Watch()
        dist.barrier()
        time_communication(watch.waiting)
        began = time.perf_counter()
        pipeline.run(tokens, 1e-6, PassHooks(watch.enter, lambda *_: nullcontext()))
        took_s = time.perf_counter() - began
        watch.enter(None)
        time_communication(None)
        training.parallelized.stage.finish()
        if step:
            own_s = {key: statistics.fmean(times) for key, times in watch.own_s.items()}
            rows.append((took_s, watch.waited_s, own_s))
    training.parallelized.stage.settle()
    training.parallelized.stage.close()
    del mesh
    return rows


def times_of(rows: list[dict[tuple[int, Pass], float]], num_stages: int) -> PassTimes:
    """Return the times of all stages' passes; of B half counts for each of its gradients."""
    own = {key: seconds for of_rank in rows for key, seconds in of_rank.items()}

    def of(kind: Pass) -> list[float]:
        return [
            own.get((stage, kind), own.get((stage, Pass.backward), 0.0) / 2) for stage in range(num_stages)
        ]

    forward = [own[stage, Pass.forward] for stage in range(num_stages)]
    return PassTimes(forward, of(Pass.input_gradient), of(Pass.weight_gradient))


def rows_of(pool: RankPool, kind: str, chunks: int, arguments: argparse.Namespace) -> str:
    is_real, ranks, count = arguments.real, pool.size, arguments.micro_batches
    num_stages = ranks * (2 if kind in ("interleaved", "zbv") else 1)
    size = arguments.hidden if is_real else 16
    model = ModelConfig(
        hidden_size=size,
        intermediate_size=size * 11 // 4,
        num_hidden_layers=num_stages * (2 if is_real else 1),
        vocab_size=512 if is_real else 32,
    )
    config = config_of(
        model,
        train={"global_batch_size": count, "micro_batch_size": 1, "seq_len": 256 if is_real else 16},
        pp=ranks,
        schedule=PipelineSchedule[kind],
        virtual_stages=chunks,
        stages=[model.num_hidden_layers // num_stages] * num_stages,
    )
    sleeps_s = None if is_real else arguments.sleep_s * ranks / num_stages
    found = pool.run(measured, config=config, sleeps_s=sleeps_s)
    shape = pipeline_shape(config.parallelism)
    lists = schedule(config.parallelism.schedule, shape, count)
    bubbles, expected = [], []
    for of_ranks in zip(*found, strict=True):
        whole_s = max(took_s for took_s, _, _ in of_ranks)
        # Who is through early waits for the last one.
        idle_s = [whole_s - took_s + waited_s for took_s, waited_s, _ in of_ranks]
        bubbles.append(sum(idle_s) / (ranks * whole_s))
        if is_real:
            times = times_of([own_s for _, _, own_s in of_ranks], num_stages)
        else:
            times = PassTimes(*[(sleeps_s or 0.0,) * num_stages] * 3)
        expected.append(check(lists, shape, count, times).bubble)
    mine, said = statistics.median(bubbles), statistics.median(expected)
    return f"{ranks:5} {kind:12} {count:13} {said:9.1%} {mine:9.1%} {mine / said:7.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true", help="stages that compute, on 2 ranks")
    parser.add_argument("--sleep-s", type=float, default=0.03, help="of a rank's layers in one kind of pass")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    arguments = parser.parse_args()
    print("medians of 5 steps; the bubble as a share of all ranks' time")
    print("ranks schedule     micro-batches  expected  measured   ratio")
    for ranks in (2,) if arguments.real else (2, 4):
        pool = RankPool(ranks)
        for kind, chunks in KINDS:
            print(rows_of(pool, kind, chunks, arguments), flush=True)
        pool.close()


if __name__ == "__main__":
    main()
