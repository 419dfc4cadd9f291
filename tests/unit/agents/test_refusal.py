"""All agents of a job hear that it must not train, and leave nothing but that behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from conf.schema import Config
from launchers.node_agent import StopRequests
from launchers.node_group import NodeGroup, Order
from orchestra.agents.agent import attend, group_folder
from orchestra.agents.context import REFUSE, AgentContext
from orchestra.agents.foreground import Foreground
from orchestra.errors import RivalError
from orchestra.run.paths import RunDir

WHY = "another job trains it"


class Rivalled(Foreground):
    """Scheduler in which somebody else trains the run."""

    def refusal(self) -> str | None:
        return WHY


@pytest.mark.parametrize("node", [0, 1])
def test_the_leader_refuses_for_all_and_nothing_else_is_written(tmp_path: Path, node: int) -> None:
    run = RunDir(tmp_path / "run")
    folder = group_folder(run.control, "12", 0)
    other = NodeGroup(folder, 1 - node, 2, 60.0)
    other.join("other", "127.0.0.1", {"port": 1})
    signals = StopRequests()
    if node == 1:
        # The other one leads, and has said so.
        assert other.publish(Order(0, REFUSE, facts={"message": WHY}))
    context = AgentContext(
        run, Config(), NodeGroup(folder, node, 2, 60.0), signals, Rivalled(), lambda _: None
    )
    with pytest.raises(RivalError, match=WHY):
        attend(context)
    other.leave()
    assert not run.events.exists()
    assert [file.name for file in sorted(folder.rglob("*")) if file.is_file()] == ["0000.json"]
