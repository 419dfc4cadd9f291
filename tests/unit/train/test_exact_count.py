"""The count of the real modules' tensors beside the planner's closed forms, without memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from conf.schema import Config
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.config.preset_files import Tree, own_folder
from orchestra.plan.assemble import case_of
from orchestra.sizes.memory.rank_memory import RankBytes, rank_bytes
from orchestra.sizes.training_shape import rank_parameters
from orchestra.train import dry_build
from orchestra.train.dry_build import ExactBytes, exact_bytes
from tests.support.torch_features import NEEDS_OUTPUTS

RANKS = 8
# Few layers and a small vocabulary, so that the layers decide; and the other way round.
LAYERS = (
    *("model=llama_1b", "model.num_hidden_layers=3", "model.vocab_size=2048"),
    *("train.seq_len=1024", "train.micro_batch_size=2", "train.global_batch_size=16"),
)
WORDS = (*LAYERS[:1], "model.num_hidden_layers=2", "model.vocab_size=65536", *LAYERS[3:])
ON_DISK = ("parallelism.offload=optimizer_disk", "parallelism.offload_dir=/tmp")
PRESETS = [name for name in Tree((own_folder(),)).options("parallelism") if name != "tp8_pp4"]


def config_of(*overrides: str) -> Config:
    cluster = ["cluster=slurm", f"cluster.gpus_per_node={RANKS}", "cluster.hardware=h100"]
    everything = [*cluster, "cluster.device=cuda", "data=stdlib", *overrides]
    return compose(everything, Situation("plan", num_gpus=RANKS)).config


def both(*overrides: str, as_gpu: bool = True, ranks: int = RANKS) -> tuple[RankBytes, ExactBytes]:
    config = config_of(*overrides, f"cluster.gpus_per_node={ranks}")
    case = case_of(config)
    case = replace(case, options=replace(case.options, is_gpu=as_gpu))
    return rank_bytes(case, case.stages[0]), exact_bytes(config, ranks, as_gpu=as_gpu)


def assert_alike(own: RankBytes, counted: ExactBytes) -> None:
    """States and what is gathered meet the count within 1 % each, the peak within 2 %."""
    pairs = {
        "parameters": (own.parameters, counted.parameters),
        "gradients": (own.gradients, counted.gradients),
        "masters": (own.masters, counted.masters),
        "optimizer": (own.optimizer, counted.optimizer),
        "gathered": (own.first_buffers, counted.gathered),
        "host": (own.host, counted.host),
        "disk": (own.disk, counted.disk),
    }
    for name, (closed, found) in pairs.items():
        assert closed == pytest.approx(found, rel=0.01), name
    states = own.parameters + own.gradients + own.masters + own.optimizer
    peak = states + own.step.total + own.buffers
    assert peak == pytest.approx(counted.peak, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_fp32_grad", "fp16", "fp8"])
@pytest.mark.parametrize("model", [LAYERS, WORDS], ids=["layers", "words"])
def test_closed_forms_meet_the_count_for_every_precision(precision: str, model: tuple[str, ...]) -> None:
    # The count's blocks are not compiled, and in fp8 those keep less (test_compiled_memory.py).
    eager = ("train.compile=false",) if precision == "fp8" else ()
    assert_alike(*both(*model, f"precision={precision}", "parallelism=zero1", *eager))


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["true", "false"])
def test_closed_forms_meet_the_count_of_layers_that_are_cut_in_fp8(parts: str) -> None:
    cut = ("parallelism.tp=4", f"parallelism.sequence_parallel={parts}", "train.compile=false")
    assert_alike(*both(*LAYERS, "model.num_hidden_layers=8", "precision=fp8", *cut))


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [
        ("parallelism=zero1", "train.compile=true"),
        ("parallelism=zero3", "train.loss_chunk_tokens=512"),
        ("parallelism=zero3", "model.tie_word_embeddings=false"),
        ("parallelism=tp2", "precision.fp8_scaling=row"),
    ],
    ids=" ".join,
)
def test_closed_forms_meet_the_count_with_an_output_product_in_fp8(choice: tuple[str, ...]) -> None:
    assert_alike(*both(*WORDS, "precision=fp8", "precision.fp8_output=true", *choice))


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [
        *((f"parallelism={preset}",) for preset in PRESETS),
        ("train.recompute=selective",),
        ("train.recompute=full",),
        ("train.recompute=full", "train.recompute_every=2"),
        ("train.recompute_budget_gib=0.4",),
        ("optim.state_dtype=bf16",),
        ("precision.reduce_dtype=fp32",),
        ("precision.reduce_dtype=fp32", "parallelism=zero1", "model.tie_word_embeddings=false"),
        ("parallelism=zero1", "parallelism.offload=optimizer"),
        ("parallelism=zero3", "parallelism.offload=all"),
        ("parallelism=zero2", *ON_DISK),
        ("parallelism=zero3", "optim.state_dtype=bf16", *ON_DISK),
        ("train.loss_chunk_tokens=128",),
        ("parallelism=tp2", "parallelism.sequence_parallel=false"),
        ("parallelism.tp=4", "parallelism.sequence_parallel=true", "train.recompute=selective"),
        ("parallelism.bucket_mib=200", "parallelism=zero2"),
        ("model.tie_word_embeddings=true", "parallelism=zero3"),
        ("parallelism.cp=2", "parallelism=zero3", "train.micro_batch_size=4"),
        ("parallelism.cp=4", "train.recompute=full"),
        ("parallelism=tp2", "parallelism.cp=2", "parallelism.cp_method=ulysses"),
    ],
    ids=" ".join,
)
def test_closed_forms_meet_the_count_for_every_preset_and_what_saves_memory(choice: tuple[str, ...]) -> None:
    assert_alike(*both(*LAYERS, "precision=bf16", *choice))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "choice", "as_gpu"),
    [
        (LAYERS, ("parallelism=zero1", "precision=bf16"), False),
        (LAYERS, ("parallelism=zero2", "precision=bf16_fp32_grad"), True),
        (WORDS, ("parallelism=zero1", "precision=bf16"), True),
    ],
)
def test_closed_forms_meet_the_count_where_steps_are_computed_again(
    model: tuple[str, ...], choice: tuple[str, ...], as_gpu: bool
) -> None:
    replays = ("recovery.replay_every_steps=10", "train.deterministic=true")
    own, counted = both(*model, *choice, *replays, as_gpu=as_gpu)
    assert_alike(own, counted)
    plain, plain_count = both(*model, *choice, replays[1], as_gpu=as_gpu)
    added = counted.peak - plain_count.peak
    assert own.total - plain.total == pytest.approx(added, rel=0.1)
    if model is WORDS:
        # The gradient of the output matrix, which the training has memory for.
        assert added == pytest.approx(65536 * 2048 * 2, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [
        *((f"parallelism={preset}",) for preset in ("ddp", "zero2", "zero3", "tp2")),
        ("parallelism=zero1", *ON_DISK),
        ("parallelism.cp=2",),
    ],
    ids=" ".join,
)
def test_closed_forms_meet_the_count_on_cpus_too(choice: tuple[str, ...]) -> None:
    assert_alike(*both(*LAYERS, *choice, as_gpu=False))


# Mixtures: with norms of heads, and with latents, a shared expert and a first layer without any.
QWEN3_MOE = (
    *("model=qwen3_30b_a3b", "model.num_hidden_layers=2", "model.num_experts=16", "model.vocab_size=2048"),
    *LAYERS[3:],
)
DEEPSEEK_V3 = (
    *("model=deepseek_v3", "model.num_hidden_layers=3", "model.first_k_dense_replace=1"),
    *("model.num_experts=16", "model.n_group=4", "model.topk_group=2", "model.hidden_size=1024"),
    *("model.num_attention_heads=16", "model.num_key_value_heads=16", "model.intermediate_size=2560"),
    *("model.moe_intermediate_size=512", "model.shared_expert_intermediate_size=512"),
    *("model.q_lora_rank=384", "model.vocab_size=2048", *LAYERS[3:]),
)


@pytest.mark.slow
@pytest.mark.parametrize("model", [QWEN3_MOE, DEEPSEEK_V3], ids=["qwen3-moe", "deepseek-v3"])
@pytest.mark.parametrize(
    "choice",
    [
        ("precision=bf16", "parallelism=zero1"),
        ("precision=bf16", "train.recompute=selective"),
        ("precision=bf16", "train.recompute=full"),
        # Three units of a layer's experts fill at once.
        ("precision=fp32", "parallelism=zero2"),
    ],
    ids=" ".join,
)
def test_closed_forms_meet_the_count_of_mixtures(model: tuple[str, ...], choice: tuple[str, ...]) -> None:
    assert_alike(*both(*model, *choice, as_gpu=False))


@pytest.mark.parametrize(
    ("model", "choice"),
    [
        (QWEN3_MOE, ("parallelism=zero3", "parallelism.ep=4")),
        (DEEPSEEK_V3, ("parallelism=zero1",)),
        pytest.param(
            DEEPSEEK_V3,
            ("parallelism=tp2", "parallelism.ep=2", "train.recompute=selective"),
            marks=NEEDS_OUTPUTS,
        ),
        # The output matrix' unit is larger than those of experts, and fills beside none of them.
        (QWEN3_MOE, ("parallelism=zero2", "model.vocab_size=65536")),
        # All layers of the first stage are dense.
        (DEEPSEEK_V3, ("parallelism.pp=2", "parallelism.stages=[1,2]")),
        (DEEPSEEK_V3, ("parallelism.cp=2", "train.seq_len=4096", "train.micro_batch_size=1")),
        (QWEN3_MOE, ("parallelism=zero3", "parallelism.ep=2", "parallelism.offload=all")),
        # The largest unit that a rank updates: its experts, and all its other parameters.
        (QWEN3_MOE, ("parallelism=zero1", "parallelism.ep=4", *ON_DISK)),
        (DEEPSEEK_V3, ("parallelism=zero3", "parallelism.ep=4", *ON_DISK)),
        # The dense layer and a mixture are recomputed.
        (DEEPSEEK_V3, ("parallelism=zero1", "train.recompute_budget_gib=0.3")),
    ],
    ids=[
        *("qwen3-moe", "deepseek-v3", "deepseek-v3-tp", "qwen3-moe-zero2", "deepseek-v3-dense-stage"),
        *("deepseek-v3-cp", "qwen3-moe-offload", "qwen3-moe-disk", "deepseek-v3-disk", "deepseek-v3-budget"),
    ],
)
def test_mixtures_are_counted_with_the_kernels_of_a_gpu(
    model: tuple[str, ...], choice: tuple[str, ...]
) -> None:
    """All experts in one product, and attention over latents without scores."""
    assert_alike(*both(*model, *choice, "precision=bf16"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_gpu_has_a_kernel_for_latents_in_any_precision_and_none_for_experts(precision: str) -> None:
    assert_alike(*both(*DEEPSEEK_V3, f"precision={precision}"))


def test_a_second_step_without_one_is_what_a_second_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays and the gradients of one rank alone leave the most in the first."""
    replays = ("recovery.replay_every_steps=10", "train.deterministic=true")
    for model, ranks in (((*WORDS, "parallelism=zero1", *replays), RANKS), (WORDS, 1)):
        config = config_of(*model, "precision=bf16", *([] if ranks > 1 else ["cluster.gpus_per_node=1"]))
        derived = exact_bytes(config, ranks, as_gpu=True)
        with monkeypatch.context() as patched:
            patched.setattr(dry_build, "_repeats_itself", lambda _: False)
            assert exact_bytes(config, ranks, as_gpu=True) == derived


# One micro-batch is a whole step; larger matrices than the units that gradients are made in.
ALONE = ("train.seq_len=2048", "train.micro_batch_size=1", "train.global_batch_size=1", "precision=bf16")


@pytest.mark.parametrize(
    ("model", "choice", "ranks"),
    [
        (LAYERS, (), 1),
        (LAYERS, ("train.recompute=full",), 1),
        # Gradients are more than what is kept: the most is at the update.
        (WORDS, ("model.tie_word_embeddings=false", "train.seq_len=512"), 1),
        (LAYERS, ("parallelism=tp2",), 2),
        (QWEN3_MOE, ("model.num_experts=128",), 1),
    ],
    ids=["dense", "recomputed", "words", "tp", "mixture"],
)
def test_gradients_of_one_micro_batch_are_not_there_before_its_backward_pass(
    model: tuple[str, ...], choice: tuple[str, ...], ranks: int
) -> None:
    own, counted = both(*model, *ALONE, *choice, ranks=ranks)
    assert_alike(own, counted)
    # With a second one they are.
    both_there, counted_both = both(*model, *ALONE, *choice, "train.global_batch_size=2", ranks=ranks)
    assert_alike(both_there, counted_both)
    assert counted_both.peak > 1.005 * counted.peak


@pytest.mark.parametrize(
    "words",
    [
        ("parallelism.schedule=afab",),
        pytest.param(("parallelism.schedule=1f1b", "train.global_batch_size=2"), marks=pytest.mark.slow),
        pytest.param(
            ("parallelism.schedule=zero_bubble", "train.global_batch_size=2"), marks=pytest.mark.slow
        ),
        ("parallelism.schedule=zbv", "train.global_batch_size=2"),
        pytest.param(
            ("parallelism.schedule=interleaved", "parallelism.virtual_stages=2", "train.global_batch_size=4"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda words: words[0].partition("=")[2],
)
def test_a_pipeline_whose_ranks_share_with_nobody_has_no_gradients_before_its_first_backward_pass(
    words: tuple[str, ...],
) -> None:
    """They are 5 to 11 % of the peak where it holds most before that."""
    pipeline = ("model.num_hidden_layers=8", "parallelism.pp=2", "precision=bf16")
    own, counted = both(*LAYERS, *pipeline, *words, ranks=2)
    assert own.step.unmade > 0
    assert own.total == pytest.approx(counted.peak, rel=0.01)


def test_matrices_smaller_than_a_unit_have_its_memory_with_the_first_of_them() -> None:
    widths = ("model.hidden_size=256", "model.intermediate_size=512")
    heads = ("model.num_attention_heads=8", "model.num_key_value_heads=8")
    own, counted = both(
        *LAYERS, *widths, *heads, *ALONE[1:], "train.seq_len=512", "model.num_hidden_layers=6", ranks=1
    )
    assert_alike(own, counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "choice"),
    [
        (QWEN3_MOE, ("parallelism=zero1", "model.shared_expert_intermediate_size=512")),
        (QWEN3_MOE, ("parallelism=zero3", "precision.fp8_scaling=row")),
        (DEEPSEEK_V3, ("parallelism=zero2",)),
        # Routers, norms and the like are whole on every rank.
        (QWEN3_MOE, ("parallelism=zero3",)),
    ],
)
def test_closed_forms_meet_the_count_of_mixtures_in_fp8(
    model: tuple[str, ...], choice: tuple[str, ...]
) -> None:
    """As on a GPU: wherever it is, all experts' products are taken together."""
    assert_alike(*both(*model, "precision=fp8", *choice))


@pytest.mark.parametrize("model", [QWEN3_MOE, DEEPSEEK_V3], ids=["qwen3-moe", "deepseek-v3"])
def test_what_is_whole_beside_gathered_numbers_is_counted(model: tuple[str, ...]) -> None:
    """Routers and norms, with the message that brings them to all ranks."""
    config = config_of(*model, "precision=fp8", "parallelism=zero3")
    case = case_of(config)
    counted = dry_build.dry_build(config, RANKS).parameters
    # Without them 2.5 and 2.9 % are missing.
    assert rank_bytes(case, case.stages[0]).parameters == pytest.approx(counted, rel=0.006)


def test_a_second_step_of_zero_2_keeps_what_the_first_one_made() -> None:
    own, counted = both(*WORDS, "parallelism=zero2", "precision=bf16", "train.global_batch_size=16")
    assert counted.later_steps > counted.first_step
    assert own.growing_buffers > 0


def test_a_gpt_rank_holds_the_parameters_that_the_closed_form_says() -> None:
    gpt = ("model=gpt2_xl", "model.num_hidden_layers=2", "train.micro_batch_size=1", "train.seq_len=256")
    for tp in (1, 5):
        config = config_of(*gpt, f"parallelism.tp={tp}", "cluster.gpus_per_node=5")
        counted = exact_bytes(config, 5, as_gpu=True)
        parts = rank_parameters(config.model, tp)
        assert parts.before + 2 * parts.layer + parts.after == counted.num_parameters


@pytest.mark.parametrize(
    "words",
    [
        ("parallelism.schedule=1f1b",),
        ("parallelism.schedule=interleaved", "parallelism.virtual_stages=2"),
        ("parallelism.schedule=zero_bubble",),
        ("parallelism.schedule=zbv",),
        ("parallelism.schedule=zero_bubble", "train.recompute=full"),
    ],
    ids=lambda words: " ".join(words).replace("parallelism.schedule=", ""),
)
def test_the_first_rank_of_a_pipeline_holds_what_its_schedule_says(words: tuple[str, ...]) -> None:
    """Activations that wait, and what gradients of weights that wait need."""
    assert_alike(*both(*LAYERS, "model.num_hidden_layers=8", "parallelism.pp=2", *words))


@pytest.mark.parametrize(
    "words",
    [
        ("parallelism.schedule=zbv", "parallelism.zero=3", "model.tie_word_embeddings=false"),
        pytest.param(("parallelism.schedule=zbv", "parallelism.zero=3"), marks=pytest.mark.slow),
        pytest.param(("parallelism.schedule=1f1b", "parallelism.zero=2"), marks=pytest.mark.slow),
    ],
    ids=["zbv", "zbv-tied", "1f1b-tied"],
)
def test_a_table_that_is_a_unit_by_itself_in_a_pipeline_has_whole_gradients(words: tuple[str, ...]) -> None:
    """And where a rank has both ends of the model, ZeRO-3 gathers each into memory of its own."""
    pipeline = ("model.num_hidden_layers=4", "parallelism.pp=2", "train.loss_chunk_tokens=512")
    assert_alike(*both(*WORDS, *pipeline, *words, "precision=bf16"))


def test_one_rank_of_zero_3_alone_updates_its_state_in_buckets() -> None:
    """Nothing is gathered: units are not the model's blocks, and two of them lie in host memory."""
    own, counted = both(*LAYERS, "parallelism.tp=8", "parallelism.zero=3", "precision=bf16", *ON_DISK)
    assert own.host == pytest.approx(counted.host, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("model", [LAYERS, QWEN3_MOE], ids=["dense", "qwen3-moe"])
def test_gradients_of_products_in_fp8_wait_where_a_schedule_takes_them_later(model: tuple[str, ...]) -> None:
    words = ("precision=fp8", "parallelism.pp=2", "parallelism.schedule=zero_bubble")
    assert_alike(*both(*model, "model.num_hidden_layers=4", *words))
