"""Looks at the plug-ins of a configuration before anything starts, in a process of its own.

`python -m orchestra.train.check_plugins CONFIG.yaml` imports each, compares its options with its signature,
and tries the optimizer on small parameters: whether a step can be taken, what its state takes, and whether
its updates of parts of a parameter are those of the whole. It prints the answer as JSON, the last line of its
output. Called by `orchestra.config.plugin_facts`, so that the commands import neither torch nor a plug-in.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.schema import Config, OptimConfig
from orchestra.errors import ConfigError, OrchestraError
from orchestra.optim.adamw import Trained
from orchestra.optim.plugged import PluggedOptimizer, gather_nothing
from orchestra.plugins import Plugin, load, named_in, one_line, option_problems
from orchestra.run.config_file import read_config
from orchestra.train.watch.callbacks import made, state_of

# The parameters that an optimizer is tried on: a block's matrix, whose elements two ranks share in the middle
# of a row, and a gain.
_MATRIX, _GAIN = ("layers.0.attention.q_proj.weight", (6, 10)), ("layers.0.input_norm.weight", (7,))
_CUT = 27
# A parameter, and which of its elements [start, stop) a rank has.
_Held = tuple[tuple[str, tuple[int, ...]], int, int]
_STEPS = 3
# Of the differences between a whole parameter and its parts: far above rounding, far below an update.
_RTOL, _ATOL = 1e-4, 1e-6


@dataclasses.dataclass(frozen=True)
class PluginFinding:
    """What was found. `state_bytes`: of the optimizer, for each element of a block's matrix. `parts_problem`:
    why it cannot be given parts of parameters; `gathers`: it puts whole ones together by itself.
    """

    problems: list[str] = dataclasses.field(default_factory=list)
    state_bytes: float | None = None
    parts_problem: str | None = None
    gathers: bool = False


def look_at(config: Config) -> PluginFinding:
    """Return what is wrong with the plug-ins of a configuration, and what the optimizer is like."""
    problems: list[str] = []
    finding = PluginFinding()
    for plugin in named_in(config):
        try:
            called = load(plugin)
        except ConfigError as error:
            problems += error.problems
            continue
        wrong = list(option_problems(plugin, called))
        problems += wrong
        if wrong:
            continue
        if plugin.key == "optim.target":
            finding = _tried(plugin, called, config.optim)
        elif plugin.key == "train.loss":
            problems += _loss_problems(plugin, called)
        elif plugin.key == "train.callbacks":
            problems += _callback_problems(plugin, called)
    return dataclasses.replace(finding, problems=[*problems, *finding.problems])


def _tried(plugin: Plugin, called: Callable[..., Any], optim: OptimConfig) -> PluginFinding:
    def make(params: Any, lr: float) -> Any:
        return called(params, lr=lr, **plugin.options)

    try:
        whole, optimizer = _updated([[(_MATRIX, 0, 60), (_GAIN, 0, 7)]], make, optim, is_whole=True)
    except ConfigError as error:
        return PluginFinding(list(error.problems))
    except Exception as error:  # noqa: BLE001  a plug-in may raise anything
        return PluginFinding(
            [f"{plugin.key}={plugin.target}: a step on small parameters failed: {one_line(error)}"]
        )
    matrix = next(iter(optimizer.state))
    state_bytes = sum(tensor.nbytes for tensor in optimizer.state[matrix].values() if tensor.dim())
    found = PluginFinding(state_bytes=state_bytes / matrix.numel())
    if hasattr(optimizer.torch_optimizer, "gather"):
        return dataclasses.replace(found, gathers=True)
    parts: list[list[_Held]] = [[(_MATRIX, 0, _CUT)], [(_MATRIX, _CUT, 60), (_GAIN, 0, 7)]]
    try:
        parted, _ = _updated(parts, make, optim, is_whole=False)
    except Exception as error:  # noqa: BLE001
        return dataclasses.replace(found, parts_problem=f"of a part of one it makes {one_line(error)}")
    pairs = zip(whole, parted, strict=True)
    if not all(torch.allclose(ours, theirs, rtol=_RTOL, atol=_ATOL) for ours, theirs in pairs):
        return dataclasses.replace(
            found, parts_problem="its updates of the parts of one differ from the whole's"
        )
    return found


def _loss_problems(plugin: Plugin, called: Callable[..., Any]) -> list[str]:
    said = f"{plugin.key}={plugin.target}"
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0)).requires_grad_()
    try:
        losses = called(logits, torch.arange(4), **plugin.options)
        if not isinstance(losses, Tensor) or losses.shape != (4,):
            found = list(losses.shape) if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            return [f"{said} returned {found} for logits of [4, 7]; return one loss for each token, [4]"]
        torch.autograd.grad(losses.sum(), logits)
    except Exception as error:  # noqa: BLE001  a plug-in may raise anything
        return [f"{said}: the loss of four tokens failed: {one_line(error)}"]
    return []


def _callback_problems(plugin: Plugin, called: Callable[..., Any]) -> list[str]:
    try:
        named = made(plugin.target, lambda: called(**plugin.options))
        if hasattr(named.callback, "state_dict"):
            state_of(named)
    except OrchestraError as error:
        return [str(error)]
    except Exception as error:  # noqa: BLE001
        return [f"{plugin.key}={plugin.target}: making it failed: {one_line(error)}"]
    return []


def _updated(
    ranks: Sequence[Sequence[_Held]],
    make: Callable[..., Any],
    optim: OptimConfig,
    *,
    is_whole: bool,
) -> tuple[list[Tensor], PluggedOptimizer]:
    """Take some steps with an optimizer for each rank's elements; return the parameters, and the last one."""
    random = torch.Generator().manual_seed(0)
    wholes = {name: torch.randn(shape, generator=random) for name, shape in (_MATRIX, _GAIN)}
    settings = dataclasses.replace(optim, lr=0.01)
    optimizers = []
    for held in ranks:
        trained = []
        for (name, shape), start, stop in held:
            part = wholes[name].view(-1)[start:stop]
            master = part.view(shape) if stop - start == wholes[name].numel() else part
            trained.append(Trained(name, wholes[name], master, start, stop))
        optimizer = PluggedOptimizer(trained, settings, make, is_whole=is_whole)
        optimizer.prepare(lambda _: gather_nothing, lambda value: [value])
        optimizers.append((optimizer, trained))
    for step in range(1, _STEPS + 1):
        gradients = {name: torch.randn(shape, generator=random) for name, shape in (_MATRIX, _GAIN)}
        for optimizer, trained in optimizers:
            optimizer.begin_step(step, torch.ones(()), torch.zeros((), dtype=torch.bool))
            parts = [
                gradients[item.name].view(-1)[item.start : item.stop].clone().view(item.master.shape)
                for item in trained
            ]
            optimizer.update(trained, parts, [item.master for item in trained])
    return list(wholes.values()), optimizers[-1][0]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dataclasses.asdict(look_at(read_config(Path(sys.argv[1]))))) + "\n")
