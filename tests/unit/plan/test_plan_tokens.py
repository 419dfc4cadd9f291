"""`orchestra plan --tokens N`: the fewest GPUs that fit, the time on 64, and what is assumed for it."""

from __future__ import annotations

import pytest
from support.command_line import CommandLine

from orchestra.errors import EXIT_FAILED, EXIT_USAGE


def test_a_model_and_tokens_are_enough_to_know_how_many_gpus_and_how_long(orchestra: CommandLine) -> None:
    text = orchestra("plan", "model=llama3_8b", "--tokens", "1e12").out
    assert "assumed precision=bf16, train.seq_len=8192, train.global_batch_tokens=4194304" in text
    assert "1.00T = 238,419 steps of 4,194,304 in sequences of 8,192" in text
    assert "fewest GPUs that fit: 2 × h100" in text
    assert "on 64 × h100, " in text
    facts = orchestra.json("plan", "model=llama3_8b", "--tokens", "1T")
    assert (facts["fewest"]["gpus"], facts["asked"]["gpus"], facts["steps"]) == (2, 64, 238419)
    assert facts["fewest"]["pp"] == 2, "stages are faster there than ZeRO-3 over two"
    # What it found is what the plan of that very layout says.
    words = text.split("\n\n")[-1].replace("\\\n", " ").split()[2:]
    alone = orchestra.json("plan", *words)
    assert alone["run_s"] == pytest.approx(facts["asked"]["run_s"])
    assert alone["fits"] is True


def test_what_is_said_is_not_assumed(orchestra: CommandLine) -> None:
    words = ["model=llama_1b", "precision=fp32", "train.seq_len=4096", "cluster.nodes=2"]
    facts = orchestra.json("plan", *words, "--tokens", "100B")
    assert [each.partition("=")[0] for each in facts["assumed"]] == ["train.global_batch_tokens"]
    assert facts["asked"]["gpus"] == 16
    error = orchestra("plan", "model=debug", "train.steps=5", "--tokens", "1T", code=EXIT_USAGE).err
    assert "--tokens 1T says the same as train.steps" in error


def test_any_number_of_nodes_shares_out_a_batch_that_is_assumed_or_has_a_layout_for_one_that_is_given(
    orchestra: CommandLine,
) -> None:
    axes = ["parallelism.tp=1", "parallelism.cp=1"]
    found = orchestra.json("plan", "model=llama3_8b", "cluster.nodes=3", *axes, "--tokens", "1T")
    assert found["assumed"][-1] == f"train.global_batch_tokens={528 * 8192}"
    assert (found["asked"]["gpus"], found["asked"]["dp"]) == (24, 24)
    given = ["model=llama3_8b", "cluster.nodes=3", *axes, "train.global_batch_size=512"]
    found = orchestra.json("plan", *given, "--tokens", "1T")
    assert (found["asked"]["dp"], found["asked"]["pp"]) == (8, 3)


def test_the_fewest_gpus_are_no_power_of_two_where_fewer_fit(orchestra: CommandLine) -> None:
    """Five nodes of eight: 175 billion parameters take 16 bytes each, and 40 of these GPUs have 2.9e12."""
    words = ["model=gpt3_175b", "cluster.hardware=a100_80", "parallelism.cp=1", "parallelism.tp=2"]
    facts = orchestra.json("plan", *words, "cluster.nodes=4", "--tokens", "300B", code=EXIT_FAILED)
    assert (facts["asked"], facts["fewest"]["gpus"], facts["fewest"]["fits"]) == (None, 40, True)


def test_axes_that_are_given_are_kept(orchestra: CommandLine) -> None:
    model = ["model=qwen3_30b_a3b", "model.num_hidden_layers=4", "train.seq_len=4096", "cluster.nodes=2"]
    facts = orchestra.json("plan", *model, "parallelism.pp=2", "parallelism.ep=4", "--tokens", "1B")
    for found in (facts["asked"], facts["fewest"]):
        assert (found["pp"], found["ep"]) == (2, 4)


def test_a_plan_ends_with_1_where_nothing_fits(orchestra: CommandLine) -> None:
    huge = ["model=llama3_405b", "cluster.nodes=1", "cluster.hardware=a100_40"]
    assert "does not fit" in orchestra("plan", *huge, "--tokens", "1T", code=EXIT_FAILED).out
    assert "does not fit" in orchestra("plan", *huge, code=EXIT_FAILED).out


def test_the_steps_of_a_ramp_are_counted_and_timed_each_with_its_own_batch(orchestra: CommandLine) -> None:
    ramp = "[{tokens: 0, global_batch_tokens: 524288}, {tokens: 52428800, global_batch_tokens: 2097152}]"
    words = ["model=llama_1b", "precision=bf16", "train.seq_len=8192", "train.micro_batch_size=1"]
    found = orchestra.json("plan", *words, f"train.batch_ramp={ramp}", "train.tokens=1B")
    small, large = (
        orchestra.json("plan", *words, f"train.global_batch_tokens={tokens}", f"train.steps={steps}")
        for tokens, steps in ((524288, 100), (2097152, 452))
    )
    assert found["steps"] == 100 + 452
    assert found["run_s"] == pytest.approx(small["run_s"] + large["run_s"])
