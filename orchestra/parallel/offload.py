"""Host memory for what a GPU has no room for, and the way of gradients there: copied one unit ahead of the
one that is updated, through two pinned buffers in turn.

Masters and moments then lie in host memory and are updated there by torch's fused kernel for the CPU; the
parameters go back as `buffers.follow` sends them. On a machine without
CUDA everything is plain memory and plain copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


def host_zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Return host memory that a GPU can copy from and to by itself (pinned), where there is a GPU."""
    return torch.zeros(size, dtype=dtype, pin_memory=torch.cuda.is_available())


class GradientCarrier:
    """Brings gradients to where their masters are. Its pinned memory is as large as two units and stays."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def carried(self, gradients: Sequence[Tensor], masters: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield each flat gradient in its masters' dtype and on their device.

        It may be overwritten, and holds until the next one is asked for.
        """
        if not any(
            gradient.is_cuda and not to.is_cuda for gradient, to in zip(gradients, masters, strict=True)
        ):
            # Where the dtypes differ, one of them exists twice.
            for gradient, to in zip(gradients, masters, strict=True):
                yield gradient.to(to.dtype)
            return
        yield from self._fetched(gradients, masters[0].dtype)

    def _fetched(self, gradients: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
        self._make(max(gradient.numel() for gradient in gradients), gradients[0])
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        under_way = self._start(0, gradients)
        for number in range(len(gradients)):
            arrived, event = under_way
            event.synchronize()
            if number + 1 < len(gradients):
                # Into the buffer whose gradients were used up before this one was asked for.
                under_way = self._start(number + 1, gradients)
            yield arrived.to(dtype)

    def _start(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, torch.cuda.Event]:
        gradient = gradients[number]
        target = self._buffers[number % 2][: gradient.numel()]
        with torch.cuda.stream(self._stream):
            target.copy_(gradient, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return target, event

    def _make(self, size: int, like: Tensor) -> None:
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = [host_zeros(size, like.dtype) for _ in range(2)]
        if self._stream is None:
            self._stream = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
