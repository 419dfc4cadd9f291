"""Which of the files of events are read for what is asked, and in which order."""

from __future__ import annotations

import threading

import pytest

from orchestra.run import events
from orchestra.run.events import node_writer, rank_writer, read_events
from orchestra.run.files import Record
from orchestra.run.paths import RunDir
from tests.support.long_runs import lines

_ATTEMPTS, _NODES, _RANKS = 5, 4, 16


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of many ranks, all of which failed in each of its attempts."""
    run = RunDir(tmp_path_factory.mktemp("wide"))

    def write(writer: str, attempt: int, *names: str, **more: object) -> None:
        # Many of one time: their files' order counts.
        told = ({"time": float(attempt), "attempt": attempt, "event": name, **more} for name in names)
        lines(run.event_file(writer), told)

    write("submit.1", 0, "submitted")
    for attempt in range(_ATTEMPTS):
        for node in range(_NODES):
            leads = ("attempt_started", "failed", "restarting") if node == 0 else ()
            write(node_writer(attempt, node), attempt, "node_started", *leads, node=node)
        for rank in range(_RANKS):
            first = ("restored", "checkpoint_committed") if rank == 0 else ()
            write(rank_writer(attempt, rank), attempt, *first, "rank_failed", rank=rank, step=attempt)
    return run


def _refused(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _of(found: list[Record], *names: str) -> list[Record]:
    return [event for event in found if event["event"] in names]


def test_files_that_cannot_tell_are_not_read(wide: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    told, read = read_events(wide), []
    counted = events.read_json_lines
    monkeypatch.setattr(
        events, "read_json_lines", lambda file, *more: read.append(file) or counted(file, *more)
    )
    files = {
        ("restored", "checkpoint_committed"): 1 + _ATTEMPTS,
        ("submitted", "attempt_started"): 1 + _ATTEMPTS * _NODES,
        ("attempt_started", "restored"): 1 + _ATTEMPTS * (_NODES + 1),
        ("rank_failed",): 1 + _ATTEMPTS * (_NODES + _RANKS),
        ("restored", "rank_failed"): 1 + _ATTEMPTS * (_NODES + _RANKS),
    }
    for names, number in files.items():
        read.clear()
        assert _of(read_events(wide, names), *names) == _of(told, *names)
        assert len(read) == number
    read.clear()
    one = read_events(wide, attempt=3)
    assert [event for event in one if event["attempt"] == 3] == [e for e in told if e["attempt"] == 3]
    assert len(read) == 1 + _NODES + _RANKS
    read.clear()
    newest = read_events(wide, newest_ranks=True)
    assert len(read) == 1 + _ATTEMPTS * (_NODES + 1) + 2 * (_RANKS - 1)
    assert newest == [e for e in told if e["attempt"] >= _ATTEMPTS - 2 or e.get("rank", 0) == 0]
    # Attempts that never began have no ranks.
    for attempt in (_ATTEMPTS, _ATTEMPTS + 1):
        lines(wide.event_file(node_writer(attempt, 1)), [])
    assert read_events(wide, newest_ranks=True) == newest


def test_many_files_are_read_in_the_same_order(wide: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    told = read_events(wide)
    monkeypatch.setattr(events, "_MANY_FILES", 10)
    assert read_events(wide) == told
    with monkeypatch.context() as limited:
        # As where a user has as many threads as the machine allows.
        limited.setattr(threading.Thread, "start", _refused)
        assert read_events(wide) == told
    unreadable = wide.event_file(rank_writer(2, 3))
    kept = unreadable.read_bytes()
    unreadable.unlink()
    unreadable.mkdir()
    try:
        with pytest.raises(IsADirectoryError):
            read_events(wide)
    finally:
        unreadable.rmdir()
        unreadable.write_bytes(kept)
