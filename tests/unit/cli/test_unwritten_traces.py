"""`orchestra profile RUN`: what it says where a rank could not write its trace."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from orchestra.cli.look import profile_command
from orchestra.run.control.profile_requests import ProfileRequest, write_request
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.paths import RunDir
from tests.support.run_records import led_here


def test_a_trace_that_could_not_be_written_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    events = EventWriter(led_here(RunDir(tmp_path / "one")), rank_writer(0, 0), 0, rank=0)
    events.write("training_started", world_size=1)

    def answered(chosen: RunDir, attempt: int, steps: int, ranks: tuple[int, ...]) -> ProfileRequest:
        asked = write_request(chosen, attempt, steps, ranks)
        events.write("profiled", step=9, first_step=7, token=asked.token, problem="profile: it is full")
        return asked

    monkeypatch.setattr(profile_command, "write_request", answered)
    options = Namespace(run="one", dir=tmp_path, steps=3, ranks="0", dry_run=False, no_wait=False, json=False)
    assert profile_command.run(options) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == (
        "rank 0 could not write its trace: profile: it is full; make room there, and ask again\n"
    )
