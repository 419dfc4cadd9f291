"""The training loop: batch, step, record, save. It builds nothing and knows no parallelism."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from conf.schema import Config
from orchestra.data.ledger import Ledger
from orchestra.data.loader import Batch, Loader
from orchestra.events import EventWriter
from orchestra.jsonl import JsonLinesWriter
from orchestra.train.build import Training
from orchestra.train.checkpoints import Checkpoints
from orchestra.train.faults import Faults
from orchestra.train.metrics import Meter
from orchestra.train.nonfinite import NonFiniteGuard
from orchestra.train.position import Position
from orchestra.train.profile import StepProfiler
from orchestra.train.step import StepResult


@dataclass
class Progress:
    """The step that is being trained, for whoever has to say where it ended; 0 before the first."""

    step: int = 0


@dataclass
class Recorder:
    """Where the loop's records go. Only rank 0 has a meter and a metrics file."""

    events: EventWriter
    progress: Progress
    profiler: StepProfiler
    ledger: Ledger | None
    meter: Meter | None
    metrics: JsonLinesWriter | None


@dataclass(frozen=True)
class Course:
    """What feeds, keeps and disturbs the training: the data, the checkpoints, the planned faults."""

    loader: Loader
    checkpoints: Checkpoints
    faults: Faults


def train(config: Config, training: Training, course: Course, recorder: Recorder, begin: Position) -> None:
    """Run the steps after `begin` up to train.steps. *Collective*. Raises NonFiniteError by the policy."""
    guard = _guard(config, training, recorder, begin)
    for step in range(begin.step + 1, config.train.steps + 1):
        recorder.progress.step = step
        course.faults.strike("step", step)
        began = time.perf_counter()
        batch = course.loader.next_batch()
        data_time_s = time.perf_counter() - began
        with recorder.profiler.step(step):
            result = training.step.run(step, batch.tokens)
        if recorder.ledger is not None:
            recorder.ledger.write(step, batch.sample_ids)
        is_logged = step % config.train.log_every == 0 or step == config.train.steps
        is_saved = course.checkpoints.is_due(step)
        failure = guard.failure(step, result, must_read=is_logged or is_saved)
        if recorder.meter is not None:
            is_row = is_logged or failure is not None
            # Waits for the device: before the clock is read.
            loss = float(result.loss) if is_row else math.nan
            recorder.meter.add_step(time.perf_counter() - began, data_time_s, training.batch.tokens_per_step)
            if is_row:
                _log(step, loss, result, recorder, guard.num_skipped)
        if failure is not None:
            raise failure
        if is_saved:
            course.checkpoints.save(_position(step, batch, result, guard, recorder))


def _guard(config: Config, training: Training, recorder: Recorder, begin: Position) -> NonFiniteGuard:
    is_asynchronous = training.parallelized.trained[0].parameter.is_cuda
    return NonFiniteGuard(
        config, recorder.events, reads_every_step=not is_asynchronous, before=begin.nonfinite
    )


def _log(step: int, loss: float, result: StepResult, recorder: Recorder, num_skipped: int) -> None:
    assert recorder.meter is not None
    assert recorder.metrics is not None
    row = recorder.meter.row(
        step, loss=loss, grad_norm=float(result.grad_norm), lr=result.lr, nonfinite_steps=num_skipped
    )
    recorder.metrics.write(row)


def _position(
    step: int, batch: Batch, result: StepResult, guard: NonFiniteGuard, recorder: Recorder
) -> Position:
    """Return where the run stands behind `step`. The totals are rank 0's, which alone writes them down."""
    loss = float(result.loss)
    return Position(
        step=step,
        samples=batch.position,
        nonfinite=guard.counts(),
        totals=None if recorder.meter is None else recorder.meter.totals(),
        score=loss if math.isfinite(loss) else None,
    )
