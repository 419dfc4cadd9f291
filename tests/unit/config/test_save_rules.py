"""`checkpoint.every_steps=auto` among the other keys: what goes with it, and what needs a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestra.config.compose import compose
from orchestra.config.machine import Situation
from orchestra.errors import ConfigError
from orchestra.run.config_file import read_config, write_config

CPU = Situation("run", num_gpus=0)
FAULT = "recovery.inject=[{at_step: 10, rank: 0, phase: mid_file}]"


def composed(*overrides: str) -> Any:
    return compose(overrides, CPU).config


def test_auto_stays_in_the_frozen_configuration(tmp_path: Path) -> None:
    config = composed("checkpoint.every_steps=auto", "cluster.mtbf_device_hours=12000")
    write_config(tmp_path / "config.yaml", config)
    kept = read_config(tmp_path / "config.yaml")
    assert kept == config
    assert (kept.checkpoint.every_steps, kept.cluster.mtbf_device_hours) == ("auto", 12000.0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("checkpoint.every_steps=often",), ("checkpoint.every_steps=often", "auto or null")),
        (("checkpoint.every_steps=auto", "checkpoint.keep_every_steps=50"), ("multiple", "use e.g. 50")),
        (("checkpoint.every_steps=auto", FAULT), ("at_step=10", "give a number of steps")),
        (("checkpoint.every_steps=0",), ("checkpoint.every_steps=0", "1 or more")),
        (("cluster.mtbf_device_hours=-1",), ("cluster.mtbf_device_hours=-1", "above 0")),
    ],
)
def test_what_does_not_go_with_auto_says_what_would(
    overrides: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        composed(*overrides)
    (problem,) = caught.value.problems
    for word in words:
        assert word in problem


def test_a_fault_at_the_last_step_goes_with_auto() -> None:
    last = FAULT.replace("at_step: 10", "at_step: 100")
    assert composed("checkpoint.every_steps=auto", last).train.steps == 100
