"""Who is slow: a slow rank is found in spite of noise, an even crowd never, and who recovers is let go."""

from __future__ import annotations

import random
import statistics

import pytest

from orchestra.train.watch.stragglers import StragglerChanges, ratios_to_others, straggler_changes

FACTOR, WINDOWS = 1.3, 5


def windows_of(
    num_ranks: int, num_windows: int, slow: dict[int, float], seed: int, noise: float = 0.1
) -> list[list[float]]:
    """Return times of about 1 s with noise, of some ranks so many times as long."""
    chance = random.Random(seed)
    return [
        [slow.get(rank, 1.0) * max(0.05, chance.gauss(1.0, noise)) for rank in range(num_ranks)]
        for _ in range(num_windows)
    ]


def judged(history: list[list[float]], known: set[int] | None = None) -> StragglerChanges:
    return straggler_changes(history, known or set(), factor=FACTOR, windows=WINDOWS)


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_no_even_rank_is_found_in_ten_thousand_windows_with_noise(num_ranks: int) -> None:
    history = windows_of(num_ranks, 10_000 // num_ranks + WINDOWS, {}, seed=num_ranks)
    for end in range(WINDOWS, len(history)):
        assert judged(history[end - WINDOWS : end]) == StragglerChanges()


@pytest.mark.parametrize("num_ranks", [2, 3, 8, 64])
def test_a_rank_that_takes_twice_as_long_is_found_with_its_ratio(num_ranks: int) -> None:
    history = windows_of(num_ranks, WINDOWS, {1: 2.0}, seed=7)
    (straggler,) = judged(history).found
    assert straggler.rank == 1
    assert straggler.ratio == pytest.approx(2.0, rel=0.25)


def test_a_whole_slow_node_is_found_as_long_as_most_are_not_slow() -> None:
    history = windows_of(32, WINDOWS, dict.fromkeys(range(8), 1.8), seed=1)
    assert [straggler.rank for straggler in judged(history).found] == list(range(8))


def test_one_hiccup_is_no_straggler() -> None:
    history = windows_of(8, WINDOWS, {}, seed=2)
    history[2][3] = 50.0
    assert judged(history) == StragglerChanges()


def test_who_is_known_is_not_found_again_and_gone_after_as_many_good_windows() -> None:
    slow = windows_of(4, WINDOWS, {2: 2.0}, seed=3)
    assert judged(slow, known={2}) == StragglerChanges()
    recovered = windows_of(4, WINDOWS, {}, seed=4)
    assert judged([*slow[1:], recovered[0]], known={2}) == StragglerChanges()
    assert judged(recovered, known={2}) == StragglerChanges(gone=(2,))


def test_too_few_windows_or_a_rank_alone_say_nothing() -> None:
    assert judged(windows_of(4, WINDOWS - 1, {2: 9.0}, seed=5)) == StragglerChanges()
    assert judged([[1.0]] * WINDOWS) == StragglerChanges()


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7, 8])
def test_ratios_compare_with_the_median_of_the_others(num_ranks: int) -> None:
    chance = random.Random(num_ranks)
    window = [chance.choice((1.0, 1.0, 2.0, 3.0, 0.5)) for _ in range(num_ranks)]
    expected = [
        value / statistics.median(window[:rank] + window[rank + 1 :]) for rank, value in enumerate(window)
    ]
    assert ratios_to_others(window) == pytest.approx(expected)
