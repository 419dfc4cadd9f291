"""The search against brute force: what it may look at, what it finds, and what it says binds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import case

from conf.schema import ClusterConfig, Config, LauncherName, ParallelismConfig, Recompute, TrainConfig
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.config.rules.all_rules import problems_of
from orchestra.plan.assemble import for_planning
from orchestra.plan.devices import data_sheet_network
from orchestra.plan.explain import MEMORY, bounds, differences
from orchestra.plan.predict import Prediction, predict
from orchestra.plan.search import Found, peak_that_fits, remedies, search
from orchestra.plan.space import Fixed, LayoutChoice, MeshDegrees, Space, choice_of, space_of, turns

# A quarter of an 8B model's layers on two nodes: everything fits or does not for several reasons.
SMALL = {"num_hidden_layers": 8, "num_key_value_heads": 8, "num_gpus": 16, "dp": 16, "seq_len": 8192}
TIGHT = {"gpu_memory_gib": 20}


def space(num_sequences: int = 24, fixed: Fixed | None = None, **changes: object) -> Space:
    return Space(case(**{**SMALL, **TIGHT, **changes}), num_sequences, fixed or Fixed())


@pytest.fixture(scope="module")
def whole() -> Space:
    return space()


@pytest.fixture(scope="module")
def everything(whole: Space) -> list[Prediction]:
    return [predict(whole.case(choice)) for choice in whole.choices()]


@pytest.fixture(scope="module")
def found(whole: Space) -> Found:
    return search(whole, 5)


def test_the_best_found_is_the_best_of_all(found: Found, everything: list[Prediction]) -> None:
    fitting = [it for it in everything if it.fits]
    assert (found.num_layouts, found.num_fitting) == (len(everything), len(fitting))
    assert 0 < len(fitting) < len(everything)
    meshes: dict[MeshDegrees, float] = {}
    for it in fitting:
        mesh = choice_of(it.case).mesh
        meshes[mesh] = max(meshes.get(mesh, 0.0), it.tokens_per_s)
    best = sorted(meshes.values(), reverse=True)
    assert [it.tokens_per_s for it in found.ranked] == pytest.approx(best[:5])


def test_nothing_that_is_found_dominates_or_is_dominated(found: Found, everything: list[Prediction]) -> None:
    points = {(it.time.total, it.peak.total) for it in everything if it.fits}
    front = {
        (time, peak)
        for time, peak in points
        if not any(t <= time and p <= peak and (t, p) != (time, peak) for t, p in points)
    }
    assert {(it.time.total, it.peak.total) for it in found.pareto} == front
    speeds = [it.tokens_per_s for it in found.pareto]
    assert speeds == sorted(speeds, reverse=True)


def test_the_best_with_each_value_is_the_best_of_all_with_it(
    found: Found, everything: list[Prediction]
) -> None:
    for knob, at in found.by_value.items():
        for value, best in at.items():
            others = [it for it in everything if it.fits and choice_of(it.case).value(knob) == value]
            if best is None:
                assert not others
            else:
                assert best.tokens_per_s == pytest.approx(max(it.tokens_per_s for it in others))


def config_of(choice: LayoutChoice, num_sequences: int) -> Config:
    mesh = choice.mesh
    base = case(**SMALL).model
    return Config(
        model=base,
        parallelism=ParallelismConfig(
            tp=mesh.tp,
            pp=mesh.pp,
            cp=mesh.cp,
            zero=choice.zero,
            sequence_parallel=choice.sequence_parallel,
        ),
        train=TrainConfig(
            seq_len=8192,
            global_batch_size=num_sequences,
            micro_batch_size=choice.micro_batch_size,
            recompute=choice.recompute,
        ),
        cluster=ClusterConfig(nodes=2, gpus_per_node=8, launcher=LauncherName.slurm),
    )


def test_the_space_is_what_the_rules_of_a_configuration_allow() -> None:
    """Over all degrees that multiply out to the ranks, tp inside a node and cp with 4,096 tokens a rank."""
    plan, whole = Situation("plan"), space()
    possible = {
        MeshDegrees(dp, tp, pp, cp)
        for tp in (1, 2, 3, 4, 5, 6, 7, 8)
        for pp in range(1, 17)
        for cp in (1, 2)
        for dp in range(1, 17)
        if dp * tp * pp * cp == 16
    }
    allowed = {
        mesh
        for mesh in possible
        if not problems_of(config_of(LayoutChoice(mesh, 0, False, Recompute.none, 1), 24), plan)
    }
    assert set(whole.meshes()) == allowed
    for choice in list(whole.choices())[::7]:
        assert problems_of(config_of(choice, 24), plan) == []
    for it in whole.choices():
        made = whole.case(it)
        assert made.tokens_per_step == 24 * 8192
        assert made.layout.world_size == 16
        assert choice_of(made) == it


def test_values_that_are_given_stay() -> None:
    kept = Fixed(tp=2, zero=1, recompute=Recompute.full, micro_batch_size=2)
    found = search(space(fixed=kept), 3)
    assert found.num_fitting
    for it in [*found.ranked, *found.pareto]:
        choice = choice_of(it.case)
        assert (choice.mesh.tp, choice.zero, choice.micro_batch_size) == (2, 1, 2)
        assert choice.recompute is Recompute.full


def test_only_chosen_layouts_are_ranked_apart(whole: Space, everything: list[Prediction]) -> None:
    found = search(whole, 1, lambda it: it.layout.pp == 1)
    best = max(it.tokens_per_s for it in everything if it.fits and it.case.layout.pp == 1)
    assert found.chosen[0].tokens_per_s == pytest.approx(best)
    assert all(it.case.layout.pp == 1 for it in found.chosen)


def test_where_nothing_fits_the_nearest_and_what_helps_are_told() -> None:
    tight = space(gpu_memory_gib=3)
    found = search(tight, 3)
    assert not found.ranked
    assert not found.pareto
    assert found.nearest is not None
    least = min(predict(found.space.case(choice)).peak.total for choice in found.space.choices())
    assert found.nearest.peak.total == pytest.approx(least)


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


def test_a_search_looks_further_only_where_nothing_fits() -> None:
    roomy = search(space(), 1)
    assert not roomy.space.wide
    assert max(it.case.layout.tp for it in roomy.pareto) <= 8
    assert search(space(gpu_memory_gib=3), 1).space.wide


def test_a_turn_changes_one_knob_and_what_must_go_along(whole: Space) -> None:
    here = whole.case(LayoutChoice(MeshDegrees(4, 2, 2, 1), 1, True, Recompute.none, 2))
    for knob, other in turns(whole, here):
        before, after = choice_of(here), choice_of(other)
        changed = {
            name
            for name in ("tp", "pp", "cp", "zero", "sequence_parallel", "recompute", "micro_batch_size")
            if before.value(name) != after.value(name)
        }
        assert knob in changed
        along = {"micro_batch_size", "sequence_parallel", "zero"} if knob in ("tp", "pp", "cp") else set()
        assert changed <= {knob} | along


def test_memory_binds_where_a_turn_would_be_faster_if_it_fitted(whole: Space) -> None:
    repeated = predict(whole.case(LayoutChoice(MeshDegrees(8, 1, 1, 2), 1, False, Recompute.full, 1)))
    assert repeated.fits
    bound = next(it for it in bounds(whole, repeated) if it.name == MEMORY)
    assert bound.faster is not None
    assert not bound.faster.fits
    assert bound.share == pytest.approx(1 - bound.faster.time.total / repeated.time.total)


def test_a_slow_network_makes_what_goes_over_it_bind(whole: Space) -> None:
    slow = replace(whole.base, network=data_sheet_network(1e9))
    between = predict(
        replace(whole, base=slow).case(LayoutChoice(MeshDegrees(16, 1, 1, 1), 1, False, Recompute.none, 1))
    )
    assert bounds(replace(whole, base=slow), between)[0].name == "exposed reduction"
    idle = predict(whole.case(LayoutChoice(MeshDegrees(1, 2, 8, 1), 0, True, Recompute.none, 16)))
    assert next(it for it in bounds(whole, idle) if it.name != MEMORY).name == "pipeline bubble"


def test_differences_add_up_to_the_difference_of_the_step() -> None:
    whole = space()
    one, other = (
        predict(whole.case(LayoutChoice(MeshDegrees(8, 2, 1, 1), 1, True, how, 1)))
        for how in (Recompute.none, Recompute.full)
    )
    told = differences(one, other)
    assert sum(it.seconds for it in told) == pytest.approx(other.time.total - one.time.total)
    assert told[0].name == "recomputation"
