"""The promise of the parallel trainer: every combination of methods is the same training.

Steps of a small model, against one process that has the whole batch in one pass and recomputes nothing. Not
all combinations are run by default: a set in which every pair of values appears, for four steps. With
ORCHESTRA_EQUIVALENCE=all (`make equivalence`) the whole product is, for twenty.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool import Ranks
from small_trainings import (
    ODD,
    Trained,
    alone,
    assert_equal_trainings,
    config_of,
    distance,
    parameters,
    start,
    take_steps,
    trained_on,
)

from conf.schema import Config, ContextMethod, DataConfig, ModelConfig, Recompute, Source
from orchestra.data.token_files import TokenIndex, index_text

Values = tuple[str, str, str, str, int, str]
NUM_RANKS = 4
IS_WHOLE = os.environ.get("ORCHESTRA_EQUIVALENCE") == "all"
NUM_STEPS = 20 if IS_WHOLE else 2
# With fewer, three trainings say little about how far rounding leads.
SPREAD_STEPS = 20
NUM_SEQUENCES = 12
# Trainings of one test: what it takes stays well below the limit of a test.
NUM_TOGETHER = 4
# Three layers and an odd vocabulary, which leaves the last of 2 and of 4 ranks with padding; four ranks share
# two key-value heads.
MODEL = ModelConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=59,
)
AXES: tuple[tuple[Any, ...], ...] = (
    ("0", "1", "2", "3", "hybrid"),
    ("tp1", "tp2", "tp4"),
    ("whole", "sequence parallel"),
    ("none", "selective", "full"),
    (1, 3),
    ("cp1", "cp2", "cp4", "cp2 ulysses"),
)


def combines(values: Sequence[Any]) -> bool:
    """Whether four ranks can do it: two shards in two replicas need all of them, sequence parallelism needs
    tensor parallelism, and two key-value heads are exchanged by two ranks at most.
    """
    zero, tp, sequence, _, _, cp = values
    if tp == "tp1":
        return bool(sequence == "whole")
    if zero == "hybrid":
        return False
    return bool(cp == "cp1" or (tp, cp) == ("tp2", "cp2"))


def product() -> list[Values]:
    return [values for values in itertools.product(*AXES) if combines(values)]


def pairs_of(values: Values) -> set[tuple[tuple[int, Any], ...]]:
    return set(itertools.combinations(enumerate(values), 2))


def covering(candidates: Sequence[Values]) -> list[Values]:
    """Return some of the candidates in which every pair of values appears that appears in any (greedy)."""
    missing = set().union(*map(pairs_of, candidates))
    chosen = []
    while missing:
        best = max(candidates, key=lambda values: len(pairs_of(values) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def chosen() -> list[Values]:
    return product() if IS_WHOLE else covering(product())


def together() -> Iterator[list[Values]]:
    """Yield what one test trains."""
    values = chosen()
    for begin in range(0, len(values), NUM_TOGETHER):
        yield values[begin : begin + NUM_TOGETHER]


def config_with(values: Values, **settings: Any) -> Config:
    zero, tp, sequence, recompute, accumulation, context = values
    cp, _, method = context.removeprefix("cp").partition(" ")
    degree = int(tp.removeprefix("tp"))
    return config_of(
        MODEL,
        train={
            "global_batch_size": NUM_SEQUENCES,
            "micro_batch_size": NUM_SEQUENCES * degree * int(cp) // (NUM_RANKS * accumulation),
            "recompute": Recompute(recompute),
        },
        zero=3 if zero == "hybrid" else int(zero),
        shard_degree=2 if zero == "hybrid" else None,
        tp=degree,
        sequence_parallel=sequence == "sequence parallel",
        cp=int(cp),
        cp_method=ContextMethod(method or "all_gather"),
        **settings,
    )


@functools.cache
def reference(steps: int = NUM_STEPS) -> Trained:
    """Train in one process, each batch in one pass."""
    train = {"global_batch_size": NUM_SEQUENCES, "micro_batch_size": NUM_SEQUENCES}
    return alone(config_of(MODEL, train=train), steps)


@pytest.mark.parametrize("combinations", list(together()), ids=lambda these: f"{these[0][0]}-{len(these)}")
def test_every_combination_is_the_same_training(ranks: Ranks, combinations: list[Values]) -> None:
    configs = [config_with(values) for values in combinations]
    results = trained_on(ranks(NUM_RANKS), configs, steps=NUM_STEPS)
    for values, of_ranks in zip(combinations, results, strict=True):
        assert_equal_trainings(of_ranks, reference(), str(values))


DOCUMENT_CASES: tuple[Values, ...] = (
    ("3", "tp2", "sequence parallel", "selective", 3, "cp1"),
    ("3", "tp1", "whole", "full", 1, "cp1"),
    ("1", "tp4", "whole", "none", 1, "cp1"),
    ("1", "tp1", "whole", "selective", 3, "cp4"),
    ("2", "tp2", "sequence parallel", "none", 1, "cp2"),
    ("3", "tp1", "whole", "full", 1, "cp2 ulysses"),
)


def test_masked_documents_are_the_same_training_on_ranks(ranks: Ranks, tmp_path: Path) -> None:
    words, separator_id = MODEL.vocab_size, 7
    # Nothing is read of it but the separator, which is one token of 59: in every fourth sample or so.
    index = TokenIndex("uint16", 1, 1, words, separator_id, "bytes", "", block_bytes=2, block_crc32=[0])
    (tmp_path / "words.json").write_text(index_text(index))
    data = DataConfig(Source.tokens, path=str(tmp_path / "words"), document_masks=True)
    train = {"global_batch_size": NUM_SEQUENCES, "micro_batch_size": NUM_SEQUENCES}
    expected = alone(replace(config_of(MODEL, train=train), data=data), NUM_STEPS)
    assert expected.rows[0][0] != reference().rows[0][0]
    configs = [replace(config_with(values), data=data) for values in DOCUMENT_CASES]
    results = trained_on(ranks(NUM_RANKS), configs, steps=NUM_STEPS)
    for values, of_ranks in zip(DOCUMENT_CASES, results, strict=True):
        assert_equal_trainings(of_ranks, expected, str(values))


# Nothing divides by three but heads, inner width and sequence: rows, words and elements are left over
# everywhere. Six pieces of a sequence have three places each.
ODD_MODEL = replace(ODD, intermediate_size=39)
ODD_BATCH: dict[str, Any] = {"global_batch_size": 9, "seq_len": 18}
ODD_CASES: dict[str, tuple[tuple[dict[str, Any], str], ...]] = {
    "zero": (
        ({"zero": 0}, "selective"),
        ({"zero": 1}, "full"),
        ({"zero": 3}, "none"),
        ({"zero": 3}, "selective"),
    ),
    "tp": (
        ({"tp": 3}, "none"),
        ({"tp": 3, "sequence_parallel": True}, "full"),
        ({"tp": 3, "sequence_parallel": True}, "selective"),
    ),
    "cp": (
        ({"cp": 3}, "none"),
        ({"cp": 3, "zero": 2}, "selective"),
        ({"cp": 3, "zero": 3}, "full"),
    ),
}


@pytest.mark.parametrize("kind", ODD_CASES)
def test_three_ranks_five_layers_and_one_shared_head_are_the_same_training(ranks: Ranks, kind: str) -> None:
    expected = alone(config_of(ODD_MODEL, train={**ODD_BATCH, "micro_batch_size": 9}), steps=NUM_STEPS)
    cases, configs = ODD_CASES[kind], []
    for axes, recompute in cases:
        train = {**ODD_BATCH, "micro_batch_size": 3, "recompute": Recompute(recompute)}
        configs.append(config_of(ODD_MODEL, train=train, **axes))
    results = trained_on(ranks(3), configs, steps=NUM_STEPS)
    for case, of_ranks in zip(cases, results, strict=True):
        assert_equal_trainings(of_ranks, expected, str(case))


def leaves_nothing(rank: int, world: int, config: Config) -> bool:
    """Return whether a training's parameters are gone when it is closed and dropped."""
    parameter = _dropped(rank, world, config)
    gc.collect()
    return parameter() is None


def _dropped(rank: int, world: int, config: Config) -> weakref.ref[Any]:
    training, mesh = start(rank, world, config)
    take_steps(config, training, mesh, [1, 2])
    training.parallelized.stage.settle()
    training.parallelized.stage.close()
    return weakref.ref(training.parallelized.trained[0].parameter)


def test_a_training_that_is_closed_leaves_no_memory(ranks: Ranks) -> None:
    for zero in (0, 1, 2, 3):
        config = config_of(MODEL, zero=zero, precision="bf16")
        assert ranks(2).run(leaves_nothing, config=config) == [True, True], zero


BF16_CASES: tuple[Values, ...] = (
    ("1", "tp2", "sequence parallel", "selective", 3, "cp1"),
    ("hybrid", "tp1", "whole", "full", 1, "cp1"),
    ("2", "tp1", "whole", "none", 3, "cp4"),
    ("0", "tp1", "whole", "none", 1, "cp1"),
    ("3", "tp4", "whole", "none", 1, "cp1"),
)


# test_zero has every stage of both, in a few steps.
PRECISIONS = (
    [("bf16", BF16_CASES), ("bf16_fp32_grad", BF16_CASES[:3])] if IS_WHOLE else [("bf16", BF16_CASES[:2])]
)


@pytest.mark.parametrize(("precision", "cases"), PRECISIONS)
def test_16_bit_trainings_stay_as_close_to_the_exact_one_as_single_processes(
    ranks: Ranks, precision: str, cases: Sequence[Values]
) -> None:
    """Processes that sum the same batch in another order differ. Ranks must not lose more: neither their
    losses nor their parameters lie much farther from those of 32 bits than the farthest of single processes.
    """
    singles = [
        alone(
            config_of(MODEL, precision, train={"global_batch_size": NUM_SEQUENCES, "micro_batch_size": size}),
            SPREAD_STEPS,
        )
        for size in (12, 4, 1)
    ]
    exact = reference(SPREAD_STEPS)
    farthest_loss = max(farthest_row(single, exact) for single in singles)
    farthest = max(distance(parameters([single]), parameters([exact])) for single in singles)
    configs = [config_with(values, precision=precision) for values in cases]
    results = trained_on(ranks(NUM_RANKS), configs, steps=SPREAD_STEPS)
    for values, of_ranks in zip(cases, results, strict=True):
        off = farthest_row(of_ranks[0], exact)
        # Errors of rounding add up by chance: those of one training are at times twice another's.
        assert off <= 2 * farthest_loss, f"{values}: off by {off}, single processes by {farthest_loss}"
        assert distance(parameters(of_ranks), parameters([exact])) <= 1.25 * farthest, str(values)


def farthest_row(done: Trained, exact: Trained) -> float:
    """Return the largest difference of two trainings' losses at one step."""
    return max(abs(row[0] - other[0]) for row, other in zip(done.rows, exact.rows, strict=True))
