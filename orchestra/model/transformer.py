"""The decoder-only transformer of both families, built from a ModelConfig. Single device, no training state.

Shape letters: B batch, S sequence, E hidden size, V vocabulary, T = B·S tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from conf.schema import Family, ModelConfig
from orchestra.model.documents import document_bounds, documents_for
from orchestra.model.initial import NormalSlice, fill_normal_slices_, random_key
from orchestra.model.latent_attention import LatentAttention
from orchestra.model.layers import (
    Attention,
    Embedding,
    GeluMLP,
    Positions,
    Rotary,
    SwiGLU,
    make_norm,
    rotary_frequencies,
)
from orchestra.model.logits import EAGER, LogitsPasses
from orchestra.model.loss import Loss, MakeProducts, PlainProducts, cross_entropy_sum
from orchestra.model.mixture.mixture import Mixture
from orchestra.model.parametrization import ShareOf, standard
from orchestra.sizes.flops import head_dim

# Makes the layer of a number, counted from 0 on.
MakeBlock = Callable[[ModelConfig, int], nn.Module]


class Block(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)), where the mlp may be a mixture."""

    def __init__(self, model: ModelConfig, layer_number: int = 0) -> None:
        super().__init__()
        self.input_layernorm = make_norm(model)
        self.self_attn = Attention(model) if model.kv_lora_rank is None else LatentAttention(model)
        self.post_attention_layernorm = make_norm(model)
        self.mlp = make_feed_forward(model, layer_number)

    def forward(self, x_BSE: Tensor, rotary: Rotary, documents: Tensor | None = None) -> Tensor:
        x_BSE = x_BSE + self.self_attn(self.input_layernorm(x_BSE), rotary, documents)
        out: Tensor = x_BSE + self.mlp(self.post_attention_layernorm(x_BSE))
        return out


def make_feed_forward(model: ModelConfig, number: int) -> nn.Module:
    """Return the feed-forward of a layer: the family's, or experts, which the first layers may not have."""
    if model.num_experts and number >= model.first_k_dense_replace:
        return Mixture(model)
    return GeluMLP(model) if model.family is Family.gpt else SwiGLU(model)


def own_block(model: ModelConfig, number: int) -> nn.Module:
    """Return the layer of the model's family."""
    return Block(model, number)


class Sequences(Protocol):
    """What the model has of each sequence: all of it, or a rank's part."""

    def cut(self, whole_BS: Tensor) -> Tensor:
        """Return what there is of tokens or targets [B, S] that are whole."""

    def places(self, num: int, device: torch.device) -> Tensor:
        """Return the places in the sequence (int64) of `num` tokens of which the model has each sequence."""

    def documents(self, bounds: Tensor, whole_BS: Tensor, dtype: torch.dtype, head_dim: int | None) -> Tensor:
        """Return what attention takes, as `documents_for` does."""


class WholeSequences:
    """Sequences that nobody has cut."""

    def cut(self, whole_BS: Tensor) -> Tensor:
        return whole_BS

    def places(self, num: int, device: torch.device) -> Tensor:
        return torch.arange(num, device=device)

    def documents(self, bounds: Tensor, whole_BS: Tensor, dtype: torch.dtype, head_dim: int | None) -> Tensor:
        return documents_for(bounds, whole_BS, dtype, head_dim)


@dataclass(frozen=True)
class ModelPart:
    """Consecutive layers of a model, by their numbers in it. The first part begins with the embedding, and
    the last one ends with the final norm, the output matrix and the loss.
    """

    layers: range
    is_first: bool
    is_last: bool


class Elsewhere(nn.Module):
    """Stands for a module that is in a part of the model which this process does not have."""


class Transformer(nn.Module):
    """Token embeddings, a stack of blocks, a final norm and an output matrix (shared with the embedding if
    tied).

    Built on the meta device it costs no memory; `fill_initial_values` then makes the weights. With a
    `separator_id`, the token that ends each document, attention stays inside of documents.
    """

    def __init__(
        self,
        model: ModelConfig,
        loss_chunk_tokens: int | None = None,
        separator_id: int | None = None,
        make_block: MakeBlock = own_block,
    ) -> None:
        super().__init__()
        self.config = model
        self.loss_chunk_tokens = loss_chunk_tokens
        self.separator_id = separator_id
        self.embed_tokens = Embedding(model.vocab_size, model.hidden_size)
        has_positions = model.family is Family.gpt
        self.embed_positions = (
            Positions(model.max_position_embeddings, model.hidden_size) if has_positions else None
        )
        self.layers = nn.ModuleList(make_block(model, number) for number in range(model.num_hidden_layers))
        self.norm = make_norm(model)
        self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        # What cuts the output matrix over ranks puts its own loss in this place.
        self.loss: Loss = cross_entropy_sum
        self.logits_passes: LogitsPasses = EAGER
        # Who trains the model by another parametrization puts its initial values in this place.
        self.share_of: ShareOf = standard
        self.output_products: MakeProducts = PlainProducts
        # What cuts sequences over ranks puts its own in this place.
        self.sequences: Sequences = WholeSequences()
        self._rotary: tuple[Tensor, Tensor] | None = None
        # All that this process has of the model, in its order.
        self.parts: tuple[ModelPart, ...] = (
            ModelPart(range(model.num_hidden_layers), is_first=True, is_last=True),
        )
        self.tie_weights()

    def tie_weights(self) -> None:
        """Share the embedding's matrix with the output where configured; again after leaving meta."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        tokens_BS: Tensor,
        targets_BS: Tensor | None = None,
        loss_scale: float | Tensor = 1.0,
        bounds: Tensor | None = None,
    ) -> Tensor:
        """Return the logits [B, S, V], or with targets loss_scale · the summed cross-entropy (nats, fp32).

        Of sequences that are cut tokens and targets are whole, and the result is of this rank's part.
        `bounds` are what `document_bounds` returned for the same tokens, if somebody has them already.
        """
        hidden_BSE = self.hidden(tokens_BS, bounds)
        if targets_BS is None:
            logits_BSV: Tensor = self.lm_head(hidden_BSE)
            return logits_BSV
        return self.loss_of(hidden_BSE, targets_BS, loss_scale)

    def loss_of(self, hidden_BSE: Tensor, targets_BS: Tensor, loss_scale: float | Tensor) -> Tensor:
        """Return loss_scale · the summed cross-entropy of normed hidden states (nats, fp32)."""
        return self.loss(
            hidden_BSE.flatten(0, 1),
            self.lm_head.weight,
            self.sequences.cut(targets_BS).flatten(),
            scale=loss_scale,
            chunk=self.loss_chunk_tokens,
            passes=self.logits_passes,
            products=self.output_products,
        )

    def keep_only(self, parts: Sequence[ModelPart]) -> None:
        """Drop the modules of all other parts; layers keep their numbers, and so parameters their names.

        The matrix of a tied model stays where its first or its last part is, called as in the embedding.
        """
        kept = nn.ModuleList()
        for number in (number for part in parts for number in part.layers):
            kept.add_module(str(number), self.layers[number])
        self.layers, self.parts = kept, tuple(parts)
        is_first, is_last = self.has_embedding, self.has_output
        if not (is_first or (is_last and self.config.tie_word_embeddings)):
            self.embed_tokens = Elsewhere()  # type: ignore[assignment]
        if not is_first and self.embed_positions is not None:
            self.embed_positions = Elsewhere()  # type: ignore[assignment]
        if not is_last:
            self.norm, self.lm_head = Elsewhere(), Elsewhere()  # type: ignore[assignment]

    @property
    def has_embedding(self) -> bool:
        """Whether the first part of the model is here."""
        return any(part.is_first for part in self.parts)

    @property
    def has_output(self) -> bool:
        """Whether the last part of the model is here."""
        return any(part.is_last for part in self.parts)

    def numbered_layers(self, part: ModelPart | None = None) -> list[tuple[int, nn.Module]]:
        """Return the layers that are here, or those of one part, with their numbers in the model."""
        layers = [(int(number), layer) for number, layer in self.layers.named_children()]
        return layers if part is None else [pair for pair in layers if pair[0] in part.layers]

    def document_bounds(self, tokens_BS: Tensor) -> Tensor | None:
        """Return the bounds of the tokens' documents, on the tokens' device; None where they do not matter.

        For tokens in host memory this waits for no device.
        """
        return None if self.separator_id is None else document_bounds(tokens_BS, self.separator_id)

    def hidden(self, tokens_BS: Tensor, bounds: Tensor | None = None) -> Tensor:
        """Return the hidden states [B, S, E] after the final norm."""
        x_BSE = None
        for part in self.parts:
            x_BSE = self.through(part, tokens_BS, x_BSE, bounds)
        assert x_BSE is not None
        return x_BSE

    def through(
        self, part: ModelPart, tokens_BS: Tensor, x_BSE: Tensor | None, bounds: Tensor | None = None
    ) -> Tensor:
        """Return what a part makes [B, S, E] of what the one before it made; the first one takes the tokens.

        The last one ends with the final norm.
        """
        own_BS = self.sequences.cut(tokens_BS)
        if part.is_first:
            x_BSE = self.embed_tokens(own_BS)
            if self.embed_positions is not None:
                x_BSE = x_BSE + self.embed_positions(own_BS)
        assert x_BSE is not None, "only the first part begins by itself"
        rotary = self._rotary_tables(own_BS.shape[1], x_BSE)
        documents = self._documents(tokens_BS, bounds, x_BSE.dtype)
        for _, layer in self.numbered_layers(part):
            x_BSE = layer(x_BSE, rotary, documents)
        assert x_BSE is not None
        out: Tensor = self.norm(x_BSE) if part.is_last else x_BSE
        return out

    def _documents(self, tokens_BS: Tensor, bounds: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return what the layers' attention stays inside of; None: the samples."""
        bounds = self.document_bounds(tokens_BS) if bounds is None else bounds
        if bounds is None:
            return None
        # Heads whose values have another width have no kernel for documents of any length.
        width = head_dim(self.config) if self.config.kv_lora_rank is None else None
        return self.sequences.documents(bounds, tokens_BS, dtype, width)

    def _rotary_tables(self, sequence: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return cos [S, 1, D] and sin [S, 1, D/2] in the activations' dtype, computed in fp32 once."""
        if self.config.family is Family.gpt:
            return None
        kept = self._rotary
        if kept is None or kept[0].shape[0] != sequence or kept[0].dtype != like.dtype:
            frequencies = rotary_frequencies(self.config).to(like.device)
            places = self.sequences.places(sequence, like.device)
            angles = places.float()[:, None, None] * frequencies
            cos = angles.cos().repeat(1, 1, 2)
            kept = self._rotary = (cos.to(like.dtype), angles.sin().to(like.dtype))
        return kept


def initial_std(model: ModelConfig, name: str) -> float:
    """Return the standard deviation of initial values: residual outputs are scaled by 1/sqrt(2·L)."""
    is_residual_output = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
    return model.init_std / math.sqrt(2 * model.num_hidden_layers) if is_residual_output else model.init_std


def initial_normal(model: Transformer, name: str, num_dims: int) -> tuple[float, float]:
    """Return mean and standard deviation of a parameter's initial values: what its layer says, which may be a
    plug-in, else matrices normal, the gains of norms 1, biases 0, each as the model's parametrization has it.
    """
    layer = re.match(r"layers\.\d+", name)
    own = layer and initial_normal_of(model.get_submodule(layer[0]), name[layer.end() + 1 :])
    if own:
        return own
    share = model.share_of(name).initial
    if num_dims >= 2:
        return 0.0, initial_std(model.config, name) * share
    return (share if name.endswith(".weight") else 0.0), 0.0


def initial_normal_of(layer: nn.Module, name: str) -> tuple[float, float] | None:
    """Return what a layer's method `initial_normal` says of its parameter `name`; None: nothing."""
    ask = getattr(layer, "initial_normal", None)
    found = None if ask is None else ask(name)
    if found is None:
        return None
    mean, std = found
    return float(mean), float(std)


def fill_initial_parts_(
    parts: Iterable[tuple[Tensor, str, Sequence[int], Sequence[int]]], model: Transformer, seed: int
) -> None:
    """Fill parts of parameters with their initial values: each a tensor of any dtype, all on one device, the
    parameter's name and whole shape, and where the part begins in it.

    Values are a pure function of (seed, parameter name, global index) and rounded from fp32 last.
    """
    slices = []
    for out, name, shape, offsets in parts:
        mean, std = initial_normal(model, name, len(shape))
        if std == 0.0:
            out.fill_(mean)
        else:
            slices.append(NormalSlice(out, random_key(seed, name), shape, offsets, std, mean))
    fill_normal_slices_(slices)


@torch.no_grad()
def fill_initial_values(transformer: Transformer, seed: int) -> None:
    """Set every parameter of a model that nobody has cut to its initial value."""
    named = transformer.named_parameters()
    fill_initial_parts_(
        ((each, name, each.shape, (0,) * each.dim()) for name, each in named), transformer, seed
    )
