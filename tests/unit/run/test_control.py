"""Requests to stop, as files that any process of any host may write."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from orchestra.run.control import request_files, stop_requests
from orchestra.run.control.stop_requests import read_request, read_requests, write_request
from orchestra.run.paths import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_request_says_who_asks_from_where_and_why_and_stops_no_other_attempt(run: RunDir) -> None:
    assert read_request(run, 3) is None
    assert list(run.path.iterdir()) == []
    written = write_request(run, 3, stop_requests.TIME_LIMIT)
    assert read_requests(run, 3) == [written]
    assert (written.attempt, written.reason, written.at_once) == (3, "time_limit", False)
    me = (stop_requests.user_name(), socket.gethostname(), os.getpid())
    assert (written.user, written.host, written.pid) == me
    assert str(written) == f"time_limit, asked for by {written.user} on {written.host}"
    assert [read_request(run, attempt) for attempt in (2, 4, 30, 1003)] == [None] * 4


def test_several_requests_are_read_oldest_first(run: RunDir) -> None:
    asked = [write_request(run, 0, f"reason {number}", at_once=number == 2) for number in range(3)]
    assert sorted(asked, key=lambda request: request.time) == asked
    assert read_requests(run, 0) == asked
    assert read_request(run, 0) == asked[0]
    assert [request.at_once for request in read_requests(run, 0)] == [False, False, True]


def test_requests_that_nobody_finished_writing_or_somebody_damaged_are_passed_over(run: RunDir) -> None:
    asked = write_request(run, 0, stop_requests.CANCEL)
    (file,) = run.control.glob("attempt-000.stop-*.json")
    text = file.read_text()
    changed = [text.replace('"attempt": 0', '"attempt": 1'), text.replace('"pid"', '"process"')]
    for number, wrong in enumerate(["", "[]", "{}", text[:20], *changed]):
        run.stop_request(0, f"wrong-{number}").write_text(wrong)
    file.with_name(f".{file.name}").write_text(text)
    assert read_requests(run, 0) == [asked]
    file.write_text(json.dumps({**json.loads(text), "colour": "red"}))
    assert read_requests(run, 0) == [asked], "a newer version may say more"


@pytest.mark.mount
def test_a_full_disk_takes_a_request_as_the_name_of_an_empty_file(run: RunDir) -> None:
    """With its reason: who resizes a run, or has a time limit, means no end of it."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(run.path)], check=True)
    try:
        run.control.mkdir()
        with suppress(OSError), (run.path / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(b"0" * 4096):
                pass
        reasons = (stop_requests.RESIZE, stop_requests.TIME_LIMIT, stop_requests.CANCEL)
        asked = [write_request(run, 3, reason, at_once=reason == stop_requests.CANCEL) for reason in reasons]
        assert all(file.stat().st_size == 0 for file in run.control.iterdir())
        assert read_requests(run, 3) == asked
        assert (read_requests(run, 2), stop_requests.requested_attempt(run)) == ([], 3)
    finally:
        subprocess.run(["umount", "--lazy", str(run.path)], check=True)


def test_a_disk_that_takes_no_new_file_takes_a_request_as_one_more_name_of_the_claim(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when all of a quota of files is used. tmpfs counts names too, and would not show it."""
    run.control.mkdir()
    run.claim(3).touch()

    def full(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))

    monkeypatch.setattr(request_files, "write_atomically", full)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "touch", full)
        asked = write_request(run, 3, stop_requests.TIME_LIMIT)
        with pytest.raises(OSError, match="Disk quota exceeded"):
            write_request(run, 4, stop_requests.TIME_LIMIT)
    assert read_requests(run, 3) == [asked]


def test_a_run_directory_that_is_gone_takes_no_request(run: RunDir) -> None:
    gone = RunDir(run.path / "gone")
    with pytest.raises(FileNotFoundError):
        write_request(gone, 0, stop_requests.CANCEL)
    assert not gone.path.exists()
