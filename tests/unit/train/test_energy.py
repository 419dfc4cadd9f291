"""Counters of GPUs: their differences, their sums over ranks, and what a row says of them."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.waiting import eventually

from checkpointing.peers import Peers
from orchestra.run.events import EventWriter, rank_writer, read_events
from orchestra.run.paths import RunDir
from orchestra.train.watch.energy import (
    EnergyWatch,
    NvmlCounter,
    Total,
    UnmeasuredError,
    energy_columns,
    joules_between,
    total_of,
)


class Rising:
    """A counter that rises by so much at each reading, and fails after `readings` of them."""

    def __init__(self, start_mj: int, by_mj: int, readings: int = 1_000_000) -> None:
        self.now_mj, self.by_mj, self.left = start_mj - by_mj, by_mj, readings

    def millijoules(self) -> int:
        if not self.left:
            raise UnmeasuredError("NVML: GPU is lost")
        self.left -= 1
        self.now_mj += self.by_mj
        return self.now_mj


def test_a_counter_that_fell_began_anew() -> None:
    assert joules_between(10_000, 12_500) == 2.5
    assert joules_between(10_000, 10_000) == 0.0
    assert joules_between(10_000, 1_500) == 1.5


def test_each_gpu_counts_once_and_one_that_is_not_read_makes_the_sum_unknown() -> None:
    words = [{"joules": 2.0}, {}, {"joules": 3.0}, {}]
    assert total_of(words, 7.0) == Total(7.0, 5.0, 2)
    with pytest.raises(UnmeasuredError, match="NVML: no rights, on node3"):
        total_of([*words, {"cause": "NVML: no rights", "host": "node3"}], 7.0)


def test_rows_sum_to_the_total_and_say_nothing_where_nothing_new_was_read() -> None:
    totals = [Total(0.0, 0.0, 0), Total(2.0, 2400.0, 2), Total(2.0, 2400.0, 2), Total(6.0, 6400.0, 2)]
    rows = [energy_columns(before, newest) for before, newest in itertools.pairwise(totals)]
    assert rows == [
        {"energy_j": 2400.0, "power_w": 600.0},
        {"energy_j": None, "power_w": None},
        {"energy_j": 4000.0, "power_w": 500.0},
    ]


def watches(run: RunDir, *counters: Rising | UnmeasuredError | None) -> list[EnergyWatch]:
    """Return a watch for each rank, rank 0's first."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    events = EventWriter(run, rank_writer(0, 0), 0, rank=0)
    peers = [Peers(rank, len(counters), store) for rank in range(len(counters))]
    return [
        EnergyWatch(each, counter, events if each.rank == 0 else None, every_s=0.01)
        for each, counter in zip(peers, counters, strict=True)
    ]


def test_ranks_are_summed_in_threads(tmp_path: Path) -> None:
    began = time.monotonic()
    found = watches(RunDir(tmp_path), Rising(10**12, 1000), None, Rising(5, 3000))
    joules = [0.0]

    def is_summed() -> bool:
        joules.append(found[0].columns()["energy_j"] or 0.0)
        return sum(joules) >= 20.0

    assert eventually(is_summed, 30)
    for watch in found:
        watch.close()
    # No counter's own start is counted, and none rises faster than it is read.
    assert sum(joules) <= (1.0 + 3.0) * ((time.monotonic() - began) / 0.01 + 1)
    assert read_events(RunDir(tmp_path)) == []


def test_one_rank_alone_is_summed(tmp_path: Path) -> None:
    (watch,) = watches(RunDir(tmp_path), Rising(7, 1000))
    assert eventually(lambda: bool(watch.columns()["energy_j"]), 30)
    watch.close()


@pytest.mark.parametrize("lost", [Rising(5, 3000, readings=3), UnmeasuredError("NVML: GPU is lost")])
def test_a_gpu_that_is_not_read_is_told_once_and_rows_then_hold_null(
    tmp_path: Path, lost: Rising | UnmeasuredError
) -> None:
    run = RunDir(tmp_path)
    found = watches(run, Rising(0, 1000), lost)
    assert eventually(lambda: bool(read_events(run, ("energy_unmeasured",))), 30)
    found[0].columns()
    assert found[0].columns() == {"energy_j": None, "power_w": None}
    (told,) = read_events(run, ("energy_unmeasured",))
    assert told["cause"].startswith("NVML: GPU is lost, on ")
    for watch in found:
        watch.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="NVML is there: tests/gpu reads it")
def test_without_nvml_the_reason_is_said() -> None:
    with pytest.raises(UnmeasuredError, match="NVML"):
        NvmlCounter(torch.device("cuda", 0))
