"""How far a simulated attempt comes: the closed form against a count of step after step."""

from __future__ import annotations

import random

import pytest

from orchestra.plan.goodput.simulator import TrainingPace


def counted(course: TrainingPace, seconds: float) -> tuple[int, int | None]:
    """Return the steps done and the newest committed one, counted one by one."""
    time, step, committed = 0.0, course.begin, None
    while time + course.step_s <= seconds:
        time += course.step_s
        step += 1
        if step % course.every_steps == 0:
            time += course.stall_s
            if time + course.write_s <= seconds:
                committed = step
    return step, committed


@pytest.mark.parametrize("begin", [0, 7, 30])
@pytest.mark.parametrize("write_s", [0.0, 2.5])
def test_steps_and_saves_are_those_counted_one_by_one(begin: int, write_s: float) -> None:
    course = TrainingPace(begin, step_s=1.5, every_steps=10, stall_s=0.75, write_s=write_s)
    chance = random.Random(begin)
    for seconds in [0.0, *(chance.uniform(0, 200) for _ in range(200))]:
        found = course.at(seconds)
        assert (found.step, found.committed) == counted(course, seconds), seconds
        assert found.training_s + found.saving_s == pytest.approx(seconds)


def test_a_copy_in_memory_is_whole_one_step_later() -> None:
    course = TrainingPace(begin=10, step_s=1.0, every_steps=1000, stall_s=0.0, copy_every=5)
    assert [course.at(seconds).copied for seconds in (4.5, 5.5, 6.5, 11.5)] == [None, None, 15, 20]


def test_what_copies_cost_slows_each_step_by_its_share() -> None:
    course = TrainingPace(begin=0, step_s=1.0, every_steps=1000, stall_s=0.0, copy_every=2, copy_s=0.5)
    found = course.at(125.0)
    assert found.step == 100
    assert found.saving_s == pytest.approx(25.0)
