"""The wandb mirror against the real wandb: what it records, and that nothing it meets reaches training."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from wandb_records import recorded_config, recorded_rows, recorded_table

from conf.schema import Config, WandbConfig, WandbMode
from launchers import processes
from orchestra.run.config_file import write_config
from orchestra.run.events import EventWriter, node_writer, rank_writer, read_events
from orchestra.run.files import JsonLinesWriter, Record
from orchestra.run.paths import RunDir
from orchestra.run.step_times import StepTimesFile
from orchestra.train.watch.wandb_mirror import WandbMirror
from tests.support.waiting import eventually

CLOSED_PORT = "http://127.0.0.1:9"


@dataclass
class Trainer:
    """The training side of one attempt: it writes rows and holds the mirror."""

    run: RunDir
    config: Config
    metrics: JsonLinesWriter
    mirror: WandbMirror
    attempt: int = 0

    @property
    def pid(self) -> int:
        assert self.mirror._process is not None
        return self.mirror._process.pid

    def train(self, steps: range) -> None:
        for step in steps:
            self.metrics.write(
                {
                    "step": step,
                    "time": 1.7e9 + step,
                    "loss": 5.0 / step,
                    "lr": None,
                    "mfu": 0.25,
                    "attempt": self.attempt,
                }
            )

    def finish(self, steps: range) -> None:
        """Take the last steps and end."""
        self.train(steps)
        self.mirror.close()
        self.metrics.close()


def begin(run: RunDir, attempt: int = 0, goes_on_after: int = 0, **settings: Any) -> Trainer:
    """Begin an attempt whose rank 0 has restored the state after a step."""
    config = Config(wandb=WandbConfig(**settings))
    run.path.mkdir(parents=True, exist_ok=True)
    write_config(run.config, config)
    run.record.write_text(json.dumps({"name": run.name, "wandb_id": "abcd1234"}))
    events = EventWriter(run, rank_writer(attempt, 0), attempt, rank=0)
    mirror = WandbMirror.start(run, config, events, attempt)
    EventWriter(run, node_writer(attempt, 0), attempt).write("attempt_started", job="7")
    events.write("restored", step=goes_on_after)
    return Trainer(run, config, JsonLinesWriter(run.metrics), mirror, attempt)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "debug-run")


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", CLOSED_PORT)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)


def failures(run: RunDir) -> list[Record]:
    return [event for event in read_events(run) if event["event"] == "wandb_failed"]


def environment() -> dict[str, str]:
    folders = (Path(__file__).parents[3], Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def offline_files(run: RunDir) -> list[Path]:
    return sorted(run.wandb.glob("offline-run-*/*.wandb"))


def recorded_steps(run: RunDir) -> list[int]:
    (file,) = offline_files(run)
    return [row["step"] for row in recorded_rows(file)]


def test_an_open_mirror_leaves_the_processors_to_training_and_holds_every_row_in_spite_of_ctrl_c(
    run: RunDir,
) -> None:
    trainer = begin(run, mode=WandbMode.offline, project="probe", tags=["one", "two"])
    assert eventually(lambda: os.getpriority(os.PRIO_PROCESS, trainer.pid) == 10, 60)
    assert offline_files(run)
    os.killpg(trainer.pid, signal.SIGINT)
    for rank, seconds in ((0, 0.1), (1, 0.25)):
        times = StepTimesFile(run, 0, rank)
        times.add(300, seconds)
        times.close()
    trainer.finish(range(1, 301))
    (file,) = offline_files(run)
    assert file.name == "run-abcd1234.wandb"
    rows = recorded_rows(file)
    assert [row["step"] for row in rows] == list(range(1, 301))
    assert [row["loss"] for row in rows] == [5.0 / step for step in range(1, 301)]
    assert [row["_timestamp"] for row in rows] == [1.7e9 + step for step in range(1, 301)]
    assert "lr" not in rows[0]
    # Of the host's slowest rank.
    assert [each for row in rows if (each := row.get(f"own_step_s/{socket.gethostname()}"))] == [0.25]
    assert failures(run) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_kills_and_a_roll_back_make_one_run_with_each_step_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "planted-7f3a-secret"
    for name in ("WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_TOKEN"):
        monkeypatch.setenv(name, secret)
    # The mirror of the first attempt is killed with its rank, that of the second one ends by itself.
    first = begin(run, mode=WandbMode.offline)
    first.train(range(1, 9))
    assert eventually(lambda: bool(offline_files(run)), 60)
    os.kill(first.pid, signal.SIGKILL)
    first.finish(range(9, 10))
    sleep_into_the_next_second()
    begin(run, 1, 5, mode=WandbMode.offline).finish(range(6, 13))
    sleep_into_the_next_second()
    third = begin(run, 2, 10, mode=WandbMode.offline)
    third.finish(range(11, 19))
    EventWriter(run, rank_writer(2, 0), 2, rank=0).write("roll_back", step=18, to=10, cause="loss spike")
    sleep_into_the_next_second()
    # As on a host whose clock is far ahead.
    (folder,) = [file.parent for file in offline_files(run)]
    folder.rename(folder.with_name("offline-run-29990101_000000-abcd1234"))
    fourth = begin(run, 3, 10, mode=WandbMode.offline)
    # Whoever stood still meanwhile adds rows of an older attempt.
    third.metrics = JsonLinesWriter(run.metrics)
    third.train(range(19, 22))
    EventWriter(run, rank_writer(3, 0), 3, rank=0).write("finished", code=0, step=20)
    fourth.finish(range(11, 21))

    (file,) = offline_files(run)
    assert file.name == "run-abcd1234.wandb"
    rows = recorded_rows(file)
    assert [row["step"] for row in rows] == [row["_step"] for row in rows] == list(range(1, 21))
    assert [row["attempt"] for row in rows] == [0] * 5 + [1] * 5 + [3] * 10
    table = recorded_table(file, "events")
    assert [event for _, attempt, event, *_ in table["data"] if attempt == 2] == [
        *("attempt_started", "restored", "roll_back"),
    ]
    config = recorded_config(file)
    assert config["provenance"]["attempt"] == 3
    assert config["provenance"]["job"] == "7"
    written = [path.read_bytes() for path in run.path.rglob("*") if path.is_file()]
    assert written
    assert not any(secret.encode() in content for content in written)


def sleep_into_the_next_second() -> None:
    """Wandb names its folders by the second."""
    time.sleep(1.05)


def test_a_mirror_falls_silent_when_a_newer_attempt_was_claimed(run: RunDir) -> None:
    trainer = begin(run, mode=WandbMode.offline)
    trainer.train(range(1, 4))
    assert eventually(lambda: os.getpriority(os.PRIO_PROCESS, trainer.pid) == 10, 60)
    run.control.mkdir(exist_ok=True)
    run.claim(1).write_text("{}")
    process = trainer.mirror._process
    assert process is not None
    assert process.wait(60) == 0
    trainer.finish(range(4, 9))
    assert set(recorded_steps(run)) <= {1, 2, 3}


@pytest.mark.slow
def test_run_that_ends_at_once_on_a_busy_machine_is_recorded(run: RunDir) -> None:
    loop = "import time\nwhile time.sleep(0) is None: pass"
    cores = range(len(os.sched_getaffinity(0)))
    busy = [subprocess.Popen([sys.executable, "-c", loop], start_new_session=True) for _ in cores]
    try:
        begin(run, mode=WandbMode.offline).finish(range(1, 4))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert failures(run) == []
    assert recorded_steps(run) == [1, 2, 3]


def test_a_mirror_that_recorded_nothing_can_be_made_up_for_by_hand(run: RunDir) -> None:
    trainer = begin(run, mode=WandbMode.offline)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.finish(range(1, 4))
    (failure,) = failures(run)
    assert "signal 9" in failure["cause"]
    command = failure["advice"].split("to do so now: ")[1]
    own_priority = os.getpriority(os.PRIO_PROCESS, 0)
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True, env=environment())
    assert os.getpriority(os.PRIO_PROCESS, 0) == own_priority, "it shares the caller's process group"
    assert recorded_steps(run) == [1, 2, 3]


def test_disabled_starts_no_process(run: RunDir) -> None:
    trainer = begin(run, mode=WandbMode.disabled)
    assert trainer.mirror._process is None
    trainer.finish(range(1, 3))
    assert not run.wandb.exists()
    assert failures(run) == []


@pytest.mark.slow
@pytest.mark.usefixtures("unreachable")
def test_unreachable_server_is_given_up_in_time_and_the_rows_stay_here(run: RunDir) -> None:
    began = time.monotonic()
    trainer = begin(run, mode=WandbMode.online, finish_timeout_s=20.0)
    trainer.train(range(1, 51))
    assert time.monotonic() - began < 8.0, "a server is given up after 8 s at the earliest"
    trainer.mirror.close()
    assert time.monotonic() - began < 30.0
    (failure,) = failures(run)
    # On a busy machine wandb itself may not even be up by then.
    assert re.search("could not be reached|not finished within", failure["cause"])
    assert "wandb sync" in failure["advice"]
    assert recorded_steps(run) == list(range(1, 51))


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_error(401)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.mark.parametrize("key", [None, "short", "0" * 40])
def test_online_without_a_key_or_with_a_wrong_one_is_kept_offline(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setenv("HOME", str(run.path.parent))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        begin(run, mode=WandbMode.online).finish(range(1, 4))
        server.shutdown()
    (failure,) = failures(run)
    assert "wandb refused to go online" in failure["cause"]
    assert recorded_steps(run) == [1, 2, 3]


def test_stopped_mirror_leaves_training_alone(run: RunDir) -> None:
    trainer = begin(run, mode=WandbMode.offline, finish_timeout_s=2.0)
    assert eventually(lambda: bool(offline_files(run)), 60)
    os.kill(trainer.pid, signal.SIGSTOP)
    began = time.monotonic()
    trainer.train(range(1, 100))
    assert time.monotonic() - began < 5.0
    trainer.mirror.close()
    assert time.monotonic() - began < 15.0
    (failure,) = failures(run)
    assert "not finished within 2 s" in failure["cause"]


def test_mirror_finishes_by_itself_when_the_trainer_is_killed(run: RunDir) -> None:
    run.path.mkdir(parents=True)
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path; from test_wandb_mirror import *\n"
        "trainer = begin(RunDir(Path(sys.argv[1])), mode=WandbMode.offline)\n"
        "trainer.train(range(1, 21)); print(trainer.pid, flush=True); time.sleep(60)\n"
    )
    arguments = [sys.executable, "-c", script, str(run.path), str(Path(__file__).parent)]
    trainer = subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environment())
    assert trainer.stdout is not None
    mirror_pid = int(trainer.stdout.readline())
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    assert eventually(lambda: processes.find(mirror_pid) is None, 20)
    assert recorded_steps(run) == list(range(1, 21))


def test_a_mirror_that_cannot_start_is_an_event(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(run.path / "no-such-python"))
    begin(run, mode=WandbMode.offline).finish(range(1, 3))
    (failure,) = failures(run)
    assert "could not be started" in failure["cause"]


def test_the_trainer_does_not_import_wandb() -> None:
    code = "import sys, orchestra.train.watch.wandb_mirror; sys.exit('wandb' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0
