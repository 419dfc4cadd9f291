"""`orchestra plan --scan`: what layouts of runs reached, read from run directories as runs leave them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from support.command_line import CommandLine

from conf.schema import Config
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import EXIT_USAGE
from orchestra.plan.assemble import case_of
from orchestra.plan.predict import predict
from orchestra.report.layouts import ScannedRun, best_of, by_workload, read_run
from orchestra.run.config_file import write_config
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir, Sweep, SweepDir, SweepMember, to_json

H100 = [
    *("cluster=slurm", "cluster.device=cuda", "cluster.gpus_per_node=8", "cluster.hardware=h100"),
    *("model=llama_1b", "precision=bf16", "data=stdlib", "train.seq_len=4096", "train.global_batch_size=64"),
]


@cache
def config(*overrides: str) -> Config:
    return compose([*H100, *overrides], Situation("plan")).config


def leave(path: Path, of: Config, rates: list[float], *, begin: float = 100.0, **event: object) -> RunDir:
    """Write the files that a run leaves which logged these rates, one second apart."""
    run = RunDir(path)
    path.mkdir(parents=True, exist_ok=True)
    write_config(run.config, of)
    cluster = {"nodes": of.cluster.nodes, "ranks_per_node": of.cluster.gpus_per_node, **event}
    started = {"time": begin, "attempt": 0, "event": "attempt_started", **cluster}
    JsonLinesWriter(run.event_file("agent")).write(started)
    metrics = JsonLinesWriter(run.metrics)
    for step, rate in enumerate(rates, start=1):
        row = {"step": step, "time": begin + step, "tokens_per_s_per_device": rate, "mfu": rate / 1e5}
        metrics.write({**row, "memory_peak_bytes": (step + 10) << 30})
    return run


def read_at(run: RunDir) -> ScannedRun:
    return read_run(run, 1000.0)


def test_a_run_is_measured_after_its_first_rows_and_predicted_as_configured(tmp_path: Path) -> None:
    of = config("parallelism.tp=2", "train.micro_batch_size=4")
    run = read_at(leave(tmp_path / "one", of, [1.0, 2.0, 3.0, 40.0, 60.0, 50.0]))
    assert run.tokens_per_s_per_device == 50.0
    assert run.mfu == pytest.approx(50.0 / 1e5)
    assert run.peak_memory_bytes == 16 << 30
    assert (run.layout.mesh.dp, run.layout.mesh.tp, run.workload.num_devices) == (4, 2, 8)
    assert (run.layout.micro_batch_size, run.layout.accumulation) == (4, 4)
    assert run.prediction == predict(case_of(of))


def test_only_the_last_attempt_counts_with_what_it_found_for_auto(tmp_path: Path) -> None:
    auto = replace(config(), cluster=replace(config().cluster, gpus_per_node="auto"))
    leave(tmp_path / "one", auto, [9.0] * 8, begin=100.0, ranks_per_node=8)
    run = read_at(leave(tmp_path / "one", auto, [5.0] * 8, begin=200.0, ranks_per_node=4))
    assert run.tokens_per_s_per_device == 5.0
    assert run.layout.mesh.dp == run.workload.num_devices == 4


def test_what_cannot_be_predicted_or_never_trained_says_so_in_eighty_columns(
    tmp_path: Path, orchestra: CommandLine
) -> None:
    unknown = replace(config(), cluster=replace(config().cluster, hardware="auto"))
    trained = leave(tmp_path / "a-run-whose-name-says-all-that-it-was-for", unknown, [7.0])
    run = read_at(trained)
    assert (run.tokens_per_s_per_device, run.prediction) == (7.0, None)
    assert "cluster.hardware=auto" in (run.unpredicted or "")
    silent = leave(tmp_path / "another-run-whose-name-says-all-that-it-was-for", unknown, [])
    assert read_at(silent).tokens_per_s_per_device is None
    assert (read_at(silent).problem or "").startswith("no step was logged")
    text = orchestra("plan", "--scan", str(trained.path), str(silent.path)).out
    assert max(len(line) for line in text.splitlines()) <= 80
    words = " ".join(text.split())
    assert "not predicted: cluster.hardware=auto" in words
    assert "keys above count where a run is started" in words


def test_layouts_are_compared_where_model_batch_and_devices_are_the_same(tmp_path: Path) -> None:
    runs = [
        read_at(leave(tmp_path / "slow", config("parallelism.zero=3"), [10.0] * 5)),
        read_at(leave(tmp_path / "fast", config(), [30.0] * 5)),
        read_at(leave(tmp_path / "silent", config("parallelism.tp=8"), [])),
        read_at(leave(tmp_path / "more", config("cluster.nodes=2"), [20.0] * 5)),
        read_at(leave(tmp_path / "longer", config("train.seq_len=8192"), [90.0] * 5)),
    ]
    places = by_workload(runs)
    names = [[run.name for run in runs] for runs in places.values()]
    assert names == [["fast", "slow", "silent"], ["more"], ["longer"]]
    assert [run.name for run in best_of(places).values()] == ["fast", "more", "longer"]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """A sweep of four layouts, of which one never trained."""
    variants = ["parallelism.zero=0", "parallelism.zero=1", "parallelism.tp=2", "parallelism.tp=8"]
    folder = SweepDir(tmp_path / "runs" / "layouts")
    members = tuple(SweepMember(index, f"s{index}", (key,)) for index, key in enumerate(variants))
    for index, key in enumerate(variants):
        rates = [] if index == 3 else [1000.0 * (index + 1)] * 5
        leave(folder.member(index).path, config(key), rates)
    folder.record.write_text(to_json(Sweep("layouts", "s", (), members)))
    return tmp_path / "runs"


def test_a_sweep_becomes_a_table_and_a_map_and_json_has_measured_beside_predicted(
    sweep: Path, orchestra: CommandLine
) -> None:
    (place,) = orchestra.json("plan", "--scan", str(sweep / "layouts"))["places"]
    assert (place["num_devices"], len(place["runs"])) == (8, 4)
    fastest = place["runs"][0]
    assert (fastest["tokens_per_s_per_device"], fastest["tp"]) == (3000.0, 2)
    assert fastest["predicted_tokens_per_s_per_device"] > 0
    assert fastest["predicted_peak_memory_bytes"] > 0
    leave(sweep / "larger", config("cluster.nodes=2"), [2000.0] * 5)
    text = orchestra("plan", "--scan", "layouts", "larger", "--dir", str(sweep)).out
    assert max(len(line) for line in text.splitlines()) <= 80
    rows = [line.split() for line in text.splitlines()]
    assert ["4", "2", "0", "8×2", "3.00k", "3.0%", "15.0"] in [row[:7] for row in rows]
    for words in ("no step was logged", "8 devices", "16 devices"):
        assert words in text


def test_what_is_no_run_is_refused(tmp_path: Path, orchestra: CommandLine) -> None:
    scan = ("plan", "--scan", "nothing", "--dir", str(tmp_path))
    assert "there is no run in" in orchestra(*scan, code=EXIT_USAGE).err
    assert "--dir belongs to --scan" in orchestra("plan", "--dir", str(tmp_path), code=EXIT_USAGE).err
