"""What failures cost a planned run: goodput, how often to save, how many spares pay.

Times come from the prediction and from assumptions that are named, or from a run's own records. Closed forms
are in `orchestra.sizes.save_interval`; `simulator` simulates, by the real recovery policy. It reads no file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from conf.schema import Config, LauncherName, Requeue
from orchestra.plan.goodput.scenario import Scenario, Times
from orchestra.plan.goodput.simulator import SimulatedRun, simulate
from orchestra.recovery.accounting import account, attempt_times
from orchestra.recovery.policy import Action, Rules
from orchestra.run.files import Record
from orchestra.sizes import save_interval
from orchestra.sizes.flops import num_parameters
from orchestra.sizes.save_interval import Interval
from orchestra.sizes.units import slurm_time_s

# What a checkpoint holds of a parameter: the fp32 master and Adam's two moments.
_SAVED_BYTES = 12
# Failures in one simulation: what they take is then known to about a fourteenth of it. A run with a time
# limit is simulated for so many jobs at most.
_FAILURES_SIMULATED = 200
_JOBS_SIMULATED = 1000
# Intervals that are tried around the closed form's, as multiples of it.
_MULTIPLES = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)
# When a person resumes a run that the policy gave up. Assumed.
ATTENDED_AFTER_S = 3600.0
# Mean wait in the queue where nobody said one. Assumed.
_QUEUE_WAIT_S = 600.0
# Numbers of spares that are tried: 0, 1, 2, 4 … 64; beyond, one refill lasts a run.
_MOST_SPARE_COUNTS = 8
# A run that never saves.
_NEVER = 10**12
# A lost node, as measured on the development cluster; of thousands not all beats are read at once.
_NOTICED_S = 3.5
_BEATS_READ_PER_S = 500


def measured(events: Sequence[Record], rows: Iterable[Record]) -> dict[str, float]:
    """Return what a run's moves took, by the names of `Times`, as far as its records say: `events` ordered by
    time, `rows` of metrics.jsonl in the file's order.

    A start's time is what `recovery.accounting` books to starts and restarts, failures' detection included,
    over the number of attempts.
    """
    rows = list(rows)
    attempts = attempt_times(events, rows)
    if not attempts:
        return {}
    saves = [save for each in attempts for save in each.attempt.saves]
    concluded = {step: time for each in attempts for step, time in each.attempt.concluded_saves}
    samples = {
        "step_s": [each.step_time_s for each in attempts if each.step_time_s is not None],
        "stall_s": [save.blocked_s for save in saves],
        "write_s": [max(0.0, concluded[save.step] - save.time) for save in saves if save.step in concluded],
        "restart_s": [account(events, rows).restart_s / len(attempts)],
        "restore_s": [each.restore_s for each in attempts if each.restore_s > 0],
    }
    return {name: statistics.median(seconds) for name, seconds in samples.items() if seconds}


def assumed_times(config: Config, step_s: float, world_size: int) -> Times:
    """Return a run's times where nothing was measured: the saves by the bytes of a rank's share, the restart
    as `Times` assumes it, what is noticed as the configuration says.
    """
    share = num_parameters(config.model) * _SAVED_BYTES / world_size
    write_s = save_interval.assumed_write_s(share)
    recovery = config.recovery
    return Times(
        step_s=step_s,
        stall_s=save_interval.assumed_stall_s(share),
        write_s=write_s,
        # Read as fast as written, and ten seconds to find and check what is there.
        restore_s=10.0 + write_s,
        notice_node_s=min(recovery.agent_timeout_s, _NOTICED_S + config.cluster.nodes / _BEATS_READ_PER_S),
        notice_hang_s=recovery.heartbeat_timeout_s,
    )


def interval_of(config: Config, times: Times) -> Interval:
    """Return the interval that `checkpoint.every_steps=auto` means for a configuration, by Daly's formula."""
    mttf = save_interval.mttf_s(_num_devices(config), config.cluster.mtbf_device_hours)
    best = save_interval.chosen(times.step_s, times.stall_s, mttf, write_s=times.write_s, source="predicted")
    return replace(best, every_steps=min(best.every_steps, config.train.steps))


def scenario_of(config: Config, times: Times) -> Scenario:
    """Return the run that a configuration describes, to be simulated over some hundred failures."""
    cluster, recovery = config.cluster, config.recovery
    limit_s = None if cluster.time_limit is None else slurm_time_s(cluster.time_limit)
    chosen: int | str | None = config.checkpoint.every_steps
    if config.checkpoint.every_s is not None:
        chosen = max(1, round(config.checkpoint.every_s / times.step_s))
    every = interval_of(config, times).every_steps if chosen == save_interval.AUTO else chosen
    scenario = Scenario(
        num_nodes=cluster.nodes,
        times=times,
        every_steps=int(every or _NEVER),
        devices_per_node=_num_devices(config) // cluster.nodes,
        mtbf_device_hours=save_interval.device_hours(cluster.mtbf_device_hours),
        memory_copy_every_steps=recovery.memory_copy_every_steps,
        spare_nodes=cluster.spare_nodes,
        min_nodes=recovery.min_nodes,
        can_requeue=cluster.requeue is not Requeue.never,
        queue_wait_s=0.0 if cluster.launcher is LauncherName.local else _QUEUE_WAIT_S,
        time_limit_s=None if limit_s is None else float(limit_s),
        preflight=recovery.preflight,
        attended_after_s=ATTENDED_AFTER_S,
    )
    return _long_enough(scenario)


def _long_enough(scenario: Scenario) -> Scenario:
    limit_s = math.inf if scenario.time_limit_s is None else _JOBS_SIMULATED * scenario.time_limit_s
    return replace(scenario, horizon_s=min(_FAILURES_SIMULATED * scenario.mttf_s, limit_s))


def _num_devices(config: Config) -> int:
    ranks = config.cluster.gpus_per_node
    return config.cluster.nodes * (ranks if isinstance(ranks, int) else 1)


@dataclass(frozen=True)
class Point:
    """One setting and what comes of it: closed form (None: it has none), and simulated."""

    value: int
    seconds: float
    closed: float | None
    simulated: float
    per_device: float
    # How often the policy gave up, and a person had to resume the run.
    num_given_up: int = 0


def expected(scenario: Scenario) -> float:
    """Return the goodput by Daly's cost function: a failure costs its being noticed, the start, the restore,
    and what was being written. Policy, queue and loss of nodes are left out.
    """
    times, mix = scenario.times, scenario.mix
    noticed_s = sum(share * times.notice_s(cause) for cause, share in mix.items()) / sum(mix.values())
    lost_s = noticed_s + times.restart_s + times.restore_s + times.write_s
    interval_s = scenario.saves_every_steps * times.step_s
    return save_interval.daly_goodput(interval_s, times.stall_s, lost_s, scenario.mttf_s)


def by_interval(scenario: Scenario, rules: Rules, seed: int = 0) -> list[Point]:
    """Return goodput over the steps between saves, around the closed form's, under the same failures."""
    times = scenario.times
    best = save_interval.chosen(times.step_s, times.stall_s, scenario.mttf_s).every_steps
    steps = {max(1, round(best * multiple)) for multiple in _MULTIPLES}
    if scenario.every_steps < _NEVER:
        steps.add(scenario.every_steps)
    return [_point(every, replace(scenario, every_steps=every), rules, seed) for every in sorted(steps)]


def by_spares(scenario: Scenario, rules: Rules, seed: int = 0) -> list[Point]:
    """Return goodput over the number of spare nodes, up to an eighth of the run's; the same failures."""
    counts, largest = [0, 1], max(1, scenario.num_nodes // 8)
    while counts[-1] * 2 <= largest and len(counts) < _MOST_SPARE_COUNTS:
        counts.append(counts[-1] * 2)
    counts = sorted({*counts, scenario.spare_nodes})
    return [_point(count, replace(scenario, spare_nodes=count), rules, seed) for count in counts]


def by_devices(scenario: Scenario, rules: Rules, sizes: Sequence[int], seed: int = 0) -> list[Point]:
    """Return goodput over the number of devices, each with its own best interval and, as here, one spare for
    so many nodes. A step, a save and a start are taken to last as long as here.
    """
    points = []
    for size in sizes:
        nodes = max(1, size // scenario.devices_per_node)
        spares = math.ceil(scenario.spare_nodes * nodes / scenario.num_nodes)
        sized = replace(scenario, num_nodes=nodes, spare_nodes=spares, min_nodes=None)
        times = sized.times
        best = save_interval.chosen(times.step_s, times.stall_s, sized.mttf_s, write_s=times.write_s)
        sized = _long_enough(replace(sized, every_steps=best.every_steps))
        points.append(_point(nodes * scenario.devices_per_node, sized, rules, seed))
    return points


@dataclass(frozen=True)
class GoodputStudy:
    """One run simulated, and the same over the interval between saves, the spare nodes and the devices; the
    best interval by Young's and by Daly's formula, in seconds.
    """

    run: SimulatedRun
    intervals: list[Point]
    spares: list[Point]
    devices: list[Point]
    young_s: float
    daly_s: float


def study(scenario: Scenario, rules: Rules, sizes: Sequence[int], seed: int = 0) -> GoodputStudy:
    """Simulate a run as it is, and with other intervals, spare nodes and numbers of devices (`sizes`)."""
    stall_s, mttf = scenario.times.stall_s, scenario.mttf_s
    return GoodputStudy(
        run=simulate(scenario, seed, rules),
        intervals=by_interval(scenario, rules, seed),
        spares=by_spares(scenario, rules, seed),
        devices=by_devices(scenario, rules, sizes, seed),
        young_s=save_interval.young_s(stall_s, mttf),
        daly_s=save_interval.daly_s(stall_s, mttf),
    )


def _point(value: int, scenario: Scenario, rules: Rules, seed: int) -> Point:
    run = simulate(scenario, seed, rules)
    return Point(
        value=value,
        seconds=scenario.every_steps * scenario.times.step_s,
        closed=expected(scenario),
        simulated=run.goodput,
        per_device=run.goodput_per_device,
        num_given_up=run.actions[Action.give_up.name],
    )


def best_of(points: Sequence[Point]) -> Point:
    """Return the point with most work per device; of equals the first."""
    return max(points, key=lambda point: point.per_device)
