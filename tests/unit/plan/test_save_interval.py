"""How far apart saves lie, and how often a run fails: against the figures that were published."""

from __future__ import annotations

import itertools

import pytest

from orchestra.plan.goodput.scenario import LLAMA3_MIX, failures
from orchestra.sizes import save_interval

MINUTE_S, HOUR_S = 60.0, 3600.0
# Kokolis et al. (arXiv:2410.21680, section III), A100 in nodes of eight: infrastructure failures per
# node-day of large jobs on their cluster RSC-1. From it they project 1.8 h at 16,384 and 0.23 h at 131,072
# devices. Their 7.9 h at 1,024 is no projection: what jobs of that size saw, all failures counted.
RSC1_FAILURES_PER_NODE_DAY = 6.50e-3


@pytest.mark.parametrize(("mttf_h", "minutes"), [(24, "117"), (6, "57"), (0.25, "9.1")])
def test_intervals_are_those_of_dalys_figures(mttf_h: float, minutes: str) -> None:
    """Captions of figures 3 to 5 of Daly (2006): a dump of five minutes."""
    found = save_interval.daly_s(5 * MINUTE_S, mttf_h * HOUR_S) / MINUTE_S
    assert f"{found:.{1 if '.' in minutes else 0}f}" == minutes
    # A save beyond twice the mean time to failure is made once in it.
    assert save_interval.daly_s(100.0, 40.0) == 40.0


def test_dalys_interval_has_the_best_goodput_of_his_cost_function() -> None:
    stall_s, restart_s, mttf = 60.0, 300.0, 7200.0
    best = save_interval.daly_s(stall_s, mttf)
    of_best = save_interval.daly_goodput(best, stall_s, restart_s, mttf)
    for factor in (0.8, 0.9, 1.1, 1.25):
        assert save_interval.daly_goodput(factor * best, stall_s, restart_s, mttf) < of_best


def test_without_failures_goodput_is_what_saves_leave() -> None:
    assert save_interval.daly_goodput(95.0, 5.0, 300.0, 1e12) == pytest.approx(0.95, rel=1e-6)
    assert save_interval.daly_goodput(1e6, 5.0, 300.0, 1.0) == 0.0
    # Devices that never fail have a finite interval.
    mttf = save_interval.mttf_s(8, 1e308)
    found = save_interval.chosen(1e-6, 5.0, mttf)
    assert found.every_steps > 1e9
    assert save_interval.daly_goodput(found.seconds, 5.0, 300.0, mttf) == pytest.approx(1.0, rel=1e-6)


def test_llama_3_fails_every_three_hours() -> None:
    mttf_s = save_interval.mttf_s(16_384, None)
    assert mttf_s * 419 == pytest.approx(54 * 24 * HOUR_S)
    assert mttf_s / HOUR_S == pytest.approx(3.1, abs=0.05)
    assert sum(LLAMA3_MIX.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("num_devices", "failures_per_node_day", "hours"),
    [
        (1_024, 24 / 7.9 / 128, "7.9"),
        (16_384, RSC1_FAILURES_PER_NODE_DAY, "1.8"),
        (131_072, RSC1_FAILURES_PER_NODE_DAY, "0.23"),
    ],
)
def test_expected_and_drawn_failures_have_the_published_mean_time(
    num_devices: int, failures_per_node_day: float, hours: str
) -> None:
    # The mean time between failures of one of a node's eight devices.
    device_hours = 8 * 24 / failures_per_node_day
    found = save_interval.mttf_s(num_devices, device_hours) / HOUR_S
    assert f"{found:.{len(hours) - 2}f}" == hours
    drawn = failures(num_devices // 8, 8, device_hours, LLAMA3_MIX, seed=1)
    number = 4000
    last = list(itertools.islice(drawn, number))[-1]
    # The mean of so many intervals strays by 1 / √4000 = 1.6 %.
    assert last.time / number / HOUR_S == pytest.approx(float(hours), rel=0.05)


def test_causes_come_in_their_shares_and_strike_every_node_alike() -> None:
    drawn = list(itertools.islice(failures(16, 8, 1e4, LLAMA3_MIX, seed=3), 20_000))
    for cause, share in LLAMA3_MIX.items():
        struck = sum(failure.cause is cause for failure in drawn)
        assert struck / len(drawn) == pytest.approx(share, abs=0.012)
    assert sum(failure.place for failure in drawn) / len(drawn) == pytest.approx(7.5, abs=0.15)
    assert drawn == list(itertools.islice(failures(16, 8, 1e4, LLAMA3_MIX, seed=3), 20_000))


def test_an_interval_is_whole_steps_and_no_shorter_than_a_save_is_written() -> None:
    found = save_interval.chosen(10.0, 5.0, 36_000.0)
    assert found.every_steps == round(save_interval.daly_s(5.0, 36_000.0) / 10.0)
    assert found.seconds == found.every_steps * 10.0
    assert save_interval.chosen(10.0, 5.0, 36_000.0, write_s=5_000.0).every_steps == 500
    assert save_interval.chosen(1e6, 5.0, 36_000.0).every_steps == 1
    assert found.to_json()["mttf_s"] == 36_000.0
