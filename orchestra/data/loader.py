"""Batches of token samples, prepared ahead of the step by one thread.

The global batch at position p is the samples at positions p … p + GBS − 1 of the order, GBS that of the step
(`train.batch_ramp`). Micro-batch m of
data-parallel coordinate d takes the MBS sequences from (m · dp + d) · MBS on: every world size sees the
same global batch, and one rank with two micro-batches sees the same micro-batches as two ranks with one.
Places that the run leaves out (`orchestra.run.rollback`) are passed over as if they were not there.

Shape letters: A accumulated micro-batches, B sequences of one micro-batch, S sequence length.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from orchestra.data.order import Int64
from orchestra.data.source import SampleSource
from orchestra.run.rollback import Stretch, kept
from orchestra.sizes.topology import BatchShape, StepBatches

_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Batch:
    """One rank's share of a global batch."""

    # int64 [A, B, S + 1]; pinned when it will go to a GPU.
    tokens: Tensor
    # int64 [A, B].
    sample_ids: Int64
    # Where the next one begins in the sequence of samples: after all that the whole run has consumed, and
    # left out, once this batch is trained.
    position: int


class Loader:
    """Reads ahead in a daemon thread; what goes wrong there is raised by `next_batch`."""

    def __init__(
        self,
        source: SampleSource,
        batches: StepBatches,
        dp_coordinate: int,
        *,
        seed: int,
        step: int = 0,
        position: int = 0,
        left_out: Sequence[Stretch] = (),
        prefetch_batches: int = 4,
        pin_memory: bool = False,
    ) -> None:
        self.source = source
        self._left_out = left_out
        self._batches = batches
        self._dp_coordinate = dp_coordinate
        self._seed = seed
        self._pin_memory = pin_memory
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=max(1, prefetch_batches))
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._read_ahead, args=(step, position), name="loader", daemon=True
        )
        self._thread.start()

    def next_batch(self) -> Batch:
        """Return the next batch; raises what the reading thread met, DataError above all."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._ready.put(item)  # whoever asks again gets the same answer and does not wait for ever
            raise item
        return item

    def close(self) -> None:
        """End the thread and drop what was read ahead; a read that hangs is left to the process's end."""
        self._is_closed.set()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            _drain(self._ready)
            self._thread.join(0.05)
        _drain(self._ready)
        self._ready.put(RuntimeError("the loader is closed"))  # for whoever asks once more, or still waits

    def _read_ahead(self, step: int, position: int) -> None:
        while not self._is_closed.is_set():
            step += 1
            try:
                batch = self._read(self._batches.at(step), position)
            except BaseException as error:  # noqa: BLE001  raised again in the training thread
                self._ready.put(error)
                return
            self._ready.put(batch)
            position = batch.position

    def _read(self, batch: BatchShape, position: int) -> Batch:
        parts = kept(position, batch.global_batch_size, self._left_out)
        of_parts = [self.source.ids_at(begin, count, self._seed) for begin, count in parts]
        micro_batches = np.arange(batch.accumulation)[:, None] * batch.dp + self._dp_coordinate
        # This rank's places [A, B] in the global batch.
        size = batch.micro_batch_size
        ids = np.concatenate(of_parts)[micro_batches * size + np.arange(size)]
        shape = (*ids.shape, batch.seq_len + 1)
        tokens = torch.empty(shape, dtype=torch.int64, pin_memory=self._pin_memory)
        view = tokens.numpy()
        for place, sample_id in np.ndenumerate(ids):
            self.source.read(int(sample_id), view[place])
        begin, count = parts[-1]
        return Batch(tokens, ids, begin + count)


def _drain(waiting: queue.Queue[Batch | BaseException]) -> None:
    while True:
        try:
            waiting.get_nowait()
        except queue.Empty:
            return
