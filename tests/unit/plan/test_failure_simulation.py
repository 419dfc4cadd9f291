"""Runs under drawn failures: against published figures and closed forms, and by the real recovery policy."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

import pytest

from orchestra.plan.goodput.scenario import DAY_S, Cause, Scenario, Times
from orchestra.plan.goodput.simulator import TrainingPace, simulate
from orchestra.recovery import policy
from orchestra.recovery.policy import Action, Decision, RecoveryCase, Rules
from orchestra.sizes.save_interval import chosen, daly_goodput

HOUR_S = 3600.0
# Failures that do nothing but end the ranks, and a policy that always starts them again at once.
CRASHES = {Cause.crash: 1.0}
ENDLESS = Rules(max_restarts=10**6, backoff_s=0.0, excludes=False)


def crashing(mttf: float, every_steps: int) -> Scenario:
    """Return 4 nodes for as long as 1,500 failures take."""
    times = Times(step_s=10, stall_s=60, restart_s=300, restore_s=0, notice_exit_s=0)
    hours = mttf * 4 * 8 / HOUR_S
    return Scenario(4, times, every_steps, mtbf_device_hours=hours, mix=CRASHES, horizon_s=1500 * mttf)


def small(**changes: object) -> Scenario:
    """Return 8 nodes that fail every five hours, for a hundred days."""
    times = Times(step_s=5, stall_s=5, write_s=20, restart_s=120, restore_s=30)
    usual = Scenario(8, times, 100, mtbf_device_hours=5 * 64, horizon_s=100 * DAY_S)
    return replace(usual, **changes)  # type: ignore[arg-type]


def mean_goodput(scenario: Scenario) -> float:
    return statistics.mean(simulate(scenario, seed, ENDLESS).goodput for seed in range(3))


def llama3(**changes: object) -> Scenario:
    """Return 16,384 devices for 54 days. What its restarts and saves took was not published: five minutes to
    start, one to restore, six seconds of stall are assumed.
    """
    times = Times(step_s=5.0, stall_s=6.0, write_s=60.0, restart_s=300.0, restore_s=60.0)
    usual = Scenario(2048, times, 1, spare_nodes=32)
    every = chosen(times.step_s, times.stall_s, usual.mttf_s, write_s=times.write_s).every_steps
    return replace(usual, every_steps=every, **changes)  # type: ignore[arg-type]


def test_llama_3_is_interrupted_419_times_in_54_days_and_trains_more_than_nine_tenths_of_them() -> None:
    results = [simulate(llama3(), seed) for seed in range(4)]
    mean = statistics.mean(result.num_failures for result in results)
    # Four draws of a Poisson number stray by √(419 / 4) = 10; failures while one is noticed are not counted.
    assert mean == pytest.approx(419, abs=31)
    for result in results:
        assert 0.90 < result.goodput < 0.95
        assert result.gave_up is None


@pytest.mark.slow
@pytest.mark.parametrize(("mttf", "every"), [(7200, 400), (3600, 60)])
def test_goodput_is_dalys_within_what_sampling_leaves(mttf: float, every: int) -> None:
    expected = daly_goodput(every * 10, 60, 300, mttf)
    assert mean_goodput(crashing(mttf, every)) == pytest.approx(expected, abs=0.006)


def test_every_second_is_booked_and_the_same_seed_gives_the_same_run() -> None:
    for changes in ({}, {"spare_nodes": 2}, {"min_nodes": 4, "can_requeue": False}, {"time_limit_s": DAY_S}):
        scenario = small(**changes)
        found = simulate(scenario, 7)
        assert found.accounts.wall_s == pytest.approx(scenario.horizon_s)
        assert simulate(scenario, 7) == found
        assert simulate(scenario, 8) != found
    full = simulate(small(), 7)
    assert full.goodput == pytest.approx(full.accounts.productive_s / full.accounts.wall_s, abs=1e-6)


def test_spares_help_and_more_failures_longer_restarts_and_a_longer_queue_do_not() -> None:
    goodputs = [mean_goodput(small(spare_nodes=spares, queue_wait_s=HOUR_S)) for spares in (0, 1, 2, 4, 8)]
    assert goodputs == sorted(goodputs)
    assert goodputs[-1] > goodputs[0] + 0.02
    usual = mean_goodput(small())
    slow = replace(small().times, restart_s=900)
    for changes in ({"mtbf_device_hours": 2.5 * 64}, {"queue_wait_s": 4 * HOUR_S}, {"times": slow}):
        assert mean_goodput(small(**changes)) < usual, changes


def test_the_policy_itself_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is put before the others is followed: each lost node now ends the job."""

    def requeues_always(case: RecoveryCase) -> Decision | None:
        return Decision(Action.requeue, case.now.code, "told so")

    before = simulate(small(spare_nodes=8))
    assert before.actions[Action.replace.name] > 0
    assert "requeues_always" not in before.rules
    monkeypatch.setattr(policy, "RULES", (requeues_always, *policy.RULES))
    after = simulate(small(spare_nodes=8))
    assert set(after.actions) == {Action.requeue.name}
    assert set(after.rules) == {"requeues_always"}
    assert after.goodput < before.goodput
    assert after.accounts.queue_s > before.accounts.queue_s


def test_a_rule_that_gives_up_ends_the_simulated_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(case: RecoveryCase) -> Decision | None:
        return Decision(Action.give_up, 1, f"attempt {case.now.attempt} was enough")

    monkeypatch.setattr(policy, "RULES", (gives_up,))
    found = simulate(small())
    assert found.gave_up == "attempt 0 was enough"
    assert found.num_attempts == found.num_failures == 1
    attended = simulate(small(attended_after_s=HOUR_S))
    assert attended.gave_up is None
    assert attended.accounts.idle_s == pytest.approx(attended.num_failures * HOUR_S)


def test_131072_devices_need_more_restarts_than_the_usual_three() -> None:
    scenario = llama3(num_nodes=131_072 // 8, horizon_s=20 * DAY_S)
    every = chosen(5.0, 6.0, scenario.mttf_s, write_s=60.0).every_steps
    run = simulate(replace(scenario, every_steps=every))
    assert run.gave_up is not None
    assert "recovery.max_restarts=3" in run.gave_up


def test_a_run_without_spares_shrinks_to_its_fewest_nodes_and_then_waits_for_a_job() -> None:
    shrinking = simulate(small(min_nodes=4), 0, ENDLESS)
    assert shrinking.actions[Action.shrink.name] > 0
    assert shrinking.actions[Action.requeue.name] > 0
    assert shrinking.actions[Action.replace.name] == 0
    # On fewer nodes a step takes longer: not all productive time is worth its seconds.
    assert shrinking.goodput < shrinking.accounts.productive_s / shrinking.accounts.wall_s - 0.01


def test_copies_in_memory_save_steps_and_the_storages_restore() -> None:
    usual = small(spare_nodes=8, every_steps=400)
    with_copies = replace(usual, memory_copy_every_steps=10)
    plain, copied = simulate(usual, 0, ENDLESS), simulate(with_copies, 0, ENDLESS)
    assert copied.accounts.lost_s < plain.accounts.lost_s / 3
    assert copied.accounts.restore_s < plain.accounts.restore_s
    assert copied.goodput > plain.goodput


def test_two_lost_neighbours_take_the_copies_with_them() -> None:
    """A crash leaves all copies, even on a single node; a switch takes two neighbours' at once."""
    alone = small(num_nodes=1, mtbf_device_hours=5 * 8, mix=CRASHES, memory_copy_every_steps=10)
    assert simulate(alone, 0, ENDLESS).accounts.lost_s < 60 * simulate(alone, 0, ENDLESS).num_failures
    pairs = small(mix={Cause.switch: 1.0}, spare_nodes=8, every_steps=400, memory_copy_every_steps=10)
    singles = replace(pairs, nodes_per_switch=1)
    assert simulate(pairs, 0, ENDLESS).accounts.lost_s > 3 * simulate(singles, 0, ENDLESS).accounts.lost_s


def test_a_broken_device_in_use_is_left_out_when_it_struck_twice() -> None:
    broken = small(mix={Cause.device: 1.0}, spare_nodes=4)
    looked_at, used = simulate(broken, 0, ENDLESS), simulate(replace(broken, preflight=False), 0, Rules(100))
    assert looked_at.rules["same_host_twice"] == 0
    assert used.rules["same_host_twice"] > 0
    assert used.num_failures > 1.5 * looked_at.num_failures


def test_a_switch_takes_all_its_nodes() -> None:
    single = small(mix={Cause.switch: 1.0}, nodes_per_switch=1, spare_nodes=8)
    one, four = (simulate(each, 0, ENDLESS) for each in (single, replace(single, nodes_per_switch=4)))
    assert four.actions[Action.requeue.name] > one.actions[Action.requeue.name]


def test_the_scheduler_takes_jobs_and_no_step_is_lost() -> None:
    calm = small(mtbf_device_hours=1e12, time_limit_s=DAY_S, queue_wait_s=600.0)
    found = simulate(calm)
    assert set(found.actions) == {Action.requeue.name}
    assert found.rules["scheduler_took_the_nodes"] == pytest.approx(99, abs=2)
    # Nothing but the step that was under way each time.
    assert found.accounts.lost_s < found.num_attempts * calm.times.step_s
    preempted = simulate(replace(calm, time_limit_s=None, preemptions_per_day=2.0))
    assert preempted.rules["scheduler_took_the_nodes"] == pytest.approx(200, abs=45)


def test_a_small_cluster_waits_for_its_repairs() -> None:
    plenty, scarce = (simulate(small(**change), 0, ENDLESS) for change in ({}, {"cluster_nodes": 8}))
    assert scarce.accounts.queue_s > 5 * plenty.accounts.queue_s


def test_a_save_that_takes_longer_than_the_interval_leaves_others_out() -> None:
    slow = small(times=replace(small().times, write_s=2000.0))
    assert (small().saves_every_steps, slow.saves_every_steps) == (100, 400)


def counted(pace: TrainingPace, seconds: float) -> tuple[int, int | None]:
    """Return the steps done and the newest committed one, counted one by one."""
    time, step, committed = 0.0, pace.begin, None
    while time + pace.step_s <= seconds:
        time += pace.step_s
        step += 1
        if step % pace.every_steps == 0:
            time += pace.stall_s
            if time + pace.write_s <= seconds:
                committed = step
    return step, committed


@pytest.mark.parametrize("begin", [0, 7, 30])
@pytest.mark.parametrize("write_s", [0.0, 2.5])
def test_steps_and_saves_are_those_counted_one_by_one(begin: int, write_s: float) -> None:
    pace = TrainingPace(begin, step_s=1.5, every_steps=10, stall_s=0.75, write_s=write_s)
    chance = random.Random(begin)
    for seconds in [0.0, *(chance.uniform(0, 200) for _ in range(200))]:
        progress = pace.at(seconds)
        assert (progress.step, progress.committed) == counted(pace, seconds), seconds
        assert progress.training_s + progress.saving_s == pytest.approx(seconds)


def test_a_copy_in_memory_is_whole_one_step_later_and_slows_each_step_by_its_share() -> None:
    pace = TrainingPace(begin=10, step_s=1.0, every_steps=1000, stall_s=0.0, copy_every=5)
    assert [pace.at(seconds).copied for seconds in (4.5, 5.5, 6.5, 11.5)] == [None, None, 15, 20]
    slowed = replace(pace, begin=0, copy_every=2, copy_s=0.5).at(125.0)
    assert (slowed.step, slowed.saving_s) == (100, pytest.approx(25.0))
