"""Which losses are spikes: against a reference, and what follows from one."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.schema import LossSpikeConfig, OnNonfinite, OnSpike, TrainConfig
from orchestra.errors import LossSpikeError
from orchestra.run.events import EventWriter, read_events
from orchestra.run.paths import RunDir
from orchestra.run.rollback import NOT_FINITE, SPIKE, BadSteps
from orchestra.train.hooks import StepResult
from orchestra.train.watch.bad_losses import LossSpikes, NonFiniteGuard, NonFiniteSteps, make_loss_spikes

CPU = torch.device("cpu")
WINDOW, FACTOR = 9, 10.0
CONFIG = LossSpikeConfig(action=OnSpike.warn, factor=FACTOR, window=WINDOW)


def judged(spikes: LossSpikes, losses: list[float]) -> list[bool]:
    return [bool(spikes.is_spike(torch.tensor(loss))) for loss in losses]


def noisy(number: int, seed: int = 0, level: float = 3.0) -> list[float]:
    chance = random.Random(seed)
    return [chance.gauss(level, 0.05) for _ in range(number)]


def expected(losses: list[float]) -> list[bool]:
    found = [False] * WINDOW
    for index in range(WINDOW, len(losses)):
        window = losses[index - WINDOW : index]
        median = statistics.median(window)
        spread = 1.4826 * statistics.median(abs(value - median) for value in window)
        found.append(losses[index] > median + FACTOR * max(spread, 0.01 * median))
    return found


def test_spikes_are_those_of_the_definition() -> None:
    losses = noisy(200)
    for index in (5, 30, 31, 90, 150):
        losses[index] += 2.0
    wanted = expected(losses)
    assert sum(wanted) == 4
    assert judged(LossSpikes(CONFIG, CPU), losses) == wanted


def test_noise_and_a_falling_loss_are_no_spikes() -> None:
    falling = [10 - 7 * step / 2000 + noise - 3 for step, noise in enumerate(noisy(2000, seed=1))]
    assert not any(judged(LossSpikes(LossSpikeConfig(), CPU), falling))


def test_a_higher_level_for_good_becomes_the_usual_one() -> None:
    found = judged(LossSpikes(CONFIG, CPU), [*noisy(WINDOW), *noisy(4 * WINDOW, level=6.0)])
    assert found[WINDOW]
    assert not any(found[-WINDOW:])


def test_a_loss_that_is_not_finite_is_no_spike_and_leaves_no_trace() -> None:
    spikes = LossSpikes(CONFIG, CPU)
    assert not any(judged(spikes, [*noisy(WINDOW), float("nan"), float("inf"), float("-inf")]))
    assert all(2 < loss < 4 for loss in spikes.recent)
    assert judged(spikes, [9.0]) == [True]


@pytest.mark.parametrize("at", [3, WINDOW, 40])
def test_what_was_saved_goes_on_as_if_nothing_had_happened(at: int) -> None:
    losses = [*noisy(60), 7.0, *noisy(20, seed=3)]
    whole = LossSpikes(CONFIG, CPU)
    first = LossSpikes(CONFIG, CPU)
    before = judged(first, losses[:at])
    second = LossSpikes(CONFIG, CPU, recent=first.recent)
    assert [*before, *judged(second, losses[at:])] == judged(whole, losses)


def result(loss: float, is_spike: bool) -> StepResult:
    return StepResult(
        torch.tensor(loss), torch.tensor(1.0), torch.tensor(False), 1e-3, is_spike=torch.tensor(is_spike)
    )


def guard_of(run: RunDir, action: OnSpike) -> NonFiniteGuard:
    events = EventWriter(run, "rank", 0)
    return NonFiniteGuard(TrainConfig(), action, events, reads_every_step=False, before=NonFiniteSteps())


@pytest.mark.parametrize("action", [OnSpike.warn, OnSpike.skip])
def test_a_spike_is_told_when_results_are_read_and_ends_nothing(action: OnSpike, tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    guard = guard_of(run, action)
    assert guard.verdict(7, result(9.0, is_spike=True), must_read=False) is None
    assert read_events(run) == []
    assert guard.verdict(8, result(3.0, is_spike=False), must_read=True) is None
    (event,) = read_events(run)
    assert (event["event"], event["step"], event["loss"]) == ("loss_spike", 7, 9.0)
    assert event["action"] == action.name
    assert guard.num_skipped == 0


def test_a_full_disk_takes_the_record_of_a_bad_loss_and_changes_no_verdict(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.mkdir()
    run.event_file("rank").symlink_to("/dev/full")
    guard = guard_of(run, OnSpike.warn)
    assert guard.verdict(7, result(9.0, is_spike=True), must_read=True) is None
    bad = replace(result(float("nan"), is_spike=False), was_skipped=torch.tensor(True))
    assert guard.verdict(8, bad, must_read=True) is None
    assert guard.counts() == NonFiniteSteps(1, 1)


def test_stop_ends_at_the_spike_itself_and_none_judges_nothing(tmp_path: Path) -> None:
    failure = guard_of(RunDir(tmp_path), OnSpike.stop).verdict(7, result(9.0, is_spike=True), must_read=False)
    assert isinstance(failure, LossSpikeError)
    assert failure.exit_code == 93
    assert "step 7" in str(failure)
    assert make_loss_spikes(LossSpikeConfig(action=OnSpike.none), CPU, None) is None


@pytest.mark.parametrize("must_read", [False, True])
def test_a_spike_that_is_to_be_rolled_back_is_the_bad_step_whenever_it_is_read(
    tmp_path: Path, must_read: bool
) -> None:
    guard = guard_of(RunDir(tmp_path), OnSpike.roll_back)
    assert guard.verdict(6, result(3.0, is_spike=False), must_read=False) is None
    found = guard.verdict(7, result(9.0, is_spike=True), must_read=must_read)
    if not must_read:
        assert found is None
        found = guard.verdict(9, result(3.0, is_spike=False), must_read=True)
    assert isinstance(found, BadSteps)
    assert (found.first, found.last, found.cause, found.leaves_out) == (7, 7, SPIKE, True)
    assert "step 7: the loss rose to 9" in found.words


def test_steps_that_stay_not_finite_are_rolled_back_from_the_first_of_them(tmp_path: Path) -> None:
    train = TrainConfig(on_nonfinite=OnNonfinite.roll_back, max_nonfinite_steps=3)
    events = EventWriter(RunDir(tmp_path), "rank", 0)
    # The last step before this attempt was one already.
    guard = NonFiniteGuard(train, OnSpike.warn, events, True, NonFiniteSteps(4, 1))
    bad = replace(result(float("nan"), is_spike=False), was_skipped=torch.tensor(True))
    assert guard.verdict(11, bad, must_read=False) is None
    found = guard.verdict(12, bad, must_read=False)
    assert isinstance(found, BadSteps)
    assert (found.first, found.last, found.cause) == (10, 12, NOT_FINITE)
    assert "3 steps in a row" in found.words
