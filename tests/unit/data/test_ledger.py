"""The ledger after rollbacks: what a later attempt trained again counts once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from orchestra.data.ledger import Ledger, read_ledger
from orchestra.run.paths import RunDir


def trained(run: RunDir, attempt: int, num_ranks: int, steps: range) -> None:
    """Record that each rank of an attempt trained one sample per step: 100 · attempt + 10 · step + rank."""
    for rank in range(num_ranks):
        ledger = Ledger(run, rank, attempt)
        for step in steps:
            ledger.write(step, np.array([[100 * attempt + 10 * step + rank]]))


def test_all_ranks_of_a_step_are_joined(tmp_path: Path) -> None:
    trained(RunDir(tmp_path), 0, 2, range(1, 3))
    assert read_ledger(RunDir(tmp_path)) == {1: [10, 11], 2: [20, 21]}


def test_a_rollback_voids_later_steps_on_ranks_that_are_gone_too(tmp_path: Path) -> None:
    trained(RunDir(tmp_path), 0, 3, range(1, 5))
    trained(RunDir(tmp_path), 1, 1, range(3, 4))  # back to behind step 2, on one rank, which was killed too
    assert read_ledger(RunDir(tmp_path)) == {1: [10, 11, 12], 2: [20, 21, 22], 3: [130]}


def test_a_rollback_behind_a_rollback_voids_both(tmp_path: Path) -> None:
    trained(RunDir(tmp_path), 0, 1, range(1, 5))
    trained(RunDir(tmp_path), 1, 1, range(4, 7))
    trained(RunDir(tmp_path), 2, 1, range(2, 4))
    assert read_ledger(RunDir(tmp_path)) == {1: [10], 2: [220], 3: [230]}


def test_a_run_without_a_ledger_has_none(tmp_path: Path) -> None:
    assert read_ledger(RunDir(tmp_path)) == {}
