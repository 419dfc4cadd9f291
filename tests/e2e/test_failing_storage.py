"""A storage that is full, read-only, broken or stalled: training goes on, and the next save works."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from commands import (
    PACE,
    ROOT,
    TINY,
    Started,
    events_of,
    newest_manifest,
    orchestra,
    press_ctrl_c_twice,
    start,
    start_run,
    train,
    trained_digest,
    trained_rows,
)

from orchestra.run.files import Record
from orchestra.run.metrics_file import read_metrics
from tests.support.waiting import eventually

_ENDLESS = (
    *TINY,
    "train.steps=1000000",
    "train.log_every=2",
    "checkpoint.every_steps=20",
    "checkpoint.keep_last=1",
    PACE,
)
_SOON_S = 30.0
# Longer than a rank may be silent.
_STALL_S = 15.0


def _rests_at(step: int, attempt: int = 0) -> str:
    """Return a fault that leaves a test time to do something to a run before a step."""
    return f"{{attempt: {attempt}, at_step: {step}, rank: all, fault: slow, seconds: 4, steps: 1}}"


_FAULTY_FILE_SYSTEM = '''
"""A folder behind fsspec that fails while a file says so."""

import errno
import os
import pathlib
import time

from fsspec.implementations.local import LocalFileSystem


class FaultyFileSystem(LocalFileSystem):
    protocol = "faulty"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(os.fspath(path).replace("faulty://", "file://"))

    def _open(self, path, mode="rb", **options):
        if "r" not in mode:
            fail_if_told()
        return super()._open(path, mode, **options)


def fail_if_told():
    fault = pathlib.Path(os.environ["FAULTY_CONTROL"])
    if not fault.exists():
        return
    word, _, rank = fault.read_text().partition(" ")
    if rank and rank != os.environ.get("RANK"):
        return
    if word == "refuse":
        # What may pass is tried again for up to 15 s: longer than the others wait in this test.
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    while fault.exists():
        time.sleep(0.1)
'''


def count(started: Started, event: str) -> int:
    return len(events_of(started.run, event))


def failures_after(started: Started, number: int) -> list[Record]:
    """Wait until a further save has failed, and each rank has recorded it; return what they recorded."""
    started.wait_for(lambda: count(started, "checkpoint_failed") >= number + 2, _SOON_S)
    failed = events_of(started.run, "checkpoint_failed")
    failures = [event for event in failed if event["step"] == failed[number]["step"]]
    assert {event["rank"] for event in failures} == {0, 1}
    return failures


def ranks_told(words: str, started: Started) -> set[int]:
    """Return who recorded that a save failed, on rank 1 for this reason."""
    failures = events_of(started.run, "checkpoint_failed")
    return {event["rank"] for event in failures if words in str(event["reasons"].get("1"))}


def assert_trains_and_saves_again(started: Started) -> None:
    """Wait for steps and a commit that come after now."""
    step, commits = read_metrics(started.run)[-1]["step"], count(started, "checkpoint_committed")
    started.wait_for(lambda: read_metrics(started.run)[-1]["step"] > step, _SOON_S)
    started.wait_for(lambda: count(started, "checkpoint_committed") > commits + 1, _SOON_S)


@contextmanager
def endless(folder: Path, *overrides: str, extra: dict[str, str] | None = None) -> Iterator[Started]:
    """Start an endless run, wait for its first checkpoint, and end it at once."""
    started = start_run(folder, "endless", *_ENDLESS, *overrides, extra=extra)
    try:
        started.wait_for(lambda: events_of(started.run, "checkpoint_committed"))
        yield started
        press_ctrl_c_twice(started)
        _, err = started.end(130)
        assert err == ""
    finally:
        started.process.kill()
        started.process.communicate()


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


def _forbid_writing(place: Path) -> None:
    """Mount a file system for reading alone, as soon as no save has a file open."""
    words = ["mount", "-o", "remount,ro", str(place)]
    assert eventually(
        lambda: subprocess.run(words, check=False, capture_output=True).returncode == 0, _SOON_S
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of two megabytes: a tmpfs of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    _mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place))
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def _fill(file: Path) -> None:
    with file.open("wb", buffering=0) as ballast:
        try:
            while ballast.write(b"\0" * 4096):
                pass
        except OSError:
            return


@pytest.mark.mount
def test_a_full_and_a_read_only_disk_cost_only_the_saves_they_refuse(
    tmp_path: Path, small_disk: Path
) -> None:
    with endless(tmp_path, f"checkpoint.dir={small_disk}") as started:
        _fill(small_disk / "ballast")
        reasons = [str(event["reasons"]) for event in failures_after(started, 0)]
        assert all("No space left on device" in reason for reason in reasons)
        (small_disk / "ballast").unlink()
        assert_trains_and_saves_again(started)

        failed = count(started, "checkpoint_failed")
        _forbid_writing(small_disk)
        reasons = [str(event["reasons"]) for event in failures_after(started, failed)]
        assert all("Read-only file system" in reason for reason in reasons)
        _mount("-o", "remount,rw", str(small_disk))
        assert_trains_and_saves_again(started)


@pytest.mark.mount
def test_a_disk_that_is_full_at_the_last_save_loses_no_step_where_room_comes_back(
    tmp_path: Path, small_disk: Path
) -> None:
    settings = (*TINY, "train.steps=30", "checkpoint.every_steps=10", f"checkpoint.dir={small_disk}")
    started = start_run(tmp_path, "patient", *settings, f"recovery.inject=[{_rests_at(12)}]")
    started.wait_for(lambda: events_of(started.run, "checkpoint_committed"))
    _fill(small_disk / "ballast")
    started.wait_for(lambda: events_of(started.run, "last_save_waits"), _SOON_S)
    told = orchestra(tmp_path, "status", "patient").stdout
    assert "saves in a row have failed since" in told
    assert "No space left on device" in told
    assert "saves in a row have failed since" in orchestra(tmp_path, "why", "patient").stdout
    (small_disk / "ballast").unlink()
    out, _ = started.end(0)
    assert "its state is kept in memory" in " ".join(out.split())
    assert events_of(started.run, "checkpoint_committed")[-1]["step"] == 30
    assert read_metrics(started.run)[-1]["failed_saves"] >= 1


@pytest.fixture
def bound_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that is mounted, so that it can be away: what it holds is in `content` beside it."""
    place, content = tmp_path / "mounted", tmp_path / "content"
    place.mkdir()
    content.mkdir()
    _mount("--bind", str(content), str(place))
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)


@pytest.mark.mount
def test_the_fallback_takes_the_last_save_and_is_waited_for_and_the_training_is_bit_identical(
    tmp_path: Path, small_disk: Path, bound_folder: Path
) -> None:
    # The rate of a step must not depend on where the run ends.
    settings = (*TINY, "optim.schedule=constant", "optim.warmup_steps=2", "checkpoint.every_steps=5")
    places = (f"checkpoint.dir={small_disk}", f"checkpoint.fallback_dir={bound_folder}")
    impatient = "checkpoint.last_save_patience_s=0.5"
    rests = f"recovery.inject=[{_rests_at(7)}]"
    started = start_run(tmp_path, "first", *settings, *places, impatient, "train.steps=18", rests)
    started.wait_for(lambda: events_of(started.run, "checkpoint_committed"))
    _fill(small_disk / "ballast")
    out, _ = started.end(0)
    (second,) = bound_folder.iterdir()
    assert f"step 18 in {second}" in out

    # Room comes back, but the fallback is away.
    (small_disk / "ballast").unlink()
    subprocess.run(["umount", str(bound_folder)], check=True)
    rests = f"recovery.inject=[{_rests_at(22, attempt=1)}]"
    started = start(tmp_path, "first", "resume", "first", "train.steps=36", rests, "--accept-jump")
    started.wait_for(lambda: events_of(started.run, "restore_waits"))
    told = " ".join(orchestra(tmp_path, "status", "first").stdout.split())
    assert f"step 18 in {second}" in told
    assert "waits for the storage of its checkpoints, 300 s at most" in told
    assert not list(bound_folder.iterdir())
    _mount("--bind", str(tmp_path / "content"), str(bound_folder))
    started.wait_for(lambda: events_of(started.run, "checkpoint_committed", 1))
    _forbid_writing(small_disk)
    started.end(0)
    (restored,) = events_of(started.run, "restored")
    assert (restored["step"], restored["fallback"], restored["skipped"]) == (18, str(second), [])
    assert events_of(started.run, "checkpoint_committed")[-1]["fallback"] == str(second)
    alone = train(tmp_path, "alone", *settings, "train.steps=36")
    assert trained_rows(started.run) == trained_rows(alone)
    assert trained_digest(newest_manifest(second)) == trained_digest(newest_manifest(alone.checkpoints))


@pytest.fixture
def faulty(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """An fsspec protocol `faulty://` for every process of a run, and the file that makes it fail."""
    package = tmp_path / "faulty"
    information = package / "faulty_file_system-1.0.dist-info"
    information.mkdir(parents=True)
    (package / "faulty_file_system.py").write_text(_FAULTY_FILE_SYSTEM)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-file-system\nVersion: 1.0\n")
    entry = "[fsspec.specs]\nfaulty = faulty_file_system.FaultyFileSystem\n"
    (information / "entry_points.txt").write_text(entry)
    control = tmp_path / "fault"
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(package)]), "FAULTY_CONTROL": str(control)}, control


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_broken_and_a_stalled_storage_cost_only_the_saves_they_hit(
    tmp_path: Path, faulty: tuple[dict[str, str], Path]
) -> None:
    extra, control = faulty
    place = (f"checkpoint.dir=faulty://{tmp_path}/saved", "checkpoint.timeout_s=10")
    with endless(tmp_path, *place, "recovery.heartbeat_timeout_s=10", extra=extra) as started:
        control.write_text("refuse 1")
        # On a busy machine one may have taken too long before.
        started.wait_for(lambda: ranks_told("Permission denied", started) == {0, 1}, _SOON_S)
        control.unlink()
        assert_trains_and_saves_again(started)

        failed = count(started, "checkpoint_failed")
        control.write_text("stall 1")
        started.wait_for(lambda: count(started, "checkpoint_failed") > failed, _SOON_S)
        (failure,) = events_of(started.run, "checkpoint_failed")[failed:]
        assert failure["rank"] == 0
        assert "no answer within 10 s from rank 1" in failure["reasons"]["1"]
        step, began = read_metrics(started.run)[-1]["step"], failure["time"]
        started.wait_for(lambda: read_metrics(started.run)[-1]["time"] > began + _STALL_S, 2 * _STALL_S)
        assert read_metrics(started.run)[-1]["step"] > step
        assert events_of(started.run, "checkpoint_skipped")
        control.unlink()
        # The rank that was stuck in its storage records it as soon as it can.
        assert failures_after(started, failed)[0]["step"] == failure["step"]
        assert_trains_and_saves_again(started)


def fill_until_its_end(started: Started, disk: Path, *, stop_after_s: float = math.inf) -> None:
    """Keep the disk of a run full until it ends, and stop it with Ctrl-C meanwhile."""
    began, is_stopped = time.monotonic(), False
    # Whatever is given back meanwhile is taken at once, and the room that is left in pages.
    for number in itertools.count():
        for file in (*started.run.events.iterdir(), *started.run.logs.rglob("*.log")):
            if left := -file.stat().st_size % 4096:
                with suppress(OSError), file.open("ab") as records:
                    records.write(b" " * (left - 1) + b"\n")
        _fill(disk / f"ballast{number}")
        if started.process.poll() is not None:
            return
        if not is_stopped and time.monotonic() > began + stop_after_s:
            started.process.send_signal(signal.SIGINT)
            is_stopped = True
        time.sleep(0.02)


def status_of(started: Started) -> Record:
    (told,) = json.loads(orchestra(started.run.path, "status", str(started.run.path), "--json").stdout)
    return dict(told)


@pytest.mark.mount
def test_a_run_whose_own_disk_is_full_stops_with_a_save(tmp_path: Path, small_disk: Path) -> None:
    """Neither the request nor a rank's words of it find room."""
    place = tmp_path / "elsewhere"
    settings = (
        *TINY,
        "train.steps=1000000",
        "checkpoint.every_steps=100000",
        f"checkpoint.dir={place}",
        PACE,
    )
    started = start_run(small_disk, "cramped", *settings)
    started.wait_for_steps(5)
    fill_until_its_end(started, small_disk, stop_after_s=3.0)
    out, _ = started.end(75)
    step = newest_manifest(place).step
    assert step > 5
    assert f"stopped after {step} of 1000000 steps" in out
    assert f"`orchestra resume cramped` goes on from step {step}" in out
    # Names of empty files are all that is left on that disk of how it ended.
    told = status_of(started)
    assert (told["state"], told["checkpoint_step"]) == ("stopped", step)


@pytest.mark.mount
def test_a_run_whose_own_disk_is_full_has_finished_when_its_last_step_is_saved_elsewhere(
    tmp_path: Path, small_disk: Path
) -> None:
    """No rank's word of its end is on a disk then."""
    place = tmp_path / "elsewhere"
    settings = (*TINY, "train.steps=60", "checkpoint.every_steps=20", f"checkpoint.dir={place}", PACE)
    started = start_run(small_disk, "cramped", *settings)
    started.wait_for_steps(5)
    fill_until_its_end(started, small_disk)
    out, _ = started.end(0)
    assert "finished after 60 of 60 steps" in out
    assert status_of(started)["state"] == "finished"
    assert newest_manifest(place).step == 60
