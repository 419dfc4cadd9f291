"""A stop asked for at any moment: all ranks end behind the same step, and the run goes on from there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from test_resume import STEPS, attempt_of, config_of, digest_at, restored, rows

from checkpointing import catalog
from checkpointing.storage import open_storage
from conf.schema import FaultPhase, RecoveryConfig
from orchestra.data.ledger import read_ledger
from orchestra.errors import StopRequested, TrainingError
from orchestra.run import stop_requests
from orchestra.run.events import read_events
from orchestra.run.paths import RunDir
from orchestra.run.stop_requests import StopRequest
from orchestra.train import stopping
from orchestra.train.watch.inject_faults import Faults

pytestmark = pytest.mark.ranks

Ranks = Callable[[int], RankPool]


def stopped_attempt(
    rank: int, world: int, path: Path, attempt: int, config: Any, ask_at: int, asker: int, round_s: float
) -> str:
    """Train one attempt, asked by rank `asker` as step `ask_at` begins to stop; return how it ended.

    A round spans `round_s`; 0: the word is asked for behind each step.
    """
    strike, look_s, then_s = Faults.strike, stopping.LOOK_S, stopping.ROUND_S

    def ask(faults: Faults, phase: str, step: int) -> None:
        if (phase, step) == ("step", ask_at) and rank == asker:
            stop_requests.write_request(RunDir(path), attempt, stop_requests.CANCEL)
        if (phase, step) == ("step", ask_at):
            _await_sight(path, attempt)
        strike(faults, phase, step)

    Faults.strike, stopping.LOOK_S, stopping.ROUND_S = ask, 0.001, round_s  # type: ignore[method-assign]
    try:
        attempt_of(rank, world, path, attempt, config)
    except (StopRequested, TrainingError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        Faults.strike, stopping.LOOK_S, stopping.ROUND_S = strike, look_s, then_s  # type: ignore[method-assign]
    return "finished"


def _await_sight(path: Path, attempt: int) -> None:
    """Wait until the request is written, and as long as rank 0 needs to see it."""
    deadline = time.monotonic() + 10
    while stop_requests.read_request(RunDir(path), attempt) is None and time.monotonic() < deadline:
        time.sleep(0.001)
    watching = [thread for thread in threading.enumerate() if thread.name == "stop requests"]
    for thread in watching:
        thread.join(10)


def stop_events(path: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(RunDir(path)) if event["event"] == "stop_requested"]


def committed(path: Path) -> list[int]:
    return catalog.committed_steps(open_storage(path / "checkpoints"))


def asked(path: Path, attempt: int = 0) -> StopRequest:
    request = stop_requests.read_request(RunDir(path), attempt)
    assert request is not None
    return request


@pytest.fixture(scope="module")
def kept() -> dict[Path, list[Any]]:
    """Return, by its path, what the ranks of the run that nobody stops held in the end, once trained."""
    return {}


@pytest.fixture
def alone(
    ranks: Ranks, kept: dict[Path, list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Any]]:
    if not kept:
        path = tmp_path_factory.mktemp("alone")
        kept[path] = ranks(2).run(attempt_of, world=2, path=path, attempt=0, config=config_of())
    return next(iter(kept.items()))


@pytest.mark.parametrize("asker", [0, 1])
@pytest.mark.parametrize("ask_at", [1, 2, 4, 5, 6, 11])
def test_all_ranks_stop_behind_the_step_in_which_it_was_asked_and_the_run_goes_on_bit_for_bit(
    ranks: Ranks, alone: tuple[Path, list[Any]], tmp_path: Path, ask_at: int, asker: int
) -> None:
    pool, run = ranks(2), tmp_path / "run"
    settings = {"world": 2, "path": run, "attempt": 0, "config": config_of()}
    ended = pool.run(stopped_attempt, **settings, ask_at=ask_at, asker=asker, round_s=0.0)
    assert ended == [f"StopRequested: {asked(run)}"] * 2
    (event,) = stop_events(run)
    assert (event["step"], event["rank"], event["reason"]) == (ask_at, 0, "cancel")
    assert (event["user"], event["asked_on"]) == (asked(run).user, asked(run).host)
    assert committed(run)[-1] == rows(run)[-1]["step"] == ask_at

    expected, held = alone
    # The request of attempt 0 is still there and stops nothing.
    assert pool.run(attempt_of, world=2, path=run, attempt=1, config=config_of()) == held
    assert restored(run)["step"] == ask_at
    assert rows(run) == rows(expected)
    assert read_ledger(RunDir(run)) == read_ledger(RunDir(expected))
    assert digest_at(run, STEPS) == digest_at(expected, STEPS)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("ask_at", [1, 3, 8])
def test_with_rounds_of_several_steps_all_ranks_still_stop_behind_the_same_one(
    ranks: Ranks, tmp_path: Path, ask_at: int, world: int
) -> None:
    settings = {"world": world, "path": tmp_path, "attempt": 0, "config": config_of()}
    ended = ranks(world).run(stopped_attempt, **settings, ask_at=ask_at, asker=world - 1, round_s=1e9)
    last = rows(tmp_path)[-1]["step"]
    assert committed(tmp_path)[-1] == last
    if ended == ["finished"] * world:
        # The word was still on its way when the last step was done.
        assert (last, stop_events(tmp_path)) == (STEPS, [])
    else:
        assert ended == [f"StopRequested: {asked(tmp_path)}"] * world
        assert ask_at <= last < STEPS
        assert [event["step"] for event in stop_events(tmp_path)] == [last]


def test_a_stop_in_the_last_step_finishes_the_run(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"world": 2, "path": tmp_path, "attempt": 0, "config": config_of()}
    ended = ranks(2).run(stopped_attempt, **settings, ask_at=STEPS, asker=1, round_s=0.0)
    assert (ended, committed(tmp_path)[-1]) == (["finished"] * 2, STEPS)
    assert stop_events(tmp_path) == []


def test_a_stop_that_was_asked_for_before_the_first_step_trains_none(ranks: Ranks, tmp_path: Path) -> None:
    stop_requests.write_request(RunDir(tmp_path), 0, stop_requests.signal_reason("SIGTERM"))
    settings = {"world": 2, "path": tmp_path, "config": config_of(), "asker": 0, "round_s": 0.0}
    ended = ranks(2).run(stopped_attempt, **settings, attempt=0, ask_at=0)
    assert ended == [f"StopRequested: {asked(tmp_path)}"] * 2
    assert [event["step"] for event in stop_events(tmp_path)] == [0]
    assert (rows(tmp_path), committed(tmp_path)) == ([], [])
    # The next attempt stops behind step 7, the one after it before it has trained any more.
    ranks(2).run(stopped_attempt, **settings, attempt=1, ask_at=7)
    stop_requests.write_request(RunDir(tmp_path), 2, stop_requests.PREEMPTED)
    ended = ranks(2).run(stopped_attempt, **settings, attempt=2, ask_at=0)
    assert ended == [f"StopRequested: {asked(tmp_path, 2)}"] * 2
    assert [event["step"] for event in stop_events(tmp_path)] == [0, 7, 7]
    assert (rows(tmp_path)[-1]["step"], committed(tmp_path)) == (7, [5, 7])


def test_a_stop_waits_for_the_save_that_is_under_way(ranks: Ranks, tmp_path: Path) -> None:
    config = config_of(every_steps=1, async_save=True)
    settings = {"world": 2, "path": tmp_path, "attempt": 0, "config": config}
    ended = ranks(2).run(stopped_attempt, **settings, ask_at=4, asker=1, round_s=0.0)
    assert (ended[0][:13], committed(tmp_path)[-1]) == ("StopRequested", 4)


def test_a_run_that_saves_nothing_simply_stops(ranks: Ranks, tmp_path: Path) -> None:
    settings = {"world": 2, "path": tmp_path, "attempt": 0, "config": config_of(every_steps=None)}
    ended = ranks(2).run(stopped_attempt, **settings, ask_at=3, asker=1, round_s=0.0)
    assert ended == [f"StopRequested: {asked(tmp_path)}"] * 2
    assert not (tmp_path / "checkpoints").exists()


def test_a_stop_whose_save_fails_ends_all_ranks_with_the_reason(ranks: Ranks, tmp_path: Path) -> None:
    failing = [{"at_step": 7, "rank": 1, "phase": FaultPhase.mid_file.name}]
    config = replace(config_of(), recovery=RecoveryConfig(inject=failing))
    settings = {"world": 2, "path": tmp_path, "attempt": 0, "config": config}
    ended = ranks(2).run(stopped_attempt, **settings, ask_at=7, asker=0, round_s=0.0)
    assert all(end.startswith("TrainingError: step 7 was trained, but its checkpoint") for end in ended)
    assert committed(tmp_path) == [5]
