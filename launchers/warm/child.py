"""What a forked process does to be as if it had been started plainly: streams, environment, module.

It knows neither torchrun nor workers, and not who forked it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.abc import InspectLoader

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
    sys.orig_argv[:] = [sys.executable, "-u", "-m", *job.arguments]
    _run_as_main(*job.arguments)


def _run_as_main(name: str, *arguments: str) -> None:
    """Run a module as `python -m` does, for good: threads and exit handlers still find it as the main one."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise SystemExit(f"{sys.executable}: No module named {name}")
    main = importlib.util.module_from_spec(spec)
    main.__name__ = "__main__"
    sys.modules["__main__"] = main
    sys.argv[:] = [str(spec.origin), *arguments]
    exec(code, main.__dict__)


def _draw_again() -> None:
    """Give libraries that drew a seed at their import another one: siblings would all draw the same.

    Python's own `random` does so by itself, and torch begins with a fixed seed.
    """
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
