"""Profiles of hardware: how they are kept, what they do to a case, and what a CPU's ranks share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import case

from conf.schema import PrecisionName
from orchestra.config.compose import compose
from orchestra.config.situation import Situation
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of, for_planning
from orchestra.plan.cpu import keep_rates, known_rates, measured_profile, usual_profile
from orchestra.plan.prediction import predict
from orchestra.plan.profiles import Profile, cpu_device, read_profile, with_profile, write_profile

CPU = usual_profile({"fp32": 1e11}, {"product_flops.fp32": 8e10}, cores=4, memory_bytes=32e9)


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_profile(tmp_path / "cpu.json", CPU)
    assert read_profile(tmp_path / "cpu.json") == CPU


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not a profile"),
        ("[]", "not a profile"),
        ('{"profile": 2}', "not a profile of version 1"),
        ('{"profile": 1, "device": "cpu", "constants": {"step_s": 0}, "peak_flops": {}}', "above 0"),
        ('{"profile": 1, "wheels": 4}', "wheels"),
    ],
)
def test_what_is_no_profile_is_told_with_what_writes_one(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=told) as caught:
        read_profile(tmp_path / "x.json")
    assert "orchestra plan --calibrate" in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "missing.json")


def test_ranks_share_a_nodes_cores() -> None:
    def product_flops(ranks: int, threads: int) -> float:
        return cpu_device(CPU, ranks, threads, PrecisionName.fp32).product_flops

    assert product_flops(1, 4) == 4 * product_flops(1, 1) == 4 * product_flops(4, 1)
    # Eight ranks on four cores have half a core each.
    assert product_flops(8, 1) == product_flops(4, 1) / 2
    assert cpu_device(CPU, 8, 1, PrecisionName.fp32).memory_bytes == 4e9


def test_a_precision_without_figures_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision=bf16: the profile has figures for fp32 only"):
        cpu_device(CPU, 1, 1, PrecisionName.bf16)


def test_a_gpus_profile_takes_the_place_of_its_constants_and_of_nothing_else() -> None:
    usual = case(precision="bf16")
    constants = {"product_flops.bf16": 2 * usual.device.product_flops, "step_s": 0.1}
    faster = with_profile(usual, Profile("h100", constants, {"bf16": usual.device.peak_flops}, source="runs"))
    assert faster.device.product_flops == 2 * usual.device.product_flops
    assert faster.framework.step_s == 0.1
    assert faster.framework.source == "runs"
    assert replace(faster.device, product_flops=usual.device.product_flops) == usual.device


def test_a_plan_for_cpus_takes_a_profile_by_its_file(tmp_path: Path) -> None:
    write_profile(tmp_path / "cpu.json", CPU)
    overrides = for_planning([f"cluster.hardware={tmp_path}/cpu.json", "cluster.gpus_per_node=2"])
    found = predict(case_of(compose(overrides, Situation("plan")).config))
    assert found.case.device.name == "cpu"
    assert found.case.layout.world_size == 2
    # Four cores, two ranks: two threads each.
    assert found.case.device.peak_flops == 2e11
    assert 0 < found.mfu < 1


def test_a_plan_for_cpus_without_a_profile_needs_rates_that_were_measured_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="has not been measured for precision=fp32"):
        measured_profile("fp32")
    rates = {"peak_flops": 1e11, "memory_bytes_per_s": 1e10, "fixed_bytes": 3e8}
    keep_rates("fp32", rates)
    keep_rates("bf16", {**rates, "peak_flops": 2e11})
    assert known_rates("fp32") == rates
    assert measured_profile("bf16").peak_flops == {"bf16": 2e11}
