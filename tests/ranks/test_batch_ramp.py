"""A global batch that grows: against one that is changed by hand, through interruptions, on any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from attempts import attempt_of, config_of, digest_at, events_of, kill_all, rows
from pool import Ranks
from small_trainings import EVEN, SEQUENCE

from conf.schema import BatchStage, Config, RampRate, Schedule
from orchestra.data.order import read_ledger
from orchestra.run.paths import RunDir

# Sequences of the two batches, and the steps of the first: its end lies inside the third of them.
SMALL, LARGE, FIRST_STEPS, STEPS = 4, 12, 3, 8
RAMP = [
    BatchStage(0, SMALL * SEQUENCE),
    BatchStage((SMALL * FIRST_STEPS - 1) * SEQUENCE + 1, LARGE * SEQUENCE),
]
TOKENS = [SMALL * SEQUENCE * step for step in range(1, FIRST_STEPS + 1)]
TOKENS += [TOKENS[-1] + LARGE * SEQUENCE * step for step in range(1, STEPS - FIRST_STEPS + 1)]
MODEL = replace(EVEN, vocab_size=260)


def ramped(rate: RampRate = RampRate.none, inject: Any = (), **parallelism: Any) -> Config:
    config = config_of(inject=inject, checkpoint={"every_steps": 2}, **parallelism)
    optim = replace(config.optim, schedule=Schedule.constant, batch_ramp_lr=rate)
    train = replace(config.train, steps=STEPS, batch_ramp=RAMP)
    return replace(config, model=MODEL, optim=optim, train=train)


def by_hand(config: Config, size: int, steps: int) -> Config:
    train = replace(config.train, steps=steps, batch_ramp=[], global_batch_size=size)
    return replace(config, train=train)


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of two ranks with the ramp, not interrupted."""
    path = tmp_path_factory.mktemp("ramped") / "run"
    ranks(2).run(attempt_of, path=path, attempt=0, config=ramped())
    return path


def test_a_ramp_is_bit_for_bit_the_run_whose_batch_is_changed_by_hand(
    ranks: Ranks, whole: Path, tmp_path: Path
) -> None:
    for attempt, (size, steps) in enumerate([(SMALL, FIRST_STEPS), (LARGE, STEPS)]):
        config = by_hand(ramped(), size, steps)
        ranks(2).run(attempt_of, path=tmp_path, attempt=attempt, config=config)
    assert rows(tmp_path) == rows(whole)
    assert [row["tokens"] for row in rows(whole)] == TOKENS
    assert read_ledger(RunDir(tmp_path)) == read_ledger(RunDir(whole))
    assert digest_at(tmp_path, STEPS) == digest_at(whole, STEPS)


def test_a_run_killed_inside_each_batch_of_a_ramp_goes_on_bit_for_bit(
    ranks: Ranks, whole: Path, tmp_path: Path
) -> None:
    for attempt, kill_at in enumerate((FIRST_STEPS, FIRST_STEPS + 3, None)):
        inject = kill_all(kill_at, attempt) if kill_at else ()
        ranks(2).run(attempt_of, path=tmp_path, attempt=attempt, config=ramped(inject=inject))
    assert [event["step"] for event in events_of(tmp_path, "restored")] == [2, 4]
    assert rows(tmp_path) == rows(whole)
    assert read_ledger(RunDir(tmp_path)) == read_ledger(RunDir(whole))
    assert digest_at(tmp_path, STEPS) == digest_at(whole, STEPS)


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 4, "zero": 2},
        {"tp": 2, "pp": 2},
        {"pp": 2, "zero": 1, "dp": 2},
        {"cp": 2, "zero": 3},
    ],
    ids=["dp4 zero2", "tp2 pp2", "pp2 dp2", "cp2 zero3"],
)
def test_a_ramp_trains_the_same_on_any_layout_and_each_sample_once(
    ranks: Ranks, whole: Path, tmp_path: Path, degrees: dict[str, Any]
) -> None:
    """Begun on two ranks and killed inside the larger batch; the layout takes over."""
    killed = ramped(inject=kill_all(FIRST_STEPS, 0))
    ranks(2).run(attempt_of, path=tmp_path, attempt=0, config=killed)
    ranks(4).run(attempt_of, path=tmp_path, attempt=1, config=ramped(**degrees))
    expected = rows(whole)
    for row, other in zip(rows(tmp_path), expected, strict=True):
        assert (row["step"], row["tokens"]) == (other["step"], other["tokens"])
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    ledger = read_ledger(RunDir(tmp_path))
    assert {step: len(ids) for step, ids in ledger.items()} == {
        step: SMALL if step <= FIRST_STEPS else LARGE for step in range(1, STEPS + 1)
    }
    assert {step: sorted(ids) for step, ids in ledger.items()} == {
        step: sorted(ids) for step, ids in read_ledger(RunDir(whole)).items()
    }


def test_a_batch_that_is_over_binds_no_later_layout(ranks: Ranks, whole: Path, tmp_path: Path) -> None:
    """Three ranks can share the larger batch alone."""
    ranks(2).run(attempt_of, path=tmp_path, attempt=0, config=ramped(inject=kill_all(FIRST_STEPS, 0)))
    with pytest.raises(Exception, match=rf"batch_ramp\[0\].*\({SMALL} sequences\) .* dp=3"):
        ranks(3).run(attempt_of, path=tmp_path, attempt=1, config=ramped(dp=3))
    ranks(2).run(attempt_of, path=tmp_path, attempt=2, config=ramped(inject=kill_all(FIRST_STEPS + 3, 2)))
    ranks(3).run(attempt_of, path=tmp_path, attempt=3, config=ramped(dp=3))
    assert [event["step"] for event in events_of(tmp_path, "restored")][-1] == FIRST_STEPS + 1
    for row, other in zip(rows(tmp_path), rows(whole), strict=True):
        assert (row["step"], row["tokens"]) == (other["step"], other["tokens"])
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_the_rate_of_smaller_batches_is_scaled_by_the_square_root(ranks: Ranks, tmp_path: Path) -> None:
    ranks(1).run(attempt_of, path=tmp_path, attempt=0, config=ramped(RampRate.sqrt))
    rates = [row["lr"] for row in rows(tmp_path)]
    expected = [1e-3 * (SMALL / LARGE) ** 0.5] * FIRST_STEPS + [1e-3] * (STEPS - FIRST_STEPS)
    assert rates == pytest.approx(expected, rel=1e-12)
