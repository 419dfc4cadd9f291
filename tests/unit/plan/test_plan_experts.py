"""Mixtures of experts in the planner: published counts, what ep divides and costs, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import LLAMA_8B, PlanCommand, case

from conf.schema import Recompute
from orchestra.cli.plan import configuration
from orchestra.cli.plan.search_mode import ask
from orchestra.plan.case import PlanCase, held_by_rank, held_of_layer
from orchestra.plan.compute import layer_time
from orchestra.plan.devices import INFINIBAND_400, CollectiveGroup
from orchestra.plan.leaf_traffic import leaf_bytes
from orchestra.plan.predict import predict
from orchestra.plan.search import search
from orchestra.plan.space import Fixed, Space, space_of
from orchestra.plan.stage_memory import llama_layer_bytes, states_of_rank
from orchestra.sizes import flops
from orchestra.sizes.training_shape import MicroBatchTokens

MIXTRAL = replace(LLAMA_8B, name="mixtral_8x7b", vocab_size=32000, num_experts=8, num_experts_per_tok=2)
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 8, "vocab_size": 32000}


def mixture(**changes: object) -> PlanCase:
    """Return Mixtral's shape on 64 GPUs of a trainer, by plain data parallelism unless changed."""
    usual: dict[str, object] = {"num_gpus": 64, "dp": 64, "framework": "megatron", "precision": "bf16"}
    return case(**{**EXPERTS, **usual, **changes})


def test_active_parameters_are_the_published_ones() -> None:
    # Mixtral: 12.9 B of 46.7 B (arXiv:2401.04088); Qwen3-30B-A3B: 3.3 B of 30.5 B (arXiv:2505.09388).
    assert flops.num_parameters(MIXTRAL) == 46_702_792_704
    assert flops.num_active_parameters(MIXTRAL) == pytest.approx(12.9e9, rel=0.002)
    qwen = configuration(["model=qwen3_30b_a3b"]).model
    assert flops.num_active_parameters(qwen) == pytest.approx(3.3e9, rel=0.02)
    # A token costs what it goes through.
    attention = 12 * MIXTRAL.num_hidden_layers * MIXTRAL.hidden_size * 4096
    multiplied = flops.num_active_parameters(MIXTRAL) - flops.num_embedding_parameters(MIXTRAL)
    assert flops.model_flops_per_token(MIXTRAL, 4096) == 6 * multiplied + attention


def test_one_expert_for_all_is_a_dense_layer_with_a_router() -> None:
    single = replace(LLAMA_8B, num_experts=1, num_experts_per_tok=1)
    assert flops.num_layer_parameters(single) == flops.num_layer_parameters(LLAMA_8B) + LLAMA_8B.hidden_size
    assert flops.num_active_layer_parameters(single) == flops.num_layer_parameters(single)
    assert flops.feed_forward_width(single) == LLAMA_8B.intermediate_size
    tokens, none = MicroBatchTokens(1, 4096), Recompute.none
    dense, routed = (llama_layer_bytes(model, tokens, none) for model in (LLAMA_8B, single))
    assert routed - dense == 4 * 4096 * LLAMA_8B.hidden_size


def test_a_shared_expert_is_met_by_every_token() -> None:
    shared = replace(MIXTRAL, shared_expert_intermediate_size=1024)
    more = 3 * 1024 * MIXTRAL.hidden_size
    assert flops.num_layer_parameters(shared) - flops.num_layer_parameters(MIXTRAL) == more
    assert flops.num_active_layer_parameters(shared) - flops.num_active_layer_parameters(MIXTRAL) == more


@pytest.mark.parametrize("ep", [1, 2, 8])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_all_ranks_together_hold_each_optimizer_state_once(ep: int, tp: int, pp: int) -> None:
    found = mixture(ep=ep, tp=tp, pp=pp, dp=64 // tp // pp, zero=1)
    held = [states_of_rank(found, held_by_rank(found.model, stage, found.layout)) for stage in found.stages]
    kept = found.layout.world_size // pp * sum(states.optimizer for states in held)
    assert kept == pytest.approx(8 * flops.num_parameters(found.model))


def test_expert_parallelism_divides_the_experts_alone_and_trades_memory_for_an_exchange() -> None:
    [stage] = mixture().stages
    whole, eighth = (held_by_rank(MIXTRAL, stage, mixture(ep=ep).layout) for ep in (1, 8))
    assert eighth.dense == whole.dense
    assert eighth.experts == whole.experts / 8 == 32 * 3 * 4096 * 14336
    alone, shared = predict(mixture(zero=1)), predict(mixture(zero=1, ep=8))
    assert not alone.fits
    assert shared.peak.parameters < alone.peak.parameters / 4
    assert alone.time.layer.exchange == 0 < shared.time.layer.exchange
    assert shared.time.layer.products == alone.time.layer.products


def test_few_tokens_wait_for_the_weights_of_experts() -> None:
    """At 64 tokens a micro-batch all eight experts are read for two that each token goes through."""
    few, many = (predict(mixture(seq_len=length)).time.layer.products / length for length in (64, 4096))
    assert few > 4 * many


def test_an_exchange_between_nodes_is_bound_by_each_ranks_own_adapter() -> None:
    num_bytes, link = 1e9, 450e9
    inside = INFINIBAND_400.all_to_all_s(num_bytes, CollectiveGroup(8, 1), link)
    assert inside == pytest.approx(num_bytes * 7 / 8 / (link * 250 / 450) + 20e-6)
    between = INFINIBAND_400.all_to_all_s(num_bytes, CollectiveGroup(16, 2), link)
    assert between == pytest.approx(num_bytes / 2 / (0.85 * 50e9), rel=0.01)


def test_search_turns_ep_where_there_are_experts() -> None:
    space = Space(mixture(), 256, Fixed(pp=1, cp=1, tp=1))
    assert {mesh.ep for mesh in space.meshes()} == {1, 2, 4, 8}
    found = search(space, 4)
    assert found.ranked
    assert all(8 % layout.case.layout.ep == 0 for layout in found.ranked)
    assert {mesh.ep for mesh in Space(mixture(), 256, Fixed(ep=4)).meshes()} == {4}
    assert {mesh.ep for mesh in Space(case(), 256, Fixed()).meshes()} == {1}


def test_ranks_may_have_unequal_numbers_of_experts_in_orchestras_trainer_alone() -> None:
    """Eight experts on three ranks: those that have three decide."""
    uneven: dict[str, object] = {"num_gpus": 24, "dp": 24, "zero": 1}
    own = mixture(framework="orchestra", **uneven)
    assert {mesh.ep for mesh in Space(own, 48, Fixed(tp=1, pp=1, cp=1)).meshes()} == {1, 2, 3, 4, 6, 8}
    assert {mesh.ep for mesh in Space(mixture(**uneven), 48, Fixed(tp=1, pp=1, cp=1)).meshes()} == {
        1,
        2,
        4,
        8,
    }
    thirds, even = (replace(own, layout=replace(own.layout, ep=ep)) for ep in (3, 1))
    most = held_of_layer(own.model, thirds.layout).experts / held_of_layer(own.model, even.layout).experts
    assert most == pytest.approx(3 / 8)
    busiest, mean = (predict(case).time.layer.products for case in (thirds, even))
    assert 1.1 < busiest / mean < 1.25 * 9 / 8


def test_a_search_of_a_mixture_with_dense_layers_proposes_what_fits() -> None:
    """Stages of as many layers take less where these are the first ones, which are dense."""
    typed = ["model=deepseek_v3", "cluster.nodes=64", "train.seq_len=4096", "precision=bf16"]
    kept = {"tp": 4, "pp": 32, "cp": 1, "ep": 1, "zero": 1, "micro_batch_size": 1}
    found = search(space_of(ask(typed).config, "orchestra", 2048, Fixed(**kept)), 4)
    assert found.ranked
    assert all(layout.fits for layout in (*found.ranked, *found.pareto))
    # Selective recomputation is faster and does not fit, and with it nothing else.
    assert {layout.case.recompute for layout in found.pareto} == {Recompute.full}


def test_real_and_forced_routing_are_told_apart(plan: PlanCommand) -> None:
    layout = ["cluster.nodes=4", "parallelism.zero=3", "train.global_batch_size=256", "precision=bf16"]
    typed = ["model=mixtral_8x7b", *layout, "train.micro_batch_size=1", "train.seq_len=4096"]
    facts = plan.facts(*typed, "parallelism.ep=8")
    routing = facts["routing"]
    assert routing["counted"] == "real routing"
    assert routing["busiest_over_mean"] == 1.25
    assert routing["step_time_s"]["real routing"] == facts["step_time_s"]
    assert 1.04 < facts["step_time_s"] / routing["step_time_s"]["forced-balanced"] < 1.25
    text = " ".join(plan.text(*typed, "parallelism.ep=8").split())
    assert "real routing: the busiest rank of ep 8 1.25 times the mean (assumed; moe/rank_load of" in text
    assert "real routing, as fast as forced-balanced" in plan.text(*typed)
    theirs = plan.facts(*typed, "parallelism.ep=8", "--framework=megatron")
    assert theirs["routing"]["counted"] == "forced-balanced"
    assert theirs["routing"]["step_time_s"]["real routing"] is None
    assert plan.facts("model=llama_1b", "cluster.nodes=1")["routing"] is None
    in_fp16 = [word.replace("bf16", "fp16") for word in typed]
    assert "experts in fp16 are counted" in plan.text(*in_fp16)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model=mixtral_8x7b", "parallelism.ep=3"], "1, 2, 4 or 8"),
        (["model=gpt2_xl", "model.num_experts=4"], "model.family"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(
    overrides: list[str], words: str, plan: PlanCommand
) -> None:
    assert words in plan.refusal(*overrides)


def test_a_mixture_s_state_may_lie_in_host_memory(plan: PlanCommand) -> None:
    """With experts shared out: each rank's part leaves the device, and its host's memory is told."""
    sizes = ["train.seq_len=2048", "train.micro_batch_size=1", "train.global_batch_size=64", "precision=bf16"]
    layout = ["parallelism=zero1", "parallelism.ep=4", "cluster.nodes=4", "cluster.hardware=h100"]
    typed = ["model=qwen3_30b_a3b", "cluster=slurm", "cluster.gpus_per_node=8", *sizes, *layout]
    kept, moved = plan.facts(*typed), plan.facts(*typed, "parallelism.offload=optimizer")
    # Twelve bytes of each parameter that a rank owns: experts over 8 ranks, the rest over 32.
    total, experts = 30_532_122_624, 48 * 128 * 3 * 2048 * 768
    state = 12 * (experts / 4 / 8 + (total - experts) / 32)
    found = kept["peak_memory_bytes"] - moved["peak_memory_bytes"]
    assert found == pytest.approx(state, rel=0.01)


def test_plan_shows_what_is_active(plan: PlanCommand) -> None:
    layout = ["parallelism.ep=8", "parallelism.zero=1", "cluster.nodes=8", "train.global_batch_size=256"]
    typed = ["model=mixtral_8x7b", *layout, "train.recompute=full", "precision=bf16"]
    text = plan.text(*typed)
    assert "12,879,925,248 active" in text
    assert "dp 64, ep 8, zero 1" in text
    assert plan.facts(*typed)["layout"]["ep"] == 8


def test_what_only_orchestras_trainer_has_counts_for_mixtures_too() -> None:
    full = mixture(framework="orchestra", zero=1, ep=8, recompute="full")
    every_other = replace(full, options=replace(full.options, recompute_every=2))
    kept, half = (predict(each).peak.activations for each in (full, every_other))
    none = predict(replace(full, recompute=Recompute.none)).peak.activations
    assert kept < half < none
    narrow = replace(full, options=replace(full.options, moment_bytes=2))
    assert predict(narrow).peak.optimizer == predict(full).peak.optimizer / 2


def test_rounding_takes_back_more_of_what_fp8_saves_from_narrow_experts_and_all_where_it_is_eager() -> None:
    def taken_back(*, is_compiled: bool = True, **changes: object) -> float:
        """Return the share of the products' gain that other passes over memory take."""
        found = []
        for name in ("bf16", "fp8"):
            each = mixture(framework="orchestra", zero=1, ep=8, precision=name, **changes)
            found.append(layer_time(replace(each, options=replace(each.options, is_compiled=is_compiled))))
        before, after = found
        return (after.elementwise - before.elementwise) / (before.products - after.products)

    narrow = {"moe_intermediate_size": 768, "intermediate_size": 768}
    assert 0.1 < taken_back() < 0.5
    assert 0.5 < taken_back(**narrow) < 1
    assert taken_back(is_compiled=False, **narrow) > 2


def test_weights_of_experts_are_read_in_the_bytes_that_they_have() -> None:
    """Of a few tokens their products take as long as weights are read: twice, and gradients written once."""
    few = {"seq_len": 8, "grad_accum": 1, "zero": 1}
    seconds = {name: layer_time(mixture(precision=name, **few)).products for name in ("bf16", "fp8")}
    assert seconds["fp8"] / seconds["bf16"] == pytest.approx((1 + 1 + 2) / (2 + 2 + 2), rel=0.03)


def test_fp8_gains_nothing_where_the_host_cannot_launch_faster() -> None:
    narrow = {"moe_intermediate_size": 768, "intermediate_size": 768}
    for name in ("bf16", "fp8"):
        layer = layer_time(mixture(framework="orchestra", zero=1, ep=8, precision=name, **narrow))
        assert layer.device < layer.host == layer.total


def test_states_of_experts_travel_between_the_ranks_that_have_the_same_ones() -> None:
    """Two nodes of 8 under two leaves: a shard group is a node, and shards leave it for their replicas."""
    found = mixture(dp=16, num_gpus=16, ep=8, zero=1, num_shards=8)
    found = replace(found, layout=replace(found.layout, shard=8))
    [held] = (held_by_rank(found.model, stage, found.layout) for stage in found.stages)
    # Of two replicas there and back: of experts whole, as each rank of a node has others.
    between = 2 * 2 * 8 * 2 * (held.dense / 8 + held.experts) / 2
    assert leaf_bytes(found, "ab")["dp"] == between


def test_experts_that_nobody_shares_are_not_gathered() -> None:
    """With ep over all ranks of ZeRO-3 each has its own experts whole."""
    own = predict(mixture(zero=3, ep=8, dp=8, num_gpus=8))
    assert own.peak.buffers < predict(mixture(zero=3, ep=4, dp=8, num_gpus=8)).peak.buffers / 2
