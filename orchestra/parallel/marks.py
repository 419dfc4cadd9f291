"""Names the parts of a step for torch's profiler: forward, backward, optimizer, communication, data.

A mark costs a fraction of a microsecond while nobody traces. What is compiled is not marked inside. It knows
no collective and no training loop.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from orchestra.step_shares import MARKS, Part

_UNMARKED = nullcontext()


def marked(part: Part) -> AbstractContextManager[Any]:
    """Return the context in which `part` of a step runs, visible to whoever traces at the moment."""
    if torch.compiler.is_compiling() or not profiler._is_profiler_enabled:
        return _UNMARKED
    return record_function(MARKS[part])
