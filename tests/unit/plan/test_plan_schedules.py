"""Pipelines of orchestra's own trainer are planned by their schedule: times and memory of its lists."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from plan_cases import case

from conf.schema import ContextMethod, PipelineSchedule, Recompute
from orchestra.plan.case import PlanCase
from orchestra.plan.pipeline_time import pipeline_time
from orchestra.plan.predict import predict, step_time
from orchestra.plan.stage_memory import fullest_stage_bytes
from orchestra.sizes.memory.layer_memory import layer_of
from orchestra.sizes.pipeline_check import PassTimes, check
from orchestra.sizes.pipeline_schedule import PipelineShape, schedule

PP, MICRO_BATCHES = 4, 32
CHUNKS = {"afab": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zbv": 2}


def pipelined(name: str, **changes: Any) -> PlanCase:
    """A pipeline of stages that are alike but for the output product."""
    usual = case(num_gpus=PP, pp=PP, dp=1, grad_accum=MICRO_BATCHES)
    return replace(usual, schedule=PipelineSchedule[name], virtual_stages=CHUNKS[name], **changes)


@pytest.mark.parametrize("name", CHUNKS)
def test_few_micro_batches_tell_how_long_many_take(name: str) -> None:
    """Against running the whole lists, with stages and messages of any length."""
    drawn = random.Random(name)
    for _ in range(12):
        shape = PipelineShape(drawn.choice([2, 3, 4, 8]), CHUNKS[name], is_v=name == "zbv")
        count = drawn.randint(1, 90)
        forward, inputs, weights = (
            [drawn.uniform(least, 2 * least) for _ in range(shape.num_stages)] for least in (1, 1.2, 0.8)
        )
        times = PassTimes(forward, inputs, weights, drawn.choice([0, 0.05, 0.5]))
        lists = schedule(PipelineSchedule[name], shape, count)
        found = pipeline_time(PipelineSchedule[name], shape, count, times)
        total = found.busy + found.bubble + found.hand_over
        assert total == pytest.approx(check(lists, shape, count, times).makespan_s, rel=0.02), (shape, count)


def test_better_schedules_lose_less_to_the_bubble() -> None:
    bubbles = {name: step_time(pipelined(name)).bubble for name in CHUNKS}
    assert bubbles["zbv"] < bubbles["zero_bubble"] < bubbles["1f1b"] <= bubbles["afab"]
    assert bubbles["interleaved"] < 0.6 * bubbles["1f1b"]


@pytest.mark.parametrize("name", ["afab", "1f1b", "interleaved"])
def test_ranks_hold_the_activations_of_the_schedules_live_micro_batches(name: str) -> None:
    """Ranks in the middle, whose layers and moments are alike: from one to the next only their number
    differs.
    """
    found = pipelined(name, cut=(32 // (PP * CHUNKS[name]),) * PP * CHUNKS[name])
    lists = schedule(found.schedule, found.pipeline, MICRO_BATCHES)
    live = check(lists, found.pipeline, MICRO_BATCHES).live
    kept = layer_of(found).kept_bytes(Recompute.none) * 32 / PP / CHUNKS[name]
    first, second = (memory.activations for memory in predict(found).stages[1:3])
    assert first - second == pytest.approx((live[1] - live[2]) * kept, rel=1e-6)
    least, most = live[1] * kept, (live[1] + 0.4) * kept
    assert least < first < most


def test_weights_gradients_that_wait_are_counted_whatever_is_recomputed() -> None:
    """Recomputation leaves almost nothing from forward to backward pass, but what products took in and gave
    out stays until their weights' gradients are taken, on the last rank for p − 1 micro-batches.
    """
    plain, split = (
        [memory.activations for memory in predict(pipelined(name, recompute=Recompute.full)).stages]
        for name in ("1f1b", "zero_bubble")
    )
    assert split[-1] > 10 * plain[-1]
    assert split[0] < 4 * plain[0]


@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
def test_the_peak_of_the_fullest_stage_is_found_without_the_others(name: str, recompute: Recompute) -> None:
    found = pipelined(name, recompute=recompute)
    peaks = [memory.total for memory in predict(found).stages]
    assert fullest_stage_bytes(found, step_time(found).layer) == pytest.approx(max(peaks))


def test_a_v_has_a_tied_matrix_on_one_rank() -> None:
    model = replace(case().model, num_hidden_layers=32, tie_word_embeddings=True)
    parameters = {
        name: [memory.parameters for memory in predict(pipelined(name, model=model)).stages]
        for name in ("1f1b", "zbv")
    }
    matrix = 2 * model.vocab_size * model.hidden_size
    assert sum(parameters["1f1b"]) - sum(parameters["zbv"]) == pytest.approx(matrix)


def with_context(cp: int, **changes: Any) -> PlanCase:
    usual = case(num_gpus=8 * cp, dp=8, cp=cp, zero=2, seq_len=32768, num_key_value_heads=8)
    return replace(usual, **changes)


def test_context_parallelism_divides_activations_and_is_slower_by_what_it_gathers() -> None:
    alone = predict(with_context(1))
    for cp in (2, 4, 8):
        found = predict(with_context(cp))
        assert found.peak.activations == pytest.approx(alone.peak.activations / cp, rel=0.05)
        layer, whole = found.time.layer, alone.time.layer
        assert layer.attention == pytest.approx(whole.attention / cp)
        gathering = replace(found.case, recompute=Recompute.full)
        assert 0 < layer.context <= step_time(gathering).layer.context
        assert alone.time.total < found.time.total * cp < 1.3 * alone.time.total


def test_a_ring_is_slower_than_gathered_keys_and_values() -> None:
    gathered = with_context(4)
    ring = replace(gathered, framework=replace(gathered.framework, gathers_context=False))
    assert step_time(gathered).total < step_time(ring).total


def test_heads_that_are_exchanged_send_less_the_more_ranks_share_a_sequence() -> None:
    """What is gathered stays as much, what is exchanged is divided by the ranks."""
    contexts = {}
    for cp in (2, 8):
        gathered = with_context(cp)
        exchanged = replace(gathered, options=replace(gathered.options, cp_method=ContextMethod.ulysses))
        contexts[cp] = [step_time(each).layer.context for each in (gathered, exchanged)]
    assert contexts[8][0] > contexts[2][0] > 0
    assert 0 < contexts[8][1] < contexts[2][1]
    assert contexts[8][1] < contexts[8][0]
