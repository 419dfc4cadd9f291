"""A sweep's directory and its claims: all at once or not at all, and one submitter at a time."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, Config, Device, LauncherName, OptimConfig, RunConfig
from orchestra.config.machine import signature
from orchestra.errors import ConfigError
from orchestra.run.config_file import read_config
from orchestra.run.paths import Sweep, SweepDir, read_sweep
from orchestra.submit.code_snapshot import is_snapshot
from orchestra.submit.hand_over import SweepLedger, make
from orchestra.submit.job import Share
from orchestra.submit.submission import PlannedMember, Submission, planned_sweep
from orchestra.submit.sweeps import lock
from orchestra.submit.sweeps.arrays import Numbering, PlacedSubmission
from orchestra.submit.sweeps.members import ExistingSweep, same_sweep, sweeps_in

NUMBERING = Numbering("grid", "ada", 1.0, 1000)


def member(index: int, parent: Path, name: str | None, **cluster: object) -> PlannedMember:
    base = ClusterConfig(launcher=LauncherName.slurm, device=Device.cpu, gpus_per_node=2)
    config = dataclasses.replace(
        Config(),
        run=RunConfig(name=name, dir=str(parent)),
        optim=OptimConfig(lr=0.1 + index),
        cluster=dataclasses.replace(base, **cluster),  # type: ignore[arg-type]
    )
    chosen = (f"optim.lr={0.1 + index}",)
    return PlannedMember(index, signature(config), chosen, chosen, config, Share())


def plan_of(parent: Path, indices: tuple[int, ...] = (0, 1, 2), name: str | None = "grid") -> Submission:
    members = [
        dataclasses.replace(member(value, parent, name), index=index) for index, value in enumerate(indices)
    ]
    return Submission(tuple(members), ("-m",), ("orchestra", "submit"))


def made(parent: Path, **options: object) -> tuple[SweepDir, Sweep]:
    plan = plan_of(parent, **options)  # type: ignore[arg-type]
    ledger, _ = make(PlacedSubmission(plan, planned_sweep(plan, 0.0), NUMBERING))
    assert isinstance(ledger, SweepLedger)
    return ledger.sweep, ledger.record


def forget_claim(sweep: SweepDir, number: int = 0) -> None:
    """Let a claim look like one of a process that is no more."""
    sweep.claim(number).write_text(json.dumps({"host": socket.gethostname(), "pid": 1 << 22, "time": 0.0}))


def test_the_directory_holds_record_code_script_and_the_members_runs(tmp_path: Path) -> None:
    sweep, record = made(tmp_path / "runs")
    assert read_sweep(sweep) == record
    assert {"000", "001", "002", "array-000.sbatch", "code", "control", "logs", "sweep.json"} == {
        path.name for path in sweep.path.iterdir()
    }
    assert (sweep.code / "orchestra" / "agents" / "__main__.py").is_file()
    run = sweep.member(2)
    config = read_config(run.config)
    assert (config.optim.lr, config.run.name, config.run.dir) == (2.1, "002", str(sweep.path))
    told = json.loads(run.record.read_text())
    assert (told["sweep"], told["member"], told["pid"], told["steps"]) == (
        "grid",
        2,
        None,
        config.train.steps,
    )
    (job,) = told["jobs"]
    assert (job["token"], job["task"], job["id"]) == (record.arrays[0].token, 2, None)
    assert told["signature"] == record.members[2].signature


def test_a_taken_name_is_refused_and_a_made_one_changed(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError, match=r"run.name=grid.*holds another sweep"):
        made(tmp_path)
    first, second = made(tmp_path, name=None)[0], made(tmp_path, name=None)[0]
    assert second.name == f"{first.name}-2"
    assert json.loads(second.member(0).record.read_text())["sweep"] == second.name
    assert f"--job-name={second.name}\n" in second.script(0).read_text()


def test_a_full_snapshot_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestra.submit.code_snapshot.take_snapshot.__defaults__", (None, 1))
    with pytest.raises(ConfigError, match="the code to be copied"):
        made(tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_the_order_of_the_values_and_the_throttle_make_no_other_sweep(tmp_path: Path) -> None:
    sweep, record = made(tmp_path)
    (existing,) = sweeps_in(tmp_path)
    assert existing == ExistingSweep(sweep, record)
    assert same_sweep(plan_of(tmp_path, (2, 0, 1)), [existing]) is existing
    assert same_sweep(plan_of(tmp_path, (2, 0, 1), name=None), [existing]) is existing
    assert same_sweep(plan_of(tmp_path, (0, 1)), [existing]) is None
    assert same_sweep(plan_of(tmp_path, name="other"), [existing]) is None
    throttled = member(0, tmp_path, "grid", array_throttle=3)
    assert throttled.signature == member(0, tmp_path, "grid").signature


def test_what_another_process_submits_is_left_to_it(tmp_path: Path) -> None:
    sweep, record = made(tmp_path)
    claim = {"host": socket.gethostname(), "pid": os.getppid(), "pid_started": None, "time": 0.0}
    sweep.claim(0).write_text(json.dumps(claim))
    with pytest.raises(ConfigError, match="is being submitted already: process"):
        lock.refuse_busy(sweep, record)
    forget_claim(sweep)
    lock.refuse_busy(sweep, record)
    assert lock.take(sweep, record) == 1


def test_a_snapshot_is_known_from_other_code(tmp_path: Path) -> None:
    sweep, _ = made(tmp_path)
    assert sweep.newest_code() == sweep.code
    assert is_snapshot(sweep.code)
    (sweep.code / "orchestra" / "__pycache__").mkdir()
    (sweep.code / "orchestra" / "__pycache__" / "units.pyc").write_text("")
    assert is_snapshot(sweep.code), "what Python leaves there is no change"
    (sweep.code / "orchestra" / "units.py").write_text("")
    assert not is_snapshot(sweep.code)


def test_of_two_commands_that_go_on_with_a_sweep_one_submits(tmp_path: Path) -> None:
    sweep, record = made(tmp_path)
    forget_claim(sweep)
    assert lock.take(sweep, record) == 1
    claim = {"host": "elsewhere", "pid": 1, "time": 4e9}
    sweep.claim(1).write_text(json.dumps(claim))
    with pytest.raises(ConfigError, match="being submitted already"):
        lock.take(sweep, record)


def test_a_decision_on_an_older_record_submits_nothing(tmp_path: Path) -> None:
    sweep, record = made(tmp_path)
    forget_claim(sweep)
    older = dataclasses.replace(record, arrays=())
    with pytest.raises(ConfigError, match="changed by another command meanwhile"):
        lock.take(sweep, older)
    assert not sweep.claim(1).exists()


def test_the_same_sweep_is_submitted_by_one_command_at_a_time(tmp_path: Path) -> None:
    with lock.exclusively(tmp_path / "runs", "abc"):
        (claim,) = (tmp_path / "runs").iterdir()
        claim.write_text(json.dumps({"host": "elsewhere", "pid": 1, "time": 4e9}))
        with (
            pytest.raises(ConfigError, match="being submitted already"),
            lock.exclusively(tmp_path / "runs", "abc"),
        ):
            pass
    assert list((tmp_path / "runs").iterdir()) == []
