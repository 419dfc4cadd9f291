"""Which of a DCP folder's names are the model, which the optimizer's state, and what else it says.

Loops lay their state out as they like: `{"model": …, "optimizer": …}`, both in one application object, or, as
torchtitan does, the model at the root and an optimizer whose state dict is flattened. The names tell: an
optimizer is where `param_groups` are, and its model is the dict that has the parameters' names.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from checkpointing.checkpoint_errors import DamagedError, MismatchError
from checkpointing.dcp.dcp_folder import DcpFolder
from checkpointing.torch_state.loop_values import PAIRS, encoded
from checkpointing.torch_state.named_tensors import HOW, plain_name

_GROUPS = re.compile(r"((?:.*?\.)?)param_groups\.")
_INDEXED = re.compile(r"(\d+)\.(\w+)")
_NUMBER = re.compile(r"0|[1-9]\d{0,17}")
_MAX_LISTED = 5


@dataclass(frozen=True)
class LoopState:
    """What a checkpoint of a loop is to hold: DCP's name of each tensor by ours, the optimizer's document,
    what else is JSON, and what is left out.
    """

    tensors: Mapping[str, str]
    optimizer: Mapping[str, Any] | None
    extra: Mapping[str, Any]
    left_out: Sequence[str]


@dataclass
class _Optimizer:
    """One optimizer by the names of its parameters: DCP's names of its state, and its groups."""

    state: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        return {*self.state, *(name for names, _ in self.groups for name in names)}


def loop_state(folder: DcpFolder, model_key: str | None = None, *, model_only: bool = False) -> LoopState:
    """Return the state of a loop that a folder holds.

    `model_key`: the key of the model's state dict; None: as the names tell. Raises MismatchError where they
    do not, or the optimizer's state cannot be brought to the names of parameters.
    """
    prefixes = _optimizer_prefixes(folder)
    optimizers = {} if model_only else {prefix: _optimizer(folder, prefix) for prefix in prefixes}
    parts = tuple(f"{prefix}{part}." for prefix in prefixes for part in ("param_groups", "state"))
    others = [name for name in folder.tensors if not name.startswith(parts or "\0")]
    prefix = _model_prefix(folder, others, optimizers.values(), model_key)
    model = {name: name.removeprefix(prefix) for name in others if name.startswith(prefix)}
    if model_key is None:
        model = {name: short for name, short in model.items() if folder.parents.get(name, "") == prefix}
    tensors: dict[str, str] = {}
    for name, short in model.items():
        if tensors.setdefault(f"model.{plain_name(short)}", name) != name:
            raise MismatchError(f"{name} and another tensor are both {plain_name(short)}; give --model KEY")
    mine = [
        one for one in optimizers.values() if one.names <= {plain_name(short) for short in model.values()}
    ]
    if optimizers and len(mine) != 1:
        raise MismatchError(_no_optimizer(optimizers, model.values()))
    for parameter, state in mine[0].state.items() if mine else ():
        for key, name in state.items():
            if name in folder.tensors:
                tensors[f"optimizer.{key}.{parameter}"] = name
    rest = [
        name for name in (*others, *folder.values) if name not in model and not name.startswith(parts or "\0")
    ]
    extra, left_out = _extra(folder, rest)
    if model_only or len(optimizers) > 1:
        left_out += [f"{prefix}* (an optimizer)" for prefix in prefixes if optimizers.get(prefix) not in mine]
    return LoopState(tensors, _document(folder, mine[0]) if mine else None, extra, left_out)


def steps_in(extra: Mapping[str, Any]) -> set[int]:
    """Return the whole numbers that are called `step` anywhere in a loop's own values."""
    found = set()
    for key, value in extra.items():
        if isinstance(value, Mapping):
            found |= steps_in(value)
        elif key == "step" and type(value) is int and value >= 0:
            found.add(value)
    return found


def _optimizer_prefixes(folder: DcpFolder) -> list[str]:
    matches = (_GROUPS.match(name) for name in (*folder.values, *folder.tensors))
    return list(dict.fromkeys(match[1] for match in matches if match is not None))


def _optimizer(folder: DcpFolder, prefix: str) -> _Optimizer:
    found = _Optimizer()
    indexed: dict[int, dict[str, Any]] = {}
    flattened: dict[str, dict[str, Any]] = {}
    for name in (*folder.tensors, *folder.values):
        kind, _, rest = name.removeprefix(prefix).partition(".")
        parameter, _, key = rest.rpartition(".")
        if not name.startswith(prefix) or not parameter:
            continue
        if kind == "state":
            found.state.setdefault(plain_name(parameter), {})[key] = name
        elif kind == "param_groups" and (match := _INDEXED.fullmatch(rest)) is not None:
            indexed.setdefault(int(match[1]), {})[key] = name
        if kind == "param_groups":
            flattened.setdefault(parameter, {})[key] = name
    if any("params" in group for group in indexed.values()):
        for _, group in sorted(indexed.items()):
            names = folder.value(group["params"]) if group.get("params") in folder.values else None
            if not isinstance(names, list):
                raise DamagedError(f"a group of {prefix}param_groups does not list its params")
            found.groups.append(([plain_name(str(name)) for name in names], _values(folder, group)))
        return found
    # Each parameter has its own values; those that are equal were, or could have been, one group.
    equal: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for parameter, entries in flattened.items():
        values = _values(folder, entries)
        names, _ = equal.setdefault(json.dumps(values, sort_keys=True), ([], values))
        names.append(plain_name(parameter))
    found.groups = list(equal.values())
    return found


def _values(folder: DcpFolder, entries: Mapping[str, str]) -> dict[str, Any]:
    return {key: _plain(folder, name) for key, name in entries.items() if key not in ("params", *HOW)}


def _document(folder: DcpFolder, optimizer: _Optimizer) -> dict[str, Any]:
    """Return what `torch_state` saves of an optimizer beside its tensors."""
    numbers = {
        parameter: {key: _plain(folder, name) for key, name in state.items() if name in folder.values}
        for parameter, state in optimizer.state.items()
    }
    return {
        "groups": [{"names": names, "values": values} for names, values in optimizer.groups],
        "values": {parameter: values for parameter, values in numbers.items() if values},
    }


def _plain(folder: DcpFolder, name: str) -> Any:
    """Return a value as JSON gives it back. Raises MismatchError where it is none."""
    value = _value(folder, name)
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise MismatchError(f"{name} is a {type(value).__name__} that is no JSON: {error}") from error


def _value(folder: DcpFolder, name: str) -> Any:
    """Return a value, or the one of a tensor of one element. Raises MismatchError for other tensors."""
    tensor = folder.tensors.get(name)
    if tensor is not None and len(tensor.chunks) == 1 and tensor.chunks[0].box.num_elements == 1:
        return folder.chunk(name, tensor.chunks[0]).item()
    if tensor is not None:
        raise MismatchError(f"{name} is a tensor of {list(tensor.shape)}, expected a value")
    return folder.value(name)


def _model_prefix(
    folder: DcpFolder, names: Iterable[str], optimizers: Iterable[_Optimizer], model_key: str | None
) -> str:
    if model_key is not None:
        prefix = f"{model_key}." if model_key else ""
        if any(name.startswith(prefix) for name in names):
            return prefix
        raise MismatchError(f"--model {model_key}: no tensor's name begins with {prefix}")
    of_prefix: dict[str, set[str]] = {}
    for name in names:
        prefix = folder.parents.get(name, "")
        of_prefix.setdefault(prefix, set()).add(plain_name(name.removeprefix(prefix)))
    fitting = [
        prefix
        for prefix, short in of_prefix.items()
        if any(optimizer.names and optimizer.names <= short for optimizer in optimizers)
    ]
    if len(fitting) == 1:
        return fitting[0]
    # A counter or a generator's state beside a dict of weights makes no model of the root.
    num_at_root = len(of_prefix.get("", ()))
    is_root = all(len(short) < num_at_root for prefix, short in of_prefix.items() if prefix)
    candidates = fitting or ([""] if num_at_root and is_root else list(of_prefix))
    if "model." in of_prefix and "model." in (fitting or of_prefix):
        return "model."
    if len(candidates) == 1:
        return candidates[0]
    listed = ", ".join(
        f"{prefix.rstrip('.') or 'the root'} ({len(short)} tensors)" for prefix, short in of_prefix.items()
    )
    raise MismatchError(f"which is the model? There are {listed or 'no tensors'}: give --model KEY")


def _no_optimizer(optimizers: Mapping[str, _Optimizer], model: Iterable[str]) -> str:
    known = {plain_name(short) for short in model}
    for prefix, optimizer in optimizers.items():
        strangers = sorted(optimizer.names - known)
        if strangers and all(name.isdigit() for name in strangers):
            return (
                f"{prefix}state has indices of parameters, not names, so whose state it is cannot be told: "
                "save it with torch.distributed.checkpoint.state_dict.get_state_dict, or import with "
                "--model-only"
            )
        if strangers:
            listed = ", ".join(strangers[:_MAX_LISTED])
            return (
                f"{prefix}* has the state of {len(strangers)} parameters that the model has not, such as "
                f"{listed}: give --model KEY, or --model-only"
            )
    return f"{len(optimizers)} optimizers have the model's names ({', '.join(optimizers)}): give --model-only"


def _extra(folder: DcpFolder, names: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what is JSON, in dicts and lists as a loop's `extra` is kept, and what is not, in words."""
    extra: dict[str | int, Any] = {}
    left_out: Counter[str] = Counter()
    for name in names:
        prefix = folder.parents.get(name, "")
        try:
            value = encoded(_value(folder, name), name)
        except (MismatchError, DamagedError):
            left_out[f"{prefix}*" if name in folder.tensors and prefix else name] += 1
            continue
        place = extra
        first, *others = folder.paths.get(name, (name,))
        *outer, last = [str(first), *others]
        for key in outer:
            inner = place.setdefault(key, {})
            place = inner if isinstance(inner, dict) else place
        place[last] = value
    told = [name if count == 1 else f"{name} ({count} tensors)" for name, count in left_out.items()]
    return {str(key): _as_written(value) for key, value in extra.items()}, told


def _as_written(value: Any) -> Any:
    """Return a list where the keys are those of one, without what was left out of it; and numbers for keys
    of which DCP made text, as those of a MultiStepLR's milestones.
    """
    if not isinstance(value, dict):
        return value
    inner = {key: _as_written(each) for key, each in value.items()}
    if inner and all(type(key) is int for key in inner):
        return [each for _, each in sorted(inner.items())]
    if inner and all(type(key) is str and _NUMBER.fullmatch(key) for key in inner):
        return {PAIRS: [[int(key), each] for key, each in inner.items()]}
    return {str(key): each for key, each in inner.items()}
