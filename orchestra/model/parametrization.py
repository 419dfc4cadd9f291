"""How initial values and learning rates of each parameter follow from the model's width and depth.

`standard` has one rate for all. `mup`, maximal update (Yang et al., arXiv:2203.03466, table 3, for Adam),
scales them so that activations and their updates stay of one size at any width, and with them the best
learning rate. With m = hidden_size ÷ base_hidden:

| parameter | initial std × | rate × |
|---|---|---|
| embeddings, learned positions, norms, biases | 1 | 1 (embeddings: `embedding_rate`) |
| matrices of the layers | 1/√m | 1/m |
| output matrix, routers of experts | 1/m | 1/m |
| last of a residual branch (o_proj, down_proj), with k = layers ÷ base_layers | also 1/√k | also 1/k |
| queries, with c = √(base_head_dim ÷ head_dim) | also c | also c |

The third column of depth is CompleteP (Dey et al., arXiv:2505.01618): a residual branch is multiplied by 1/k.
The last row is muP's attention by q·k/d in the place of q·k/√d. Both multipliers, and that of the output, are
put into weights: with Adam a factor on a product is the same as that factor on the weight's initial value
and rate. So the model computes what it always does, and its weights mean the same to everybody.

Weight decay is independent of the factors: a step shrinks every matrix by lr · weight_decay, which keeps the
time over which weights forget alike in all widths (Wang and Aitchison, arXiv:2405.13698).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from conf.schema import ModelConfig, OptimConfig, Parametrization
from orchestra.sizes.flops import head_dim

_EMBEDDINGS = ("embed_tokens.weight", "embed_positions.weight")
_OUTPUTS = ("lm_head.weight", "mlp.gate.weight")
_LAST_OF_BRANCH = ("o_proj.weight", "o_proj.bias", "down_proj.weight", "down_proj.bias", "experts.down_proj")


@dataclass(frozen=True)
class ParameterShare:
    """What the standard deviation of a parameter's initial values (of a gain: its value) and its learning
    rate are multiplied by.
    """

    initial: float = 1.0
    rate: float = 1.0


# The share of the parameter of a name.
ShareOf = Callable[[str], ParameterShare]


def standard(_: str) -> ParameterShare:
    """Return one share for all parameters."""
    return ParameterShare()


def share_of(model: ModelConfig, optim: OptimConfig) -> ShareOf:
    """Return the shares of the parametrization that is configured."""
    if optim.parametrization is Parametrization.standard:
        return standard
    mup = optim.mup
    width = model.hidden_size / (mup.base_hidden or model.hidden_size)
    depth = model.num_hidden_layers / (mup.base_layers or model.num_hidden_layers)
    per_head = (
        head_dim(model) if model.kv_lora_rank is None else model.qk_nope_head_dim + model.qk_rope_head_dim
    )
    queries = math.sqrt((mup.base_head_dim or per_head) / per_head)
    # Where queries are normed, only the norm's gain decides how large they are.
    of_queries = ("q_norm.weight",) if model.qk_norm else ("q_proj.weight", "q_proj.bias", "q_b_proj.weight")

    def share(name: str) -> ParameterShare:
        if name in _EMBEDDINGS:
            return ParameterShare(rate=mup.embedding_rate)
        if name.endswith(_OUTPUTS):
            return ParameterShare(1 / width, 1 / width)
        is_vector = name.endswith("bias") or "norm" in name
        initial, rate = (1.0, 1.0) if is_vector else (1 / math.sqrt(width), 1 / width)
        if name.endswith(_LAST_OF_BRANCH):
            initial, rate = initial / math.sqrt(depth), rate / depth
        if name.endswith(of_queries):
            initial, rate = initial * queries, rate * queries
        return ParameterShare(initial, rate)

    return share
