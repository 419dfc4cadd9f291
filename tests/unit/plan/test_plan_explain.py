"""`orchestra plan --explain`: the three decisions, and what each value of a key would do."""

from __future__ import annotations

import json

import pytest
from plan_cases import case

from conf.schema import Recompute
from orchestra.cli import main
from orchestra.errors import EXIT_USAGE
from orchestra.plan.explain import Explanation, explain
from orchestra.plan.predict import predict
from orchestra.plan.space import KEYS, choice_of

SHAPE = {"num_hidden_layers": 8, "num_key_value_heads": 8, "num_gpus": 16, "seq_len": 8192}
TIGHT = {**SHAPE, "gpu_memory_gib": 20, "dp": 4, "tp": 4, "zero": 1, "grad_accum": 6, "recompute": "full"}
TYPED = ["model=llama3_8b", "precision=bf16", "train.seq_len=8192", "train.global_batch_size=64"]


@pytest.fixture(scope="module")
def told() -> Explanation:
    return explain(case(**TIGHT, sequence_parallel=1))


def test_a_value_alone_is_the_same_layout_with_that_value(told: Explanation) -> None:
    for stage, option in enumerate(told.options["zero"]):
        assert option.value == stage
        assert option.turned is not None
        alone = predict(case(**{**TIGHT, "zero": stage}, sequence_parallel=1))
        assert option.turned.time == alone.time
        assert option.turned.peak == alone.peak
    [with_tp_2] = [it.turned for it in told.options["tp"] if it.value == 2]
    assert with_tp_2 is not None
    assert with_tp_2.case.layout.dp == 8
    assert with_tp_2.case.accumulation == 3


def test_the_best_with_a_value_is_never_slower_than_the_value_alone(told: Explanation) -> None:
    for knob, options in told.options.items():
        for option in options:
            if option.best is not None:
                assert option.best.fits
                assert choice_of(option.best.case).value(knob) == option.value
            if option.turned is not None and option.turned.fits:
                assert option.best is not None
                assert option.best.tokens_per_s >= option.turned.tokens_per_s * (1 - 1e-9)


def test_the_best_is_that_of_its_own_values(told: Explanation) -> None:
    assert told.best is not None
    for knob, options in told.options.items():
        value = choice_of(told.best.case).value(knob)
        [mine] = [it.best for it in options if it.value == value]
        assert mine is not None
        assert mine.tokens_per_s == told.best.tokens_per_s
        assert all(it.best is None or it.best.tokens_per_s <= mine.tokens_per_s for it in options)


def test_turns_that_make_a_step_fit_do() -> None:
    larger = {"recompute": "none", "zero": 0, "micro_batch_size": 3, "grad_accum": 2, "gpu_memory_gib": 16}
    unfit = explain(case(**{**TIGHT, **larger}, sequence_parallel=1))
    assert not unfit.here.fits
    assert unfit.fitting_turns
    assert all(turned.fits for _, turned in unfit.fitting_turns)
    speeds = [turned.tokens_per_s for _, turned in unfit.fitting_turns]
    assert speeds == sorted(speeds, reverse=True)
    full = [it for knob, it in unfit.fitting_turns if knob == "recompute"]
    assert all(it.case.recompute is not Recompute.none for it in full)


def test_all_keys_are_explained_in_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """An override right behind the option is no key."""
    assert main(["plan", "--explain", *TYPED, "cluster.nodes=2"]) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    assert not any(line != line.rstrip() for line in text.splitlines())
    for word in ("1  fit a step", "2  reach the global batch", "3  throughput", *KEYS.values()):
        assert word in text
    assert "One turn makes it fit" in text


def test_one_key_is_explained_by_its_name_or_its_last_word(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for key in ("parallelism.zero", "zero"):
        assert main(["plan", "--explain", key, *TYPED, "parallelism=zero3", "--json"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    facts = json.loads(texts[0])
    assert list(facts["keys"]) == ["parallelism.zero"]
    values = facts["keys"]["parallelism.zero"]
    assert [it["value"] for it in values] == ["0", "1", "2", "3"]
    assert values[3]["alone"]["tokens_per_s"] == facts["here"]["tokens_per_s"]


def test_a_key_that_is_not_turned_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--explain", "parallelism.tpp", *TYPED]) == EXIT_USAGE
    assert "did you mean parallelism.tp?" in capsys.readouterr().err
