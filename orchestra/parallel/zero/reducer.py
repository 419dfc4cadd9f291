"""Gradients in flat units: taken as the backward pass makes them, accumulated over micro-batches, and summed
over the data-parallel ranks while it still runs.

The products write those of matrices into the units themselves (`orchestra.model.weight_gradients`); the
others come from autograd and are copied.

Kept whole (ZeRO-0 and -1) they accumulate in full, and a unit's sum starts after its last gradient of the
last micro-batch. Otherwise (ZeRO-2 and -3) a unit's gradients exist only from the first one of a micro-batch
until they are summed into the ranges of their owners, and accumulate there; the memory then serves the next
unit. One rank alone takes a unit's memory with its first gradient of a step and lets it go with the update.
Units start in a fixed order on every rank, whatever order autograd finishes in, so that the collectives
always match.

A pipeline's parts of the model take turns: each has its own micro-batch, and its own order. A matrix that
several parts use, or whose gradient comes at another time than its part's, is `of_step`: its gradients
accumulate in full until all of the step are in.

The sum is not divided: the loss is normalised by the global number of tokens before the backward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from orchestra.model.weight_gradients import LaterGradients, WeightGradient, attach, detach
from orchestra.parallel.zero.buffers import OF_STEP, SpareMemory, Unit, Units
from orchestra.parallel.zero.zero_collectives import DataRanks, Pending
from orchestra.precision.policies import PrecisionPolicy

# Called with a parameter's name and its gradient of a whole micro-batch, before it is summed over ranks.
Watcher = Callable[[str, Tensor], None]
# Sums under way that need memory beside the gradients: one that is sent while the next unit fills.
_MAX_UNDER_WAY = 1


@dataclass
class _Gradients:
    """One unit's gradients. `whole` is None where they are not kept and none of them has come yet.

    `missing` says of each member how many parts of its gradient have not come in this micro-batch, one for
    each use in the model, and `is_begun` whether one has.
    """

    unit: Unit
    owned: Tensor | None
    whole: Tensor | None
    uses: list[int]
    keeps_whole: bool
    views: list[Tensor] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    is_begun: list[bool] = field(default_factory=list)

    @property
    def is_held(self) -> bool:
        """Whether the loss begins it and the embedding ends it, as that of a tied table: memory that it takes
        is missing to the layers between them.
        """
        return max(self.uses) > 1

    def begin(self, num_micro_batches: int = 1) -> None:
        """Expect the gradients of a micro-batch, or of several together."""
        self.missing = [num_micro_batches * number for number in self.uses]
        self.is_begun = [False] * len(self.uses)


@dataclass(frozen=True)
class _MicroBatch:
    """Which of a step's micro-batches a part of the model is in, and how many of the part's units are summed
    or being summed.
    """

    is_first: bool = True
    is_last: bool = True
    num_summed: int = 0


@dataclass(frozen=True)
class _UnderWay:
    """The sum of one unit's ranges, and the micro-batch that it belongs to."""

    gradients: _Gradients
    whole: Tensor
    pending: Pending
    micro_batch: _MicroBatch


class Reducer:
    """Takes the gradients of some units and sums them. *Collective* over the groups of `ranks`.

    After `finish`, `owned(number)` holds the sum of the range that this rank owns of unit `number`. `direct`
    are the parameters whose gradients the model's functions give by themselves, with how often it uses each.
    `keeps_whole`: so does each unit; without it those do that one rank alone has. `is_alone`: nothing is kept
    from one step to the next.
    """

    def __init__(
        self,
        units: Units,
        precision: PrecisionPolicy,
        ranks: DataRanks,
        direct: Mapping[str, int],
        *,
        keeps_whole: bool,
        is_alone: bool = False,
    ) -> None:
        self._ranks = ranks
        self._keeps_whole = keeps_whole
        self.is_alone = is_alone
        self._dtype, self._reduce_dtype = precision.gradient, precision.reduce
        # Keeps what comes while it is open, of all units.
        self.later = LaterGradients()
        self._under_way: deque[_UnderWay] = deque()
        self._of_replicas: list[Pending] = []
        self._watchers: list[Watcher] = []
        self._of_apart: Watcher | None = None
        self._apart: dict[str, Tensor] | None = None
        self._units = [self._made(unit, direct) for unit in units.units]
        passing = [each for each in self._units if not (each.keeps_whole or each.is_held)]
        largest = max((each.unit.layout.size for each in passing), default=0)
        self._spare = SpareMemory(precision.reduce, largest)
        for gradients in self._units:
            gradients.begin()
        self._micro_batches = {unit.part: _MicroBatch() for unit in units.units}
        # Weights know them by their tickets only.
        self._takers: list[WeightGradient] = []
        self._attached: list[Tensor] = []
        self._hooks = []
        for gradients in self._units:
            for number, item in enumerate(gradients.unit.trained):
                taker = self._taker(gradients, number)
                self._takers.append(taker)
                if item.name in direct:
                    attach(item.parameter, taker)
                    self._attached.append(item.parameter)
                hook = item.parameter.register_post_accumulate_grad_hook(_to(taker))  # type: ignore[no-untyped-call]
                self._hooks.append(hook)
        self._tickets = tuple(taker.ticket for taker in self._takers)

    def begin(self, *, is_first: bool, is_last: bool, part: int = 0) -> None:
        """Expect the gradients of a micro-batch in one part of the model."""
        self._micro_batches[part] = _MicroBatch(is_first, is_last)
        for gradients in self._of_part(part):
            gradients.begin()

    def begin_step(self, num_micro_batches: int) -> None:
        """Expect the gradients of a step in the units that are `of_step`."""
        self._micro_batches[OF_STEP] = _MicroBatch()
        for gradients in self._of_part(OF_STEP):
            gradients.begin(num_micro_batches)

    def _of_part(self, part: int) -> list[_Gradients]:
        return [gradients for gradients in self._units if gradients.unit.part == part]

    def finish(self) -> None:
        """Wait for all sums."""
        # A parameter that took no part in the loss would leave its unit unsummed, and the ranks would part.
        assert all(self.is_taken(number) for number in range(len(self._units))), "a parameter got no gradient"
        while self._under_way:
            self._complete()
        for pending in self._of_replicas:
            pending.finish()
        self._of_replicas.clear()

    def owned(self, number: int) -> Tensor:
        """Return the flat gradients of the range that this rank owns of a unit."""
        owned = self._units[number].owned
        assert owned is not None, "no gradient has come yet"
        return owned

    def release(self, number: int) -> None:
        """Let go of a unit's gradients, where the next step has others."""
        if self.is_alone:
            gradients = self._units[number]
            gradients.owned = gradients.whole = None
            gradients.views = []

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let a backward pass run while the graphs of other micro-batches wait for theirs.

        Compiled code says that it changes a weight's ticket; autograd must not take that for a change of what
        those graphs have kept.
        """
        with _unsafe_preserve_version_counter(self._tickets):
            yield

    def is_taken(self, number: int) -> bool:
        """Whether the backward pass of this micro-batch is through with a unit."""
        return not any(self._units[number].missing)

    @property
    def num_bytes(self) -> int:
        """Bytes of the gradients that are kept from one micro-batch to the next."""
        layouts = [(unit.unit.layout, unit.keeps_whole) for unit in self._units]
        sizes = [layout.size if keeps_whole else layout.range_size for layout, keeps_whole in layouts]
        return sum(sizes) * self._dtype.itemsize

    @contextmanager
    def watched(self, watcher: Watcher) -> Iterator[None]:
        """Show `watcher` each parameter's gradient of the first micro-batch, as soon as all of it is in."""
        self._watchers.append(watcher)
        try:
            yield
        finally:
            self._watchers.remove(watcher)

    @contextmanager
    def apart(self, watcher: Watcher) -> Iterator[None]:
        """Show `watcher` each parameter's gradient of one micro-batch that is none of the training's."""
        self._apart, self._of_apart = {}, watcher
        for gradients in self._units:
            gradients.begin()
        try:
            yield
        finally:
            self._apart = self._of_apart = None

    def close(self) -> None:
        """Take no more gradients."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for weight in self._attached:
            detach(weight)

    def _made(self, unit: Unit, direct: Mapping[str, int]) -> _Gradients:
        uses = [direct.get(item.name, 1) for item in unit.trained]
        keeps_whole = self._keeps_whole or unit.part == OF_STEP or self._ranks.of(unit).shard is None
        if self.is_alone:
            return _Gradients(unit, None, None, uses, keeps_whole)
        if not keeps_whole:
            owned = torch.zeros_like(unit.owned, dtype=self._dtype, device=unit.whole.device)
            return _Gradients(unit, owned, None, uses, keeps_whole)
        gradients = _Gradients(unit, None, None, uses, keeps_whole)
        _keep(gradients, torch.zeros_like(unit.whole, dtype=self._dtype))
        return gradients

    def _taker(self, gradients: _Gradients, number: int) -> WeightGradient:
        name = gradients.unit.trained[number].name
        shape, device = gradients.unit.trained[number].parameter.shape, gradients.unit.whole.device
        # What a micro-batch's gradients are made in: those that are kept whole accumulate there too.
        made_in = self._dtype if gradients.keeps_whole else self._reduce_dtype

        def begin() -> tuple[Tensor, bool]:
            adds, gradients.is_begun[number] = gradients.is_begun[number], True
            if self._apart is not None:
                if not adds:
                    self._apart[name] = torch.empty(shape, dtype=made_in, device=device)
                return self._apart[name], adds
            if gradients.whole is None:
                self._give_memory(gradients)
            is_first = self._micro_batches[gradients.unit.part].is_first
            return gradients.views[number], adds or (gradients.keeps_whole and not is_first)

        def end() -> None:
            gradients.missing[number] -= 1
            if gradients.missing[number]:
                return
            is_apart = self._apart is not None
            gradient = self._apart.pop(name) if self._apart is not None else gradients.views[number]
            if self._of_apart is not None:
                self._of_apart(name, gradient)
            elif self._micro_batches[gradients.unit.part].is_first:
                for watcher in self._watchers:
                    watcher(name, gradient)
            if not is_apart and not any(gradients.missing):
                self._sum_ready(gradients.unit.part)

        return WeightGradient(begin, end, self.later)

    def _give_memory(self, gradients: _Gradients) -> None:
        """Let a unit use memory that another one has left; gaps in it hold what they may."""
        unit = gradients.unit
        if self.is_alone:
            _keep(gradients, torch.empty_like(unit.whole, dtype=self._dtype))
            return
        size = unit.layout.size
        is_held = gradients.is_held
        # What is under way at the loss was mostly sent before the forward pass.
        while self._under_way and not (self._spare.suits(size) if is_held else self._spare.has(size)):
            self._complete()
        memory = self._spare.take(size, unit.whole.device, is_held=is_held)
        gradients.whole = memory
        gradients.views = unit.whole_views(memory)

    def _sum_ready(self, part: int) -> None:
        """Start the sums of a part's finished units, in their fixed order; what is kept whole waits for the
        last micro-batch.
        """
        micro_batch = self._micro_batches[part]
        for gradients in self._of_part(part)[micro_batch.num_summed :]:
            if any(gradients.missing):
                return
            micro_batch = replace(micro_batch, num_summed=micro_batch.num_summed + 1)
            self._micro_batches[part] = micro_batch
            if micro_batch.is_last or not gradients.keeps_whole:
                self._sum(gradients, micro_batch)

    def _sum(self, gradients: _Gradients, micro_batch: _MicroBatch) -> None:
        assert gradients.whole is not None
        ranks = self._ranks.of(gradients.unit)
        if ranks.shard is None:
            if ranks.replicate is not None:
                self._of_replicas.append(ranks.replicate.sum_whole(gradients.whole))
            return
        while len(self._under_way) >= _MAX_UNDER_WAY:
            self._complete()
        whole = gradients.whole
        pending = ranks.shard.sum_range(whole[: gradients.unit.layout.size])
        self._under_way.append(_UnderWay(gradients, whole, pending, micro_batch))
        if not gradients.keeps_whole:
            gradients.whole = None
            gradients.views = []

    def _complete(self) -> None:
        """Wait for the oldest sum of ranges, and put it where it belongs."""
        done = self._under_way.popleft()
        done.pending.finish()
        owned = done.gradients.owned
        assert owned is not None
        if not done.gradients.keeps_whole:
            begin, end = done.gradients.unit.layout.range_of(done.gradients.unit.index)
            if done.micro_batch.is_first:
                owned.copy_(done.whole[begin:end])
            else:
                owned.add_(done.whole[begin:end])
            self._spare.give(done.whole)
        replicate = self._ranks.of(done.gradients.unit).replicate
        if done.micro_batch.is_last and replicate is not None:
            self._of_replicas.append(replicate.sum_whole(owned))


def _keep(gradients: _Gradients, whole: Tensor) -> None:
    """Let a unit's gradients lie in `whole`."""
    begin, end = gradients.unit.layout.range_of(gradients.unit.index)
    gradients.whole, gradients.owned = whole, whole[begin:end]
    gradients.views = gradients.unit.whole_views(whole)


def _to(taker: WeightGradient) -> Callable[[Tensor], None]:
    """Return a hook that hands what autograd has accumulated to a taker."""

    def take(parameter: Tensor) -> None:
        # It is called too where all parts were given by functions.
        if parameter.grad is not None:
            taker.add(parameter.grad)
            parameter.grad = None

    return take
