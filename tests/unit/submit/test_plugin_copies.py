"""Plug-ins of a submitted run: copied into it, found there first, and left as they were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import Config, LauncherName, OptimConfig, RunConfig, TrainConfig
from orchestra.config.plugin_facts import plugin_facts
from orchestra.plugins import sources_of
from orchestra.run.paths import RunDir
from orchestra.submit.job import batch_job
from orchestra.submit.new_run import RunRequest, take_plugins, write_run

MINE = """
import torch
from . import sizes

class Mine(torch.optim.SGD):
    def __init__(self, params, lr, *, {option}=sizes.MOMENTUM):
        super().__init__(params, lr=lr, momentum=0.9)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shared" / "mine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "sizes.py").write_text("MOMENTUM = 0.9\n")
    (folder / "optim.py").write_text(MINE.format(option="amount"))
    monkeypatch.setenv("PYTHONPATH", str(folder.parent), prepend=":")
    return folder


def config_of(tmp_path: Path) -> Config:
    optim = OptimConfig(target="mine.optim:Mine", options={"amount": 0.5})
    loss = TrainConfig(loss="torch.nn.functional:cross_entropy", loss_options={"reduction": "none"})
    return Config(optim=optim, train=loss, run=RunConfig(name="first", dir=str(tmp_path / "runs")))


def test_what_nobody_installed_is_copied_and_the_rest_is_named(package: Path, tmp_path: Path) -> None:
    config, run = config_of(tmp_path), RunDir(tmp_path / "runs/first")
    (mine, torch_s) = sources_of(config)
    assert (mine.module, mine.place) == ("mine", package)
    assert torch_s.place is None
    assert str(torch_s.version).startswith("torch ")
    write_run(RunRequest(config, "0"), run, run, {})
    take_plugins([config, config], run.plugins)
    assert sorted(path.name for path in (run.plugins / "mine").iterdir()) == [
        "__init__.py",
        "optim.py",
        "sizes.py",
    ]
    assert json.loads(run.record.read_text())["plugins"] == {"mine": "copied", "torch": torch_s.version}
    cluster = replace(config.cluster, launcher=LauncherName.slurm, gpus_per_node=1)
    job = batch_job(replace(config, cluster=cluster), run, "orchestra:1")
    assert job.exports["PYTHONPATH"] == f"{run.code}:{run.plugins}"


def test_a_run_goes_on_with_its_copy_after_the_package_was_edited(package: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    take_plugins([config], RunDir(tmp_path / "runs/first").plugins)
    (package / "optim.py").write_text(MINE.format(option="share"))
    assert plugin_facts(config).problems == ()
    another = replace(config, run=replace(config.run, name="second"))
    assert "optim.options.amount: no such option" in plugin_facts(another).problems[0]
