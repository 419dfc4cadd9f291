"""How a rank's memory grows: what is built, the first step, and all later ones; and what lies in host memory.

torch's optimizers make their moments in the first update, so that a first step which fits says nothing of the
second one. orchestra makes them before it trains; its first sums over ranks then take buffers that stay. It
predicts no peak of its own: all of it is taken from `Memory`.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Offload
from orchestra.plan.cases.case import Case
from orchestra.plan.cases.frameworks import OWN
from orchestra.plan.cases.stages import Stage, held_by_rank
from orchestra.plan.costs.memory import Memory
from orchestra.plan.costs.own_memory import own_bytes, rank_parameters

_FP32 = 4


@dataclass(frozen=True)
class OverTime:
    """Bytes of a rank: before it trains, at the most of the first step, and of every later one."""

    built: float
    first_step: float
    later_steps: float

    @property
    def growth(self) -> float:
        """What the second step takes more than the first."""
        return self.later_steps - self.first_step


def over_time(case: Case, stage: Stage, peak: Memory) -> OverTime:
    """Return how the memory of a stage's rank comes to its peak."""
    fixed = peak.parameters + peak.masters + peak.framework
    if case.is_counted_in_full:
        own = own_bytes(case, stage)
        first = peak.total - own.growing_buffers * (case.accumulation == 1)
        # Alone, gradients are autograd's own and come with the first backward pass.
        kept = peak.gradients + peak.accumulation if case.layout.dp * case.layout.cp > 1 else 0.0
        return OverTime(fixed + peak.optimizer + kept + own.first_buffers, first, peak.total)
    return OverTime(fixed, peak.total - peak.optimizer, peak.total)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of host memory that a rank of orchestra's trainer takes beside its process."""

    offloaded: float
    checkpoint_image: float

    @property
    def total(self) -> float:
        """The sum."""
        return self.offloaded + self.checkpoint_image


def host_memory(case: Case, stage: Stage) -> HostMemory:
    """Return what is offloaded, and the image of masters and moments that is staged while training goes on:
    every element once over the ranks that have it.
    """
    if case.framework.name != OWN:
        return HostMemory(0.0, 0.0)
    choices, ranks = case.choices, case.layout.dp * case.layout.cp
    held = held_by_rank(case.model, stage, case.layout)
    count = held.dense / ranks + held.experts / max(1, ranks // case.layout.ep)
    if case.is_counted_in_full:
        count = rank_parameters(case.model, case.layout.tp).of(stage) / ranks
    image = count * (_FP32 + 2 * choices.moment_bytes) if choices.saves else 0.0
    offloaded = own_bytes(case, stage).host if choices.offload is not Offload.none else 0.0
    return HostMemory(offloaded, image)
