"""Memory by component: invariants, and the measured forms for Llama layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import LLAMA_8B, case

from conf.schema import ModelConfig, Offload, PipelineSchedule, Recompute
from orchestra.plan.case import has_idle_stage, stage_parameters, stages
from orchestra.plan.predict import disk_bytes, host_memory, over_time, predict
from orchestra.plan.stage_memory import Memory, llama_layer_bytes
from orchestra.sizes.flops import num_parameters
from orchestra.sizes.training_shape import MicroBatchTokens

# As the rows of a table without key-value heads have it.
MULTI_HEAD = replace(LLAMA_8B, num_key_value_heads=32)
# Saved-tensor bytes per token and hidden unit, measured with flash attention in bf16.
MEASURED = [
    (replace(MULTI_HEAD, hidden_size=2048, intermediate_size=8192), 48),
    (LLAMA_8B, 41),
    (replace(MULTI_HEAD, intermediate_size=11008), 37.5),
]


@pytest.mark.parametrize(("model", "per_unit"), MEASURED)
def test_a_llama_layer_keeps_what_was_measured(model: ModelConfig, per_unit: float) -> None:
    tokens = MicroBatchTokens(1, 4096)
    statistics = 4 * 4096 * model.num_attention_heads
    kept = llama_layer_bytes(model, tokens, Recompute.none) - statistics
    assert kept / (4096 * model.hidden_size) == pytest.approx(per_unit)


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole() -> None:
    def kept(*, sequence_parallel: bool) -> float:
        return llama_layer_bytes(LLAMA_8B, MicroBatchTokens(1, 4096, 8, sequence_parallel), Recompute.none)

    whole = llama_layer_bytes(LLAMA_8B, MicroBatchTokens(1, 4096), Recompute.none)
    assert kept(sequence_parallel=True) == pytest.approx(whole / 8)
    assert kept(sequence_parallel=False) - kept(sequence_parallel=True) == 8 * 4096 * 4096 * (1 - 1 / 8)


@pytest.mark.parametrize("by_cost", [False, True])
@pytest.mark.parametrize("pp", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_every_layer_and_parameter_once(pp: int, by_cost: bool, tied: bool) -> None:
    model = replace(LLAMA_8B, tie_word_embeddings=tied)
    found = stages(model, pp, by_cost=by_cost)
    assert sum(stage.num_layers for stage in found) == model.num_hidden_layers
    assert sum(stage.has_head for stage in found) == sum(stage.has_embedding for stage in found) == 1
    held = sum(stage_parameters(model, stage, pp) for stage in found)
    # A tied table stands at both ends of a pipeline.
    second_table = model.vocab_size * model.hidden_size if tied and pp > 1 else 0
    assert held == num_parameters(model) + second_table


def test_cutting_by_cost_gives_the_stage_with_a_large_output_fewer_layers() -> None:
    narrow = replace(LLAMA_8B, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)
    assert [stage.num_layers for stage in stages(narrow, 4, by_cost=True)] == [5, 5, 5, 1]
    assert [stage.num_layers for stage in stages(narrow, 4)] == [4, 4, 4, 4]


def total(**changes: object) -> float:
    return predict(case(**changes)).peak.total


@pytest.mark.parametrize("framework", ["nanotron", "orchestra", "megatron", "torchtitan", "llm-foundry"])
def test_each_stage_of_zero_takes_less(framework: str) -> None:
    taken = [total(zero=zero, framework=framework) for zero in (0, 1, 2, 3)]
    assert taken == sorted(taken, reverse=True)
    assert taken[3] < 0.5 * taken[0]


def test_components_add_up_and_states_take_twenty_bytes_a_parameter() -> None:
    cut = predict(case(tp=2, pp=2, dp=2, zero=1, framework="nanotron")).stages
    whole = predict(case(precision="bf16_fp32_grad", framework="nanotron")).peak
    for memory in (*cut, whole):
        parts = [getattr(memory, name) for name in Memory.__dataclass_fields__]
        assert min(parts) >= 0
        # From Python 3.12 on `sum` rounds otherwise than additions do.
        assert memory.total == pytest.approx(sum(parts), rel=1e-12)
    states = whole.parameters + whole.gradients + whole.accumulation + whole.masters + whole.optimizer
    assert states == 20 * num_parameters(MULTI_HEAD)


def test_the_first_stage_holds_one_micro_batch_per_stage() -> None:
    first, second = predict(case(pp=2, dp=4)).stages
    assert first.activations > 1.5 * second.activations
    alone, _ = predict(case(pp=2, dp=4, grad_accum=1)).stages
    assert alone.activations < first.activations


def test_nanotron_reports_the_first_stage_and_others_the_fullest() -> None:
    deep = {"pp": 8, "dp": 1, "grad_accum": 1, "micro_batch_size": 4, "vocab_size": 512000}
    nanotron, megatron = (predict(case(framework=name, **deep)) for name in ("nanotron", "megatron"))
    assert nanotron.reported_peak == nanotron.stages[0] != nanotron.peak
    assert megatron.reported_peak == megatron.peak


def test_an_interleaved_pipeline_needs_micro_batches_that_its_stages_divide() -> None:
    deep = {"pp": 4, "dp": 2, "num_hidden_layers": 32, "framework": "megatron"}
    whole, broken = (predict(case(grad_accum=count, **deep)) for count in (32, 33))
    assert broken.time.bubble > 2 * whole.time.bubble
    # It begins more of them at once.
    assert broken.stages[0].activations < whole.stages[0].activations
    # But never more than there are.
    assert predict(case(grad_accum=4, **deep)).peak.activations < whole.peak.activations


def test_another_trainers_pipeline_has_the_stages_that_an_interleaved_schedule_is_given() -> None:
    usual = case(pp=4, dp=2, num_hidden_layers=32, framework="megatron", grad_accum=32)
    interleaved = PipelineSchedule["interleaved"]
    bubbles = [
        predict(replace(usual, schedule=interleaved, virtual_stages=stages)).time.bubble
        for stages in (2, 4, 5)
    ]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[2] == predict(usual).time.bubble


def test_fused_kernels_keep_less_and_in_8_bits_still_less() -> None:
    wide, narrow, plain = (
        predict(case(precision=precision, framework=name)).peak.activations
        for precision, name in (("bf16", "megatron"), ("fp8", "megatron"), ("bf16", "torchtitan"))
    )
    assert narrow < wide < plain


@pytest.mark.parametrize("pp", [1, 4, 32])
@pytest.mark.parametrize("framework", ["nanotron", "megatron", "llm-foundry"])
def test_recomputation_takes_no_memory_even_with_a_layer_per_stage(framework: str, pp: int) -> None:
    changes = {"framework": framework, "num_gpus": 32, "pp": pp, "dp": 32 // pp, "grad_accum": 1}
    kept, repeated = (total(recompute=how, gpu_memory_gib=1000, **changes) for how in ("none", "full"))
    assert repeated <= kept


@pytest.mark.parametrize(
    ("num_layers", "hidden_size", "pp", "is_idle"),
    # nanotron's 1B (16 layers, an output as dear as four) and 8B (32 and two): cast and loss fill two stages.
    [(16, 2048, 8, False), (16, 2048, 16, True), (32, 4096, 32, False), (32, 4096, 64, True)],
)
def test_a_pipeline_with_a_stage_that_has_nothing_does_not_fit(
    num_layers: int, hidden_size: int, pp: int, is_idle: bool
) -> None:
    widths = {"hidden_size": hidden_size, "intermediate_size": 7 * hidden_size // 2}
    deep = case(framework="nanotron", num_gpus=pp, pp=pp, dp=1, num_hidden_layers=num_layers, **widths)
    assert has_idle_stage(deep.stages) is is_idle
    roomy = replace(deep, device=replace(deep.device, memory_bytes=1e13))
    assert predict(roomy).fits is not is_idle


def test_even_stages_are_idle_only_beyond_layers_and_both_ends() -> None:
    assert not has_idle_stage(stages(replace(LLAMA_8B, num_hidden_layers=6), 8))
    assert has_idle_stage(stages(replace(LLAMA_8B, num_hidden_layers=5), 8))


def test_torchs_optimizers_make_their_moments_in_the_second_step_and_orchestra_before_it_trains() -> None:
    plan = predict(case(framework="torchtitan", zero=3))
    times = over_time(plan)
    assert times.later_steps - times.first_step == plan.peak.optimizer > 0
    assert times.built < times.first_step < times.later_steps == plan.peak.total
    plan = predict(case(zero=2, grad_accum=1))
    times = over_time(plan)
    assert times.built > plan.peak.parameters + plan.peak.masters + plan.peak.optimizer
    # What grows are the buffers of sums over ranks.
    assert 0 < times.later_steps - times.first_step < plan.peak.buffers + 1


def test_offloaded_state_and_images_of_checkpoints_lie_in_host_memory() -> None:
    usual = case(zero=1)
    moved = replace(usual, options=replace(usual.options, offload=Offload.optimizer, saves=True))
    assert host_memory(predict(usual)).total == 0
    host = host_memory(predict(moved))
    eighth = num_parameters(MULTI_HEAD) / 8
    # Masters, two moments and the rounded parameters of an eighth; masters and moments once over the ranks.
    assert host.offloaded == pytest.approx(14 * eighth)
    assert host.checkpoint_image == pytest.approx(12 * eighth)
    assert predict(moved).peak.optimizer == predict(moved).peak.masters == 0


def test_copies_in_memory_are_three_of_what_a_rank_updates_and_as_many_of_a_neighbour_s() -> None:
    def copies(**changes: object) -> float:
        made = case(**changes)
        return host_memory(predict(replace(made, options=replace(made.options, copies=True)))).copies

    state = 3 * 12 * num_parameters(MULTI_HEAD)
    assert copies(zero=1) == pytest.approx(state / 8)
    assert copies(zero=0) == pytest.approx(state)
    # Of two nodes each keeps the other's, too.
    assert copies(zero=1, dp=16, num_gpus=16) == pytest.approx(2 * state / 16)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_state_on_disk_leaves_two_units_in_memory_and_takes_the_disk_s_time(is_gpu: bool) -> None:
    usual = case(zero=1, precision="bf16")
    usual = replace(usual, options=replace(usual.options, bucket_bytes=2**20, saves=True, is_gpu=is_gpu))
    options = replace(usual.options, offload=Offload.optimizer_disk, disk_bytes_per_s=1e6)
    plan, in_memory = predict(replace(usual, options=options)), predict(usual)
    eighth = num_parameters(MULTI_HEAD) / 8
    # Masters and two moments of an eighth, and as much for the image of a checkpoint.
    assert disk_bytes(plan) == pytest.approx(2 * 12 * eighth)
    assert disk_bytes(in_memory) == 0
    held = host_memory(plan).total if is_gpu else plan.peak.optimizer
    assert 0 < held < 12 * eighth
    assert plan.peak.masters == 0
    assert plan.peak.optimizer == (0 if is_gpu else held)
    # Read and written once by each of the node's eight ranks.
    assert plan.time.optimizer == pytest.approx(2 * 12 * eighth * 8 / 1e6, rel=0.01)


@pytest.mark.parametrize(("framework", "is_kept"), [("torchtitan", True), ("megatron", False)])
def test_pipelines_of_torchtitan_keep_what_zero_3_gathered(framework: str, is_kept: bool) -> None:
    whole, sharded = (
        predict(case(framework=framework, dp=4, pp=2, zero=zero, precision="bf16")) for zero in (1, 3)
    )
    assert (sharded.peak.parameters == whole.peak.parameters) is is_kept
    assert (sharded.time.layer.sharded == 0) is is_kept
    alone = predict(case(framework=framework, zero=3, precision="bf16"))
    assert alone.peak.parameters < whole.peak.parameters
    assert alone.time.layer.sharded > 0
