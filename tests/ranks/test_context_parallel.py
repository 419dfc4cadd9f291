"""A model whose sequences are cut over ranks computes the loss and the gradients of the model on one device,
sends what theory says, and keeps its part of the activations.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from cut_models import (
    BATCH,
    MODELS,
    SEQUENCE,
    Gradients,
    assembled,
    config_of,
    cut_gradients,
    cut_model,
    tokens_of,
    whole_gradients,
)
from pool import Ranks
from torch import Tensor

from conf.schema import Config, Recompute
from orchestra.model.transformer import Transformer
from orchestra.parallel.context.sequence_parts import HeadAndTail
from orchestra.sizes.activations import LayerActivations

METHODS = ("all_gather", "ulysses")
# Every layout of a size is one call of the ranks. Documents are shorter and longer than a piece of 2 places.
CUT: dict[int, tuple[Config, ...]] = {
    2: tuple(
        config_of(name, 1, cp=2, method=method)
        for name, method in (
            *((name, "all_gather") for name in MODELS),
            ("llama gqa tied", "ulysses"),
            ("gpt", "ulysses"),
        )
    ),
    4: (
        *(config_of(name, 1, cp=4) for name in ("llama gqa 2", "llama mqa", "gpt tied")),
        config_of("llama mha", 1, cp=4, method="ulysses"),
        *(
            config_of(name, 2, cp=2, sequence_parallel=is_parallel)
            for name in ("llama gqa 2", "gpt tied", "few words")
            for is_parallel in (True, False)
        ),
        config_of("gpt", 2, cp=2, sequence_parallel=True, method="ulysses"),
    ),
}


def separators(config: Config) -> tuple[int | None, int]:
    """Return no separator, and one after which documents of 1, 7 and 8 places are left."""
    return None, int(tokens_of(config.model)[0][0, 0])


Results = list[tuple[float, Gradients, Tensor]]


def all_cut(rank: int, world: int) -> Results:
    return [
        cut_gradients(rank, world, config, separator_id=separator)
        for config in CUT[world]
        for separator in separators(config)
    ]


@pytest.mark.parametrize("world", [2, 4])
def test_loss_every_gradient_and_logits_are_those_of_one_device(ranks: Ranks, world: int) -> None:
    cases = [(config, separator) for config in CUT[world] for separator in separators(config)]
    for (config, separator), *found in zip(cases, *ranks(world).run(all_cut), strict=True):
        loss, gradients, logits = whole_gradients(config, separator)
        name, (tp, cp) = str(config.parallelism), (config.parallelism.tp, config.parallelism.cp)
        for rank, (loss_of_rank, _, logits_of_rank) in enumerate(found):
            assert loss_of_rank == found[0][0] == pytest.approx(loss, rel=1e-6), name
            expected = HeadAndTail(cp, rank // tp).cut(logits)
            torch.testing.assert_close(logits_of_rank, expected, rtol=1e-5, atol=1e-5)
        total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for key, gradient in assembled([parts for _, parts, _ in found], gradients).items():
            # A bias of keys shifts all scores alike: its gradient is zero but for rounding.
            error = (gradient - gradients[key]).norm() / gradients[key].norm().clamp(min=1e-3 * total)
            assert error < 1e-5, f"{name}: {key} is off by {error:.1e}"


def again_and_sent(rank: int, world: int, method: str) -> dict[str, tuple[bool, dict[str, int]]]:
    """Return, by kind of recomputation, whether it changes no bit, and what a micro-batch sends."""
    kept, found = None, {}
    for kind in (Recompute.none, Recompute.selective, Recompute.full):
        config = config_of("llama gqa tied", 1, cp=world, method=method, recompute=kind)
        model, _, mesh = cut_model(rank, config)
        model(*tokens_of(config.model)).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        kept = kept or gradients
        is_same = all(map(torch.equal, kept, gradients))
        found[kind.name] = (is_same, dict(mesh.traffic.bytes_sent))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_recomputation_changes_no_bit_and_bytes_sent_are_those_of_theory(ranks: Ranks, method: str) -> None:
    model, cp = MODELS["llama gqa tied"], 2
    head = BATCH * SEQUENCE * 4 * (model.hidden_size // model.num_attention_heads) * model.num_hidden_layers
    keys, queries = 2 * model.num_key_value_heads * head, model.num_attention_heads * head
    for found in ranks(cp).run(again_and_sent, method=method):
        for kind, (is_same, sent) in found.items():
            assert is_same, kind
            if method == "all_gather":
                # Both passes gather keys and values, and the backward pass sums their gradients.
                passing = keys * (cp - 1) // cp
                expected = {"all_gather": 2 * passing, "reduce_scatter": passing}
            else:
                passes = 2 if kind == "none" else 3
                exchanged = (2 * queries + keys) // cp * (cp - 1) // cp
                expected = {"all_to_all": passes * exchanged}
            assert sent == expected, kind


def kept_bytes(model: Transformer) -> int:
    """Return the bytes that the layers keep for their backward pass, each memory counted once."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    tokens = model.sequences.cut(tokens_of(model.config)[0])
    x = model.embed_tokens(tokens).detach().requires_grad_()
    rotary = model._rotary_tables(tokens.shape[1], x)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in model.layers:
            x = layer(x, rotary)
    x.sum().backward()
    for known in (*model.parameters(), *(rotary or ())):
        kept.pop(known.untyped_storage().data_ptr(), None)
    return sum(size for size, _ in kept.values())


def all_kept_bytes(rank: int, world: int) -> list[int]:
    configs = (config_of("llama gqa tied", 1, cp=world, method=method) for method in METHODS)
    return [kept_bytes(cut_model(rank, config)[0]) for config in configs]


@pytest.mark.parametrize("cp", [2, 4])
def test_activations_are_divided_by_the_ranks_of_a_sequence(ranks: Ranks, cp: int) -> None:
    model = MODELS["llama gqa tied"]
    gathers = LayerActivations(model, BATCH, SEQUENCE // cp, element_bytes=4, cp=cp)
    layers = (gathers, replace(gathers, exchanges_heads=True))
    expected = [model.num_hidden_layers * layer.kept_bytes(Recompute.none) for layer in layers]
    whole = kept_bytes(cut_model(0, config_of("llama gqa tied", 1))[0])
    assert expected[0] == pytest.approx(whole / cp, rel=0.05)
    for found in ranks(cp).run(all_kept_bytes):
        assert found == expected


def compiled_losses(rank: int, world: int, method: str) -> list[tuple[float, float, float]]:
    """Return the losses of eager and of compiled blocks, and how far apart their gradients are."""
    found = []
    for separator in (None, 5):
        config = config_of("llama gqa tied", 1, cp=world, method=method, recompute=Recompute.full)
        loss, gradients, _ = cut_gradients(rank, world, config, separator_id=separator)
        # Traced and differentiated as always; to generate code would take most of the test's time.
        backend = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
        compiled_loss, compiled, _ = cut_gradients(rank, world, config, backend, separator)
        worst = max(
            float((compiled[name][2] - part).norm() / part.norm()) for name, (_, _, part) in gradients.items()
        )
        found.append((loss, compiled_loss, worst))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_compiled_blocks_agree_with_eager_ones(ranks: Ranks, method: str) -> None:
    for found in ranks(2).run(compiled_losses, method=method):
        for loss, compiled, worst in found:
            assert compiled == pytest.approx(loss, rel=1e-6)
            assert worst < 1e-5
