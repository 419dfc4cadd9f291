"""Heartbeats: what a rank writes is what the agent reads, in this process and in others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launchers import processes
from orchestra.run import heartbeat
from orchestra.run.heartbeat import (
    FOLDER_VARIABLE,
    Beat,
    Phase,
    beat_file,
    beats_folder,
    open_heart,
    read_beat,
    remove_records,
)
from orchestra.run.paths import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "beats"))
    return RunDir(tmp_path / "run")


def test_the_agent_reads_what_the_rank_wrote_last(run: RunDir, tmp_path: Path) -> None:
    heart = open_heart(run, attempt=2, rank=7)
    path = beat_file(tmp_path / "beats", 2, 7)
    first = read_beat(path)
    assert first is not None
    assert (first.phase, first.step) == (Phase.setup, 0)
    heart.beat(Phase.backward, 31, 3)
    second = read_beat(path)
    assert second is not None
    assert (second.phase, second.step, second.micro_batch) == (Phase.backward, 31, 3)
    assert second.count == first.count + 1


def test_a_beat_names_the_first_step_of_the_attempt(run: RunDir, tmp_path: Path) -> None:
    heart = open_heart(run, 0, 0)
    path, found = beat_file(tmp_path / "beats", 0, 0), []
    for phase, step in ((Phase.restore, 0), (Phase.step, 41), (Phase.data, 41), (Phase.step, 42)):
        heart.beat(phase, step)
        beat = read_beat(path)
        assert beat is not None
        found.append(beat.first_step)
    assert found == [0, 41, 41, 41]


def test_a_beat_names_its_process_for_good(run: RunDir, tmp_path: Path) -> None:
    open_heart(run, 0, 0)
    beat = read_beat(beat_file(tmp_path / "beats", 0, 0))
    mine = processes.find(os.getpid())
    assert beat is not None
    assert mine is not None
    assert (beat.pid, beat.started) == (mine.pid, mine.started)


def test_without_a_listener_nothing_is_written(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    open_heart(run, 0, 0).beat(Phase.step, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_gives_way_to_the_runs(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "below"))
    open_heart(run, 1, 4).beat(Phase.step, 9)
    beat = read_beat(beat_file(run.heartbeats, 1, 4))
    assert beat is not None
    assert beat.step == 9


@pytest.mark.parametrize("content", [b"", b"x" * 72, bytes(72), bytes(1000)])
def test_what_is_no_record_is_no_beat(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "beat").write_bytes(content)
    assert read_beat(tmp_path / "beat") is None


def test_a_new_process_of_the_same_rank_takes_a_record_of_its_own(run: RunDir, tmp_path: Path) -> None:
    before = open_heart(run, 0, 0)
    after = open_heart(run, 0, 0)
    after.beat(Phase.step, 5)
    before.beat(Phase.step, 99)
    beat = read_beat(beat_file(tmp_path / "beats", 0, 0))
    assert beat is not None
    assert beat.step == 5


def test_positions_compare_like_progress() -> None:
    ordered = [
        (Phase.setup, 0, 0),
        (Phase.restore, 0, 0),
        (Phase.step, 4, 0),
        (Phase.data, 4, 0),
        (Phase.forward, 4, 0),
        (Phase.backward, 4, 0),
        (Phase.forward, 4, 1),
        (Phase.backward, 4, 1),
        (Phase.reduce, 4, 0),
        (Phase.update, 4, 0),
        (Phase.save, 4, 0),
        (Phase.commit, 4, 0),
        (Phase.step, 5, 0),
    ]
    positions = [Beat(0, phase, step, micro_batch, 1, 1, 1).position for phase, step, micro_batch in ordered]
    assert positions == sorted(positions)


def test_records_of_older_attempts_are_removed_and_of_newer_ones_kept(run: RunDir, tmp_path: Path) -> None:
    for attempt in range(4):
        open_heart(run, attempt, 0)
    remove_records(tmp_path / "beats", range(3))
    assert {it.name[:11] for it in (tmp_path / "beats").iterdir()} == {"attempt-003"}
    remove_records(tmp_path / "beats", range(4))
    assert not (tmp_path / "beats").exists()


def test_the_folder_is_this_users_own_and_the_same_for_the_same_run(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_SHARED_MEMORY", tmp_path / "shared")
    (tmp_path / "shared").mkdir()
    folder = beats_folder(run)
    assert folder == beats_folder(run)
    assert folder != beats_folder(RunDir(tmp_path / "another"))
    assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_can_write_is_not_used(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "_SHARED_MEMORY", tmp_path / "shared")
    theirs = tmp_path / "shared" / f"orchestra-{os.getuid()}"
    theirs.mkdir(parents=True)
    theirs.chmod(0o777)
    assert tmp_path / "shared" not in beats_folder(run).parents
