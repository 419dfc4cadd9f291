"""Which faults a rehearsal plans: by the layout or as asked for, where they can strike and be told apart."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest

from conf.schema import Config, Device, Fault, LauncherName, Requeue
from orchestra.config.machine import Situation
from orchestra.config.rules.all_rules import problems_of
from orchestra.errors import ConfigError
from orchestra.rehearsal.prepare_rehearsal import (
    AskedFault,
    FaultSchedule,
    asked_fault,
    entry,
    fault_schedule,
    usual_faults,
)

SLURM = {"launcher": LauncherName.slurm, "device": Device.cpu, "gpus_per_node": 2}


def config(min_nodes: int | None = None, **cluster: Any) -> Config:
    base = Config()
    place = {"device": Device.cpu, "gpus_per_node": 2, **cluster}
    recovery = dataclasses.replace(base.recovery, min_nodes=min_nodes)
    return dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, **place), recovery=recovery)


def kinds(of: Config) -> list[str]:
    return [it.fault.name for it in usual_faults(of)]


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (config(), ["sigkill", "hang"]),
        (config(**SLURM), ["sigkill", "hang", "agent_kill"]),
        (config(**SLURM, nodes=2), ["sigkill", "hang", "agent_kill", "node_down"]),
        (config(**SLURM, nodes=2, requeue=Requeue.never), ["sigkill", "hang", "agent_kill"]),
        (
            config(**SLURM, nodes=2, spare_nodes=1, requeue=Requeue.never),
            ["sigkill", "hang", "agent_kill", "node_down"],
        ),
        (config(1, **SLURM, nodes=2, requeue=Requeue.never), ["sigkill", "hang", "agent_kill", "node_down"]),
    ],
    ids=["here", "one node", "requeue", "nothing that helps", "spare", "fewer nodes"],
)
def test_what_is_rehearsed_follows_from_what_the_layout_allows(of: Config, expected: list[str]) -> None:
    assert kinds(of) == expected


def with_faults(of: Config, course: FaultSchedule) -> Config:
    return dataclasses.replace(
        of,
        train=dataclasses.replace(of.train, steps=course.steps),
        checkpoint=dataclasses.replace(of.checkpoint, every_steps=course.every_steps),
        recovery=dataclasses.replace(of.recovery, inject=[entry(fault) for fault in course.faults]),
    )


@pytest.mark.parametrize("nodes", [1, 2, 3, 8])
@pytest.mark.parametrize("steps", [None, 20, 24, 50, 333])
def test_each_fault_has_an_attempt_and_committed_steps_of_its_own(nodes: int, steps: int | None) -> None:
    of = config(**SLURM, nodes=nodes)
    course = fault_schedule(usual_faults(of), of, steps)
    assert [fault.attempt for fault in course.faults] == list(range(len(course.faults)))
    at = [fault.at_step for fault in course.faults]
    # At least two saves before the first one and between two, and steps behind the last one.
    for before, after in pairwise([0, *at, course.steps + course.every_steps]):
        assert (after - 1) // course.every_steps - before // course.every_steps >= 2
    assert problems_of(with_faults(of, course), Situation("submit")) == []


@pytest.mark.parametrize("nodes", [2, 3, 5])
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_no_host_is_hit_twice_in_a_row_and_the_first_one_never_goes_down(nodes: int, number: int) -> None:
    of = config(**SLURM, nodes=nodes)
    hit = [(fault.rank or 0) // 2 for fault in fault_schedule(usual_faults(of)[-number:], of, None).faults]
    assert all(before != after for before, after in pairwise(hit))
    assert hit[-1] > 0


def test_what_is_asked_for_is_planned_as_it_was_typed_in_the_order_of_steps() -> None:
    of = config(**SLURM, nodes=2)
    course = fault_schedule(
        [asked_fault("gil@40:3"), asked_fault("sigkill@12:0"), asked_fault("segfault@60")], of, 100
    )
    told = [(it.fault.name, it.at_step, it.attempt) for it in course.faults]
    assert told == [("sigkill", 12, 0), ("gil", 40, 1), ("segfault", 60, 2)]
    assert [it.rank for it in course.faults][:2] == [0, 3]
    assert course.steps == 100


def test_without_a_length_it_goes_on_behind_the_last_fault() -> None:
    course = fault_schedule([asked_fault("sigkill@500:0")], config(), None)
    assert course.steps > 500


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sigkill@30:1", AskedFault(Fault.sigkill, 30, 1)),
        ("node_down@7", AskedFault(Fault.node_down, 7)),
        ("hang", AskedFault(Fault.hang)),
    ],
)
def test_a_fault_is_typed_as_kind_step_and_rank(text: str, expected: AskedFault) -> None:
    assert asked_fault(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sigkil@3", "no such fault"),
        ("nan@3", "ends no attempt"),
        ("slow@3", "ends no attempt"),
        ("sigkill@x", "expected KIND@STEP"),
        ("sigkill@3:", "expected KIND@STEP"),
        ("sigkill@-3", "expected KIND@STEP"),
        ("", "no such fault"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_there_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        asked_fault(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node_down@9", "this machine its only node"),
        ("agent_kill@9", "this machine its only node"),
        ("sigkill@9:2", "ranks 0 to 1"),
        ("sigkill@0:1", "steps 1 to 30"),
        ("sigkill@31:1", "steps 1 to 30"),
    ],
)
def test_what_the_layout_or_the_length_does_not_allow_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fault_schedule([asked_fault(text)], config(), 30)


def test_too_few_steps_for_the_faults_are_refused_with_the_fewest() -> None:
    asked = usual_faults(config())
    with pytest.raises(ConfigError, match="need at least 9 steps"):
        fault_schedule(asked, config(), 8)
    assert fault_schedule(asked, config(), 9).every_steps == 1
