"""Bytes of activations that a layer keeps for the backward pass, and which layers to recompute for a budget.

Formulas, in elements for each token of a micro-batch (h hidden size, F inner width, H and K heads and
key-value heads of width d): a Llama layer whose attention is computed block by block keeps its two norms'
inputs and outputs (4h), the queries, keys, values and the attention's output (2Hd + 2Kd), and gate, up and
their product (3F), besides 4 bytes a head for the softmax. Published formulas have one F more, since
silu(gate) is computed again here instead of being kept. A GPT layer keeps 2F.

A mixture (K experts of width F for a token, X of them, a shared one of width S) keeps in the place of 3F each
token once for each of its experts, in and out (2Kh), gate and up of them (2KF; on a GPU also their product),
3S, and of the router its input in fp32 (where that is another type), scores and logits, and where each token
went. Norms of heads keep queries and keys once more. Latent attention keeps its latents twice, queries, keys,
what keys and values are parts of, and its output; over ranks of context parallelism keys and values of whole
sequences.

Over N tensor-parallel ranks all but the norms, latents and the rows of experts is cut; with sequence
parallelism the norms are too. Their outputs are then gathered: they count in full unless they are gathered
again in the backward pass.

Ranks of context parallelism have parts of the sequences, and so of everything. Where they exchange places for
heads the attention's output is kept twice, as it comes and as it goes back.

- selective: products are kept (queries, keys, values, the attention's projection, gate and up) beside the
  layer's input, and what the attention's kernel gives (`keeps_attention`); norms, rotation and silu are
  computed again.
- full: the layer's input alone is kept.

No torch: the planner and the rules use this too. Embedding, final norm, loss and the gradients themselves are
not in it.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from conf.schema import Config, ContextMethod, Family, ModelConfig, PrecisionName, Recompute
from orchestra.errors import ConfigError
from orchestra.sizes.flops import (
    attention_width,
    core_width,
    expert_width,
    feed_forward_width,
    head_dim,
    key_value_width,
    num_attention_parameters,
    num_dense_layers,
    value_width,
    without_experts,
)
from orchestra.sizes.topology import batch_shape
from orchestra.sizes.units import GIB

# Statistics of softmax and norms are fp32.
_STATISTIC_BYTES = 4


@dataclass(frozen=True)
class LayerActivations:
    """One layer's activations on one rank, for a micro-batch of `num_sequences` × `seq_len` tokens.

    With `cp` ranks to a sequence `seq_len` is the part of one; `exchanges_heads`: by `cp_method=ulysses`.
    `experts_at_once`: their products are taken over all of them together. `is_gpu`: latent attention has a
    kernel that keeps no scores, which no CPU has.
    """

    model: ModelConfig
    num_sequences: int
    seq_len: int
    element_bytes: int
    tp: int = 1
    is_sequence_parallel: bool = False
    gathers_again: bool = True
    cp: int = 1
    exchanges_heads: bool = False
    experts_at_once: bool = False
    is_gpu: bool = False

    def kept_bytes(self, kind: Recompute) -> int:
        """Return what the layer keeps from its forward pass to its backward pass."""
        elements, statistics = self._input, 0.0
        if kind is Recompute.none:
            elements, statistics = self._all, self._statistics
        elif kind is Recompute.selective:
            elements = self._of_products
            statistics = self.model.num_experts + self._heads * self._keeps_attention
        each = elements * self.element_bytes + statistics * _STATISTIC_BYTES
        if self.model.kv_lora_rank is not None and not self.is_gpu:
            each += self._scores_bytes(kind)
        masks = 0.0
        if kind is Recompute.none and self._attends_by_pieces:
            # What is added to the scores of a sequence's two pieces, which end in all at 2·cp + 1 of them.
            masks = (self.seq_len / 2) ** 2 * (2 * self.cp + 1) * self.element_bytes
        return round(self.num_sequences * self.seq_len * each + masks)

    def recomputed_flops(self, kind: Recompute) -> int:
        """Return the floating-point operations of the layer's second forward pass, over all ranks.

        The attention counts as in the convention for MFU (not halved for causality). What is cheap beside
        products is left out, and so is the layer's last product, which nobody needs again.
        """
        if kind is Recompute.none or (kind is Recompute.selective and self._keeps_attention):
            return 0
        model = self.model
        each = 4 * self.seq_len * self.cp * core_width(model)
        if kind is Recompute.full:
            rows = 2 * attention_width(model) + key_value_width(model)
            products = model.hidden_size * rows
            if model.kv_lora_rank is not None:
                products = num_attention_parameters(model)
            products += model.hidden_size * feed_forward_width(model) * (1 if self._is_gpt else 2)
            each += 2 * products
        return round(self.num_sequences * self.seq_len * each)

    @property
    def _is_gpt(self) -> bool:
        return self.model.family is Family.gpt

    @property
    def _input(self) -> float:
        return self.model.hidden_size / (self.tp if self.is_sequence_parallel else 1)

    @property
    def _gathered(self) -> float:
        """One norm's output as the products take it."""
        return self._input if self.gathers_again else self.model.hidden_size

    @property
    def _of_heads(self) -> float:
        """Queries, keys and values; a rank has at least one key-value head."""
        model = self.model
        if model.kv_lora_rank is not None:
            # What keys without positions and values are parts of, of whole sequences.
            heads = model.num_attention_heads / self.tp
            both = heads * (model.qk_nope_head_dim + model.v_head_dim) * self.cp
            return attention_width(model) / self.tp + both
        num_kv = max(model.num_key_value_heads / self.tp, 1.0)
        return head_dim(model) * (model.num_attention_heads / self.tp + 2 * num_kv)

    @property
    def _latents(self) -> float:
        """Latents and the keys' rotary part, before they are normed."""
        model = self.model
        if model.kv_lora_rank is None:
            return 0.0
        return (model.q_lora_rank or 0) + model.kv_lora_rank + model.qk_rope_head_dim

    @property
    def _keeps_attention(self) -> bool:
        return keeps_attention(self.model, self.cp, is_gpu=self.is_gpu)

    @property
    def _attends_by_pieces(self) -> bool:
        """Whether a GPU's kernel with a mask keeps the output of each piece, and all of them are kept too."""
        return self.model.kv_lora_rank is not None and self.cp > 1 and self.is_gpu

    @property
    def _heads(self) -> float:
        return self.model.num_attention_heads / self.tp

    @property
    def _of_attention(self) -> float:
        """What attention keeps between its norm's output and its output product."""
        model = self.model
        out = value_width(model) / self.tp * (2 if self.exchanges_heads or self._attends_by_pieces else 1)
        kept = self._of_heads + out
        if model.qk_norm:
            kept += self._of_heads - head_dim(model) * max(model.num_key_value_heads / self.tp, 1.0)
        if model.kv_lora_rank is not None:
            keys = attention_width(model) / self.tp * self.cp
            kept += keys + 2 * self._latents - model.qk_rope_head_dim
        return kept

    @property
    def _of_products(self) -> float:
        model, num_gates = self.model, 1 if self._is_gpt else 2
        inner = num_gates * feed_forward_width(model) / self.tp
        rows = model.num_experts_per_tok * model.hidden_size if model.num_experts else 0
        out = value_width(model) / self.tp * self._keeps_attention
        return 2 * self._input + self._of_heads + self._latents + out + inner + rows

    @property
    def _all(self) -> float:
        model = self.model
        inner = (2 if self._is_gpt else 3) * feed_forward_width(model)
        rows = 0
        if model.num_experts:
            rows = 2 * model.num_experts_per_tok * model.hidden_size
            if not self.experts_at_once:
                inner -= model.num_experts_per_tok * expert_width(model)
        return 2 * self._input + 2 * self._gathered + self._of_attention + inner / self.tp + rows

    @property
    def _statistics(self) -> float:
        model = self.model
        norms = (4 if self._is_gpt else 2) * self._input / model.hidden_size
        heads = self._heads
        if model.qk_norm:
            heads += heads + max(model.num_key_value_heads / self.tp, 1.0)
        if model.kv_lora_rank is not None:
            heads += 1 + (model.q_lora_rank is not None)
        return norms + heads + (self._of_router if model.num_experts else 0.0)

    def _scores_bytes(self, kind: Recompute) -> float:
        """What attention without a kernel keeps in fp32: scores, and of narrower types queries, keys and
        values, these apart from what they are parts of; of its products alone scores and output.
        """
        model, width, heads = self.model, self.element_bytes, self._heads
        scores = heads * self.seq_len * self.cp * _STATISTIC_BYTES
        if kind is not Recompute.none:
            out = value_width(model) / self.tp * _STATISTIC_BYTES
            return scores + out if kind is Recompute.selective else 0.0
        inputs = attention_width(model) / self.tp * (1 + self.cp) + value_width(model) / self.tp * self.cp
        apart = heads * model.qk_nope_head_dim * self.cp * width
        return scores + inputs * (_STATISTIC_BYTES - width) - apart

    @property
    def _of_router(self) -> float:
        """Scores and logits, weights twice and their sum, and three whole numbers of 8 bytes a choice."""
        model = self.model
        wide = model.hidden_size if self.element_bytes < _STATISTIC_BYTES else 0
        return wide + 2 * model.num_experts + (2 + 3 * 2) * model.num_experts_per_tok + 1


def keeps_attention(model: ModelConfig, cp: int, *, is_gpu: bool) -> bool:
    """Whether selective recomputation keeps the attention's output: of whole sequences, where one kernel
    gives it. It takes as much as queries do, and its time grows with the square of a sequence.
    """
    return cp == 1 and (model.kv_lora_rank is None or is_gpu)


def layer_activations(config: Config, dp: int, *, is_gpu: bool) -> LayerActivations:
    """Return what a layer's activations are in a configuration on `dp` data-parallel ranks.

    Raises ConfigError where the batch cannot be shared out so.
    """
    batch, parallelism = batch_shape(config.train, dp), config.parallelism
    return LayerActivations(
        model=config.model,
        num_sequences=batch.micro_batch_size,
        seq_len=batch.seq_len // parallelism.cp,
        element_bytes=4 if config.precision.name is PrecisionName.fp32 else 2,
        tp=parallelism.tp,
        is_sequence_parallel=parallelism.sequence_parallel,
        # A GPU gathers while a product runs; on CPU nothing would hide the second gather.
        gathers_again=is_gpu,
        cp=parallelism.cp,
        exchanges_heads=parallelism.cp > 1 and parallelism.cp_method is ContextMethod.ulysses,
        experts_at_once=takes_experts_at_once(config.precision.name, is_gpu=is_gpu),
        is_gpu=is_gpu,
    )


def takes_experts_at_once(precision: PrecisionName, *, is_gpu: bool) -> bool:
    """Whether products are taken over all experts, as in fp8, and where a GPU's kernel does so for bf16."""
    return precision is PrecisionName.fp8 or (
        is_gpu and precision in (PrecisionName.bf16, PrecisionName.bf16_fp32_grad)
    )


def kinds_of_layers(config: Config, dp: int, *, is_gpu: bool) -> tuple[Recompute, ...]:
    """Return what is recomputed of each layer. Raises ConfigError where a budget is too small."""
    train, num_layers = config.train, config.model.num_hidden_layers
    if train.recompute_budget_gib is None:
        return every_kth(train.recompute, train.recompute_every, num_layers)
    layer = layer_activations(config, dp, is_gpu=is_gpu)
    kinds = cheapest_within(layer, num_layers, train.recompute_budget_gib * GIB)
    if kinds is None:
        raise ConfigError(list(budget_problems(layer, num_layers, train.recompute_budget_gib)))
    return kinds


def peak_bytes(layer: LayerActivations, kinds: Sequence[Recompute], num_dense: int = 0) -> int:
    """Return the most that layers of these kinds, in the model's order, hold at one time; the first
    `num_dense` of them have no experts, whatever the others have.

    A layer that is recomputed holds all its activations while its backward pass runs; the layers after it
    have then let go of theirs.
    """
    most = before = 0
    for layers, its in (
        (replace(layer, model=without_experts(layer.model)), kinds[:num_dense]),
        (layer, kinds[num_dense:]),
    ):
        for kind, alike in itertools.groupby(its):
            kept, count = layers.kept_bytes(kind), sum(1 for _ in alike)
            # Of layers alike the last one finds the most before it.
            most = max(most, before + (count - 1) * kept + layers.kept_bytes(Recompute.none))
            before += count * kept
    return most


def cheapest_within(
    layer: LayerActivations, num_layers: int, budget_bytes: float
) -> tuple[Recompute, ...] | None:
    """Return the kinds of the layers that fit the budget with the fewest operations done again; None where
    not even full recomputation fits.

    Recomputed layers come first in the model: when the backward pass reaches them, the others are gone.
    Tokens are taken to be shared out evenly where ranks have experts of their own.
    """
    num_dense = num_dense_layers(layer.model)
    dense = replace(layer, model=without_experts(layer.model))
    fitting: list[tuple[int, tuple[Recompute, ...]]] = []
    for num_full in range(num_layers + 1):
        kinds = _least_selective(layer, num_full, num_layers, budget_bytes)
        if kinds is not None:
            cost = sum(dense.recomputed_flops(kind) for kind in kinds[:num_dense])
            cost += sum(layer.recomputed_flops(kind) for kind in kinds[num_dense:])
            fitting.append((cost, kinds))
    return min(fitting, key=lambda choice: choice[0], default=(0, None))[1]


def _least_selective(
    layer: LayerActivations, num_full: int, num_layers: int, budget_bytes: float
) -> tuple[Recompute, ...] | None:
    """Return the kinds with the fewest selective layers after `num_full` full ones; more of them hold
    less.
    """

    def kinds(num_selective: int) -> tuple[Recompute, ...]:
        num_none = num_layers - num_full - num_selective
        return (
            *([Recompute.full] * num_full),
            *([Recompute.selective] * num_selective),
            *([Recompute.none] * num_none),
        )

    counts, num_dense = range(num_layers - num_full + 1), num_dense_layers(layer.model)
    fewest = bisect.bisect_left(
        counts, True, key=lambda count: peak_bytes(layer, kinds(count), num_dense) <= budget_bytes
    )
    return kinds(fewest) if fewest in counts else None


def budget_problems(layer: LayerActivations, num_layers: int, budget_gib: float) -> Iterator[str]:
    """Yield what to say of a budget that not even full recomputation fits."""
    least = peak_bytes(layer, [Recompute.full] * num_layers, num_dense_layers(layer.model))
    if least > budget_gib * GIB:
        yield (
            f"train.recompute_budget_gib={budget_gib:g} is below the {least / GIB:.3g} GiB of activations "
            f"that {num_layers} layers hold with full recomputation of a micro-batch of "
            f"{layer.num_sequences} × {layer.seq_len} tokens; raise it, or lower train.micro_batch_size"
        )


@functools.lru_cache(maxsize=256)
def every_kth(kind: Recompute, every: int, num_layers: int) -> tuple[Recompute, ...]:
    """Return the kinds of the layers where layers 0, `every`, 2·`every`, … are recomputed."""
    return tuple(kind if index % every == 0 else Recompute.none for index in range(num_layers))
