"""The rows of metrics.jsonl: rates, utilizations, goodput, and which rows count after a rollback."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from conf.schema import Config, ModelConfig, Recompute, TrainConfig
from orchestra.run.events import EventWriter, node_writer, read_events
from orchestra.run.files import JsonLinesWriter, Record
from orchestra.run.metrics_file import METRIC_KEYS, read_metrics, rows_that_count
from orchestra.run.paths import RunDir
from orchestra.sizes.flops import (
    hardware_flops_per_token,
    model_flops_per_token,
    model_flops_per_token_causal,
)
from orchestra.train.metrics import (
    Meter,
    MeterSettings,
    Totals,
    initial_totals,
    memory_peak_bytes,
    meter_settings,
)

CPU = torch.device("cpu")


def make_meter(peak: float | None = 1e12, num_devices: int = 4, past: Totals | None = None) -> Meter:
    settings = MeterSettings(
        model_flops=6_000_000,
        model_flops_causal=5_000_000,
        hardware_flops=8_000_000,
        num_devices=num_devices,
        peak_flops_per_s=peak,
        device=CPU,
    )
    return Meter(settings, past or Totals(started_at=time.time() - 10, tokens=0, productive_s=0.0))


def make_row(meter: Meter, step: int) -> Record:
    return meter.row(step, loss=2.5, grad_norm=0.7, lr=1e-3)


def test_row_has_the_contracts_keys_in_order() -> None:
    meter = make_meter()
    meter.add_step(0.5, 0.01, 1000)
    assert tuple(make_row(meter, 1)) == METRIC_KEYS


def test_rates_are_means_over_the_steps_since_the_last_row() -> None:
    meter = make_meter()
    meter.add_step(9.0, 9.0, 1000)
    make_row(meter, 1)
    meter.add_step(0.2, 0.05, 1000)
    meter.add_step(0.3, 0.15, 1000)
    row = make_row(meter, 3)
    assert row["step_time_s"] == pytest.approx(0.25)
    assert row["data_time_s"] == pytest.approx(0.1)
    assert row["tokens_per_s"] == pytest.approx(4000)
    assert row["tokens_per_s_per_device"] == pytest.approx(1000)
    assert row["tokens"] == 3000
    assert isinstance(row["tokens"], int)


def test_utilization_is_flops_per_token_times_rate_over_peak() -> None:
    meter = make_meter(peak=4e10)
    meter.add_step(1.0, 0.0, 4000)
    row = make_row(meter, 1)
    assert row["mfu"] == pytest.approx(6_000_000 * 1000 / 4e10)
    assert row["mfu_causal"] / row["mfu"] == pytest.approx(5 / 6)
    assert row["hfu"] / row["mfu"] == pytest.approx(8 / 6)
    assert row["mfu_convention"] == "palm"


def test_utilization_is_null_without_a_known_peak() -> None:
    meter = make_meter(peak=None)
    meter.add_step(1.0, 0.0, 4000)
    row = make_row(meter, 1)
    assert (row["mfu"], row["mfu_causal"], row["hfu"]) == (None, None, None)
    assert row["tokens_per_s"] == 4000


def test_settings_come_from_the_formulas_of_the_model() -> None:
    config = Config(model=ModelConfig(), train=TrainConfig(seq_len=128, recompute=Recompute.full))
    settings = meter_settings(config, num_devices=2, peak_flops_per_s=1e12, device=CPU)
    assert settings.model_flops == model_flops_per_token(config.model, 128)
    assert settings.model_flops_causal == model_flops_per_token_causal(config.model, 128)
    assert settings.hardware_flops == hardware_flops_per_token(config.model, 128, Recompute.full)
    assert settings.hardware_flops > settings.model_flops > settings.model_flops_causal


def test_goodput_is_time_in_steps_that_count_over_time_since_the_first_attempt() -> None:
    meter = make_meter(past=Totals(started_at=time.time() - 100, tokens=7000, productive_s=30.0))
    meter.add_step(20.0, 0.0, 1000)
    row = make_row(meter, 8)
    assert row["goodput"] == pytest.approx(0.5, rel=1e-3)
    assert row["tokens"] == 8000


def test_the_wall_time_begins_with_the_first_submission(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    JsonLinesWriter(run.event_file(node_writer(1, 0))).write(
        {"time": 50.0, "attempt": 1, "event": "attempt_started"}
    )
    assert initial_totals(run).started_at == 50.0
    JsonLinesWriter(run.event_file("submit.7")).write({"time": 40.0, "attempt": 0, "event": "submitted"})
    assert initial_totals(run).started_at == 40.0
    # A member of a sweep has no event of its submission.
    run.record.write_text(json.dumps({"jobs": [{"submitted": 30.0}, {"submitted": 90.0}]}))
    assert initial_totals(run).started_at == 30.0


def test_floats_keep_full_precision_in_the_file(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    meter = make_meter()
    meter.add_step(0.1, 0.0, 3)
    row = meter.row(1, loss=0.1 + 0.2, grad_norm=1 / 3, lr=2e-5 / 7)
    writer = JsonLinesWriter(run.metrics)
    writer.write(row)
    writer.close()
    assert read_metrics(run) == [row]


def test_totals_go_on_where_an_earlier_attempt_s_stood() -> None:
    first = make_meter(past=Totals(started_at=1.7e9, tokens=7000, productive_s=30.0))
    first.add_step(0.25, 0.0, 1000)
    assert first.totals() == Totals(started_at=1.7e9, tokens=8000, productive_s=30.25)
    second = make_meter(past=first.totals())
    second.add_step(0.5, 0.0, 1000)
    assert make_row(second, 9)["tokens"] == 9000
    assert second.totals().productive_s == 30.75


def test_a_run_that_begins_late_counts_from_its_first_attempt(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for attempt in range(2):
        EventWriter(run, node_writer(attempt, 0), attempt).write("attempt_started")
    totals = initial_totals(run)
    assert (totals.tokens, totals.productive_s) == (0, 0.0)
    assert totals.started_at == read_events(run)[0]["time"]


def test_retrained_steps_replace_earlier_rows_and_void_the_later_ones() -> None:
    before = [{"step": step, "loss": 1.0} for step in range(1, 41)]
    after = [{"step": step, "loss": 2.0} for step in range(31, 36)]
    rows = rows_that_count([*before, *after])
    assert [row["step"] for row in rows] == list(range(1, 36))
    assert [row["loss"] for row in rows] == [1.0] * 30 + [2.0] * 5


def test_a_missing_file_has_no_rows_and_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert read_metrics(run) == []
    run.metrics.write_text('{"step":1,"loss":1.0}\n{"step":2,"lo')
    assert [row["step"] for row in read_metrics(run)] == [1]


def test_memory_of_a_cpu_rank_is_its_largest_resident_size() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    kernel_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    assert memory_peak_bytes(CPU) == pytest.approx(kernel_kib * 1024, rel=0.05)


def test_a_step_and_its_row_cost_less_than_a_hundredth_of_a_fifty_millisecond_step(tmp_path: Path) -> None:
    meter, writer = make_meter(), JsonLinesWriter(tmp_path / "metrics.jsonl")
    costs = []
    for step in range(300):
        began = time.perf_counter()
        meter.add_step(0.05, 0.0, 1000)
        writer.write(make_row(meter, step))
        costs.append(time.perf_counter() - began)
    writer.close()
    assert sorted(costs)[len(costs) // 2] < 0.05 / 100
