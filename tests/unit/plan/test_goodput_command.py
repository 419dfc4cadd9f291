"""`orchestra plan --goodput` as it is typed, and the goodput line of a plain plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plan_cases import PlanCommand

from conf.schema import CheckpointConfig, ClusterConfig, Config, Device
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.paths import RunDir
from orchestra.sizes.save_interval import young_s

LAYOUT = ["model=llama3_8b", "parallelism=zero3", "precision=bf16", "cluster.nodes=16", "train.steps=100000"]
CLUSTER = ["cluster=slurm", "cluster.gpus_per_node=8", "cluster.hardware=h100", "cluster.device=cuda"]


def test_the_tables_say_what_is_assumed(plan: PlanCommand) -> None:
    text = plan.text("--goodput", *CLUSTER, *LAYOUT, "cluster.spare_nodes=1", "--restart-s", "300")
    tables = ("SAVE EVERY", "SPARES", "DEVICES", "131,072", "Young", "Daly")
    for word in (*tables, "predicted", "assumed", "given"):
        assert word in text


def test_json_holds_the_same_figures(plan: PlanCommand) -> None:
    words = ("--goodput", *CLUSTER, *LAYOUT, "--stall-s", "4", "cluster.mtbf_device_hours=8000")
    facts = plan.facts(*words)
    assert facts["mttf_s"] == pytest.approx(8000 * 3600 / 128)
    assert facts["times"]["stall_s"] == 4.0
    assert facts["sources"]["stall_s"] == "given"
    assert facts["young_s"] == pytest.approx(young_s(4.0, facts["mttf_s"]))
    assert plan.facts(*words, "--mix-seed", "5") != facts


def test_a_plain_plan_says_the_goodput_and_the_interval(plan: PlanCommand) -> None:
    text = plan.text(*CLUSTER, *LAYOUT)
    line = next(line for line in text.splitlines() if line.startswith("goodput"))
    assert "a save every 1,000 steps" in line
    assert "(best " in line
    assert "; by Daly's formula" in " ".join(text.split())
    failures = plan.facts(*CLUSTER, *LAYOUT, "checkpoint.every_steps=auto")["failures"]
    assert failures["every_steps"] == failures["best_interval"]["every_steps"]
    assert 0.9 < failures["goodput"] < 1
    unsaved = plan.text(*CLUSTER, *LAYOUT, "checkpoint.every_steps=null")
    assert "nothing is saved" in unsaved
    assert "Daly" not in unsaved


def test_where_the_policy_would_give_up_the_key_is_named(plan: PlanCommand) -> None:
    text = plan.text("--goodput", *CLUSTER, *LAYOUT, "cluster.mtbf_device_hours=100", "--restart-s", "900")
    assert "gives up" in text
    assert "recovery.max_restarts=3" in text


def trained(tmp_path: Path) -> RunDir:
    """Return a run that trained on 2 ranks, with one save and times of its own."""
    run = RunDir(tmp_path / "runs" / "first")
    run.path.mkdir(parents=True)
    cluster = ClusterConfig(gpus_per_node=2, device=Device.cpu, mtbf_device_hours=10.0)
    write_config(run.config, Config(cluster=cluster, checkpoint=CheckpointConfig(every_steps=50)))
    run.record.write_text('{"name": "first"}')
    events = EventWriter(run, rank_writer(0, 0), 0, rank=0)
    events.write("attempt_started", node=0, nodes=1)
    events.write("training_started")
    events.write("checkpoint_started", step=50, blocked_s=0.25)
    events.write("checkpoint_committed", step=50)
    rows = [{"step": step, "time": 1e10 + step, "step_time_s": 0.5} for step in (49, 50)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_run_that_trained_lends_its_times(tmp_path: Path, plan: PlanCommand) -> None:
    run = trained(tmp_path)
    facts = plan.facts("--goodput", "--like", str(run.path))
    assert (facts["times"]["step_s"], facts["times"]["stall_s"]) == (0.5, 0.25)
    assert facts["sources"]["step_s"] == "measured in first"
    assert (facts["num_devices"], facts["every_steps"]) == (2, 50)
    other = plan.facts("--goodput", "--like", str(run.path), *CLUSTER, *LAYOUT)
    assert other["sources"]["step_s"] == "predicted"
    assert (other["times"]["stall_s"], other["num_devices"]) == (0.25, 128)
    # A long name fits into eighty columns.
    named = RunDir(run.path.rename(tmp_path / "a-run-whose-name-says-all-that-it-was-for"))
    words = ("--like", str(named.path), "cluster.mtbf_device_hours=3", *CLUSTER, *LAYOUT)
    assert named.name in plan.text("--goodput", *words)


def test_devices_that_never_fail_are_reckoned_with(plan: PlanCommand) -> None:
    never = "cluster.mtbf_device_hours=1e308"
    assert plan.facts(*CLUSTER, *LAYOUT, never)["failures"]["goodput"] > 0.9
    text = plan.text("--goodput", *CLUSTER, *LAYOUT, never)
    assert " inf" not in text
    assert " nan" not in text


def test_a_run_that_never_began_lends_nothing(tmp_path: Path, plan: PlanCommand) -> None:
    empty = RunDir(tmp_path / "empty")
    empty.path.mkdir()
    empty.record.write_text("{}")
    write_config(empty.config, Config())
    assert "no attempt yet" in plan.refusal("--goodput", "--like", str(empty.path))
