"""Chooses the experts of each token, and what they weigh. In fp32, whatever the precision.

Shape letters: T tokens, E hidden size, X experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.schema import ModelConfig, MoeBalance, ScoringFunc

# Keeps the division of weights by their sum from one by zero, as DeepSeek-V3 has it.
_LEAST_SUM = 1e-20
# A group of experts is as good as its best so many together.
_BEST_OF_GROUP = 2


class Routing(NamedTuple):
    """What a router says of some tokens: the experts of each (int64 [T, K]), what they weigh [T, K], the
    scores of all experts [T, X] and the logits that they are made of. All but the first in fp32.
    """

    experts_TK: Tensor  # noqa: N815  dims are letters
    weights_TK: Tensor  # noqa: N815
    scores_TX: Tensor  # noqa: N815
    logits_TX: Tensor  # noqa: N815


class Router(nn.Module):
    """Scores all experts by one product with a token's hidden state and chooses the best ones."""

    e_score_correction_bias: Tensor | None

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(model.num_experts, model.hidden_size))
        # Is added where experts are chosen, and to no weight.
        bias = torch.zeros(model.num_experts) if model.moe_balance is MoeBalance.bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.num_chosen = model.num_experts_per_tok
        self.is_sigmoid = model.scoring_func is ScoringFunc.sigmoid
        self.divides_by_sum = model.norm_topk_prob
        self.factor = model.routed_scaling_factor
        self.num_groups, self.num_chosen_groups = model.n_group, model.topk_group
        # Given the choice [T, K], returns the one that is taken in its place.
        self.replay: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_TE: Tensor) -> Routing:
        wide = torch.promote_types(x_TE.dtype, torch.float32)
        logits_TX = F.linear(x_TE.to(wide), self.weight.to(wide))
        scores_TX = logits_TX.sigmoid() if self.is_sigmoid else logits_TX.softmax(dim=-1)
        experts_TK = self._choice(scores_TX.detach())
        if self.replay is not None:
            experts_TK = self.replay(experts_TK)
        weights_TK = scores_TX.gather(1, experts_TK)
        if self.divides_by_sum:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        return Routing(experts_TK, weights_TK * self.factor, scores_TX, logits_TX)

    def _choice(self, scores_TX: Tensor) -> Tensor:
        """Return the experts with the best scores, the best one first: of the best groups, where there are
        several.
        """
        if self.e_score_correction_bias is not None:
            scores_TX = scores_TX + self.e_score_correction_bias
        if self.num_chosen_groups < self.num_groups:
            of_groups_TGX = scores_TX.view(len(scores_TX), self.num_groups, -1)
            best = min(_BEST_OF_GROUP, of_groups_TGX.shape[2])
            of_group_TG = of_groups_TGX.topk(best, dim=-1).values.sum(dim=-1)
            groups = of_group_TG.topk(self.num_chosen_groups, dim=-1).indices
            is_left_out_TG = torch.ones_like(of_group_TG, dtype=torch.bool).scatter(1, groups, value=False)
            scores_TX = of_groups_TGX.masked_fill(is_left_out_TG[..., None], -torch.inf).flatten(1)
        return scores_TX.topk(self.num_chosen, dim=-1).indices
