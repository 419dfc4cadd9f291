"""`orchestra plan --explain`: the three decisions, and what each value of a key would do."""

from __future__ import annotations

import pytest
from plan_cases import PlanCommand, case

from conf.schema import Recompute
from orchestra.plan.explain import Explanation, explain
from orchestra.plan.predict import predict
from orchestra.plan.space import KEYS, choice_of

SHAPE = {"num_hidden_layers": 8, "num_key_value_heads": 8, "num_gpus": 16, "seq_len": 8192}
TIGHT = {**SHAPE, "gpu_memory_gib": 20, "dp": 4, "tp": 4, "zero": 1, "grad_accum": 6, "recompute": "full"}
TYPED = ["model=llama3_8b", "precision=bf16", "train.seq_len=8192", "train.global_batch_size=64"]


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explain(case(**TIGHT, sequence_parallel=1))


def test_a_value_alone_is_the_same_layout_with_that_value(explanation: Explanation) -> None:
    for stage, option in enumerate(explanation.options["zero"]):
        assert option.value == stage
        assert option.turned is not None
        alone = predict(case(**{**TIGHT, "zero": stage}, sequence_parallel=1))
        assert option.turned.time == alone.time
        assert option.turned.peak == alone.peak
    [with_tp_2] = [option.turned for option in explanation.options["tp"] if option.value == 2]
    assert with_tp_2 is not None
    assert (with_tp_2.case.layout.dp, with_tp_2.case.accumulation) == (8, 3)


def test_the_best_with_a_value_is_never_slower_than_the_value_alone(explanation: Explanation) -> None:
    for knob, options in explanation.options.items():
        for option in options:
            if option.best is not None:
                assert option.best.fits
                assert choice_of(option.best.case).value(knob) == option.value
            if option.turned is not None and option.turned.fits:
                assert option.best is not None
                assert option.best.tokens_per_s >= option.turned.tokens_per_s * (1 - 1e-9)


def test_the_best_is_that_of_its_own_values(explanation: Explanation) -> None:
    assert explanation.best is not None
    for knob, options in explanation.options.items():
        value = choice_of(explanation.best.case).value(knob)
        speeds = {option.value: option.best.tokens_per_s for option in options if option.best is not None}
        assert speeds[value] == explanation.best.tokens_per_s == max(speeds.values())


def test_turns_that_make_a_step_fit_do() -> None:
    larger = {"recompute": "none", "zero": 0, "micro_batch_size": 3, "grad_accum": 2, "gpu_memory_gib": 16}
    unfit = explain(case(**{**TIGHT, **larger}, sequence_parallel=1))
    assert not unfit.here.fits
    assert unfit.fitting_turns
    assert all(turned.fits for _, turned in unfit.fitting_turns)
    speeds = [turned.tokens_per_s for _, turned in unfit.fitting_turns]
    assert speeds == sorted(speeds, reverse=True)
    repeated = [turned.case.recompute for knob, turned in unfit.fitting_turns if knob == "recompute"]
    assert Recompute.none not in repeated


def test_all_keys_are_explained(plan: PlanCommand) -> None:
    """An override that follows the option at once is no key."""
    text = plan.text("--explain", *TYPED, "cluster.nodes=2")
    for word in ("1  fit a step", "2  reach the global batch", "3  throughput", *KEYS.values()):
        assert word in text
    assert "One turn makes it fit" in text


def test_one_key_is_explained_by_its_name_or_its_last_word(plan: PlanCommand) -> None:
    facts = plan.facts("--explain", "parallelism.zero", *TYPED, "parallelism=zero3")
    assert plan.facts("--explain", "zero", *TYPED, "parallelism=zero3") == facts
    assert list(facts["keys"]) == ["parallelism.zero"]


def test_pipelines_that_a_schedule_does_not_have_are_no_values(plan: PlanCommand) -> None:
    facts = plan.facts("--explain", "pp", *TYPED, "cluster.nodes=1", "parallelism.schedule=interleaved")
    assert [each["value"] for each in facts["keys"]["parallelism.pp"]] == ["1"]
