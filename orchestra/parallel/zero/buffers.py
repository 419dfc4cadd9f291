"""The tensors of a rank: parameters as views into flat units, the ranges it owns, and their fp32 masters.

It makes them with their initial values in the place of a model's meta parameters; no rank makes more than it
holds. Nothing is communicated here.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from conf.schema import Config, Offload, StateDType
from orchestra.model.initial import is_fake
from orchestra.model.transformer import ModelPart, Transformer, fill_initial_parts_
from orchestra.optim.adamw import Trained
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.places import TensorPlace, is_of_experts, parts_of
from orchestra.parallel.zero.state_file import StateFile, StateLayout, UnitState
from orchestra.precision.policies import PrecisionPolicy
from orchestra.run.paths import offload_folder
from orchestra.sizes.pipeline_schedule import splits_backward

# How parameters lie in flat buffers and who owns which range of them: integers only.
#
# A unit is a group of parameters that is communicated as one: one after the other in a flat buffer, which is
# cut into as many equal ranges as there are ranks to share it. Each parameter and each range begins at a
# multiple of the alignment, so that no kernel meets memory that it has to treat in another way; the gaps hold
# zeros that nobody trains.
#
# Parameters of experts have units of their own, which other ranks share than all others': those with the same
# experts.

# Elements: 64 bytes of a 16-bit type, a line of the cache and more than any vector load.
ALIGNMENT = 32
# Stands for the number of a part of the model where a unit's gradients are of no part's micro-batch.
OF_STEP = -1
_BLOCK_NAME = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class UnitMember:
    """A parameter of `size` elements that begins at the element `begin` of its unit."""

    name: str
    begin: int
    size: int


@dataclass(frozen=True)
class UnitLayout:
    """The members of one unit; the buffer has num_ranges · range_size elements."""

    members: tuple[UnitMember, ...]
    num_ranges: int
    range_size: int

    @property
    def size(self) -> int:
        """Elements of the whole buffer, gaps included."""
        return self.num_ranges * self.range_size

    def range_of(self, index: int) -> tuple[int, int]:
        """Return begin and end of the range that belongs to the rank `index` of the sharing group."""
        return index * self.range_size, (index + 1) * self.range_size

    def part_of(self, member: UnitMember, index: int) -> tuple[int, int]:
        """Return which elements [start, stop) of a member lie in a range: counted from the member's begin,
        start = stop where none do.
        """
        begin, end = self.range_of(index)
        start = min(max(begin - member.begin, 0), member.size)
        return start, min(max(end - member.begin, start), member.size)


def lay_out(sizes: Sequence[tuple[str, int]], num_ranges: int) -> UnitLayout:
    """Lay parameters, given by name and number of elements, one after the other."""
    members = []
    end = 0
    for name, size in sizes:
        members.append(UnitMember(name, end, size))
        end = _rounded_up(end + size, ALIGNMENT)
    return UnitLayout(tuple(members), num_ranges, _rounded_up(-(-end // num_ranges), ALIGNMENT))


def in_buckets(sizes: Sequence[tuple[str, int]], min_elements: int) -> list[list[tuple[str, int]]]:
    """Group parameters in the reverse of their order into buckets of at least so many elements.

    The backward pass finishes them in about this order. The last bucket may be smaller.
    """
    buckets: list[list[tuple[str, int]]] = []
    current: list[tuple[str, int]] = []
    for entry in reversed(sizes):
        current.append(entry)
        if sum(size for _, size in current) >= min_elements:
            buckets.append(current)
            current = []
    return [*buckets, current] if current else buckets


def in_blocks(sizes: Sequence[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Group parameters by the blocks of the model: what stands before the layers, each layer, the rest."""
    return [list(entries) for _, entries in groupby(sizes, key=lambda entry: _block(entry[0]))]


def block_of(layout: UnitLayout) -> str:
    """Return the number of the layer that a unit by blocks is of; empty for what is no layer's."""
    return _block(layout.members[0].name)


def _block(name: str) -> str:
    match = _BLOCK_NAME.search(name)
    return match.group(1) if match else ""


def slots(units: Sequence[UnitLayout], *, share_ends: bool) -> list[int]:
    """Return the number of the buffer that each unit is gathered into, for units by blocks in either order.

    Layers take turns in two buffers, so that one can be filled while the other computes. What stands before
    the layers and what comes after them share a third, unless one needs the other's parameters (tied).
    Experts of layers take turns in two more.
    """
    numbers = []
    layers_before = {False: 0, True: 0}
    for number, unit in enumerate(units):
        if block_of(unit):
            is_expert = is_of_experts(unit.members[0].name)
            numbers.append(layers_before[is_expert] % 2 + (_SLOTS_OF_EXPERTS if is_expert else 0))
            layers_before[is_expert] += 1
        else:
            numbers.append(2 if share_ends or number == 0 else 3)
    return numbers


_SLOTS_OF_EXPERTS = 4


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def host_zeros(size: int, dtype: torch.dtype) -> Tensor:
    """Return host memory that a GPU can copy from and to by itself (pinned), where there is a GPU."""
    return torch.zeros(size, dtype=dtype, pin_memory=torch.cuda.is_available())


@dataclass(frozen=True)
class Unit:
    """One unit's parameters on this rank.

    `whole` is the flat buffer that the parameters are views of; with ZeRO-3 other units use it too, in turn.
    `owned` is this rank's range: a part of `whole`, or where that is filled by gathers (`is_split`) memory of
    its own. `masters` is the same range in the masters' data type: `owned` itself where that is the
    parameters' own. `outgoing` is where updated parameters leave the masters' device from: `owned` itself
    unless that is another one. `trained` are the members in their order, and `index` says which range it is.
    `part`: the part of the model whose micro-batches its gradients come with, or OF_STEP.
    """

    layout: UnitLayout
    whole: Tensor
    owned: Tensor
    masters: Tensor
    outgoing: Tensor
    trained: tuple[Trained, ...]
    index: int
    part: int = 0
    is_split: bool = False

    @property
    def is_of_experts(self) -> bool:
        """Whether the ranks with the same experts share it, and not all of data and context parallelism."""
        return is_of_experts(self.layout.members[0].name)

    def whole_views(self, flat: Tensor) -> list[Tensor]:
        """Return each member's part of a flat buffer of the whole unit, in the parameter's shape."""
        members = zip(self.layout.members, self.trained, strict=True)
        return [flat[at.begin : at.begin + at.size].view(item.parameter.shape) for at, item in members]

    def owned_views(self, flat: Tensor) -> list[Tensor]:
        """Return each member's part of a flat buffer of the owned range, in the shape of its master."""
        places = zip(self._owned_places, self.trained, strict=True)
        return [flat[start:stop].view(item.master.shape) for (start, stop), item in places]

    @functools.cached_property
    def _owned_places(self) -> list[tuple[int, int]]:
        return _owned_places(self.layout, self.index)


def follow(unit: Unit) -> None:
    """Round a unit's masters into `outgoing`, as each update does by itself."""
    if unit.masters is not unit.outgoing:
        unit.outgoing.copy_(unit.masters)


def send(unit: Unit) -> None:
    """Copy what leaves the masters' device into the range of parameters that this rank owns.

    A copy from host memory may still be under way afterwards; the masters are not written again before the
    host has waited for the device, as an update in host memory does.
    """
    if unit.outgoing is not unit.owned:
        unit.owned.copy_(unit.outgoing, non_blocking=True)


@dataclass(frozen=True)
class Units:
    """All units of a rank, in the order in which the backward pass finishes them.

    `trained` are all parameters in the model's order. `is_split`: parameters are gathered (ZeRO-3).
    `state_file` holds masters and moments that lie on disk: those of `units` and `trained` are its mapping.
    """

    units: list[Unit]
    trained: list[Trained]
    is_split: bool
    state_file: StateFile | None = None

    def to_update(self) -> Iterator[tuple[int, Unit]]:
        """Yield each unit with its number, in the order in which the next forward pass needs them; its state
        is in memory until the next one is asked for.
        """
        if self.state_file is None:
            yield from reversed(list(enumerate(self.units)))
            return
        for number, state in zip(self.state_file.order, self.state_file.passes(), strict=True):
            yield number, _in_memory(self.units[number], state)


def place_units(
    model: Transformer,
    places: Mapping[str, TensorPlace],
    precision: PrecisionPolicy,
    config: Config,
    mesh: Mesh,
) -> Units:
    """Give the model its parameters, as views into units, with their initial values. *Any rank*.

    `places` are those of the model's parameters after they were cut.
    """
    sizes = [(name, math.prod(places[name].padded)) for name, _ in model.named_parameters()]
    is_split = config.parallelism.zero == 3 and mesh.layout.shard > 1
    bucket_bytes = config.parallelism.bucket_mib * 2**20
    min_elements = None if is_split else math.ceil(bucket_bytes / precision.gradient.itemsize)
    alone = own_unit(model, config)
    parts, grouped = zip(*_grouped(model, sizes, min_elements, alone), strict=True)
    layouts = [
        lay_out(group, mesh.layout.expert_shard if is_of_experts(group[0][0]) else mesh.layout.shard)
        for group in grouped
    ]
    # The output's parameters are used again after other parts were, in the backward pass.
    share_ends = not (model.config.tie_word_embeddings or len(model.parts) > 1)
    numbers = slots(layouts, share_ends=share_ends)
    if OF_STEP in parts:
        numbers[parts.index(OF_STEP)] = max(numbers) + 1
    # Experts that one rank alone has are whole there with every stage.
    splits = [is_split and layout.num_ranges > 1 for layout in layouts]
    own = range(max(numbers) + 1, max(numbers) + 1 + len(layouts))
    numbers = [shared if splits[at] else own[at] for at, shared in enumerate(numbers)]
    wholes = _buffers(layouts, numbers, precision, mesh)
    parameters = _replaced(model, places, layouts, wholes)
    state_file = None
    if config.parallelism.offload is Offload.optimizer_disk:
        state_file = _state_file(layouts, precision, config, mesh, is_dry=is_fake(wholes[0]))
    units = []
    for number, (layout, whole) in enumerate(zip(layouts, wholes, strict=True)):
        offload = config.parallelism.offload
        state = None if state_file is None else state_file.mapped(number)
        index = mesh.expert_shard_index if is_of_experts(layout.members[0].name) else mesh.shard_index
        unit = _unit(layout, whole, parameters, precision, index, splits[number], offload, state)
        units.append(replace(unit, part=parts[number], is_split=splits[number]))
        _fill(units[-1], places, model, config.train.seed)
    by_name = {item.name: item for unit in units for item in unit.trained}
    return Units(units, [by_name[name] for name, _ in sizes], is_split, state_file)


def own_unit(model: Transformer, config: Config) -> str | None:
    """Return the parameter that has a unit for itself; None mostly.

    In a pipeline a tied matrix has one: the ranks that share it then own the same ranges of it. So has the
    output matrix where gradients of weights are taken later: the loss gives its own at once.
    """
    if config.parallelism.pp == 1:
        return None
    if model.config.tie_word_embeddings:
        return "embed_tokens.weight" if model.has_embedding or model.has_output else None
    is_split = splits_backward(config.parallelism.schedule)
    return "lm_head.weight" if is_split and model.has_output else None


def _grouped(
    model: Transformer, sizes: Sequence[tuple[str, int]], min_elements: int | None, alone: str | None
) -> Iterator[tuple[int, list[tuple[str, int]]]]:
    """Yield what goes into each unit, with its part of the model, in about the order of the backward pass:
    blocks, or buckets of at least so many elements.
    """
    others = [entry for entry in sizes if entry[0] != alone]
    lonely = [entry for entry in sizes if entry[0] == alone]
    if lonely and not model.has_embedding:
        yield OF_STEP, lonely
    for number, part in reversed(list(enumerate(model.parts))):
        for group in _in_order([entry for entry in others if _is_in(entry[0], part)], min_elements):
            yield number, group
    if lonely and model.has_embedding:
        yield OF_STEP, lonely


def _in_order(sizes: Sequence[tuple[str, int]], min_elements: int | None) -> list[list[tuple[str, int]]]:
    """Group the parameters of one part, those of experts apart, in the order in which the backward pass
    finishes the groups.
    """
    groups: list[list[tuple[str, int]]] = []
    for is_kind in (True, False):
        own = [entry for entry in sizes if is_of_experts(entry[0]) is is_kind]
        groups += in_blocks(own) if min_elements is None else in_buckets(own, min_elements)
    return sorted(groups, key=lambda group: -min(map(sizes.index, group)))


def _is_in(name: str, part: ModelPart) -> bool:
    """Whether a parameter that only one part of the model uses is in this one."""
    match = _BLOCK_NAME.match(name)
    if match:
        return int(match.group(1)) in part.layers
    return part.is_first if name.startswith("embed_") else part.is_last


def _state_file(
    layouts: Sequence[UnitLayout], precision: PrecisionPolicy, config: Config, mesh: Mesh, *, is_dry: bool
) -> StateFile:
    """Take the file of masters and moments. Raises TrainingError where there is no room for it."""
    folder = offload_folder(config.parallelism)
    assert folder is not None, "a rule asks for it"
    leaves = mesh.is_gpu and precision.parameter is not precision.master
    layout = StateLayout(
        sizes=tuple(layout.range_size for layout in layouts),
        titles=tuple(f"{layout.members[0].name} to {layout.members[-1].name}" for layout in layouts),
        master=precision.master,
        moment=torch.bfloat16 if config.optim.state_dtype is StateDType.bf16 else torch.float32,
        outgoing=precision.parameter if leaves else None,
    )
    return StateFile(folder, layout, is_fake=is_dry, pinned=mesh.device.type == "cuda")


def _buffers(
    layouts: Sequence[UnitLayout], numbers: Sequence[int], precision: PrecisionPolicy, mesh: Mesh
) -> list[Tensor]:
    """Return a flat buffer for each unit; units of equal number share memory that suffices for all."""
    sizes: dict[int, int] = {}
    for number, layout in zip(numbers, layouts, strict=True):
        sizes[number] = max(layout.size, sizes.get(number, 0))
    memory = {
        number: torch.zeros(size, dtype=precision.parameter, device=mesh.device)
        for number, size in sizes.items()
    }
    return [memory[number][: layout.size] for number, layout in zip(numbers, layouts, strict=True)]


def _replaced(
    model: Transformer,
    places: Mapping[str, TensorPlace],
    layouts: Sequence[UnitLayout],
    wholes: Sequence[Tensor],
) -> dict[str, nn.Parameter]:
    """Put views of the buffers in the place of the model's parameters; return them by name."""
    replaced = {}
    for layout, whole in zip(layouts, wholes, strict=True):
        for at in layout.members:
            view = whole[at.begin : at.begin + at.size].view(places[at.name].padded)
            replaced[at.name] = nn.Parameter(view)
    by_old = {id(parameter): replaced[name] for name, parameter in model.named_parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = by_old[id(parameter)]  # tied ones stay tied
    return replaced


def _unit(
    layout: UnitLayout,
    whole: Tensor,
    parameters: Mapping[str, nn.Parameter],
    precision: PrecisionPolicy,
    index: int,
    is_split: bool,
    offload: Offload,
    state: UnitState | None,
) -> Unit:
    """Make a unit's memory beside `whole`, and say what each of its parameters has in it."""
    begin, end = layout.range_of(index)
    is_same = precision.master is precision.parameter

    def on_device() -> Tensor:
        return torch.zeros_like(whole[begin:end]) if is_split else whole[begin:end]

    if state is not None:
        owned = on_device()
        masters = state.masters
        outgoing = masters if is_same else owned
    elif offload is Offload.none:
        owned = outgoing = on_device()
        masters = owned if is_same else torch.zeros_like(owned, dtype=precision.master)
    else:
        masters = host_zeros(layout.range_size, precision.master)
        outgoing = masters if is_same else host_zeros(layout.range_size, precision.parameter)
        # What a forward pass gathers is copied from host memory where the owned range lies there.
        owned = outgoing if is_split and offload is Offload.all else on_device()
    trained = []
    for at, (first, last) in zip(layout.members, _owned_places(layout, index), strict=True):
        parameter, part = parameters[at.name], masters[first:last]
        start, stop = layout.part_of(at, index)
        # Where all of a parameter is this rank's, nothing is gained by taking its shape away.
        master = part.view(parameter.shape) if stop - start == at.size else part
        trained.append(Trained(at.name, parameter, master, start, stop))
    unit = Unit(layout, whole, owned, masters, outgoing, tuple(trained), index)
    return unit if state is None else _with_state(unit, state)


def _with_state(unit: Unit, state: UnitState) -> Unit:
    """Return the unit with masters and moments in other memory."""
    flat = (state.masters, *state.moments)
    masters, first, second = (unit.owned_views(memory) for memory in flat)
    trained = tuple(
        replace(item, master=master, moments=moments)
        for item, master, moments in zip(unit.trained, masters, zip(first, second, strict=True), strict=True)
    )
    return replace(unit, masters=state.masters, trained=trained)


def _in_memory(unit: Unit, state: UnitState) -> Unit:
    """Return a unit of a state file for an update in the memory of `state`."""
    outgoing = state.outgoing
    if outgoing is None:
        # On a CPU the parameters are rounded where they are.
        outgoing = state.masters if unit.outgoing is unit.masters else unit.owned
    return replace(_with_state(unit, state), outgoing=outgoing)


def _owned_places(layout: UnitLayout, index: int) -> list[tuple[int, int]]:
    """Return where each member lies in a flat buffer of the range `index`: from which element to which."""
    begin, _ = layout.range_of(index)
    places = []
    for at in layout.members:
        start, stop = layout.part_of(at, index)
        first = at.begin + start - begin if start < stop else 0
        places.append((first, first + stop - start))
    return places


@torch.no_grad()
def _fill(unit: Unit, places: Mapping[str, TensorPlace], model: Transformer, seed: int) -> None:
    """Set masters and parameters to their initial values, each element once; in a dry run there are none."""
    if is_fake(unit.whole):
        return
    _fill_ranges(((item.name, item.start, item.master) for item in unit.trained), places, model, seed)
    follow(unit)
    send(unit)
    if not unit.is_split:
        ranges = []
        for item, view in zip(unit.trained, unit.whole_views(unit.whole), strict=True):
            flat = view.view(-1)
            ranges += [(item.name, 0, flat[: item.start]), (item.name, item.stop, flat[item.stop :])]
        _fill_ranges(ranges, places, model, seed)


def _fill_ranges(
    ranges: Iterable[tuple[str, int, Tensor]],
    places: Mapping[str, TensorPlace],
    model: Transformer,
    seed: int,
) -> None:
    """Fill tensors with the initial values of flat ranges of parameters' local parts: each the parameter's
    name, where its range begins, and the tensor; what is padding there becomes 0.
    """
    parts = []
    for name, start, out in ranges:
        flat = out.view(-1).zero_()
        place = places[name]
        parts += [(part.tensor, name, place.shape, part.offsets) for part in parts_of(flat, place, start)]
    fill_initial_parts_(parts, model, seed)


class SpareMemory:
    """Flat tensors of one dtype that nobody uses at the moment; whoever takes them decides how many. They are
    used again and again for a while: fresh memory of such sizes costs as much as filling it. `largest`: the
    most elements that are asked for but to be held; the first one that is not has them.
    """

    def __init__(self, dtype: torch.dtype, largest: int = 0) -> None:
        self._dtype, self._first = dtype, largest
        self._spare: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of what is there."""
        return sum(memory.nbytes for memory in self._spare)

    def has(self, size: int) -> bool:
        """Whether memory of at least `size` elements is there."""
        return any(size <= memory.numel() for memory in self._spare)

    def suits(self, size: int) -> bool:
        """Whether memory of at least `size` elements is there, and of at most twice as many."""
        return any(size <= memory.numel() <= 2 * size for memory in self._spare)

    def take(self, size: int, device: torch.device, *, is_held: bool = False) -> Tensor:
        """Return memory of at least `size` elements, with finite numbers of no meaning in it. `is_held`: for
        so long that others should not miss what it is larger.

        Where none of what is there suffices, one of it is replaced, so that no more of it gathers than was
        ever in use at a time.
        """
        fitting = [number for number, memory in enumerate(self._spare) if memory.numel() >= size]
        if fitting:
            return self._spare.pop(min(fitting, key=lambda number: self._spare[number].numel()))
        if self._spare:
            self._spare.pop()
        if not is_held:
            size, self._first = max(size, self._first), 0
        return torch.zeros(size, dtype=self._dtype, device=device)

    def give(self, memory: Tensor) -> None:
        """Give back what was taken, all of it."""
        self._spare.append(memory)
