"""The node agent with real torchrun and small workers: forked from a server, or new interpreters.

What is forked behaves like new interpreters; what does not depend on that is tested with forked ones, because
they start sooner.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_trials import environment, eventually, written
from support.signal_handlers import as_from_a_terminal, send_here

from launchers import LauncherError, processes
from launchers.fork_server.client import ForkServer
from launchers.node_agent import Patience, StopRequests, run_local, supervise
from launchers.torchrun import Ending, LaunchSpec


@pytest.fixture(scope="module", autouse=True)
def _ordinary_signals() -> Iterator[None]:
    """Begin as from a terminal: what a script starts with `&` ignores SIGQUIT, and so would workers."""
    before = signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGQUIT, before)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="module")
def host(modules: Path) -> Iterator[ForkServer]:
    """The server of this file's tests; whatever they kill, the next one gets a living one."""
    fork_server = ForkServer((), environment(modules), modules / "server.log")
    yield fork_server
    fork_server.close()


@pytest.fixture
def fork_server(host: ForkServer) -> ForkServer:
    host.start()
    assert host.await_ready(60), host.trouble()
    return host


def kill_once(victim: list[int]) -> None:
    """Kill the process whose id is the list's only entry, and empty it."""
    while victim:
        os.kill(victim.pop(), signal.SIGKILL)


REPORT = """
import atexit, hashlib, logging, random, threading
import torch
torch.set_num_threads(2)
torch.manual_seed(1)
product = torch.randn(300, 300) @ torch.randn(300, 300)
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
values = {
    "name": __name__, "spec": __spec__.name, "file": __file__, "arguments": sys.argv, "path": sys.path,
    "all arguments": sys.orig_argv, "flags": str(sys.flags), "folder": os.getcwd(),
    "through": [sys.stdout.write_through, sys.stderr.write_through], "cached": __cached__,
    "main is": sys.modules["__main__"].__dict__ is globals(),
    "names": sorted({*globals()} - {"__annotations__"}),
    "environment": {name: value for name, value in os.environ.items() if name not in (
        "LAUNCHERS_MARK", "LAUNCHERS_PARENT_PID", "MASTER_PORT", "TORCHELASTIC_RUN_ID")},
    "parent is told": os.environ["LAUNCHERS_PARENT_PID"] == str(os.getppid()),
    "shown": open("/proc/self/cmdline", "rb").read().rstrip(b"\\0").decode().split("\\0"),
    "signals": [status[name] for name in ("SigBlk", "SigIgn", "SigCgt")],
    "nice": os.nice(0), "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1],
    "input": sys.stdin.read(), "threads": torch.get_num_threads(),
    "product": hashlib.sha256(product.numpy().tobytes()).hexdigest(),
    "main": threading.current_thread() is threading.main_thread(),
}
logging.warning("logged by %d", rank)
print("printed by", rank)
atexit.register(lambda: (here / f"report-{rank}").write_text(json.dumps(values)))
import json, numpy
(here / f"drawn-{rank}").write_text(f"{random.random()} {numpy.random.random()}")
threading.Thread(target=lambda: (time.sleep(0.1), (here / f"thread-{rank}").touch())).start()
sys.exit(3 * rank)
"""


@pytest.mark.slow
def test_a_forked_worker_is_like_one_of_a_new_interpreter(modules: Path, fork_server: ForkServer) -> None:
    reports = []
    for name, host in (("report_forked", fork_server), ("report_new", None)):
        trial = written(modules, name, REPORT)
        ending = trial.run(host)
        assert [(one.rank, one.exit_code) for one in ending.failures] == [(1, 3)]
        assert "logged by 1" in trial.log.read_text()
        assert "printed by 1" in trial.log.read_text()
        assert (trial.folder / "thread-1").exists()
        drawn = [(trial.folder / f"drawn-{rank}").read_text().split() for rank in (0, 1)]
        assert drawn[0][0] != drawn[1][0]
        assert drawn[0][1] != drawn[1][1]
        text = (trial.folder / "report-1").read_text()
        reports.append(json.loads(text.replace(name, "NAME")))
    assert reports[0] == reports[1]


def test_failures_name_the_workers_own_process_and_how_it_ended(
    modules: Path, fork_server: ForkServer
) -> None:
    trial = written(modules, "segfault", "os.kill(os.getpid(), signal.SIGSEGV) if rank else time.sleep(60)")
    began = time.monotonic()
    ending = trial.run(fork_server)
    assert time.monotonic() - began < 30, "torchrun alone waits 30 s for the peer"
    assert ending.exit_code == 1
    assert [(one.rank, one.exit_code, one.pid) for one in ending.failures] == [
        (1, -signal.SIGSEGV, trial.pids()[1]),
        (0, -signal.SIGKILL, trial.pids()[0]),
    ]
    assert [one.cleaned_up for one in ending.failures] == [False, True]
    assert trial.remaining() == []


def test_torchruns_closing_signal_arrives_once_and_the_workers_own_code_counts(
    modules: Path, fork_server: ForkServer
) -> None:
    body = """
        def close(number, frame):
            with (here / "heard").open("a") as file: file.write(f"{number}\\n")
            time.sleep(0.3)
            sys.exit(5)
        if rank:
            signal.signal(signal.SIGTERM, close)
            (here / "listening").touch()
            time.sleep(60)
        while not (here / "listening").exists(): time.sleep(0.01)
        sys.exit(7)
    """
    trial = written(modules, "closing", body)
    ending = supervise(trial.start(fork_server, Patience(failed_peer_s=30.0)), lambda: 0, lambda: None)
    assert [(one.rank, one.exit_code, one.cleaned_up) for one in ending.failures] == [
        (0, 7, False),
        (1, 5, True),
    ]
    assert (trial.folder / "heard").read_text() == f"{signal.SIGTERM:d}\n"


DIES_LATE = """
def die(*_): os.kill(os.getpid(), signal.SIGKILL)
if rank:
    signal.signal(signal.SIGTERM, die)
    (here / "dying").touch()
    time.sleep(60)
while not (here / "dying").exists(): time.sleep(0.01)
sys.exit(7)
"""


def test_a_rank_killed_by_others_is_named_first_though_torchrun_saw_its_peer_fail_before(
    modules: Path, fork_server: ForkServer
) -> None:
    # As where a rank dies slowly: its peer's connection broke, the peer failed, and torchrun closed both.
    trial = written(modules, "dying_late", DIES_LATE)
    ending = trial.run(fork_server, patience=Patience(failed_peer_s=20.0))
    assert [(one.rank, one.exit_code, one.cleaned_up) for one in ending.failures] == [
        (0, 7, False),
        (1, -signal.SIGKILL, False),
    ]


LISTEN = """
def close(number, frame):
    with (here / f"heard-{rank}").open("a") as file: file.write(f"{number}\\n")
    time.sleep(0.3)
    os._exit(0)
if rank >= NUM_DEAF: signal.signal(signal.SIGTERM, close)
(here / f"set-{rank}").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("num_deaf", [0, 1, 2])
def test_a_stop_reaches_workers_that_listen_and_kills_the_deaf_at_once(
    modules: Path, fork_server: ForkServer, num_deaf: int
) -> None:
    trial = written(modules, f"stopped_{num_deaf}", LISTEN.replace("NUM_DEAF", str(num_deaf)))
    began = time.monotonic()
    patience = Patience(stop_s=60.0, failed_peer_s=1.0)
    ending = trial.run(fork_server, stops=lambda: int(len(trial.files("set")) == 2), patience=patience)
    assert time.monotonic() - began < 50, "they have 60 s where they listen"
    assert ending.stops == 1
    heard = [file.read_text().split() for file in trial.files("heard")]
    assert len(heard) == 2 - num_deaf
    assert num_deaf or (ending.exit_code, ending.failures) == (0, ())
    # Where one is killed torchrun asks the other one to end, too.
    assert num_deaf or heard == [["15"]] * 2
    killed = {one.rank for one in ending.failures if one.exit_code == -signal.SIGKILL}
    assert killed == ({0} if num_deaf == 1 else set())
    assert (ending.exit_code == -signal.SIGKILL) == (num_deaf == 2), "torchrun is killed with them"
    assert trial.remaining() == []


def test_a_second_stop_cuts_the_patience_short(modules: Path, fork_server: ForkServer) -> None:
    body = "signal.signal(signal.SIGTERM, lambda *_: None)\n(here / f'up-{rank}').touch()\ntime.sleep(60)"
    trial = written(modules, "stopped_twice", body)
    first: list[float] = []

    def stops() -> int:
        if len(trial.files("up")) == 2 and not first:
            first.append(time.monotonic())
        return 0 if not first else 1 if time.monotonic() - first[0] < 0.5 else 2

    assert trial.run(fork_server, stops=stops, patience=Patience(stop_s=60)).stops == 2
    assert time.monotonic() - first[0] < 50, "they had 60 s"
    assert trial.remaining() == []


def test_a_removed_log_ends_nothing(modules: Path, fork_server: ForkServer) -> None:
    trial = written(modules, "without_log", "time.sleep(0.5)\n(here / f'done-{rank}').touch()")

    def remove_log() -> None:
        if trial.is_up():
            trial.log.unlink(missing_ok=True)

    assert trial.run(fork_server, tick=remove_log).exit_code == 0
    assert len(trial.files("done")) == 2


@pytest.mark.parametrize("victim", ["worker", "launcher"])
def test_a_killed_worker_or_its_launcher_is_a_failed_rank(
    modules: Path, fork_server: ForkServer, victim: str
) -> None:
    trial = written(modules, f"killed_{victim}", "time.sleep(60)")
    agent = trial.start(fork_server)
    assert eventually(trial.is_up)
    launchers = {worker: launcher for launcher, worker in agent._torchrun.worker_ids().items()}
    os.kill(trial.pids()[1] if victim == "worker" else launchers[trial.pids()[1]], signal.SIGKILL)
    ending = supervise(agent, lambda: 0, lambda: None)
    first = ending.failures[0]
    assert (first.rank, first.exit_code, first.pid) == (1, -signal.SIGKILL, trial.pids()[1])
    assert trial.remaining() == []


def test_nothing_is_left_behind_but_the_server(modules: Path, fork_server: ForkServer) -> None:
    body = """
        subprocess.Popen(["setsid", "sh", "-c", f"sleep 0.3; touch {here}/finished-{rank}; sleep 60"])
        if os.fork() == 0:
            (here / f"fork-{rank}").write_text(str(os.getpid()))
            time.sleep(60)
        while not (here / f"fork-{rank}").exists(): time.sleep(0.01)
    """
    trial = written(modules, "leaving", body)
    ending = trial.run(fork_server, patience=Patience(linger_s=3.0))
    assert (ending.exit_code, ending.survivors) == (0, ())
    assert len(trial.files("finished")) == 2, "it may finish what takes a moment"
    # On no list of process ids: their parents have ended, and the server did not fork them.
    forks = [int(file.read_text()) for file in trial.files("fork")]
    assert [processes.find(pid) for pid in forks] == [None, None]
    assert trial.remaining() == []
    assert fork_server.pid is not None
    assert processes.children(fork_server.pid) == []


def test_killing_torchrun_kills_its_workers(modules: Path, fork_server: ForkServer) -> None:
    trial = written(modules, "orphans", "time.sleep(60)")
    agent = trial.start(fork_server)
    assert eventually(trial.is_up)
    os.kill(agent._torchrun.pid, signal.SIGKILL)
    assert eventually(lambda: trial.remaining() == [])
    assert agent.poll() == -signal.SIGKILL


@pytest.mark.slow
def test_without_its_server_an_attempt_ends_and_the_next_one_starts_an_interpreter(
    modules: Path, fork_server: ForkServer
) -> None:
    trial = written(modules, "headless", "time.sleep(60)")
    assert fork_server.pid is not None
    victim = [fork_server.pid]
    ending = trial.run(fork_server, tick=lambda: kill_once(victim) if trial.is_up() else None)
    assert ending.exit_code == -signal.SIGKILL
    assert trial.remaining() == []
    assert not fork_server.is_ready()
    plain = written(modules, "plain_again", "")
    assert plain.run(fork_server).exit_code == 0
    assert "not forked but started, because the fork server ended with -9" in plain.log.read_text()


TIED = """
from launchers.processes import die_with_parent
die_with_parent(os.getppid())
(here / f"tied-{rank}").touch()
time.sleep(60)
"""
# Trains a module, with a server of its own where there is a log for it.
AGENT = """
import sys
from pathlib import Path
from fork_trials import Trial, environment
from launchers.fork_server.client import ForkServer
modules, server = Path(sys.argv[1]), None
if sys.argv[3:]:
    server = ForkServer((), environment(modules), modules / sys.argv[3])
    server.start()
    assert server.await_ready(60), server.trouble()
print(server and server.pid, flush=True)
Trial(modules, sys.argv[2]).run(server)
"""


@pytest.mark.parametrize(
    ("body", "server_log"),
    [
        pytest.param(TIED, [], id="new interpreters"),
        pytest.param('(here / f"tied-{rank}").touch()\ntime.sleep(60)', ["other.log"], id="forked"),
    ],
)
def test_all_die_with_a_killed_agent(tmp_path: Path, body: str, server_log: list[str]) -> None:
    trial = written(tmp_path, "deserted", body)
    settings = {**os.environ, **environment(tmp_path)}
    settings["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent}"
    words = [sys.executable, "-c", AGENT, str(tmp_path), trial.name, *server_log]
    agent = subprocess.Popen(words, env=settings, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    with agent.stdout:
        server_pid = agent.stdout.readline().strip()
    server = processes.find(int(server_pid)) if server_log else None
    try:
        assert (server is not None) == bool(server_log)
        assert eventually(lambda: len(trial.files("tied")) == 2)
    finally:
        agent.kill()
        agent.wait()
    assert eventually(lambda: trial.remaining() == [])
    assert server is None or eventually(lambda: not processes.is_alive(server))


# Workers of new interpreters.


def test_the_verdict_decides_the_code_and_sees_a_clean_end(tmp_path: Path) -> None:
    trial = written(tmp_path, "clean", "print('said by', rank)")
    endings: list[Ending] = []

    def judge(ending: Ending) -> int:
        endings.append(ending)
        return 42

    assert run_local(trial.spec, verdict=judge, stops=lambda: 0, tick=lambda: None) == 42
    assert endings == [Ending(exit_code=0)]
    assert "launchers.bound_torchrun" in trial.log.read_text()
    assert "said by 1" in trial.log.read_text()


def test_a_stop_lets_workers_that_listen_finish(tmp_path: Path) -> None:
    body = """
        def finish(*_):
            (here / f"stopped-{rank}").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, finish)
        (here / f"listening-{rank}").touch()
        time.sleep(60)
    """
    trial = written(tmp_path, "listening", body)
    ending = trial.run(None, stops=lambda: int(len(trial.files("listening")) == 2))
    assert len(trial.files("stopped")) == 2
    assert (ending.exit_code, ending.stops) == (0, 1)


@pytest.mark.parametrize(
    ("logs", "message"),
    [(("a", "b"), "2 were asked for"), (("file/node-000.log",), r"cannot write .*node-000\.log")],
)
def test_what_cannot_be_started_is_a_launcher_error(
    tmp_path: Path, logs: tuple[str, ...], message: str
) -> None:
    (tmp_path / "file").touch()
    spec = LaunchSpec("m", (), {}, 1, tuple(tmp_path / log for log in logs))
    with pytest.raises(LauncherError, match=message):
        run_local(spec, verdict=lambda _: 0, stops=lambda: 0, tick=lambda: None)


# Signals that ask to stop, sent to this very process.


@pytest.fixture
def terminal() -> Iterator[None]:
    with as_from_a_terminal():
        yield


@pytest.mark.usefixtures("terminal")
def test_signals_are_counted_and_the_handlers_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests() as stops:
        send_here(signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
        assert (stops.count(), stops.first) == (3, "SIGHUP")
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_ignored_from_the_start_stays_ignored(number: signal.Signals) -> None:
    """As under nohup, and in what a shell without job control starts with `&`."""
    signal.signal(number, signal.SIG_IGN)
    with StopRequests() as stops:
        send_here(number, signal.SIGTERM)
        assert (stops.count(), stops.first) == (1, "SIGTERM")
    assert signal.getsignal(number) is signal.SIG_IGN
