"""JSON-lines files survive torn writes, and readers see whole records only."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from orchestra.run.events import read_events
from orchestra.run.files import JsonLinesReader, JsonLinesWriter, cut_torn_line, read_json_lines
from orchestra.run.paths import RunDir


def test_floats_come_back_bit_for_bit_and_non_finite_ones_as_null(tmp_path: Path) -> None:
    writer = JsonLinesWriter(tmp_path / "a.jsonl")
    writer.write({"loss": 0.1 + 0.2, "bad": math.nan, "deep": [{"x": -math.inf}]})
    (record,) = read_json_lines(tmp_path / "a.jsonl")
    assert record == {"loss": 0.1 + 0.2, "bad": None, "deep": [{"x": None}]}


def test_a_torn_last_line_is_passed_over_and_cut_on_reopening(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2}\n{"st')
    assert [record["step"] for record in read_json_lines(path)] == [1, 2]
    JsonLinesWriter(path).write({"step": 3})
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n{"step":3}\n'
    for whole, torn in ((b'{"step":1}\n', b"x" * 200_000), (b"", b"y" * 100)):
        path.write_bytes(whole + torn)
        assert cut_torn_line(path) == len(torn)
        assert path.read_bytes() == whole


def test_a_growing_file_is_followed_without_halves(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    reader = JsonLinesReader(path)
    assert reader.read_new() == []
    path.write_bytes(b'{"a":1}\n{"a"')
    assert reader.read_new() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b":2}\nnot json\n[1]\n")
    assert reader.read_new() == [{"a": 2}]


# In a process of its own, since the limit cannot be raised again: a real short write, like a full disk.
_WRITE_UNTIL_FULL = """
import resource
import signal
import sys
from pathlib import Path
from orchestra.run.files import JsonLinesWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
writer = JsonLinesWriter(Path(sys.argv[1]))
writer.write({"step": 1})
try:
    writer.write({"step": 2222222222})
except OSError:
    writer.write({"s": 3})
"""


def test_a_full_disk_raises_and_leaves_no_half_record(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    subprocess.run([sys.executable, "-c", _WRITE_UNTIL_FULL, str(path)], check=True)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}, {"s": 3}]


# The limit on a file's size is lifted again, as room comes back on a disk.
_KEEP_WHILE_FULL = """
import resource
import signal
import sys
from pathlib import Path
from orchestra.run.files import JsonLinesWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = JsonLinesWriter(Path(sys.argv[1]))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
for step in range(1, 5):
    writer.write_or_keep({"step": step})
print(Path(sys.argv[1]).read_text().count("\\n"))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
writer.write_or_keep({"step": 5})
"""


@pytest.mark.parametrize("has_log", [True, False])
def test_what_a_full_disk_refuses_is_kept_and_written_in_its_order(tmp_path: Path, has_log: bool) -> None:
    path = tmp_path / "a.jsonl"
    # The log may lie on the same disk.
    words = f"exec {sys.executable} -c '{_KEEP_WHILE_FULL}' {path} {'' if has_log else '2> /dev/full'}"
    ended = subprocess.run(["sh", "-c", words], check=True, capture_output=True, text=True)
    assert ended.stdout == "1\n"
    problem = f"{path} cannot be written: No space left on device; its records are kept until it can be\n"
    assert ended.stderr == (problem if has_log else "")
    assert [record["step"] for record in read_json_lines(path)] == [1, 2, 3, 4, 5]


_TELL_WHILE_FULL = """
import resource
import signal
import sys
from pathlib import Path
from orchestra.run.control import stop_requests
from orchestra.run.events import EventWriter, node_writer
from orchestra.run.paths import RunDir
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
run = RunDir(Path(sys.argv[1]))
writer = EventWriter(run, node_writer(3, 0), 3, node=0)
run.control.mkdir()
# Each file takes ten bytes of a record, and ends as on a full disk.
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
for message in sys.argv[2:]:
    writer.write_surely("failed", code=75, cause="StopRequested", message=message, step=7, host="node1")
# A folder takes no more names at some time: the newest one tells all.
for step in (5, 6, 7):
    writer.write_surely("checkpoint_committed", step=step, seconds=1.5, fallback="/scratch/elsewhere")
try:
    writer.write_surely("checkpoint_committed", step=8, fallback="/far" * 60)
except OSError as error:
    print(error.strerror)
"""


def test_names_of_empty_files_tell_what_must_not_be_lost_on_a_full_disk(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    command = [sys.executable, "-c", _TELL_WHILE_FULL, str(tmp_path), "short — ü", "long" * 100]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    # Where a checkpoint lies is told whole or not at all.
    assert done.stdout == "No space left on device\n"
    assert all(file.stat().st_size == 0 for file in run.events.iterdir())
    for name in ("e30=.no-room", "WzFd.no-room", "no base64.no-room", ".no-room"):
        (run.events / name).touch()
    first, second, saved = read_events(run)
    assert first.pop("message") == "short — ü"
    shortened = second.pop("message")
    assert 20 < len(shortened) < 100
    assert ("long" * 100).startswith(shortened)
    times = [float(event.pop("time")) for event in (first, second, saved)]
    assert sorted(times) == times
    told = {"event": "failed", "attempt": 3, "node": 0, "code": 75, "step": 7, "cause": "StopRequested"}
    assert first == second == told
    of_save = {"attempt": 3, "node": 0, "step": 7, "fallback": "/scratch/elsewhere"}
    assert saved == {"event": "checkpoint_committed", **of_save}


def test_records_of_several_threads_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = JsonLinesWriter(path)

    def write(thread: int) -> None:
        for index in range(200):
            writer.write({"thread": thread, "index": index, "padding": "x" * 500})

    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = list(read_json_lines(path))
    for number in range(4):
        assert [record["index"] for record in records if record["thread"] == number] == list(range(200))
