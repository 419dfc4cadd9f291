"""Several users of one run: what a member of its group writes the others can read, whatever the umask."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestra.cli.text.resolve import resolve
from orchestra.errors import ConfigError
from orchestra.run import events
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, read_events
from orchestra.run.files import read_json_lines
from orchestra.run.paths import RunDir


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o2770, 0o660), (0o2700, 0o600), (0o770, 0o600)])
def test_a_stop_is_written_for_the_group_that_the_folder_was_given_to(
    tmp_path: Path, folder_mode: int, file_mode: int
) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "control").mkdir()
    (tmp_path / "control").chmod(folder_mode)
    before = os.umask(0o077)
    try:
        stop_requests.write_request(run, 0, "cancel")
    finally:
        os.umask(before)
    (file,) = (tmp_path / "control").iterdir()
    assert file.stat().st_mode & 0o777 == file_mode


# Root reads everything: what others meet is put in its place.


def test_what_somebody_who_watches_kept_to_themselves_hides_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    names = ("watch.elsewhere.0123", "attempt-000.node-000")
    for name in names:
        EventWriter(run, name, 0).write("said", by=name)
    closed = [names[0]]

    def read(file: Path, *arguments: object) -> object:
        if file.stem in closed:
            raise PermissionError(13, "Permission denied", str(file))
        return read_json_lines(file, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(events, "read_json_lines", read)
    assert [event["by"] for event in read_events(run)] == [names[1]]
    closed[0] = names[1]
    with pytest.raises(PermissionError):
        read_events(run)


def test_a_run_that_is_closed_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match=r"the directory is closed to you.*run\.group"):
        resolve(str(tmp_path), tmp_path)
