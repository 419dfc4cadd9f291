"""Injects failures into this rank where `recovery.inject` planned them (`orchestra.run.planned_faults`).

A rehearsed failure is a real one: SIGKILL leaves the process no chance to tidy up, and a lock that is held is
held. What is about to fail is recorded first, and reaches the disk before it fails. torch is imported only by
the faults that need it.
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
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from conf.schema import Fault, FaultPhase
from orchestra.errors import TrainingError
from orchestra.run.events import EventWriter
from orchestra.run.heartbeat import Phase
from orchestra.run.planned_faults import (
    AGENT_VARIABLE,
    EXIT_CODE,
    HANG_S,
    NODE_DOWN_VARIABLE,
    PlannedFault,
)
from orchestra.train.hooks import StepHook

if TYPE_CHECKING:
    import torch

# What a loss is multiplied by.
_FACTORS = {Fault.nan: math.nan, Fault.spike: 1e4}
# More than any device holds.
_TOO_MANY_BYTES = 1 << 56
_NODE_DOWN_TIMEOUT_S = 60.0
# What processes of one start of a job on one node have in common: Slurm's names, and the node agent's mark.
_OF_THIS_NODE = ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_RESTART_COUNT")
_MARK_VARIABLE = "LAUNCHERS_MARK"


class Faults(StepHook):
    """The faults of one rank in one attempt. `strike` is called from any thread.

    `events` takes what is about to happen; without it nothing is written. `flipped` is the parameter in whose
    gradient the fault `flip` flips a bit; without it nothing is flipped.
    """

    def __init__(
        self,
        planned: Sequence[PlannedFault],
        attempt: int,
        rank: int,
        events: EventWriter | None = None,
        device: torch.device | None = None,
        flipped: torch.Tensor | None = None,
    ) -> None:
        self._moments: dict[tuple[str, int], list[PlannedFault]] = {}
        # From a step on: an attempt that goes on behind it is as slow.
        self._slow_to_come: list[PlannedFault] = []
        for fault in planned:
            if fault.strikes(attempt, rank):
                if fault.fault is Fault.slow:
                    self._slow_to_come.append(fault)
                else:
                    self._moments.setdefault((fault.phase.name, fault.at_step), []).append(fault)
        self._events = events
        self._device = device
        self._flipped = flipped
        self._slow: list[PlannedFault] = []
        self._poison: tuple[int, float] = (0, 1.0)
        self._flip_at = self._forward_step = 0

    def around_step(self, step: int) -> AbstractContextManager[object]:
        """Fail where that is planned for the step's begin."""
        self.enter(Phase.step, step, 0, 0)
        return nullcontext()

    def enter(self, phase: Phase, step: int, micro_batch: int, turn: int) -> None:  # noqa: ARG002
        """Fail where that is planned for the phase; of micro-batches it is the first one, and of a pipeline's
        stages on this rank whichever comes first.
        """
        if micro_batch or (phase is Phase.forward and step == self._forward_step):
            return
        if phase is Phase.forward:
            self._forward_step = step
        self.strike(phase.name, step)

    def strike(self, phase: str, step: int) -> None:
        """Fail if a fault is planned for this moment: then this call mostly does not return."""
        for fault in self._moments.get((phase, step), ()):
            self._record(fault, step)
            self._do(fault, step)
        # Within the time that a step is measured to take.
        if phase == Phase.forward.name:
            self._be_slow(step)

    def loss_factor(self, step: int) -> float:
        """Return what the loss of this rank in `step` is multiplied by; 1: nothing is planned."""
        poisoned, factor = self._poison
        return factor if poisoned == step else 1.0

    def around_backward(
        self,
        step: int,
        micro_batch: int,
        loss: torch.Tensor,  # noqa: ARG002
    ) -> AbstractContextManager[object]:
        """Flip a bit of a gradient of the first micro-batch where that is planned, before any hook that comes
        later sees the gradient: a broken device does the same.
        """
        stack = ExitStack()
        if micro_batch == 0 and self._flip_at == step and self._flipped is not None:
            stack.callback(self._flipped.register_hook(flip_bit).remove)  # type: ignore[no-untyped-call]
        return stack

    def _be_slow(self, step: int) -> None:
        for fault in [fault for fault in self._slow_to_come if fault.at_step <= step]:
            self._slow_to_come.remove(fault)
            if _lasts(fault, step):
                self._record(fault, step)
                self._slow.append(fault)
        self._slow = [fault for fault in self._slow if _lasts(fault, step)]
        if self._slow:
            time.sleep(sum(fault.seconds or 0.0 for fault in self._slow))

    def _record(self, fault: PlannedFault, step: int) -> None:
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
            case Fault.nan | Fault.spike:
                self._poison = (step, _FACTORS[fault.fault])
            case Fault.flip:
                self._flip_at = step
            case Fault.agent_kill:
                os.kill(_agent(), signal.SIGKILL)
            case Fault.node_down:
                take_node_down()


def planned_loss_factor(planned: Sequence[PlannedFault], attempt: int, rank: int, step: int) -> float:
    """Return what the loss of any rank in `step` is, or will be, multiplied by: whoever computes its
    micro-batch again has to do the same.
    """
    striking = (fault for fault in planned if fault.at_step == step and fault.strikes(attempt, rank))
    # In the order in which they strike; the last one counts.
    factors = [_FACTORS[each.fault] for each in sorted(striking, key=_is_late) if each.fault in _FACTORS]
    return factors[-1] if factors else 1.0


def _is_late(fault: PlannedFault) -> bool:
    return fault.phase is not FaultPhase.step


def _lasts(fault: PlannedFault, step: int) -> bool:
    """Whether a rank that is slow from a step on still is so at `step`."""
    return fault.steps is None or step < fault.at_step + fault.steps


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
    """Loop for so many seconds: signals are handled, and nothing else is done."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pass


def hold_the_lock(seconds: float) -> None:
    """Sleep in native code and hold the interpreter's lock: no other thread of Python runs."""
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
    agent = os.environ.get(AGENT_VARIABLE, "")
    pids = ([int(agent)] if agent.isdigit() else []) + _of_this_node()
    deadline = time.monotonic() + _NODE_DOWN_TIMEOUT_S
    # Until none is left: what one of them started meanwhile, as an agent's guard starts a new agent, goes
    # down too. They are stopped first, so that none answers to the end of another.
    while pids and time.monotonic() < deadline:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        pids = _of_this_node()
    os.kill(os.getpid(), signal.SIGKILL)


def _of_this_node() -> list[int]:
    """Return the other living processes of this user that belong to the same start of the job on the same
    node, or without a job to the same node agent.
    """
    names = _OF_THIS_NODE if "SLURM_JOB_ID" in os.environ else (_MARK_VARIABLE,)
    mine = {f"{name}={os.environ[name]}".encode() for name in names if name in os.environ}
    processes = []
    for entry in Path("/proc").iterdir():
        if not mine or not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        # Processes of other users cannot be read, and those that have ended have no environment any more.
        with contextlib.suppress(OSError):
            if mine <= set((entry / "environ").read_bytes().split(b"\0")):
                processes.append(int(entry.name))
    return processes
