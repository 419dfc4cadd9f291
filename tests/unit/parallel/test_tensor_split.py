"""What each tensor-parallel rank has of each parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conf.schema import Family, ModelConfig
from orchestra.model.transformer import Transformer
from orchestra.parallel.places import cut_of, even_cut, num_sharing_kv

MODEL = ModelConfig(hidden_size=32, intermediate_size=48, num_attention_heads=8, num_key_value_heads=2)


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Transformer(model).named_parameters()}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("family", list(Family), ids=lambda family: family.name)
@pytest.mark.parametrize("vocab_size", [1, 5, 64, 67])
def test_every_element_is_on_as_many_ranks_as_share_it(tp: int, family: Family, vocab_size: int) -> None:
    model = replace(MODEL, family=family, vocab_size=vocab_size)
    for name, shape in shapes(model).items():
        cuts = [cut_of(name, model, tp, rank) for rank in range(tp)]
        if cuts[0] is None:
            assert not any(cuts)
            assert "norm" in name or name.endswith("bias") or "positions" in name
            continue
        held = torch.zeros(shape[cuts[0].dim])
        for cut in cuts:
            assert cut is not None
            assert cut.size <= cut.padded == cuts[0].padded
            held[cut.begin : cut.begin + cut.size] += 1
        sharing = num_sharing_kv(model, tp) if "k_proj" in name or "v_proj" in name else 1
        assert torch.equal(held, torch.full_like(held, sharing)), name


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("num_kv", [1, 2, 4, 8])
def test_a_rank_has_the_key_value_heads_that_its_queries_need(tp: int, num_kv: int) -> None:
    model, width = replace(MODEL, num_key_value_heads=num_kv), 4
    for rank in range(tp):
        queries = cut_of("layers.0.self_attn.q_proj.weight", model, tp, rank)
        values = cut_of("layers.0.self_attn.v_proj.weight", model, tp, rank)
        assert queries is not None
        assert values is not None
        heads = range(queries.begin // width, (queries.begin + queries.size) // width)
        needed = sorted({head * num_kv // 8 for head in heads})
        assert needed == list(range(values.begin // width, (values.begin + values.size) // width))


def test_a_vocabulary_is_cut_into_equal_parts_and_a_rest() -> None:
    parts = [even_cut(0, 9, 4, part) for part in range(4)]
    assert [(cut.begin, cut.size) for cut in parts] == [(0, 3), (3, 3), (6, 3), (9, 0)]
    assert all(cut.padded == 3 for cut in parts)
