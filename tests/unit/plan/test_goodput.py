"""What failures cost a planned run: times that were measured, the interval of `auto`, spares that pay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conf.schema import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    LauncherName,
    ParallelismConfig,
    RecoveryConfig,
    Requeue,
    TrainConfig,
)
from orchestra.plan.goodput.expected_goodput import (
    assumed_times,
    best_of,
    by_devices,
    by_interval,
    by_spares,
    expected,
    interval_of,
    measured,
    scenario_of,
)
from orchestra.plan.goodput.scenario import Scenario, Times
from orchestra.recovery.policy import Rules
from orchestra.run.files import Record
from orchestra.sizes import save_interval

TIMES = Times(step_s=10.0, stall_s=5.0, write_s=30.0, restart_s=120.0, restore_s=30.0)


def config_of(**cluster: Any) -> Config:
    usual = {"launcher": LauncherName.slurm, "nodes": 128, "gpus_per_node": 8, "hardware": "h100"}
    return Config(
        cluster=ClusterConfig(**{**usual, **cluster}),
        checkpoint=CheckpointConfig(every_steps=save_interval.AUTO),
        train=TrainConfig(steps=1_000_000, global_batch_size=1024, micro_batch_size=1),
        parallelism=ParallelismConfig(zero=3),
    )


def event(time: float, name: str, attempt: int = 0, **evidence: Any) -> Record:
    return {"time": time, "attempt": attempt, "event": name, **evidence}


def test_times_are_read_from_a_runs_own_records() -> None:
    """Two attempts: 20 s and 30 s to start, two saves, a restore of 4 s, steps of 2 s."""
    events = [
        event(0.0, "attempt_started", pid=1, host="node1"),
        event(20.0, "training_started", rank=0),
        event(40.5, "checkpoint_started", step=10, blocked_s=0.5),
        event(43.5, "checkpoint_committed", step=10),
        event(61.2, "checkpoint_started", step=20, blocked_s=0.7),
        event(66.2, "checkpoint_committed", step=20),
        event(70.0, "failed", code=1, cause="x"),
        event(70.0, "restarting", decision="restart"),
        event(70.0, "attempt_started", attempt=1, pid=1, host="node1"),
        event(100.0, "restored", attempt=1, step=20, seconds=4.0, source="checkpoint"),
        event(100.0, "training_started", attempt=1, rank=0),
        event(120.0, "finished", attempt=1, code=0),
    ]
    rows = [
        {"step": step, "time": time, "step_time_s": 2.0}
        for step, time in ((10, 40.0), (20, 60.5), (30, 120.0))
    ]
    times = measured(events, rows)
    # 20 s, the 4 s from the last record to the failure's end, and 30 s less the restore, over two attempts.
    assert 20.0 < times.pop("restart_s") < 30.0
    assert times == pytest.approx({"step_s": 2.0, "stall_s": 0.6, "write_s": 4.0, "restore_s": 4.0})
    assert measured([], []) == {}


def test_auto_is_dalys_interval_for_the_clusters_size_and_no_longer_than_the_run() -> None:
    small, large = config_of(nodes=2), config_of(nodes=2048)
    for config in (small, large):
        devices = config.cluster.nodes * 8
        seconds = save_interval.daly_s(TIMES.stall_s, save_interval.mttf_s(devices, None))
        assert interval_of(config, TIMES).every_steps == round(seconds / TIMES.step_s)
    often = config_of(nodes=2, mtbf_device_hours=500.0)
    assert interval_of(often, TIMES).every_steps < interval_of(small, TIMES).every_steps
    short = replace(config_of(), train=TrainConfig(steps=7))
    assert interval_of(short, TIMES).every_steps == 7


def test_a_scenario_is_what_the_configuration_says() -> None:
    config = replace(
        config_of(spare_nodes=3, requeue=Requeue.never, time_limit="1-00:00:00", mtbf_device_hours=1000.0),
        recovery=RecoveryConfig(min_nodes=100, memory_copy_every_steps=5, agent_timeout_s=20.0),
        checkpoint=CheckpointConfig(every_steps=250),
    )
    times = assumed_times(config, 3.0, 1024)
    found = scenario_of(config, times)
    assert (found.num_nodes, found.devices_per_node, found.spare_nodes, found.min_nodes) == (128, 8, 3, 100)
    assert (found.every_steps, found.memory_copy_every_steps, found.can_requeue) == (250, 5, False)
    assert (found.time_limit_s, found.mtbf_device_hours) == (86_400.0, 1000.0)
    assert (times.step_s, times.notice_node_s) == (3.0, pytest.approx(3.756))
    hurried = replace(config, recovery=replace(config.recovery, agent_timeout_s=2.0))
    assert assumed_times(hurried, 3.0, 1024).notice_node_s == 2.0
    assert found.mttf_s == pytest.approx(1000 * 3600 / 1024)
    saves_nothing = replace(config_of(), checkpoint=CheckpointConfig(every_steps=None))
    assert expected(scenario_of(saves_nothing, TIMES)) < 1e-6


def scenario(**changes: Any) -> Scenario:
    usual = Scenario(64, TIMES, 100, mtbf_device_hours=4000.0, horizon_s=200 * 4000 * 3600 / 512)
    return replace(usual, **changes)


def test_simulated_and_closed_goodput_agree_on_intervals() -> None:
    points = by_interval(scenario(spare_nodes=8), Rules(max_restarts=100))
    best = max(points, key=lambda point: point.closed or 0.0)
    assert abs(best_of(points).value / best.value - 1) < 1.1
    for point in points:
        assert point.closed is not None
        # What sampling leaves, and the spares' refills, which the formula does not know.
        assert point.simulated == pytest.approx(point.closed, abs=0.04)


def test_spares_pay_where_the_queue_is_long_and_not_where_it_is_empty() -> None:
    for queue_wait_s, pays in ((24 * 3600.0, True), (0.0, False)):
        points = by_spares(scenario(queue_wait_s=queue_wait_s), Rules(max_restarts=100))
        assert (best_of(points).value > 0) is pays


def test_more_devices_leave_less_of_the_time() -> None:
    points = by_devices(scenario(spare_nodes=8), Rules(max_restarts=100), (16, 128, 1024, 8192))
    assert [point.value for point in points] == [16, 128, 1024, 8192]
    for fallen in ([point.simulated for point in points], [point.seconds for point in points]):
        assert fallen == sorted(fallen, reverse=True)
