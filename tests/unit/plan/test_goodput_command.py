"""`orchestra plan --goodput` as it is typed, and the goodput line of a plain plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conf.schema import CheckpointConfig, ClusterConfig, Config, Device
from orchestra.cli import main
from orchestra.errors import EXIT_USAGE
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.paths import RunDir
from orchestra.sizes.save_interval import young_s

LAYOUT = ["model=llama3_8b", "parallelism=zero3", "precision=bf16", "cluster.nodes=16", "train.steps=100000"]
CLUSTER = ["cluster=slurm", "cluster.gpus_per_node=8", "cluster.hardware=h100", "cluster.device=cuda"]


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 0
    return capsys.readouterr().out


def test_the_tables_fit_eighty_columns_and_say_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--goodput", *CLUSTER, *LAYOUT, "cluster.spare_nodes=1", "--restart-s", "300")
    assert max(len(line) for line in text.splitlines()) <= 80
    for word in (
        "SAVE EVERY",
        "SPARES",
        "DEVICES",
        "131,072",
        "predicted",
        "assumed",
        "given",
        "Young",
        "Daly",
    ):
        assert word in text


def test_json_holds_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--goodput", "--json", *CLUSTER, *LAYOUT, "--stall-s", "4", "cluster.mtbf_device_hours=8000")
    facts = json.loads(printed(capsys, *words))
    assert facts["mttf_s"] == pytest.approx(8000 * 3600 / 128)
    assert facts["times"]["stall_s"] == 4.0
    assert facts["sources"]["stall_s"] == "given"
    assert facts["young_s"] == pytest.approx(young_s(4.0, facts["mttf_s"]))
    assert 0 < facts["goodput"] < 1
    assert sum(facts["failures"].values()) == facts["num_failures"]
    assert facts["every_steps"] in [point["value"] for point in facts["intervals"]]
    accounts = facts["accounts"]
    assert sum(
        value for name, value in accounts.items() if name not in ("wall_s", "goodput")
    ) == pytest.approx(accounts["wall_s"])
    assert json.loads(printed(capsys, *words)) == facts
    assert json.loads(printed(capsys, *words, "--mix-seed", "5")) != facts


def test_a_plain_plan_says_the_goodput_and_the_interval(capsys: pytest.CaptureFixture[str]) -> None:
    line = next(it for it in printed(capsys, *CLUSTER, *LAYOUT).splitlines() if it.startswith("goodput"))
    assert "a save every 1,000 steps" in line
    assert "(best " in line
    assert len(line) <= 80
    auto = printed(capsys, *CLUSTER, *LAYOUT, "checkpoint.every_steps=auto", "--json")
    failures = json.loads(auto)["failures"]
    assert failures["every_steps"] == failures["best_interval"]["every_steps"]
    assert 0.9 < failures["goodput"] < 1
    nothing = printed(capsys, *CLUSTER, *LAYOUT, "checkpoint.every_steps=null")
    assert "nothing is saved" in nothing


def test_where_the_policy_would_give_up_the_key_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        capsys, "--goodput", *CLUSTER, *LAYOUT, "cluster.mtbf_device_hours=100", "--restart-s", "900"
    )
    assert "gives up" in text
    assert "recovery.max_restarts=3" in text
    assert max(len(line) for line in text.splitlines()) <= 80


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


def test_a_run_that_trained_lends_its_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path)
    facts = json.loads(printed(capsys, "--goodput", "--like", str(run.path), "--json"))
    assert (facts["times"]["step_s"], facts["times"]["stall_s"]) == (0.5, 0.25)
    assert facts["sources"]["step_s"] == "measured in first"
    assert (facts["num_devices"], facts["every_steps"]) == (2, 50)
    other = json.loads(printed(capsys, "--goodput", "--like", str(run.path), "--json", *CLUSTER, *LAYOUT))
    assert other["sources"]["step_s"] == "predicted"
    assert other["times"]["stall_s"] == 0.25
    assert other["num_devices"] == 128


def test_times_of_a_run_with_a_long_name_fit_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir(trained(tmp_path).path.rename(tmp_path / "a-run-whose-name-says-all-that-it-was-for"))
    text = printed(
        capsys, "--goodput", "--like", str(run.path), "cluster.mtbf_device_hours=3", *CLUSTER, *LAYOUT
    )
    assert max(len(line) for line in text.splitlines()) <= 80
    assert run.name in text


def test_devices_that_never_fail_are_reckoned_with(capsys: pytest.CaptureFixture[str]) -> None:
    never = "cluster.mtbf_device_hours=1e308"
    assert json.loads(printed(capsys, "--json", *CLUSTER, *LAYOUT, never))["failures"]["goodput"] > 0.9
    text = printed(capsys, "--goodput", *CLUSTER, *LAYOUT, never)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert " inf" not in text
    assert " nan" not in text


def test_what_means_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = RunDir(tmp_path / "runs" / "empty")
    empty.path.mkdir(parents=True)
    empty.record.write_text("{}")
    write_config(empty.config, Config())
    monkeypatch.chdir(tmp_path / "runs")
    for words, told in (
        (["--goodput", "--stall-s", "-1"], "expected seconds, 0 or more"),
        (["--goodput", "--like", str(empty.path)], "no attempt yet"),
        (["--like", "x"], "--like belongs to --goodput"),
        (["--goodput", "--like", "x"], "there is no run in runs; give its path"),
        (["--goodput", "--like", ""], "--like is empty"),
        (["--goodput", "cluster.mtbf_device_hours=0"], "cluster.mtbf_device_hours=0"),
        (["--goodput", "checkpoint.every_steps=often"], "use one, auto or null"),
    ):
        assert main(["plan", *words]) == EXIT_USAGE
        assert told in capsys.readouterr().err
