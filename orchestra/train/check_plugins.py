"""Looks at the plug-ins of a configuration before anything starts, in a process of its own.

`python -m orchestra.train.check_plugins CONFIG.yaml` imports each, compares its options with its signature,
and tries the optimizer on small parameters: whether a step can be taken, what its state takes, and whether
its updates of parts of a parameter are those of the whole. Of a source of data it reads samples, of a layer
it takes the passes without values. It prints the answer as JSON in a line of its own. Called by
`orchestra.config.plugin_facts`, so that the commands import neither torch nor a plug-in.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from conf.schema import Config, Family, OptimConfig
from orchestra.data.plugged_source import PluggedSamples, samples_of
from orchestra.errors import ConfigError, DataError, OrchestraError
from orchestra.model.transformer import MakeBlock, initial_normal_of
from orchestra.optim.adamw import Trained
from orchestra.optim.plugged import PluggedOptimizer, gather_nothing
from orchestra.plugins import ANSWER, Plugin, load, named_in, one_line, option_problems
from orchestra.precision.policies import policy
from orchestra.run.config_file import read_config
from orchestra.sizes.flops import head_dim
from orchestra.train.build import make_block
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
    why it cannot be given parts of parameters, and `apart_problem` why not some of the parameters alone;
    `gathers`: it puts whole ones together by itself.
    `vocabularies`: of sources of data, by their keys, and `separators`, of those that name the token which
    ends each document; `identity`: which data the training's source has.
    `block_parameters`: of all layers together.
    """

    problems: list[str] = dataclasses.field(default_factory=list)
    state_bytes: float | None = None
    parts_problem: str | None = None
    apart_problem: str | None = None
    gathers: bool = False
    vocabularies: dict[str, int] = dataclasses.field(default_factory=dict)
    separators: dict[str, int] = dataclasses.field(default_factory=dict)
    identity: str | None = None
    block_parameters: int | None = None


def look_at(config: Config) -> PluginFinding:
    """Return what is wrong with the plug-ins of a configuration, and what the optimizer is like."""
    problems: list[str] = []
    finding = PluginFinding()
    opened: dict[str, PluggedSamples] = {}
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
        if plugin.key == "model.block":
            problems += _layer_problems(plugin, config)
        elif plugin.key == "optim.target":
            finding = _tried(plugin, called, config.optim)
        elif plugin.key.endswith(".source"):
            try:
                opened[plugin.key] = _read(plugin, config.train.seq_len)
            except OrchestraError as error:
                problems.append(str(error))
        elif plugin.key == "train.loss":
            problems += _loss_problems(plugin, called)
        elif plugin.key == "train.callbacks":
            problems += _callback_problems(plugin, called)
    return dataclasses.replace(
        finding,
        problems=[*problems, *finding.problems],
        vocabularies={key: samples.vocab_size for key, samples in opened.items()},
        separators={
            key: samples.separator_id for key, samples in opened.items() if samples.separator_id is not None
        },
        identity=opened["data.source"].identity if "data.source" in opened else None,
        block_parameters=None if problems or config.model.block is None else _num_parameters(config),
    )


def _layer_problems(plugin: Plugin, config: Config) -> list[str]:
    """Make all layers on the meta device, as ranks do, and try the first one of each kind and the last one
    on tensors that have shapes and no values.
    """
    said, num_layers = f"{plugin.key}={plugin.target}", config.model.num_hidden_layers
    make, known = make_block(config), set[Tensor]()
    # By what a layer consists of: a model may have several kinds, in any order.
    first_of: dict[Any, int] = {}
    try:
        for number in range(num_layers):
            with torch.device("meta"):
                layer = make(config.model, number)
            if wrong := _wrong_tensors(layer, known):
                return [f"{said}: layer {number} {wrong}"]
            known |= set(layer.parameters())
            parts = [(name, type(part)) for name, part in layer.named_modules()]
            shapes = [(name, parameter.shape) for name, parameter in layer.named_parameters()]
            first_of.setdefault((*parts, *shapes), number)
    except Exception as error:  # noqa: BLE001  a plug-in may raise anything
        return [f"{said}: making a layer failed: {one_line(error)}"]
    for number in sorted({*first_of.values(), num_layers - 1}):
        try:
            wrong = _wrong_passes(make, number, config)
        except Exception as error:  # noqa: BLE001
            wrong = f"failed in its forward or backward pass: {one_line(error)}"
        if wrong is not None:
            return [f"{said}: layer {number} {wrong}"]
    return []


def _wrong_tensors(layer: Any, of_others: set[Tensor]) -> str | None:
    """Return what of a layer cannot be trained, divided over ranks and saved as other layers are."""
    if not isinstance(layer, nn.Module):
        return f"is a {type(layer).__name__}; return a torch.nn.Module"
    if not any(True for _ in layer.parameters()):
        return "has no parameters; a layer without any is not needed"
    for name, _ in layer.named_buffers():
        return f"has the buffer {name}, which nobody fills or saves; make it in forward, or a parameter of it"
    for name, parameter in layer.named_parameters():
        if parameter in of_others:
            return f"shares the parameter {name} with another layer; each layer needs its own"
        if not parameter.dim():
            return f"has the parameter {name} without dims; give it the shape [1]"
        if not parameter.is_floating_point() or not parameter.requires_grad:
            return f"has the parameter {name}, which is not trained; all parameters are"
        mean, std = initial_normal_of(layer, name) or (0.0, 0.0)
        if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
            return f"gives {name} the mean {mean} and the standard deviation {std}; return two such numbers"
    return None


def _wrong_passes(make: MakeBlock, number: int, config: Config) -> str | None:
    """Return what is wrong with a layer's passes over two samples, in the precision of its products."""
    model, sequence = config.model, config.train.seq_len
    dtype = policy(config.precision).parameter
    with FakeTensorMode():
        with torch.device("meta"):
            layer = make(model, number)
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype))
        rotary = None
        if model.family is Family.llama:
            width = head_dim(model)
            rotary = tuple(torch.empty(sequence, 1, size, dtype=dtype) for size in (width, width // 2))
        x_BSE = torch.empty(2, sequence, model.hidden_size, dtype=dtype, requires_grad=True)
        out = layer(x_BSE, rotary, None)
        if not isinstance(out, Tensor) or out.shape != x_BSE.shape or out.dtype is not dtype:
            found = f"{list(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
            return f"returned {found} for {list(x_BSE.shape)} of {dtype}; return the like"
        names, parameters = zip(*layer.named_parameters(), strict=True)
        grads = torch.autograd.grad(out.sum(), [x_BSE, *parameters], allow_unused=True)
    unused = [name for name, grad in zip(("its input", *names), grads, strict=True) if grad is None]
    return f"does not use {', '.join(unused)}; leave out what is not trained" if unused else None


def _num_parameters(config: Config) -> int:
    with torch.device("meta"):
        layers = [
            make_block(config)(config.model, number) for number in range(config.model.num_hidden_layers)
        ]
    return sum(parameter.numel() for layer in layers for parameter in layer.parameters())


def _read(plugin: Plugin, seq_len: int) -> PluggedSamples:
    """Read some samples, the first one twice; return their source. Raises ConfigError, DataError."""
    samples = samples_of(plugin, seq_len)
    out = np.empty((3, seq_len + 1), dtype=np.int64)
    for row, index in enumerate((0, samples.num_samples - 1, 0)):
        samples.read(index, out[row])
    if (out[0] != out[2]).any():
        raise DataError(
            f"{plugin.key}={plugin.target}: sample(0) returned other tokens when it was asked again; an "
            "index has to mean the same sample for ever"
        )
    return samples


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
    if wrong := _goes_on_otherwise(whole, make, optim):
        return PluginFinding([f"{plugin.key}={plugin.target}: {wrong}"])
    matrix = next(iter(optimizer.state))
    state_bytes = sum(tensor.nbytes for tensor in optimizer.state[matrix].values() if tensor.dim())

    def differs(ranks: list[list[_Held]], *, is_whole: bool) -> str | None:
        """Return how it fares where ranks share the parameters like this; None: as with all of them."""
        try:
            shared, _ = _updated(ranks, make, optim, is_whole=is_whole)
        except Exception as error:  # noqa: BLE001
            return f"of such it makes {one_line(error)}"
        pairs = zip(whole, shared, strict=True)
        is_same = all(torch.allclose(ours, theirs, rtol=_RTOL, atol=_ATOL) for ours, theirs in pairs)
        return None if is_same else "its updates differ from those with all of them"

    apart = differs([[(_MATRIX, 0, 60)], [(_GAIN, 0, 7)]], is_whole=True)
    found = PluginFinding(state_bytes=state_bytes / matrix.numel(), apart_problem=apart)
    if hasattr(optimizer.torch_optimizer, "gather"):
        return dataclasses.replace(found, gathers=True)
    parts = differs([[(_MATRIX, 0, _CUT)], [(_MATRIX, _CUT, 60), (_GAIN, 0, 7)]], is_whole=False)
    return dataclasses.replace(found, parts_problem=parts)


def _goes_on_otherwise(whole: list[Tensor], make: Callable[..., Any], optim: OptimConfig) -> str | None:
    """Return what is wrong with an optimizer that is made anew before the last step, from what checkpoints
    hold of it; None where it goes on as it did when it was left alone.
    """
    if not all(bool(tensor.isfinite().all()) for tensor in whole):
        return f"after {_STEPS} steps small parameters were not finite"
    try:
        again, _ = _updated([[(_MATRIX, 0, 60), (_GAIN, 0, 7)]], make, optim, is_whole=True, is_resumed=True)
    except Exception as error:  # noqa: BLE001  a plug-in may raise anything
        return f"going on from its state failed: {one_line(error)}"
    pairs = zip(whole, again, strict=True)
    if all(torch.allclose(ours, theirs, rtol=_RTOL, atol=_ATOL) for ours, theirs in pairs):
        return None
    return (
        "made anew from its state it takes another step than the one that went on; keep what it remembers in "
        "state[parameter], or as numbers in its groups: nothing else is saved"
    )


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
    is_resumed: bool = False,
) -> tuple[list[Tensor], PluggedOptimizer]:
    """Take some steps with an optimizer for each rank's elements; return the parameters, and the last one.

    `is_resumed`: before the last step each is made anew, as in an attempt that restores it.
    """
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
        optimizers.append((_prepared(trained, settings, make, is_whole=is_whole), trained))
    for step in range(1, _STEPS + 1):
        if is_resumed and step == _STEPS:
            optimizers = [
                (_restored(optimizer, _prepared(trained, settings, make, is_whole=is_whole)), trained)
                for optimizer, trained in optimizers
            ]
        # What it draws is restored too.
        torch.manual_seed(step)
        gradients = {name: torch.randn(shape, generator=random) for name, shape in (_MATRIX, _GAIN)}
        for optimizer, trained in optimizers:
            optimizer.begin_step(step, torch.ones(()), torch.zeros((), dtype=torch.bool))
            parts = [
                gradients[item.name].view(-1)[item.start : item.stop].clone().view(item.master.shape)
                for item in trained
            ]
            optimizer.update(trained, parts, [item.master for item in trained])
    return list(wholes.values()), optimizers[-1][0]


def _prepared(
    trained: Sequence[Trained], optim: OptimConfig, make: Callable[..., Any], *, is_whole: bool
) -> PluggedOptimizer:
    optimizer = PluggedOptimizer(trained, optim, make, is_whole=is_whole)
    optimizer.prepare(lambda _: gather_nothing, lambda value: [value])
    return optimizer


def _restored(before: PluggedOptimizer, anew: PluggedOptimizer) -> PluggedOptimizer:
    """Give a new optimizer what a checkpoint holds of the one before; return it."""
    for master, state in before.state.items():
        for name, value in state.items():
            anew.state[master][name].copy_(value)
    anew.num_updates = before.num_updates
    anew.restored(json.loads(json.dumps(before.values())))
    return anew


if __name__ == "__main__":
    answer = json.dumps(dataclasses.asdict(look_at(read_config(Path(sys.argv[1])))))
    # A line of its own, whatever was printed without an end of line.
    sys.stdout.write(f"\n{ANSWER}{answer}\n")
