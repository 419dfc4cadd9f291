"""Heartbeats: what a rank writes is what the agent reads, in this process and in others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
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
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDir]:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "beats"))
    # A heart blocks a signal, which processes that later tests start would inherit.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield RunDir(tmp_path / "run")
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.fixture
def beat(tmp_path: Path) -> Callable[..., Beat]:
    """Return the beat that the agent finds of a rank."""

    def read(attempt: int = 0, rank: int = 0, folder: Path = tmp_path / "beats") -> Beat:
        found = read_beat(beat_file(folder, attempt, rank))
        assert found is not None
        return found

    return read


def test_the_agent_reads_what_the_process_that_has_the_rank_wrote_last(
    run: RunDir, beat: Callable[..., Beat]
) -> None:
    heart = open_heart(run, attempt=2, rank=7)
    first, mine = beat(2, 7), processes.find(os.getpid())
    assert mine is not None
    assert (first.phase, first.step, first.pid, first.started) == (Phase.setup, 0, mine.pid, mine.started)
    heart.beat(Phase.backward, 31, 3)
    second = beat(2, 7)
    assert (second.phase, second.step, second.micro_batch) == (Phase.backward, 31, 3)
    assert (second.count, second.pid) == (first.count + 1, mine.pid)
    open_heart(run, attempt=2, rank=7).beat(Phase.step, 5)
    heart.beat(Phase.step, 99)
    assert beat(2, 7).step == 5, "a new process of the same rank takes a record of its own"


def test_a_beat_names_the_first_step_of_the_attempt(run: RunDir, beat: Callable[..., Beat]) -> None:
    heart = open_heart(run, 0, 0)
    first_steps = []
    for phase, step in ((Phase.restore, 0), (Phase.step, 41), (Phase.data, 41), (Phase.step, 42)):
        heart.beat(phase, step)
        first_steps.append(beat().first_step)
    assert first_steps == [0, 41, 41, 41]


def test_without_a_listener_nothing_is_written_and_without_its_folder_in_the_runs(
    run: RunDir, tmp_path: Path, beat: Callable[..., Beat], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE)
    open_heart(run, 0, 0).beat(Phase.step, 1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "below"))
    open_heart(run, 1, 4).beat(Phase.step, 9)
    assert beat(1, 4, run.heartbeats).step == 9


@pytest.mark.parametrize("content", [b"", b"x" * 72, bytes(72), bytes(1000)])
def test_what_is_no_record_is_no_beat(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "beat").write_bytes(content)
    assert read_beat(tmp_path / "beat") is None


def test_positions_compare_like_progress() -> None:
    micro_batches = [(Phase.forward, 0), (Phase.backward, 0), (Phase.forward, 1), (Phase.backward, 1)]
    after = [(phase, 0) for phase in (Phase.reduce, Phase.update, Phase.save, Phase.commit)]
    step = [(Phase.step, 0), (Phase.data, 0), *micro_batches, *after]
    ordered = [(Phase.setup, 0, 0), (Phase.restore, 0, 0)]
    ordered += [(phase, number, micro_batch) for number in (4, 5) for phase, micro_batch in step]
    beats = [Beat(0, phase, step, number, number, 1, 1, 1) for phase, step, number in ordered]
    positions = [beat.position for beat in beats]
    assert positions == sorted(positions)


def test_records_of_older_attempts_are_removed_and_of_newer_ones_kept(run: RunDir, tmp_path: Path) -> None:
    for attempt in range(4):
        open_heart(run, attempt, 0)
    remove_records(tmp_path / "beats", range(3))
    assert {file.name[:11] for file in (tmp_path / "beats").iterdir()} == {"attempt-003"}
    remove_records(tmp_path / "beats", range(4))
    assert not (tmp_path / "beats").exists()


def test_the_folder_is_this_users_own_and_the_same_for_the_same_run(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(heartbeat, "_SHARED_MEMORY", shared)
    folder = beats_folder(run)
    assert folder == beats_folder(run)
    assert folder != beats_folder(RunDir(tmp_path / "another"))
    assert folder.parent == shared / f"orchestra-{os.getuid()}"
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    folder.parent.chmod(0o777)
    assert shared not in beats_folder(run).parents, "others can write there"
