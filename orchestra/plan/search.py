"""Finds the layouts of a space that fit, the fastest of them, and those that buy speed with memory.

What it returns is predicted in full (`predict.predict`); what it need not look at is passed over by two
cheap facts. Memory: of a mesh's stages alike the first is the fullest, and a micro-batch of more sequences
takes no less, so that the first size that does not fit is the last to try; but where nobody has the same
parameters gradients are made late, and fewer micro-batches may find fewer of them. Time: a step takes at
least its micro-batches on the slowest stage, so layouts are predicted in that order until none that is left
can win. A predicate limits the choice to the layouts that a trainer can run.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from conf.schema import Config, Offload, Recompute
from orchestra.plan.case import PlanCase, has_idle_stage
from orchestra.plan.compute import head_time, layer_time, mean_layer_time
from orchestra.plan.frameworks import OWN
from orchestra.plan.predict import Prediction, predict, step_time
from orchestra.plan.space import Fixed, LayoutChoice, MeshDegrees, Space, Value, space_of, values_of
from orchestra.plan.stage_memory import fullest_stage_bytes, least_bytes
from orchestra.sizes.advice import AFTER_SEARCH, OFFLOAD, MemoryNeed, unless_refused, what_fits

# Times that differ by less are the same but for rounding, and so, to those who choose, are peaks within 5 %.
_SAME_TIME = 1e-9
_SAME_PEAK = 1.05
_LESS_ROUNDING = 1 - 1e-9


class Candidate(NamedTuple):
    """A layout that fits: its peak, and the least seconds a step can take."""

    choice: LayoutChoice
    case: PlanCase
    peak_bytes: float
    least_s: float


class TimedLayout(NamedTuple):
    """A candidate, the seconds that its step takes, and what results are ordered by."""

    time_s: float
    candidate: Candidate
    order: tuple[float, int, int, bool, float]


@dataclass(frozen=True)
class SearchResult:
    """What a search found. `ranked` has the best layout of each mesh, the fastest first, and `pareto` all
    layouts that no other beats in speed and memory, the fastest first. Where nothing fits both are empty and
    `nearest` is the layout that needs the least memory.
    """

    space: Space
    num_layouts: int
    num_fitting: int
    ranked: tuple[Prediction, ...]
    chosen: tuple[Prediction, ...]
    pareto: tuple[Prediction, ...]
    # For each knob and each value it can take the best layout with it; None where none fits.
    by_value: Mapping[str, Mapping[Value, Prediction | None]]
    nearest: Prediction | None


def search(space: Space, top: int, is_chosen: Callable[[PlanCase], bool] = lambda _: True) -> SearchResult:
    """Search a space for the `top` best meshes, and for the best among those that `is_chosen` takes too.

    Where nothing fits it looks again beyond the limits that a space has unless it is wide.
    """
    known: dict[LayoutChoice, Candidate] = {}
    num_layouts, fitting, nearest = _survey(space, known)
    if not fitting and not space.wide:
        wider = replace(space, wide=True)
        further, fitting, nearest_of_all = _survey(wider, known)
        if further > num_layouts:
            space, num_layouts, nearest = wider, further, nearest_of_all
    race = _Race(fitting)
    return SearchResult(
        space=space,
        num_layouts=num_layouts,
        num_fitting=len(fitting),
        ranked=race.fastest(top, lambda _: True),
        chosen=race.fastest(top, lambda layout: is_chosen(layout.case)),
        pareto=race.pareto(),
        by_value={knob: race.by_value(knob, values) for knob, values in values_of(space).items()},
        nearest=None if fitting or nearest is None else predict(nearest),
    )


def peak_that_fits(space: Space) -> float | None:
    """Return the peak of some layout that fits, in bytes; None where none of those fits that take little:
    with the smallest micro-batch, the most recomputation and the last two of ZeRO's stages.
    """
    usable = space.base.device.usable_bytes
    for mesh in space.meshes():
        sizes, kinds = space.micro_batch_sizes(mesh)[:1], list(space.kinds(mesh))
        for size, zero, (split, recompute) in itertools.product(sizes, space.zero_stages(mesh)[-2:], kinds):
            case = space.case(
                LayoutChoice(mesh, zero, split, recompute, size, space.shard_degrees(mesh, zero)[0])
            )
            if recompute is not kinds[0][1] or has_idle_stage(case.stages) or _exceeds(case, usable):
                continue
            peak = fullest_stage_bytes(case, layer_time(case))
            if peak <= usable:
                return peak
    return None


def remedies(config: Config, space: Space) -> list[tuple[str, float, str]]:
    """Return what makes a layout fit where none of a configuration's space does, each change by itself: the
    overrides (or what to leave out), the bytes that the layout then takes, and why.
    """
    freed = []
    if space.fixed != Fixed():
        peak = peak_that_fits(replace(space, fixed=Fixed()))
        if peak is not None:
            freed.append(("the values that were kept", peak, "where the search chooses them"))
    ways = [way for way in AFTER_SEARCH if way is not OFFLOAD or space.base.framework.name == OWN]

    def judge(candidate: Config) -> MemoryNeed | None:
        fixed = space.fixed
        if candidate.parallelism.offload is Offload.all:
            fixed = replace(fixed, zero=3)
        again = space_of(candidate, space.base.framework.name, space.num_sequences, fixed)
        peak = peak_that_fits(replace(again, wide=space.wide))
        return None if peak is None else MemoryNeed(peak, fits=True)

    helping = what_fits(config, space.base.layout.world_size, unless_refused(judge), ways)
    return [*freed, *((remedy.overrides, remedy.peak_bytes, remedy.way.why) for remedy in helping)]


def _survey(
    space: Space, known: dict[LayoutChoice, Candidate]
) -> tuple[int, list[Candidate], PlanCase | None]:
    """Return how many layouts there are, those that fit, and the case that takes the least memory. `known`:
    layouts of this space, or of one inside of it, that were looked at; those that are here are added.
    """
    usable = space.base.device.usable_bytes
    num_layouts, fitting = 0, []
    nearest: tuple[float, PlanCase | None] = (float("inf"), None)
    for mesh in space.meshes():
        sizes = space.micro_batch_sizes(mesh)
        for smallest in space.kinds_of_mesh(mesh):
            num_layouts += len(sizes)
            is_full = False
            for size in sizes:
                choice = smallest._replace(micro_batch_size=size)
                case = space.case(choice)
                if has_idle_stage(case.stages) or _exceeds(case, max(usable, nearest[0])):
                    break
                if is_full and not case.makes_gradients_late:
                    continue
                candidate = known.get(choice) or _candidate(choice, case)
                known[choice] = candidate
                if candidate.peak_bytes < nearest[0]:
                    nearest = candidate.peak_bytes, candidate.case
                is_full = candidate.peak_bytes > usable
                if not is_full:
                    fitting.append(candidate)
                elif not case.is_counted_in_full or mesh.dp * mesh.cp > 1:
                    break
    return num_layouts, fitting, nearest[1]


def _exceeds(case: PlanCase, num_bytes: float) -> bool:
    """Whether a layout takes more than so many bytes even without its steps; the margin is for rounding."""
    return least_bytes(case) * _LESS_ROUNDING > num_bytes


def _candidate(choice: LayoutChoice, case: PlanCase) -> Candidate:
    layer, head = mean_layer_time(case), head_time(case)
    slowest = max(stage.num_layers * layer.total + head * stage.has_head for stage in case.stages)
    return Candidate(choice, case, fullest_stage_bytes(case, layer), case.accumulation * slowest)


class _Race:
    """Candidates by the least they can take, and what has been predicted of them."""

    def __init__(self, fitting: Iterable[Candidate]) -> None:
        self._candidates = sorted(fitting, key=lambda layout: (layout.least_s, layout.peak_bytes))
        self._timed: dict[LayoutChoice, TimedLayout] = {}
        self._predicted: dict[LayoutChoice, Prediction] = {}

    def _time(self, candidate: Candidate) -> TimedLayout:
        if candidate.choice not in self._timed:
            time_s = step_time(candidate.case).total
            self._timed[candidate.choice] = TimedLayout(time_s, candidate, _order(time_s, candidate))
        return self._timed[candidate.choice]

    def _predict(self, layout: TimedLayout) -> Prediction:
        choice, case, *_ = layout.candidate
        if choice not in self._predicted:
            self._predicted[choice] = predict(case)
        return self._predicted[choice]

    def fastest(self, top: int, is_wanted: Callable[[Candidate], bool]) -> tuple[Prediction, ...]:
        """Return the best layout of each of the `top` best meshes, among those that are wanted."""
        return self._fastest(top, filter(is_wanted, self._candidates))

    def _fastest(self, top: int, candidates: Iterable[Candidate]) -> tuple[Prediction, ...]:
        """Return the same of candidates, those first that can take the least time."""
        best: dict[MeshDegrees, TimedLayout] = {}
        limit_s = math.inf
        for candidate in candidates:
            if candidate.least_s > limit_s:
                break
            mesh, layout = candidate.choice.mesh, self._time(candidate)
            before = best.get(mesh)
            if before is None or layout.order < before.order:
                best[mesh] = layout
                times = sorted(layout.time_s for layout in best.values())
                limit_s = times[top - 1] * (1 + _SAME_TIME) if len(times) >= top else math.inf
        return tuple(map(self._predict, sorted(best.values(), key=attrgetter("order"))[:top]))

    def pareto(self) -> tuple[Prediction, ...]:
        """Return what no other layout beats in both: the fastest first, each next one takes less memory."""
        front: list[tuple[float, float]] = []
        for candidate in self._candidates:
            if not _is_beaten(front, candidate.least_s, candidate.peak_bytes):
                _put(front, self._time(candidate).time_s, candidate.peak_bytes)
        at = {
            (layout.time_s, layout.candidate.peak_bytes): layout for layout in reversed(self._timed.values())
        }
        return tuple(self._predict(at[point]) for point in front)

    def by_value(self, knob: str, values: Iterable[Value]) -> dict[Value, Prediction | None]:
        """Return the best layout with each value of a knob; None where none fits."""
        with_value: dict[Value, list[Candidate]] = {value: [] for value in values}
        for candidate in self._candidates:
            with_value[candidate.choice.value(knob)].append(candidate)
        return {value: next(iter(self._fastest(1, its)), None) for value, its in with_value.items()}


def _order(time_s: float, candidate: Candidate) -> tuple[float, int, int, bool, float]:
    """Return what results are ordered by: time; of those that take the same, the one with the fewest axes;
    then much less memory; then what recomputes nothing.
    """
    choice, _, peak_bytes, _ = candidate
    mesh = choice.mesh
    return (
        float(f"{time_s:.9g}"),
        sum(size > 1 for size in (mesh.tp, mesh.pp, mesh.cp, mesh.ep)),
        round(math.log(peak_bytes, _SAME_PEAK)),
        choice.recompute is not Recompute.none,
        peak_bytes,
    )


def _is_beaten(front: list[tuple[float, float]], time_s: float, peak_bytes: float) -> bool:
    """Whether a point of the front, which is sorted by time, is as fast and takes as little memory."""
    place = bisect.bisect_right(front, (time_s, float("inf"))) - 1
    return place >= 0 and front[place][1] <= peak_bytes


def _put(front: list[tuple[float, float]], time_s: float, peak_bytes: float) -> None:
    if _is_beaten(front, time_s, peak_bytes):
        return
    place = bisect.bisect_left(front, (time_s, peak_bytes))
    end = place
    while end < len(front) and front[end][1] >= peak_bytes:
        end += 1
    front[place:end] = [(time_s, peak_bytes)]
