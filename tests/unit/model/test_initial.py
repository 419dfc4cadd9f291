"""Initial values depend on (seed, name, global index) and on nothing else."""

from __future__ import annotations

import math

import torch

from conf.schema import ModelConfig
from orchestra.model.initial import (
    NormalSlice,
    _cos_of_turns,
    _log,
    fill_normal_slices_,
    random_key,
    standard_normal,
)
from orchestra.model.transformer import Transformer, fill_initial_values, initial_std


def normal_slice(
    key: int, shape: tuple[int, int], offsets: tuple[int, int], size: tuple[int, int]
) -> torch.Tensor:
    out = torch.empty(size)
    fill_normal_slices_([NormalSlice(out, key, shape, offsets, 0.02)])
    return out


def test_any_slice_equals_the_slice_of_the_whole_on_any_number_of_threads() -> None:
    key = random_key(7, "layers.0.mlp.up_proj.weight")
    slices = {
        (13, 37): [((5, 0), (8, 37)), ((0, 11), (13, 3)), ((12, 36), (1, 1)), ((13, 0), (0, 37))],
        # More than one block.
        (700, 500): [((699, 0), (1, 500))],
    }
    for shape, parts in slices.items():
        whole = normal_slice(key, shape, (0, 0), shape)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            assert torch.equal(normal_slice(key, shape, (0, 0), shape), whole)
        finally:
            torch.set_num_threads(threads)
        for (row, column), (num_rows, num_columns) in parts:
            part = normal_slice(key, shape, (row, column), (num_rows, num_columns))
            assert torch.equal(part, whole[row : row + num_rows, column : column + num_columns])


def test_slices_that_are_filled_together_have_the_values_that_each_has_alone() -> None:
    """Few and many elements, none, several keys and means, one that is not contiguous, and two dtypes."""
    shape, memory = (70, 80), torch.zeros(9, 20)
    outs = [
        *(torch.zeros(3, 5), torch.zeros(0, 4), memory[:, 3:11], torch.zeros(70, 80), torch.zeros(1, 7)),
        torch.zeros(6, 2, dtype=torch.bfloat16),
    ]
    slices = [
        NormalSlice(
            out, random_key(7, number % 4), shape, (0, 0) if len(out) == 70 else (number, 2), 0.1, mean
        )
        for number, (out, mean) in enumerate(zip(outs, (0.0, 0.0, 1.5, 0.0, -2.0, 0.0), strict=True))
    ]
    fill_normal_slices_(slices)
    for one in slices:
        whole = standard_normal(torch.arange(70 * 80), one.key).view(shape) * one.std + one.mean
        begin, size = one.offsets, one.out.shape
        part = whole[begin[0] : begin[0] + size[0], begin[1] : begin[1] + size[1]]
        assert torch.equal(one.out, part.to(one.out.dtype))
    assert int(memory.count_nonzero()) == outs[2].numel()


def test_the_bits_are_those_of_exact_arithmetic() -> None:
    """Python's own integers, fractions rounded once, and C's log and cos give the same fp32 numbers."""
    key, mask = random_key(3, "w"), (1 << 64) - 1
    for index in (0, 1, 77, 405_000_000_000):
        value = (index * 0x9E3779B97F4A7C15 + key) & mask
        for _ in range(2):
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
            value = ((value ^ (value >> 31)) + key) & mask
        radius = math.sqrt(-2.0 * math.log(((value >> 32) + 0.5) * 2.0**-32))
        expected = radius * math.cos(2.0 * math.pi * (value & 0xFFFFFFFF) * 2.0**-32)
        assert standard_normal(torch.tensor([index]), key).item() == torch.tensor(expected).float().item()


def test_the_series_are_exact_to_1e_10() -> None:
    uniform = torch.rand(100_000, dtype=torch.float64).clamp_(min=2.0**-33)
    torch.testing.assert_close(_log(uniform), uniform.log(), rtol=1e-10, atol=1e-11)
    turns = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    torch.testing.assert_close(_cos_of_turns(turns), (2 * torch.pi * turns).cos(), rtol=0, atol=1e-11)


def test_seed_and_name_give_unrelated_values() -> None:
    keys = [random_key(0, "a"), random_key(1, "a"), random_key(0, "b")]
    correlation = torch.corrcoef(torch.stack([standard_normal(torch.arange(20_000), key) for key in keys]))
    assert float((correlation - torch.eye(3)).abs().max()) < 0.03


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
