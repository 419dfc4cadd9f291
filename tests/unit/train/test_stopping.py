"""When one rank looks for the word to stop; ranks/test_stop.py has several."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from checkpointing.peers import Peers
from orchestra.run import stop_requests
from orchestra.run.paths import RunDir
from orchestra.train import stopping
from orchestra.train.stopping import RequestWatch, Stopping


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestWatch]:
    monkeypatch.setattr(stopping, "LOOK_S", 0.001)
    watch = RequestWatch(RunDir(tmp_path), 1)
    yield watch
    watch.close()


def _ask(watch: RequestWatch, path: Path, attempt: int = 1) -> None:
    stop_requests.write_request(RunDir(path), attempt, stop_requests.CANCEL)
    deadline = time.monotonic() + 10
    while watch.seen is None and time.monotonic() < deadline:
        time.sleep(0.001)


def test_a_request_from_before_the_first_step_is_found_at_once(watch: RequestWatch, tmp_path: Path) -> None:
    stop_requests.write_request(RunDir(tmp_path), 0, "meant for another attempt")
    asked = stop_requests.write_request(RunDir(tmp_path), 1, stop_requests.CANCEL)
    alone = Stopping(Peers.alone(), watch)
    assert alone.begin(7)
    assert alone.request() == asked


def test_a_run_of_slow_steps_stops_behind_the_step_in_which_it_was_asked(
    watch: RequestWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "ROUND_S", 0.0)
    alone = Stopping(Peers.alone(), watch)
    assert not alone.begin(0)
    assert not any(alone.is_due(step) for step in range(1, 6))
    _ask(watch, tmp_path)
    assert alone.is_due(6)
    assert alone.request().reason == stop_requests.CANCEL


def test_a_run_of_fast_steps_looks_ever_less_often_and_stops_all_the_same(
    watch: RequestWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "ROUND_S", 1e9)
    alone = Stopping(Peers.alone(), watch)
    read: list[int] = []
    read_answer = alone._read
    monkeypatch.setattr(alone, "_read", lambda: (read.append(step), read_answer())[1])
    step = 0
    assert not alone.begin(0)
    for step in range(1, 100):
        assert not alone.is_due(step)
    assert read[:2] == [0, 1]
    gaps = [after - before for before, after in pairwise(read[1:])]
    assert gaps == sorted(gaps)
    assert gaps[-1] == max(gaps) > 16
    _ask(watch, tmp_path)
    assert any(alone.is_due(step) for step in range(100, 1000))


def test_an_end_with_a_word_on_its_way_waits_for_nothing(watch: RequestWatch) -> None:
    alone = Stopping(Peers.alone(), watch)
    assert not alone.begin(0)
    assert not alone.is_due(1)
    alone.leave()
    alone.close()
