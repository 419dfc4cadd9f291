"""A sample of several documents gives what each of them gives alone, wherever the separators stand."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from conf.schema import Config, DataConfig, Family, ModelConfig, Recompute, TrainConfig
from orchestra.model import documents as module
from orchestra.model.documents import (
    VaryingLengths,
    attend_within,
    document_bounds,
    document_mask,
    has_varying_lengths,
)
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.parallel.blocks import compile_blocks, recompute_blocks
from orchestra.parallel.mesh import make_mesh
from orchestra.sizes.topology import Layout
from orchestra.train.dry_build import exact_bytes

SEPARATOR, SEQUENCE = 9, 24
LLAMA = ModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=40,
)
GPT = replace(LLAMA, family=Family.gpt, num_key_value_heads=4)
MODELS = {"llama": LLAMA, "llama mha": replace(LLAMA, num_key_value_heads=4), "gpt": GPT}
# Where separators stand in the samples of a batch.
SEPARATORS: dict[str, tuple[tuple[int, ...], ...]] = {
    "inside": ((5, 14), (11,)),
    "none": ((), ()),
    "at both ends": ((0, 23), (0, 12, 23)),
    "in a row": ((0, 1, 8, 9, 10), (22, 23)),
    "everywhere": (tuple(range(SEQUENCE)), ()),
}
for_each_place = pytest.mark.parametrize("places", SEPARATORS.values(), ids=SEPARATORS)


def model_of(model: ModelConfig, separator_id: int | None = SEPARATOR) -> Transformer:
    transformer = Transformer(model, separator_id=separator_id)
    fill_initial_values(transformer, 1)
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            # Larger than at the start of a training, so that attention makes a difference.
            if parameter.dim() == 2 and "embed_positions" not in name:
                parameter.mul_(8)
    return transformer


def sample(places: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return tokens [B, S] with separators at these places and nowhere else, and targets."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(SEPARATOR + 1, LLAMA.vocab_size, (len(places), SEQUENCE), generator=generator)
    for row, columns in enumerate(places):
        tokens[row, list(columns)] = SEPARATOR
    return tokens, tokens.roll(-1, dims=1)


def documents(tokens_BS: Tensor) -> list[tuple[int, int, int]]:
    """Return sample, begin and end of each document, read off token by token."""
    found = []
    for row, tokens in enumerate(tokens_BS.tolist()):
        begin = 0
        for place, token in enumerate(tokens):
            if token == SEPARATOR or place == len(tokens) - 1:
                found.append((row, begin, place + 1))
                begin = place + 1
    return found


def at(model: Transformer, begin: int) -> Transformer:
    """Return the model as documents from a place on see it: with the learned positions of that place."""
    if model.embed_positions is None or begin == 0:
        return model
    moved = copy.deepcopy(model)
    assert moved.embed_positions is not None
    assert model.embed_positions is not None
    moved.embed_positions.weight = torch.nn.Parameter(model.embed_positions.weight.detach().roll(-begin, 0))
    return moved


@for_each_place
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_each_document_alone(name: str, places: tuple[tuple[int, ...], ...]) -> None:
    model, plain = model_of(MODELS[name]), model_of(MODELS[name], None)
    tokens, _ = sample(places)
    with torch.no_grad():
        together = model(tokens)
        for row, begin, end in documents(tokens):
            alone = at(plain, begin)(tokens[row : row + 1, begin:end])
            difference = (together[row, begin:end] - alone[0]).abs().max()
            assert float(difference / together.abs().max()) <= 1e-6, (row, begin, end)


@for_each_place
def test_gradients_are_the_sum_over_the_documents(places: tuple[tuple[int, ...], ...]) -> None:
    together, alone = model_of(LLAMA), model_of(LLAMA, None)
    tokens, targets = sample(places)
    loss = together(tokens, targets)
    loss.backward()
    losses = [
        alone(tokens[row : row + 1, begin:end], targets[row : row + 1, begin:end])
        for row, begin, end in documents(tokens)
    ]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(loss, torch.stack(losses).sum(), atol=0, rtol=1e-6)
    for name, parameter in together.named_parameters():
        expected = alone.get_parameter(name).grad
        assert parameter.grad is not None
        assert expected is not None
        assert (parameter.grad - expected).norm() <= 1e-5 * expected.norm(), name


def test_without_masks_documents_see_those_before_them() -> None:
    tokens, _ = sample(((11,),))
    with torch.no_grad():
        masked, plain = model_of(LLAMA)(tokens)[0], model_of(LLAMA, None)(tokens)[0]
    torch.testing.assert_close(masked[:12], plain[:12], atol=1e-6, rtol=1e-5)
    assert float((masked[12:] - plain[12:]).abs().max()) > 0.01


@pytest.mark.parametrize("kind", [Recompute.selective, Recompute.full])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_recomputed_and_compiled_layers_stay_inside_of_documents(
    kind: Recompute, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Traced, differentiated and divided as always; to generate code would take most of the test's time.
    graphs_alone = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", graphs_alone)
    train = TrainConfig(recompute=kind, compile=is_compiled, seq_len=SEQUENCE, micro_batch_size=2)
    config = Config(model=LLAMA, train=train)
    expected, found = model_of(LLAMA), model_of(LLAMA)
    recompute_blocks(found, config, make_mesh(0, Layout(dp=1), torch.device("cpu")))
    compile_blocks(found, config)
    for places in (SEPARATORS["inside"], SEPARATORS["in a row"]):
        tokens, targets = sample(places)
        losses = [model(tokens, targets) for model in (expected, found)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[0], losses[1], atol=0, rtol=1e-6)
    for name, parameter in expected.named_parameters():
        twin = found.get_parameter(name).grad
        assert parameter.grad is not None
        assert twin is not None
        if is_compiled:
            assert (parameter.grad - twin).norm() <= 1e-5 * parameter.grad.norm(), name
        else:
            assert torch.equal(parameter.grad, twin), name


def test_all_layers_share_one_mask_and_a_gpu_needs_none() -> None:
    train = TrainConfig(seq_len=128, global_batch_size=2, micro_batch_size=2)
    plain = Config(model=replace(LLAMA, num_hidden_layers=4), train=train)
    masked = replace(plain, data=DataConfig(document_masks=True))
    added = exact_bytes(masked, 1).peak - exact_bytes(plain, 1).peak
    assert 0 <= added - 2 * 128**2 * 4 < 1000  # and bounds
    assert exact_bytes(masked, 1, as_gpu=True) == exact_bytes(plain, 1, as_gpu=True)


def test_a_batch_without_separators_gives_what_it_gives_without_masks() -> None:
    tokens, targets = sample(SEPARATORS["none"])
    torch.testing.assert_close(
        model_of(LLAMA)(tokens, targets), model_of(LLAMA, None)(tokens, targets), atol=0, rtol=1e-6
    )


@for_each_place
def test_bounds_are_those_of_the_documents_and_may_come_from_outside(
    places: tuple[tuple[int, ...], ...],
) -> None:
    tokens, targets = sample(places)
    bounds = document_bounds(tokens, SEPARATOR)
    ends = [row * SEQUENCE + end for row, _, end in documents(tokens)]
    assert bounds.tolist() == [0, *ends]
    assert bounds.dtype is torch.int32
    model = model_of(LLAMA)
    assert torch.equal(model(tokens, targets, 1.0, bounds), model(tokens, targets))


def test_variable_lengths_are_for_16_bits_on_gpus_that_have_the_kernel() -> None:
    assert has_varying_lengths((9, 0), torch.bfloat16, 128)
    assert has_varying_lengths((8, 0), torch.float16, 256)
    assert not has_varying_lengths(None, torch.bfloat16, 128)
    assert not has_varying_lengths((7, 5), torch.float16, 128)
    assert not has_varying_lengths((9, 0), torch.float32, 128)
    assert not has_varying_lengths((9, 0), torch.bfloat16, 264)
    assert not has_varying_lengths((9, 0), torch.bfloat16, 100)


@pytest.mark.parametrize("shares_heads", [False, True])
def test_compiled_code_holds_the_kernel_for_varying_lengths(
    shares_heads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph, with what stands for the GPU's kernel here: attention of each document by itself."""
    tokens, _ = sample(SEPARATORS["inside"])
    bounds = document_bounds(tokens, SEPARATOR)
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, SEQUENCE, heads, 8, generator=generator) for heads in (4, 2, 2))

    def attend(
        q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *_: object, enable_gqa: bool = False, **__: object
    ) -> Tensor:
        assert enable_gqa == (q_THD.shape[1] != k_TKD.shape[1]) == shares_heads
        q_BSHD, k_BSKD, v_BSKD = (each.unflatten(0, (2, SEQUENCE)) for each in (q_THD, k_TKD, v_TKD))
        return attend_within(q_BSHD, k_BSKD, v_BSKD, mask).flatten(0, 1)

    mask = document_mask(bounds, tokens, torch.float32, torch.arange(SEQUENCE))
    expected = attend_within(query, key, value, mask)
    monkeypatch.setattr(module, "_varying_lengths", VaryingLengths(attend, shares_heads))
    torch.testing.assert_close(attend_within(query, key, value, bounds), expected)
    compiled = torch.compile(attend_within, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, key, value, bounds), expected)


def test_torchs_attention_over_varying_lengths_is_there() -> None:
    found = module._load_varying_lengths()
    assert found is module._load_varying_lengths()
    assert callable(found.attend)
