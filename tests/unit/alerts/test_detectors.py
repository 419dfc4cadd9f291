"""Each detector over a recorded run in which it fires, and over one in which it must not, though close."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded_runs import BEGIN, RecordedRun, flat, noisy

from conf.schema import (
    BatchStage,
    CheckpointConfig,
    Config,
    EvalConfig,
    ParallelismConfig,
    RecoveryConfig,
    TrainConfig,
)
from orchestra.alerts.observed import Alert, Limits
from orchestra.alerts.upkeep_detectors import failing_members
from orchestra.report.run_state import MemberState, RunState, SweepState
from orchestra.run.paths import RunDir, SweepDir, SweepMember
from orchestra.run.record import RunPhase

Story = Callable[[RecordedRun], RecordedRun]
FALLING = noisy(lambda step: 2.0 + 4.0 / step)


def steady(run: RecordedRun) -> RecordedRun:
    return run.start().train(300, FALLING)


def stalled(run: RecordedRun) -> RecordedRun:
    return steady(run).wait(45).beat(0).beat(1)


def slow_storage(run: RecordedRun) -> RecordedRun:
    """A save that held the training up for half a minute may do so again."""
    steady(run).write("checkpoint_started", rank=0, step=300, blocked_s=30.0)
    return run.wait(45).beat(0).beat(1)


def first_evaluation(run: RecordedRun) -> RecordedRun:
    return steady(run).wait(400).beat(0, {"record": [0, 1]}).beat(1, {"record": [2, 3]})


def first_save(run: RecordedRun) -> RecordedRun:
    return steady(run).wait(400).beat(0, {"save": [0], "commit": [1]}).beat(1, {"commit": [2], "stop": [3]})


def slow_steps(run: RecordedRun) -> RecordedRun:
    return steady(run).train(6, FALLING, seconds=2.5)


def one_slow_step(run: RecordedRun) -> RecordedRun:
    return steady(run).train(1, FALLING, seconds=9.0).train(4, FALLING)


def slower(run: RecordedRun) -> RecordedRun:
    return steady(run).train(20, FALLING, seconds=1.4)


def a_little_slower(run: RecordedRun) -> RecordedRun:
    return steady(run).train(20, FALLING, seconds=1.15)


def slower_on_fewer_ranks(run: RecordedRun) -> RecordedRun:
    return steady(run).fail().start(world_size=2).train(60, FALLING, seconds=1.9)


def straggler(run: RecordedRun) -> RecordedRun:
    return steady(run).write("straggler_found", rank=3, host="node2", ratio=1.5, step=300)


def straggler_gone(run: RecordedRun) -> RecordedRun:
    return straggler(run).write("straggler_gone", rank=3, host="node2", step=310)


def silent_node(run: RecordedRun) -> RecordedRun:
    return steady(run).wait(70).beat(0)


def rank_behind(run: RecordedRun) -> RecordedRun:
    steady(run).wait(40)
    positions = [
        {"rank": rank, "phase": phase, "step": 301, "micro_batch": 0, "seconds": 40.0, "state": "S"}
        for rank, phase in ((2, "backward"), (3, "forward"))
    ]
    run.write("step_stalled", ranks=positions, host="node2")
    return run.beat(0, {"backward": [0, 1]}, 40.0).beat(1, {"backward": [2], "forward": [3]}, 40.0)


def saving_for_long(run: RecordedRun) -> RecordedRun:
    """A save has its own, longer limit."""
    return steady(run).wait(10).beat(0, {"save": [0, 1]}, 40.0).beat(1, {"save": [2, 3]}, 40.0)


def rising(run: RecordedRun) -> RecordedRun:
    return run.start().train(800, noisy(lambda step: 2.0 + 0.0015 * max(0, step - 400), 0.05))


def flat_and_noisy(run: RecordedRun) -> RecordedRun:
    return run.start().train(800, noisy(flat, 0.2))


def spikes(run: RecordedRun) -> RecordedRun:
    return run.start().train(300, lambda step: 7.0 if step in (230, 260) else FALLING(step))


def one_spike(run: RecordedRun) -> RecordedRun:
    return run.start().train(300, lambda step: 7.0 if step == 230 else FALLING(step))


def told_spike(run: RecordedRun) -> RecordedRun:
    """Between two logged rows: the run alone has seen it."""
    return steady(run).write("loss_spike", rank=0, step=290, loss=70.0).train(10, FALLING)


def told_spike_made_void(run: RecordedRun) -> RecordedRun:
    """Another attempt trains these steps again, and passes over what made the loss leap."""
    told_spike(run).fail()
    run.step = 280
    run.start().write("restored", rank=0, step=280, seconds=1.0)
    return run.train(30, FALLING)


def not_finite(run: RecordedRun) -> RecordedRun:
    return steady(run).train(1, lambda _: float("nan"))


def storm(run: RecordedRun) -> RecordedRun:
    for _ in range(3):
        run.start().train(20).fail()
    return run.start().train(20)


def two_failures(run: RecordedRun) -> RecordedRun:
    for _ in range(2):
        run.start().train(20).fail()
    return run.start().train(20)


def old_failures(run: RecordedRun) -> RecordedRun:
    """Far apart, and each time it had got further."""
    for _ in range(4):
        run.start().train(100, seconds=20.0).fail()
    return run.start().train(100, seconds=20.0)


def little_goodput(run: RecordedRun) -> RecordedRun:
    run.start().train(10)
    run.wait(600).fail()
    return run.start().train(600)


def short_and_bad(run: RecordedRun) -> RecordedRun:
    """Nobody is told of a start's share in a run of a few minutes."""
    run.start().train(10)
    run.wait(60).fail()
    return run.start().train(60)


def unsaved(run: RecordedRun) -> RecordedRun:
    run.start().train(99)
    run.step += 1
    return run.train(250)


def saves_fail(run: RecordedRun) -> RecordedRun:
    steady(run).write("checkpoint_failed", rank=0, step=300, reason="No space left on device")
    return run


def saves_work_again(run: RecordedRun) -> RecordedRun:
    return saves_fail(run).train(100, FALLING)


def waits_for_storage(run: RecordedRun) -> RecordedRun:
    run.attempt += 1
    run.write("attempt_started", nodes=2, pid=1).write(
        "restore_waits", rank=0, patience_s=300, why="no answer"
    )
    return run.beat(0).beat(1)


def has_restored(run: RecordedRun) -> RecordedRun:
    waits_for_storage(run).write("restored", rank=0, step=0, seconds=1.0)
    return run


CASES: dict[str, tuple[Story, Story]] = {
    "stall": (stalled, slow_storage),
    "stall:slow_steps": (slow_steps, one_slow_step),
    "throughput:own": (slower, a_little_slower),
    "slow_rank:3": (straggler, straggler_gone),
    "silence:node-1": (silent_node, steady),
    "silence:rank": (rank_behind, saving_for_long),
    "divergence": (rising, flat_and_noisy),
    "loss_spikes": (spikes, one_spike),
    "restart_storm": (storm, two_failures),
    "goodput": (little_goodput, short_and_bad),
    "checkpoint:failing": (saves_fail, saves_work_again),
    "checkpoint:storage": (waits_for_storage, has_restored),
}


# A second way into the same alert.
MORE_CASES = {"loss_spikes": (told_spike, told_spike_made_void)}


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path)


@pytest.mark.parametrize("key", CASES)
def test_it_fires_with_evidence_a_time_and_advice(recorded: RecordedRun, key: str) -> None:
    fires, _ = CASES[key]
    alerts = {alert.key: alert for alert in fires(recorded).look().alerts}
    assert key in alerts, alerts
    found = alerts[key]
    assert found.subject == "first"
    assert found.evidence
    assert found.advice
    assert BEGIN <= found.since <= recorded.time


@pytest.mark.parametrize("key", CASES)
def test_it_does_not_fire_where_it_is_close(recorded: RecordedRun, key: str) -> None:
    _, does_not = CASES[key]
    assert key not in does_not(recorded).alerts()


@pytest.mark.parametrize("key", MORE_CASES)
def test_so_do_other_signs_of_it(tmp_path: Path, key: str) -> None:
    fires, does_not = MORE_CASES[key]
    assert key in fires(RecordedRun(tmp_path / "fires")).alerts()
    assert key not in does_not(RecordedRun(tmp_path / "does not")).alerts()


def test_a_steady_run_has_no_alert(recorded: RecordedRun) -> None:
    assert steady(recorded).alerts() == []


def test_evidence_names_the_rank_the_step_and_the_checkpoint_to_go_back_to(tmp_path: Path) -> None:
    def only(run: RecordedRun, key: str) -> Alert:
        return next(alert for alert in run.look().alerts if alert.key == key)

    silent = only(rank_behind(RecordedRun(tmp_path / "a")), "silence:rank")
    assert "the others wait for rank 3 on node2, in forward of micro-batch 0 of step 301" in silent.evidence
    leapt = only(spikes(RecordedRun(tmp_path / "b")), "loss_spikes")
    assert "step 230 (7 where 2.0" in leapt.evidence
    assert leapt.since == BEGIN + 30 + 230
    rose = only(rising(RecordedRun(tmp_path / "c")), "divergence")
    assert "the checkpoint of step " in rose.advice
    stormy = only(storm(RecordedRun(tmp_path / "d")), "restart_storm")
    assert "3 attempts failed" in stormy.evidence
    assert "ValueError" in stormy.evidence


def test_rows_without_a_time_are_passed_over(recorded: RecordedRun) -> None:
    steady(recorded).train(10, FALLING, seconds=1.4).train(1, lambda _: 9.0, seconds=1.4, time=None)
    recorded.train(12, FALLING, seconds=1.4).train(1, lambda _: float("nan"), seconds=1.4, time=None)
    assert recorded.alerts() == ["throughput:own"]


@pytest.mark.parametrize("pause", [first_evaluation, first_save])
def test_a_long_pause_is_no_stall_while_all_nodes_tell_of_it(recorded: RecordedRun, pause: Story) -> None:
    assert "stall" not in pause(recorded).alerts()
    recorded.beat(1, {"record": [2], "forward": [3]})
    assert "stall" in recorded.alerts()
    recorded.beat(1, {"record": [2, 3]}).wait(70).beat(0, {"record": [0, 1]})
    assert "stall" in recorded.alerts()
    recorded.beat(1, {"record": [2, 3]}).run.heartbeat(0).unlink()
    assert "stall" in recorded.alerts()


@pytest.mark.parametrize(("steps", "fires"), [(300, False), (301, True)])
def test_after_the_last_step_no_row_is_late(tmp_path: Path, steps: int, fires: bool) -> None:
    run = RecordedRun(tmp_path, Config(train=TrainConfig(steps=steps)))
    assert ("stall" in steady(run).wait(400).alerts()) is fires
    slower = RecordedRun(tmp_path / "slower", Config(train=TrainConfig(steps=steps + 6)))
    assert "stall:slow_steps" in slow_steps(slower).alerts()


def test_failures_that_are_far_apart_and_each_went_further_are_no_storm(recorded: RecordedRun) -> None:
    assert "restart_storm" not in old_failures(recorded).alerts()


def test_ranks_are_compared_with_as_many_ranks(recorded: RecordedRun) -> None:
    assert "throughput:own" not in slower_on_fewer_ranks(recorded).alerts()


def test_a_loss_that_is_not_finite_needs_no_second_one(recorded: RecordedRun) -> None:
    assert "loss_spikes" in not_finite(recorded).alerts()


def test_steps_that_are_skipped_for_their_gradients_are_an_alert(recorded: RecordedRun) -> None:
    steady(recorded)
    recorded.train(5, FALLING, nonfinite_steps=3).train(1, FALLING, nonfinite_steps=4)
    assert "loss_spikes" not in recorded.alerts(), "one is none, and earlier ones are over"
    recorded.train(5, FALLING, nonfinite_steps=6)
    (alert,) = (alert for alert in recorded.look().alerts if alert.key == "loss_spikes")
    assert "3 steps were skipped up to step 311: their loss or gradient was not finite" in alert.evidence
    assert "leapt" not in alert.evidence
    recorded.train(101, FALLING, nonfinite_steps=6)
    assert "loss_spikes" not in recorded.alerts()


def test_a_checkpoint_is_too_old_by_what_its_configuration_says(tmp_path: Path) -> None:
    every = {
        "by steps": {"every_steps": 60},
        "by the clock": {"every_s": 60.0},
        "at most": {"every_steps": 120},
    }
    old = {}
    for index, (name, settings) in enumerate(every.items()):
        run = RecordedRun(tmp_path / str(index), Config(checkpoint=CheckpointConfig(**settings)))
        # Saves of step 100 and 200, and 60 + 2 · 60 s are over since the last one.
        old[name] = run.start().train(299).train(0).alerts()
        run.step += 1
        old[name] = run.train(90).alerts()
    assert {name: "checkpoint:age" in keys for name, keys in old.items()} == {
        "by steps": True,
        "by the clock": True,
        "at most": False,
    }


def test_without_room_for_two_more_checkpoints_a_disk_is_too_full(recorded: RecordedRun) -> None:
    assert [key for key in steady(recorded).alerts() if key.startswith("disk")] == []
    assert "disk:run" in recorded.alerts(disk_free_bytes=1e18)
    recorded.write("checkpoint_needs", rank=0, checkpoint_bytes=10**17)
    assert "disk:checkpoints" in recorded.alerts()


def test_a_run_that_failed_or_fell_silent_is_an_alert_and_one_that_finished_is_none(
    recorded: RecordedRun,
) -> None:
    steady(recorded)
    assert recorded.alerts(RunPhase.failed) == ["ended_badly"]
    assert recorded.alerts(RunPhase.unknown) == ["silence:all"]
    for state in (RunPhase.finished, RunPhase.stopped, RunPhase.cancelled):
        found = recorded.look(state)
        assert (list(found.alerts), list(found.unseen)) == ([], [])


def test_an_alert_is_no_sign_of_life_of_its_run(recorded: RecordedRun) -> None:
    heard = steady(recorded).time
    recorded.wait(900).write("alert_raised", key="silence:all", told=[])
    (silent,), (died,) = (recorded.look(state).alerts for state in (RunPhase.unknown, RunPhase.died))
    assert (silent.since, died.since) == (heard, heard)
    ended = recorded.fail().time
    recorded.wait(900).write("alert_ended", key="silence:all", told=[])
    (failed,) = recorded.look(RunPhase.failed).alerts
    assert failed.since == ended
    recorded.write("start_failed", code=1)
    (failed,) = recorded.look(RunPhase.failed).alerts
    assert failed.since == recorded.time


def test_a_plan_that_the_run_falls_short_of_is_an_alert(recorded: RecordedRun) -> None:
    from orchestra.alerts.observe import observe
    from orchestra.alerts.pace_detectors import throughput

    steady(recorded)
    state = RunState("first", str(recorded.run.path), RunPhase.running, attempts=1)
    run = dataclasses.replace(observe(state, recorded.time, {}), planned_tokens_per_s=4096 / 0.6)
    assert [found.key for found in throughput(run, Limits()) if isinstance(found, Alert)] == [
        "throughput:plan"
    ]
    enough = dataclasses.replace(run, planned_tokens_per_s=4096 / 0.8)
    assert throughput(enough, Limits()) == []


def test_what_cannot_be_seen_is_said(tmp_path: Path) -> None:
    config = Config(
        recovery=RecoveryConfig(straggler_every_steps=None), checkpoint=CheckpointConfig(dir="s3://b/p")
    )
    run = RecordedRun(tmp_path, config)
    run.attempt += 1
    run.write("attempt_started", nodes=2, pid=1).write("training_started", rank=0, world_size=4).wait(90)
    blind = {each.detector: each.why for each in run.look().unseen}
    assert set(blind) == {
        *("stall", "silence", "throughput", "slow_rank", "divergence", "loss_spikes", "goodput"),
        *("checkpoint", "disk"),
    }
    assert "s3://" in blind["disk"]
    assert "no node wrote a heartbeat" in blind["silence"]


def test_the_clock_of_a_node_that_is_behind_is_no_stall(recorded: RecordedRun) -> None:
    steady(recorded).wait(100)
    os.utime(recorded.run.metrics, (recorded.time, recorded.time))
    assert [alert.detector for alert in recorded.beat(0).beat(1).look().alerts] == []


def test_a_checkpoint_waits_for_evaluations_between_saves(tmp_path: Path) -> None:
    kept = CheckpointConfig(every_steps=10)
    found = []
    for every in (None, 10):
        config = Config(checkpoint=kept, eval=EvalConfig(every), train=TrainConfig(steps=100_000))
        run = RecordedRun(tmp_path / str(every), config).start().train(100)
        run.write("evaluated", rank=0, step=100, seconds=100.0)
        found.append([alert.key for alert in run.wait(104).beat(0).beat(1).look().alerts])
    assert ["checkpoint:age" in keys for keys in found] == [True, False]


def test_a_slow_rank_of_a_mixture_may_have_the_busy_experts(tmp_path: Path) -> None:
    advices = []
    for ep in (1, 2):
        config = Config(train=TrainConfig(steps=100_000), parallelism=ParallelismConfig(ep=ep))
        run = RecordedRun(tmp_path / str(ep), config).start().train(3, flat)
        run.write("straggler_found", rank=3, host="node2", ratio=1.5, step=3)
        advices += [alert.advice for alert in run.look().alerts if alert.detector == "slow_rank"]
    assert [advice.startswith("see moe/rank_load first") for advice in advices] == [False, True]


def test_a_run_of_another_version_is_judged_by_what_can_be_read(recorded: RecordedRun) -> None:
    steady(recorded).run.config.write_text("no: {configuration")
    found = recorded.wait(100).beat(0).beat(1).look()
    assert [alert.key for alert in found.alerts] == ["stall"]
    assert "not a frozen configuration" in next(e.why for e in found.unseen if e.detector == "checkpoint")


def test_a_sweep_is_an_alert_where_a_tenth_of_what_ended_went_wrong() -> None:
    def sweep(*states: RunPhase) -> SweepState:
        members = [
            MemberState(
                SweepMember(i, "", ()), RunDir(Path("x")), RunState("", "", state, 1, cause="a cause")
            )
            for i, state in enumerate(states)
        ]
        return SweepState(SweepDir(Path("lr")), tuple(members))

    good, bad = [RunPhase.finished] * 19, RunPhase.failed
    assert failing_members(sweep(*good, bad), Limits(), BEGIN, "why") == []
    (alert,) = failing_members(sweep(*good[:18], bad, RunPhase.died), Limits(), BEGIN, "why")
    assert alert.evidence == "2 of 20 members that ended went wrong: 2 × a cause; 018, 019"


def test_a_step_is_not_slow_because_its_batch_has_grown(tmp_path: Path) -> None:
    grows = [BatchStage(0, 4096), BatchStage(300 * 4096, 4 * 4096)]
    train = TrainConfig(steps=100_000, batch_ramp=grows)
    run = RecordedRun(tmp_path, Config(train=train)).start().train(300, FALLING)
    run.train(6, FALLING, seconds=4.0)
    assert not [key for key in run.alerts() if key.startswith("stall")]
    run.train(6, FALLING, seconds=9.0)
    assert "stall:slow_steps" in run.alerts()
