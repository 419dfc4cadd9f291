"""Which ranks have which experts, in a run that may move them (`parallelism.expert_placement=auto`).

A layer's experts are planned anew when a state is saved by its rhythm, by the tokens since the one before;
the save says the new placement, and once it is staged they move. A run that goes on with that save begins
where the others went on. The tokens are the same on all ranks, yet rank 0 alone plans: that they are rests on
routers that choose alike on all ranks of tensor parallelism, and ranks of different plans would wait for each
other forever. Built by `parallelize`, called by `train.state` and `train.checkpoints`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from conf.schema import Config, ExpertPlacement
from orchestra.errors import UnusableCheckpointError
from orchestra.model.transformer import Transformer
from orchestra.optim.adamw import Trained
from orchestra.parallel.expert_balance import ExpertBalance, mixtures_of
from orchestra.parallel.experts.exchanged_dispatch import ExchangedDispatch
from orchestra.parallel.experts.expert_shares import ExpertShares
from orchestra.parallel.experts.move_experts import ExpertExchange, moved_experts, rounds_of_pieces
from orchestra.parallel.mesh import Mesh
from orchestra.parallel.places import TensorPlace, layer_of_experts
from orchestra.parallel.zero.buffers import Units
from orchestra.run.events import is_whole

# Returns rank 0's answer to a question (JSON), which it alone asks itself.
Answered = Callable[[Callable[[], Any]], Any]
# Returns what a rank has of a parameter's state that is shaped like it: the master and what else there is.
StateOf = Callable[[Trained], Sequence[Tensor]]


@dataclass(frozen=True)
class MovedExperts:
    """How many experts have moved in how many layers. The bytes are those that this rank has sent, the loads
    the tokens of the busiest rank over those of the mean one, of the worst of these layers: as measured
    before, and as they would have been.
    """

    layers: int
    experts: int
    bytes: int
    load_before: float
    load_expected: float
    seconds: float


class PlacedExperts:
    """The placement of the experts of all layers, on one rank. `places` are followed: where this rank's parts
    of the parameters lie.
    """

    def __init__(
        self,
        model: Transformer,
        places: MutableMapping[str, TensorPlace],
        units: Units,
        balance: ExpertBalance,
        mesh: Mesh,
    ) -> None:
        self._mixtures, self._places, self._units = mixtures_of(model), places, units
        self._balance, self._mesh = balance, mesh
        self._exchange = ExpertExchange(mesh)
        # The layers that are to move, and the worst loads of these: before, and by the plan.
        self._planned: dict[int, ExpertShares] = {}
        self._loads = (1.0, 1.0)

    def plan(self, answered: Answered) -> None:
        """Plan by rank 0's tokens since the last plan which experts are to move. *Collective*."""
        plan = answered(self._plan)
        own = self._balance.shares
        self._planned = {
            number: replace(shares, order=tuple(plan["order"][str(number)]))
            for number, shares in own.items()
            if str(number) in plan["order"]
        }
        self._loads = plan["load_before"], plan["load_expected"]
        self._balance.count_anew({})

    def _plan(self) -> dict[str, Any]:
        """Return the order of each layer whose experts are to move, and the loads, as JSON. Waits for the
        device.
        """
        tokens, order, before, expected = self._balance.tokens_since(), {}, [1.0], [1.0]
        for number, shares in self._balance.shares.items():
            evened = shares.evened(tokens[number])
            if moved_experts(shares, evened):
                order[str(number)] = list(evened.order)
                before.append(shares.largest_over_mean(tokens[number]))
                expected.append(evened.largest_over_mean(tokens[number]))
        return {"order": order, "load_before": max(before), "load_expected": max(expected)}

    @property
    def is_planned(self) -> bool:
        """Whether any are to move."""
        return bool(self._planned)

    def state(self) -> dict[str, Any]:
        """Return the placement, as planned, of layers whose experts are not in their own order, and the
        tokens since then of layers that have had some, as JSON. Waits for the device.
        """
        placed = {**self._balance.shares, **self._planned}
        tokens = self._balance.tokens_since()
        return {
            "ep": self._mesh.layout.ep,
            "order": {
                str(number): list(shares.order) for number, shares in placed.items() if shares.is_reordered
            },
            "tokens": {str(number): of_layer for number, of_layer in tokens.items() if any(of_layer)},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` says; of another `ep`, or empty, it leaves experts in their own order. No
        tensor is moved: they are filled afterwards, or were. *Any rank*.

        Raises UnusableCheckpointError where it says what no run has written.
        """
        own = {number: replace(shares, order=()) for number, shares in self._balance.shares.items()}
        stored = _stored_shares(state, own)
        shares = {**own, **stored} if state.get("ep") == self._mesh.layout.ep else own
        self._planned = {}
        self._balance.count_anew(_by_layer(state, "tokens", own))
        self._follow(shares)

    @torch.no_grad()
    def move(self, state_of: StateOf) -> MovedExperts:
        """Bring the planned experts to their ranks. *Collective*.

        Nobody else may read or write the state meanwhile, and parameters must follow it afterwards.
        """
        began = time.perf_counter()
        old = dict(self._balance.shares)
        planned, self._planned = self._planned, {}
        num_bytes = 0
        for unit in self._units.units:
            for member, item in zip(unit.layout.members, unit.trained, strict=True):
                number = layer_of_experts(member.name)
                if number is not None and number in planned:
                    state = state_of(item)
                    for pieces in rounds_of_pieces(unit.layout, member, old[number], planned[number]):
                        num_bytes += self._exchange.exchange(pieces, state, item.start)
        self._follow(planned)
        moved = [moved_experts(old[number], shares) for number, shares in planned.items()]
        before, expected = self._loads
        return MovedExperts(
            layers=len(planned),
            experts=sum(map(len, moved)),
            bytes=num_bytes,
            load_before=before,
            load_expected=expected,
            seconds=time.perf_counter() - began,
        )

    def _follow(self, shares: Mapping[int, ExpertShares]) -> None:
        """Let tokens, and whoever asks where tensors lie, find experts where they are now."""
        self._balance.shares.update(shares)
        for number, mixture in self._mixtures.items():
            if number in shares:
                assert isinstance(mixture.dispatch, ExchangedDispatch)
                mixture.dispatch.follow(shares[number])
        for name, place in self._places.items():
            layer = layer_of_experts(name)
            if layer is not None and layer in shares:
                rows = shares[layer].experts_of(self._mesh.ep_index)
                self._places[name] = replace(place, rows=rows)


def place_experts(
    model: Transformer,
    places: MutableMapping[str, TensorPlace],
    units: Units,
    balance: ExpertBalance | None,
    config: Config,
    mesh: Mesh,
) -> PlacedExperts | None:
    """Return what moves the experts of a model, once all else is in its place; None where they stay."""
    is_fixed = config.parallelism.expert_placement is ExpertPlacement.fixed
    if balance is None or is_fixed or mesh.layout.ep == 1:
        return None
    return PlacedExperts(model, places, units, balance, mesh)


def _by_layer(state: Mapping[str, Any], key: str, own: Mapping[int, ExpertShares]) -> dict[int, list[int]]:
    """Return a list of numbers, one for each expert, of each layer that the state has one of."""
    section = state.get(key, {})
    if not isinstance(section, Mapping):
        raise _wrong(key, "*", section)
    numbers = {str(number): number for number in own}
    found: dict[int, list[int]] = {}
    for name, values in section.items():
        number = numbers.get(name)
        if number is None or not isinstance(values, list) or len(values) != own[number].num_experts:
            raise _wrong(key, name, values)
        if not all(is_whole(value) and value >= 0 for value in values):
            raise _wrong(key, name, values)
        found[number] = values
    return found


def _stored_shares(state: Mapping[str, Any], own: Mapping[int, ExpertShares]) -> dict[int, ExpertShares]:
    orders = _by_layer(state, "order", own)
    for number, order in orders.items():
        if sorted(order) != list(range(own[number].num_experts)):
            raise _wrong("order", str(number), order)
    return {number: replace(own[number], order=tuple(order)) for number, order in orders.items()}


def _wrong(key: str, layer: str, values: object) -> UnusableCheckpointError:
    return UnusableCheckpointError(
        f"the checkpoint's state has experts.{key}.{layer}={values!r}: it was not written by this trainer; "
        "choose the folder of a run's checkpoints (checkpoint.dir)"
    )
