"""How often one rank looks for the word to stop; all else of it: tests/ranks/test_agreed_stop.py."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.other_file_system import other_file_system

from checkpointing.peers import Peers
from orchestra.run.control import stop_requests
from orchestra.run.paths import RunDir
from orchestra.train import stopping
from orchestra.train.stopping import PieceCheck, RequestWatch, SaveClock, Stopping


def test_a_run_of_fast_steps_looks_ever_less_often_and_stops_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "LOOK_S", 0.001)
    monkeypatch.setattr(stopping, "ROUND_S", 1e9)
    watch = RequestWatch(RunDir(tmp_path), 1)
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
    stop_requests.write_request(RunDir(tmp_path), 1, stop_requests.CANCEL)
    # It ends when it has seen the request.
    watch._thread.join(10)
    assert any(alone.is_due(step) for step in range(100, 1000))
    alone.close()


def test_a_run_whose_directory_is_away_for_long_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: seconds[0])
    run = RunDir(tmp_path / "first")
    watch = RequestWatch(run, 1)

    def seen_after(wait_s: float) -> str | None:
        seconds[0] += wait_s
        watch._look()
        return None if watch.seen is None else watch.seen.reason

    # Whoever has none, as a library's test, is not asked for one.
    assert seen_after(100.0) is None
    run.path.mkdir()
    run.config.write_text("")
    assert seen_after(100.0) is None
    run.path.rename(tmp_path / "away")
    # The times of steps and the next save make it anew, without its records.
    run.times.mkdir(parents=True)
    assert [seen_after(20.0), seen_after(9.0)] == [None, None]
    shutil.rmtree(run.path)
    (tmp_path / "away").rename(run.path)
    assert [seen_after(20.0), seen_after(20.0)] == [None, None]
    shutil.rmtree(run.path)
    assert [seen_after(29.0), seen_after(2.0)] == [None, "run directory removed"]


def test_a_run_whose_file_system_is_away_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: seconds[0])
    with other_file_system(tmp_path / "runs") as mounted:
        run = RunDir(tmp_path / "runs" / "first")
        run.path.mkdir()
        run.config.write_text("")
        watch = RequestWatch(run, 1)
        watch._look()
        mounted.take_away()
        for written in (False, True):
            if written:
                run.times.mkdir(parents=True)
            seconds[0] += 100.0
            watch._look()
            assert watch.seen is None
        mounted.bring_back()
        shutil.rmtree(run.path)
        watch._look()
        assert watch.seen is not None


def test_the_clock_asks_for_a_save_each_time_its_seconds_have_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "ROUND_S", 0.0)
    seconds = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: seconds[0])
    alone = Stopping(Peers.alone(), RequestWatch(RunDir(tmp_path), 1), SaveClock(10.0))
    alone.begin(0)
    saved = []
    for step in range(1, 31):
        seconds[0] += 3.0
        assert not alone.is_due(step)
        saved += [step] if alone.is_save_due else []
    # After 12, 24, 36 … seconds: each time the first step that ends when 10 seconds have passed.
    assert saved == list(range(4, 31, 4))
    alone.close()


def test_pieces_of_work_are_asked_about_twice_a_second_however_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
    watch = RequestWatch(RunDir(tmp_path), 1)
    check = PieceCheck(Peers.alone(), watch)
    asked = []
    for _ in range(3000):
        now += 0.01
        left = check._num_left
        assert not check.is_stop_due()
        if left == 1:
            asked.append(now)
    # Twice as many pieces each time, until they take half a second.
    assert [round(after - before, 2) for before, after in pairwise(asked)][:3] == [0.02, 0.04, 0.08]
    assert {round(after - before, 1) for before, after in pairwise(asked[8:])} == {0.5}
    stop_requests.write_request(RunDir(tmp_path), 1, stop_requests.CANCEL)
    watch._look()
    assert [check.is_stop_due() for _ in range(60)].index(True) <= 50
