"""Processes that stay joined in one gloo group and run the rank functions that tests give them.

Importing torch and joining costs seconds; the tests of a session share it. A rank function is a module-level
function of (rank, world, **arguments) in a test module; what it returns is pickled back, an exception becomes
a failure that shows the rank's traceback. After a failure or time-out the pool is broken and the next test
gets a new one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from launchers.processes import die_with_parent
from tests.support import fp8_products

# `make equivalence` trains twenty steps of many layouts in one call, on a machine that may have other work.
LIMIT_S = 900.0 if os.environ.get("ORCHESTRA_EQUIVALENCE") == "all" else 100.0
_HOST = "127.0.0.1"
# Processes are forked from one that has imported what takes long, and has no threads and no device yet.
_CONTEXT = multiprocessing.get_context("forkserver")
# torch imports its compiler where a block is first recomputed: three seconds in each process otherwise.
_CONTEXT.set_forkserver_preload(
    ["torch.distributed", "orchestra.train.trainer", "torch._dynamo", "torch._functorch.aot_autograd"]
)


class RankPool:
    """`size` processes in one group. `run` is called by the test process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_broken = False
        # On a port that is still free when it is opened.
        self._store = dist.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(rank, size, self._store.port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Run function(rank, world, **arguments) on every rank; return the results by rank."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send((function, arguments))
        self.is_broken = True
        results = [self._received(rank) for rank in range(self.size)]
        self.is_broken = False
        # A thread for each group that was ever opened looks for messages a hundred times a second.
        self._signal(signal.SIGSTOP)
        return results

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _received(self, rank: int) -> Any:
        if not self._pipes[rank].poll(LIMIT_S):
            raise TimeoutError(f"rank {rank} gave no result within {LIMIT_S:g} s")
        is_good, value = self._pipes[rank].recv()
        if not is_good:
            raise AssertionError(f"rank {rank} failed:\n{value}")
        return value

    def close(self) -> None:
        """End every process, surely."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0.0 if self.is_broken else 5.0)
            process.kill()
            process.join()


# What the fixture `ranks` is: the shared pool of a size.
Ranks = Callable[[int], RankPool]


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    # One that is stopped would not notice the end of whoever started it.
    die_with_parent(os.getppid())
    # What was imported stays: no collection, and no test that looks through all objects, has to look at it.
    gc.freeze()
    torch.set_num_threads(1)
    fp8_products.register()
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore(_HOST, port, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(rank, size, **arguments)))
        except BaseException:  # noqa: BLE001  whatever happened must reach the test
            pipe.send((False, traceback.format_exc()))
