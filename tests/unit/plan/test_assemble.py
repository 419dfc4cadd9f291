"""What a plan is made of: the cluster it assumes, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import Device, PrecisionName
from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.plan.assemble import case_of, for_planning
from orchestra.plan.devices import device
from orchestra.plan.profiles import Profile, write_profile
from orchestra.sizes import hardware

CONSTANTS = {
    "product_flops.fp32": 5e10,
    "attention_flops": 5e10,
    "memory_bytes_per_s": 1e10,
    "link_bytes_per_s": 1e9,
    "inside_latency_s": 1e-5,
}


def test_a_profile_of_cpus_is_planned_for_cpus(tmp_path: Path) -> None:
    profile = Profile("cpu", CONSTANTS, {"fp32": 1e11}, cores=4, memory_bytes=32e9, source="a test")
    write_profile(tmp_path / "cpu.json", profile)
    config = compose(for_planning([f"cluster.hardware={tmp_path}/cpu.json"]), Situation("plan")).config
    assert config.cluster.device is Device.cpu
    assert not case_of(config).options.is_gpu


@pytest.mark.parametrize("precision", PrecisionName)
def test_the_devices_that_are_offered_have_figures_for_the_precision(precision: PrecisionName) -> None:
    with pytest.raises(ConfigError) as caught:
        device("abacus", precision)
    offered = str(caught.value).partition("; use ")[2].split(", ")
    for each in hardware.TABLE:
        if each.name in offered:
            assert device(each.name, precision).product_flops > 0
        else:
            with pytest.raises(ConfigError):
                device(each.name, precision)
