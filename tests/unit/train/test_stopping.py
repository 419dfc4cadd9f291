"""How often one rank looks for the word to stop; all else of it: tests/ranks/test_agreed_stop.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from checkpointing.peers import Peers
from orchestra.run import stop_requests
from orchestra.run.paths import RunDir
from orchestra.train import stopping
from orchestra.train.stopping import RequestWatch, Stopping


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
