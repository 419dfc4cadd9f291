"""Trains the members of a sweep on this machine: one after another, or `cluster.members_at_once` at a time.

Each member is an `orchestra resume` of its own, started with the sweep's snapshot of the code; so it has its
record, restarts and verdict like any run. Members that train at the same time get equal shares of the cores,
and on GPUs devices of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from conf.schema import Config, Device
from orchestra.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir, SweepDir

_POLL_S = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a member prints, where several train at a time.
_OUTPUT = "output.log"


@dataclass(frozen=True)
class _Slot:
    """What one of the members that train at the same time has of the machine."""

    cores: frozenset[int]
    # Values of CUDA_VISIBLE_DEVICES; None: all.
    devices: tuple[str, ...] | None


@dataclass(frozen=True)
class _TrainingMember:
    run: RunDir
    process: subprocess.Popen[bytes]
    slot: _Slot


def at_once(runs: Sequence[RunDir]) -> int:
    """Return how many of these members train at a time: the smallest number that one gives."""
    given = [read_config(run.config).cluster.members_at_once for run in runs]
    return min([*given, len(runs)], default=1)


def output_of(run: RunDir) -> Path:
    """Return the file with what a member printed that trained beside others."""
    return run.path / "logs" / _OUTPUT


def train_members(
    sweep: SweepDir,
    runs: Sequence[RunDir],
    *,
    is_shown: bool,
    begun: Callable[[RunDir], None],
    ended: Callable[[RunDir], None],
) -> int | None:
    """Train runs of a sweep to their ends; return None, or the exit code where a signal ended it before.

    `is_shown`: what members print goes to this terminal, where one trains at a time; else to `output_of`.
    The first signal ends every member that trains with a checkpoint (75), the second at once (130); what
    waits is not begun.
    """
    waiting, children = list(runs), list[_TrainingMember]()
    slots = _slots([read_config(run.config) for run in runs], at_once(runs))
    is_shown = is_shown and len(slots) == 1
    with _forwarded(children) as received:
        while children or (waiting and not received):
            while waiting and slots and not received:
                run, slot = waiting.pop(0), slots.pop(0)
                begun(run)
                children.append(_TrainingMember(run, _started(sweep, run, slot, is_shown=is_shown), slot))
            time.sleep(_POLL_S)
            for child in [child for child in children if child.process.poll() is not None]:
                children.remove(child)
                slots.append(child.slot)
                ended(child.run)
    if not received:
        return None
    return EXIT_STOPPED if len(received) == 1 else EXIT_INTERRUPTED


def _started(sweep: SweepDir, run: RunDir, slot: _Slot, *, is_shown: bool) -> subprocess.Popen[bytes]:
    folders = [str(sweep.newest_code()), *([str(sweep.plugins)] if sweep.plugins.is_dir() else [])]
    others = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([*folders, *others]))}
    if slot.devices is not None:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot.devices)
    # -P: a folder `orchestra` in the working directory is not the snapshot.
    command = [sys.executable, "-P", "-m", "orchestra", "resume", str(run.path)]
    output_of(run).parent.mkdir(exist_ok=True)
    with _on_cores(slot.cores), output_of(run).open("ab") as log:
        output = None if is_shown else log
        # Signals reach it through this process alone: a terminal's Ctrl-C would count twice.
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, process_group=0)


def _slots(configs: Sequence[Config], number: int) -> list[_Slot]:
    """Cut the machine into so many parts; with one everything is its."""
    cores = sorted(os.sched_getaffinity(0))
    if number <= 1:
        return [_Slot(frozenset(cores), None)]
    share = max(1, len(cores) // number)
    parts = [
        frozenset(cores[(place * share + k) % len(cores)] for k in range(share)) for place in range(number)
    ]
    on_gpu = [config.cluster for config in configs if config.cluster.device is Device.cuda]
    if not on_gpu or any(cluster.share_devices for cluster in on_gpu):
        return [_Slot(part, None) for part in parts]
    each = max(int(cluster.gpus_per_node) for cluster in on_gpu)
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(device) for device in range(number * each)] if given is None else given.split(",")
    return [_Slot(part, tuple(names[k * each : (k + 1) * each])) for k, part in enumerate(parts)]


@contextlib.contextmanager
def _on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Let what is started meanwhile run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _forwarded(children: Sequence[_TrainingMember]) -> Iterator[list[int]]:
    """Hand signals on to the members that train; yields those that came."""
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
