"""Planned faults: values that strike one rank, in one attempt, at one moment, with a real SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpointing.options import PHASES
from conf.schema import Fault, FaultPhase
from orchestra.run.planned_faults import PlannedFault, planned_faults

ROOT = Path(__file__).resolve().parents[3]


def test_an_entry_becomes_a_value_with_the_defaults_filled_in() -> None:
    entries: list[dict[str, Any]] = [
        {"at_step": 3, "rank": 1},
        {"at_step": 20, "rank": "all", "fault": "sigkill", "phase": "mid_file", "attempt": 2},
    ]
    assert planned_faults(entries) == [
        PlannedFault(at_step=3, rank=1, phase=FaultPhase.step, attempt=0, fault=Fault.sigkill),
        PlannedFault(at_step=20, rank=None, phase=FaultPhase.mid_file, attempt=2),
    ]


def test_the_phases_of_the_library_can_all_be_planned() -> None:
    assert {phase.name for phase in FaultPhase} >= {"setup", "step", "forward", "reduce", *PHASES}


@pytest.mark.parametrize(
    ("fault", "attempt", "rank", "expected"),
    [
        (PlannedFault(at_step=3, rank=1), 0, 1, True),
        (PlannedFault(at_step=3, rank=1), 0, 0, False),
        (PlannedFault(at_step=3, rank=1), 1, 1, False),
        (PlannedFault(at_step=3, rank=None), 0, 7, True),
        (PlannedFault(at_step=3, rank=None, attempt=1), 0, 7, False),
    ],
)
def test_a_fault_befalls_its_rank_in_its_attempt_alone(
    fault: PlannedFault, attempt: int, rank: int, expected: bool
) -> None:
    assert fault.strikes(attempt, rank) is expected


def test_it_strikes_at_its_moment_and_at_no_other() -> None:
    script = (
        "from conf.schema import FaultPhase\n"
        "from orchestra.run.planned_faults import PlannedFault\n"
        "from orchestra.train.watch.inject_faults import Faults\n"
        "faults = Faults([PlannedFault(3, None, FaultPhase.mid_file)], attempt=0, rank=5)\n"
        "faults.strike('step', 3); faults.strike('mid_file', 2); print('alive', flush=True)\n"
        "faults.strike('mid_file', 3); print('still alive')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "alive\n"), done.stderr
