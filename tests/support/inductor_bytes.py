"""How many bytes compiled kernels read and write, as the compiler counts them where it logs its metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._inductor import compile_fx, config, metrics


@contextmanager
def counted_bytes() -> Iterator[Callable[[], int]]:
    """Compile anew, past all caches; yield what returns the bytes of the kernels that were compiled since it
    was called last. What is written in place counts as read too.
    """
    logger = compile_fx.inductor_metrics_log
    level = logger.level

    def since_last() -> int:
        counted = int(metrics.num_bytes_accessed)
        metrics.reset()
        return counted

    torch.compiler.reset()
    logger.setLevel(logging.INFO)
    metrics.reset()
    try:
        with config.patch({"force_disable_caches": True}):
            yield since_last
    finally:
        logger.setLevel(level)
        torch.compiler.reset()
