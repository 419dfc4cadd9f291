"""What becomes of a run whose directory is removed or renamed while it trains, and before it begins."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conf.schema import ClusterConfig, Config, Device
from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup
from launchers.torchrun import Ending
from orchestra.agents import agent
from orchestra.agents.attempt_record import AttemptRecord
from orchestra.agents.context import AgentContext, Scheduler
from orchestra.errors import EXIT_FAILED, LaunchError
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir


@pytest.mark.parametrize("saves_on", [True, False])
def test_a_run_that_was_renamed_is_told_where_its_last_saves_lie(tmp_path: Path, saves_on: bool) -> None:
    run = RunDir(tmp_path / "run")
    events = EventWriter(run, node_writer(0, 0), 0)
    events.write("attempt_started")
    events.close()
    run.path.rename(tmp_path / "renamed")
    if saves_on:
        run.checkpoints.mkdir(parents=True)
    record = AttemptRecord(run, 0, 0, EventWriter(run, node_writer(0, 0), 0))
    shutil.rmtree(run.events, ignore_errors=True)
    verdict = record.conclude(Ending(0), None, steps=10)
    assert verdict.code == EXIT_FAILED
    assert "was removed or renamed while it trained" in verdict.message
    assert (f"lies in {run.checkpoints}" in verdict.message) is saves_on


@pytest.mark.parametrize("is_renamed", [True, False])
def test_an_agent_whose_run_was_removed_before_it_began_gives_its_node_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_renamed: bool
) -> None:
    monkeypatch.setattr(agent, "_CHECK_S", 0.1)
    monkeypatch.setattr(agent, "_REMOVED_TIMEOUT_S", 0.3)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    run.record.write_text("{}")
    # The other node never comes.
    group = NodeGroup(run.control / "crew", 0, 2, 60.0)
    config = Config(cluster=ClusterConfig(nodes=2, gpus_per_node=1, device=Device.cpu))
    context = AgentContext(run, config, group, StopRequests(), Scheduler(), print)
    looks = 0

    def tick(_: int) -> None:
        nonlocal looks
        looks += 1
        if looks == 5:
            # As `mv` and `rm -r` do; beats make the folders of theirs again.
            run.path.rename(tmp_path / "elsewhere")
            if not is_renamed:
                shutil.rmtree(tmp_path / "elsewhere")

    with pytest.raises(LaunchError, match="was removed or renamed while nothing of it trained"):
        agent.attend(context, tick=tick)
    assert looks > 5
