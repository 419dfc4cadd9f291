"""Numbers with units and exponents; and pairs of keys of which one counts: steps or tokens, steps or time."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config
from orchestra.config.compose import changed_config, compose
from orchestra.config.machine import Situation
from orchestra.config.overrides import check_overrides
from orchestra.config.sweep import compose_members
from orchestra.errors import ConfigError

HERE = Situation("run", num_gpus=0)


def composed(*overrides: str) -> Config:
    return compose(overrides, HERE).config


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, HERE)
    return caught.value.problems


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("train.steps=1e3", 1000),
        ("train.steps=1.5k", 1500),
        ("train.steps=2M", 2_000_000),
        ("train.global_batch_tokens=4Mi", 4 * 2**20),
        ("checkpoint.every_steps=2k", 2000),
        ("checkpoint.keep_every_steps=1e4", 10_000),
        ("recovery.exclude_hours=2d", 48.0),
        ("recovery.heartbeat_timeout_s=1m30s", 90.0),
        ("recovery.heartbeat_timeout_s=120", 120.0),
        ("checkpoint.every_s=1h", 3600.0),
        ("cluster.network.intra_node_latency_s=20us", 2e-5),
        ("cluster.network.inter_node_bytes_per_s=50G", 5e10),
        ("model.rope_theta=500k", 5e5),
        ("optim.lr=1e-3", 1e-3),
        ("cluster.time_limit=4h", "4:00:00"),
        ("cluster.time_limit=1d12h", "36:00:00"),
        ("cluster.time_limit=90", "90"),
        # Texts stay what they are.
        ("model.name=8k", "8k"),
    ],
)
def test_a_number_may_be_written_with_a_unit_or_an_exponent(typed: str, value: Any) -> None:
    found = attrgetter(typed.partition("=")[0])(composed(typed))
    assert (found, type(found)) == (value, type(value))


def test_numbers_inside_lists_may_be_written_so_too() -> None:
    ramp = (
        "train.batch_ramp=[{tokens: 0, global_batch_tokens: 8Ki}, {tokens: 1.5M, global_batch_tokens: 16Ki}]"
    )
    config = composed("train.seq_len=256", ramp, "train.profile.steps=[1k, 1002]", "train.steps=2k")
    stages = [(stage.tokens, stage.global_batch_tokens) for stage in config.train.batch_ramp]
    assert stages == [(0, 8192), (1_500_000, 16384)]
    assert config.train.profile.steps == [1000, 1002]
    longer = changed_config(config, [ramp.replace("1.5M", "2e6")], HERE)
    assert longer.train.batch_ramp[1].tokens == 2_000_000
    assert any("batch_ramp" in each for each in problems(ramp.replace("1.5M", "1.5Q")))
    assert any("batch_ramp" in each for each in problems(ramp.replace("1.5M", "1h")))


def test_texts_beside_a_number_with_a_unit_keep_their_quotes() -> None:
    typed = "data.blend=[{path: '/a, b', name: '8k', weight: 2k}, {path: /c, weight: 1}]"
    (override,) = check_overrides([typed]).accepted
    assert override == "data.blend=[{path:'/a, b',name:'8k',weight:2000.0},{path:/c,weight:1}]"


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("train.steps=1.5", "a whole number"),
        ("train.steps=1e-3", "a whole number"),
        ("train.steps=4h", "train.steps=4h: found text"),
        ("train.steps=4q", "found text"),
        ("optim.lr=3h", "optim.lr=3h"),
        ("train.steps=1e99", "train.steps=1000"),
        ("checkpoint.every_steps=1h", "is a time and no number; use checkpoint.every_s=1h"),
    ],
)
def test_a_unit_that_the_key_does_not_take_is_refused(typed: str, words: str) -> None:
    assert any(words in problem for problem in problems(typed))


def test_where_a_decimal_number_breaks_a_rule_the_binary_one_is_offered_if_it_breaks_none() -> None:
    (problem,) = problems("train.seq_len=1024", "train.global_batch_tokens=2M")
    assert problem.endswith(", or train.global_batch_tokens=2Mi")
    assert all("Ki" not in each for each in problems("train.steps=1k", "optim.warmup_steps=5k"))


def test_sweeps_and_presets_know_units_too(tmp_path: Path) -> None:
    members = compose_members(["train.steps=1k,2k"], HERE)
    assert [member.config.train.steps for member in members] == [1000, 2000]
    (tmp_path / "train").mkdir()
    file = tmp_path / "train" / "mine.yaml"
    for written, words in (
        ("seq_len: 1k", "train.seq_len=1k: write 1000"),
        ("profile: {steps: [1k, 1002]}", "train.profile.steps=[1k,1002]: write [1000,1002]"),
    ):
        file.write_text(f"{written}\n")
        assert problems(f"hydra.searchpath=[{tmp_path}]", "train=mine") == [f"{file}: {words}"]


def test_tokens_give_the_number_of_steps() -> None:
    train = composed("train.tokens=1M", "train.seq_len=100", "train.global_batch_size=30").train
    assert (train.tokens, train.steps) == (1_000_000, 334)
    assert composed("train.tokens=1", "optim.warmup_steps=0").train.steps == 1
    assert composed("train=pretrain_2k", "train.tokens=1B").train.steps == -(-(10**9) // 524288)


def test_steps_or_tokens_steps_or_time_one_of_each_pair_counts(tmp_path: Path) -> None:
    assert problems("train.steps=5", "train.tokens=1M") == [
        "train.steps and train.tokens are both given; give one of them"
    ]
    assert problems("checkpoint.every_steps=5", "checkpoint.every_s=1h") == [
        "checkpoint.every_steps and checkpoint.every_s are both given; give one of them"
    ]
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text("tokens: 1000000\n")
    train = composed(f"hydra.searchpath=[{tmp_path}]", "train=mine", "train.steps=7").train
    assert (train.tokens, train.steps) == (None, 7)
    # Null saves nothing at all; with a time it means that steps do not count.
    checkpoint = composed("checkpoint.every_steps=null", "checkpoint.every_s=10m").checkpoint
    assert (checkpoint.every_steps, checkpoint.every_s) == (1000, 600.0)


def test_a_run_goes_on_with_the_steps_of_its_tokens_as_long_as_the_batch_stays() -> None:
    frozen = composed("train.tokens=1M", "train.global_batch_size=16")
    assert changed_config(frozen, [], HERE) == frozen
    longer = changed_config(frozen, ["train.tokens=2M"], HERE).train
    assert (longer.tokens, longer.steps) == (2_000_000, 489)
    with pytest.raises(ConfigError, match=r"had 4096 tokens each.*8192; give train\.steps"):
        changed_config(frozen, ["train.global_batch_size=32"], HERE)
    other = changed_config(frozen, ["train.global_batch_size=32", "train.steps=300"], HERE).train
    assert (other.tokens, other.steps) == (None, 300)


def test_tokens_need_a_batch_whose_size_is_known() -> None:
    overrides = ["cluster=slurm", "train.tokens=1M"]
    with pytest.raises(ConfigError, match=r"train\.tokens=1000000.*give train\.global_batch_tokens"):
        compose(overrides, Situation("plan"))
    given = compose([*overrides, "train.global_batch_size=64"], Situation("plan")).config
    assert given.train.steps == 62
