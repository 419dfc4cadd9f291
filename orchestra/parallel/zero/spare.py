"""Memory that is used again and again for a while: fresh memory of such sizes costs as much as filling it."""

from __future__ import annotations

import torch
from torch import Tensor


class SpareMemory:
    """Flat tensors of one dtype that nobody uses at the moment; whoever takes them decides how many."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._spare: list[Tensor] = []

    def __bool__(self) -> bool:
        """Whether any is there."""
        return bool(self._spare)

    @property
    def num_bytes(self) -> int:
        """Bytes of what is there."""
        return sum(memory.nbytes for memory in self._spare)

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return memory of at least `size` elements, with finite numbers of no meaning in it.

        Where none of what is there suffices, one of it is replaced, so that no more of it gathers than was
        ever in use at a time.
        """
        fitting = [number for number, memory in enumerate(self._spare) if memory.numel() >= size]
        if fitting:
            return self._spare.pop(min(fitting, key=lambda number: self._spare[number].numel()))
        if self._spare:
            self._spare.pop()
        return torch.zeros(size, dtype=self._dtype, device=device)

    def give(self, memory: Tensor) -> None:
        """Give back what was taken, all of it."""
        self._spare.append(memory)
