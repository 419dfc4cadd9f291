"""From a run that was prepared to the two configurations of its rehearsal: what stays, what differs, and
where they lie.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from conf.schema import Config, WandbMode
from orchestra.config.compose import compose
from orchestra.config.machine import Situation, signature
from orchestra.errors import ConfigError
from orchestra.rehearsal.prepare_rehearsal import (
    Rehearsal,
    RehearsalPair,
    asked_fault,
    planned_rehearsal,
    read_pair,
    rehearsed_config,
    write_pair,
)
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir, SweepDir
from orchestra.submit.new_run import RunRequest, planned_run, prepare

HERE = Situation("run")


def prepared(parent: Path, *overrides: str) -> RunDir:
    words = ("cluster.device=cpu", "run.name=first", f"run.dir={parent}", *overrides)
    config = compose(words, HERE).config
    request = RunRequest(config, signature(config), words)
    return prepare(request, planned_run(request, 0.0))


def rehearsal(run: RunDir, *overrides: str) -> Rehearsal:
    config = rehearsed_config(run, overrides, HERE)
    return planned_rehearsal(run, config, [asked_fault("sigkill")], None, HERE)


def place_of(config: Config) -> Path:
    return Path(config.run.dir) / str(config.run.name)


def test_two_short_runs_differ_in_their_names_and_the_faults_alone(tmp_path: Path) -> None:
    words = ("train.steps=5000", "optim.warmup_steps=900", "wandb.mode=online", "train.profile.enabled=true")
    run = prepared(tmp_path, *words, "recovery.inject=[{at_step: 4000, rank: 0}]", "recovery.max_restarts=7")
    plan, before = rehearsal(run, "recovery.backoff_s=3"), read_config(run.config)
    whole, hurt = plan.undisturbed, plan.hurt
    assert dataclasses.replace(hurt, run=whole.run, recovery=whole.recovery) == whole
    assert whole.recovery.inject == []
    assert [(it["fault"], it["attempt"]) for it in hurt.recovery.inject] == [("sigkill", 0)]
    assert dataclasses.replace(hurt.recovery, inject=[]) == whole.recovery
    assert (whole.recovery.max_restarts, whole.recovery.backoff_s) == (7, 3.0)
    assert (whole.model, whole.cluster, whole.parallelism) == (
        before.model,
        before.cluster,
        before.parallelism,
    )
    assert whole.train.steps == plan.schedule.steps == whole.optim.warmup_steps
    assert (whole.wandb.mode, whole.train.profile.enabled, whole.data.ledger) == (
        WandbMode.disabled,
        False,
        True,
    )


def test_they_lie_beside_the_run_under_names_that_are_free_and_begin_with_another_word(
    tmp_path: Path,
) -> None:
    run = prepared(tmp_path)
    places = [place_of(it) for it in (rehearsal(run).undisturbed, rehearsal(run).hurt)]
    assert places == [tmp_path / f"rehearsal-first-1-{name}" for name in ("undisturbed", "faults")]
    places[1].mkdir()
    assert place_of(rehearsal(run).undisturbed).name == "rehearsal-first-2-undisturbed"


def test_the_member_of_a_sweep_is_rehearsed_outside_of_it(tmp_path: Path) -> None:
    run = prepared(tmp_path / "grid")
    record = json.loads(run.record.read_text())
    run.record.write_text(json.dumps({**record, "sweep": "grid"}))
    SweepDir(tmp_path / "grid").record.write_text("{}")
    assert place_of(rehearsal(run).hurt) == tmp_path / "rehearsal-grid-first-1-faults"


def test_checkpoints_elsewhere_get_a_folder_of_each_run_beside_the_runs_own(tmp_path: Path) -> None:
    run = prepared(tmp_path, "checkpoint.dir=s3://bucket/first/")
    plan = rehearsal(run)
    places = {plan.undisturbed.checkpoint.dir, plan.hurt.checkpoint.dir}
    names = ("undisturbed", "faults")
    assert places == {f"s3://bucket/first-rehearsal-first-1-{name}" for name in names}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.steps=9", "--steps"),
        ("recovery.inject=[]", "--fault"),
        ("run.name=x", "named after RUN"),
        ("+run.dir=x", "beside RUN"),
        ("checkpoint.dir=x", "of its own"),
        ("data.ledger=false", "once"),
        ("train.stepz=9", "train.stepz"),
        ("parallelism.tp=3", "parallelism.tp=3"),
    ],
)
def test_what_a_rehearsal_decides_itself_and_what_is_wrong_is_refused(
    tmp_path: Path, override: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        rehearsal(prepared(tmp_path), override)


def test_the_model_may_be_another_one(tmp_path: Path) -> None:
    """A new run owes nothing to the checkpoints of the one that it is like."""
    assert rehearsal(prepared(tmp_path), "model.num_hidden_layers=1").hurt.model.num_hidden_layers == 1


def test_the_hurt_run_knows_what_it_is_compared_with(tmp_path: Path) -> None:
    whole, hurt = prepared(tmp_path, "run.name=whole"), prepared(tmp_path, "run.name=hurt")
    pair = RehearsalPair("first", whole, hurt)
    write_pair(pair)
    assert read_pair(hurt) == pair
    assert read_pair(whole) is None
    whole.config.unlink()
    with pytest.raises(ConfigError, match="is gone"):
        read_pair(hurt)
    hurt.rehearsal.write_text("{")
    with pytest.raises(ConfigError, match="rehearse again"):
        read_pair(hurt)
