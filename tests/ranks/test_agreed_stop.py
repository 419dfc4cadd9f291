"""A stop asked for at any moment: all ranks end behind the same step, and the run goes on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from attempts import (
    STEPS,
    attempt_of,
    await_sight,
    committed,
    config_of,
    digest_at,
    events_of,
    restored,
    rows,
)
from pool import Ranks

from conf.schema import Config, FaultPhase
from orchestra.data.order import read_ledger
from orchestra.errors import StopRequested, TrainingError
from orchestra.run.control import stop_requests
from orchestra.run.control.stop_requests import StopRequest
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from orchestra.train import stopping
from orchestra.train.watch.inject_faults import Faults


def stopped_attempt(
    rank: int,
    world: int,
    path: Path,
    ask_at: int,
    asker: int = 0,
    attempt: int = 0,
    config: Config | None = None,
    round_s: float = 0.0,
) -> str:
    """Train one attempt, asked by rank `asker` as step `ask_at` begins to stop; return how it ended.

    A round spans `round_s`; 0: the ranks agree after each step.
    """
    strike = Faults.strike

    def ask(faults: Faults, phase: str, step: int) -> None:
        if (phase, step) == ("step", ask_at):
            if rank == asker:
                stop_requests.write_request(RunDir(path), attempt, stop_requests.CANCEL)
            await_sight(path, attempt)
        strike(faults, phase, step)

    with (
        patch.object(Faults, "strike", ask),
        patch.object(stopping, "LOOK_S", 0.001),
        patch.object(stopping, "ROUND_S", round_s),
    ):
        try:
            attempt_of(rank, world, path, attempt, config or config_of())
            dist.barrier()
        except (StopRequested, TrainingError) as error:
            # Rank 0 hosts the ranks' store, as long as this error's frames live: others still read it.
            dist.barrier()
            return f"{type(error).__name__}: {error}"
    return "finished"


def stop_events(path: Path) -> list[Record]:
    return events_of(path, "stop_requested")


def asked(path: Path, attempt: int = 0) -> StopRequest:
    request = stop_requests.read_request(RunDir(path), attempt)
    assert request is not None
    return request


@pytest.mark.parametrize(("ask_at", "asker"), [(1, 0), (1, 1), (4, 0), (5, 0), (5, 1), (6, 1), (11, 0)])
def test_all_ranks_stop_behind_the_step_in_which_it_was_asked_and_the_run_goes_on_bit_for_bit(
    ranks: Ranks, alone: tuple[Path, list[dict[str, str]]], tmp_path: Path, ask_at: int, asker: int
) -> None:
    pool, run = ranks(2), tmp_path / "run"
    ended = pool.run(stopped_attempt, path=run, ask_at=ask_at, asker=asker)
    assert ended == [f"StopRequested: {asked(run)}"] * 2
    (event,) = stop_events(run)
    assert (event["step"], event["rank"], event["reason"]) == (ask_at, 0, "cancel")
    assert (event["user"], event["asked_on"]) == (asked(run).user, asked(run).host)
    assert committed(run)[-1] == rows(run)[-1]["step"] == ask_at

    expected, held = alone
    # The request of attempt 0 is still there and stops nothing.
    assert pool.run(attempt_of, path=run, attempt=1, config=config_of()) == held
    assert restored(run)["step"] == ask_at
    assert rows(run) == rows(expected)
    assert read_ledger(RunDir(run)) == read_ledger(RunDir(expected))
    assert digest_at(run, STEPS) == digest_at(expected, STEPS)


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("ask_at", [1, 3, 8])
def test_with_rounds_of_several_steps_all_ranks_still_stop_behind_the_same_one(
    ranks: Ranks, tmp_path: Path, ask_at: int, world: int
) -> None:
    ended = ranks(world).run(stopped_attempt, path=tmp_path, ask_at=ask_at, asker=world - 1, round_s=1e9)
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
    ended = ranks(2).run(stopped_attempt, path=tmp_path, ask_at=STEPS, asker=1)
    assert (ended, committed(tmp_path)[-1]) == (["finished"] * 2, STEPS)
    assert stop_events(tmp_path) == []


def test_a_stop_that_was_asked_for_before_the_first_step_trains_none(ranks: Ranks, tmp_path: Path) -> None:
    stop_requests.write_request(RunDir(tmp_path), 0, stop_requests.signal_reason("SIGTERM"))
    ended = ranks(2).run(stopped_attempt, path=tmp_path, attempt=0, ask_at=0)
    assert ended == [f"StopRequested: {asked(tmp_path)}"] * 2
    assert [event["step"] for event in stop_events(tmp_path)] == [0]
    assert (rows(tmp_path), committed(tmp_path)) == ([], [])
    # The next attempt stops behind step 7, the one after it before it has trained any more.
    ranks(2).run(stopped_attempt, path=tmp_path, attempt=1, ask_at=7)
    stop_requests.write_request(RunDir(tmp_path), 2, stop_requests.PREEMPTED)
    ended = ranks(2).run(stopped_attempt, path=tmp_path, attempt=2, ask_at=0)
    assert ended == [f"StopRequested: {asked(tmp_path, 2)}"] * 2
    assert [event["step"] for event in stop_events(tmp_path)] == [0, 7, 7]
    assert (rows(tmp_path)[-1]["step"], committed(tmp_path)) == (7, [5, 7])


@pytest.mark.parametrize(
    ("checkpoint", "saved"),
    [({"every_steps": 1, "async_save": True}, 4), ({"every_steps": None}, None)],
    ids=["save under way", "saves nothing"],
)
def test_a_stop_comes_behind_a_save_under_way_and_makes_none_in_a_run_that_saves_nothing(
    ranks: Ranks, tmp_path: Path, checkpoint: dict[str, Any], saved: int | None
) -> None:
    config = config_of(checkpoint=checkpoint)
    ended = ranks(2).run(stopped_attempt, path=tmp_path, config=config, ask_at=4, asker=1)
    assert ended == [f"StopRequested: {asked(tmp_path)}"] * 2
    assert max(committed(tmp_path), default=None) == saved


def test_a_stop_whose_save_fails_ends_all_ranks_with_the_reason(ranks: Ranks, tmp_path: Path) -> None:
    impatient = {"every_steps": 5, "last_save_patience_s": 0.0}
    inject = [{"at_step": 7, "rank": 1, "phase": FaultPhase.mid_file.name}]
    config = config_of(inject=inject, checkpoint=impatient)
    ended = ranks(2).run(stopped_attempt, path=tmp_path, config=config, ask_at=7)
    assert all(end.startswith("UnsavedError: step 7 was trained, but its checkpoint") for end in ended)
    assert committed(tmp_path) == [5]


def test_all_ranks_save_the_same_steps_by_the_clock_of_rank_0(ranks: Ranks, tmp_path: Path) -> None:
    pool, run = ranks(2), tmp_path / "run"
    config = config_of(checkpoint={"every_s": 1e-3, "keep_last": STEPS})
    assert pool.run(stopped_attempt, path=run, ask_at=STEPS + 1, config=config) == ["finished"] * 2
    # At each round's end, which is not after every step, and at the last step; not every five steps.
    saved = [event["step"] for event in events_of(run, "checkpoint_committed")]
    assert saved[-1] == STEPS
    assert len(saved) > 2
    assert not events_of(run, "checkpoint_failed")
