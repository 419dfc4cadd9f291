"""Overrides on top of a frozen run: what they change, and what a run keeps for its whole life."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rule_cases import Change, changed

from conf.schema import Config, PrecisionName, Schedule
from orchestra.config.compose import changed_config, compose
from orchestra.config.machine import Situation, resolved
from orchestra.errors import ConfigError
from orchestra.run.config_file import read_config, write_config
from orchestra.run.paths import RunDir
from orchestra.submit.resume_changes import ResumeChanges

CPU = Situation("run", num_gpus=0)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """What a run directory holds: resolved, written and read again."""
    composed = compose(["train.steps=60", "run.name=mine", "checkpoint.every_steps=20"], CPU)
    file = tmp_path_factory.mktemp("run") / "config.yaml"
    write_config(file, composed.config)
    return read_config(file)


def problems(frozen: Config, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        changed_config(frozen, overrides, CPU)
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_a_run_of_a_newer_version_says_what_is_not_known_and_where_the_version_stands(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("train:\n  from_the_future: 3\n")
    with pytest.raises(ConfigError) as caught:
        read_config(file)
    (problem,) = caught.value.problems
    assert "Key 'from_the_future' not in 'TrainConfig'; use the version that run.json" in problem


def test_only_what_was_said_changes_and_what_is_so_already_is_no_change(frozen: Config) -> None:
    for overrides in ([], ["train.seed=0", "model.hidden_size=128"]):
        assert changed_config(frozen, overrides, CPU) == frozen
    overrides = ["train.steps=200", "cluster.gpus_per_node=4", "precision.name=bf16", "cluster.exclude=[1e5]"]
    config = changed_config(frozen, overrides, CPU)
    expected = dataclasses.replace(
        frozen,
        train=dataclasses.replace(frozen.train, steps=200),
        cluster=dataclasses.replace(frozen.cluster, gpus_per_node=4, exclude=["1e5"]),
        precision=dataclasses.replace(frozen.precision, name=PrecisionName.bf16),
    )
    assert config == expected


def test_a_preset_replaces_its_section(frozen: Config) -> None:
    config = changed_config(frozen, ["optim=adamw_constant", "optim.lr=1e-3"], CPU)
    assert config.optim == compose(["optim=adamw_constant", "optim.lr=1e-3"], CPU).config.optim
    assert config.train == frozen.train


def test_tokens_take_the_place_of_the_batch_size_and_back(frozen: Config) -> None:
    tokens = changed_config(frozen, ["train.global_batch_tokens=2048"], CPU)
    assert (tokens.train.global_batch_size, tokens.train.global_batch_tokens) == (None, 2048)
    again = changed_config(tokens, ["train.global_batch_size=4"], CPU)
    assert (again.train.global_batch_size, again.train.global_batch_tokens) == (4, None)


def test_free_keys_are_set_and_deleted(frozen: Config) -> None:
    config = changed_config(frozen, ["cluster.slurm_extra.reservation=night"], CPU)
    assert config.cluster.slurm_extra == {"reservation": "night"}
    assert changed_config(config, ["~cluster.slurm_extra.reservation"], CPU).cluster.slurm_extra == {}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hidden_size=256", ["model.hidden_size=256", "hidden_size=128", "hold this model"]),
        ("model=llama_125m", ["model.name, model.hidden_size, model.inter", "keeps them, since the check"]),
        ("train.seed=1", ["train.seed=1", "train.seed=0", "samples"]),
        ("train.seq_len=128", ["train.seq_len=128", "train.seq_len=256"]),
        ("run.name=other", ["run.name=other", "run.name=mine", "records and checkpoints"]),
        ("run.dir=elsewhere", ["run.dir=elsewhere", "orchestra run"]),
        ("data=tokens", ["data.source=tokens", "data.source=stdlib"]),
        ("optim.state_dtype=bf16", ["optim.state_dtype=bf16", "optim.state_dtype=fp32", "not converted"]),
        ("experiment=demo", ["experiment=demo", "new run"]),
        ("train.stepz=3", ["train.stepz", "train.steps"]),
        ("train.steps=0", ["train.steps=0", "1 or more"]),
        ("cluster.gpus_per_node=3", ["train.global_batch_size=16"]),
    ],
)
def test_what_would_break_the_run_is_refused_with_its_reason(
    frozen: Config, override: str, words: list[str]
) -> None:
    found = problems(frozen, override)
    assert any(all(word in problem for word in words) for problem in found), found
    # A preset of another model changes many keys for one reason.
    assert len(found) <= 3


def test_all_problems_come_together(frozen: Config) -> None:
    found = "\n".join(problems(frozen, "train.seed=1", "optim.lr=-1", "no.such=2"))
    for word in ("train.seed=1", "optim.lr=-1", "no.such"):
        assert word in found


def test_a_ramp_may_change_batches_to_come_and_none_that_steps_had(frozen: Config, tmp_path: Path) -> None:
    size = frozen.train.global_batch_size
    assert size is not None
    tokens = size * frozen.train.seq_len

    def ramp(until: int, first: int = 1) -> Config:
        said = f"[{{tokens: 0, global_batch_tokens: {first * tokens}}}"
        said += f", {{tokens: {until * tokens}, global_batch_tokens: {4 * tokens}}}]"
        return changed_config(frozen, [f"train.batch_ramp={said}"], CPU)

    grown = ramp(until=20)
    # What other code asks of the batch is the last one.
    assert (grown.train.global_batch_size, grown.train.global_batch_tokens) == (None, 4 * tokens)
    changes = ResumeChanges(frozen, grown, 20)
    changes.refuse_other_past(RunDir(tmp_path))
    assert changes.tokens_left == 40 * 4 * tokens
    for other in (ramp(until=19), ramp(until=20, first=2)):
        with pytest.raises(ConfigError, match=r"steps 1 to 20 were trained on .* keep the batches"):
            ResumeChanges(frozen, other, 20).refuse_other_past(RunDir(tmp_path))
    # The run trained steps 11 to 20 on twice as much, whatever its configuration says now.
    rows = [{"step": step, "tokens": (step + max(0, step - 10)) * tokens} for step in (4, 8, 12, 16)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    doubled = changed_config(frozen, [f"train.global_batch_tokens={2 * tokens}"], CPU)
    said = f"[{{tokens: 0, global_batch_tokens: {tokens}}}, {{tokens: {10 * tokens}, global_batch_tokens: "
    for last in ("", f", {{tokens: {30 * tokens}, global_batch_tokens: {4 * tokens}}}"):
        config = changed_config(frozen, [f"train.batch_ramp={said}{2 * tokens}}}{last}]"], CPU)
        ResumeChanges(doubled, config, 20).refuse_other_past(RunDir(tmp_path))
        # One that is what the run has is not asked again.
        ResumeChanges(config, config, 20).refuse_other_past(RunDir(tmp_path))
    for other in (
        ramp(until=20),
        ramp(until=21),
        changed_config(config, ["train.global_batch_size=16"], CPU),
    ):
        with pytest.raises(ConfigError, match=rf"steps 1 to 12 were trained on .* tokens: {30 * tokens} or"):
            ResumeChanges(doubled if other.train.batch_ramp else config, other, 20).refuse_other_past(
                RunDir(tmp_path)
            )
    # Nobody gave the batch, which was that of 2 ranks: of steps after the last row the rows say it too.
    rows = [{"step": step, "tokens": 2 * step * tokens} for step in (4, 8, 12, 16)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = replace(frozen, train=replace(frozen.train, global_batch_size=None, global_batch_tokens=None))
    ResumeChanges(own, ramp(until=40, first=2), 18).refuse_other_past(RunDir(tmp_path))
    (twice,) = problems(
        frozen, "train.batch_ramp=[{tokens: 0, global_batch_tokens: 4096}]", "train.global_batch_size=16"
    )
    assert "train.global_batch_size and train.batch_ramp are both given" in twice
    # A batch that is said takes a ramp's place.
    assert changed_config(grown, ["train.global_batch_size=16"], CPU).train.batch_ramp == []


_RAMP: Change = {
    "train.batch_ramp": [
        {"tokens": 0, "global_batch_tokens": 1024},
        {"tokens": 409_600, "global_batch_tokens": 16_384},
    ],
    "optim.batch_ramp_lr": "sqrt",
}


@pytest.mark.parametrize(
    ("values", "change", "begin"),
    [
        *(({"optim.schedule": schedule.name}, {"train.steps": 2000}, 60) for schedule in Schedule),
        # In its own warm-up.
        ({"optim.schedule": "constant", "optim.warmup_steps": 50}, {"optim.warmup_steps": 20}, 20),
        ({"optim.min_lr": 1e-4}, {"train.steps": 1000}, 60),
        ({**_RAMP, "optim.warmup_steps": 6}, {"train.steps": 500}, 60),
        # The lowest rate would be above the one that it was multiplied to.
        ({**_RAMP, "optim.min_lr": 1.2e-4}, {"optim.batch_ramp_lr": "none"}, 60),
    ],
    ids=str,
)
def test_the_rate_stays_what_it_was_where_the_advice_is_followed(
    values: Change, change: Change, begin: int
) -> None:
    before, now = (
        resolved(changed({"train.steps": 61, **each}), CPU) for each in (values, {**values, **change})
    )
    with pytest.raises(ConfigError) as caught:
        ResumeChanges(before, now, begin).refuse_jump(accepted=False)
    advice = re.search("keep it with `(.*)`", str(caught.value))
    assert advice is not None
    followed = ResumeChanges(before, changed_config(now, advice[1].split(), CPU), begin)
    followed.refuse_jump(accepted=False)
    was, becomes = followed.rates or (0.0, 1.0)
    assert becomes == pytest.approx(was, rel=1e-5)


def test_a_jump_that_a_ramp_makes_is_told_of_the_ramp() -> None:
    stages = _RAMP["train.batch_ramp"]
    later: Change = {"train.batch_ramp": [stages[0], {**stages[1], "global_batch_tokens": 65_536}]}
    before, now = (
        resolved(changed({"train.steps": 61, **_RAMP, **each}), CPU) for each in (dict[str, Any](), later)
    )
    with pytest.raises(ConfigError, match=r"^train.batch_ramp=\[.*65536.*: the learning rate would jump"):
        ResumeChanges(before, now, 20).refuse_jump(accepted=False)


def test_no_rate_of_zero_is_advised() -> None:
    before, now = (changed({"optim.min_lr": 0.0, "train.steps": steps}) for steps in (60, 90))
    with pytest.raises(ConfigError, match=r"it was to be 0, .* `optim.lr`, or accept"):
        ResumeChanges(before, now, 60).refuse_jump(accepted=False)
