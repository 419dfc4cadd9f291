"""Rules about failures: what a run may shrink to, who stands by, how long silence lasts, and going back.

Planned failures too (`recovery.inject`): an entry that would never happen is refused at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from conf.schema import Config, Device, Fault, FaultPhase, LauncherName, MoeAuxScope, OnNonfinite, OnSpike
from orchestra.config.keys import shown
from orchestra.config.machine import Situation, data_parallel, world_size
from orchestra.errors import ConfigError
from orchestra.run.events import is_number, is_whole
from orchestra.run.planned_faults import ALL, KEYS
from orchestra.sizes.topology import batch_problems, layout, listed

# An agent beats about once a second, and a shared file system shows it to others some seconds later.
_SHORTEST_SILENCE_S = 5.0


def rule_min_nodes(config: Config, situation: Situation) -> Iterator[str]:
    """A run that may shrink must have a layout on fewer nodes, with the same global batch."""
    nodes, least, ranks = config.cluster.nodes, config.recovery.min_nodes, config.cluster.gpus_per_node
    if least is None or least < 1 or nodes < 1:
        return
    if least > nodes:
        yield f"recovery.min_nodes={least} is above cluster.nodes={nodes}; use at most that"
        return
    begin = situation.from_step
    if isinstance(ranks, str) or ranks < 1 or _problem(config, nodes * ranks, begin) is not None:
        return
    fewer = range(nodes - 1, least - 1, -1)
    problems = [_problem(config, count * ranks, begin) for count in fewer]
    if problems and None not in problems:
        within = f"{least} to {nodes - 1} nodes" if least < nodes - 1 else f"{least} nodes"
        yield (
            f"recovery.min_nodes={least}: the run cannot go on with {within} of cluster.nodes={nodes}: "
            f"{problems[0]}; or leave out recovery.min_nodes"
        )


def rule_range_of_nodes(config: Config, situation: Situation) -> Iterator[str]:
    """A job that may begin with fewer nodes must have a layout on as few, and be able to go on with them, and
    one on as many as it wants: whatever lies between may have none.
    """
    ranks, begin = config.cluster.gpus_per_node, situation.from_step
    nodes, first, least = config.cluster.nodes, config.cluster.min_nodes, config.recovery.min_nodes
    if first is None or first < 1 or nodes < 1:
        return
    if first > nodes:
        yield f"cluster.min_nodes={first} is above cluster.nodes={nodes}; use at most that"
    elif first < nodes and (least is None or least > first):
        yield (
            f"cluster.min_nodes={first} lets a job begin with {first} nodes, and recovery.min_nodes="
            f"{shown(least)} does not let the run train on so few; use recovery.min_nodes={first}"
        )
    elif first < nodes and not isinstance(ranks, str) and ranks >= 1:
        problems = {count: _problem(config, count * ranks, begin) for count in range(first, nodes + 1)}
        able = [count for count, problem in problems.items() if problem is None]
        if able and (able[0], able[-1]) != (first, nodes):
            within = f"{able[0]}..{able[-1]}" if able[0] < able[-1] else able[0]
            count, cannot = (first, "could not begin") if able[0] != first else (nodes, "could not train")
            yield (
                f"cluster.nodes={first}..{nodes}: a job of {count} nodes {cannot}: {problems[count]}; "
                f"use cluster.nodes={within}"
            )


def _problem(config: Config, num_ranks: int, from_step: int) -> str | None:
    try:
        mesh = layout(config.parallelism, num_ranks, config.model.num_experts)
    except ConfigError as error:
        return error.problems[0]
    return next(batch_problems(config.train, mesh.dp, from_step), None)


def rule_spare_nodes(config: Config, _: Situation) -> Iterator[str]:
    spares = config.cluster.spare_nodes
    if spares > 0 and config.cluster.launcher is LauncherName.local:
        yield (
            f"cluster.spare_nodes={spares}: launcher=local is this machine alone; use cluster.spare_nodes=0, "
            f"or cluster=slurm"
        )


def rule_agent_timeout(config: Config, _: Situation) -> Iterator[str]:
    timeout_s = config.recovery.agent_timeout_s
    if 0 < timeout_s < _SHORTEST_SILENCE_S:
        yield (
            f"recovery.agent_timeout_s={timeout_s:g}: agents show once a second that they live, and a shared "
            f"file system may show it late: healthy nodes would count as lost; use "
            f"{_SHORTEST_SILENCE_S:g} or more"
        )


def rule_roll_back(config: Config, _: Situation) -> Iterator[str]:
    """Going back takes somewhere to go back to, and another start of the ranks."""
    if config.recovery.loss_spike.action is OnSpike.roll_back:
        key = "recovery.loss_spike.action"
    elif config.train.on_nonfinite is OnNonfinite.roll_back:
        key = "train.on_nonfinite"
    else:
        return
    if config.checkpoint.every_steps is None:
        yield (
            f"{key}=roll_back: with checkpoint.every_steps=null there is nothing to go back to; give "
            f"checkpoint.every_steps, or use {key}=skip"
        )
    if config.recovery.max_restarts == 0:
        yield (
            f"{key}=roll_back starts the ranks again, and recovery.max_restarts=0 forbids that; use 1 or "
            f"more, or {key}=stop"
        )


def rule_replay(config: Config, _: Situation) -> Iterator[str]:
    """A step is computed again by a rank with the same part of the model, which has to be there."""
    every, tolerance = config.recovery.replay_every_steps, config.recovery.replay_tolerance
    if every is None:
        if tolerance is not None:
            yield (
                f"recovery.replay_tolerance={tolerance:g} means nothing without recovery.replay_every_steps; "
                "give that too, or leave it out"
            )
        return
    if config.parallelism.zero == 3:
        yield (
            f"recovery.replay_every_steps={every}: with parallelism.zero=3 no rank holds the parameters to "
            "compute another one's step; use parallelism.zero=2 or less, or null"
        )
    if config.parallelism.ep > 1:
        yield (
            f"recovery.replay_every_steps={every}: with parallelism.ep={config.parallelism.ep} experts "
            "compute on tokens of several ranks, and have no gradient of one micro-batch; use ep=1, or null"
        )
    if config.model.num_experts and config.model.moe_aux_scope is MoeAuxScope.batch:
        yield (
            f"recovery.replay_every_steps={every}: with model.moe_aux_scope=batch each rank's gradients have "
            "all ranks' choices in them, and a broken one would not stand out; use moe_aux_scope=sequence, "
            "or null"
        )
    if config.recovery.max_restarts == 0:
        yield (
            f"recovery.replay_every_steps={every} starts the ranks again once one differs, and "
            "recovery.max_restarts=0 forbids that; use 1 or more"
        )
    is_gpu = config.cluster.device is Device.cuda
    if is_gpu and tolerance is None and not config.train.deterministic:
        yield (
            f"recovery.replay_every_steps={every} compares bit for bit, and GPUs may compute differently "
            "each time; use train.deterministic=true, or give recovery.replay_tolerance, e.g. 0.01"
        )
    if data_parallel(config) == 1:
        yield (
            f"recovery.replay_every_steps={every}: the run has one data-parallel rank, and nobody else to "
            "compute its step; use more ranks, or null"
        )


# In these one rank acts for all.
_OF_COORDINATOR = (FaultPhase.before_manifest.name, FaultPhase.before_prune.name)
_OF_STEPS = (FaultPhase.step.name, FaultPhase.forward.name, FaultPhase.reduce.name)
_NOT_OF_SAVES = (*_OF_STEPS, FaultPhase.setup.name, FaultPhase.restore.name)
# Faults that change a whole step, and the phases in which it is not too late for them.
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
        fitting = listed(list(_PHASES[fault]))
        yield f"fault={fault} changes a whole step, and phase={phase} is too late for it; use {fitting}"
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
    every_s = config.checkpoint.every_s
    if phase not in FaultPhase.__members__ or phase in _NOT_OF_SAVES:
        return
    if phase in _OF_COORDINATOR and rank not in (0, ALL):
        yield f"rank={shown(rank)}: phase={phase} is of rank 0 alone; use rank: 0"
    if every is None:
        yield f"phase={phase} is part of a save, and checkpoint.every_steps=null saves nothing"
    elif isinstance(every, str) or every_s is not None:
        if step != config.train.steps:
            rhythm = f"every_steps={every}" if every_s is None else f"every_s={every_s}"
            yield (
                f"phase={phase} is part of a save, and with checkpoint.{rhythm} nobody knows beforehand "
                f"whether at_step={step} is saved; give a number of steps"
            )
    elif every >= 1 and step % every and step != config.train.steps:
        saved = min(max(1, round(step / every)) * every, config.train.steps)
        yield (
            f"at_step={step} is not saved (checkpoint.every_steps={every}), so phase={phase} never comes "
            f"there; use e.g. {saved}"
        )
