"""A part of the fault matrix that fits into a test run: `make matrix` goes through all, with more seeds."""

from __future__ import annotations

import pytest
from matrix_courses import LENGTH, QUICK_COURSES, Course, Shown, go_through
from matrix_field import Field
from matrix_oracle import References
from matrix_policy import POLICY_CASES, PolicyCase, try_policy
from sites import Site

pytestmark = pytest.mark.slow

SEED = 1
_QUICK_CASES = [case for case in POLICY_CASES if case.name in ("same-step", "alternating", "progress")]
_trained: dict[str, References] = {}


def references(cluster: Site) -> References:
    """Return the uninterrupted runs on a cluster: they are trained once."""
    key = str(cluster.folder)
    if key not in _trained:
        _trained[key] = References(Field(cluster), LENGTH, "matrix")
    return _trained[key]


def assert_passed(lines: list[Shown]) -> None:
    assert not [line for line in lines if line.result.startswith("FAILED")], lines


@pytest.mark.timeout(420)
@pytest.mark.parametrize("course", QUICK_COURSES, ids=lambda course: course.name)
def test_run_that_is_hurt_ends_as_if_nothing_had_happened(cluster: Site, course: Course) -> None:
    known = references(cluster)
    assert_passed(go_through(course, known.on, known, SEED))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", _QUICK_CASES, ids=lambda case: case.name)
def test_failure_that_comes_back_is_judged(cluster: Site, case: PolicyCase) -> None:
    known = references(cluster)
    assert_passed(try_policy(case, known.on, known, SEED))
