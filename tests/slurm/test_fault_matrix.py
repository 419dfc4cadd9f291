"""A part of the fault matrix that fits into a test run: `make matrix` goes through all, with more seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matrix_injections import FAULTY_RUNS, QUICK_RUN, ShownRow, train_with_faults
from matrix_oracle import References, published_late, void_saves
from matrix_policy import POLICY_CASES, PolicyCase, try_policy
from sites import Site

from orchestra.run.paths import RunDir
from tests.support.watched_past import false_alarms

pytestmark = pytest.mark.slow

SEED = 1
_QUICK_CASES = [case for case in POLICY_CASES if case.name in ("same-step", "alternating", "progress")]


def assert_passed(lines: list[ShownRow]) -> None:
    assert not [line for line in lines if line.result.startswith("FAILED")], lines


@pytest.mark.timeout(420)
def test_run_with_faults_ends_as_if_nothing_had_happened(cluster: Site, references: References) -> None:
    assert_passed(train_with_faults(QUICK_RUN, cluster, references, SEED))
    assert false_alarms(references.of(QUICK_RUN.nodes)) == []


@pytest.mark.timeout(240)
def test_node_that_is_thawed_in_the_midst_of_a_save_publishes_nothing_that_counts(
    cluster: Site, references: References
) -> None:
    (hands,) = [faulty for faulty in FAULTY_RUNS if faulty.name == "hands"]
    assert_passed(train_with_faults(hands, cluster, references, SEED))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", _QUICK_CASES, ids=lambda case: case.name)
def test_failure_that_comes_back_is_judged(cluster: Site, references: References, case: PolicyCase) -> None:
    assert_passed([try_policy(case, cluster, references, SEED)])


def _saved_late(tmp_path: Path, *, restored_step: int, committed: float) -> RunDir:
    """Return a run whose attempt 3 began to save step 50 at 104 s; attempt 4 restored at 110 s."""
    run = RunDir(tmp_path / "run")
    run.events.mkdir(parents=True)
    host = {"host": "node1"}
    save = {"time": committed, "attempt": 3, "event": "checkpoint_committed", "seconds": committed - 104.0}
    restored = {"time": 110.0, "attempt": 4, "event": "restored", "step": restored_step, "generation": 3}
    restored["later_checkpoints"] = []
    lines = [json.dumps({**save, **host, "step": 50}), json.dumps({**restored, **host})]
    (run.events / "rank.jsonl").write_text("\n".join(lines) + "\n")
    return run


def test_commit_after_a_newer_restore_is_late(tmp_path: Path) -> None:
    run = _saved_late(tmp_path, restored_step=40, committed=115.2)
    (late,) = published_late(run)
    assert (late.attempt, late.step, late.newer_attempt, late.restored_step) == (3, 50, 4, 40)
    words = "written by attempt 3 after attempt 4 had begun at step 40"
    assert void_saves(run) == [f"step 50 off the line: {words}"]


def test_commit_that_the_newer_attempt_restored_was_only_told_late(tmp_path: Path) -> None:
    assert published_late(_saved_late(tmp_path, restored_step=50, committed=115.2)) == []
