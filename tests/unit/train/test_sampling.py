"""Sampling from a small model with random weights: as a naive loop does, and the same for equal seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from conf.schema import Config, ModelConfig, TrainConfig
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.train.inference.sampling import Choice, chosen, sampled
from orchestra.train.inference.use_checkpoint import ACTS

PADDED, VOCABULARY, CONTEXT = 32, 23, 8


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=PADDED,
        init_std=0.5,
    )
    made = Transformer(config)
    fill_initial_values(made, 3)
    return made


def sample(model: Transformer, choice: Choice, end_id: int | None = None) -> list[int]:
    return sampled(
        model, [1, 2, 3], choice, max_tokens=20, vocab_size=VOCABULARY, context=CONTEXT, end_id=end_id
    )


def test_greedy_is_a_naive_loop_over_whole_forward_passes(model: Transformer) -> None:
    tokens = [1, 2, 3]
    for _ in range(20):
        logits = model(torch.tensor([tokens[-CONTEXT:]]))[0, -1, :VOCABULARY]
        tokens.append(int(logits.argmax()))
    assert sample(model, Choice(temperature=0)) == tokens[3:]
    # The end is not part of what is returned.
    end = tokens[5]
    assert sample(model, Choice(temperature=0), end) == tokens[3 : tokens.index(end, 3)]


def test_equal_seeds_give_equal_samples_and_no_padding_is_chosen(model: Transformer) -> None:
    samples = [sample(model, Choice(seed=seed)) for seed in range(6)]
    assert samples == [sample(model, Choice(seed=seed)) for seed in range(6)]
    assert len({tuple(each) for each in samples}) > 1
    assert max(max(each) for each in samples) < VOCABULARY


def test_top_p_keeps_the_fewest_tokens_that_reach_the_share() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)

    def drawn(top_p: float, temperature: float = 1.0) -> set[int]:
        return {chosen(logits, Choice(temperature, top_p), generator) for _ in range(300)}

    assert drawn(1.0) == {0, 1, 2, 3}
    assert drawn(0.79) == {0, 1}
    assert drawn(0.81) == {0, 1, 2}
    assert drawn(1e-6) == {0}
    assert drawn(1.0, temperature=0.01) == {0}


def test_all_places_that_were_trained_on_are_looked_at(model: Transformer) -> None:
    """Rotary positions have no last one: only the training's sequences are an end."""
    config = Config(
        model=replace(model.config, max_position_embeddings=2), train=TrainConfig(seq_len=CONTEXT)
    )
    request: dict[str, Any] = {"tokens": [1, 2, 3], "max_tokens": 20, "vocab_size": VOCABULARY}
    request |= {"end_id": None, "temperature": 0, "top_p": 1.0, "seed": 0}
    found = ACTS["generate"](model, config, torch.device("cpu"), request)
    assert found == {"tokens": sample(model, Choice(temperature=0))}


def test_experts_have_the_capacity_of_a_whole_sequence_as_in_training() -> None:
    """Of a short text by itself most tokens would go without their expert, which they had in training."""
    config = Config(
        model=ModelConfig(
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=PADDED,
            num_experts=4,
            num_experts_per_tok=1,
            moe_capacity_factor=1.0,
            init_std=0.5,
        ),
        train=TrainConfig(seq_len=CONTEXT * 4),
    )
    mixture = Transformer(config.model)
    fill_initial_values(mixture, 3)
    prompt = [1, 1, 1, 1, 2, 2, 2, 3]
    with torch.no_grad():
        padded = torch.tensor([prompt + [0] * (config.train.seq_len - len(prompt))])
        expected = mixture(padded)[0, len(prompt) - 1, :VOCABULARY].argmax()
    request: dict[str, Any] = {"tokens": prompt, "max_tokens": 1, "vocab_size": VOCABULARY, "end_id": None}
    request |= {"temperature": 0, "top_p": 1.0, "seed": 0}
    assert ACTS["generate"](mixture, config, torch.device("cpu"), request) == {"tokens": [int(expected)]}


@pytest.mark.parametrize(
    "choice", [Choice(temperature=1e-42), Choice(temperature=5e-324), Choice(top_p=1e-50)]
)
def test_the_smallest_temperature_and_share_take_the_likeliest(choice: Choice) -> None:
    assert chosen(torch.tensor([0.5, 3.0, 2.0]), choice, torch.Generator()) == 1
