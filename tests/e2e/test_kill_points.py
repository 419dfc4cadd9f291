"""A kill -9 at any instant costs at most the steps since the last commit, and changes no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from kill_points import PHASES, Torture, planned_kills, train_alone

_KILLS = len(PHASES)
_SEED = 8


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_killed_at_every_phase_ends_as_if_left_alone(tmp_path: Path) -> None:
    torture = Torture(tmp_path, planned_kills(_KILLS, _SEED))
    assert {kill.phase for kill in torture.kills} == set(PHASES)
    torture.kill_all()
    torture.finish()
    torture.compare(train_alone(tmp_path, "alone", torture.steps))
