"""Rules about planned failures (`recovery.inject`): an entry that would never strike is refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conf.schema import Config, Fault, FaultPhase
from orchestra.config.keys import shown
from orchestra.config.situation import Situation, world_size
from orchestra.events import is_number, is_whole
from orchestra.faults import ALL, KEYS
from orchestra.topology import listed

# In these one rank acts for all.
_OF_COORDINATOR = (FaultPhase.before_manifest.name, FaultPhase.before_prune.name)
_OF_STEPS = (FaultPhase.step.name, FaultPhase.forward.name, FaultPhase.reduce.name)
_NOT_OF_SAVES = (*_OF_STEPS, FaultPhase.setup.name, FaultPhase.restore.name)
# Faults of a whole step, and the phases in which they can still befall it.
_PHASES = {
    Fault.nan.name: (FaultPhase.step.name, FaultPhase.forward.name),
    Fault.spike.name: (FaultPhase.step.name, FaultPhase.forward.name),
    Fault.flip.name: (FaultPhase.step.name, FaultPhase.forward.name),
    Fault.slow.name: (FaultPhase.step.name,),
}
# The faults that each of these keys means something to.
_KEY_FAULTS = {
    "seconds": (Fault.hang.name, Fault.gil.name, Fault.slow.name),
    "steps": (Fault.slow.name,),
    "exit_code": (Fault.exit.name,),
}
_MAX_SECONDS = 10**6


def rule_injected_faults(config: Config, _: Situation) -> Iterator[str]:
    for index, entry in enumerate(config.recovery.inject):
        for problem in (*_moment_problems(entry, config), *_fault_problems(entry)):
            yield f"recovery.inject[{index}]: {problem}"


def _moment_problems(entry: dict[str, Any], config: Config) -> Iterator[str]:
    """Say what is wrong with who fails and when."""
    for key in entry:
        if key not in KEYS:
            yield f"no such key {key}; an entry has {', '.join(KEYS)}"
    yield from _step_problems(entry, config)
    rank, attempt, ranks = entry.get("rank"), entry.get("attempt", 0), world_size(config)
    if rank != ALL and not (is_whole(rank) and 0 <= rank < (ranks or rank + 1)):
        within = f"0 to {ranks - 1}" if ranks is not None else "a number from 0 on"
        yield f"rank={shown(rank)} is no rank of the run; use {within}, or all"
    if attempt != ALL and (not is_whole(attempt) or attempt < 0):
        yield f"attempt={shown(attempt)} is no attempt; use a whole number from 0 on, or all"


def _step_problems(entry: dict[str, Any], config: Config) -> Iterator[str]:
    step, last = entry.get("at_step"), config.train.steps
    if entry.get("phase") == FaultPhase.setup.name:
        if "at_step" in entry:
            yield "phase=setup comes before all steps; leave at_step out, or use phase: step"
    elif not is_whole(step) or not 1 <= step <= last:
        yield f"at_step={shown(step)} is no step of the run; use 1 to {last}"
    else:
        yield from _save_problems(entry, step, config)


def _fault_problems(entry: dict[str, Any]) -> Iterator[str]:
    """Say what is wrong with what happens."""
    for key, kind, default in (("fault", Fault, Fault.sigkill), ("phase", FaultPhase, FaultPhase.step)):
        value, names = entry.get(key, default.name), list(kind.__members__)
        if value not in names:
            yield f"{key}={shown(value)}: no such {key}; use {', '.join(names[:-1])} or {names[-1]}"
    fault = str(entry.get("fault", Fault.sigkill.name))
    phase = str(entry.get("phase", FaultPhase.step.name))
    if fault in _PHASES and phase in FaultPhase.__members__ and phase not in _PHASES[fault]:
        yield f"fault={fault} befalls a whole step, not phase={phase}; use {listed(list(_PHASES[fault]))}"
    for key, faults in _KEY_FAULTS.items():
        if key in entry and fault in Fault.__members__ and fault not in faults:
            yield f"{key} means nothing to fault={fault}; it is for {listed(list(faults))}"
    yield from _number_problems(entry, is_slow=fault == Fault.slow.name)


def _number_problems(entry: dict[str, Any], *, is_slow: bool) -> Iterator[str]:
    seconds, steps, code = entry.get("seconds"), entry.get("steps"), entry.get("exit_code")
    if is_slow and seconds is None:
        yield "fault=slow needs seconds: how much longer each step takes"
    if seconds is not None and not (is_number(seconds) and 0 < seconds <= _MAX_SECONDS):
        yield f"seconds={shown(seconds)} is no duration; use a number above 0, up to {_MAX_SECONDS}"
    if steps is not None and not (is_whole(steps) and steps >= 1):
        yield f"steps={shown(steps)} is no number of steps; use 1 or more"
    if code is not None and not (is_whole(code) and 0 <= code <= 255):
        yield f"exit_code={shown(code)} is no exit code; use 0 to 255"


def _save_problems(entry: dict[str, Any], step: int, config: Config) -> Iterator[str]:
    """Say why a fault in the midst of a save would never strike."""
    phase, rank, every = str(entry.get("phase")), entry.get("rank"), config.checkpoint.every_steps
    if phase not in FaultPhase.__members__ or phase in _NOT_OF_SAVES:
        return
    if phase in _OF_COORDINATOR and rank not in (0, ALL):
        yield f"rank={shown(rank)}: phase={phase} is of rank 0 alone; use rank: 0"
    if every is None:
        yield f"phase={phase} is part of a save, and checkpoint.every_steps=null saves nothing"
    elif isinstance(every, str):
        if step != config.train.steps:
            yield (
                f"phase={phase} is part of a save, and with checkpoint.every_steps={every} nobody knows "
                f"beforehand whether at_step={step} is saved; give a number of steps"
            )
    elif every >= 1 and step % every and step != config.train.steps:
        saved = min(max(1, round(step / every)) * every, config.train.steps)
        yield (
            f"at_step={step} is not saved (checkpoint.every_steps={every}), so phase={phase} never comes "
            f"there; use e.g. {saved}"
        )


RULES = (rule_injected_faults,)
