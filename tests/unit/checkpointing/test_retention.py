"""Which checkpoints go: pure rules, and the newest intact one never."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.catalog import CommittedCheckpoint, RetentionPolicy, to_remove

STEPS = [CommittedCheckpoint(step) for step in range(100, 1100, 100)]

CHECKPOINTS = st.lists(
    st.builds(
        CommittedCheckpoint,
        step=st.integers(0, 50),
        score=st.none() | st.floats(allow_nan=False),
        is_intact=st.booleans(),
    ),
    unique_by=lambda each: each.step,
)
POLICIES = st.builds(
    RetentionPolicy,
    keep_last=st.integers(0, 5),
    keep_every_steps=st.none() | st.integers(1, 20),
    keep_best=st.integers(0, 3),
)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (RetentionPolicy(keep_last=3), [800, 900, 1000]),
        (RetentionPolicy(keep_last=1, keep_every_steps=500), [500, 1000]),
        (RetentionPolicy(keep_last=2, keep_every_steps=400), [400, 800, 900, 1000]),
        (RetentionPolicy(keep_last=0), [1000]),
        (RetentionPolicy(keep_last=20), [it.step for it in STEPS]),
    ],
)
def test_what_a_rule_keeps(policy: RetentionPolicy, kept: list[int]) -> None:
    removed = to_remove(STEPS, policy)
    assert [it.step for it in STEPS if it.step not in removed] == kept


def test_the_best_are_those_with_the_lowest_scores() -> None:
    scores = [3.0, 1.0, 2.0, None, 4.0]
    checkpoints = [CommittedCheckpoint(step, score) for step, score in enumerate(scores)]
    assert to_remove(checkpoints, RetentionPolicy(keep_last=1, keep_best=2)) == [0, 3]


def test_a_damaged_one_pushes_no_intact_one_out() -> None:
    checkpoints = [
        CommittedCheckpoint(1),
        CommittedCheckpoint(2),
        CommittedCheckpoint(3, is_intact=False),
        CommittedCheckpoint(4, is_intact=False),
    ]
    assert to_remove(checkpoints, RetentionPolicy(keep_last=2)) == []
    assert to_remove(checkpoints, RetentionPolicy(keep_last=1)) == [1]


def test_a_damaged_one_goes_when_enough_intact_ones_are_newer() -> None:
    checkpoints = [CommittedCheckpoint(1, is_intact=False), CommittedCheckpoint(2), CommittedCheckpoint(3)]
    assert to_remove(checkpoints, RetentionPolicy(keep_last=2)) == [1]


@given(checkpoints=CHECKPOINTS, policy=POLICIES)
def test_no_rule_removes_the_newest_intact_one_or_the_last_ones(
    checkpoints: list[CommittedCheckpoint], policy: RetentionPolicy
) -> None:
    removed = to_remove(checkpoints, policy)
    assert removed == sorted(set(removed))
    assert set(removed) <= {each.step for each in checkpoints}
    intact = sorted(each.step for each in checkpoints if each.is_intact)
    assert not set(removed) & set(intact[-max(1, policy.keep_last) :])
    if not intact:
        assert removed == []


@given(checkpoints=CHECKPOINTS, policy=POLICIES)
def test_what_was_kept_is_kept_by_the_same_policy_again(
    checkpoints: list[CommittedCheckpoint], policy: RetentionPolicy
) -> None:
    removed = to_remove(checkpoints, policy)
    left = [each for each in checkpoints if each.step not in removed]
    assert to_remove(left, policy) == []
