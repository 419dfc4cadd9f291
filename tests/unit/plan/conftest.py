"""`orchestra plan` as it is typed, for all tests of the planner."""

from __future__ import annotations

import pytest
from plan_cases import PlanCommand
from support.command_line import CommandLine


@pytest.fixture
def plan(orchestra: CommandLine) -> PlanCommand:
    return PlanCommand(orchestra)
