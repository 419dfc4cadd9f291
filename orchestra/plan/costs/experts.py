"""What a mixture of experts costs beside a dense layer: one layer, one micro-batch, one rank.

Assumed: experts get equally many tokens, none is dropped; each rank of tensor parallelism has a part of every
expert that its data-parallel rank has; nothing hides the exchange. With few tokens for an expert its weights
take longer to read than to multiply. It knows neither attention nor what all tokens go through.
"""

from __future__ import annotations

from orchestra.flops import num_expert_parameters
from orchestra.plan.cases.case import Case
from orchestra.plan.cases.stages import held_of_layer

# To the experts and back, forward and backward.
EXCHANGES = 4
# Copies of each token to each of its experts: sorted by expert and put back, forward and backward, each of
# them read and written.
_PASSES_OF_COPIES = 8


def products_s(case: Case) -> float:
    """Return the seconds of the experts' products in one pass: forward, or one of the two of backward."""
    model, tokens, device = case.model, case.tokens, case.device
    if not model.num_experts:
        return 0.0
    used = num_expert_parameters(model) // model.num_experts * model.num_experts_per_tok
    rate = device.product_flops * case.framework.experts_rate
    multiplying = 2 * used * tokens.count / tokens.tp / rate
    reading = held_of_layer(model, case.layout).experts * tokens.width_bytes / device.memory_bytes_per_s
    return max(multiplying, reading)


def copying_s(case: Case) -> float:
    """Return the seconds of memory traffic in which tokens are sorted by their experts and put back."""
    return _PASSES_OF_COPIES * copies_bytes(case) / case.device.memory_bytes_per_s


def exchange_s(case: Case) -> float:
    """Return the seconds in which tokens go to the ranks that have their experts, and back."""
    ep = case.layout.ep
    if ep == 1 or not case.model.num_experts:
        return 0.0
    group = case.group(ep, case.layout.tp * case.layout.cp)
    return EXCHANGES * case.network.all_to_all_s(copies_bytes(case), group, case.device.link_bytes_per_s)


def copies_bytes(case: Case) -> float:
    """Return the bytes of a micro-batch's tokens, once for each expert that they go to."""
    tokens, model = case.tokens, case.model
    width = model.num_experts_per_tok * model.hidden_size * tokens.width_bytes if model.num_experts else 0
    return tokens.count * width / tokens.outer
