"""`orchestra plan --search` as it is typed: what it prints, and that its commands mean what it found."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from plan_cases import PlanCommand

from conf.schema import Offload
from orchestra.cli.plan import configuration
from orchestra.cli.plan.search_mode import ask, overrides_of, runs_today
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import EXIT_FAILED
from orchestra.plan.assemble import case_of
from orchestra.plan.predict import predict
from orchestra.plan.search import search
from orchestra.plan.space import Fixed, choice_of, space_of

MODEL = ["model=llama3_8b", "precision=bf16", "train.seq_len=8192", "train.global_batch_size=64"]
NODES = ["cluster.nodes=2"]
# Where a test is about another axis, a search that need not try these.
PP, CP = "parallelism.pp=1", "parallelism.cp=1"
REPLAY = ["recovery.replay_every_steps=3", "train.deterministic=true"]
ONE_RANK = ["cluster.nodes=1", "cluster.gpus_per_node=1"]


def commands(text: str) -> list[list[str]]:
    """Return the commands in an output, their lines joined."""
    joined = text.replace(" \\\n", " ")
    return [shlex.split(line) for line in joined.splitlines() if line.startswith("orchestra ")]


def test_the_commands_mean_the_layouts_that_were_found(plan: PlanCommand) -> None:
    """Also where a preset says another layout, which the overrides have to undo."""
    typed = [*MODEL, *NODES, "parallelism=tp8_pp4", "train.recompute_every=2", "parallelism.bucket_mib=50"]
    asked = ask(typed)
    found = search(space_of(asked.config, "orchestra", 64, asked.fixed), 10, runs_today(asked.config))
    wanted = {"plan": found.ranked[0], "submit": found.chosen[0]}
    text = plan.text("--search", *typed)
    for word in ("best", "why", "bound by", "memory", "fit;"):
        assert word in text
    printed = commands(text)
    assert printed
    for _, verb, *overrides in printed:
        case = case_of(configuration(overrides))
        assert predict(case).time == wanted[verb].time
        assert choice_of(case) == choice_of(wanted[verb].case)
    # What runs today is accepted by the verb itself.
    submitted = next(overrides for _, verb, *overrides in printed if verb == "submit")
    assert compose([*submitted, "data=stdlib"], Situation("submit")).config


def test_a_batch_that_was_assumed_is_that_of_the_command_too(plan: PlanCommand) -> None:
    """On 24 GPUs 24 sequences are assumed; a layout of three data-parallel ranks by itself takes 18."""
    typed = ["model=llama3_8b", "cluster.nodes=3", "precision=bf16", "train.seq_len=8192", "parallelism.tp=8"]
    ((_, _, *overrides),) = commands(plan.text("--search", *typed))
    assert "train.global_batch_size=24" in overrides
    (best, *_) = plan.facts("--search", *typed)["layouts"]
    assert "train.global_batch_size=24" in best["overrides"]
    assert predict(case_of(configuration(overrides))).time.total == best["step_time_s"]


def test_a_layout_shares_out_each_batch_of_a_ramp(plan: PlanCommand) -> None:
    """32, then 96 sequences: 24 GPUs could share out the second alone, and a micro-batch of 12 would too."""
    batches = "[{tokens: 0, global_batch_tokens: 32768}, {tokens: 1000000, global_batch_tokens: 98304}]"
    small = ["model=llama_125m", "precision=bf16", "train.seq_len=1024", "train.tokens=10M"]
    typed = [*small, "cluster.nodes=3", f"train.batch_ramp={batches}"]
    ramp = ["ramp    32 × 1,024 = 32,768 tokens per step, 31 steps from step 1 on"]
    ramp += ["ramp    96 × 1,024 = 98,304 tokens per step, 92 steps from step 32 on"]
    ramp += ["batch   96 × 1,024 = 98,304 tokens", "        the last of the ramp: times and memory are of it"]
    found = plan.written("--search", *typed)
    assert "no global batch given" not in plan.notes
    for _, _, *overrides in commands(found):
        assert configuration(overrides).train.batch_ramp
    asked = ask(typed)
    meshes = space_of(asked.config, "orchestra", asked.num_sequences, asked.fixed).meshes()
    assert {mesh.dp for mesh in meshes} == {1, 2, 4, 8}
    one = [*typed, "cluster.nodes=1"]
    (sizes,) = plan.facts("--explain", "train.micro_batch_size", *one)["keys"].values()
    # Of 8 ranks each has 4, then 12.
    alone = {each["value"]: each["alone"] is not None for each in sizes}
    assert [size for size, is_possible in alone.items() if is_possible] == ["1", "2", "4"]
    for text in (found, plan.text("--explain", "dp", *one), plan.text(*one)):
        lines = text.splitlines()
        begin = lines.index(ramp[0])
        assert lines[begin : begin + 4] == ramp
    refused = plan.refusal("--search", *typed, "parallelism.dp=24")
    assert "train.batch_ramp[0].global_batch_tokens=32768 (32 sequences)" in refused


@pytest.mark.parametrize(
    ("typed", "refused", "why"),
    [
        # Muon takes whole matrices, which tensor parallelism cuts.
        (["optim=muon", "train.seq_len=1024", PP, CP], "parallelism.tp=2", "Muon needs whole matrices"),
        # cuBLAS takes micro-batches of an even number of such sequences.
        (
            ["precision=fp8", "train.seq_len=1032", PP, CP],
            "train.micro_batch_size=1",
            "divides, and train.micro_batch",
        ),
        (
            ["train.noise_scale_every=10", "train.seq_len=65536", PP, "parallelism.tp=1"],
            "parallelism.cp=2",
            "a gradient of its own sequences alone",
        ),
    ],
    ids=["muon", "fp8", "noise-scale"],
)
def test_what_runs_today_is_no_layout_that_the_trainer_refuses(
    plan: PlanCommand, typed: list[str], refused: str, why: str
) -> None:
    typed = ["model=llama_350m", "cluster.nodes=1", "train.global_batch_size=16", *typed]
    found = plan.facts("--search", *typed)["runs_today"][0]["overrides"]
    assert compose([*typed, *found, "cluster=slurm", "cluster.gpus_per_node=8"], Situation("submit")).config
    only = plan.facts("--search", *typed, refused)
    assert (only["layouts"][0]["runs_today"], only["runs_today"]) == (False, [])
    assert why in " ".join(plan.text("--search", *typed, refused).split())


@pytest.mark.slow
def test_overrides_turn_an_experiment_into_each_layout() -> None:
    """The 70B experiment has tp 2, ZeRO-3 and selective recomputation: what differs has to be said."""
    typed = ["experiment=llama3_70b", "cluster.nodes=8"]
    asked = ask(typed)
    found = search(
        space_of(asked.config, "orchestra", asked.num_sequences, asked.fixed), 3, runs_today(asked.config)
    )
    assert found.ranked
    compared = []
    for case in (layout.case for layout in [*found.ranked, *found.chosen, *found.pareto]):
        if case not in compared:
            assert case_of(configuration([*typed, *overrides_of(asked, case)])) == case
            compared.append(case)


def test_a_layout_that_shards_inside_a_node_is_searched_and_named(plan: PlanCommand) -> None:
    """Stage 3 over slow nodes: to gather inside one costs less time and more memory."""
    typed = [*MODEL, "cluster.nodes=8", "cluster.gpus_per_node=8", "cluster.hardware=a100_80"]
    typed += ["parallelism.zero=3", "parallelism.tp=1", "parallelism.pp=1", "parallelism.cp=1"]
    asked = ask(typed)
    space = space_of(asked.config, "orchestra", 64, asked.fixed)
    assert {choice.shard_degree for choice in space.choices()} == {None, 8}
    best_with = search(space, 1).by_value["shard_degree"]
    whole, inside = best_with[None], best_with[8]
    assert whole is not None
    assert inside is not None
    assert (inside.case.num_shards, inside.case.layout.shard) == (8, 8)
    assert inside.peak.total > whole.peak.total
    overrides = overrides_of(asked, inside.case)
    assert "parallelism.shard_degree=8" in overrides
    assert case_of(configuration([*typed, *overrides])) == inside.case
    kept = ask([*typed, "parallelism.shard_degree=16"])
    kept_space = space_of(kept.config, "orchestra", 64, kept.fixed)
    assert {choice.shard_degree for choice in kept_space.choices()} == {16}
    # What is kept is had by all that are proposed, or there is nothing.
    for degree, expected in ((16, {(64, 16), (32, 16), (16, None)}), (3, set())):
        wide = replace(space, fixed=Fixed(shard_degree=degree, pp=1, cp=1))
        choices = [choice for choice in wide.choices() if choice.mesh.tp <= 4]
        assert {(choice.mesh.dp, choice.shard_degree) for choice in choices} == expected
        assert all(choice.zero for choice in choices)
    assert "zero 3 over 8 ranks" in plan.text("--search", *typed, "parallelism.shard_degree=8")


def test_what_a_search_leaves_out_is_told(plan: PlanCommand) -> None:
    typed = [*MODEL, *NODES, "parallelism.pp=2", "train.recompute_every=2", "parallelism.stages=null"]
    plan.text("--search", *typed)
    assert "note: train.recompute_every=2 left out: " in plan.notes


def test_schedules_that_make_the_best_layout_faster_are_named(plan: PlanCommand) -> None:
    typed = [*MODEL, *NODES, "parallelism.tp=2", "parallelism.pp=8", "parallelism.cp=1"]
    best = plan.facts("--search", *typed)
    named = best["better_schedules"]
    assert [each["parallelism.schedule"] for each in named].count("interleaved") >= 1
    fastest = named[0]
    keys = ("parallelism.schedule", "parallelism.virtual_stages")
    given = [f"{key}={fastest[key]}" for key in keys if key in fastest]
    assert f"with {' '.join(given)} " in " ".join(plan.text("--search", *typed).split())
    # With that schedule the search finds at least as good a layout, and its command says the schedule.
    again = plan.facts("--search", *typed, *given)
    assert again["layouts"][0]["step_time_s"] <= fastest["step_time_s"] * (1 + 1e-9)
    assert again["layouts"][0]["step_time_s"] < best["layouts"][0]["step_time_s"]


ON_DISK = [*MODEL, *NODES, "parallelism.offload=optimizer_disk"]
OFFLOADED = ["experiment=llama3_70b", "cluster.nodes=4", "parallelism.offload=all", "train.seq_len=2048"]


def test_parameters_in_host_memory_are_searched_with_zero_3_alone() -> None:
    asked = ask(OFFLOADED)
    space = space_of(asked.config, "orchestra", asked.num_sequences, asked.fixed)
    assert {choice.zero for choice in space.choices()} == {3}
    assert min(choice.mesh.dp * choice.mesh.cp for choice in space.choices()) > 1
    best = search(space, 1).ranked[0].case
    again = case_of(configuration([*asked.overrides, *overrides_of(asked, best)]))
    assert again.options.offload is Offload.all
    assert predict(again).fits


def test_state_on_disk_is_searched_where_its_folder_is_given(plan: PlanCommand) -> None:
    printed = commands(plan.text("--search", *ON_DISK, "parallelism.offload_dir=/scratch", PP, CP))
    overrides = next(overrides for _, verb, *overrides in printed if verb == "submit")
    submitted = compose([*overrides, "data=stdlib"], Situation("submit")).config.parallelism
    assert (submitted.offload, submitted.offload_dir) == (Offload.optimizer_disk, "/scratch")


def test_of_many_values_with_which_nothing_fits_the_first_ones_are_named(plan: PlanCommand) -> None:
    words = ["model=llama3_8b", "precision=bf16", "train.seq_len=8192", "train.global_batch_size=5040"]
    lines = plan.text("--search", *words, "cluster.gpus_per_node=4", "parallelism.tp=2").splitlines()
    unfit = [line for line in lines if " and " in line and "nothing fits" in line]
    assert unfit
    assert unfit[-1].endswith("more: nothing fits")
    assert max(map(len, lines)) <= 80


def test_a_key_that_is_given_stays_and_a_preset_or_an_impossible_layout_does_not(plan: PlanCommand) -> None:
    facts = plan.facts("--search", *MODEL, *NODES, "parallelism.tp=4", "parallelism=zero3")
    assert {layout["tp"] for layout in facts["pareto"]} == {4}
    assert {layout["zero"] for layout in facts["pareto"]} != {3}
    # 64 sequences cannot be shared out by 128 data-parallel ranks, but by fewer.
    plan.text("--search", *MODEL, "cluster.nodes=16", PP, CP)


@pytest.mark.parametrize(
    "typed",
    [
        ["parallelism=tp8", "recovery.replay_every_steps=3"],
        ["parallelism=tp8", "train.noise_scale_every=2"],
        ["parallelism=zero3", "recovery.replay_every_steps=3"],
    ],
    ids=["replay", "noise-scale", "zero"],
)
def test_what_is_wrong_with_the_layout_of_a_preset_alone_is_searched_away(typed: list[str]) -> None:
    one_node = [*MODEL[:-1], "train.global_batch_size=8", "cluster.nodes=1", "train.deterministic=true"]
    assert ask([*one_node, *typed]).broken


def test_where_nothing_fits_the_nearest_and_what_helps_are_named(plan: PlanCommand) -> None:
    typed = ["--search", "model=llama3_70b", "train.seq_len=8192", "train.global_batch_size=64"]
    text = plan.text(*typed, code=EXIT_FAILED)
    assert "The nearest takes" in text
    facts = plan.facts(*typed, code=EXIT_FAILED)
    overrides = [remedy["override"] for remedy in facts["remedies"]]
    keys = {override.partition("=")[0] for override in overrides}
    assert keys == {"parallelism.offload", "cluster.hardware", "cluster.nodes"}
    for override in overrides:
        assert override in text
        assert plan.facts(*typed, override)["num_fitting"] > 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([*MODEL, "parallelism.tp=3"], "parallelism.tp=3 does not divide"),
        ([*MODEL, "parallelism.zero=7"], "parallelism.zero=7 is no stage of ZeRO"),
        ([*MODEL, "train.micro_batch_size=3"], "is not a multiple of micro_batch_size=3"),
        ([*MODEL, "train.steps=0"], "train.steps=0 is too small"),
        ([*MODEL, "--top", "0"], "expected 1 or more"),
        ([*OFFLOADED, "parallelism.zero=1"], "parallelism.offload=all needs parallelism.zero=3"),
        ([*ON_DISK], "parallelism.offload_dir=null with parallelism.offload=optimizer_disk; give"),
        ([*MODEL, *REPLAY, "parallelism.zero=3"], "with parallelism.zero=3 no rank holds the parameters"),
        ([*MODEL, *REPLAY, *ONE_RANK], "the run has one data-parallel rank"),
        ([*MODEL, "parallelism.schedule=interleaved"], "interleaves nothing; use virtual_stages=2"),
        ([*MODEL, "parallelism.virtual_stages=2"], "it has one stage on each rank"),
        ([*MODEL, "parallelism.virtual_stages=0"], "parallelism.virtual_stages=0 is too small"),
        ([*MODEL, "parallelism.shard_degree=0"], "parallelism.shard_degree=0 is too small"),
        ([*MODEL, "cluster.nodes=0"], "cluster.nodes=0 is too small"),
        ([*MODEL, "cluster.gpus_per_node=0"], "cluster.gpus_per_node=0 is not a number of ranks"),
        (["optim=muon", *ON_DISK[:-1], "parallelism.offload=all"], "AdamW alone does"),
    ],
)
def test_what_cannot_be_searched_is_refused(words: list[str], reason: str, plan: PlanCommand) -> None:
    assert reason in plan.refusal("--search", *words)


def test_a_405b_model_on_16384_devices_is_split_inside_nodes_and_into_stages(plan: PlanCommand) -> None:
    """Llama 3 (arXiv:2407.21783, table 4): tp 8, pp 16, dp 128 for 2,048 sequences of 8,192 tokens. With an
    interleaved pipeline, as Megatron's, that mesh is near the best that is found.
    """
    size = ["train.seq_len=8192", "train.global_batch_size=2048", "cluster.nodes=2048"]
    typed = ["model=llama3_405b", "precision=bf16", *size, "parallelism.cp=1", "--framework", "megatron"]
    layouts = plan.facts("--search", *typed)["layouts"]
    assert layouts[0]["tp"] == 8
    theirs = next(row for row in layouts if (row["dp"], row["tp"], row["pp"]) == (128, 8, 16))
    assert theirs["tokens_per_s"] >= 0.95 * layouts[0]["tokens_per_s"]
    assert all(row["tp"] in (4, 8) for row in layouts)
    # Table 4 of the paper: 41 % for this mesh.
    assert 0.37 < theirs["mfu"] < 0.45
