"""A run in the foreground goes on by itself when ranks die or hang or torchrun is stopped, as if nothing had
happened.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import (
    START_S,
    TINY,
    Started,
    assert_same_training,
    events_of,
    printed,
    processes_of,
    start_run,
    state_of,
    train,
    trained_rows,
)

from launchers import numa, processes
from orchestra.report.run_state import read_state
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from tests.support.waiting import eventually

STEPS = ("train.steps=40", "checkpoint.every_steps=5", "checkpoint.async_save=false", "data.ledger=true")
# In attempt 1 the faults come after the step that attempt 0 was killed at, so that there is progress.
FAULTS = (
    "recovery.inject=["
    "{at_step: 12, rank: 1, fault: sigkill},"
    "{attempt: 1, at_step: 22, rank: 0, fault: sigstop},"
    "{attempt: 2, at_step: 33, rank: 1, fault: exception}]"
)


@pytest.fixture(scope="module")
def alone(folder: Path) -> RunDir:
    return train(folder, "alone", *TINY, *STEPS)


def test_a_killed_a_stopped_and_a_failing_rank_cost_nothing_but_time(folder: Path, alone: RunDir) -> None:
    name, copying = "copies", "recovery.memory_copy_every_steps=1"
    run = train(folder, name, *TINY, *STEPS, FAULTS, copying, limit_s=200)
    assert_same_training(run, alone)
    restored = [event for attempt in range(1, 4) for event in events_of(run, "restored", attempt)]
    # A copy is made while the next step is trained: the newest whole one may be of the step before.
    assert max(12 - restored[0]["step"], 22 - restored[1]["step"], 33 - restored[2]["step"]) <= 2
    assert restored[2]["source"] == "memory"
    (hang,) = events_of(run, "hang_detected", 1)
    assert (hang["rank"], hang["state"]) == (0, "T")
    why = printed(folder, "why", name)
    assert "rank 1 waits there; rank 0 left no record" in why
    assert why.count("restarted") == 3
    assert processes_of(run) == []
    state = state_of(folder, name)
    assert (state["state"], state["attempts"]) == ("finished", 4)


def test_a_signal_between_two_attempts_stops_the_run(folder: Path) -> None:
    fault = "recovery.inject=[{attempt: all, at_step: 3, rank: 1}]"
    started = start_run(folder, "waits", *TINY, *STEPS, fault, "recovery.backoff_s=600")
    started.wait_for(lambda: events_of(started.run, "restarting", 1))
    started.process.send_signal(signal.SIGINT)
    started.end(75)
    state = state_of(folder, "waits")
    assert (state["code"], state["attempts"]) == (75, 2)


def test_a_run_that_begins_again_is_never_seen_as_failed(tmp_path: Path) -> None:
    faults = "recovery.inject=[{at_step: 3, rank: 1}, {attempt: 1, at_step: 3, rank: 1}]"
    # The second restart waits, so that however busy the machine is, it is seen.
    started = start_run(tmp_path, "seen", *TINY, "train.steps=20", faults, "recovery.backoff_s=1")
    seen: set[str] = set()
    while started.process.poll() is None:
        if started.run.record.exists():
            seen.add(read_state(started.run, time.time()).state)
        time.sleep(0.002)
    started.end(0)
    assert {"running", "restarting"} <= seen <= {"not started", "running", "restarting", "finished"}
    assert len(events_of(started.run, "attempt_started")) == 3


# Long enough to be stopped in the midst of it, and over soon.
SOME_STEPS = (
    *("train.steps=200", "checkpoint.every_steps=50"),
    "recovery.inject=[{at_step: 1, rank: all, fault: slow, seconds: 0.03}]",
)


def torchrun_of(run: RunDir) -> processes.Process:
    (torchrun,) = processes.with_words("launchers.bound_torchrun", str(run.path))
    return torchrun


def ranks_of(run: RunDir) -> set[processes.Process]:
    path = str(run.path)
    not_ranks = {torchrun_of(run), *processes.with_words("-S", path)}
    return set(processes.with_words("orchestra.train", path)) - not_ranks


def assert_each_rank_has_cores_of_its_own(run: RunDir) -> None:
    cores = [os.sched_getaffinity(rank.pid) for rank in ranks_of(run)]
    (started,) = events_of(run, "node_started")
    if len(os.sched_getaffinity(0)) < len(cores):
        assert (started["cores"], "needs 1" in started["unbound"]) == ([], True)
        return
    assert set.union(*cores) == os.sched_getaffinity(0)
    assert set.intersection(*cores) == set()
    assert sorted(map(numa.parsed_cores, started["cores"])) == sorted(tuple(sorted(own)) for own in cores)


def stop_torchrun(run: RunDir, *, kills: bool) -> None:
    """Stop it, and kill its only rank or see that each has cores of its own."""
    ranks, torchrun = ranks_of(run), torchrun_of(run)
    if not kills:
        assert_each_rank_has_cores_of_its_own(run)
    os.kill(torchrun.pid, signal.SIGSTOP)
    if kills:
        (rank,) = ranks
        os.kill(rank.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def deaf(folder: Path) -> Iterator[dict[str, Started]]:
    """Runs whose torchrun is stopped after three steps, side by side: each agent waits a while then."""
    bound = "cluster.numa_binding=exclusive"
    kinds = {
        "warm": (bound, "recovery.warm_start=true"),
        "cold": (bound, "recovery.warm_start=false"),
        "killed": ("cluster.gpus_per_node=1",),
    }
    runs = {name: start_run(folder, name, *TINY, *SOME_STEPS, *more) for name, more in kinds.items()}
    left = set(runs)

    def are_deaf() -> bool:
        for name in [name for name in left if len(read_metrics(runs[name].run)) >= 3]:
            stop_torchrun(runs[name].run, kills=name == "killed")
            left.remove(name)
        return not left

    try:
        assert eventually(are_deaf, START_S), left
        yield runs
    finally:
        for started in runs.values():
            started.process.kill()
            started.process.communicate()


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_ranks_that_finish_under_a_stopped_torchrun_end_the_run_well(
    deaf: dict[str, Started], start: str
) -> None:
    started = deaf[start]
    out, err = started.end(0, limit_s=100)
    assert "torchrun is ended: all its ranks ended" in out + err
    assert trained_rows(started.run)[-1][0] == 200
    assert events_of(started.run, "attempt_started", 1) == []


def test_a_rank_killed_under_a_stopped_torchrun_is_followed_by_another_attempt(
    deaf: dict[str, Started],
) -> None:
    started = deaf["killed"]
    started.end(0, limit_s=100)
    assert len(events_of(started.run, "attempt_started", 1)) == 1


PIPELINE = (
    "parallelism.pp=4",
    "parallelism.schedule=zero_bubble",
    "cluster.gpus_per_node=4",
    "model.num_hidden_layers=5",
    "train.micro_batch_size=1",
    "train.global_batch_size=6",
    "train.steps=14",
    "checkpoint.every_steps=5",
    "recovery.memory_copy_every_steps=1",
)


def test_in_a_pipeline_the_stage_that_hangs_is_named_and_not_those_that_wait(tmp_path: Path) -> None:
    undisturbed = train(tmp_path, "undisturbed", *TINY, *PIPELINE)
    fault = "recovery.inject=[{at_step: 10, rank: 1, phase: forward, fault: hang}]"
    limits = ("recovery.heartbeat_timeout_s=10",)
    run = train(tmp_path, "disturbed", *TINY, *PIPELINE, *limits, fault, limit_s=200)
    assert_same_training(run, undisturbed)
    (hang,) = events_of(run, "hang_detected", 0)
    assert (hang["rank"], hang["phase"]) == (1, "forward")
    assert processes_of(run) == []
