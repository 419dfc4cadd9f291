"""Which layers a pipeline stage holds, and how many parameters one of its ranks has. Integers only.

Two ways of cutting: evenly by layers, as most do, or by cost with the output product counted as a block
(nanotron), which gives the last stage fewer layers when the vocabulary is large.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from conf.schema import ModelConfig
from orchestra.flops import num_expert_parameters, num_layer_parameters, num_parameters
from orchestra.topology import Layout

# nanotron cuts behind the output product too: the cast to fp32 and the loss may have stages of their own.
_BLOCKS_BEHIND_HEAD = 2


@dataclass(frozen=True)
class Stage:
    """One pipeline stage: its layers, and whether token embedding and output product are on it."""

    index: int
    num_layers: int
    has_embedding: bool
    has_head: bool


@lru_cache(maxsize=4096)
def stages(model: ModelConfig, pp: int, *, by_cost: bool = False) -> tuple[Stage, ...]:
    """Return the stages in order. More stages than layers leave some without any."""
    layers, head = _by_cost(model, pp) if by_cost else _evenly(model.num_hidden_layers, pp)
    return tuple(
        Stage(index, layers[index], has_embedding=index == 0, has_head=index == head) for index in range(pp)
    )


def has_idle_stage(cut: tuple[Stage, ...]) -> bool:
    """Whether a stage has nothing at all to do, which a trainer refuses or trips over: of 74 such runs of the
    playbook's one got through, whatever their memory.
    """
    head = next(each.index for each in cut if each.has_head)
    is_bare = any(not (each.num_layers or each.has_embedding) for each in cut[:head])
    return is_bare or len(cut) - 1 - head > _BLOCKS_BEHIND_HEAD


def _evenly(num_layers: int, pp: int) -> tuple[list[int], int]:
    """Layers left over go to the middle: the ends have embedding and output besides."""
    least, rest = divmod(num_layers, pp)
    first = max(0, (pp - rest) // 2)
    return [least + (first <= index < first + rest) for index in range(pp)], pp - 1


def _by_cost(model: ModelConfig, pp: int) -> tuple[list[int], int]:
    """Cut where the running sum of matrix products passes each p-th of the whole; the embedding is free."""
    hidden = model.hidden_size
    layer = 4 * hidden * hidden + 3 * hidden * model.intermediate_size
    head = model.vocab_size * hidden
    share = (model.num_hidden_layers * layer + head) / pp
    counts, stage, done = [0] * pp, 0, 0
    for _ in range(model.num_hidden_layers):
        stage = _stage_at(done, share, stage, pp)
        counts[stage] += 1
        done += layer
    return counts, _stage_at(done, share, stage, pp)


def _stage_at(done: int, share: float, stage: int, pp: int) -> int:
    while stage < pp - 1 and done >= share * (stage + 1) - 1e-9:
        stage += 1
    return stage


def stage_parameters(model: ModelConfig, stage: Stage, pp: int) -> int:
    """Return the parameters of a stage over all its tensor-parallel ranks.

    A tied embedding stands on the first stage and, in a pipeline, once more where the output product is.
    """
    table = model.vocab_size * model.hidden_size
    layers = model.num_hidden_layers * num_layer_parameters(model)
    tables = table * (1 if model.tie_word_embeddings else 2)
    beside = num_parameters(model) - layers - tables  # final norm, and learned positions
    count = stage.num_layers * num_layer_parameters(model)
    count += table if stage.has_embedding else 0
    if stage.has_head:
        shares_table = model.tie_word_embeddings and (pp == 1 or stage.has_embedding)
        count += beside + (0 if shares_table else table)
    return count


@dataclass(frozen=True)
class Held:
    """Elements that one rank holds, before ZeRO shares them out: of routed experts, which expert parallelism
    has divided, and of all else. Sums, such as that of a stage's layers, are taken part by part.
    """

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.dense + self.experts


def held_by_rank(model: ModelConfig, stage: Stage, layout: Layout) -> Held:
    """Return what a rank of a stage holds. Experts are cut by tp like all else."""
    experts = stage.num_layers * num_expert_parameters(model)
    dense = stage_parameters(model, stage, layout.pp) - experts
    return Held(dense / layout.tp, experts / layout.tp / layout.ep)


def held_of_layer(model: ModelConfig, layout: Layout) -> Held:
    """Return what a rank holds of one layer."""
    experts = num_expert_parameters(model)
    return Held((num_layer_parameters(model) - experts) / layout.tp, experts / layout.tp / layout.ep)
