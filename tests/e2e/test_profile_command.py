"""`orchestra profile` asks a run of two ranks for a trace: both trace the same steps and go on, until Ctrl-C
stops them with a checkpoint.
"""

from __future__ import annotations

import gzip
import json
import signal
from pathlib import Path

from commands import PACE, TINY, events_of, newest_manifest, orchestra, start_run

from orchestra.errors import EXIT_STOPPED, EXIT_USAGE
from orchestra.run.metrics_file import read_metrics


def test_a_run_that_trains_traces_steps_when_it_is_asked_to_and_goes_on_until_ctrl_c(tmp_path: Path) -> None:
    overrides = (*TINY, PACE, "train.steps=100000", "checkpoint.every_steps=1000", "cluster.gpus_per_node=2")
    started = start_run(tmp_path, "traced", *overrides)
    started.wait_for_steps(3)
    wrong = orchestra(tmp_path, "profile", "traced", "--ranks", "2", code=EXIT_USAGE)
    assert "the run has the ranks 0 to 1" in wrong.stderr
    said = orchestra(tmp_path, "profile", "traced", "--steps", "2", "--ranks", "all", "--json")
    files = [Path(file) for file in json.loads(said.stdout)["files"]]
    traces = [file for file in files if file.name.endswith(".json.gz")]
    spans = {file.name.split("-steps-")[1] for file in traces}
    assert (len(traces), len(spans)) == (2, 1), "both ranks traced the same steps"
    first, last = map(int, spans.pop().removesuffix(".json.gz").split("-"))
    assert last == first + 1
    names = {
        event.get("name") for event in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    }
    assert {f"step {first}", f"step {last}"} <= names
    assert json.loads(said.stdout)["shares"]["first_step"] == first
    assert "forward" in orchestra(tmp_path, "profile", "traced", "--steps", "1").stdout
    started.wait_for_steps(last + 5)
    assert events_of(started.run, "failed") == []
    started.process.send_signal(signal.SIGINT)
    out, err = started.end(EXIT_STOPPED)
    assert err == ""
    assert "stopping after this step, with a checkpoint (Ctrl-C again: at once)" in out
    newest = newest_manifest(started.run.checkpoints).step
    assert read_metrics(started.run)[-1]["step"] == newest
    assert out.splitlines()[-1] == f"resume  `orchestra resume traced` goes on from step {newest}"
    ended = orchestra(tmp_path, "profile", "traced", code=EXIT_USAGE)
    assert "traced is stopped: only a run that trains can be traced" in ended.stderr
