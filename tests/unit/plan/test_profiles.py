"""Profiles of hardware: how they are kept, what they do to a case, and what a CPU's ranks share."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from plan_cases import case

from conf.schema import Device, PrecisionName
from orchestra.cli.plan import configuration
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of, shape_of
from orchestra.plan.calibrate import starting_cpu_profile
from orchestra.plan.devices import device
from orchestra.plan.predict import predict
from orchestra.plan.profiles import Profile, cpu_device, read_profile, while_busy, with_profile, write_profile
from orchestra.sizes.hardware import TABLE

CPU = starting_cpu_profile({"fp32": 1e11}, {"product_flops.fp32": 8e10}, cores=4, memory_bytes=32e9)


def test_a_profile_comes_back_as_it_was_written_and_must_be_there(tmp_path: Path) -> None:
    write_profile(tmp_path / "cpu.json", CPU)
    assert read_profile(tmp_path / "cpu.json") == CPU
    with pytest.raises(ConfigError, match="No such file"):
        read_profile(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not a profile"),
        ("null", "found null; expected an object"),
        ('{"profile": 2}', "not a profile of version 1"),
        ('{"profile": 1, "device": "cpu", "constants": {"step_s": 0}, "peak_flops": {}}', "above 0"),
        ('{"profile": 1, "wheels": 4}', "wheels"),
        ('{"profile": 1, "device": 5, "constants": {}, "peak_flops": {}}', "device: found 5"),
        ('{"profile": 1, "device": "h100", "peak_flops": []}', r"constants: missing[\s\S]*peak_flops: found"),
    ],
)
def test_what_is_no_profile_is_refused_with_what_writes_one(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        read_profile(tmp_path / "x.json")
    assert "orchestra plan --calibrate" in str(caught.value)


def test_all_that_is_wrong_in_a_profile_is_said_at_once(tmp_path: Path) -> None:
    constants = {**CPU.constants, "step_s": float("inf"), "host_layer_s": True, "wheels": 1.0}
    del constants["memory_bytes_per_s"]
    profile = {"profile": 1, **asdict(CPU), "constants": constants, "peak_flops": {"fp32": None}}
    profile |= {"cores": "4", "memory_bytes": -3, "source": None, "residuals": [{"run": "a"}]}
    file = tmp_path / "x.json"
    file.write_text(json.dumps(profile))
    with pytest.raises(ConfigError) as caught:
        read_profile(file)
    problems = caught.value.problems
    assert all(problem.startswith(f"cluster.hardware={file}: ") for problem in problems)
    for words in (
        'cores: found "4"; expected a whole number above 0',
        "memory_bytes: found -3; expected a number above 0",
        "source: found null; expected a text",
        'residuals: found [{"run": "a"}]; expected a list of residuals',
        "constants.memory_bytes_per_s: missing; expected a number above 0",
        "constants.step_s: found Infinity; expected a number above 0",
        "constants.host_layer_s: found true; expected a number above 0",
        "constants.wheels: there is no such key",
        "peak_flops.fp32: found null; expected a number above 0",
    ):
        assert sum(words in problem for problem in problems) == 1, words
    assert len(problems) == 9


def test_ranks_share_a_nodes_cores() -> None:
    def product_flops(ranks: int, threads: int) -> float:
        return cpu_device(CPU, ranks, threads, PrecisionName.fp32).product_flops

    alone = product_flops(1, 1)
    assert product_flops(1, 4) == 4 * product_flops(4, 1)
    assert product_flops(4, 1) == pytest.approx(alone * CPU.constants["busy_share"])
    # Eight ranks on four cores have half a core each.
    assert product_flops(8, 1) == product_flops(4, 1) / 2
    assert cpu_device(CPU, 8, 1, PrecisionName.fp32).memory_bytes == 4e9
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
    config = configuration([f"cluster.hardware={tmp_path}/cpu.json", "cluster.gpus_per_node=2"])
    assert config.cluster.device is Device.cpu
    prediction = predict(case_of(config))
    assert prediction.case.device.name == "cpu"
    assert not prediction.case.options.is_gpu
    assert prediction.case.layout.world_size == 2
    # Four cores, two ranks: two threads each.
    assert prediction.case.device.peak_flops == 2e11
    assert 0 < prediction.mfu < 1


def test_a_plan_for_cpus_without_a_profile_says_how_to_get_one() -> None:
    config = compose(["cluster.device=cpu", "cluster.gpus_per_node=2"], Situation("plan")).config
    with pytest.raises(ConfigError, match=r"cluster.device=cpu: the planner has no figures") as caught:
        case_of(config)
    assert "orchestra plan --calibrate RUN RUN --output cpu.json" in str(caught.value)
    assert "cluster.hardware=cpu.json" in str(caught.value)
    # What is counted needs no figures of a device (--exact).
    assert shape_of(config).layout.world_size == 2


def test_cores_that_all_compute_slow_each_other_down() -> None:
    constants = CPU.constants | {"busy_share": 0.8, "busy_memory_share": 0.5}
    profile = replace(CPU, constants=constants)
    assert while_busy(profile, "busy_share", 1, 1) == 1.0
    assert while_busy(profile, "busy_share", 2, 2) == pytest.approx(0.8)
    # More threads than cores are no more than cores.
    assert while_busy(profile, "busy_share", 4, 4) == pytest.approx(0.8)
    alone, all_threads = (cpu_device(profile, 1, threads, PrecisionName.fp32) for threads in (1, 4))
    assert all_threads.product_flops == pytest.approx(4 * 0.8 * alone.product_flops)
    assert all_threads.memory_bytes_per_s == pytest.approx(4 * 0.5 * alone.memory_bytes_per_s)
    silent = replace(profile, constants={**constants, "busy_share": 1.0})
    assert cpu_device(silent, 1, 4, PrecisionName.fp32).product_flops == 4 * alone.product_flops


@pytest.mark.parametrize("precision", PrecisionName)
def test_the_devices_that_are_offered_have_figures_for_the_precision(precision: PrecisionName) -> None:
    with pytest.raises(ConfigError) as caught:
        device("abacus", precision)
    offered = str(caught.value).partition("; use ")[2].split(", ")
    assert set(offered) < {hardware.name for hardware in TABLE}
    for hardware in TABLE:
        expected = nullcontext() if hardware.name in offered else pytest.raises(ConfigError)
        with expected:
            assert device(hardware.name, precision).product_flops > 0
