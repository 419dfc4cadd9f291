"""The update of masters that lie in host memory or on disk, in a thread: it goes on while the next forward
pass runs, which waits at each block for that block's parameters alone.

Nothing else changes: the same units in the same order, each with the gradients of its step. Collectives stay
on the training's thread, in one order on all ranks. On a GPU the thread has a stream of its own, so that its
copies wait for nothing that the next forward pass has begun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from orchestra.parallel.marks import marked
from orchestra.sizes.step_shares import Part


class LateUpdate:
    """One rank's update under way. *Any rank*; all methods but the update itself on the training's thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="update")
        self._run: Future[None] | None = None
        # Units that nobody has waited for yet, with what ends their copies to a GPU.
        self._units: dict[int, Future[torch.cuda.Event | None]] = {}

    def start(self, numbers: Sequence[int], update: Callable[[], Iterator[int]]) -> None:
        """Begin an update: `update` yields each of the units `numbers` when it is done with it."""
        self._units = {number: Future() for number in numbers}
        begun: torch.cuda.Event | None = None
        if self._stream is not None:
            begun = torch.cuda.Event()  # type: ignore[no-untyped-call]
            begun.record()
        self._run = self._pool.submit(self._update, dict(self._units), update, begun)

    def wait(self, number: int) -> None:
        """Wait for a unit; on a GPU the host waits for its update, and the stream for its parameters.

        Raises what ended the update.
        """
        future = self._units.pop(number, None)
        if future is None:
            return
        with marked(Part.optimizer):
            sent = future.result()
        if sent is not None:
            torch.cuda.current_stream().wait_event(sent)

    def wait_all(self) -> None:
        """Wait for the whole update: its masters and moments may then be read or written."""
        for number in list(self._units):
            self.wait(number)
        if self._run is not None:
            self._run.result()

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown()

    def _update(
        self,
        units: dict[int, Future[torch.cuda.Event | None]],
        update: Callable[[], Iterator[int]],
        begun: torch.cuda.Event | None,
    ) -> None:
        try:
            with self._own_stream(begun):
                for number in update():
                    units[number].set_result(self._mark())
        except BaseException as error:
            for future in units.values():
                if not future.done():
                    future.set_exception(error)
            raise

    @contextlib.contextmanager
    def _own_stream(self, begun: torch.cuda.Event | None) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        assert begun is not None
        # Both are the thread's own choice.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # The gradients are there, and nobody reads the parameters of the step before any more.
            self._stream.wait_event(begun)
            yield

    def _mark(self) -> torch.cuda.Event | None:
        if self._stream is None:
            return None
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record()
        return sent
