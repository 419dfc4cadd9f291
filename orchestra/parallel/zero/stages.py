"""The stages of ZeRO, put together of a reducer of gradients and of what brings parameters to the ranks.

| stage | parameters | gradients        | masters, moments | on the way, of Ψ bytes on N ranks         |
|-------|------------|------------------|------------------|-------------------------------------------|
| 0     | whole      | whole            | whole            | 2Ψ(N−1)/N a step                          |
| 1     | whole      | whole            | owned range      | 2Ψ(N−1)/N a step                          |
| 2     | whole      | owned range      | owned range      | Ψ(N−1)/N a micro-batch, and once a step   |
| 3     | owned range| owned range      | owned range      | 3Ψ(N−1)/N a micro-batch, less what stays  |

With hybrid sharding N is the shard degree, and a step adds one all-reduce of the owned range over the
replicas.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from conf.schema import Config, Offload
from orchestra.model.transformer import Transformer
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.offload import GradientCarrier
from orchestra.parallel.places import TensorPlace
from orchestra.parallel.zero.arrivals import Arrivals
from orchestra.parallel.zero.collectives import Collectives
from orchestra.parallel.zero.gatherer import Gatherer
from orchestra.parallel.zero.reducer import Reducer
from orchestra.parallel.zero.stage import Alone, SharedGradients, Stage, Update
from orchestra.parallel.zero.storage import Units, follow
from orchestra.precision.policy import Policy


def make_stage(
    model: Transformer,
    units: Units,
    places: Mapping[str, TensorPlace],
    precision: Policy,
    config: Config,
    mesh: Mesh,
) -> Stage:
    """Return the stage that the configuration asks for, hooked to the model. *Any rank*."""
    shared = SharedGradients(places, mesh.traffic)
    is_on_device = config.parallelism.offload is Offload.none
    if mesh.dp_group is None and precision.gradient is precision.parameter and is_on_device:
        return Alone(units, shared)

    def over(group: dist.ProcessGroup | None) -> Collectives | None:
        return (
            None
            if group is None
            else Collectives(group, precision.reduce, mesh.traffic, is_direct=not mesh.is_gpu)
        )

    shard = over(mesh.shard_group)
    # Without ranges to share out, all of data parallelism are replicas.
    replicate = over(mesh.dp_group if shard is None else mesh.replicate_group)
    reducer = Reducer(units, precision, shard, replicate, keeps_whole=config.parallelism.zero < 2)
    if shard is None:
        return Reduced(units, reducer, shared)
    if units.is_split:
        return Gathered(units, reducer, shared, Gatherer(model, units, shard, reducer))
    return Updated(units, reducer, shared, Arrivals(model, units, shard))


class Reduced:
    """Every rank keeps and updates all parameters (ZeRO-0)."""

    def __init__(self, units: Units, reducer: Reducer, shared: SharedGradients) -> None:
        self._units = units
        self._reducer = reducer
        self._shared = shared
        self._carrier = GradientCarrier()

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        self._reducer.begin(is_first=is_first, is_last=is_last)

    def finish(self) -> list[Tensor]:
        self._reducer.finish()
        views: dict[str, Tensor] = {}
        for number, unit in enumerate(self._units.units):
            parts = unit.owned_views(self._reducer.owned(number))
            views.update(zip((item.name for item in unit.trained), parts, strict=True))
        trained = self._units.trained
        # In the model's order, whatever the units: the norm is then summed in the same order too, and two
        # ranks follow the very bits of one rank with two micro-batches.
        return self._shared.sum_up(trained, [views[item.name] for item in trained])

    def update(self, update: Update) -> None:
        # In the order in which the next forward pass needs them.
        units = self._units.units
        numbers = list(reversed(range(len(units))))
        carried = self._carrier.carried(
            [self._reducer.owned(number) for number in numbers], [units[number].masters for number in numbers]
        )
        for number, gradients in zip(numbers, carried, strict=True):
            update(units[number].trained, units[number].owned_views(gradients))
            self._follow(number)

    def masters_were_filled(self) -> None:
        for number in reversed(range(len(self._units.units))):
            self._follow(number)
        self.settle()

    def settle(self) -> None:
        """Nothing is under way behind an update."""

    def gradient_bytes(self) -> int:
        return self._reducer.num_bytes

    def close(self) -> None:
        self._reducer.close()

    def _follow(self, number: int) -> None:
        follow(self._units.units[number])


class Updated(Reduced):
    """Every rank keeps all parameters and updates its range of them (ZeRO-1 and -2)."""

    def __init__(self, units: Units, reducer: Reducer, shared: SharedGradients, arrivals: Arrivals) -> None:
        super().__init__(units, reducer, shared)
        self._arrivals = arrivals

    def settle(self) -> None:
        self._arrivals.settle()

    def close(self) -> None:
        super().close()
        self._arrivals.close()

    def _follow(self, number: int) -> None:
        super()._follow(number)
        self._arrivals.start(number)


class Gathered(Reduced):
    """Every rank keeps its range of the parameters and fetches others while it needs them (ZeRO-3)."""

    def __init__(self, units: Units, reducer: Reducer, shared: SharedGradients, gatherer: Gatherer) -> None:
        super().__init__(units, reducer, shared)
        self._gatherer = gatherer

    def begin(self, *, is_first: bool, is_last: bool) -> None:
        super().begin(is_first=is_first, is_last=is_last)
        self._gatherer.begin()

    def update(self, update: Update) -> None:
        self._gatherer.forget()
        super().update(update)

    def masters_were_filled(self) -> None:
        self._gatherer.forget()
        super().masters_were_filled()

    def close(self) -> None:
        super().close()
        self._gatherer.close()
