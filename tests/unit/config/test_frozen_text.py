"""The text of a frozen configuration: what OmegaConf writes, and the same values when it is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from conf.schema import ClusterConfig, Config, Device
from orchestra.run.config_file import read_config, to_yaml

TEXTS = (
    *("1e-4", "1e5", "0x1f", "12:30:00", "1_000", "nan", ".inf", "007", "2024-01-01"),
    *("on", "No", "true", "null", "~", "", " a ", "a: b", "#", "-", "[a]", "%", "@x"),
    *("ümlaut", "line\nbreak", "'quoted'"),
)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_look_like_something_else_stay_texts(text: str, tmp_path: Path) -> None:
    extra = {"reservation": text, "nested": [text, {"deep": text}], "number": 3, "part": 1e-5, "flag": True}
    cluster = ClusterConfig(partition=text, device=Device.cpu, setup=[text, text], slurm_extra=extra)
    config = dataclasses.replace(Config(), cluster=cluster)
    assert to_yaml(config) == OmegaConf.to_yaml(OmegaConf.structured(config))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert read_config(tmp_path / "config.yaml") == config
