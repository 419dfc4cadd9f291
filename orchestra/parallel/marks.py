"""Names the parts of a step for torch's profiler: forward, backward, optimizer, communication, data.

A mark costs a fraction of a microsecond while nobody traces. What is compiled is not marked inside. Whoever
wants to know how long a rank talks to others, or waits for them, can have communication timed. It knows no
collective and no training loop.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from orchestra.step_shares import MARKS, Part

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
    is_timed = _timed is not None and part is Part.communication
    if not profiler._is_profiler_enabled:
        return _timed() if is_timed and _timed is not None else _UNMARKED
    traced = record_function(MARKS[part])
    if not is_timed or _timed is None:
        return traced
    both = ExitStack()
    both.enter_context(_timed())
    both.enter_context(traced)
    return both
