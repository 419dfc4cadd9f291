"""Names the parts of a step for torch's profiler (forward, backward, optimizer, communication, data), and
counts the bytes that a rank sends.

A mark costs a fraction of a microsecond while nobody traces. What is compiled is not marked inside: it
belongs to the part that calls it. Whoever wants to know how long a rank talks to others, or waits for them,
can have communication timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from orchestra.sizes.step_shares import MARKS, Part

_UNMARKED = nullcontext()
_timed: Callable[[], AbstractContextManager[Any]] | None = None


def time_communication(timed: Callable[[], AbstractContextManager[Any]] | None) -> None:
    """Let all communication of this process run in the context that `timed` makes; None: no more."""
    global _timed
    _timed = timed


def marked(part: Part) -> AbstractContextManager[Any]:
    """Return the context in which `part` of a step runs, visible to whoever traces at the moment."""
    if torch.compiler.is_compiling():
        return _UNMARKED
    timed = _timed if part is Part.communication else None
    if not profiler._is_profiler_enabled:
        return _UNMARKED if timed is None else timed()
    traced = record_function(MARKS[part])
    if timed is None:
        return traced
    both = ExitStack()
    both.enter_context(timed())
    both.enter_context(traced)
    return both


class Traffic:
    """Bytes that one rank has sent, by kind of collective: what a ring or a direct exchange has to send by
    arithmetic, not what was seen on a wire.
    """

    def __init__(self) -> None:
        self.bytes_sent: Counter[str] = Counter()

    def add_all_reduce(self, num_bytes: int, num_ranks: int) -> None:
        """Count the sum of `num_bytes` that every rank has, for all of them: 2·(N − 1)/N of it (ring)."""
        self.bytes_sent["all_reduce"] += 2 * num_bytes * (num_ranks - 1) // num_ranks

    def add_reduce_scatter(self, num_bytes: int, num_ranks: int) -> None:
        """Count the sum of `num_bytes`, of which each rank gets its part: (N − 1)/N of it."""
        self.bytes_sent["reduce_scatter"] += num_bytes * (num_ranks - 1) // num_ranks

    def add_all_gather(self, num_bytes: int, num_ranks: int) -> None:
        """Count putting together `num_bytes` of the ranks' parts on all of them: (N − 1)/N of it."""
        self.bytes_sent["all_gather"] += num_bytes * (num_ranks - 1) // num_ranks

    def add_all_to_all(self, num_bytes: int, num_ranks: int) -> None:
        """Count sending each rank its part of `num_bytes`: (N − 1)/N of it."""
        self.bytes_sent["all_to_all"] += num_bytes * (num_ranks - 1) // num_ranks

    def add_exchanged(self, num_bytes: int) -> None:
        """Count what is sent to other ranks in an exchange of uneven parts."""
        self.bytes_sent["all_to_all"] += num_bytes

    def add_message(self, num_bytes: int) -> None:
        """Count what is sent to one rank."""
        self.bytes_sent["message"] += num_bytes
