"""Every rule has a configuration that breaks it, and says what was found and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import OmegaConf
from rule_cases import CASES, ELSEWHERE, Change

from checkpointing.options import PHASES
from conf.schema import Config, FaultPhase
from orchestra.config.machine import Situation, resolved
from orchestra.config.rules import all_rules, value_rules
from orchestra.config.rules.all_rules import RULES, check, problems_of
from orchestra.data.pack.command import PackRequest, pack, plan_pack
from orchestra.errors import ConfigError
from orchestra.run.config_file import writable_schema

CPU = Situation("run", num_gpus=0)
PLAN = Situation("plan", num_gpus=0)


def changed(changes: Change) -> Config:
    """The default configuration with some keys changed."""
    node = writable_schema()
    for name, value in changes.items():
        OmegaConf.update(node, name, value, force_add=True)
    return cast(Config, OmegaConf.to_object(node))


def broken(changes: Change, situation: Situation = PLAN) -> list[str]:
    return problems_of(resolved(changed(changes), situation), situation)


@pytest.mark.parametrize(
    ("rule", "changes", "words"), CASES, ids=lambda part: part if isinstance(part, str) else ""
)
def test_a_broken_rule_says_what_was_found_and_what_to_do(
    rule: str, changes: Change, words: Sequence[str]
) -> None:
    config = resolved(changed(changes), PLAN)
    function = next(function for function in RULES if function.__name__ == rule)
    sentences = list(function(config, PLAN))
    assert any(all(word in sentence for word in words) for sentence in sentences), sentences
    assert not any("\n" in sentence for sentence in broken(changes))


def test_every_rule_is_broken_by_some_case() -> None:
    tested = {rule for rule, _, _ in CASES} | ELSEWHERE
    assert tested == {rule.__name__ for rule in RULES}


@pytest.mark.parametrize(
    ("verb", "launcher", "advice"),
    [
        ("run", "slurm", "use `orchestra submit`"),
        ("submit", "local", "use cluster=slurm"),
        ("submit", "slurm", None),
        ("plan", "slurm", None),
        ("resume", "slurm", None),
        ("resume", "local", None),
    ],
)
def test_each_command_says_where_it_trains(verb: str, launcher: str, advice: str | None) -> None:
    problems = [
        text for text in broken({"cluster.launcher": launcher}, Situation(verb)) if "launcher" in text
    ]
    assert len(problems) == (advice is not None)
    assert advice is None or advice in problems[0]


def test_the_default_configuration_breaks_no_rule() -> None:
    check(resolved(Config(), CPU), CPU)


@pytest.mark.parametrize(
    ("num_gpus", "changes", "words"),
    [
        (0, {"cluster.device": "cuda"}, "no NVIDIA GPU is visible"),
        (2, {"cluster.gpus_per_node": 4}, "use at most 2, or cluster.device=cpu"),
    ],
)
def test_gpus_that_are_not_there_are_missed(num_gpus: int, changes: Change, words: str) -> None:
    assert any(words in problem for problem in broken(changes, Situation("run", num_gpus)))
    on_cluster = {**changes, "cluster.launcher": "slurm"}
    assert not any(words in problem for problem in broken(on_cluster, Situation("run", num_gpus)))


def test_numbers_that_no_float_can_hold_are_refused_like_others() -> None:
    for name in value_rules._AT_LEAST:
        assert problems_of(resolved(changed({name: 10**400}), CPU), CPU), name


NOT_BUILT: dict[str, list[Any]] = {
    "parallelism.pp": [2],
    "parallelism.cp": [2],
    "parallelism.ep": [2],
    "model.num_experts": [8],
}


@pytest.mark.parametrize("row", all_rules.TABLE, ids=lambda row: row.key)
def test_what_is_not_built_is_refused_by_run_and_known_to_plan(row: all_rules.NotYet) -> None:
    refused = 0
    for value in NOT_BUILT[row.key]:
        changes = {row.key: value}
        if row.is_asked_for(attrgetter(row.key)(changed(changes))):
            refused += 1
            assert any(f"does not have {row.feature} yet" in problem for problem in broken(changes, CPU))
            assert not any("does not have" in problem for problem in broken(changes, PLAN))
    assert refused
    assert not row.is_asked_for(attrgetter(row.key)(Config()))


def test_faults_can_strike_in_every_phase_that_the_library_has() -> None:
    assert set(PHASES) < set(FaultPhase.__members__)
    for phase in FaultPhase:
        fault = {"attempt": 2, "rank": "all", "fault": "sigkill", "phase": phase.name}
        if phase is not FaultPhase.setup:
            fault["at_step"] = 100
        assert broken({"recovery.inject": [fault]}) == []


@pytest.mark.parametrize("phase", ["step", "forward", "reduce", "restore"])
def test_faults_outside_of_saves_strike_at_any_step(phase: str) -> None:
    fault = {"at_step": 7, "rank": 1, "phase": phase}
    assert broken({"checkpoint.every_steps": 3, "recovery.inject": [fault]}) == []


def test_all_violations_come_in_one_error() -> None:
    config = resolved(changed({"train.steps": 0, "optim.lr": -1.0, "parallelism.tp": 3}), CPU)
    with pytest.raises(ConfigError) as caught:
        check(config, CPU)
    for word in ("train.steps=0", "optim.lr=-1.0", "num_attention_heads=8", "intermediate_size=352"):
        assert word in str(caught.value)
    assert caught.value.exit_code == 2


def test_impossible_sizes_break_no_other_rule_by_accident() -> None:
    names = [
        *value_rules._AT_LEAST,
        "parallelism.tp",
        "parallelism.pp",
        "parallelism.cp",
        "parallelism.ep",
    ]
    for value in (0, -3):
        config = changed(dict.fromkeys(names, value))
        assert len(problems_of(config, CPU)) > len(names) / 2


def test_packed_files_are_found_by_prefix_or_name_and_their_vocabulary_is_checked(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    (tmp_path / "text.txt").write_text("some text " * 100)
    pack(plan_pack(PackRequest([str(tmp_path / "text.txt")], str(prefix))))
    for path in (str(prefix), f"{prefix}.bin", f"file://{prefix}"):
        changes = {"data.source": "tokens", "data.path": path}
        assert any("257 tokens" in problem for problem in broken({**changes, "model.vocab_size": 256})), path
        assert broken({**changes, "model.vocab_size": 257}) == []


def test_remote_files_are_not_looked_for() -> None:
    assert broken({"data.source": "tokens", "data.path": "s3://bucket/corpus"}) == []
