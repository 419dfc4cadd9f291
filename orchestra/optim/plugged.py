"""An optimizer of torch's interface (`optim.target`) in the place of our own AdamW.

It is given the fp32 masters of this rank in two groups: `matrices` (parameters of two or more dims) and
`vectors`, whose `weight_decay` is 0. A master that this rank has as a whole has the parameter's shape, a
range of one has one dim. Gradients come in fp32, clipped; a bad step does not come at all.

The state that it makes is saved by name, so it has to be known before anything is restored. One step with
gradients of zero, which is undone, tells what it consists of: tensors shaped like their parameter, which are
cut and put together as the parameters are, and numbers. From then on each lies in memory of ours: whoever
saves or copies the state reads the same tensors all along.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from conf.schema import OptimConfig
from orchestra.errors import ConfigError, TrainingError
from orchestra.model.initial import is_fake
from orchestra.optim.adamw import Trained

# What stands in a group of parameters and is no value of the optimizer's.
_OWN_KEYS = ("params", "param_names", "kind", "lr", "initial_lr")
# The kinds of groups, by whether they have matrices.
MATRICES, VECTORS = "matrices", "vectors"


@dataclass(frozen=True)
class WholeMatrix:
    """A whole parameter-shaped tensor, and how this rank's part of something of its shape is taken."""

    parameter: Tensor
    whole: Tensor
    mine: Callable[[Tensor], Tensor]


# Puts together, of tensors shaped like parameters of this rank, those of the whole parameters. *Collective*:
# all ranks go through all of it. An optimizer that needs whole matrices has an attribute `gather` of this
# type, which is set before its first step, and `gathered_names`, the names of those on this rank.
Gather = Callable[[Mapping[str, tuple[Tensor, Tensor]]], Iterator[WholeMatrix]]


def gather_nothing(pieces: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[WholeMatrix]:
    """Yield what is whole already: parameters and tensors of one rank."""
    for parameter, piece in pieces.values():
        yield WholeMatrix(parameter, piece, lambda of_whole: of_whole)


class Optimizer(Protocol):
    """What a training step, and whoever saves its state, knows of an optimizer."""

    lr: float
    num_updates: int
    # Whether all masters come in one call of `update`.
    takes_all_at_once: bool

    @property
    def state(self) -> Mapping[Tensor, Mapping[str, Tensor]]:
        """By master: the tensors of its state, those of its shape and numbers (no dims)."""

    @property
    def kinds(self) -> Mapping[str, Mapping[str, tuple[int, ...] | None]]:
        """For every parameter of the model, on all ranks alike: the state's names, and the shape of what is
        not shaped like the parameter.
        """

    def begin_step(
        self, step: int, grad_norm: Tensor, is_bad: Tensor, loss_scale: Tensor | None = None
    ) -> None:
        """As `AdamW.begin_step`."""

    def update(
        self, trained: Sequence[Trained], gradients: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> None:
        """As `AdamW.update`."""

    def values(self) -> list[dict[str, Any]]:
        """Return the values of its groups that it changed, as JSON."""

    def restored(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the state that was filled, the count of updates, and those values."""


class PluggedOptimizer:
    """Any torch.optim.Optimizer over this rank's masters. `make` is called with groups and the rate.

    `is_whole`: this rank has all parameters as wholes; their state may then have any shape. `gather` is for
    optimizers that ask for whole matrices. Raises ConfigError where it is no optimizer, or has a state that
    cannot be saved.
    """

    takes_all_at_once = True

    def __init__(
        self,
        trained: Sequence[Trained],
        optim: OptimConfig,
        make: Callable[..., Any],
        *,
        is_whole: bool = True,
        fake_bytes: Callable[[str], float] = lambda _: 8.0,
    ) -> None:
        self.lr = optim.lr
        self.num_updates = 0
        self.kinds: Mapping[str, Mapping[str, tuple[int, ...] | None]] = {}
        self._said, self._clip_norm, self._is_whole = (
            f"optim.target={optim.target}",
            optim.clip_norm,
            is_whole,
        )
        self._held = [item for item in trained if item.master.numel()]
        self.state: dict[Tensor, dict[str, Tensor]] = {item.master: {} for item in trained}
        self._is_dry = is_fake(trained[0].master)
        if self._is_dry:
            # What is counted, without values, is the state and the gradients in fp32.
            for item in self._held:
                size = round(item.master.numel() * fake_bytes(item.name) / 4)
                self.state[item.master] = {"state": item.master.new_empty(size)}
            return
        self._parameters = {item.name: nn.Parameter(item.master) for item in self._held}
        self._is_left_out, self._divisor = False, torch.ones(())
        self.torch_optimizer = make(self._groups(), lr=optim.lr)
        self._check()
        groups = self.torch_optimizer.param_groups
        # Groups may have rates of their own: shares of optim.lr, which the schedule moves.
        self._shares = [group["lr"] / optim.lr if "lr" in group else 1.0 for group in groups]
        self._given = copy.deepcopy(self._group_values())

    def _groups(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = []
        for kind in (MATRICES, VECTORS):
            items = [item for item in self._held if (item.parameter.dim() >= 2) is (kind == MATRICES)]
            group: dict[str, Any] = {"params": [self._parameters[item.name] for item in items]}
            groups.append({**group, "param_names": [item.name for item in items], "kind": kind})
        groups[1]["weight_decay"] = 0.0
        return groups

    def _check(self) -> None:
        made = self.torch_optimizer
        if not isinstance(made, torch.optim.Optimizer):
            raise ConfigError(f"{self._said} returned a {type(made).__name__}, no torch.optim.Optimizer")
        taken = {id(parameter) for group in made.param_groups for parameter in group["params"]}
        for name, parameter in self._parameters.items():
            if id(parameter) not in taken:
                raise ConfigError(
                    f"{self._said} leaves out {name}: it has to take all parameters it is given"
                )

    def prepare(self, gather: Callable[[set[str]], Gather], agree: Callable[[Any], list[Any]]) -> None:
        """Find out what the state consists of, and make its memory. *Collective*.

        `gather` makes what gathers parameters by their names on any rank, `agree` returns the ranks' values
        of something.
        """
        made = self.torch_optimizer
        if hasattr(made, "gather"):
            names = agree(sorted(made.gathered_names))
            made.gather = gather({name for of_rank in names for name in of_rank})
        masters = [item.master.clone() for item in self._held]
        eager = {parameter: copy.deepcopy(state) for parameter, state in made.state.items()}
        for parameter in self._parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        self._step()
        own: dict[str, dict[str, tuple[int, ...] | None]] = {}
        for item, before in zip(self._held, masters, strict=True):
            self._take_back_memory(item)
            item.master.copy_(before)
            state = made.state[self._parameters[item.name]]
            own[item.name] = {name: self._kind(item, name, value) for name, value in state.items()}
            own[item.name] = {name: kind for name, kind in own[item.name].items() if kind != _NOTHING}
            self.state[item.master] = {name: _memory_of(state[name]) for name in own[item.name]}
        # Of a number what type it has; a state made again has the same.
        self._examples = {item.name: dict(made.state[self._parameters[item.name]]) for item in self._held}
        for item in self._held:
            for name, value in self._examples[item.name].items():
                self._examples[item.name][name] = None if isinstance(value, Tensor) else value
        made.state.clear()
        made.state.update(eager)
        self._set_group_values(self._given)
        for parameter, state in eager.items():
            for name, value in state.items():
                item = next(item for item in self._held if self._parameters[item.name] is parameter)
                if name in self.state[item.master]:
                    _write(self.state[item.master][name], value)
        merged: dict[str, Mapping[str, tuple[int, ...] | None]] = {}
        for of_rank in agree(own):
            # From JSON, which has lists.
            for name, kinds in of_rank.items():
                merged[name] = {each: None if kind is None else tuple(kind) for each, kind in kinds.items()}
        self.kinds = merged

    def _kind(self, item: Trained, name: str, value: Any) -> tuple[int, ...] | None:
        """Return None for what is shaped like the parameter, else the shape."""
        if isinstance(value, Tensor):
            if value.shape == item.master.shape and value.dim():
                return None
            if value.dim() == 0 or self._is_whole:
                return tuple(value.shape)
            raise ConfigError(
                f"{self._said}: its state {name} of {item.name} has the shape {list(value.shape)}, the "
                f"parameter {list(item.master.shape)}; parts of it belong to other ranks, and only state of "
                "the parameter's shape and numbers can be parted: use parallelism.zero=0, tp=1 and ep=1"
            )
        if value is None:
            return _NOTHING
        if isinstance(value, (bool, int, float)):
            return ()
        raise ConfigError(
            f"{self._said}: its state {name} of {item.name} is a {type(value).__name__}; only tensors and "
            "numbers can be saved"
        )

    @torch.no_grad()
    def begin_step(
        self, step: int, grad_norm: Tensor, is_bad: Tensor, loss_scale: Tensor | None = None
    ) -> None:
        """As `AdamW.begin_step`, but for the wait: whether a step is left out is read from the device."""
        del step
        if self._is_dry:
            return
        limit = torch.inf if self._clip_norm is None else self._clip_norm
        self._divisor = torch.clamp(grad_norm / limit, min=1.0)
        if loss_scale is not None:
            self._divisor = self._divisor * loss_scale
        self._is_left_out = bool(is_bad)

    @torch.no_grad()
    def update(
        self, trained: Sequence[Trained], gradients: Sequence[Tensor], parameters: Sequence[Tensor]
    ) -> None:
        """Take a step with all masters of this rank, and round them into the memory of their parameters."""
        if self._is_dry:
            _ = [gradient.float() for gradient in gradients]
            return
        if self._is_left_out:
            return
        for item, gradient in zip(trained, gradients, strict=True):
            if item.name in self._parameters:
                wide = gradient.float().div_(self._divisor)
                self._parameters[item.name].grad = wide.view(item.master.shape)
        for group, share in zip(self.torch_optimizer.param_groups, self._shares, strict=True):
            group["lr"] = self.lr * share
        self._step()
        self.num_updates += 1
        for item in self._held:
            self._take_back_memory(item)
            self._keep_state(item)
        for item, parameter in zip(trained, parameters, strict=True):
            if parameter.dtype is not item.master.dtype:
                parameter.copy_(item.master)

    def _step(self) -> None:
        with torch.enable_grad():
            self.torch_optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _take_back_memory(self, item: Trained) -> None:
        """Undo that the optimizer put other memory in the place of a parameter's."""
        parameter = self._parameters[item.name]
        if parameter.data_ptr() != item.master.data_ptr():
            item.master.copy_(parameter.detach())
            parameter.data = item.master

    def _keep_state(self, item: Trained) -> None:
        """Let the state lie in our memory, where it was made anew, and numbers stand there too."""
        kept = self.state[item.master]
        state = self.torch_optimizer.state[self._parameters[item.name]]
        for name, value in state.items():
            if value is None and name not in kept:
                continue
            if name not in kept or (isinstance(value, Tensor) and value.shape != kept[name].shape):
                raise TrainingError(
                    f"{self._said}: its state {name} of {item.name} came, or got its shape, after the first "
                    "step; make all state in the first one"
                )
            if value is kept[name]:
                continue
            _write(kept[name], value)
            if isinstance(value, Tensor):
                state[name] = kept[name]

    def _group_values(self) -> list[dict[str, Any]]:
        return [
            {
                name: value.item() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name not in _OWN_KEYS
                and (isinstance(value, (bool, int, float, str)) or _is_number_tensor(value))
            }
            for group in self.torch_optimizer.param_groups
        ]

    def _set_group_values(self, values: Sequence[Mapping[str, Any]]) -> None:
        for group, changed in zip(self.torch_optimizer.param_groups, values, strict=True):
            for name, value in changed.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value

    def values(self) -> list[dict[str, Any]]:
        """Return the values of its groups that it changed since it was made; none where it changed none."""
        changed = [
            {name: value for name, value in now.items() if given.get(name) != value}
            for now, given in zip(self._group_values(), self._given, strict=True)
        ]
        return changed if any(changed) else []

    def restored(self, values: Sequence[Mapping[str, Any]]) -> None:
        """Go on from the state that was filled; before the first update there is none."""
        if self.num_updates == 0:
            return
        for item in self._held:
            state = self.torch_optimizer.state[self._parameters[item.name]]
            for name, kept in self.state[item.master].items():
                example = self._examples[item.name].get(name)
                state[name] = kept if example is None else type(example)(kept.item())
        if values and len(values) != len(self._given):
            raise TrainingError(
                f"{self._said} has {len(self._given)} groups of parameters, the checkpoint's {len(values)}; "
                "use the optimizer and options that wrote it"
            )
        if values:
            self._set_group_values(values)


# The kind of a state that is None: it is not saved.
_NOTHING = (-1,)


def _is_number_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _memory_of(value: Any) -> Tensor:
    return torch.zeros_like(value) if isinstance(value, Tensor) else torch.zeros((), dtype=torch.float64)


def _write(kept: Tensor, value: Any) -> None:
    if isinstance(value, Tensor):
        kept.copy_(value)
    else:
        kept.fill_(value)
