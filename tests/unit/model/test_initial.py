"""Initial values depend on (seed, name, global index) and on nothing else."""

from __future__ import annotations

import numpy as np
import torch

from conf.schema import ModelConfig
from orchestra.model.initial import normal_slice, parameter_key, standard_normal
from orchestra.model.transformer import Transformer, fill_initial_values, initial_std


def test_any_slice_equals_the_slice_of_the_whole() -> None:
    key, shape = parameter_key(7, "layers.0.mlp.up_proj.weight"), (13, 37)
    whole = normal_slice(key, shape, (0, 0), shape, 0.02)
    for offsets, size in [((0, 0), (13, 37)), ((5, 0), (8, 37)), ((0, 11), (13, 3)), ((12, 36), (1, 1))]:
        part = normal_slice(key, shape, offsets, size, 0.02)
        rows = slice(offsets[0], offsets[0] + size[0])
        columns = slice(offsets[1], offsets[1] + size[1])
        assert torch.equal(part, whole[rows, columns])


def test_empty_slice_is_empty() -> None:
    assert normal_slice(1, (4, 4), (4, 0), (0, 4), 1.0).shape == (0, 4)


def test_seed_and_name_give_unrelated_values() -> None:
    keys = [parameter_key(0, "a"), parameter_key(1, "a"), parameter_key(0, "b")]
    values = [standard_normal(np.arange(20_000), key) for key in keys]
    for first, second in [(0, 1), (0, 2), (1, 2)]:
        assert abs(np.corrcoef(values[first], values[second])[0, 1]) < 0.03


def test_values_are_standard_normal() -> None:
    values = standard_normal(np.arange(400_000), parameter_key(0, "w")).astype(np.float64)
    assert abs(values.mean()) < 0.01
    assert abs(values.std() - 1) < 0.01
    assert abs((values**4).mean() - 3) < 0.1
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.01


def test_large_indices_do_not_repeat() -> None:
    start = np.uint64(405_000_000_000)
    far = standard_normal(np.arange(1000, dtype=np.uint64) + start, 5)
    assert not np.array_equal(far, standard_normal(np.arange(1000), 5))


def test_building_on_the_meta_device_gives_the_same_tied_model() -> None:
    model = ModelConfig(tie_word_embeddings=True)
    direct = Transformer(model)
    fill_initial_values(direct, 1)
    with torch.device("meta"):
        lazy = Transformer(model)
    lazy.to_empty(device="cpu")
    lazy.tie_weights()
    fill_initial_values(lazy, 1)
    assert lazy.lm_head.weight is lazy.embed_tokens.weight
    assert direct.state_dict().keys() == lazy.state_dict().keys()
    for name, value in direct.state_dict().items():
        assert torch.equal(value, lazy.state_dict()[name]), name


def test_residual_outputs_start_smaller() -> None:
    model = ModelConfig(num_hidden_layers=8)
    assert initial_std(model, "layers.3.mlp.down_proj.weight") == model.init_std / 4
    assert initial_std(model, "layers.3.mlp.up_proj.weight") == model.init_std
