"""GPU-hours, energy and cost of a run, or why they are not known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.long_runs import POWER_W, RESTORE_S, START_S, STEP_S, long_run

from conf.schema import ClusterConfig, Config, Device
from orchestra.cli.text.describe import used_lines
from orchestra.report.spending import Spending, read_spending, spending
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import FollowedRows
from orchestra.run.record import RunPhase

PRICED = Config(cluster=ClusterConfig(price_per_gpu_hour=2.5, currency="EUR"))


def event(name: str, time: float, attempt: int, **more: object) -> Record:
    return {"event": name, "time": time, "attempt": attempt, **more}


def started(time: float, attempt: int, nodes: int = 2, **more: object) -> list[Record]:
    start = event("attempt_started", time, attempt, node=0, nodes=nodes, ranks_per_node=8, **more)
    return [start, event("training_started", time + 10, attempt, device="NVIDIA H100")]


def test_a_run_that_lost_a_node_held_its_gpus_throughout(tmp_path: Path) -> None:
    run = long_run(tmp_path, steps=1000, nodes=2)
    used = read_spending(run, read_events(run), FollowedRows(run.metrics).read(), RunPhase.finished, 0.0)
    seconds = 2 * START_S + (600 + 500) * STEP_S + 5.0
    assert used.gpu_hours == pytest.approx(16 * seconds / 3600)
    # Those of steps that were trained again were used too.
    assert used.joules == pytest.approx(POWER_W * STEP_S * 16 * 1100)
    assert used.joules_per_token == pytest.approx(used.joules / 1_000_000)
    assert (used.cost, used.no_cost) == (None, "cluster.price_per_gpu_hour is not set")
    assert RESTORE_S < START_S


def test_the_queue_between_two_jobs_costs_nothing_and_idle_spares_do() -> None:
    spare = replace(PRICED, cluster=replace(PRICED.cluster, spare_nodes=1))
    events = [
        *started(0.0, 0, job="7"),
        event("node_replaced", 3600.0, 0, host="a", by_host="c"),
        event("restarting", 3600.0, 0, decision="replace"),
        *started(3600.0, 1, job="7"),
        event("failed", 7200.0, 1, node=0, code=75),
        *started(20_000.0, 2, job="8"),
    ]
    used = spending(events, [], None, spare, now=23_600.0)
    # Three nodes, then two, since one was lost, and three again in the next job.
    assert used.gpu_hours == pytest.approx(8 * (3 + 2 + 3))
    assert used.cost == pytest.approx(2.5 * 64)
    (line,) = used_lines(replace(used, joules=7.2e6, joules_per_token=0.25, no_energy=None))
    words = "64.00 GPU-hours, 16.00 of them idle; 160.00 EUR; 7.20M J, 0.25 a token"
    assert line.split(maxsplit=1)[1] == words


def test_a_shrunk_job_pays_for_the_nodes_that_train_nothing() -> None:
    """Four nodes, of which one breaks: two share out the batch, and the third stands by."""
    events = [
        *started(0.0, 0, nodes=4, job="7", nodes_held=4),
        event("restarting", 3600.0, 0, decision="shrink", rule="shrink", exclude=["d"]),
        *started(3600.0, 1, nodes=2, job="7", nodes_held=3),
    ]
    used = spending(events, [], None, PRICED, now=7200.0)
    assert (used.gpu_hours, used.idle_gpu_hours) == (pytest.approx(8 * (4 + 3)), pytest.approx(8))
    assert used.cost == pytest.approx(2.5 * 56)


def test_ranks_that_share_a_gpu_hold_one() -> None:
    events = [*started(0.0, 0, nodes=1), event("devices_shared", 1.0, 0, ranks=4)]
    assert spending(events, [], None, None, now=3600.0).gpu_hours == pytest.approx(2.0)


def test_members_that_share_a_gpu_hold_a_part_of_it() -> None:
    (start, trains) = started(0.0, 0, nodes=1)
    events = [start, {**trains, "members_on_device": 4}]
    assert spending(events, [], None, None, now=3600.0).gpu_hours == pytest.approx(2.0)


def test_what_is_not_known_is_none_with_a_reason() -> None:
    on_cpu = replace(PRICED, cluster=replace(PRICED.cluster, device=Device.cpu))
    events = [
        event("attempt_started", 0.0, 0, nodes=1, ranks_per_node=2),
        event("training_started", 1.0, 0, device="cpu"),
        event("energy_unmeasured", 1.0, 0, cause="ranks train on CPUs"),
    ]
    used = spending(events, [{"step": 1, "time": 2.0, "energy_j": None}], 100, on_cpu, now=9.0)
    why = "its ranks are on CPUs"
    assert used == Spending(no_gpu_hours=why, currency="EUR", no_cost=why, no_energy="ranks train on CPUs")
    assert " ".join(" ".join(used_lines(used)).split()) == (
        "used GPU-hours and cost not measured (its ranks are on CPUs); "
        "energy not measured (ranks train on CPUs)"
    )
    # A GPU that was lost for the counters on the way: a part is not the whole.
    rows = [{"step": 1, "time": 2.0, "energy_j": 5.0}]
    assert spending(events, rows, 100, None, now=9.0).joules is None
    unknown = spending([event("attempt_started", 0.0, 0)], [], None, None, now=9.0)
    assert unknown.no_gpu_hours == "attempt 0 does not say how many ranks it had"
