"""Every pipeline is the same training as one process."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from pool import Ranks
from small_trainings import ODD, Trained, alone, assert_same_training, config_of, trained_on

from conf.schema import Config, PipelineSchedule, Recompute

STEPS = 8
MODEL = replace(ODD, num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=2, hidden_size=16)


def config_with(kind: str, pp: int, virtual: int = 1, accumulation: int = 4, **settings: Any) -> Config:
    ranks = settings.pop("ranks", pp)
    dp = ranks // pp // settings.get("tp", 1)
    train = {
        "global_batch_size": 20,
        "micro_batch_size": 20 // accumulation // dp,
        "recompute": settings.pop("recompute", Recompute.none),
    }
    model = settings.pop("model", MODEL)
    return config_of(
        model, train=train, pp=pp, schedule=PipelineSchedule[kind], virtual_stages=virtual, **settings
    )


@functools.cache
def reference(model: Any = MODEL) -> Trained:
    return alone(config_of(model, train={"global_batch_size": 20, "micro_batch_size": 20}), STEPS)


CASES = [
    ("afab", 2, 1, 4, {}),
    ("1f1b", 2, 1, 4, {}),
    ("1f1b", 2, 1, 5, {}),
    ("interleaved", 2, 2, 5, {}),
    ("zero_bubble", 2, 1, 4, {}),
    ("zbv", 2, 1, 4, {}),
    ("1f1b", 2, 1, 1, {}),
]


@pytest.mark.parametrize("tied", [False, True])
def test_two_stages(ranks: Ranks, tied: bool) -> None:
    model = replace(MODEL, tie_word_embeddings=tied)
    for kind, pp, virtual, accumulation, more in CASES:
        config = config_with(kind, pp, virtual, accumulation, model=model, **more)
        (found,) = trained_on(ranks(pp), [config], STEPS)
        assert_same_training(found, reference(model))
