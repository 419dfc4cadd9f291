"""How long a rank may be silent: a pure function of its history, between a floor and what was configured."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from conf.schema import Config, ParallelismConfig, RecoveryConfig
from orchestra.recovery.hangs import LimitRules, RankTimes, limit, limit_rules
from orchestra.run.heartbeat import Phase

RULES = LimitRules(setup_s=900.0, silent_s=60.0, storage_s=600.0, closing_s=120.0)


def rank_times(step_s: float, number: int = 100, silence_s: float = 0.0) -> RankTimes:
    seen = RankTimes()
    seen.add_steps(1, 500.0)
    seen.add_steps(1, 40.0)
    for _ in range(number):
        seen.add_steps(1, step_s)
    seen.add_silence(silence_s)
    return seen


def test_an_attempt_that_made_no_step_yet_has_the_time_of_its_setup() -> None:
    for phase in (Phase.setup, Phase.step, Phase.forward, Phase.backward, Phase.agree):
        assert limit(phase, RankTimes(), RULES) == 900.0


def test_few_steps_teach_nothing() -> None:
    assert limit(Phase.forward, rank_times(0.1, number=2), RULES) == 60.0


@pytest.mark.parametrize(
    ("step_s", "silence_s", "expected"),
    [(0.05, 0.0, 10.0), (2.0, 0.0, 20.0), (2.0, 9.0, 27.0), (5.9, 0.0, 59.0), (30.0, 0.0, 60.0)],
)
def test_the_limit_of_a_step_follows_its_history(step_s: float, silence_s: float, expected: float) -> None:
    assert limit(Phase.forward, rank_times(step_s, silence_s=silence_s), RULES) == pytest.approx(expected)


def test_what_is_configured_bounds_even_the_floor() -> None:
    assert limit(Phase.forward, rank_times(0.1), dataclasses.replace(RULES, silent_s=3.0)) == 3.0


def test_who_may_wait_for_others_is_waited_for_longer() -> None:
    seen = rank_times(0.1)
    for phase in (Phase.backward, Phase.reduce, Phase.update, Phase.agree):
        assert limit(phase, seen, RULES) == 60.0
        assert limit(phase, seen, RULES, is_last=True) == 10.0


def test_storage_is_waited_for_whatever_the_steps_took() -> None:
    for phase in (Phase.data, Phase.record):
        assert limit(phase, rank_times(0.1), RULES, is_last=True) == 60.0


def test_a_stopped_process_is_waited_for_no_longer_than_a_step() -> None:
    seen = rank_times(0.1)
    for phase in Phase:
        if phase >= Phase.step:
            assert limit(phase, seen, RULES, is_stopped=True) == 10.0
        assert limit(phase, RankTimes(), RULES, is_stopped=True) == 60.0


def test_saves_and_restores_are_learned_from_earlier_ones() -> None:
    seen = RankTimes()
    assert limit(Phase.save, seen, RULES) == limit(Phase.restore, seen, RULES) == 600.0
    seen.saves_s.append(2.0)
    seen.restores_s.append(20.0)
    assert (limit(Phase.save, seen, RULES), limit(Phase.restore, seen, RULES)) == (60.0, 200.0)
    assert limit(Phase.commit, seen, RULES) == 1200.0
    seen.saves_s.append(1000.0)
    assert limit(Phase.save, seen, RULES) == 600.0


def test_many_steps_at_first_sight_teach_without_the_first() -> None:
    seen = RankTimes()
    seen.add_steps(6, 12.0)
    assert list(seen.steps_s) == [2.0] * 5
    assert limit(Phase.step, seen, RULES) == pytest.approx(20.0)


def test_more_steps_than_are_kept_are_taken_at_once() -> None:
    seen = RankTimes()
    seen.add_steps(1, 1.0)
    seen.add_steps(10**9, 10**9 * 2.0)
    assert limit(Phase.step, seen, RULES) == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("shape", "is_own_work"),
    [({}, True), ({"zero": 2}, True), ({"zero": 3}, False), ({"tp": 2}, False)],
)
def test_a_forward_pass_with_collectives_is_no_work_of_its_own(
    shape: dict[str, Any], is_own_work: bool
) -> None:
    rules = limit_rules(Config(parallelism=ParallelismConfig(**shape)))
    assert (Phase.forward in rules.own_work) is is_own_work


def test_the_bounds_come_from_the_configuration() -> None:
    recovery = RecoveryConfig(heartbeat_timeout_s=7.0, setup_timeout_s=70.0, stop_timeout_s=700.0)
    rules = limit_rules(Config(recovery=recovery))
    assert (rules.silent_s, rules.setup_s, rules.closing_s) == (7.0, 70.0, 700.0)
