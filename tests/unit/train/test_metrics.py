"""The rows of metrics.jsonl, which of them count, and the peak that MFU is measured against."""

from __future__ import annotations

import json
import os
import time
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from checkpointing.lineage import AttemptBegin, Base, Lineage
from conf.schema import ClusterConfig, Config, ModelConfig, ParallelismConfig, Recompute, TrainConfig
from orchestra.data.loader import Batch
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.files import JsonLinesWriter, Record
from orchestra.run.metrics_file import METRIC_KEYS, rows_that_count
from orchestra.run.paths import RunDir
from orchestra.sizes import hardware
from orchestra.sizes.flops import (
    hardware_flops_per_token,
    model_flops_per_token,
    model_flops_per_token_causal,
)
from orchestra.sizes.topology import StepBatches
from orchestra.train import metrics
from orchestra.train.hooks import StepResult, TrainedStep
from orchestra.train.metrics import (
    Meter,
    MeterSettings,
    MetricsLog,
    Totals,
    initial_totals,
    memory_peak_bytes,
    meter_settings,
)
from orchestra.train.watch.bad_losses import OverflowLog
from orchestra.train.watch.callbacks import Callbacks

CPU = torch.device("cpu")


def make_meter(peak: float | None = 1e12, past: Totals | None = None) -> Meter:
    settings = MeterSettings(
        model_flops=6_000_000,
        model_flops_causal=5_000_000,
        hardware_flops=8_000_000,
        num_devices=4,
        peak_flops_per_s=peak,
        device=CPU,
    )
    return Meter(settings, past or Totals(started_at=time.time() - 10, tokens=0, productive_s=0.0))


def make_row(meter: Meter, step: int) -> Record:
    return meter.row(step, loss=2.5, grad_norm=0.7, lr=1e-3)


def test_rates_are_means_over_the_steps_since_the_last_row() -> None:
    meter = make_meter()
    meter.add_step(9.0, 9.0, 1000)
    make_row(meter, 1)
    meter.add_step(0.2, 0.05, 1000)
    meter.add_step(0.3, 0.15, 1000)
    row = make_row(meter, 3)
    assert tuple(row) == METRIC_KEYS
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
    # Null without a known peak.
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


@pytest.mark.parametrize("cp", [1, 2])
def test_selective_recomputation_repeats_attention_only_of_sequences_that_are_cut(cp: int) -> None:
    train = TrainConfig(seq_len=128, recompute=Recompute.selective)
    config = Config(model=ModelConfig(), train=train, parallelism=ParallelismConfig(cp=cp))
    settings = meter_settings(config, num_devices=2, peak_flops_per_s=1e12, device=CPU)
    model = config.model
    attention = 4 * model.num_hidden_layers * model.hidden_size * 128
    assert settings.hardware_flops == settings.model_flops + (attention if cp > 1 else 0)


def test_totals_and_goodput_go_on_where_an_earlier_attempt_s_stood() -> None:
    past = Totals(started_at=time.time() - 100, tokens=7000, productive_s=30.0)
    first = make_meter(past=past)
    first.add_step(20.0, 0.0, 1000)
    row = make_row(first, 8)
    # The time in steps that count over the time since the first attempt.
    assert row["goodput"] == pytest.approx(0.5, rel=1e-3)
    assert row["tokens"] == 8000
    assert first.totals() == Totals(past.started_at, tokens=8000, productive_s=50.0)
    second = make_meter(past=first.totals())
    second.add_step(0.5, 0.0, 1000)
    assert make_row(second, 9)["tokens"] == 9000
    assert second.totals().productive_s == 50.5


def test_the_wall_time_begins_with_the_first_submission(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    # A run that begins late counts from its first attempt.
    for time_s, attempt in ((50.0, 0), (60.0, 1)):
        record = {"time": time_s, "attempt": attempt, "event": "attempt_started"}
        JsonLinesWriter(run.event_file(node_writer(attempt, 0))).write(record)
    assert initial_totals(run) == Totals(started_at=50.0, tokens=0, productive_s=0.0)
    JsonLinesWriter(run.event_file("submit.7")).write({"time": 40.0, "attempt": 0, "event": "submitted"})
    assert initial_totals(run).started_at == 40.0
    # A member of a sweep has no event of its submission.
    run.record.write_text(json.dumps({"jobs": [{"submitted": 30.0}, {"submitted": 90.0}]}))
    assert initial_totals(run).started_at == 30.0


def test_retrained_steps_replace_earlier_rows_and_void_the_later_ones() -> None:
    before = [{"step": step, "loss": 1.0} for step in range(1, 41)]
    after = [{"step": step, "loss": 2.0} for step in range(31, 36)]
    rows = rows_that_count([*before, *after])
    assert [row["step"] for row in rows] == list(range(1, 36))
    assert [row["loss"] for row in rows] == [1.0] * 30 + [2.0] * 5


def test_rows_that_a_replaced_attempt_logs_late_change_nothing() -> None:
    before = [{"step": step, "loss": 1.0, "attempt": 0} for step in range(1, 41)]
    after = [{"step": step, "loss": 2.0, "attempt": 1} for step in range(31, 36)]
    late = [{"step": step, "loss": 3.0, "attempt": 0} for step in range(33, 50)]
    begun = Lineage.of([AttemptBegin(1, Base(30, 0))])
    expected = [1.0] * 30 + [2.0] * 5
    assert [row["loss"] for row in rows_that_count([*before, *after, *late], begun)] == expected
    # Before the new attempt has logged anything the run stands where that began.
    assert [row["step"] for row in rows_that_count([*before, *late], begun)] == list(range(1, 31))


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


def test_a_disk_that_takes_no_row_ends_no_training(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    train = TrainConfig(global_batch_size=1)
    no_overflows = OverflowLog(None, EventWriter(RunDir(tmp_path), "rank", 0))
    log = MetricsLog(
        make_meter(), JsonLinesWriter(path), no_overflows, StepBatches(train, dp=1), Callbacks([])
    )
    scalar = torch.tensor(2.0)
    result = StepResult(scalar, scalar, torch.tensor(data=False), lr=1e-3)
    batch = Batch(torch.zeros(1, 1, 2, dtype=torch.int64), np.zeros((1, 1), dtype=np.int64), 1)
    for step in (1, 2):
        trained = TrainedStep(step, batch, result, time.perf_counter(), 0.0)
        log.add(trained, is_logged=True, num_skipped=0)
    log.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(metrics, "_BUDGET_PER_SIZE_S", 0.02)  # enough for a test
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0,) * 3)  # whatever else runs beside the tests
    return tmp_path / "orchestra" / "cpu_peak.json"


def measured() -> float:
    return metrics.measured_cpu_peak_flops(torch.float32, 1)


@pytest.mark.usefixtures("cache")
def test_measured_peak_is_not_below_a_product_timed_here() -> None:
    # Half of it, at one of some times: other work comes and goes between the two.
    assert any(metrics._measure(torch.float32, num_threads=1) > 0.5 * _timed_here() for _ in range(8))


def _timed_here() -> float:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.rand(512, 512)
        return 2 * 512**3 / min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=20))
    finally:
        torch.set_num_threads(threads_before)


def test_the_measurement_is_kept_by_processor_type_threads_and_version(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_before = torch.get_num_threads()
    measured()
    assert torch.get_num_threads() == threads_before
    ((key, value),) = json.loads(cache.read_text()).items()
    assert all(part in key for part in ("torch.float32", "1 threads", torch.__version__))
    monkeypatch.delattr(metrics, "_measure")
    assert measured() == value["flops"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"key": "fast"}', "null", None])
def test_a_cache_of_something_else_is_measured_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(metrics, "_measure", lambda *_: 5.0)
    measured()
    # None: the entry of this machine, with a number that no machine has.
    (key,) = json.loads(cache.read_text())
    wrong = json.dumps({key: {"flops": -1.0, "is_sure": True}})
    cache.write_text(wrong if content is None else content)
    assert measured() == 5.0
    assert list(json.loads(cache.read_text())) == [key]


def test_what_a_busy_machine_reached_serves_until_it_is_quiet(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured()
    (key,) = json.loads(cache.read_text())
    too_low = {"flops": 1.0, "is_sure": False}
    cache.write_text(json.dumps({key: too_low}))
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3,) * 3)
    assert measured() == 1.0
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0,) * 3)
    assert measured() > 1e9
    assert json.loads(cache.read_text())[key]["is_sure"]


@pytest.mark.usefixtures("cache")
def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert measured() > 0


def test_a_stated_peak_beats_the_table_and_that_beats_measuring(cache: Path) -> None:
    def peak(device: torch.device = CPU, **cluster: Any) -> float | None:
        return metrics.device_peak_flops(Config(cluster=ClusterConfig(**cluster)), device)

    assert peak(peak_tflops=12.5, hardware="h100") == 12.5e12
    assert peak(hardware="h100") == hardware.peak_flops("h100", "fp32")
    assert not cache.exists()
    assert peak() == metrics.measured_cpu_peak_flops(torch.float32, torch.get_num_threads())
    assert cache.exists()
    # Nobody knows such a device.
    assert peak(torch.device("meta")) is None
