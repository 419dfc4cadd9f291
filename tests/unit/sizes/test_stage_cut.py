"""Layers are cut into stages so that the slowest is as fast as any cut of whole layers can make it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from conf.schema import Config, ModelConfig, ParallelismConfig, PipelineSchedule, Recompute
from orchestra.sizes import stage_cut
from orchestra.sizes.stage_cut import cut_layers, stage_layers

LLAMA_8B = ModelConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
)


@pytest.mark.parametrize("num_layers", [5, 8, 11])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("vocab_size", [256, 20_000, 200_000])
def test_no_other_cut_has_a_faster_slowest_stage(num_layers: int, num_stages: int, vocab_size: int) -> None:
    model = replace(LLAMA_8B, num_hidden_layers=num_layers, vocab_size=vocab_size)
    layer = stage_cut._layer_flops(model, 4096, Recompute.none)
    first, last = stage_cut._end_flops(model)

    def slowest(counts: tuple[int, ...]) -> float:
        beside = [first, *[0.0] * (num_stages - 2), last]
        return max(count * layer + more for count, more in zip(counts, beside, strict=True))

    cuts = itertools.product(range(1, num_layers + 1), repeat=num_stages)
    best = min(slowest(counts) for counts in cuts if sum(counts) == num_layers)
    found = tuple(cut_layers(model, 4096, Recompute.none, num_stages))
    assert sum(found) == num_layers
    assert slowest(found) == pytest.approx(best)


def test_a_large_vocabulary_leaves_the_last_stage_fewer_layers() -> None:
    counts = cut_layers(LLAMA_8B, 8192, Recompute.none, 8)
    assert sum(counts) == 32
    assert counts[-1] < min(counts[1:-1])
    # Layers that are computed twice weigh more beside the output product.
    assert (
        cut_layers(LLAMA_8B, 8192, Recompute.full, 4)[-1] >= cut_layers(LLAMA_8B, 8192, Recompute.none, 4)[-1]
    )


def test_stages_hold_each_layer_once_and_a_cut_by_hand_decides() -> None:
    v = ParallelismConfig(pp=2, schedule=PipelineSchedule["zbv"])
    config = replace(Config(), model=replace(Config().model, num_hidden_layers=6), parallelism=v)
    layers = stage_layers(config)
    assert len(layers) == 4
    assert [layer for stage in layers for layer in stage] == list(range(6))
    by_hand = replace(config, parallelism=replace(v, stages=[3, 1, 1, 1]))
    assert stage_layers(by_hand) == (range(3), range(3, 4), range(4, 5), range(5, 6))
    assert stage_layers(Config()) == (range(Config().model.num_hidden_layers),)
