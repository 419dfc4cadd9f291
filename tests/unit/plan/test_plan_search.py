"""The search against brute force: what it may look at, what it finds, and what it says binds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from plan_cases import case

from conf.schema import (
    ClusterConfig,
    Config,
    LauncherName,
    Offload,
    ParallelismConfig,
    Recompute,
    TrainConfig,
)
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.config.rules.all_rules import problems_of
from orchestra.plan.assemble import for_planning
from orchestra.plan.case import PlanCase
from orchestra.plan.compute import LayerTime, layer_time
from orchestra.plan.devices import data_sheet_network
from orchestra.plan.explain import MEMORY, bounds, differences
from orchestra.plan.predict import Prediction, predict
from orchestra.plan.search import SearchResult, peak_that_fits, remedies, search
from orchestra.plan.space import Fixed, LayoutChoice, MeshDegrees, Space, choice_of, space_of, turns
from orchestra.plan.stage_memory import fullest_stage_bytes, least_bytes

# A quarter of an 8B model's layers on two nodes: everything fits or does not for several reasons.
SMALL = {"num_hidden_layers": 8, "num_key_value_heads": 8, "num_gpus": 16, "dp": 16, "seq_len": 8192}
SMALL |= {"gpu_memory_gib": 20}


def space(fixed: Fixed | None = None, **changes: object) -> Space:
    return Space(case(**{**SMALL, **changes}), 24, fixed or Fixed())


@pytest.fixture(scope="module")
def whole() -> Space:
    return space()


@pytest.fixture(scope="module")
def everything(whole: Space) -> list[Prediction]:
    return [predict(whole.case(choice)) for choice in whole.choices()]


def test_a_larger_micro_batch_that_takes_less_is_found() -> None:
    """Of a pipeline of one data-parallel rank, whose gradients are not all there when it holds the most."""
    fixed = Fixed(tp=1, pp=4, recompute=Recompute.selective)
    whole = space(fixed, num_gpus=4, dp=4, seq_len=1024, precision="fp32", framework="orchestra")
    whole = replace(whole, num_sequences=8)
    peaks = {
        choice.micro_batch_size: predict(whole.case(choice)).peak.total / whole.base.device.usable_bytes
        for choice in whole.choices()
    }
    assert min(peaks, key=lambda size: peaks[size]) == max(peaks)
    enough = whole.base.device.memory_bytes * (1 + 1e-9) * peaks[max(peaks)]
    small = replace(whole.base, device=replace(whole.base.device, memory_bytes=enough))
    found = search(replace(whole, base=small), 1)
    assert (found.num_fitting, found.ranked[0].case.micro_batch_size) == (1, max(peaks))


@pytest.fixture(scope="module")
def found(whole: Space) -> SearchResult:
    return search(whole, 5)


def test_the_best_found_is_the_best_of_all(found: SearchResult, everything: list[Prediction]) -> None:
    fitting = [layout for layout in everything if layout.fits]
    assert (found.num_layouts, found.num_fitting) == (len(everything), len(fitting))
    assert 0 < len(fitting) < len(everything)
    meshes: dict[MeshDegrees, float] = {}
    for layout in fitting:
        mesh = choice_of(layout.case).mesh
        meshes[mesh] = max(meshes.get(mesh, 0.0), layout.tokens_per_s)
    best = sorted(meshes.values(), reverse=True)
    assert [layout.tokens_per_s for layout in found.ranked] == pytest.approx(best[:5])


def test_nothing_that_is_found_dominates_or_is_dominated(
    found: SearchResult, everything: list[Prediction]
) -> None:
    points = {(layout.time.total, layout.peak.total) for layout in everything if layout.fits}

    def is_dominated(time: float, peak: float) -> bool:
        return any(t <= time and p <= peak and (t, p) != (time, peak) for t, p in points)

    front = {point for point in points if not is_dominated(*point)}
    assert {(layout.time.total, layout.peak.total) for layout in found.pareto} == front
    speeds = [layout.tokens_per_s for layout in found.pareto]
    assert speeds == sorted(speeds, reverse=True)


def test_the_best_with_each_value_is_the_best_of_all_with_it(
    found: SearchResult, everything: list[Prediction]
) -> None:
    fitting = [layout for layout in everything if layout.fits]
    for knob, best_with in found.by_value.items():
        for value, best in best_with.items():
            speeds = [
                layout.tokens_per_s for layout in fitting if choice_of(layout.case).value(knob) == value
            ]
            assert (best is None) is (not speeds)
            if best is not None:
                assert best.tokens_per_s == pytest.approx(max(speeds))


def config_of(choice: LayoutChoice) -> Config:
    """Return the configuration of one layout of the whole space."""
    degrees = {key: getattr(choice.mesh, key) for key in ("tp", "pp", "cp")}
    size = {"seq_len": 8192, "global_batch_size": 24, "micro_batch_size": choice.micro_batch_size}
    return Config(
        model=case(**SMALL).model,
        parallelism=ParallelismConfig(
            zero=choice.zero, sequence_parallel=choice.sequence_parallel, **degrees
        ),
        train=TrainConfig(recompute=choice.recompute, **size),
        cluster=ClusterConfig(nodes=2, gpus_per_node=8, launcher=LauncherName.slurm),
    )


def test_the_space_is_what_the_rules_of_a_configuration_allow(whole: Space) -> None:
    """Over all degrees that multiply out to the ranks, tp inside a node and cp with 4,096 tokens a rank."""
    plan, ranks = Situation("plan"), range(1, 17)
    possible = (
        MeshDegrees(dp, tp, pp, cp)
        for dp, tp, pp, cp in itertools.product(ranks, range(1, 9), ranks, (1, 2))
        if dp * tp * pp * cp == 16
    )
    plainest = [LayoutChoice(mesh, 0, False, Recompute.none, 1) for mesh in possible]
    allowed = {choice.mesh for choice in plainest if not problems_of(config_of(choice), plan)}
    assert set(whole.meshes()) == allowed
    for choice in list(whole.choices())[::7]:
        assert problems_of(config_of(choice), plan) == []
    for choice in whole.choices():
        made = whole.case(choice)
        assert (made.tokens_per_step, made.layout.world_size) == (24 * 8192, 16)
        assert choice_of(made) == choice


def test_values_that_are_given_stay() -> None:
    given: dict[str, Any] = {"tp": 2, "zero": 1, "recompute": Recompute.full, "micro_batch_size": 2}
    found = search(space(fixed=Fixed(**given)), 3)
    assert found.num_fitting
    for layout in [*found.ranked, *found.pareto]:
        choice = choice_of(layout.case)
        assert {knob: choice.value(knob) for knob in given} == given


def test_only_chosen_layouts_are_ranked_apart(whole: Space, everything: list[Prediction]) -> None:
    found = search(whole, 1, lambda case: case.layout.pp == 1)
    best = max(layout.tokens_per_s for layout in everything if layout.fits and layout.case.layout.pp == 1)
    assert found.chosen[0].tokens_per_s == pytest.approx(best)
    assert all(layout.case.layout.pp == 1 for layout in found.chosen)


def test_where_nothing_fits_a_search_looks_further_and_tells_the_nearest(
    whole: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most layouts take too much without any step: these are not counted in full."""
    roomy = search(whole, 1)
    assert not roomy.space.wide
    assert max(layout.case.layout.tp for layout in roomy.pareto) <= 8
    counted = []

    def count(case: PlanCase, layer: LayerTime) -> float:
        counted.append(case)
        return fullest_stage_bytes(case, layer)

    monkeypatch.setattr("orchestra.plan.search.fullest_stage_bytes", count)
    found = search(space(gpu_memory_gib=3), 3)
    assert found.space.wide
    choices = {choice._replace(micro_batch_size=1) for choice in found.space.choices()}
    # Those that are kept for the wider search are counted once.
    assert len(counted) == len({choice_of(case) for case in counted})
    assert 0 < len({choice_of(case)._replace(micro_batch_size=1) for case in counted}) < 0.75 * len(choices)
    assert not [*found.ranked, *found.pareto]
    assert found.nearest is not None
    least = min(predict(found.space.case(choice)).peak.total for choice in found.space.choices())
    assert found.nearest.peak.total == pytest.approx(least)


@pytest.mark.parametrize("offload", Offload)
def test_what_lasts_is_a_part_of_what_a_stage_takes(whole: Space, offload: Offload) -> None:
    mixture = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}
    for base in (whole.base, replace(whole.base, model=replace(whole.base.model, **mixture))):
        options = replace(base.options, offload=offload)
        several = replace(whole, base=replace(base, options=options))
        for choice in itertools.islice(several.choices(), 0, None, 7):
            made = several.case(choice)
            assert 0 < least_bytes(made) <= fullest_stage_bytes(made, layer_time(made))


def test_each_remedy_that_is_named_makes_something_fit() -> None:
    words = ["model=llama3_70b", "cluster.nodes=1", "precision=fp32"]
    config = compose(for_planning(words), Situation("plan")).config
    tight = space_of(config, "orchestra", 16, Fixed())
    assert peak_that_fits(tight) is None
    helping = {overrides: peak for overrides, peak, _ in remedies(config, tight)}
    assert any(overrides.startswith("cluster.nodes=") for overrides in helping)
    for overrides, peak_bytes in helping.items():
        changed = compose(for_planning([*words, *overrides.split()]), Situation("plan")).config
        roomy = space_of(changed, "orchestra", 16, Fixed())
        assert peak_that_fits(replace(roomy, wide=tight.wide)) == peak_bytes


def test_a_turn_changes_one_knob_and_what_must_go_along(whole: Space) -> None:
    here = whole.case(LayoutChoice(MeshDegrees(4, 2, 2, 1), 1, True, Recompute.none, 2))
    knobs = ("tp", "pp", "cp", "zero", "sequence_parallel", "recompute", "micro_batch_size")
    for knob, turned in turns(whole, here):
        before, after = choice_of(here), choice_of(turned)
        changed = {name for name in knobs if before.value(name) != after.value(name)}
        assert knob in changed
        along = {"micro_batch_size", "sequence_parallel", "zero"} if knob in ("tp", "pp", "cp") else set()
        assert changed <= {knob} | along


def test_memory_binds_where_a_turn_would_be_faster_if_it_fitted(whole: Space) -> None:
    repeated = predict(whole.case(LayoutChoice(MeshDegrees(8, 1, 1, 2), 1, False, Recompute.full, 1)))
    assert repeated.fits
    bound = next(cost for cost in bounds(whole, repeated) if cost.name == MEMORY)
    assert bound.faster is not None
    assert not bound.faster.fits
    assert bound.share == pytest.approx(1 - bound.faster.time.total / repeated.time.total)


def test_a_slow_network_makes_what_goes_over_it_bind(whole: Space) -> None:
    slow = replace(whole, base=replace(whole.base, network=data_sheet_network(1e9)))
    between = predict(slow.case(LayoutChoice(MeshDegrees(16, 1, 1, 1), 1, False, Recompute.none, 1)))
    assert bounds(slow, between)[0].name == "exposed reduction"
    idle = predict(whole.case(LayoutChoice(MeshDegrees(1, 2, 8, 1), 0, True, Recompute.none, 16)))
    assert next(cost for cost in bounds(whole, idle) if cost.name != MEMORY).name == "pipeline bubble"


def test_differences_add_up_to_the_difference_of_the_step(whole: Space) -> None:
    kept = LayoutChoice(MeshDegrees(8, 2, 1, 1), 1, True, Recompute.none, 1)
    repeated = kept._replace(recompute=Recompute.full)
    one, other = (predict(whole.case(choice)) for choice in (kept, repeated))
    parts = differences(one, other)
    assert sum(part.seconds for part in parts) == pytest.approx(other.time.total - one.time.total)
    assert parts[0].name == "recomputation"
