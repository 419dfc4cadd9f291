"""The peak that MFU is measured against: stated, tabled or measured, and the cache of the measurement."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conf.schema import ClusterConfig, Config
from orchestra.train import metrics

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(metrics, "_BUDGET_PER_SIZE_S", 0.02)  # enough for a test
    monkeypatch.setattr(metrics, "_is_busy", lambda: False)  # whatever else runs beside the tests
    return tmp_path / "orchestra" / "cpu_peak.json"


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_measured_peak_is_not_below_a_product_timed_here() -> None:
    # Half of it, at one of some times: other work comes and goes between the two.
    assert any(metrics._measure(torch.float32, num_threads=1) > 0.5 * _timed_here() for _ in range(8))


def _timed_here() -> float:
    threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.rand(512, 512)
        return 2 * 512**3 / min(seconds(lambda: matrix @ matrix) for _ in range(20))
    finally:
        torch.set_num_threads(threads_before)


def test_the_measurement_is_kept_by_processor_type_threads_and_version(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads_before = torch.get_num_threads()
    metrics.measured_cpu_peak_flops(torch.float32, 1)
    assert torch.get_num_threads() == threads_before
    (key, value), *others = json.loads(cache.read_text()).items()
    assert others == []
    assert "torch.float32" in key
    assert "1 threads" in key
    assert torch.__version__ in key
    monkeypatch.delattr(metrics, "_measure")
    assert metrics.measured_cpu_peak_flops(torch.float32, 1) == value["flops"]


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"key": "fast"}', "null"])
def test_a_corrupted_cache_is_measured_again(cache: Path, content: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(content)
    assert metrics.measured_cpu_peak_flops(torch.float32, 1) > 0
    assert len(json.loads(cache.read_text())) == 1


def test_a_wrong_number_in_the_cache_is_measured_again(cache: Path) -> None:
    metrics.measured_cpu_peak_flops(torch.float32, 1)
    (key,) = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: {"flops": -1.0, "is_sure": True}}))
    assert metrics.measured_cpu_peak_flops(torch.float32, 1) > 0


def test_what_a_busy_machine_reached_serves_until_it_is_quiet(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics.measured_cpu_peak_flops(torch.float32, 1)
    (key,) = json.loads(cache.read_text())
    too_low = {"flops": 1.0, "is_sure": False}
    cache.write_text(json.dumps({key: too_low}))
    monkeypatch.setattr(metrics, "_is_busy", lambda: True)
    assert metrics.measured_cpu_peak_flops(torch.float32, 1) == 1.0
    monkeypatch.setattr(metrics, "_is_busy", lambda: False)
    assert metrics.measured_cpu_peak_flops(torch.float32, 1) > 1e9
    assert json.loads(cache.read_text())[key]["is_sure"]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert metrics.measured_cpu_peak_flops(torch.float32, 1) > 0


def test_a_stated_peak_beats_everything() -> None:
    config = Config(cluster=ClusterConfig(peak_tflops=12.5, hardware="h100"))
    assert metrics.device_peak_flops(config, CPU) == 12.5e12


def test_named_hardware_beats_measuring(cache: Path) -> None:
    config = Config(cluster=ClusterConfig(hardware="h100"))
    assert metrics.device_peak_flops(config, CPU) is not None
    assert not cache.exists()


def test_a_cpu_without_either_is_measured(cache: Path) -> None:
    assert metrics.device_peak_flops(Config(), CPU) == metrics.measured_cpu_peak_flops(
        torch.float32, torch.get_num_threads()
    )
    assert cache.exists()


def test_a_device_that_nobody_knows_has_no_peak() -> None:
    assert metrics.device_peak_flops(Config(), torch.device("meta")) is None
