"""The section `model` of the typed schema: the shape of a model, in Hugging Face's names.

Standard library only. Kept beside `conf.schema`, which has the other sections and hands these on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Family(Enum):
    """`llama`: RMSNorm, rotary positions, SwiGLU, no biases. `gpt`: LayerNorm, learned positions, GELU."""

    llama = "llama"
    gpt = "gpt"


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling of rotary positions (Hugging Face's `rope_scaling`, `rope_type: llama3`)."""

    enabled: bool = False
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


class ScoringFunc(Enum):
    """What makes a router's logits the scores of the experts: `softmax` over all of them, or `sigmoid` of
    each (DeepSeek-V3).
    """

    softmax = "softmax"
    sigmoid = "sigmoid"


class MoeBalance(Enum):
    """What keeps the experts evenly loaded. `bias`: a number for each expert that is added to its scores when
    experts are chosen, and nowhere else; it grows or shrinks with each step's load (DeepSeek-V3). `aux`: a
    loss. `none`: nothing.
    """

    bias = "bias"
    aux = "aux"
    none = "none"


class MoeAuxScope(Enum):
    """Over which tokens the loss of balance asks for an even load: each sequence's, or those of a micro-batch
    of all data-parallel ranks together.
    """

    sequence = "sequence"
    batch = "batch"


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model, in Hugging Face's names. The defaults are the preset `debug`."""

    name: str = "debug"
    family: Family = Family.llama
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    # Width of one head; null means hidden_size / num_attention_heads.
    head_dim: int | None = None
    # 256 bytes, the document separator (256), and padding to a multiple of 16.
    vocab_size: int = 272
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    # RMSNorm of each head's queries and keys before positions turn them (Qwen3).
    qk_norm: bool = False
    # Multi-head latent attention (DeepSeek-V3) where kv_lora_rank is given: keys and values of all heads are
    # made of so many numbers a token, and one rotary part of a key that all heads share. Then head_dim is not
    # used, and num_key_value_heads equals num_attention_heads.
    kv_lora_rank: int | None = None
    # Queries are made of so many numbers a token; null: of the hidden state itself.
    q_lora_rank: int | None = None
    # Of a head's queries and keys, the widths of the part without positions and of the one that they turn;
    # and the width of its values.
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    # Experts in each layer's feed-forward, of which a token goes through some; 0: the layers are dense.
    num_experts: int = 0
    num_experts_per_tok: int = 2
    # Inner width of one expert, null: intermediate_size; and of one that every token goes through, 0: none.
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int = 0
    # The first so many layers are dense all the same, of intermediate_size.
    first_k_dense_replace: int = 0
    scoring_func: ScoringFunc = ScoringFunc.softmax
    # The weights of a token's experts are divided by their sum, and then multiplied by this factor.
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    # Experts in n_group groups, of which a token's may come from topk_group: those whose two best scores have
    # the largest sum (DeepSeek-V3's limit on nodes).
    n_group: int = 1
    topk_group: int = 1
    moe_balance: MoeBalance = MoeBalance.bias
    # What an expert's bias moves by in a step; only for moe_balance=bias.
    moe_bias_update_rate: float = 0.001
    # Weight of the loss Σ f·P over the experts of each layer, 1 where all are alike: f their share of the
    # choices times their number, P the mean of their scores. null: 0.01 with moe_balance=aux, else none;
    # beside a bias it may be small (1e-4 in DeepSeek-V3).
    router_aux_loss_coef: float | None = None
    moe_aux_scope: MoeAuxScope = MoeAuxScope.sequence
    # Weight of the mean squared log-sum-exp of a router's logits (ST-MoE), which keeps them small.
    router_z_loss_coef: float = 0.0
    # Most tokens of a sequence that an expert takes, over its even share of them; later tokens go without
    # it, and are counted. null: every token is taken.
    moe_capacity_factor: float | None = None
    # Another decoder layer in the place of the family's: package.module:name, called for each as name(model,
    # **block_options), and with layer_number=0, 1, … where it has that argument; it returns an nn.Module.
    block: str | None = None
    block_options: dict[str, Any] = field(default_factory=dict, hash=False)
    # The parameters of all these layers together; they are counted when the configuration is checked.
    block_parameters: int | None = None
    # Standard deviation of the initial weights; residual projections get it divided by sqrt(2 · layers).
    init_std: float = 0.02
    # Folder with a Hugging Face Llama checkpoint to start from; null: initial values from train.seed.
    init_from: str | None = None
