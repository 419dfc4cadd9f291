"""The training loop: batch, step, record, save, stop. It builds nothing and knows no parallelism."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass

from conf.schema import Config
from orchestra.control import StopRequest
from orchestra.data.ledger import Ledger
from orchestra.data.loader import Batch, Loader
from orchestra.errors import TrainingError
from orchestra.events import EventWriter
from orchestra.heartbeat import Phase
from orchestra.jsonl import JsonLinesWriter
from orchestra.parallel.marks import marked
from orchestra.roll_backs import BadSteps
from orchestra.step_shares import Part
from orchestra.train.build import Training
from orchestra.train.checkpoints import Checkpoints
from orchestra.train.metrics import Meter
from orchestra.train.moments import Moments
from orchestra.train.nonfinite import NonFiniteGuard, OverflowLog
from orchestra.train.position import Position
from orchestra.train.profile import StepProfiler
from orchestra.train.replay import ReplayError
from orchestra.train.step import StepResult, TrainingStep
from orchestra.train.step_times import StepTimes
from orchestra.train.stopping import Stopping


@dataclass
class Progress:
    """The step that is being trained, for whoever has to say where it ended, and the one behind which the
    attempt began; 0 before the first.
    """

    step: int = 0
    begin: int = 0


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
    """What feeds, keeps, ends and disturbs the training: data, checkpoints, stop requests, and who hears
    of its moments and times.
    """

    loader: Loader
    checkpoints: Checkpoints
    stopping: Stopping
    moments: Moments
    step_times: StepTimes


def train(
    config: Config, training: Training, course: Course, recorder: Recorder, begin: Position
) -> StopRequest | None:
    """Run the steps after `begin` up to train.steps, or until a stop is asked for. *Collective*.

    Returns the request where it ended before the last step, its state saved; all ranks then stand behind the
    same step. Raises NonFiniteError, LossSpikeError or RollBackError by the policy.
    """
    guard = _guard(config, training, recorder, begin)
    overflows = OverflowLog(training.step.loss_scale, recorder.events)
    last_step, moments = config.train.steps, course.moments
    recorder.progress.step = recorder.progress.begin = begin.step
    if begin.step < last_step and course.stopping.begin(begin.step):
        return _requested(begin.step, course, recorder)
    for step in range(begin.step + 1, last_step + 1):
        recorder.progress.step = step
        course.step_times.begin(step)
        moments.enter(Phase.step, step)
        with recorder.profiler.step(step):
            began = time.perf_counter()
            batch, result, data_time_s = _trained(step, training, course)
        course.step_times.end()
        if recorder.ledger is not None:
            recorder.ledger.write(step, batch.sample_ids)
        moments.enter(Phase.agree, step)
        is_stop = course.stopping.is_due(step) and step < last_step
        request = _requested(step, course, recorder) if is_stop else None
        moments.enter(Phase.record, step)
        is_logged = step % config.train.log_every == 0 or step == last_step or request is not None
        is_saved = course.checkpoints.is_due(step, is_last=request is not None)
        is_copied = request is None and course.checkpoints.is_copy_due(step)
        failure = guard.failure(step, result, must_read=is_logged or is_saved or is_copied)
        if recorder.meter is not None:
            is_row = is_logged or failure is not None
            # Waits for the device: before the clock is read.
            loss = float(result.loss) if is_row else math.nan
            recorder.meter.add_step(time.perf_counter() - began, data_time_s, training.batch.tokens_per_step)
            if is_row:
                _log(step, loss, result, recorder, guard.num_skipped, overflows)
        if failure is not None:
            if isinstance(failure, BadSteps):
                failure = _rolled_back(failure, step, batch, training, course)
            raise failure
        if is_saved or is_copied:
            waits = is_saved and course.checkpoints.waits_for_storage(step, is_last=request is not None)
            moments.enter(Phase.commit if waits else Phase.save, step)
            behind = _position(step, batch, result, guard, recorder, training.step)
            if is_saved:
                course.checkpoints.save(behind, is_last=request is not None)
            if is_copied:
                course.checkpoints.copy(behind)
        if request is not None:
            return request
    return None


def _trained(step: int, training: Training, course: Course) -> tuple[Batch, StepResult, float]:
    """Train a step; return its batch, its result and the seconds that the batch was waited for."""
    began = time.perf_counter()
    course.moments.enter(Phase.data, step)
    with marked(Part.data):
        batch = course.loader.next_batch()
    data_time_s = time.perf_counter() - began
    try:
        return batch, training.step.run(step, batch.tokens), data_time_s
    except ReplayError as error:
        raise _rolled_back(error.bad, step, batch, training, course) from error


def _rolled_back(bad: BadSteps, step: int, batch: Batch, training: Training, course: Course) -> TrainingError:
    """Decide where the run goes back to; return the error that ends the attempt. *Collective*."""
    # It waits for the save under way, which may take as long as the storage likes.
    course.moments.enter(Phase.commit, step)
    size = training.batch.global_batch_size
    # The data of the last bad step ends before that of the steps that were trained since.
    reached = batch.position - (step - bad.last) * size
    return course.checkpoints.roll_back(bad, reached, size)


def _requested(step: int, course: Course, recorder: Recorder) -> StopRequest:
    """Return the request that ends the training behind `step`; rank 0 records it."""
    request = course.stopping.request()
    if recorder.meter is not None:
        evidence = {"reason": request.reason, "user": request.user, "asked_on": request.host}
        since = {"asked_at": request.time, "seconds": time.time() - request.time}
        # A full disk takes the record; the other ranks go on to the save, and so must this one.
        with contextlib.suppress(OSError):
            recorder.events.write("stop_requested", step=step, **evidence, **since)
    return request


def _guard(config: Config, training: Training, recorder: Recorder, begin: Position) -> NonFiniteGuard:
    is_asynchronous = training.parallelized.trained[0].parameter.is_cuda
    return NonFiniteGuard(
        config, recorder.events, reads_every_step=not is_asynchronous, before=begin.nonfinite
    )


def _log(
    step: int,
    loss: float,
    result: StepResult,
    recorder: Recorder,
    num_skipped: int,
    overflows: OverflowLog,
) -> None:
    assert recorder.meter is not None
    assert recorder.metrics is not None
    row = recorder.meter.row(
        step, loss=loss, grad_norm=float(result.grad_norm), lr=result.lr, nonfinite_steps=num_skipped
    )
    recorder.metrics.write({**row, **overflows.columns(step)})


def _position(
    step: int,
    batch: Batch,
    result: StepResult,
    guard: NonFiniteGuard,
    recorder: Recorder,
    trained: TrainingStep,
) -> Position:
    """Return where the run stands behind `step`. The totals are rank 0's, which alone writes them down."""
    loss = float(result.loss)
    return Position(
        step=step,
        samples=batch.position,
        nonfinite=guard.counts(),
        totals=None if recorder.meter is None else recorder.meter.totals(),
        score=loss if math.isfinite(loss) else None,
        loss_scale=None if trained.loss_scale is None else trained.loss_scale.state,
        recent_losses=() if trained.spikes is None else tuple(trained.spikes.recent),
    )
