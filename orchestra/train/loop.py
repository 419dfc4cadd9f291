"""The training loop: batch, step, record. It builds nothing and knows no parallelism."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from conf.schema import Config, OnNonfinite
from orchestra.data.ledger import Ledger
from orchestra.errors import NonFiniteError
from orchestra.events import EventWriter
from orchestra.jsonl import JsonLinesWriter
from orchestra.train.build import Training
from orchestra.train.metrics import Meter
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


def train(config: Config, training: Training, recorder: Recorder, first_step: int = 1) -> None:
    """Run the steps from first_step to train.steps. *Collective*. Raises NonFiniteError by the policy."""
    guard = NonFiniteGuard(config, recorder.events, reads_every_step=not _is_asynchronous(training))
    for step in range(first_step, config.train.steps + 1):
        recorder.progress.step = step
        began = time.perf_counter()
        batch = training.loader.next_batch()
        data_time_s = time.perf_counter() - began
        with recorder.profiler.step(step):
            result = training.step.run(step, batch.tokens)
        if recorder.ledger is not None:
            recorder.ledger.write(step, batch.sample_ids)
        is_logged = step % config.train.log_every == 0 or step == config.train.steps
        failure = guard.failure(step, result, is_logged=is_logged)
        if recorder.meter is not None:
            is_row = is_logged or failure is not None
            loss = (
                float(result.loss) if is_row else math.nan
            )  # waits for the device: before the clock is read
            recorder.meter.add_step(time.perf_counter() - began, data_time_s, training.batch.tokens_per_step)
            if is_row:
                _log(step, loss, result, recorder, guard.num_skipped)
        if failure is not None:
            raise failure


def _log(step: int, loss: float, result: StepResult, recorder: Recorder, num_skipped: int) -> None:
    assert recorder.meter is not None
    assert recorder.metrics is not None
    row = recorder.meter.row(
        step, loss=loss, grad_norm=float(result.grad_norm), lr=result.lr, nonfinite_steps=num_skipped
    )
    recorder.metrics.write(row)


def _is_asynchronous(training: Training) -> bool:
    return training.parallelized.trained[0].parameter.is_cuda


class NonFiniteGuard:
    """Applies train.on_nonfinite to steps whose loss or gradient norm is not finite.

    The update itself was already left out on the device, by all ranks alike. Reading the flag makes the host
    wait for a GPU, so with the policy `skip` there it is read at logged steps only, with the count kept on
    the device.
    """

    def __init__(self, config: Config, events: EventWriter, reads_every_step: bool) -> None:
        self._policy = config.train.on_nonfinite
        self._limit = 1 if self._policy is OnNonfinite.stop else config.train.max_nonfinite_steps
        self._reads_every_step = reads_every_step or self._policy is OnNonfinite.stop
        self._events = events
        self._unread: list[tuple[int, StepResult]] = []
        self._num_in_a_row = 0
        self.num_skipped = 0

    def failure(self, step: int, result: StepResult, *, is_logged: bool) -> NonFiniteError | None:
        """Count a skipped step; return the error to raise where the policy says to stop. All ranks agree."""
        self._unread.append((step, result))
        if not (self._reads_every_step or is_logged):
            return None
        unread, self._unread = self._unread, []
        for unread_step, unread_result in unread:
            if bool(unread_result.was_skipped):
                self._count(unread_step, unread_result)
            else:
                self._num_in_a_row = 0
            if self._num_in_a_row >= self._limit:
                return NonFiniteError(self._explained(unread_step, unread_result))
        return None

    def _count(self, step: int, result: StepResult) -> None:
        self.num_skipped += 1
        self._num_in_a_row += 1
        loss, grad_norm = repr(float(result.loss)), repr(float(result.grad_norm))
        self._events.write("nonfinite_step", step=step, loss=loss, grad_norm=grad_norm)

    def _explained(self, step: int, result: StepResult) -> str:
        found = f"step {step}: loss {float(result.loss)}, gradient norm {float(result.grad_norm)}: not finite"
        if self._policy is OnNonfinite.stop:
            return (
                f"{found}, and train.on_nonfinite=stop; the parameters are those of the step before. Lower "
                "optim.lr or look at this step's data (data.ledger=true writes its sample ids)"
            )
        return (
            f"{found}; {self._num_in_a_row} steps in a row were skipped "
            f"(train.max_nonfinite_steps={self._limit}). Lower optim.lr, raise optim.warmup_steps, or use "
            "precision=fp32 to see whether it is a matter of range"
        )
