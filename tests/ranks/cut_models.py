"""Small models cut over the ranks of a pool, against the same model on one device. Run by ranks and tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conf.schema import Config, ContextMethod, Family, ModelConfig, ParallelismConfig, TrainConfig
from orchestra.model.loss import IGNORED_TARGET
from orchestra.model.transformer import Transformer, fill_initial_values
from orchestra.parallel.blocks import recompute_blocks
from orchestra.parallel.context.cut_sequences import cut_sequences
from orchestra.parallel.mesh import Mesh, make_mesh
from orchestra.parallel.places import TensorPlace
from orchestra.parallel.tensor.split import RowsProducts, split_tensors
from orchestra.sizes.topology import Layout

BATCH, SEQUENCE = 2, 8
# Eight heads; the vocabulary divides neither by 2 nor by 4 and leaves the last of 4 ranks with fewer words.
_LLAMA = ModelConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=37,
    init_std=0.2,
)
_GPT = replace(_LLAMA, family=Family.gpt, max_position_embeddings=16)
MODELS = {
    "llama mha": _LLAMA,
    "llama gqa tied": replace(_LLAMA, num_key_value_heads=4, tie_word_embeddings=True),
    # Fewer key-value heads than four ranks: two neighbours share each.
    "llama gqa 2": replace(_LLAMA, num_key_value_heads=2, head_dim=6),
    "llama mqa": replace(_LLAMA, num_key_value_heads=1),
    "gpt": _GPT,
    "gpt tied": replace(_GPT, tie_word_embeddings=True),
    # One rank of four has no word at all.
    "few words": replace(_LLAMA, vocab_size=5, num_hidden_layers=1),
}
Gradients = dict[str, tuple[tuple[int, ...], bool, Tensor]]


def config_of(
    name: str,
    tp: int,
    *,
    sequence_parallel: bool = False,
    cp: int = 1,
    method: str = "all_gather",
    **train: Any,
) -> Config:
    return Config(
        model=MODELS[name],
        parallelism=ParallelismConfig(
            tp=tp, sequence_parallel=sequence_parallel, cp=cp, cp_method=ContextMethod(method)
        ),
        train=TrainConfig(seq_len=SEQUENCE, loss_chunk_tokens=6, **train),
    )


def tokens_of(model: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return tokens and targets [B, S], of which some take no part in the loss."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.vocab_size, (BATCH, SEQUENCE + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, 2], targets[1, 5:] = IGNORED_TARGET, IGNORED_TARGET
    return tokens[:, :-1], targets


def whole_model(config: Config, separator_id: int | None = None) -> Transformer:
    model = Transformer(config.model, config.train.loss_chunk_tokens, separator_id)
    fill_initial_values(model, 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # the initial values of norms and biases would hide errors
                parameter += 0.1 * torch.sin(torch.arange(len(parameter)) + len(name))
    return model


def cut_model(
    rank: int, config: Config, separator_id: int | None = None
) -> tuple[Transformer, dict[str, TensorPlace], Mesh]:
    """Build this rank's part of the model of `whole_model`."""
    degrees = Layout(dp=1, tp=config.parallelism.tp, cp=config.parallelism.cp)
    mesh = make_mesh(rank, degrees, torch.device("cpu"))
    with torch.device("meta"):
        model = Transformer(config.model, config.train.loss_chunk_tokens, separator_id)
    places = split_tensors(model, config, mesh)
    cut_sequences(model, config, mesh)
    model.to_empty(device="cpu")
    model.tie_weights()
    whole = dict(whole_model(config).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            place = places[name]
            assert tuple(parameter.shape) == place.padded
            parameter.zero_()
            counted(parameter, place).copy_(whole[name][box_of(place.offsets, place.local)])
    recompute_blocks(model, config, mesh)
    return model, places, mesh


def box_of(offsets: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, shape, strict=True))


def gather_again(model: Transformer) -> None:
    """Have the products gather their input again in the backward pass, as on a GPU."""
    for module in model.modules():
        products = getattr(module, "products", None)
        if isinstance(products, RowsProducts):
            again = replace(products.group, gathers_again=True)
            module.products = RowsProducts(again)  # type: ignore[assignment]


def counted(tensor: Tensor, place: TensorPlace) -> Tensor:
    """Return the view of what is no padding."""
    for dim, size in enumerate(place.local):
        tensor = tensor.narrow(dim, 0, size)
    return tensor


def cut_gradients(
    rank: int,
    world: int,
    config: Config,
    compiled_by: Callable[..., Any] | None = None,
    separator_id: int | None = None,
) -> tuple[float, Gradients, Tensor]:
    """Return the loss, this rank's parts of all gradients with their offsets, and the logits; of sequences
    that are cut the sum of the ranks' losses and gradients, and the logits of this rank's places.
    """
    model, places, mesh = cut_model(rank, config, separator_id)
    if compiled_by is not None:
        # What earlier tests of the same processes compiled counts against a limit.
        torch.compiler.reset()
        for layer in model.layers:
            layer.forward = compiled_by(layer.forward)
    tokens, targets = tokens_of(config.model)
    loss = model(tokens, targets, 0.5)
    loss.backward()
    gradients: Gradients = {}
    for name, parameter in model.named_parameters():
        place, gradient = places[name], parameter.grad
        assert gradient is not None, name
        for group in (place.sum_group, mesh.cp_group):
            if group is not None:
                dist.all_reduce(gradient, group=group)
        padding = gradient.abs().sum() - counted(gradient, place).abs().sum()
        assert padding == 0, f"{name} has a gradient in its padding"
        is_counted = place.is_counted and mesh.coordinates.cp == 0
        gradients[name] = (place.offsets, is_counted, counted(gradient, place).clone())
    if mesh.cp_group is not None:
        dist.all_reduce(loss.detach(), group=mesh.cp_group)
    with torch.no_grad():
        return float(loss.detach()), gradients, model(tokens)


def whole_gradients(
    config: Config, separator_id: int | None = None
) -> tuple[float, dict[str, Tensor], Tensor]:
    model = whole_model(config, separator_id)
    tokens, targets = tokens_of(config.model)
    loss = model(tokens, targets, 0.5)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        return float(loss.detach()), {k: v for k, v in gradients.items() if v is not None}, model(tokens)


def assembled(results: list[Gradients], shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put the ranks' counted parts together; every element must be counted exactly once."""
    whole = {name: torch.zeros_like(like) for name, like in shapes.items()}
    times = {name: torch.zeros_like(like) for name, like in shapes.items()}
    for gradients in results:
        for name, (offsets, is_counted, part) in gradients.items():
            if is_counted:
                box = box_of(offsets, part.shape)
                whole[name][box] += part
                times[name][box] += 1
    for name, count in times.items():
        assert torch.equal(count, torch.ones_like(count)), f"{name} is not counted exactly once"
    return whole
