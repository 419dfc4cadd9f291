"""Where the time of a first step goes: what torch's compiler did, and which kernels it tried and why.

A kernel's configurations are tried while the device may still be busy with what was queued before: that wait
is told apart. What is read here is not torch's public interface; what is missing is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

# Of torch's compiler, by the names that it keeps their seconds under.
_PARTS = {
    "compile_s": "_compile.compile_inner",
    "trace_s": "bytecode_tracing",
    "load_s": "AOTAutogradCache.inductor_load",
    "generate_s": "fx_codegen_and_compile",
}


@contextlib.contextmanager
def observed() -> Iterator[dict[str, Any]]:
    """Watch what is run inside; what was seen is in the dictionary at the end.

    `tried`: kernels with the number of their configurations, the seconds that trying them took, those waited
    for the device before, and what torch says of its cache.
    """
    found: dict[str, Any] = {"tried": []}
    before = _seconds()
    autotuner = _autotuner()
    if autotuner is None:
        yield found
    else:
        original = autotuner.benchmark_all_configs

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            torch.cuda.synchronize()
            waited = time.perf_counter()
            timings = original(self, *args, **kwargs)
            found["tried"].append(
                {
                    "kernel": str(self.inductor_meta.get("kernel_name")),
                    "configs": len(timings),
                    "waited_s": waited - began,
                    "tried_s": time.perf_counter() - waited,
                    "cache": str(getattr(self, "autotune_cache_info", None)),
                }
            )
            return timings

        autotuner.benchmark_all_configs = watched
        try:
            yield found
        finally:
            autotuner.benchmark_all_configs = original
    found.update({name: seconds - before[name] for name, seconds in _seconds().items()})


def _autotuner() -> Any:
    try:
        return importlib.import_module("torch._inductor.runtime.triton_heuristics").CachingAutotuner
    except (ImportError, AttributeError):
        return None


def _seconds() -> dict[str, float]:
    # Missing until something is compiled.
    metrics = getattr(sys.modules.get("torch._dynamo.utils"), "compilation_time_metrics", {})
    return {name: float(sum(metrics.get(key, ()))) for name, key in _PARTS.items()}
