"""Injects failures into this rank where `recovery.inject` planned them (`orchestra.run.planned_faults`).

A rehearsed failure is the real thing: SIGKILL leaves the process no chance to tidy up, and a lock that is
held is held. What fails is written down first, and reaches the disk before anything fails. Nothing here
knows what is to happen afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema import Fault
from orchestra.errors import TrainingError
from orchestra.run.events import EventWriter
from orchestra.run.planned_faults import (
    AGENT_VARIABLE,
    EXIT_CODE,
    HANG_S,
    NODE_DOWN_VARIABLE,
    PlannedFault,
    planned_faults,
)

if TYPE_CHECKING:
    import torch


from dataclasses import dataclass, field

from orchestra.run.heartbeat import Heart, Phase, silent_heart

__all__ = ["Faults", "PlannedFault", "planned_faults"]

_SPIKE = 1e4
# More than any device holds.
_TOO_MANY_BYTES = 1 << 56
_NODE_DOWN_TIMEOUT_S = 60.0
# What processes of one start of a job on one node have in common: Slurm's names, and the node agent's mark.
_OF_THIS_NODE = ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_RESTART_COUNT")
_MARK_VARIABLE = "LAUNCHERS_MARK"


class Faults:
    """The faults of one rank in one attempt. `strike` is called from any thread.

    `events` takes what is about to happen; without it nothing is written.
    """

    def __init__(
        self,
        planned: Sequence[PlannedFault],
        attempt: int,
        rank: int,
        events: EventWriter | None = None,
        device: torch.device | None = None,
    ) -> None:
        mine = [it for it in planned if it.befalls(attempt, rank)]
        self._moments: dict[tuple[str, int], list[PlannedFault]] = {}
        for it in mine:
            self._moments.setdefault((it.phase.name, it.at_step), []).append(it)
        self._events = events
        self._device = device
        self._slow: list[PlannedFault] = []
        self._poison: tuple[int, float] = (0, 1.0)
        self._flip = 0

    def strike(self, phase: str, step: int) -> None:
        """Fail if a fault is planned for this moment: then this call mostly never returns."""
        for fault in self._moments.get((phase, step), ()):
            self._tell(fault, step)
            self._do(fault, step)
        if self._slow and phase == "step":
            self._slow = [it for it in self._slow if it.steps is None or step < it.at_step + it.steps]
            time.sleep(sum(it.seconds or 0.0 for it in self._slow))

    def factor(self, step: int) -> float:
        """Return what the loss of this rank in `step` is to be multiplied with; 1: nothing is planned."""
        poisoned, factor = self._poison
        return factor if poisoned == step else 1.0

    def flips(self, step: int) -> bool:
        """Whether a bit of a gradient that this rank computes in `step` is to be flipped."""
        return self._flip == step

    def _tell(self, fault: PlannedFault, step: int) -> None:
        if self._events is not None:
            # A full disk takes the record; the rehearsal goes on.
            with contextlib.suppress(OSError):
                self._events.write("fault_injected", step=step, pid=os.getpid(), **fault.evidence())
                self._events.sync()

    def _do(self, fault: PlannedFault, step: int) -> None:
        match fault.fault:
            case Fault.sigkill:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.sigstop:
                os.kill(os.getpid(), signal.SIGSTOP)
            case Fault.exit:
                os._exit(EXIT_CODE if fault.exit_code is None else fault.exit_code)
            case Fault.segfault:
                ctypes.string_at(0)
            case Fault.exception:
                raise TrainingError(f"a planned fault of step {step} (recovery.inject)")
            case Fault.oom:
                ask_for_too_much(self._device)
            case Fault.hang:
                loop_in_python(_hang_s(fault))
            case Fault.gil:
                hold_the_lock(_hang_s(fault))
            case Fault.nan:
                self._poison = (step, math.nan)
            case Fault.spike:
                self._poison = (step, _SPIKE)
            case Fault.flip:
                self._flip = step
            case Fault.slow:
                self._slow.append(fault)
            case Fault.agent_kill:
                os.kill(_agent(), signal.SIGKILL)
            case Fault.node_down:
                take_node_down()


def _hang_s(fault: PlannedFault) -> float:
    return HANG_S if fault.seconds is None else fault.seconds


def ask_for_too_much(device: torch.device | None) -> None:
    """Raise the error of a device without memory, none of which is taken."""
    import torch

    torch.empty(_TOO_MANY_BYTES, dtype=torch.uint8, device=device)


def flip_bit(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with one bit of its first element flipped: the number stays finite, mostly."""
    import torch

    flipped = gradient.detach().clone(memory_format=torch.contiguous_format)
    size = flipped.element_size()
    # The highest bits of the mantissa of fp32, and within that of 16-bit numbers.
    bits = flipped.view(-1).view(torch.int32 if size == 4 else torch.int16)
    bits[0] ^= 1 << (8 * size - 10)
    return flipped


def loop_in_python(seconds: float) -> None:
    """Loop without an end in sight: signals are heard, and nothing else is done."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


def hold_the_lock(seconds: float) -> None:
    """Sleep in native code without giving the interpreter's lock away: no other thread of Python runs."""
    native = ctypes.PyDLL(None)
    deadline = time.monotonic() + seconds
    # A signal's handler ends the sleep early.
    while (left := deadline - time.monotonic()) > 0:
        native.sleep(ctypes.c_uint(math.ceil(left)))


def _agent() -> int:
    text = os.environ.get(AGENT_VARIABLE, "")
    if not text.isdigit():
        raise TrainingError(
            f"fault=agent_kill needs the node agent's process id in {AGENT_VARIABLE}, which is {text!r}"
        )
    return int(text)


def take_node_down() -> None:
    """Let this node go down as ORCHESTRA_NODE_DOWN says, or kill all processes of the job on it."""
    if command := os.environ.get(NODE_DOWN_VARIABLE):
        # It may be what kills this process: in a session of its own it gets to its end.
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.Popen(shlex.split(command), start_new_session=True).wait(_NODE_DOWN_TIMEOUT_S)
    # The agent first: it would begin to tidy up.
    agent = os.environ.get(AGENT_VARIABLE, "")
    victims = ([int(agent)] if agent.isdigit() else []) + _of_this_node()
    for pid in victims:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _of_this_node() -> list[int]:
    """Return the other processes of this user that belong to the same start of the job on the same node, or
    without a job to the same node agent.
    """
    names = _OF_THIS_NODE if "SLURM_JOB_ID" in os.environ else (_MARK_VARIABLE,)
    mine = {f"{name}={os.environ[name]}".encode() for name in names if name in os.environ}
    found = []
    for entry in Path("/proc").iterdir():
        if not mine or not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Whoever belongs to another user cannot be read.
        with contextlib.suppress(OSError):
            if mine <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


# The moments of a training as it passes them: each beats this rank's heart, and planned faults strike.
#
# One call per moment in the loop and the step. It knows neither who listens nor what a fault does.


def _no_faults() -> Faults:
    return Faults([], 0, 0)


@dataclass(frozen=True)
class Moments:
    """One rank's heart and faults. *Training thread only.*"""

    heart: Heart = field(default_factory=silent_heart)
    faults: Faults = field(default_factory=_no_faults)

    def enter(self, phase: Phase, step: int = 0, micro_batch: int = 0) -> None:
        """Say that `phase` begins; fail where that is planned. About a microsecond, and no wait for a
        device.
        """
        self.heart.beat(phase, step, micro_batch)
        if micro_batch == 0:
            self.faults.strike(phase.name, step)
