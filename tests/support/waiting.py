"""Waits for what other processes and threads bring about. Knows nothing of the product."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(claim: Callable[[], bool], limit_s: float) -> bool:
    """Wait until a claim holds; return whether it does."""
    deadline = time.monotonic() + limit_s
    while True:
        looked = time.monotonic()
        if claim():
            return True
        now = time.monotonic()
        if now > deadline:
            return False
        # A claim that takes long to look at leaves the processors to what it waits for.
        time.sleep(max(0.05, 2 * (now - looked)))
