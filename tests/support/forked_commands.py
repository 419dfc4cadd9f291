"""Runs `orchestra` in processes that are forked from one which has imported it, and so start in milliseconds.

That one (`python -m tests.support.forked_commands`) is a new interpreter with nothing else in it: it has no
torch and one thread. What only a start of its own shows, tests look at with `python -m orchestra`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# Where it may have to wait for a processor; each test has a limit besides.
LIMIT_S = 1000


class ForkedCommands:
    """Each command has its own folder, environment and output; its standard input is empty."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_commands"],
            cwd=ROOT,
            # numpy's OpenBLAS starts its threads when it is imported.
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, words: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run `orchestra WORDS` to its end; the code is that of a signal where it takes too long."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            request = {"words": words, "folder": str(folder), "environment": dict(environment)}
            files = [os.devnull, out.name, err.name]
            self._server.stdin.write(json.dumps({**request, "files": files}) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(list(words), code, out.read(), err.read())

    def close(self) -> None:
        """End the process that forks."""
        self._server.communicate()


def main() -> None:
    """Fork a process for each line of standard input, and write its exit code. What is forked leaves by
    SystemExit, as a command that was started.
    """
    command = importlib.import_module("orchestra.cli")
    for module in pkgutil.walk_packages(command.__path__, f"{command.__name__}."):
        importlib.import_module(module.name)
    assert "torch" not in sys.modules
    # No other thread lives on in a forked process.
    assert len(list(Path("/proc/self/task").iterdir())) == 1
    # Nothing of this is looked at again, and so copied, where a forked process collects garbage or ends.
    gc.freeze()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)  # noqa: T201


def _become(words: list[str], folder: str, environment: dict[str, str], files: list[str]) -> Any:
    for place, file in enumerate(files):
        os.dup2(os.open(file, os.O_WRONLY if place else os.O_RDONLY), place)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0], sys.argv[1:] = folder, words
    importlib.invalidate_caches()
    signal.alarm(LIMIT_S)
    # It ends with SystemExit.
    runpy.run_module("orchestra", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
