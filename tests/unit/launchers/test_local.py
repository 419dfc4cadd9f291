"""The node agent on this machine, with real torchrun and small workers that need no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launchers import processes
from launchers.launch_errors import LauncherError
from launchers.node_agent import Patience, run_local
from launchers.spec import Ending, LaunchSpec

_ROOT = Path(__file__).resolve().parents[3]
_SHORT = Patience(stop_s=1.0, failed_peer_s=0.5, linger_s=1.0)


@dataclass
class _Trial:
    """A worker module in a folder of its own; every rank writes its process id there before anything else."""

    folder: Path
    body: str
    endings: list[Ending] = field(default_factory=list)

    def spec(self) -> LaunchSpec:
        prologue = f"""
            import os, pathlib, signal, subprocess, sys, time
            rank = int(os.environ["RANK"])
            here = pathlib.Path({str(self.folder)!r})
            (here / f"draft-{{rank}}").write_text(str(os.getpid()))
            (here / f"draft-{{rank}}").rename(here / f"pid-{{rank}}")
            while len(list(here.glob("pid-*"))) < 2: time.sleep(0.01)
        """
        source = textwrap.dedent(prologue) + textwrap.dedent(self.body)
        (self.folder / "tiny_worker.py").write_text(source)
        environment = {"PYTHONPATH": f"{self.folder}{os.pathsep}{_ROOT}", "OMP_NUM_THREADS": "1"}
        return LaunchSpec("tiny_worker", (), environment, 2, (self.folder / "logs" / "node-000.log",))

    def pids(self) -> list[int]:
        return [int(file.read_text()) for file in sorted(self.folder.glob("pid-*"))]

    def is_up(self) -> bool:
        return len(self.pids()) == 2

    def run(self, stops: Callable[[], int] = lambda: 0, patience: Patience = _SHORT) -> Ending:
        def judge(ending: Ending) -> int:
            self.endings.append(ending)
            return 42

        assert run_local(self.spec(), verdict=judge, stops=stops, tick=lambda: None, patience=patience) == 42
        return self.endings[0]

    def survivors(self) -> list[int]:
        return [pid for pid in self.pids() if processes.find(pid) is not None]


def test_the_verdict_decides_the_code_and_sees_a_clean_end(tmp_path: Path) -> None:
    trial = _Trial(tmp_path, "print('said by', rank)")
    assert trial.run() == Ending(exit_code=0)
    log = (tmp_path / "logs" / "node-000.log").read_text()
    assert "torch.distributed.run" in log
    assert "said by 1" in log


def test_a_failing_rank_is_named_and_its_hanging_peer_does_not_hold_up_the_end(tmp_path: Path) -> None:
    trial = _Trial(tmp_path, "if rank == 1: sys.exit(3)\ntime.sleep(60)")
    started = time.monotonic()
    ending = trial.run()
    assert time.monotonic() - started < 30, "torchrun alone waits 30 s for the peer"
    assert (ending.exit_code, ending.failures[0].rank, ending.failures[0].exit_code) == (1, 1, 3)
    assert not ending.failures[0].cleaned_up
    assert trial.survivors() == []


def test_a_killed_rank_is_told_by_its_signal(tmp_path: Path) -> None:
    ending = _Trial(tmp_path, "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(60)").run()
    assert (ending.failures[0].rank, ending.failures[0].exit_code) == (0, -signal.SIGKILL)


_DIES_LATE = """
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if rank:
    signal.signal(signal.SIGTERM, die)
    (here / "dying").touch()
    time.sleep(60)
while not (here / "dying").exists(): time.sleep(0.01)
sys.exit(7)
"""


def test_a_rank_killed_by_others_is_named_first_though_torchrun_saw_its_peer_fail_before(
    tmp_path: Path,
) -> None:
    # As where a rank dies slowly: its peer's connection broke, the peer failed, and torchrun closed both.
    ending = _Trial(tmp_path, _DIES_LATE).run(patience=Patience(failed_peer_s=20.0))
    assert [(one.rank, one.exit_code, one.cleaned_up) for one in ending.failures] == [
        (0, 7, False),
        (1, -signal.SIGKILL, False),
    ]


def test_a_stop_lets_workers_that_listen_finish(tmp_path: Path) -> None:
    body = """
        def finish(*_):
            (here / f"stopped-{rank}").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, finish)
        (here / f"listening-{rank}").touch()
        time.sleep(60)
    """
    trial = _Trial(tmp_path, body)
    ending = trial.run(stops=lambda: int(len(list(tmp_path.glob("listening-*"))) == 2))
    assert len(list(tmp_path.glob("stopped-*"))) == 2
    assert (ending.exit_code, ending.stops) == (0, 1)


def test_a_stop_kills_workers_that_do_not_listen_at_once(tmp_path: Path) -> None:
    trial = _Trial(tmp_path, "time.sleep(60)")
    stopped_at: list[float] = []

    def stops() -> int:
        if trial.is_up() and not stopped_at:
            stopped_at.append(time.monotonic())
        return len(stopped_at)

    ending = trial.run(stops=stops, patience=Patience(stop_s=30))
    assert time.monotonic() - stopped_at[0] < 25, "they have 30 s where they listen"
    assert ending.exit_code == -signal.SIGKILL
    assert trial.survivors() == []


def test_a_second_stop_cuts_the_patience_short(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGTERM, lambda *_: None)\n(here / f'up-{rank}').touch()\ntime.sleep(60)"
    trial = _Trial(tmp_path, body)
    first: list[float] = []

    def stops() -> int:
        if len(list(tmp_path.glob("up-*"))) == 2 and not first:
            first.append(time.monotonic())
        return 0 if not first else 1 if time.monotonic() - first[0] < 0.5 else 2

    assert trial.run(stops=stops, patience=Patience(stop_s=60)).stops == 2
    assert time.monotonic() - first[0] < 50, "they had 60 s"
    assert trial.survivors() == []


def test_what_a_worker_leaves_behind_may_finish_but_not_stay(tmp_path: Path) -> None:
    body = """
        if rank == 0:
            for seconds in (0.5, 60):
                child = subprocess.Popen(["sleep", str(seconds)], start_new_session=True)
                (here / f"pid-left-{seconds}").write_text(str(child.pid))
    """
    trial = _Trial(tmp_path, body)
    assert trial.run().exit_code == 0
    assert trial.survivors() == []


def test_nothing_survives_an_agent_that_is_killed(tmp_path: Path) -> None:
    trial = _Trial(
        tmp_path,
        "from launchers.processes import die_with_parent\ndie_with_parent(os.getppid())\ntime.sleep(60)",
    )
    spec = trial.spec()
    program = (
        "import pathlib\nfrom launchers.node_agent import run_local\nfrom launchers.spec import LaunchSpec\n"
        f"logs = (pathlib.Path({str(spec.node_logs[0])!r}),)\n"
        f"spec = LaunchSpec('tiny_worker', (), {dict(spec.environment)!r}, 2, logs)\n"
        "run_local(spec, verdict=lambda ending: 0, stops=lambda: 0, tick=lambda: None)\n"
    )
    environment = {**os.environ, **spec.environment}
    agent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    deadline = time.monotonic() + 30
    while not trial.is_up() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    agent.kill()
    agent.wait()
    deadline = time.monotonic() + 5
    while trial.survivors() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert trial.is_up()
    assert trial.survivors() == []


@pytest.mark.slow
def test_a_killed_torchrun_takes_its_workers_along(tmp_path: Path) -> None:
    trial = _Trial(tmp_path, "if rank == 0: os.kill(os.getppid(), signal.SIGKILL)\ntime.sleep(60)")
    assert trial.run().exit_code == -signal.SIGKILL
    assert trial.survivors() == []


def test_more_than_one_node_is_refused(tmp_path: Path) -> None:
    spec = LaunchSpec("m", (), {}, 1, (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(LauncherError, match="2 were asked for"):
        run_local(spec, verdict=lambda _: 0, stops=lambda: 0, tick=lambda: None)


def test_a_removed_log_ends_nothing(tmp_path: Path) -> None:
    trial = _Trial(tmp_path, "time.sleep(1.0)\n(here / f'done-{rank}').touch()")

    def stops() -> int:
        if trial.is_up():
            (tmp_path / "logs" / "node-000.log").unlink(missing_ok=True)
        return 0

    assert trial.run(stops=stops).exit_code == 0
    assert len(list(tmp_path.glob("done-*"))) == 2


def test_a_log_that_cannot_be_written_is_a_launcher_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = LaunchSpec("m", (), {}, 1, (tmp_path / "file" / "node-000.log",))
    with pytest.raises(LauncherError, match=r"cannot write .*node-000\.log"):
        run_local(spec, verdict=lambda _: 0, stops=lambda: 0, tick=lambda: None)
