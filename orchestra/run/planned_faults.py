"""Planned failures (`recovery.inject`): a fault is a value that says who fails, when and how.

An entry is `{at_step, rank, phase, attempt, fault, seconds, steps, exit_code}`; only `at_step` and `rank`
must be given:

    recovery.inject=[{at_step: 30, rank: 1}]                              rank 1 is killed as step 30 begins
    recovery.inject=[{at_step: 30, rank: 1, fault: gil, seconds: 60}]     holds the interpreter's lock
    recovery.inject=[{at_step: 30, rank: all, phase: before_manifest}]    in the midst of saving step 30
    recovery.inject=[{at_step: 9, rank: 2, fault: slow, seconds: 0.2, steps: 50, attempt: all}]

| fault | what happens to the rank |
|---|---|
| sigkill (default) | it kills itself with SIGKILL, as the kernel does when a machine has no memory left |
| sigstop | it stops itself, as a frozen machine or a debugger would |
| exit | it ends at once with `exit_code` (1), and leaves no word of its own |
| segfault | it reads from address 0 in native code |
| exception | it raises an error |
| oom | it asks its device for more memory than any has, and gets the error that is for that |
| hang | it loops in Python for `seconds` (an hour) |
| gil | it sleeps in native code with the interpreter's lock held for `seconds` (an hour) |
| nan | its loss and gradients of that step are NaN |
| spike | its loss and gradients of that step are 10,000 times what they were |
| flip | one bit of a gradient that it computes in that step is another one, and no error says so |
| slow | it sleeps `seconds` in each step from that one on, for `steps` steps (to the end) |
| agent_kill | the agent of its node gets SIGKILL |
| node_down | its node goes down: by the command in ORCHESTRA_NODE_DOWN where that is set, else every |
| | process of the job on this node is killed at once, the agent first |

`phase` is when it strikes: `setup` (an attempt's, before anything is restored; `at_step` is left out), `step`
(as the step begins, default), `forward`, `reduce` (the gradients are about to be summed over ranks), or in
the midst of saving that step or of restoring it. `attempt` counts from 0 (default); `all`: every one. Whoever
fails first writes the event `fault_injected`, with its evidence, and only then does it.

What the values are is checked by the configuration's rules. Standard library only; nothing strikes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from conf.schema import Fault, FaultPhase

# What whoever starts a node's ranks tells them: the node agent's process id, and how a node is taken down.
AGENT_VARIABLE = "LAUNCHERS_AGENT_PID"
NODE_DOWN_VARIABLE = "ORCHESTRA_NODE_DOWN"
# The keys of an entry.
KEYS = ("attempt", "at_step", "rank", "fault", "phase", "seconds", "steps", "exit_code")
ALL = "all"
# How long a rank hangs when nobody ends it, in seconds.
HANG_S = 3600.0
EXIT_CODE = 1


@dataclass(frozen=True)
class PlannedFault:
    """What happens to `rank` (None: every rank that comes that far) in `attempt` (None: in each) at a phase
    of `at_step`.

    The phases of a save and of a restore strike at the save or restore of that step, that of setup at step 0.
    """

    at_step: int
    rank: int | None
    phase: FaultPhase = FaultPhase.step
    attempt: int | None = 0
    fault: Fault = Fault.sigkill
    seconds: float | None = None
    steps: int | None = None
    exit_code: int | None = None

    def strikes(self, attempt: int, rank: int) -> bool:
        """Whether it is meant for this rank of this attempt."""
        return self.attempt in (None, attempt) and self.rank in (None, rank)

    def evidence(self) -> dict[str, Any]:
        """Return what an event says of it."""
        given = {"seconds": self.seconds, "steps": self.steps, "exit_code": self.exit_code}
        named = {"fault": self.fault.name, "phase": self.phase.name}
        return {**named, **{key: value for key, value in given.items() if value is not None}}


def planned_faults(entries: Iterable[Mapping[str, Any]]) -> list[PlannedFault]:
    """Return the faults that `recovery.inject` lists; the rules have checked its entries."""
    return [
        PlannedFault(
            at_step=entry.get("at_step", 0),
            rank=None if entry["rank"] == ALL else entry["rank"],
            phase=FaultPhase[entry.get("phase", FaultPhase.step.name)],
            attempt=None if entry.get("attempt") == ALL else entry.get("attempt", 0),
            fault=Fault[entry.get("fault", Fault.sigkill.name)],
            **{key: entry[key] for key in ("seconds", "steps", "exit_code") if key in entry},
        )
        for entry in entries
    ]


def spelled(entries: Iterable[Any]) -> list[Any]:
    """Return entries as they were meant: Hydra and YAML take `fault: nan` for a number."""
    return [
        {**entry, "fault": Fault.nan.name}
        if isinstance(entry, dict) and entry.get("fault") != entry.get("fault")
        else entry
        for entry in entries
    ]


def still_to_come(entries: Iterable[Mapping[str, Any]], attempt: int) -> list[dict[str, Any]]:
    """Return the entries that can still strike in `attempt` or later."""
    return [
        dict(entry) for entry in entries if entry.get("attempt") == ALL or entry.get("attempt", 0) >= attempt
    ]
