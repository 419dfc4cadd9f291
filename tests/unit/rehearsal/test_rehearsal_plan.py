"""Which faults a rehearsal plans, and the two configurations that it makes of a run that was prepared."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Config, Device, LauncherName, Requeue, WandbMode
from orchestra.config.compose import compose
from orchestra.config.machine import Situation, signature
from orchestra.config.rules.all_rules import problems_of
from orchestra.errors import ConfigError
from orchestra.rehearsal.prepare_rehearsal import (
    FaultSchedule,
    Rehearsal,
    RehearsalPair,
    asked_fault,
    entry,
    fault_schedule,
    planned_rehearsal,
    read_pair,
    rehearsed_config,
    usual_faults,
    write_pair,
)
from orchestra.run.config_file import read_config
from orchestra.run.paths import RunDir, SweepDir
from orchestra.submit.new_run import RunRequest, planned_run, prepare

SLURM = {"launcher": LauncherName.slurm, "device": Device.cpu, "gpus_per_node": 2}


def config(min_nodes: int | None = None, **cluster: Any) -> Config:
    base = Config()
    place = {"device": Device.cpu, "gpus_per_node": 2, **cluster}
    recovery = dataclasses.replace(base.recovery, min_nodes=min_nodes)
    return dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, **place), recovery=recovery)


@pytest.mark.parametrize(
    ("of", "more"),
    [
        (config(), []),
        (config(**SLURM), ["agent_kill"]),
        (config(**SLURM, nodes=2), ["agent_kill", "node_down"]),
        (config(**SLURM, nodes=2, requeue=Requeue.never), ["agent_kill"]),
        (config(**SLURM, nodes=2, spare_nodes=1, requeue=Requeue.never), ["agent_kill", "node_down"]),
        (config(1, **SLURM, nodes=2, requeue=Requeue.never), ["agent_kill", "node_down"]),
    ],
    ids=["here", "one node", "requeue", "nothing that helps", "spare", "fewer nodes"],
)
def test_what_is_rehearsed_follows_from_what_the_layout_allows(of: Config, more: list[str]) -> None:
    assert [asked.fault.name for asked in usual_faults(of)] == ["sigkill", "hang", *more]


def with_faults(of: Config, schedule: FaultSchedule) -> Config:
    return dataclasses.replace(
        of,
        train=dataclasses.replace(of.train, steps=schedule.steps),
        checkpoint=dataclasses.replace(of.checkpoint, every_steps=schedule.every_steps),
        recovery=dataclasses.replace(of.recovery, inject=[entry(fault) for fault in schedule.faults]),
    )


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
@pytest.mark.parametrize("steps", [None, 20, 24, 50, 333])
def test_each_fault_has_an_attempt_and_committed_steps_of_its_own(nodes: int, steps: int | None) -> None:
    of = config(**SLURM, nodes=nodes)
    schedule = fault_schedule(usual_faults(of), of, steps)
    assert [fault.attempt for fault in schedule.faults] == list(range(len(schedule.faults)))
    at = [fault.at_step for fault in schedule.faults]
    # At least two saves before the first one and between two, and steps after the last one.
    for before, after in pairwise([0, *at, schedule.steps + schedule.every_steps]):
        assert (after - 1) // schedule.every_steps - before // schedule.every_steps >= 2
    assert problems_of(with_faults(of, schedule), Situation("submit")) == []


@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_no_host_is_hit_twice_in_a_row_and_the_first_one_never_goes_down(nodes: int, number: int) -> None:
    of = config(**SLURM, nodes=nodes)
    hit = [(fault.rank or 0) // 2 for fault in fault_schedule(usual_faults(of)[-number:], of, None).faults]
    assert all(before != after for before, after in pairwise(hit))
    assert hit[-1] > 0


def test_what_is_asked_for_is_planned_as_it_was_typed_in_the_order_of_steps() -> None:
    asked = [asked_fault(text) for text in ("gil@40:3", "sigkill@12:0", "segfault@60")]
    schedule = fault_schedule(asked, config(**SLURM, nodes=2), 100)
    planned = [(fault.fault.name, fault.at_step, fault.attempt) for fault in schedule.faults]
    assert planned == [("sigkill", 12, 0), ("gil", 40, 1), ("segfault", 60, 2)]
    assert [fault.rank for fault in schedule.faults][:2] == [0, 3]
    assert schedule.steps == 100
    without_a_length = fault_schedule([asked_fault("sigkill@500:0")], config(), None)
    assert without_a_length.steps > 500


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("sigkil@3", "no such fault"),
        ("nan@3", "ends no attempt"),
        ("slow@3", "ends no attempt"),
        ("sigkill@x", "expected KIND@STEP"),
        ("sigkill@3:", "expected KIND@STEP"),
        ("sigkill@-3", "expected KIND@STEP"),
        ("", "no such fault"),
        ("node_down@9", "this machine its only node"),
        ("agent_kill@9", "this machine its only node"),
        ("sigkill@9:2", "ranks 0 to 1"),
        ("sigkill@0:1", "steps 1 to 30"),
        ("sigkill@31:1", "steps 1 to 30"),
    ],
)
def test_what_is_no_fault_or_what_layout_and_length_do_not_allow_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        fault_schedule([asked_fault(text)], config(), 30)


def test_too_few_steps_for_the_faults_are_refused_with_the_fewest() -> None:
    asked = usual_faults(config())
    with pytest.raises(ConfigError, match="need at least 9 steps"):
        fault_schedule(asked, config(), 8)
    assert fault_schedule(asked, config(), 9).every_steps == 1


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
    whole, faulty = plan.undisturbed, plan.with_faults
    assert dataclasses.replace(faulty, run=whole.run, recovery=whole.recovery) == whole
    assert whole.recovery.inject == []
    assert [(fault["fault"], fault["attempt"]) for fault in faulty.recovery.inject] == [("sigkill", 0)]
    assert dataclasses.replace(faulty.recovery, inject=[]) == whole.recovery
    assert (whole.recovery.max_restarts, whole.recovery.backoff_s) == (7, 3.0)
    for section in ("model", "cluster", "parallelism"):
        assert getattr(whole, section) == getattr(before, section)
    assert whole.train.steps == plan.schedule.steps == whole.optim.warmup_steps
    assert (whole.wandb.mode, whole.train.profile.enabled) == (WandbMode.disabled, False)
    assert whole.data.ledger


def test_they_lie_beside_the_run_under_names_that_are_free_and_begin_with_another_word(
    tmp_path: Path,
) -> None:
    run = prepared(tmp_path)
    # A new run owes nothing to the checkpoints of the one that it is like: the model may be another one.
    plan = rehearsal(run, "model.num_hidden_layers=1")
    assert plan.with_faults.model.num_hidden_layers == 1
    places = [place_of(config) for config in (plan.undisturbed, plan.with_faults)]
    assert places == [tmp_path / f"rehearsal-first-1-{name}" for name in ("undisturbed", "faults")]
    places[1].mkdir()
    assert place_of(rehearsal(run).undisturbed).name == "rehearsal-first-2-undisturbed"


def test_names_of_a_run_with_a_long_one_are_cut_to_what_a_name_may_have(tmp_path: Path) -> None:
    run = RunDir(prepared(tmp_path).path.rename(tmp_path / ("long-" * 20)))
    for number in (1, 2):
        place = place_of(rehearsal(run).undisturbed)
        assert len(place.name) == 100
        assert place.name.endswith(f"-{number}-undisturbed")
        place.mkdir()


def test_the_member_of_a_sweep_is_rehearsed_outside_of_it(tmp_path: Path) -> None:
    run = prepared(tmp_path / "grid")
    record = json.loads(run.record.read_text())
    run.record.write_text(json.dumps({**record, "sweep": "grid"}))
    SweepDir(tmp_path / "grid").record.write_text("{}")
    assert place_of(rehearsal(run).with_faults) == tmp_path / "rehearsal-grid-first-1-faults"


def test_checkpoints_elsewhere_get_a_folder_of_each_run_beside_the_runs_own(tmp_path: Path) -> None:
    run = prepared(tmp_path, "checkpoint.dir=s3://bucket/first/")
    plan = rehearsal(run)
    places = {plan.undisturbed.checkpoint.dir, plan.with_faults.checkpoint.dir}
    names = ("undisturbed", "faults")
    assert places == {f"s3://bucket/first-rehearsal-first-1-{name}" for name in names}


def test_what_a_rehearsal_decides_itself_and_what_is_wrong_is_refused(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    for override, problem in {
        "train.steps=9": "--steps",
        "recovery.inject=[]": "--fault",
        "run.name=x": "named after RUN",
        "+run.dir=x": "beside RUN",
        "checkpoint.dir=x": "of its own",
        "data.ledger=false": "once",
        "train.stepz=9": "train.stepz",
        "parallelism.tp=3": "parallelism.tp=3",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            rehearsal(run, override)


def test_the_run_with_faults_knows_what_it_is_compared_with(tmp_path: Path) -> None:
    whole, faulty = prepared(tmp_path, "run.name=whole"), prepared(tmp_path, "run.name=faulty")
    pair = RehearsalPair("first", whole, faulty)
    write_pair(pair)
    assert read_pair(faulty) == pair
    assert read_pair(whole) is None
    whole.config.unlink()
    with pytest.raises(ConfigError, match="is gone"):
        read_pair(faulty)
    faulty.rehearsal.write_text("{")
    with pytest.raises(ConfigError, match="rehearse again"):
        read_pair(faulty)
