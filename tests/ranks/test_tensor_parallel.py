"""A model cut over ranks computes the loss and the gradients of the model on one device."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from cut_models import (
    BATCH,
    MODELS,
    SEQUENCE,
    assembled,
    config_of,
    cut_gradients,
    cut_model,
    gather_again,
    tokens_of,
    whole_gradients,
)
from pool import Ranks
from torch import Tensor

from conf.schema import Recompute
from orchestra.model.transformer import Transformer
from orchestra.sizes.activations import LayerActivations


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_loss_gradients_and_logits_are_those_of_one_device(
    ranks: Ranks, tp: int, sequence_parallel: bool
) -> None:
    for name in MODELS:
        loss, gradients, logits = whole_gradients(config_of(name, 1))
        config = config_of(name, tp, sequence_parallel=sequence_parallel)
        found = ranks(tp).run(cut_gradients, config=config)
        for loss_of_rank, _, logits_of_rank in found:
            assert loss_of_rank == found[0][0] == pytest.approx(loss, rel=1e-6)
            torch.testing.assert_close(logits_of_rank, logits, rtol=1e-5, atol=1e-5)
        total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for key, gradient in assembled([parts for _, parts, _ in found], gradients).items():
            # A bias of keys shifts all scores alike: its gradient is zero but for rounding.
            expected = gradients[key].norm().clamp(min=1e-3 * total)
            error = (gradient - gradients[key]).norm() / expected
            assert error < 1e-5, f"{name}: {key} is off by {error:.1e}"


def recomputed_gradients(rank: int, world: int, sequence_parallel: bool) -> list[tuple[str, str, bool]]:
    """Return, for models and kinds of recomputation, whether loss and gradients have the bits of keeping."""
    found = []
    for name in ("llama gqa 2", "gpt tied"):
        config = config_of(name, world, sequence_parallel=sequence_parallel)
        loss, gradients, _ = cut_gradients(rank, world, config)
        for kind in (Recompute.selective, Recompute.full):
            train = replace(config.train, recompute=kind)
            again, repeated, _ = cut_gradients(rank, world, replace(config, train=train))
            equal = all(torch.equal(repeated[key][2], part) for key, (_, _, part) in gradients.items())
            found.append((name, kind.name, loss == again and equal))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputation_changes_no_bit(ranks: Ranks, sequence_parallel: bool) -> None:
    for result in ranks(4).run(recomputed_gradients, sequence_parallel=sequence_parallel):
        assert len(result) == 4
        for name, kind, is_equal in result:
            assert is_equal, f"{kind} recomputation changes the bits of {name}"


def bytes_sent(rank: int, world: int, sequence_parallel: bool, recompute: Recompute) -> dict[str, int]:
    """Return what one micro-batch makes this rank send."""
    config = config_of("llama mha", world, sequence_parallel=sequence_parallel, recompute=recompute)
    model, _, mesh = cut_model(rank, config)
    tokens, targets = tokens_of(config.model)
    model(tokens, targets).backward()
    return dict(mesh.traffic.bytes_sent)


@pytest.mark.parametrize("recompute", list(Recompute), ids=lambda kind: kind.name)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_bytes_sent_are_those_of_theory(ranks: Ranks, sequence_parallel: bool, recompute: Recompute) -> None:
    model, tp = MODELS["llama mha"], 4
    num_tokens, layers = BATCH * SEQUENCE, model.num_hidden_layers
    passing = num_tokens * model.hidden_size * 4 * (tp - 1) // tp
    statistics = tp * 3 * num_tokens * 4 * (tp - 1) // tp
    again = {Recompute.none: (0, 0, 0), Recompute.selective: (0, 2, 0), Recompute.full: (1, 2, 1)}[recompute]
    if sequence_parallel:
        # A layer: two of each forward, two of each backward. The embedding and the loss: one of each.
        gathers, scatters = layers * (4 + again[1]) + 2, layers * (4 + again[2]) + 2
        expected = {"all_gather": gathers * passing + statistics, "reduce_scatter": scatters * passing}
    else:
        # A layer: two forward, two backward. The embedding's forward and the loss: one.
        sums = layers * (4 + again[0]) + 2
        expected = {"all_reduce": sums * 2 * passing, "all_gather": statistics}
    for sent in ranks(tp).run(bytes_sent, sequence_parallel=sequence_parallel, recompute=recompute):
        assert sent == expected


def kept_bytes(model: Transformer) -> int:
    """Return the bytes that the layers keep for their backward pass, each memory counted once."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    x = model.embed_tokens(tokens_of(model.config)[0]).detach().requires_grad_()
    rotary = model._rotary_tables(SEQUENCE, x)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in model.layers:
            x = layer(x, rotary)
    for known in (*model.parameters(), *(rotary or ())):
        kept.pop(known.untyped_storage().data_ptr(), None)
    return sum(size for size, _ in kept.values())


def memory_and_gradients(rank: int, world: int, name: str) -> dict[str, tuple[int, list[Tensor], int]]:
    """Return kept bytes, gradients and gathered bytes by how the input of products is treated."""
    found = {}
    for how in ("without", "kept", "again"):
        config = config_of(name, world, sequence_parallel=how != "without")
        model, _, mesh = cut_model(rank, config)
        if how == "again":
            gather_again(model)
        size = kept_bytes(model)
        mesh.traffic.bytes_sent.clear()
        model(*tokens_of(config.model)).backward()
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        found[how] = size, gradients, mesh.traffic.bytes_sent["all_gather"]
    return found


@pytest.mark.parametrize("name", ["llama mha", "llama gqa 2", "gpt"])
def test_kept_bytes_are_those_of_the_formula_and_gathering_again_changes_no_bit(
    ranks: Ranks, name: str
) -> None:
    model, tp = MODELS[name], 4
    without = LayerActivations(model, BATCH, SEQUENCE, element_bytes=4, tp=tp)
    layers = {
        "without": replace(without, gathers_again=False),
        "kept": replace(without, is_sequence_parallel=True, gathers_again=False),
        "again": replace(without, is_sequence_parallel=True),
    }
    for found in ranks(tp).run(memory_and_gradients, name=name):
        for how, layer in layers.items():
            expected = model.num_hidden_layers * layer.kept_bytes(Recompute.none)
            assert found[how][0] == expected, how
        assert all(map(torch.equal, found["kept"][1], found["again"][1]))
        passing = BATCH * SEQUENCE * model.hidden_size * 4 * (tp - 1) // tp
        assert found["again"][2] - found["kept"][2] == 2 * model.num_hidden_layers * passing


def compiled_losses(rank: int, world: int) -> tuple[float, float, float]:
    """Return the loss of eager and of compiled blocks, and how far apart their gradients are."""
    config = config_of("few words", world, sequence_parallel=True, recompute=Recompute.selective)
    loss, gradients, _ = cut_gradients(rank, world, config)
    # Traced and differentiated as always; to generate code would take most of the test's time.
    backend = functools.partial(torch.compile, backend="aot_eager")
    compiled_loss, compiled, _ = cut_gradients(rank, world, config, compiled_by=backend)
    worst = max(
        float((compiled[name][2] - part).norm() / part.norm()) for name, (_, _, part) in gradients.items()
    )
    return loss, compiled_loss, worst


@pytest.mark.slow
def test_compiled_blocks_agree_with_eager_ones_on_ranks(ranks: Ranks) -> None:
    for loss, compiled, worst in ranks(2).run(compiled_losses):
        assert compiled == pytest.approx(loss, rel=1e-6)
        assert worst < 1e-5
