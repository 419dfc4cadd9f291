"""Pipelines over ranks: every schedule and cut is the training of one process, gradients too, and saves are
the same on any layout.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool import Ranks
from small_trainings import (
    ODD,
    SEQUENCE,
    GradientsOfStep,
    Trained,
    alone,
    assert_equal_trainings,
    assert_same_training,
    bytes_sent,
    config_of,
    joined,
    mesh_of,
    restore_and_go_on,
    save_and_go_on,
    take_steps,
    trained_on,
)
from torch import Tensor

from conf.schema import Config, ModelConfig, PipelineSchedule, Recompute
from orchestra.sizes.pipeline_check import check
from orchestra.sizes.pipeline_schedule import pipeline_shape, schedule
from orchestra.sizes.topology import layout
from orchestra.train.build import build_training
from orchestra.train.dry_build import exact_bytes
from orchestra.train.hooks import StepHooks

IS_WHOLE = os.environ.get("ORCHESTRA_EQUIVALENCE") == "all"
STEPS = 20 if IS_WHOLE else 2
NUM_SEQUENCES = 40 if IS_WHOLE else 20
# Five layers on two stages, nine on eight.
MODEL = replace(ODD, hidden_size=16, num_attention_heads=2, num_key_value_heads=2)
DEEP = replace(MODEL, num_hidden_layers=9)
TIED = replace(MODEL, tie_word_embeddings=True)
DEEP_TIED = replace(DEEP, tie_word_embeddings=True)


def pipelined(
    kind: str,
    model: ModelConfig = MODEL,
    *,
    pp: int = 2,
    virtual_stages: int = 1,
    accumulation: int = 5,
    num_ranks: int | None = None,
    recompute: str = "none",
    **settings: Any,
) -> Config:
    """Return a configuration of a pipeline on `num_ranks` ranks (dp 1 where nobody says)."""
    inner = pp * settings.get("tp", 1) * settings.get("cp", 1)
    dp = 1 if num_ranks is None else num_ranks // inner
    train = {
        "global_batch_size": NUM_SEQUENCES,
        "micro_batch_size": NUM_SEQUENCES // accumulation // dp,
        "recompute": Recompute(recompute),
    }
    return config_of(
        model,
        train={**train, **settings.pop("train", {})},
        pp=pp,
        schedule=PipelineSchedule[kind],
        virtual_stages=virtual_stages,
        **settings,
    )


@functools.cache
def reference(model: ModelConfig = MODEL) -> Trained:
    """Train in one process, each batch in one pass."""
    train = {"global_batch_size": NUM_SEQUENCES, "micro_batch_size": NUM_SEQUENCES}
    return alone(config_of(model, train=train), STEPS)


# Between them every schedule meets every stage of ZeRO, both cuts of a tied matrix, and micro-batches fewer
# than stages.
OF_TWO: tuple[Config, ...] = (
    pipelined("afab", accumulation=4),
    pipelined("1f1b", TIED, accumulation=1),
    pipelined("interleaved", TIED, virtual_stages=2, recompute="full"),
    pipelined("zero_bubble", TIED, recompute="selective"),
    pipelined("zbv", accumulation=2),
    pipelined("zbv", TIED),
    pipelined("1f1b", stages=[4, 1], accumulation=4),
)
OF_FOUR: tuple[Config, ...] = (
    pipelined("1f1b", num_ranks=4, zero=1),
    pipelined("1f1b", DEEP_TIED, pp=4),
    pipelined("afab", TIED, num_ranks=4, zero=2),
    pipelined("interleaved", num_ranks=4, virtual_stages=2, zero=2, recompute="full"),
    pipelined("interleaved", DEEP, pp=4, virtual_stages=2, accumulation=10),
    pipelined("zero_bubble", TIED, num_ranks=4, zero=2),
    pipelined("zero_bubble", tp=2, sequence_parallel=True, accumulation=4),
    pipelined("zbv", TIED, num_ranks=4, zero=2),
    pipelined("zbv", DEEP, pp=4, accumulation=10, recompute="full"),
    pipelined("1f1b", TIED, tp=2, accumulation=2),
    pipelined("zbv", num_ranks=4, zero=3),
    pipelined("interleaved", TIED, num_ranks=4, virtual_stages=2, zero=3),
)


# Five ways of cutting at once.
MANY_HEADED = replace(TIED, num_attention_heads=4, num_key_value_heads=4)
OF_EIGHT: tuple[Config, ...] = (
    pipelined("1f1b", MANY_HEADED, tp=2, sequence_parallel=True, cp=2, accumulation=4),
    pipelined("zbv", MANY_HEADED, num_ranks=8, cp=2, zero=2),
)


def whole_product() -> dict[int, list[Config]]:
    """Return all combinations (`make equivalence`), by the number of their ranks."""
    schedules = (("afab", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zbv", 1))
    found: dict[int, list[Config]] = {}
    whole = itertools.product(schedules, (2, 4), (0, 1, 2), (1, 2), (2, 4, 5), ("none", "full"))
    for number, ((kind, chunks), pp, zero, tp, accumulation, recompute) in enumerate(whole):
        num_ranks = pp * tp * (2 if zero else 1)
        if num_ranks > 8:
            continue
        config = pipelined(
            kind,
            DEEP_TIED if number // 2 % 2 else DEEP,
            pp=pp,
            virtual_stages=chunks,
            accumulation=accumulation,
            num_ranks=num_ranks,
            recompute=recompute,
            zero=zero,
            tp=tp,
            sequence_parallel=tp > 1,
        )
        found.setdefault(num_ranks, []).append(config)
    return found


def groups() -> Iterator[tuple[int, Sequence[Config]]]:
    """Yield what one test trains: on how many ranks, and how."""
    yield from ((2, OF_TWO), (4, OF_FOUR), (8, OF_EIGHT))
    if IS_WHOLE:
        for num_ranks, configs in whole_product().items():
            yield from ((num_ranks, configs[begin : begin + 8]) for begin in range(0, len(configs), 8))


def name_of(config: Config) -> str:
    shape = config.parallelism
    return f"{shape.schedule.name} pp {shape.pp} tp {shape.tp} zero {shape.zero}: {config.model}"


@pytest.mark.parametrize(("num_ranks", "configs"), list(groups()))
def test_every_pipeline_is_the_same_training(ranks: Ranks, num_ranks: int, configs: Sequence[Config]) -> None:
    for config, found in zip(configs, trained_on(ranks(num_ranks), configs, STEPS), strict=True):
        assert_equal_trainings(found, reference(config.model), name_of(config))


def gradients(rank: int, world: int, config: Config) -> Trained:
    """Take one step; return the row with the gradients that this rank owns."""
    hook = GradientsOfStep()
    mesh = mesh_of(rank, layout(config.parallelism, world))
    hook.training = training = build_training(config, mesh, StepHooks((hook,)))
    rows = take_steps(config, training, mesh, [1])
    return Trained(rows, hook.shards)


@functools.cache
def gradients_of_one(model: ModelConfig) -> dict[str, Tensor]:
    train = {"global_batch_size": NUM_SEQUENCES, "micro_batch_size": NUM_SEQUENCES}
    return joined([gradients(0, 1, config_of(model, train=train))])


@pytest.mark.parametrize(
    ("num_ranks", "configs"), [(2, OF_TWO[2:6:3]), (4, (OF_FOUR[2], OF_FOUR[6], OF_FOUR[10]))]
)
def test_every_gradient_is_that_of_one_process(
    ranks: Ranks, num_ranks: int, configs: Sequence[Config]
) -> None:
    for config in configs:
        expected = gradients_of_one(config.model)
        found = joined(ranks(num_ranks).run(gradients, config=config))
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            off = (found[name] - gradient).norm()
            assert off <= 1e-5 * gradient.norm(), f"{name_of(config)}: {name}"


def test_a_save_goes_on_bit_for_bit_and_is_the_same_on_any_layout(ranks: Ranks, tmp_path: Path) -> None:
    """Tied ends and bf16, so that masters and one matrix on two ranks are in it."""
    saved = pipelined("interleaved", TIED, virtual_stages=2, precision="bf16", num_ranks=4, zero=1)
    rows, state = zip(*ranks(4).run(save_and_go_on, config=saved, place=tmp_path), strict=True)
    again = ranks(4).run(restore_and_go_on, config=saved, place=tmp_path, topic="same")
    assert [found[:2] for found in again] == list(zip(rows, state, strict=True))
    others = (
        pipelined("1f1b", TIED, pp=4, precision="bf16"),
        pipelined("zbv", TIED, precision="bf16"),
        config_of(TIED, "bf16", train={"global_batch_size": NUM_SEQUENCES, "micro_batch_size": 5}, zero=3),
        pipelined("zero_bubble", TIED, tp=2, sequence_parallel=True, accumulation=4, precision="bf16"),
    )
    for number, config in enumerate(others):
        size = 2 if config is others[1] else 4
        found = ranks(size).run(restore_and_go_on, config=config, place=tmp_path, topic=f"other {number}")
        for of_rank in found:
            # What was restored there and saved again is what was saved here.
            assert of_rank[2] == of_rank[3] == again[0][2]
            for row, expected in zip(of_rank[0], rows[0], strict=True):
                assert row[0] == pytest.approx(expected[0], rel=2e-3)


def test_compiled_blocks_let_go_of_nothing_that_later_products_need(ranks: Ranks) -> None:
    model = replace(MODEL, num_hidden_layers=2)
    compiled = pipelined("zero_bubble", model, train={"compile": True})
    (found,) = trained_on(ranks(2), [compiled], STEPS)
    assert_same_training(found, reference(model))


def test_messages_are_as_many_as_arithmetic_says(ranks: Ranks) -> None:
    # What all micro-batches together send over one border of stages, in fp32.
    border = NUM_SEQUENCES * SEQUENCE * MODEL.hidden_size * 4
    for config, borders in ((pipelined("1f1b"), 1), (pipelined("interleaved", virtual_stages=2), 3)):
        found = [of_rank["message"] for of_rank in ranks(2).run(bytes_sent, config=config)]
        assert found == [borders * border] * 2


@pytest.mark.parametrize("kind", ["afab", "1f1b", "interleaved", "zbv"])
def test_activations_are_those_of_the_schedule(kind: str) -> None:
    """The ranks in the middle of three have layers and nothing else."""
    stages = 6 if kind in ("interleaved", "zbv") else 3
    model = replace(MODEL, hidden_size=32, intermediate_size=64, num_hidden_layers=6)
    chunks = 2 if kind == "interleaved" else 1
    config = pipelined(kind, model, pp=3, virtual_stages=chunks, stages=[6 // stages] * stages)
    shape = pipeline_shape(config.parallelism)
    live = check(schedule(config.parallelism.schedule, shape, 5), shape, 5).live
    found = [exact_bytes(config, 3, rank).activations / live[rank] for rank in (0, 1)]
    assert max(found) <= 1.05 * min(found)
