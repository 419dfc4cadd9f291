"""How many bytes of a step go from one leaf switch to another, by the order of the nodes. Pure.

It counts each group's communication over the layout: collectives go around a ring of the group's ranks in
their order (each edge carries (k - 1) / k of what is gathered or scattered), exchanges from each rank to each
other one, activations from a pipeline stage to the next and back. It measures orders of the same nodes
against each other, and is no prediction of time: NCCL may use trees, and rails of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise

from orchestra.plan.case import PlanCase, held_by_rank
from orchestra.sizes.flops import key_value_width

# Around attention and the feed-forward, forward and backward (see `orchestra.plan.compute`).
_TENSOR_COLLECTIVES = 8
_CONTEXT_GATHERS = 3
_EXCHANGES = 4


def leaf_bytes(case: PlanCase, leaf_of_node: Sequence[Hashable]) -> dict[str, float]:
    """Return the bytes that one step moves between leaves, by axis; `leaf_of_node` in the order of ranks."""
    mesh, tokens = case.layout, case.tokens
    width, layers = tokens.width_bytes, case.model.num_hidden_layers / mesh.pp
    passes = layers * case.accumulation
    leaf = [leaf_of_node[rank // case.devices_per_node] for rank in range(mesh.world_size)]
    activation = tokens.count * case.model.hidden_size * width
    keys = tokens.count * key_value_width(case.model) / tokens.tp * width * mesh.cp
    held = max((held_by_rank(case.model, stage, mesh) for stage in case.stages), key=lambda each: each.total)
    experts, others = held.experts * width, held.dense * width
    copies = activation * case.model.num_experts_per_tok / tokens.outer if case.model.num_experts else 0.0
    # Gradients are scattered and parameters gathered once a step; with stage 3 twice and once a micro-batch.
    times = 3 * case.accumulation if case.kept_zero == 3 else 2

    def around(axes: Sequence[str], gathered: float) -> float:
        return _of_groups(case, axes, leaf, lambda ranks: _ring(ranks, leaf) * gathered)

    return {
        "tp": around(["tp"], _TENSOR_COLLECTIVES * passes * activation),
        "cp": around(["cp"], _CONTEXT_GATHERS * passes * keys),
        "ep": _of_groups(
            case,
            ["ep"],
            leaf,
            lambda ranks: _EXCHANGES * passes * copies / len(ranks) * _pairs(ranks, leaf),
        ),
        "dp": around(["shard"], times * others)
        + around(["replicate"], 2 * others / mesh.shard)
        + around(["expert_shard"], times * experts)
        + around(["expert_replicate"], 2 * experts / mesh.expert_shard),
        "pp": _of_groups(
            case,
            ["pp"],
            leaf,
            lambda ranks: (
                2 * case.accumulation * activation / tokens.outer * _crossings(pairwise(ranks), leaf)
            ),
        ),
    }


def _of_groups(
    case: PlanCase, axes: Sequence[str], leaf: Sequence[Hashable], moved: Callable[[Sequence[int]], float]
) -> float:
    groups = {case.layout.neighbours(rank, axes) for rank in range(len(leaf))}
    return sum(moved(ranks) for ranks in groups if len(ranks) > 1)


def _ring(ranks: Sequence[int], leaf: Sequence[Hashable]) -> float:
    """Return how often what a ring gathers goes from leaf to leaf."""
    edges = zip(ranks, (*ranks[1:], ranks[0]), strict=True)
    return _crossings(edges, leaf) * (len(ranks) - 1) / len(ranks)


def _pairs(ranks: Sequence[int], leaf: Sequence[Hashable]) -> int:
    return _crossings(((one, other) for one in ranks for other in ranks), leaf)


def _crossings(pairs: Iterable[tuple[int, int]], leaf: Sequence[Hashable]) -> int:
    return sum(leaf[one] != leaf[other] for one, other in pairs)
