"""Every schedule can be run, and takes what its paper says; what cannot be run is told from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import ParallelismConfig, PipelineSchedule
from orchestra.sizes.pipeline_check import ScheduleError, check, held_bytes, unit_times
from orchestra.sizes.pipeline_schedule import Pass, PipelineShape, StagePass, pipeline_shape, schedule

MOST_RANKS = 8
MICRO_BATCHES = (*range(1, 18), 23, 32)
NAMES = [kind.name for kind in PipelineSchedule]


def cases(name: str) -> Iterator[tuple[PipelineShape, int]]:
    chunks = {"interleaved": (2, 3, 4), "zbv": (2,)}.get(name, (1,))
    for num_ranks in range(2, MOST_RANKS + 1):
        for num_chunks in chunks:
            for count in MICRO_BATCHES:
                yield PipelineShape(num_ranks, num_chunks, is_v=name == "zbv"), count


def is_filled(name: str, shape: PipelineShape, count: int) -> bool:
    """Whether the closed form holds: enough micro-batches, in whole groups where they go in groups."""
    if name == "interleaved":
        return count % shape.num_ranks == 0
    least = {"zero_bubble": shape.num_ranks, "zbv": 2 * shape.num_ranks - 1}
    return count >= least.get(name, 1)


def bubble_of(name: str, shape: PipelineShape, count: int) -> float:
    """Return the closed form where F, I and W take equally long: waits of a rank over all its time.

    GPipe and 1F1B: (p - 1)(F + B). Interleaved: that of passes v times as short. ZB-H1: (p - 1)(F + I - W).
    ZB-V: none but p - 1 passes of half as many layers between the first rank's begin and the last one's.
    """
    ahead = shape.num_ranks - 1
    work = {"zero_bubble": 3 * count, "zbv": 6 * count}.get(name, shape.num_chunks * count)
    return ahead / (work + ahead)


def live_of(name: str, shape: PipelineShape, rank: int, count: int) -> int:
    """Return the closed form of passes whose activations are held at one time."""
    num_ranks, num_chunks = shape.num_ranks, shape.num_chunks
    ahead = num_ranks - 1 - rank
    if name == "interleaved":
        return min(2 * ahead + (num_chunks - 1) * num_ranks + 1, num_chunks * count)
    return {"afab": count, "zbv": 2 * num_ranks}.get(name, min(count, ahead + 1))


@pytest.mark.parametrize("name", NAMES)
def test_each_schedule_can_be_run_and_takes_what_the_closed_forms_say(name: str) -> None:
    kind, num_filled = PipelineSchedule[name], 0
    for shape, count in cases(name):
        lists = schedule(kind, shape, count)
        found = check(lists, shape, count)
        if not is_filled(name, shape, count):
            assert found.bubble >= bubble_of(name, shape, count) - 1e-9, (shape, count)
            continue
        num_filled += 1
        assert found.bubble == pytest.approx(bubble_of(name, shape, count)), (shape, count)
        expected = tuple(live_of(name, shape, rank, count) for rank in range(shape.num_ranks))
        assert found.live == expected, (shape, count)
    assert num_filled >= 40


@pytest.mark.parametrize("name", ["zero_bubble", "zbv"])
def test_split_gradients_hold_no_more_than_one_forward_one_backward(name: str) -> None:
    """Even where all activations are kept until the gradients of weights: those of p micro-batches."""
    for shape, count in cases(name):
        ones = (1.0,) * shape.num_stages
        for actions in schedule(PipelineSchedule[name], shape, count):
            limit = min(count, shape.num_ranks) * shape.num_chunks
            assert held_bytes(actions, ones, ones) <= limit, (shape, count)


def test_micro_batches_that_fill_no_group_leave_interleaving_better_than_one_stage_a_rank() -> None:
    for count in range(4, 32):
        one, two = PipelineShape(4), PipelineShape(4, 2)
        interleaved = check(schedule(PipelineSchedule["interleaved"], two, count), two, count)
        plain = check(schedule(PipelineSchedule["1f1b"], one, count), one, count)
        assert interleaved.bubble < plain.bubble


def test_the_manuals_table_is_that_of_the_schedules() -> None:
    page = Path(__file__).parents[3] / "docs" / "pipeline.md"
    rows = re.findall(r"^\| `(\w+)`[^|]*\| (\d) \| (.*) \|$", page.read_text(), flags=re.MULTILINE)
    assert {name for name, *_ in rows} == set(NAMES)
    for name, chunks, numbers in rows:
        shape = PipelineShape(4, int(chunks), is_v=name == "zbv")
        few, many = (schedule(PipelineSchedule[name], shape, count) for count in (8, 32))
        bubbles = [check(lists, shape, count).bubble for lists, count in ((few, 8), (many, 32))]
        each = (1 / shape.num_chunks,) * shape.num_stages
        held = [held_bytes(many[rank], each, each) for rank in (0, 3)]
        expected = [*(f"{100 * bubble:.1f} %" for bubble in bubbles), *(f"{count:g}" for count in held)]
        assert numbers.split(" | ") == expected, name


def test_gradients_are_summed_in_the_order_of_micro_batches() -> None:
    """As one process sums them, whatever the schedule."""
    for name in NAMES:
        for shape, count in [(shape, count) for shape, count in cases(name) if shape.num_ranks == 4]:
            for actions in schedule(PipelineSchedule[name], shape, count):
                for stage in range(shape.num_stages):
                    summed = [
                        action.micro_batch
                        for action in actions
                        if action.stage == stage and action.kind in (Pass.backward, Pass.weight_gradient)
                    ]
                    assert summed == sorted(summed)


def test_messages_that_take_time_show_in_the_makespan() -> None:
    """The first micro-batch passes three borders forward and the last one three backward."""
    shape, kind = PipelineShape(4), PipelineSchedule["afab"]
    lists = schedule(kind, shape, 8)
    slow = replace(unit_times(shape), message=0.5)
    alone = check(lists, shape, 8).makespan_s
    assert check(lists, shape, 8, slow).makespan_s == alone + 2 * 3 * 0.5


def test_places_of_stages() -> None:
    loop = pipeline_shape(ParallelismConfig(pp=4, schedule=PipelineSchedule["interleaved"], virtual_stages=2))
    v = pipeline_shape(ParallelismConfig(pp=4, schedule=PipelineSchedule["zbv"]))
    assert [loop.stages_of(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [v.stages_of(rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert [v.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]


F, B = Pass.forward, Pass.backward
RIGHT = schedule(PipelineSchedule["1f1b"], PipelineShape(2), 2)
ONE_BY_ONE = (StagePass(F, 0, 0), StagePass(B, 0, 0), StagePass(F, 0, 1), StagePass(B, 0, 1))
ALL_FIRST = (StagePass(F, 1, 0), StagePass(F, 1, 1), StagePass(B, 1, 0), StagePass(B, 1, 1))


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ((RIGHT[0], RIGHT[1][:-1]), "B1.1 is missing"),
        ((RIGHT[0], (*RIGHT[1], StagePass(B, 1, 1))), "twice"),
        ((RIGHT[0], (*RIGHT[1], StagePass(F, 1, 2))), "F1.2 is too much"),
        ((RIGHT[0], tuple(reversed(RIGHT[1]))), "too early"),
        # Rank 0 waits for a gradient before it sends what the gradient is of.
        ((ONE_BY_ONE, ALL_FIRST), "deadlock: rank 0 at B0.0, rank 1 at F1.1"),
    ],
)
def test_lists_that_are_no_schedule_are_refused(lists: tuple[tuple[StagePass, ...], ...], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        check(lists, PipelineShape(2), 2)


def test_messages_in_another_order_than_they_are_wanted_are_refused() -> None:
    """Two stages of rank 0 feed rank 1, which takes them the other way round."""
    shape = PipelineShape(2, 2)
    first, second = schedule(PipelineSchedule["interleaved"], shape, 2)
    swapped = list(first)
    # F0.1 and F2.0 stand beside each other: each needs only what is there before both.
    at = swapped.index(StagePass(F, 0, 1))
    assert swapped[at + 1] == StagePass(F, 2, 0)
    swapped[at], swapped[at + 1] = swapped[at + 1], swapped[at]
    with pytest.raises(ScheduleError, match=r"rank 1 waits for F0\.1 while rank 0 sends F2\.0"):
        check((tuple(swapped), second), shape, 2)


def test_shapes_that_a_schedule_does_not_have_are_refused() -> None:
    for name, shape in (
        ("1f1b", PipelineShape(2, 2)),
        ("interleaved", PipelineShape(2)),
        ("zbv", PipelineShape(2, 2)),
    ):
        with pytest.raises(ValueError, match=f"schedule={name}.*use "):
            schedule(PipelineSchedule[name], shape, 2)
    with pytest.raises(ValueError, match="use 1 or more"):
        schedule(PipelineSchedule["1f1b"], PipelineShape(2), 0)
