"""What a forked process does to be as if it had been started plainly: streams, environment, module.

It knows neither torchrun nor workers, and not who forked it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

# Read when a process or a library starts: a fork cannot have another value than its first parent.
_READ_AT_START = ("LD_", "GLIBC_", "MALLOC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "TORCH_")
# … but not by whoever starts: torchrun sets these for its workers.
_READ_LATER = ("TORCH_NCCL_",)


@dataclass(frozen=True)
class Job:
    """What `python -u -m` is to run: module and arguments, with all that a process is started with."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    # Descriptors that become the standard input, output and error.
    files: list[int]


def differing(environment: Mapping[str, str], first: Mapping[str, str]) -> str | None:
    """Return a variable that a process forked from one with the environment `first` cannot have otherwise,
    but should by `environment`; None where there is none.
    """
    return next(
        (
            name
            for name in sorted({*environment, *first})
            if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)
            if environment.get(name) != first.get(name)
        ),
        None,
    )


def become(job: Job) -> None:
    """Take on the job's streams, environment and folder, and run its module as the main one."""
    for place, file in enumerate(job.files):
        os.dup2(file, place)
    for file in {file for file in job.files if file > 2}:
        os.close(file)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.folder)
    # Folders may hold other files than when the first parent looked.
    importlib.invalidate_caches()
    _draw_again()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    module, *arguments = job.arguments
    sys.argv[:] = [module, *arguments]
    sys.orig_argv[:] = [sys.executable, "-u", "-m", module, *arguments]
    if module in sys.modules:
        # runpy's warning: that it was imported before is the point.
        warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _draw_again() -> None:
    """Give libraries that drew a seed at their import another one: siblings would all draw the same.

    Python's own `random` does so by itself, and torch begins with a fixed seed.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
