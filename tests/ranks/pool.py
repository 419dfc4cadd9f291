"""Processes that stay joined in one gloo group and run the rank functions that tests give them.

Importing torch and joining costs seconds; the tests of a session share it. A rank function is a module-level
function of (rank, **arguments) in a test module; what it returns is pickled back, an exception becomes a
failure that shows the rank's traceback. After a failure or time-out the pool is broken and the next test gets
a new one.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 100.0


class RankPool:
    """`size` processes in one group. `run` is called by the test process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_broken = False
        port = _free_port()
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Run function(rank, **arguments) on every rank; return the results by rank."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        self.is_broken = True
        results = [self._received(rank) for rank in range(self.size)]
        self.is_broken = False
        return results

    def _received(self, rank: int) -> Any:
        if not self._pipes[rank].poll(LIMIT_S):
            raise TimeoutError(f"rank {rank} gave no result within {LIMIT_S:g} s")
        is_good, value = self._pipes[rank].recv()
        if not is_good:
            raise AssertionError(f"rank {rank} failed:\n{value}")
        return value

    def close(self) -> None:
        """End every process, surely."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.0 if self.is_broken else 5.0)
            process.kill()
            process.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, **arguments)))
        except BaseException:  # noqa: BLE001  whatever happened must reach the test
            pipe.send((False, traceback.format_exc()))
