"""A sweeper from elsewhere: it chooses values, its trials become our sweeps, their metrics go back to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from orchestra.submit.sweeps.sweeper import names_sweeper

# A plugin as somebody else would write it: rounds of two trials, each around the better one of the last.
PLUGIN = """
from dataclasses import dataclass
from typing import Any
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper

@dataclass
class HalvingConf:
    _target_: str = "hydra_plugins.halving.Halving"
    rounds: int = 2

ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=HalvingConf)

class Halving(Sweeper):
    def __init__(self, rounds):
        self.rounds = rounds

    def setup(self, *, hydra_context, task_function, config):
        self.config = config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config)

    def sweep(self, arguments):
        fixed, ranges = {}, {}
        for override in OverridesParser.create().parse_overrides(arguments):
            value = override.value()
            if override.is_interval_sweep():
                ranges[override.get_key_element()] = (value.start, value.end)
            else:
                fixed[override.get_key_element()] = value
        (key, (low, high)), done = next(iter(ranges.items())), 0
        for _ in range(self.rounds):
            same = [f"{name}={value}" for name, value in fixed.items()]
            trials = [[*same, f"{key}={x}"] for x in (low, high)]
            returns = self.launcher.launch(trials, initial_job_idx=done)
            done += 2
            first, second = (job.return_value for job in returns)
            middle = (low + high) / 2
            low, high = (low, middle) if first < second else (middle, high)
        with open(f"{self.config.hydra.sweep.dir}/best.txt", "w") as file:
            file.write(f"{low} {high}")
"""

# Stands where the command hands in how a sweep is submitted: every run has trained and is over.
SCRIPT = """
import json, sys
from pathlib import Path
from orchestra.config.machine import Situation
from orchestra.errors import OrchestraError
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir
from orchestra.submit.sweeps.sweeper import run_sweeper
from orchestra.submit.wait import wait_for

def submit(members, name):
    runs = []
    for index, member in enumerate(members):
        config = member.config
        run = RunDir(Path(config.run.dir) / name / f"{index:03d}")
        run.path.mkdir(parents=True)
        run.record.write_text(json.dumps({"name": run.name}))
        facts = {"chosen": member.chosen, "overrides": member.overrides, "model": config.model.name}
        (run.path / "facts.json").write_text(json.dumps(facts))
        JsonLinesWriter(run.metrics).write({"step": 1, "loss": 9.0, "mfu": abs(config.optim.lr - 0.3)})
        events = EventWriter(run, node_writer(0, 0), 0)
        events.write("attempt_started", pid=1, pid_started=1)
        code = 1 if config.optim.lr > 0.9 else 0
        events.write("failed" if code else "finished", code=code, cause="test", step=1)
        runs.append(run)
    return wait_for(runs, members[0].config.run.metric)

try:
    trials = run_sweeper(sys.argv[1:], Situation("submit"), submit)
except OrchestraError as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
print(json.dumps([[trial.chosen, trial.result and trial.result.value] for trial in trials]))
"""


ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    folder = tmp_path / "site" / "hydra_plugins"
    folder.mkdir(parents=True)
    (folder / "halving.py").write_text(textwrap.dedent(PLUGIN))
    return folder.parent


def sweep(plugins: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run a sweeper in a process of its own: Hydra looks for plugins once."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{plugins}"}
    fixed = ("cluster=slurm", "cluster.gpus_per_node=2", f"run.dir={plugins.parent / 'runs'}")
    command = [sys.executable, "-c", SCRIPT, *fixed, *overrides]
    return subprocess.run(
        command, env=environment, cwd=plugins.parent, capture_output=True, text=True, check=False
    )


def test_a_sweeper_gets_the_metric_of_its_trials_and_chooses_by_it(plugins: Path) -> None:
    done = sweep(
        plugins,
        "hydra/sweeper=halving",
        "hydra.sweeper.rounds=2",
        "run.name=search",
        "run.metric=mfu",
        "model.name=1e5",
        "cluster.slurm_extra.licenses=abc",
        "optim.min_lr=null",
        "optim.lr=interval(0.25,0.75)",
    )
    assert done.returncode == 0, done.stderr
    trials = json.loads(done.stdout)
    assert [chosen for chosen, _ in trials] == [[f"optim.lr={rate}"] for rate in (0.25, 0.75, 0.25, 0.5)]
    assert [value for _, value in trials] == pytest.approx([0.05, 0.45, 0.05, 0.2])
    runs = plugins.parent / "runs"
    assert sorted(path.name for path in runs.iterdir()) == ["search", "search-batch-0", "search-batch-1"]
    assert (runs / "search" / "best.txt").read_text() == "0.25 0.375"
    # What does not vary came back as Python prints it, and is what the user typed all the same.
    member = json.loads((runs / "search-batch-1" / "001" / "facts.json").read_text())
    assert member["model"] == "1e5"
    assert {"model.name=1e5", "optim.min_lr=null"} <= set(member["overrides"])
    assert not list(plugins.parent.glob("multirun*"))
    assert not list(plugins.parent.glob("outputs*"))


@pytest.mark.slow
def test_a_failed_trial_reaches_the_sweeper_as_an_error(plugins: Path) -> None:
    done = sweep(plugins, "hydra/sweeper=halving", "run.name=bad", "optim.lr=interval(0.1,1.0)")
    assert done.returncode == 1
    assert "OrchestraError: trial 1: 001 failed (test); `orchestra why" in done.stderr


def test_hydras_own_sweeper_may_be_named_too_and_batches_are_its(plugins: Path) -> None:
    done = sweep(
        plugins, "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2", "run.name=grid", "train.seed=1,2,3"
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 3
    assert (plugins.parent / "runs" / "grid-batch-1" / "000").is_dir()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["hydra/sweeper=nope"], ["hydra/sweeper/nope", "halving"]),
        (
            [
                "hydra/sweeper=halving",
                "train.stepz=1",
                "run.name=a,b",
                "hydra.verbose=true",
                "run.metric=los",
            ],
            ["train.stepz: no such key", "run.name=a,b", "hydra.verbose=true: Hydra's own settings"],
        ),
        (["hydra/sweeper=halving", "run.metric=los"], ["run.metric=los", "did you mean loss?"]),
        (
            ["hydra/sweeper=halving", "optim.lr=interval(-2,-1)"],
            ["optim.lr=-2.0 is not a positive number", "optim.lr=-1.0"],
        ),
        (["hydra/sweeper=halving", "hydra.sweeper.wrong=1", "optim.lr=interval(1,2)"], ["wrong"]),
    ],
)
def test_mistakes_are_told_before_anything_is_submitted(
    plugins: Path, overrides: list[str], words: list[str]
) -> None:
    done = sweep(plugins, *overrides)
    assert done.returncode == 2, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert not list(plugins.parent.glob("runs/*-batch-*"))


def test_the_launcher_says_where_it_belongs(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """\
        import hydra
        @hydra.main(version_base="1.3", config_path=None)
        def main(_): pass
        main()
        """
    )
    (tmp_path / "app.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launchers' / 'plugin'}"}
    command = [sys.executable, "app.py", "-m", "hydra/launcher=orchestra"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "`orchestra submit -m hydra/sweeper=NAME …`" in done.stderr


def test_a_sweeper_is_recognised_by_its_choice() -> None:
    assert names_sweeper(["train.seed=1", "+hydra/sweeper=optuna"])
    assert not names_sweeper(["train.seed=1,2", "hydra.sweeper.n_trials=3"])
