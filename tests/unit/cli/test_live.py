"""What is shown while a run trains: on a real pseudo-terminal and in a pipe."""

from __future__ import annotations

import io
import os
import pty
import re
from pathlib import Path
from typing import TextIO

import pytest

from orchestra.cli.text.progress import GuardedView, PlainView, Progress, open_view
from orchestra.run.events import EventWriter, rank_writer
from orchestra.run.files import JsonLinesWriter
from orchestra.run.paths import RunDir
from tests.support.long_runs import lines


def _row(step: int, loss: float, mfu: float | None = 0.25) -> dict[str, object]:
    speed = {"tokens_per_s": 12345.6, "mfu": mfu, "grad_norm": 0.5, "step_time_s": 2.0, "tokens": step * 10}
    return {"step": step, "loss": loss, "mfu_convention": "palm", **speed}


def _plain(progress: Progress, stream: TextIO) -> GuardedView:
    return GuardedView(lambda: PlainView(progress, stream), stream)


def _on_a_terminal(folder: Path, columns: int, rows: int, *, steps: int = 3000, stops: int = 0) -> str:
    """Return what a terminal of so many columns was sent while a run logged `rows`, without its colours."""
    reader, writer = pty.openpty()
    run = RunDir(folder)
    with pytest.MonkeyPatch.context() as patch, os.fdopen(writer, "w", encoding="utf-8") as stream:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", str(columns))
        # Every tick draws.
        patch.setattr("orchestra.cli.text.progress._REFRESH_S", 0.0)
        view = open_view(Progress(run, steps), [], "starting 2 ranks …", stream)
        view.tick(stops)
        metrics = JsonLinesWriter(run.metrics)
        for step in range(1, rows + 1):
            metrics.write(_row(step, 6.0 - step / 4))
        view.tick(stops)
        view.close(["the end"])
        shown = b""
        while b"the end" not in shown:
            # A pseudo-terminal hands out what was written in pieces.
            shown += os.read(reader, 1 << 16)
    os.close(reader)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


def test_a_long_run_is_told_in_about_fifty_lines_with_first_and_last(tmp_path: Path) -> None:
    run, stream = RunDir(tmp_path), io.StringIO()
    metrics, view = JsonLinesWriter(run.metrics), _plain(Progress(run, 1003), stream)
    for step in range(1, 1004):
        metrics.write(_row(step, 5.0))
        view.tick(0)
    view.close(["the end"])
    lines = stream.getvalue().splitlines()
    assert 40 <= len(lines) <= 53
    assert (lines[0][:14], lines[-2][:14], lines[-1]) == ("step    1/1003", "step 1003/1003", "the end")


def test_held_out_losses_stand_with_the_step_that_has_them(tmp_path: Path) -> None:
    """However many rows come at once."""
    run, stream = RunDir(tmp_path), io.StringIO()
    metrics, view = JsonLinesWriter(run.metrics), _plain(Progress(run, 7), stream)
    for step in range(1, 8):
        metrics.write({**_row(step, 5.0), **({"eval/c/loss": step + 0.5} if step in (3, 6) else {})})
    view.close([])
    told = {line[5]: line.partition("eval ")[2][:8] for line in stream.getvalue().splitlines()}
    assert {step: loss for step, loss in told.items() if loss} == {"3": "c 3.5000", "6": "c 6.5000"}


def test_what_the_ranks_chose_and_an_unknown_mfu_are_told(tmp_path: Path) -> None:
    run, stream = RunDir(tmp_path), io.StringIO()
    events = EventWriter(run, rank_writer(0, 0), 0, rank=0)
    events.write("micro_batch_chosen", size=4, accumulation=3)
    events.write("compile_off", cause="Triton not found")
    events.write("experts_moved", step=1, layers=2, experts=5, load_before=1.41, load_expected=1.05)
    JsonLinesWriter(run.metrics).write(_row(1, 5.0, mfu=None))
    _plain(Progress(run, 4), stream).close([])
    assert stream.getvalue().splitlines() == [
        "micro-batch 4 × accumulation 3: the largest that fits",
        "training without torch.compile: Triton not found",
        "step 1: 5 experts of 2 layers moved; the busiest rank had 1.41 times the mean's tokens, so 1.05",
        "step 1/4  loss 5.0000  12.3k tok/s  MFU n/a  |g| 0.50  ETA 0:06",
    ]


@pytest.mark.parametrize(
    ("backend", "nccl", "told"),
    [("nccl", "2.30.7", "NCCL 2.30.7"), ("gloo", "2.28.9", "gloo, for want of a newer NCCL 2.28.9")],
)
def test_ranks_that_share_a_gpu_are_told(tmp_path: Path, backend: str, nccl: str, told: str) -> None:
    run, stream = RunDir(tmp_path), io.StringIO()
    events = EventWriter(run, rank_writer(0, 0), 0, rank=0)
    events.write("devices_shared", ranks=4, backend=backend, nccl=nccl)
    _plain(Progress(run, 4), stream).close([])
    assert stream.getvalue() == f"4 ranks share a GPU; their collectives go over {told}\n"


def test_the_summary_counts_what_was_trained_again_once(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    metrics, progress = JsonLinesWriter(run.metrics), Progress(run, 4)
    for step, loss in ((1, 5.0), (2, 4.0), (3, 9.0)):
        metrics.write(_row(step, loss))
    progress.update()
    for step, loss in ((2, 3.5), (3, 3.0), (4, float("nan"))):
        metrics.write(_row(step, loss))
    progress.update()
    assert progress.losses == [5.0, 3.5, 3.0]
    summary = progress.summary()
    assert (summary.step, summary.first_loss, summary.last_loss, summary.tokens) == (4, 5.0, 3.0, 40)


def test_of_a_very_long_run_few_rows_are_remembered(tmp_path: Path) -> None:
    run, num_rows = RunDir(tmp_path), 45_000
    lines(run.metrics, (_row(step, 5.0 - step / num_rows) for step in range(1, num_rows + 1)))
    progress = Progress(run, num_rows, attempt=1)
    assert len(progress.rows) <= 20_000
    assert [row["step"] for row in progress.rows[-10_000:]] == list(range(num_rows - 9_999, num_rows + 1))
    summary = progress.summary()
    assert (summary.step, summary.first_loss, summary.last_loss) == (num_rows, 5.0 - 1 / num_rows, 4.0)


def test_a_run_that_went_back_within_what_is_read_at_once_is_remembered_in_order(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    # More than is read at once: the run goes back in the midst of a part, and a replaced attempt logs late.
    trained = ((0, range(1, 15_001)), (1, range(9_001, 12_001)), (0, range(15_001, 15_011)))
    rows = ({**_row(step, 1.0), "attempt": attempt} for attempt, steps in trained for step in steps)
    lines(run.metrics, rows)
    progress = Progress(run, 15_000, attempt=2)
    assert [row["step"] for row in progress.rows] == list(range(1, 12_001))


def test_a_terminal_gets_one_line_that_fits_and_the_loss_as_blocks(tmp_path: Path) -> None:
    # Each line as it stands in the end: what comes before a return to its beginning was drawn over.
    shown = _on_a_terminal(tmp_path, 80, 10, steps=20).replace("\r\n", "\n")
    text = [line.split("\r")[-1] for line in shown.split("\n")]
    assert re.search(r"starting 2 ranks … \d+ s", shown)
    (bar,) = [line for line in text if "10/20" in line]
    assert "loss 3.5000  12.3k tok/s  MFU 25.0%  |g| 0.50  ETA 0:20" in bar
    assert any("▇" in line and line.rstrip().endswith("3.50") for line in text)
    assert max(len(line) for line in text) <= 80


def test_a_resumed_run_shows_only_what_is_new_and_what_was_restored(tmp_path: Path) -> None:
    run, stream = RunDir(tmp_path), io.StringIO()
    metrics = JsonLinesWriter(run.metrics)
    for step in (1, 2, 3):
        metrics.write(_row(step, 5.0))
    view = _plain(Progress(run, 4, attempt=1), stream)
    events = EventWriter(run, rank_writer(1, 0), 1, rank=0)
    skipped = [{"step": 3, "reason": "a file is too short"}]
    events.write("restored", step=2, skipped=skipped)
    metrics.write(_row(3, 4.0))
    events.write("checkpoint_failed", step=3, reasons={"0": "No space left", "1": "No space left"})
    view.close(["the end"])
    assert stream.getvalue().splitlines() == [
        "the checkpoint of step 3 was passed over: a file is too short",
        "restored the checkpoint of step 2",
        "the checkpoint of step 3 was not saved: No space left (rank 0, 1)",
        "step 3/4  loss 4.0000  12.3k tok/s  MFU 25.0%  |g| 0.50  ETA 0:02",
        "the end",
    ]


def test_who_stops_a_run_that_saves_nothing_is_told_so(tmp_path: Path) -> None:
    run, stream = RunDir(tmp_path), io.StringIO()
    JsonLinesWriter(run.metrics).write(_row(1, 5.0))
    view = _plain(Progress(run, 4, saves=False), stream)
    view.tick(1)
    view.close([])
    assert stream.getvalue().splitlines()[-1] == (
        "stopping after this step; nothing is saved (Ctrl-C again: at once)"
    )


def test_who_stops_a_run_before_its_first_row_is_told_no_more_than_that(tmp_path: Path) -> None:
    stream = io.StringIO()
    view = _plain(Progress(RunDir(tmp_path), 4), stream)
    view.tick(1)
    view.close([])
    assert stream.getvalue() == "stopping (Ctrl-C again: at once)\n"


def test_a_terminal_says_when_a_checkpoint_is_being_saved_and_that_a_stop_was_heard(tmp_path: Path) -> None:
    events = EventWriter(RunDir(tmp_path), rank_writer(0, 0), 0, rank=0)
    assert "with a checkpoint (Ctrl-C again: at once)" in _on_a_terminal(tmp_path, 80, 1, stops=1)
    events.write("checkpoint_started", step=2)
    assert "ETA 1:39:56  saving" in _on_a_terminal(tmp_path, 80, 2)
    events.write("checkpoint_committed", step=2)
    assert "saving" not in _on_a_terminal(tmp_path, 80, 2)


@pytest.mark.parametrize(
    ("columns", "kept", "dropped"),
    [(70, "|g| 0.50", "?"), (60, "MFU 25.0%", "|g|"), (48, "tok/s", "MFU"), (36, "loss 3.7500", "tok")],
)
def test_a_narrow_terminal_gets_fewer_figures_but_whole_ones(
    tmp_path: Path, columns: int, kept: str, dropped: str
) -> None:
    shown = _on_a_terminal(tmp_path, columns, 9)
    (line, *_) = [line for line in re.split(r"[\r\n]+", shown) if "9/3000" in line]
    assert kept in line
    assert dropped not in line
    assert line.rstrip().endswith("ETA 1:39:42")
    assert len(line) <= columns


@pytest.mark.parametrize("what", ["a full disk", "a terminal that is gone", "a pipe that nobody reads"])
def test_a_stream_that_fails_silences_the_view(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.pipe() if what == "a pipe that nobody reads" else pty.openpty()
    with Path("/dev/full").open("w") if what == "a full disk" else os.fdopen(writer, "w") as stream:
        view = open_view(Progress(RunDir(tmp_path), 2), ["run     x"], "starting", stream)
        os.close(reader)
        JsonLinesWriter(RunDir(tmp_path).metrics).write(_row(1, 5.0))
        view.tick(1)
        view.close(["nobody reads this", "nor this"])


def test_a_view_that_fails_says_so_and_ends_nothing() -> None:
    class Failing:
        def tick(self, stops: int) -> None:  # noqa: ARG002  a View's
            raise ValueError("bad row")

        def close(self) -> None:
            pass

    stream = io.StringIO()
    view = GuardedView(Failing, stream)
    view.tick(0)
    view.tick(0)
    view.close(["the end"])
    assert stream.getvalue() == "the progress could not be shown: ValueError: bad row\nthe end\n"
