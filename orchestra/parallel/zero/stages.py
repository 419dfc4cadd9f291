"""The stages of ZeRO, put together of a reducer of gradients and of what brings parameters to the ranks.

| stage | parameters | gradients        | masters, moments | on the way, of Ψ bytes on N ranks         |
|-------|------------|------------------|------------------|-------------------------------------------|
| 0     | whole      | whole            | whole            | 2Ψ(N−1)/N a step                          |
| 1     | whole      | whole            | owned range      | 2Ψ(N−1)/N a step                          |
| 2     | whole      | owned range      | owned range      | Ψ(N−1)/N a micro-batch, and once a step   |
| 3     | owned range| owned range      | owned range      | 3Ψ(N−1)/N a micro-batch, less what stays  |

Of matrices that ZeRO-3 gathers in fp8 (`rounded_units`) it is 2Ψ: gathers bring half the bytes.
With hybrid sharding N is the shard degree, and a step adds one all-reduce of the owned range over the
replicas.

Of experts Ψ are the bytes of those that a rank has, and N the ranks that have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config, Offload
from orchestra.model.initial import is_fake
from orchestra.model.transformer import Transformer
from orchestra.optim.adamw import Trained, squared_norm
from orchestra.parallel.marks import Traffic, marked
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.places import TensorPlace
from orchestra.parallel.zero.buffers import Units, follow, host_zeros, send
from orchestra.parallel.zero.gatherer import Arrivals, Gatherer
from orchestra.parallel.zero.late_update import LateUpdate
from orchestra.parallel.zero.reducer import Reducer
from orchestra.parallel.zero.rounded_units import RoundedUnits
from orchestra.parallel.zero.zero_collectives import data_ranks
from orchestra.precision.policies import PrecisionPolicy
from orchestra.precision.rounded_weights import RoundedWeights
from orchestra.sizes.step_shares import Part

# Updates some masters with their gradients, which may be overwritten, and rounds them into their parameters'
# memory. All have the masters' shape and device, and each a dtype of its own.
Update = Callable[[Sequence[Trained], Sequence[Tensor], Sequence[Tensor]], None]


class Stage(Protocol):
    """One of the stages of ZeRO. All methods are *collective*, in the same order on all ranks."""

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        """Announce the forward and backward pass of a micro-batch: the gradients of the first overwrite,
        later ones add; after the last they are complete.
        """

    def begin_step(self, num_micro_batches: int) -> None:
        """Announce the passes of so many micro-batches through a pipeline's parts of the model."""

    def begin_forward(self, part: int = 0) -> None:
        """Announce a forward pass through one of the parts that this rank has of the model."""

    def begin_backward(self, *, is_first: bool, is_last: bool, part: int) -> None:
        """Announce the gradients of one micro-batch in a part, as `begin` does."""

    def finish(self) -> list[Tensor]:
        """Wait for the gradients, summed over the ranks; return those that count in the norm on this rank:
        over all ranks of the model group each element once.
        """

    def update(self, update: Update, *, at_once: bool = False) -> None:
        """Update all masters of this rank, some at a time or with `at_once` in one call, and let the
        parameters follow.

        Where masters lie in host memory or on disk it goes on until the next forward pass needs what comes
        of it.
        """

    def copy_masters_to_parameters(self) -> None:
        """Let the parameters follow masters that were written."""

    def settle(self) -> None:
        """Wait until parameters can be read outside of the forward pass. With ZeRO-3 they never can."""

    def await_update(self) -> None:
        """Wait until this rank's masters and moments can be read or written. *Any rank*."""

    @property
    def gradients(self) -> Reducer:
        """What takes the gradients of each micro-batch."""

    @property
    def rounded_bytes(self) -> int:
        """Bytes that are kept beside the parameters because weights are rounded."""

    def close(self) -> None:
        """Let go of the model: hooks that know their owner keep each other, and all memory, alive.

        *Any rank*, settled; nothing can be trained any more.
        """


@dataclass(frozen=True)
class SharedGradients:
    """Gradients that are still partial sums beyond data parallelism, and which of them count here.

    Ranks that share a parameter over tensor parallelism own the same range of it, since their units have the
    same layout.
    """

    places: Mapping[str, TensorPlace]
    traffic: Traffic

    def sum_up(self, trained: Sequence[Trained], gradients: Sequence[Tensor]) -> list[Tensor]:
        """Sum over each parameter's `sum_group`, in place; return what counts in the norm on this rank.

        *Collective* over the groups.
        """
        pairs = [pair for pair in zip(trained, gradients, strict=True) if pair[1].numel()]
        groups: dict[dist.ProcessGroup, list[Tensor]] = {}
        for item, gradient in pairs:
            group = self.places[item.name].sum_group
            if group is not None:
                groups.setdefault(group, []).append(gradient)
        for group, parts in groups.items():
            _sum_together(parts, group, self.traffic)
        return [gradient for item, gradient in pairs if self.places[item.name].is_counted]


def _sum_together(parts: Sequence[Tensor], group: dist.ProcessGroup, traffic: Traffic) -> None:
    """Sum some tensors over a group, in place and in one message."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    traffic.add_all_reduce(flat.nbytes, dist.get_world_size(group))
    with marked(Part.communication):
        dist.all_reduce(flat, group=group)
    for part, summed in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))


def norm_over_ranks(gradients: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """Return the L2 norm of all gradients of the model as an fp32 scalar: the same bits on all ranks.

    `gradients` are this rank's share, as `Stage.finish` returns it. *Collective* over the model group.
    """
    squares = squared_norm(gradients).to(mesh.device)
    if mesh.model_group is None:
        return squares.sqrt().float()
    # Gathered and then summed in rank order: no algorithm of the library can part the replicas.
    of_ranks = [torch.empty_like(squares) for _ in range(dist.get_world_size(mesh.model_group))]
    with marked(Part.communication):
        dist.all_gather(of_ranks, squares, group=mesh.model_group)
    return torch.stack(of_ranks).sum().sqrt().float()


def make_stage(
    model: Transformer,
    units: Units,
    places: Mapping[str, TensorPlace],
    precision: PrecisionPolicy,
    direct: Mapping[str, int],
    config: Config,
    mesh: Mesh,
    rounded: Sequence[Tensor] = (),
) -> Stage:
    """Return the stage that the configuration asks for, hooked to the model. *Any rank*.

    `direct`: the weights whose gradients the model's functions give by themselves, with their uses.
    `rounded`: the weights that ZeRO-3 gathers in fp8.
    """
    shared = SharedGradients(places, mesh.traffic)
    is_on_device = config.parallelism.offload is Offload.none
    is_one = mesh.shard_group is None and mesh.replicate_group is None
    is_alone = is_one and precision.gradient is precision.parameter and is_on_device

    ranks = data_ranks(mesh, precision.reduce)
    shard = ranks.others.shard
    keeps_whole = config.parallelism.zero < 2
    reducer = Reducer(units, precision, ranks, direct, keeps_whole=keeps_whole, is_alone=is_alone)
    # A dry run counts what its own thread makes.
    is_late = not is_on_device and not is_fake(units.units[0].whole)
    late = LateUpdate(mesh.device) if is_late else None
    if shard is None:
        arrivals = None if late is None else Arrivals(model, units, None, late)
        return Reduced(units, reducer, shared, late, arrivals)
    if units.is_split:
        is_compiled = config.train.compile is True and mesh.is_gpu
        travelling = RoundedUnits(units.units, rounded, shard, is_compiled=is_compiled)
        gatherer = Gatherer(model, units, ranks, reducer, travelling, late)
        return Gathered(units, reducer, shared, late, gatherer)
    return Reduced(units, reducer, shared, late, Arrivals(model, units, ranks, late))


# Host memory for what a GPU has no room for. Masters and moments then lie there and are updated by torch's
# fused kernel for the CPU; the parameters go back as `buffers.send` sends them. On a machine without CUDA
# everything is plain memory and plain copies.


class GradientCarrier:
    """Brings gradients to where their masters are. Its pinned memory is as large as two units and stays."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._stream: torch.cuda.Stream | None = None

    def carried(self, gradients: Sequence[Tensor], masters: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield each flat gradient, in its own dtype, on its masters' device.

        It may be overwritten, and holds until the next one is asked for.
        """
        if not any(
            gradient.is_cuda and not to.is_cuda for gradient, to in zip(gradients, masters, strict=True)
        ):
            yield from gradients
            return
        yield from self._fetched(gradients)

    def _fetched(self, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
        self._make(max(gradient.numel() for gradient in gradients), gradients[0])
        assert self._stream is not None
        self._stream.wait_stream(torch.cuda.current_stream())
        under_way = self._start(0, gradients)
        for number in range(len(gradients)):
            arrived, event = under_way
            event.synchronize()
            if number + 1 < len(gradients):
                # Into the buffer whose gradients were used up before this one was asked for.
                under_way = self._start(number + 1, gradients)
            yield arrived

    def _start(self, number: int, gradients: Sequence[Tensor]) -> tuple[Tensor, torch.cuda.Event]:
        gradient = gradients[number]
        target = self._buffers[number % 2][: gradient.numel()]
        with torch.cuda.stream(self._stream):
            target.copy_(gradient, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return target, event

    def _make(self, size: int, like: Tensor) -> None:
        if not self._buffers or self._buffers[0].numel() < size:
            self._buffers = [host_zeros(size, like.dtype) for _ in range(2)]
        if self._stream is None:
            self._stream = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]


class Reduced:
    """Every rank keeps all parameters, and updates them (ZeRO-0) or its range of them (ZeRO-1 and -2).

    `late` is where the update may go on beside the next step; `arrivals` brings, or only awaits, what the
    forward pass needs.
    """

    def __init__(
        self,
        units: Units,
        reducer: Reducer,
        shared: SharedGradients,
        late: LateUpdate | None,
        arrivals: Arrivals | None = None,
    ) -> None:
        self._units = units
        self._reducer = reducer
        self._shared = shared
        self._late = late
        self._arrivals = arrivals
        self._carrier = GradientCarrier()

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self._reducer.begin(is_first=is_first, is_last=is_last)

    def begin_step(self, num_micro_batches: int) -> None:
        self._reducer.begin_step(num_micro_batches)

    def begin_forward(self, part: int = 0) -> None:
        """Nothing: the blocks wait for their parameters by themselves."""

    def begin_backward(self, *, is_first: bool, is_last: bool, part: int) -> None:
        self._reducer.begin(is_first=is_first, is_last=is_last, part=part)

    def finish(self) -> list[Tensor]:
        self.await_update()
        self._reducer.finish()
        views: dict[str, Tensor] = {}
        for number, unit in enumerate(self._units.units):
            parts = unit.owned_views(self._reducer.owned(number))
            views.update(zip((item.name for item in unit.trained), parts, strict=True))
        trained = self._units.trained
        # In the model's order, whatever the units: the norm is then summed in the same order too, and two
        # ranks follow the very bits of one rank with two micro-batches.
        return self._shared.sum_up(trained, [views[item.name] for item in trained])

    def update(self, update: Update, *, at_once: bool = False) -> None:
        numbers = list(reversed(range(len(self._units.units))))
        if at_once:
            self._update_at_once(update)
            # Then each unit is only let go, in the order in which the next forward pass needs them.
            update = _leave
        if self._late is not None:
            self._late.start(numbers, lambda: self._updated(update))
            if self._arrivals is not None:
                self._arrivals.expect(numbers)
            return
        for number in self._updated(update):
            if self._arrivals is not None:
                self._arrivals.start(number)

    def _update_at_once(self, update: Update) -> None:
        # A rule keeps masters that lie elsewhere, which come some at a time, from here.
        assert self._late is None
        assert self._units.state_file is None
        trained: list[Trained] = []
        gradients: list[Tensor] = []
        parameters: list[Tensor] = []
        for number, unit in enumerate(self._units.units):
            trained += unit.trained
            gradients += unit.owned_views(self._reducer.owned(number))
            parameters += unit.owned_views(unit.outgoing)
        update(trained, gradients, parameters)

    def _updated(self, update: Update) -> Iterator[int]:
        """Update unit by unit, and yield each one's number when its parameters are this rank's new ones."""
        units = self._units.units
        numbers = list(reversed(range(len(units))))
        carried = self._carrier.carried(
            [self._reducer.owned(number) for number in numbers], [units[number].masters for number in numbers]
        )
        for (number, unit), gradients in zip(self._units.to_update(), carried, strict=True):
            update(unit.trained, unit.owned_views(gradients), unit.owned_views(unit.outgoing))
            self._reducer.release(number)
            send(unit)
            yield number

    def copy_masters_to_parameters(self) -> None:
        self.settle()
        for number, unit in reversed(list(enumerate(self._units.units))):
            follow(unit)
            send(unit)
            if self._arrivals is not None:
                self._arrivals.start(number)
        self.settle()
        if self._units.state_file is not None:
            self._units.state_file.seal()

    def settle(self) -> None:
        if self._arrivals is not None:
            self._arrivals.settle()
        self.await_update()

    def await_update(self) -> None:
        if self._late is not None:
            self._late.wait_all()

    @property
    def gradients(self) -> Reducer:
        return self._reducer

    @property
    def rounded_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._reducer.close()
        if self._arrivals is not None:
            self._arrivals.close()
        if self._late is not None:
            self._late.close()
        if self._units.state_file is not None:
            self._units.state_file.close()


def _leave(trained: Sequence[Trained], gradients: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Update nothing."""


class Gathered(Reduced):
    """Every rank keeps its range of the parameters and fetches others while it needs them (ZeRO-3)."""

    def __init__(
        self,
        units: Units,
        reducer: Reducer,
        shared: SharedGradients,
        late: LateUpdate | None,
        gatherer: Gatherer,
    ) -> None:
        super().__init__(units, reducer, shared, late)
        self._gatherer = gatherer

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        super().begin(is_first=is_first, is_last=is_last)
        self._gatherer.begin()

    def begin_forward(self, part: int = 0) -> None:
        self._gatherer.begin(part)

    def update(self, update: Update, *, at_once: bool = False) -> None:
        self._gatherer.forget()
        super().update(update, at_once=at_once)

    def copy_masters_to_parameters(self) -> None:
        self._gatherer.forget()
        super().copy_masters_to_parameters()

    @property
    def rounded_bytes(self) -> int:
        return self._gatherer.rounded_bytes

    def close(self) -> None:
        super().close()
        self._gatherer.close()


class Rounding:
    """A stage beside whose parameters their rounded copies are kept."""

    def __init__(self, stage: Stage, rounded: RoundedWeights) -> None:
        self._stage = stage
        self._rounded = rounded

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self._stage.begin(is_first=is_first, is_last=is_last)

    def begin_step(self, num_micro_batches: int) -> None:
        self._stage.begin_step(num_micro_batches)

    def begin_forward(self, part: int = 0) -> None:
        self._stage.begin_forward(part)

    def begin_backward(self, *, is_first: bool, is_last: bool, part: int) -> None:
        self._stage.begin_backward(is_first=is_first, is_last=is_last, part=part)

    def finish(self) -> list[Tensor]:
        return self._stage.finish()

    def update(self, update: Update, *, at_once: bool = False) -> None:
        self._rounded.forget()
        self._stage.update(update, at_once=at_once)

    def copy_masters_to_parameters(self) -> None:
        self._rounded.forget()
        self._stage.copy_masters_to_parameters()

    def settle(self) -> None:
        self._stage.settle()

    def await_update(self) -> None:
        self._stage.await_update()

    @property
    def gradients(self) -> Reducer:
        return self._stage.gradients

    @property
    def rounded_bytes(self) -> int:
        return self._rounded.num_bytes

    def close(self) -> None:
        self._stage.close()
        self._rounded.close()
