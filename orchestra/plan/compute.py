"""How long a rank works on one micro-batch: products, attention, memory traffic, collectives, and the host.

A layer takes the longer of two times: what the device needs, and what the host needs to issue it. In
nanotron's runs the second rules for small work (4.4 ms a layer, whatever the width), and grows by about 2 ms
per tensor-parallel rank once a pipeline spans nodes.

Of mixtures of experts it assumes that none is dropped, that each rank of tensor parallelism has a part of
every expert that its data-parallel rank has, and that nothing hides the exchange. Other trainers publish
numbers with routing that is forced to be even; of orchestra's the router decides, and where experts lie on
several ranks the one with the most tokens does (`Framework.uneven_routing`). With few tokens for an expert
its weights take longer to read than to multiply.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import groupby

from conf.schema import ContextMethod, PipelineSchedule, PrecisionName, Recompute
from orchestra.plan.case import PlanCase, RankElements, held_of_layer, most_experts
from orchestra.plan.kernels.memory_passes import (
    STREAM_SHARE,
    gradient_bytes,
    half_flops,
    layer_bytes,
    layer_matrices,
    loss_bytes,
    rounding_bytes,
)
from orchestra.plan.kernels.product_tiles import ALIGNED_BYTES, slowdown, unaligned_slowdown
from orchestra.sizes.flops import (
    attention_width,
    core_width,
    expert_width,
    feed_forward_width,
    head_dim,
    key_value_width,
    num_dense_layers,
    num_expert_parameters,
    num_layer_parameters,
    value_width,
    without_experts,
)
from orchestra.sizes.memory.layer_memory import recomputed_kinds
from orchestra.sizes.memory.loss_memory import loss_chunk_tokens
from orchestra.sizes.training_shape import PipelineStage, rank_parameters, widths

# To the experts and back, forward and backward.
_EXCHANGES = 4
# What a tile of a grouped product takes besides, in numbers that are summed: met by two layers on one H100,
# whose products ran at 0.71 (128 experts, 768 wide) and 0.91 (8 experts, 14,336 wide) of the dense rate.
_TILE_START = 480
# Copies of each token to each of its experts: sorted by expert and put back, forward and backward, each of
# them read and written.
_PASSES_OF_COPIES = 8
# Layers that ZeRO-3's memory holds at once (`orchestra.parallel.zero.buffers.slots`).
_TURNS = 2
_OF_SEVERAL_STAGES = (PipelineSchedule["interleaved"], PipelineSchedule["zbv"])
# Forward, and backward twice that; recomputation adds a forward.
_PASSES = 3
# Of a forward pass' memory traffic, what selective recomputation adds where it is compiled into the backward
# pass: 0.9 % of a step whose forward passes move for 2.0 % (8 layers of Llama 3 8B, H100).
_REPEATED_PASSES = 0.45
# Collectives of a layer under sequence parallelism: gather and scatter around attention and around the
# feed-forward, forward and backward (Korthikanti et al., figure 5). All-reduces instead move as much.
_COLLECTIVES = 8
# Of a layer's collectives, where all that a forward pass sends is sent again.
_ONCE_MORE = 1.5
# Share of the memory traffic between the tensor-parallel regions: 8 of some 48 saved bytes (activations.py).
_OUTER_TRAFFIC = 1 / 6
# A number in 16 bits written and read, and the sum in 32 bits read and written.
_MERGE_BYTES = 12
# Of gathered keys and values: written, read and written in their places, forward and backward; of their
# gradients: zeros, two sums, and a copy by ranks.
_GATHERED_PASSES = 15
# Of what is exchanged for heads, forward and backward: put in order, sent, received, put in order.
_EXCHANGED_PASSES = 12
# Of the rate of attention that pieces of a ring reach: 0.7 to 0.77 on H100 (NeMo's long sequences, 32 k to
# 1 M tokens), 0.75 to 1 in torchtitan's, 0.9 to 1 on B200.
_RING_SHARE = 0.8
_VENDOR_HEAD = 64
# Products of heads whose rows do not begin at multiples of 16 bytes, where scores pass through memory: the
# A100's rate without tensor cores (data sheet: 312 and 19.5 TFLOP/s). BLOOM's runs with heads of 108 and 150
# took half as long again.
_UNALIGNED_HEADS = 16.0


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer on one micro-batch, forward and backward, recomputation included."""

    products: float
    attention: float
    elementwise: float
    collectives: float
    exchange: float
    context: float
    sharded: float
    host: float
    pressed: float

    @property
    def device(self) -> float:
        """What the device takes."""
        return self.products + self.attention + self.elementwise + self.communicating

    @property
    def communicating(self) -> float:
        """What of it the device's collectives take."""
        return self.collectives + self.exchange + self.context + self.sharded

    @property
    def total(self) -> float:
        """What the layer takes."""
        return max(self.device, self.host) + self.pressed


def layer_time(case: PlanCase, *, is_pressed: bool = False) -> LayerTime:
    """Return the times of one layer; `is_pressed`: on a device that is nearly full (see `Stalls`)."""
    model, device, tokens, stalls = case.model, case.device, case.tokens, case.framework.stalls
    again = 1 + _repeated(case) / _PASSES
    attention_again = 1 + (1 / _PASSES if _repeats_attention(case) else 0)
    of_all = num_layer_parameters(model) - num_expert_parameters(model)
    products = 2 * _PASSES * of_all * tokens.count / tokens.tp / device.product_flops
    tiles = 1.0
    if case.counts_passes or case.framework.counts_tiles:
        tiles = slowdown(case, layer_matrices(case), rate=device.product_flops / half_flops(case))
    # What other trainers' experts lose is in the rate of theirs.
    products = tiles * products + (tiles if case.counts_passes else 1.0) * _experts_products_s(case)
    attention = _attention(case) * attention_again
    traffic = case.framework.elementwise_bytes * tokens.width_bytes / 2 * model.hidden_size * tokens.count
    traffic *= _OUTER_TRAFFIC / tokens.outer + (1 - _OUTER_TRAFFIC) / tokens.tp
    # Tokens are sorted by their experts, and put back.
    traffic += _PASSES_OF_COPIES * _copies_bytes(case)
    elementwise = traffic / device.memory_bytes_per_s * again
    if case.counts_passes:
        elementwise = _counted(case)
    elementwise += _merging(case) * attention_again
    is_busy_host = case.framework.computes_on_host
    if is_busy_host:
        elementwise += _host(case, again) + _weights_time(case, held_of_layer(model, case.layout).total)
    ring = 0.0 if case.framework.gathers_context else _ring_attention(case)
    # What hides the ring of context parallelism hides nothing else.
    busy = products + max(0.0, attention - ring) + elementwise
    return LayerTime(
        products=products * (1 + _repeated_products(case) / _PASSES),
        attention=attention,
        elementwise=elementwise,
        collectives=_tensor_collectives(case),
        exchange=_exchange_s(case),
        context=_context_s(case, attention / attention_again, ring - attention),
        sharded=_gathered_parameters(case, busy),
        host=0.0 if is_busy_host else _host(case, again),
        pressed=stalls.pressed_layer_s if is_pressed and stalls is not None else 0.0,
    )


def _counted(case: PlanCase) -> float:
    """Seconds of the passes that are counted from the trainer's code; gradients are not copied again."""
    share = _repeated(case)
    if case.recompute is Recompute.selective:
        # What ranks exchange divides a mixture's graph: what is repeated of it runs eager.
        is_one_graph = case.options.is_compiled and (case.layout.ep == 1 or not case.model.num_experts)
        share = _REPEATED_PASSES if is_one_graph else 1.0
    again = 1 + share / _PASSES
    moved = (layer_bytes(case) + rounding_bytes(case) + _PASSES_OF_COPIES * _copies_bytes(case)) * again
    moved += gradient_bytes(case)
    return moved / (STREAM_SHARE * case.device.memory_bytes_per_s)


def _attention(case: PlanCase) -> float:
    """Seconds of the attention core: flash attention, or products whose scores pass through memory."""
    tokens, device, framework = case.tokens, case.device, case.framework
    pairs = tokens.count * case.seq_len / tokens.tp
    # Causal: half of 4·h·s per token and forward pass.
    flops = 2 * _PASSES * core_width(case.model) * pairs
    if framework.score_bytes:
        traffic = framework.score_bytes * case.model.num_attention_heads * pairs
        row_bytes = head_dim(case.model) * tokens.width_bytes
        slower = 1.0 if row_bytes % ALIGNED_BYTES == 0 else _UNALIGNED_HEADS
        return slower * 2 * flops / device.product_flops + traffic / device.memory_bytes_per_s
    rate = device.attention_flops * framework.attention_rate
    rate *= _vendor_gain(case) if framework.uses_vendor_attention else 1.0
    is_ring = case.layout.cp > 1 and not case.framework.gathers_context
    return flops / rate / (_RING_SHARE if is_ring else 1.0)


def _vendor_gain(case: PlanCase) -> float:
    """How much faster the vendor's attention is. Of orchestra's, whose kernels were timed on an H200: all of
    it from heads of 128 on, nothing with heads of 64, where exponentials are the limit.
    """
    if not case.counts_passes:
        return case.device.vendor_attention
    share = min(1.0, max(0.0, head_dim(case.model) / _VENDOR_HEAD - 1))
    return 1 + (case.device.vendor_attention - 1) * share


def mean_layer_time(case: PlanCase, *, is_pressed: bool = False) -> LayerTime:
    """Return the mean over the layers where not all of them are recomputed alike (a budget for activations,
    or each k-th layer) or the first ones have no experts, else the time of any.
    """
    num_dense = num_dense_layers(case.model)
    is_even = case.options.recompute_every == 1 and case.options.activation_bytes is None
    if is_even and not num_dense:
        return layer_time(case, is_pressed=is_pressed)
    of_layers = recomputed_kinds(case)
    kinds = Counter[tuple[Recompute, bool]]()
    for is_dense, its in ((True, of_layers[:num_dense]), (False, of_layers[num_dense:])):
        for kind, alike in groupby(its):
            kinds[kind, is_dense] += sum(1 for _ in alike)
    times = {kind: layer_time(_with_layers(case, *kind), is_pressed=is_pressed) for kind in kinds}
    if len(kinds) == 1:
        return next(iter(times.values()))
    total = sum(kinds.values())
    parts = {
        part.name: sum(kinds[kind] * getattr(times[kind], part.name) for kind in kinds) / total
        for part in fields(LayerTime)
    }
    return LayerTime(**parts)


def _with_layers(case: PlanCase, recompute: Recompute, is_dense: bool) -> PlanCase:
    """Return a case all of whose layers are alike: recomputed so, and with experts or as the dense ones."""
    model = without_experts(case.model) if is_dense else case.model
    return replace(case, recompute=recompute, model=model)


def _experts_products_s(case: PlanCase) -> float:
    """Return the seconds of the experts' products of a micro-batch, in all passes: each takes as long as
    multiplying, or as reading the weights, of the last one writing their gradients.
    """
    model, tokens, device = case.model, case.tokens, case.device
    if not model.num_experts:
        return 0.0
    used = num_expert_parameters(model) // model.num_experts * model.num_experts_per_tok
    multiplying = _uneven(case) * 2 * used * tokens.count / tokens.tp / device.product_flops
    moving = held_of_layer(model, case.layout).experts / device.memory_bytes_per_s
    weight = 1 if case.precision is PrecisionName.fp8 else tokens.width_bytes
    widths = (weight, weight, tokens.width_bytes)
    return sum(
        max(longer * multiplying, width * moving)
        for longer, width in zip(_longer_than_dense(case), widths, strict=True)
    )


def _longer_than_dense(case: PlanCase) -> tuple[float, float, float]:
    """Return how much longer the experts' products take than dense ones of as many FLOPs: forward, of the
    rows' gradients and of the weights'. Each begins anew for each tile of its result, and what it sums along
    is short: the width of an expert, or the rows that it has. Shorter ones than were measured are taken for
    no slower than other trainers' are.
    """
    model, tokens = case.model, case.tokens
    longest = 1 / case.framework.experts_rate
    if not case.counts_passes:
        return longest, longest, longest
    hidden, inner = model.hidden_size, expert_width(model) / tokens.tp
    rows = tokens.count * model.num_experts_per_tok * case.layout.ep / model.num_experts
    forward, of_rows, of_weights = (
        min(longest, 1 + _TILE_START * mean)
        for mean in ((2 / hidden + 1 / inner) / 3, (2 / inner + 1 / hidden) / 3, 1 / rows)
    )
    return forward, of_rows, of_weights


def _exchange_s(case: PlanCase) -> float:
    """Return the seconds in which tokens go to the ranks that have their experts, and back."""
    ep = case.layout.ep
    if ep == 1 or not case.model.num_experts:
        return 0.0
    group = case.group(ep, case.layout.tp * case.layout.cp)
    once = case.network.all_to_all_s(_copies_bytes(case), group, case.device.link_bytes_per_s)
    # Of orchestra's selective recomputation, too: of a mixture it keeps attention alone.
    whole = (Recompute.selective, Recompute.full) if case.is_counted_in_full else (Recompute.full,)
    is_repeated = case.recompute in whole
    return _EXCHANGES * _uneven(case) * once * (_ONCE_MORE if is_repeated else 1.0)


def _uneven(case: PlanCase) -> float:
    """Return how much longer the rank with the most tokens for its experts takes than the mean one."""
    ep = case.layout.ep
    return case.framework.uneven_routing * most_experts(case.model, ep) if ep > 1 else 1.0


def _copies_bytes(case: PlanCase) -> float:
    """Return the bytes of a micro-batch's tokens, once for each expert that they go to. Ranks of orchestra's
    tensor parallelism route all tokens, under sequence parallelism too.
    """
    tokens, model = case.tokens, case.model
    width = model.num_experts_per_tok * model.hidden_size * tokens.width_bytes if model.num_experts else 0
    return tokens.count * width / (1 if case.is_counted_in_full else tokens.outer)


def _repeated(case: PlanCase) -> float:
    """Share of the forward pass, attention aside, that runs again in the backward pass."""
    if case.recompute is Recompute.full:
        return 1.0
    return 1 - case.framework.selective_share if case.recompute is Recompute.selective else 0.0


def _repeated_products(case: PlanCase) -> float:
    """The same of the products: orchestra's repetition ends before the last one, unless experts take it.
    The compiled run that was measured (8 layers of Llama 3 8B, H200) is met to 0.2 % so. An eager one, of
    gpt2_xl, took as long as if the last one were repeated, which it is not: it is left as it was measured.
    """
    share, model = _repeated(case), case.model
    is_met = case.counts_passes and case.options.is_compiled and model.block is None
    if case.recompute is not Recompute.full or not is_met or model.num_experts:
        return share
    return share - model.hidden_size * feed_forward_width(model) / num_layer_parameters(model)


def _repeats_attention(case: PlanCase) -> bool:
    is_kept = case.recompute is Recompute.selective and case.keeps_attention
    return case.recompute is not Recompute.none and not is_kept


def _host(case: PlanCase, again: float) -> float:
    """Issuing one layer, `again` being the passes that are repeated too. What is compiled is one call forward
    and one backward, whose guards and autograd take longer than eager kernels' launches; what is repeated
    lies in the latter. In a pipeline between nodes each collective waits, longer with more ranks.
    """
    framework, tp = case.framework, case.layout.tp
    alone = framework.host_layer_s + (framework.host_experts_s if case.model.num_experts else 0.0)
    alone *= again
    compiled = framework.host_compiled_s
    if compiled and case.counts_passes and case.options.is_compiled and not case.model.num_experts:
        alone = compiled[case.recompute is Recompute.full]
    if tp == 1 or case.layout.pp == 1 or case.num_nodes == 1:
        return alone
    group = case.group(tp, 1)
    slow = case.network.between_latency_s * (tp - 1) if group.num_nodes > 1 else 0.0
    waits = framework.host_contention_s * tp
    if case.zero == 0 and case.layout.dp > 1:
        waits *= framework.unsharded_contention
    return alone + (waits + (_COLLECTIVES * slow if waits else 0.0)) * again


def _tensor_collectives(case: PlanCase) -> float:
    tokens, model = case.tokens, case.model
    if tokens.tp == 1:
        return 0.0
    link, group = case.device.link_bytes_per_s, case.group(tokens.tp, 1)

    def gathered(*widths: int) -> float:
        each = (tokens.count * width * tokens.width_bytes for width in widths)
        return sum(case.network.all_gather_s(num_bytes, group, link) for num_bytes in each)

    if case.is_counted_in_full:
        return _own_tensor_collectives(case, gathered)
    again = _ONCE_MORE if case.recompute is Recompute.full else 1.0
    once = gathered(model.hidden_size)
    # Each of a token's experts wants all of it from ranks that have parts of the sequence.
    has_copies = tokens.outer > 1 and model.num_experts > 0
    copies = gathered(model.hidden_size * model.num_experts_per_tok) if has_copies else once
    return again * _COLLECTIVES / 2 * (once + copies)


def _own_tensor_collectives(case: PlanCase, gathered: Callable[..., float]) -> float:
    """Return the same of orchestra's: `gathered` says what all-gathers of tensors of some widths take. What
    enters attention are latents where there are any, a shared expert's tokens enter and leave by themselves,
    and a recomputation ends before the sum of the last product. A gather of the backward pass that is hidden
    behind a product does not count.
    """
    model = case.model
    hidden = [model.hidden_size] * (2 if model.num_experts and model.shared_expert_intermediate_size else 1)
    latents = [] if model.kv_lora_rank is None else [model.kv_lora_rank + model.qk_rope_head_dim]
    entering = gathered(*hidden, model.q_lora_rank or model.hidden_size, *latents)
    leaving, last = gathered(*hidden, model.hidden_size), gathered(model.hidden_size)
    # Forward and backward; all-reduces move as much as a gather and a scatter.
    moved = 2 * (entering + leaving)
    if case.recompute is Recompute.none:
        return moved
    is_full, is_cut = case.recompute is Recompute.full, case.tokens.outer > 1
    return moved + is_cut * entering + is_full * (1 if is_cut else 2) * (leaving - last)


def _context_s(case: PlanCase, attention: float, beyond_attention: float) -> float:
    """Return the seconds of context parallelism that nothing hides, of one layer whose attention takes so
    long without recomputation.

    A ring passes while pieces attend. orchestra gathers keys and values in two halves, of which the second
    comes while the first piece of queries attends: of the rank with the least to hide, one of 2·cp + 1 equal
    parts. It gathers for each of two passes (forward and backward, or forward twice), and its sum of
    gradients is not hidden. Nor is the exchange of places for heads and back, once a pass. Latents are
    gathered once a forward pass, before keys and values are made of them, and nothing hides that.
    """
    if case.layout.cp == 1 or not case.framework.gathers_context:
        return max(0.0, beyond_attention)
    if case.options.cp_method is ContextMethod.ulysses:
        group = case.group(case.layout.cp, case.tokens.tp)
        once = case.network.all_to_all_s(_exchanged_bytes(case), group, case.device.link_bytes_per_s)
        return once * (2 if case.recompute is Recompute.none else 3)
    gathering = _keys_and_values_s(case)
    if case.model.kv_lora_rank is not None:
        return gathering * (2 if case.recompute is Recompute.none else 3)
    forward = attention / _PASSES / (2 * case.layout.cp + 1)
    hiding = (forward, forward if case.recompute is not Recompute.none else 2 * forward)
    return gathering + sum(gathering / 2 + max(0.0, gathering / 2 - hidden) for hidden in hiding)


def _ring_attention(case: PlanCase) -> float:
    """Keys and values go round once forward, and with their gradients twice as much backward."""
    return 0.0 if case.layout.cp == 1 else _PASSES * _keys_and_values_s(case)


def _keys_and_values_bytes(case: PlanCase) -> float:
    """Return what keys and values of whole sequences take, of one layer and a rank's heads."""
    tokens, model = case.tokens, case.model
    width = key_value_width(model) / tokens.tp
    if model.kv_lora_rank is not None:
        # What they are made of, whole on each rank.
        width = model.kv_lora_rank + model.qk_rope_head_dim
    return tokens.count * width * tokens.width_bytes * case.layout.cp


def _keys_and_values_s(case: PlanCase) -> float:
    """Return the seconds to gather keys and values, or to reduce and scatter their gradients."""
    group = case.group(case.layout.cp, case.tokens.tp)
    return case.network.all_gather_s(_keys_and_values_bytes(case), group, case.device.link_bytes_per_s)


def _exchanged_bytes(case: PlanCase) -> float:
    """Return what one pass of a layer's attention exchanges: queries, keys and values, and the output."""
    model, tokens = case.model, case.tokens
    widths = attention_width(model) + value_width(model) + key_value_width(model)
    return tokens.count * widths / tokens.tp * tokens.width_bytes


def _merging(case: PlanCase) -> float:
    """Each block that came round the ring gives a part of attention's output, and backward of the gradients
    of queries, keys and values: written and read in 16 bits, added to a sum in 32. Gathered keys and values
    are put in their places instead, and the gradients of two pieces of queries added up; what is exchanged is
    put in order before and after.
    """
    model, tokens, further = case.model, case.tokens, case.layout.cp - 1
    if further and case.framework.gathers_context:
        if case.options.cp_method is ContextMethod.ulysses:
            return _EXCHANGED_PASSES * _exchanged_bytes(case) / case.device.memory_bytes_per_s
        return _GATHERED_PASSES * _keys_and_values_bytes(case) / case.device.memory_bytes_per_s
    widths = attention_width(model) + value_width(model) + key_value_width(model)
    return further * tokens.count * widths / tokens.tp * _MERGE_BYTES / case.device.memory_bytes_per_s


def _gathered_parameters(case: PlanCase, busy: float) -> float:
    """ZeRO-3 gathers a layer for the forward and for the backward pass and scatters its gradients. Orchestra
    gathers a layer that it computes in fp8 in one byte an element, and none that its memory still holds.

    Hidden behind the layer's own work but for the framework's exposed share.
    """
    if case.kept_zero < 3 or case.num_shards == 1:
        return 0.0
    held = held_of_layer(case.model, case.layout)
    width = gathered = float(case.tokens.width_bytes)
    if case.is_counted_in_full and case.gathers_fp8:
        gathered -= 1 - 2 * case.options.fp8_bf16_blocks / case.model.num_hidden_layers
    # Experts travel in 16 bits.
    fewer = RankElements(held.dense * gathered / width, held.experts)
    gradients = travelling_gradient_bytes(case) if case.is_counted_in_full else width
    moved = _num_gathers(case) * sharded_s(case, fewer, width) + sharded_s(case, held, gradients)
    hidden = busy * (1 - case.framework.exposed_reduction)
    return max(case.framework.exposed_reduction * moved, moved - hidden)


def _num_gathers(case: PlanCase) -> float:
    """Return how often ZeRO-3 gathers a layer for a micro-batch, in the mean over the layers. Two of them
    take turns in orchestra's memory: where a backward pass follows a forward pass, or the other way round, it
    finds two there. Counted for the first rank of a pipeline, where fewest do; not of schedules whose ranks
    have several stages, which find a few.
    """
    layers, micro_batches = case.model.num_hidden_layers / case.layout.pp, case.accumulation
    if not case.is_counted_in_full:
        return 2.0
    if layers <= _TURNS:
        return 1 / micro_batches
    if case.layout.pp > 1 and case.schedule in _OF_SEVERAL_STAGES:
        return 2.0
    alike = micro_batches if case.schedule is PipelineSchedule["afab"] else min(micro_batches, case.layout.pp)
    found = 2 * micro_batches - 1 - 2 * (alike - 1) * (case.layout.pp > 1)
    return 2 - _TURNS * found / (layers * micro_batches)


def ends_s(case: PlanCase, stage: PipelineStage, layer: LayerTime) -> tuple[float, float]:
    """Return the seconds of a micro-batch in which orchestra's ranks exchange what stands before a stage's
    layers, and after them: under tensor parallelism what leaves the embedding and what enters the output
    product, with their gradients, and with ZeRO-3 the tables. The output's hide behind a layer's work; with
    those of the embedding a step begins and ends.
    """
    if not case.is_counted_in_full:
        return 0.0, 0.0
    tokens, link = case.tokens, case.device.link_bytes_per_s
    before = after = 0.0
    if tokens.tp > 1:
        hidden = tokens.count * case.model.hidden_size * tokens.width_bytes
        # A gather and a scatter.
        before = after = 2 * case.network.all_gather_s(hidden, case.group(tokens.tp, 1), link)
    if case.kept_zero == 3 and case.num_shards > 1:
        has_both = stage.has_embedding and stage.has_head
        whole = rank_parameters(case.model, tokens.tp, has_both_ends=has_both)
        # Memory of its own, which a tied table and each in a pipeline has, is filled once a step.
        is_kept = case.model.tie_word_embeddings or case.layout.pp > 1
        width = tokens.width_bytes / (case.accumulation if is_kept else 1) + travelling_gradient_bytes(case)
        before += sharded_s(case, RankElements(whole.before, 0.0), width)
        moved = sharded_s(case, RankElements(whole.after, 0.0), width)
        exposed = case.framework.exposed_reduction
        after += max(exposed * moved, moved - layer.device * (1 - exposed))
    return stage.has_embedding * before, stage.has_head * after


def travelling_gradient_bytes(case: PlanCase) -> int:
    """Return the bytes of an element of the gradients while orchestra's ranks sum them."""
    return case.options.reduce_bytes or widths(case.precision).gradients


def sharded_s(case: PlanCase, held: RankElements, width_bytes: float) -> float:
    """Return the seconds to gather, or to reduce and scatter, what a rank holds over ZeRO's ranks."""
    network, link, mesh = case.network, case.device.link_bytes_per_s, case.layout
    group = case.group(case.num_shards, mesh.tp)
    seconds = network.all_gather_s(held.dense * width_bytes, group, link)
    if held.experts and case.num_expert_shards > 1:
        group = case.group(case.num_expert_shards, mesh.tp * mesh.ep)
        seconds += network.all_gather_s(held.experts * width_bytes, group, link)
    return seconds


def _weights_time(case: PlanCase, num_parameters: float) -> float:
    """Return the seconds in which a CPU reads weights twice and writes their gradient, or adds it to those of
    earlier micro-batches: with few tokens that is no longer hidden in the products.
    """
    passes = 3 if case.accumulation == 1 else 5
    num_bytes = num_parameters * case.tokens.width_bytes
    return passes * num_bytes / case.device.memory_bytes_per_s


def head_time(case: PlanCase) -> float:
    """Return the seconds of the output product and the loss on one micro-batch, where they are."""
    model, device, tokens = case.model, case.device, case.tokens
    logits = tokens.count * model.vocab_size / tokens.tp
    if case.counts_passes:
        return _counted_head(case, logits)
    products = 2 * _PASSES * model.hidden_size * logits / device.product_flops
    seconds = products + logits * case.framework.loss_bytes / device.memory_bytes_per_s
    if case.framework.computes_on_host:
        seconds += _weights_time(case, model.hidden_size * model.vocab_size / tokens.tp)
    return seconds


def _counted_head(case: PlanCase, logits: float) -> float:
    words, hidden = case.model.vocab_size / case.tokens.tp, case.model.hidden_size
    rate = case.device.product_flops if case.options.fp8_output else half_flops(case)
    chunk = min(case.tokens.count, loss_chunk_tokens(case))
    ends = slowdown(case, [(hidden, words)], num_tokens=chunk, rate=rate / half_flops(case))
    ends *= unaligned_slowdown(words, 1 if case.options.fp8_output else case.tokens.width_bytes)
    products = 2 * _PASSES * hidden * logits / rate * ends
    moved = loss_bytes(case) + case.framework.passes.gradient * words * hidden
    return products + moved / (STREAM_SHARE * case.device.memory_bytes_per_s)


def waits_at_hand_over(case: PlanCase) -> bool:
    """Whether this is one of the pipelines that wait at every hand-over (see `frameworks.Stalls`)."""
    stalls = case.framework.stalls
    if stalls is None or case.layout.pp == 1 or case.num_nodes == 1:
        return False
    passed_on = case.tokens.count * case.model.hidden_size * case.tokens.width_bytes
    is_large = passed_on >= stalls.from_bytes
    has_more = is_large and case.micro_batch_size >= stalls.from_micro_batch_size
    has_many_shards = case.zero > 0 and case.num_shards >= stalls.from_shards
    is_wide = case.num_nodes >= stalls.from_nodes and (has_more or has_many_shards)
    return case.layout.tp >= stalls.from_tp or is_wide


def hand_over_time(case: PlanCase, *, is_pressed: bool = False, waits: bool | None = None) -> float:
    """Return the seconds one micro-batch takes over one border between stages, there and back; `waits` says
    whether stages wait there, None: as is usual for such a run.
    """
    if case.layout.pp == 1:
        return 0.0
    tokens, stalls = case.tokens, case.framework.stalls
    size = tokens.count * case.model.hidden_size * tokens.width_bytes / tokens.outer
    if waits is None:
        waits = is_pressed or waits_at_hand_over(case)
    waiting = stalls.hand_over_s if stalls is not None and waits else 0.0
    # One adapter of 400 Gbit/s per device where the network does not say.
    between = case.network.adapter_bytes_per_s or 50e9
    return waiting + 2 * size / (between if case.num_nodes > 1 else case.device.link_bytes_per_s)
