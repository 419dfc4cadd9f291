"""A module and an optimizer as shards by name, and an optimizer's state made anew from what a checkpoint has.

model.<name>                 as in `state_dict`: parameters and persistent buffers, tied ones once
optimizer.<key>.<name>       the optimizer's state of a parameter, by the parameter's name, whatever its index

What is no tensor (param_groups' values, numbers in the state) is JSON: `optimizer_document`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as SplitDim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from checkpointing.checkpoint_errors import MismatchError
from checkpointing.manifest import Manifest
from checkpointing.shards import Shard, torch_dtype, whole

# How an optimizer computes, not what: those of the optimizer that goes on count.
HOW = ("foreach", "fused", "capturable", "differentiable")
# Wrappers in a module's place are in the names: torch.compile's, and that of recomputed activations where its
# own hook has not taken it out.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_MAX_LISTED = 5


def shards_of(name: str, tensor: Tensor) -> list[Shard]:
    """Return this rank's part of a tensor, none where it has none; a tensor that is no DTensor is a replica.

    Raises MismatchError for a DTensor that is neither replicated nor cut into equal parts (the last ones
    shorter), and for one without memory.
    """
    if tensor.is_meta:
        raise MismatchError(f"{name} is on the meta device: call to_empty or load the model first")
    if not isinstance(tensor, DTensor):
        return [whole(name, tensor)]
    place = tensor.device_mesh.get_coordinate()
    if place is None:
        return []
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        # Its subclasses cut in other orders.
        if type(placement) is not SplitDim:
            raise MismatchError(
                f"{name} has the placements {tensor.placements}: only Shard and Replicate are supported; "
                "redistribute it to those before it is saved, or hand in its parts as shards (Checkpointer)"
            )
        dim = placement.dim % tensor.dim()
        each = -(-sizes[dim] // tensor.device_mesh.size(axis))
        begin = min(place[axis] * each, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(each, sizes[dim] - begin)
    with torch.no_grad():
        local = tensor.to_local()
    if tensor.numel() and 0 in sizes and local.numel() == 0:
        return []
    if list(local.shape) != sizes:
        raise MismatchError(f"{name}: this rank has the part {list(local.shape)}, expected is {sizes}")
    return [Shard(name, tuple(tensor.shape), tuple(offsets), local)]


def plain_name(name: str) -> str:
    """Return a tensor's name without the wrappers around its modules, as `state_dict` spells it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class NamedState:
    """The tensors of a model and its optimizer by name. The shards are the live tensors."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """`model` may be wrapped by DDP or torch.compile, and have FSDP2 units."""
        # A compiled DDP, whose names have both wrappers, is one too.
        inner = getattr(model, _WRAPPERS[0].rstrip("."), model)
        self._model: nn.Module = inner.module if isinstance(inner, DistributedDataParallel) else inner
        self._optimizer = optimizer

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the module's tensors by name, as they are between steps. Raises MismatchError."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                # After a forward without a backward the whole parameters stand in the sharded ones' place.
                module.reshard()
        live = {id(tensor) for tensor in chain(self._model.parameters(), self._model.buffers())}
        tensors: dict[int, tuple[str, Tensor]] = {}
        for key, value in self._model.state_dict(keep_vars=True).items():
            if not isinstance(value, Tensor):
                raise MismatchError(
                    f"model.{key} is a {type(value).__name__}: only tensors are saved; put it into `extra`"
                )
            if id(value) not in live:
                raise MismatchError(
                    f"model.{key} is a copy that the module's state_dict makes, and no restore could fill "
                    "what it is of; put it into a buffer, or into `extra`"
                )
            tensors.setdefault(id(value), (plain_name(key), value))
        return dict(tensors.values())

    def saved(self, *, is_first: bool) -> list[Shard]:
        """Return the shards to save; buffers, which may differ between replicas, are those of the rank that
        `is_first`, as in DDP.
        """
        shards = []
        for name, tensor in self.model_tensors().items():
            if is_first or isinstance(tensor, nn.Parameter | DTensor):
                shards += shards_of(f"model.{name}", tensor)
        for name, parameter in self._trained():
            for key, value in self._state_of(parameter).items():
                if isinstance(value, Tensor):
                    shards += _state_shards(f"optimizer.{_checked(key)}.{name}", value, parameter)
        return shards

    def optimizer_document(self) -> dict[str, Any] | None:
        """Return what the optimizer has beside tensors, as JSON; None where there is none."""
        if self._optimizer is None:
            return None
        groups = [
            {"names": names, "values": {key: _plain(key, group[key]) for key in _value_keys(group)}}
            for names, group in self._groups()
        ]
        numbers = {
            name: {key: _plain(key, value) for key, value in state.items() if not isinstance(value, Tensor)}
            for name, parameter in self._trained()
            if (state := self._state_of(parameter))
        }
        return {"groups": groups, "values": {name: values for name, values in numbers.items() if values}}

    def wanted(self, manifest: Manifest) -> tuple[list[Shard], dict[Tensor, dict[str, Any]]]:
        """Return the shards to fill, and the optimizer's new state of each parameter, whose tensors are among
        those. Raises MismatchError where the checkpoint is that of another model or optimizer.
        """
        tensors = self.model_tensors()
        # Others write a tied tensor under all of its names.
        aliases = set(map(plain_name, self._model.state_dict(keep_vars=True))).difference(tensors)
        saved = _names_of(manifest, "model.") - aliases
        _refuse_others("model", tensors, saved, "the model that was saved")
        shards = [shard for name, tensor in tensors.items() for shard in shards_of(f"model.{name}", tensor)]
        if self._optimizer is None:
            return shards, {}
        document = _document_of(manifest)
        self._refuse_other_groups(document)
        parameters = dict(self._trained())
        state: dict[Tensor, dict[str, Any]] = {}
        for name, values in document["values"].items():
            state.setdefault(parameters[name], {}).update(values)
        for entry, tensor in manifest.tensors.items():
            kind, _, rest = entry.partition(".")
            key, _, name = rest.partition(".")
            if kind != "optimizer":
                continue
            parameter = parameters[name]
            made = _made(parameter, tensor.shape, torch_dtype(tensor.dtype))
            state.setdefault(parameter, {})[key] = made
            shards += _state_shards(entry, made, parameter)
        return shards, state

    def take_back(self, manifest: Manifest, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Hand the optimizer the state that `wanted` returned, filled, and its groups' values."""
        if self._optimizer is None:
            return
        values_of = {frozenset(g["names"]): g["values"] for g in _document_of(manifest)["groups"]}
        content = self._optimizer.state_dict()
        content["state"], index = {}, 0
        for packed, (names, group) in zip(content["param_groups"], self._groups(), strict=True):
            for key, value in values_of[frozenset(names)].items():
                packed[key] = _like(group.get(key), value)
            for parameter in group["params"]:
                if parameter in state:
                    content["state"][index] = dict(state[parameter])
                index += 1
        self._optimizer.load_state_dict(content)
        for parameter, values in state.items():
            held = self._optimizer.state[parameter]
            for key, value in values.items():
                # torch rounds to the parameter's dtype, whatever the state was kept in.
                if isinstance(value, Tensor) and held[key].dtype != value.dtype:
                    held[key] = value.to(held[key].device)

    def _groups(self) -> Iterator[tuple[list[str], dict[str, Any]]]:
        """Yield the optimizer's groups with their parameters' names. Raises MismatchError."""
        assert self._optimizer is not None
        names = {id(tensor): name for name, tensor in self.model_tensors().items()}
        for number, group in enumerate(self._optimizer.param_groups):
            strangers = [parameter for parameter in group["params"] if id(parameter) not in names]
            if strangers:
                raise MismatchError(
                    f"group {number} of the optimizer has {len(strangers)} parameters that are not the "
                    f"model's, the first of shape {list(strangers[0].shape)}: make the optimizer from the "
                    "parameters of this model, after fully_shard or to(device)"
                )
            yield [names[id(parameter)] for parameter in group["params"]], group

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        if self._optimizer is not None:
            for names, group in self._groups():
                yield from zip(names, group["params"], strict=True)

    def _state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        assert self._optimizer is not None
        # Asked so that none is made: it is a defaultdict.
        state: Mapping[str, Any] = self._optimizer.state.get(parameter, {})
        return state

    def _refuse_other_groups(self, document: Mapping[str, Any]) -> None:
        here = [names for names, _ in self._groups()]
        saved = [group["names"] for group in document["groups"]]
        of_groups = "make the optimizer as the one that was saved"
        _refuse_others("optimizer", chain(*here), {*chain(*saved)}, of_groups)
        if {frozenset(names) for names in here} != {frozenset(names) for names in saved}:
            raise MismatchError(
                f"the checkpoint's optimizer has {len(saved)} groups of {[*map(len, saved)]} parameters, "
                f"this one {len(here)} of {[*map(len, here)]}, or others in them: group them as was saved"
            )


def _document_of(manifest: Manifest) -> Mapping[str, Any]:
    document = manifest.state.get("optimizer")
    if not isinstance(document, Mapping) or not {"groups", "values"} <= document.keys():
        raise MismatchError(
            f"the checkpoint of step {manifest.step} has no optimizer of a torch loop: restore the model "
            "alone (optimizer=None)"
        )
    return document


def _names_of(manifest: Manifest, prefix: str) -> set[str]:
    return {name.removeprefix(prefix) for name in manifest.tensors if name.startswith(prefix)}


def _refuse_others(what: str, names: Iterable[str], saved: set[str], advice: str) -> None:
    """Raise MismatchError where the names here are not those that were saved."""
    here = set(names)
    lacking, surplus = sorted(saved - here), sorted(here - saved)
    if lacking or surplus:
        listed = "; ".join(
            f"{len(found)} {words}: {', '.join(found[:_MAX_LISTED])}"
            for found, words in ((lacking, "only in the checkpoint"), (surplus, "only here"))
            if found
        )
        raise MismatchError(f"the checkpoint is that of another {what} ({listed}): use {advice}")


def _state_shards(name: str, value: Tensor, parameter: Tensor) -> list[Shard]:
    is_cut = isinstance(parameter, DTensor) and not all(
        isinstance(placement, Replicate) for placement in parameter.placements
    )
    if is_cut and not isinstance(value, DTensor) and value.numel() != 1:
        raise MismatchError(
            f"{name}: a plain tensor of {list(value.shape)}, whereas the parameter is a DTensor: which part "
            "it is cannot be told; use an optimizer that makes its state by zeros_like"
        )
    return shards_of(name, value)


def _made(parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory for a state's tensor: placed as the parameter where it has its shape, else whole."""
    if tuple(parameter.shape) == tuple(shape):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    # Counters stay on the host, as torch keeps them; where not, torch moves them.
    device = parameter.device if len(shape) else torch.device("cpu")
    return torch.zeros(shape, dtype=dtype, device=device)


def _value_keys(group: Mapping[str, Any]) -> list[str]:
    return [key for key in group if key != "params" and key not in HOW]


def _checked(key: Any) -> str:
    if not isinstance(key, str) or "." in key or not key:
        raise MismatchError(f"the optimizer's state has the key {key!r}: expected is a word without a dot")
    return key


def _plain(key: str, value: Any) -> Any:
    """Return a value as JSON. Raises MismatchError."""
    plain = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    try:
        json.dumps(plain, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MismatchError(f"the optimizer's {key} is {value!r}: only JSON is saved ({error})") from error
    return plain


def _like(current: Any, value: Any) -> Any:
    """Return a value from JSON as the kind that the optimizer has there."""
    if isinstance(current, Tensor):
        return torch.full_like(current, value)
    return tuple(value) if isinstance(current, tuple) else value
