"""torchrun and workers forked from a real server: like those of new interpreters, all ended at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_trials import environment, eventually, written

from launchers import processes
from launchers.fork_server.client import ForkServer
from launchers.node_agent import Patience, supervise


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
    ending = trial.run(fork_server)
    assert ending.exit_code == 1
    assert [(one.rank, one.exit_code, one.pid) for one in ending.failures] == [
        (1, -signal.SIGSEGV, trial.pids()[1]),
        (0, -signal.SIGKILL, trial.pids()[0]),
    ]
    assert [one.cleaned_up for one in ending.failures] == [False, True]
    assert trial.remaining() == []


def test_one_server_serves_attempt_after_attempt(modules: Path, fork_server: ForkServer) -> None:
    before = fork_server.pid
    for number in range(3):
        assert written(modules, f"again_{number}", "").run(fork_server).exit_code == 0
    assert fork_server.pid == before


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


LISTEN = """
def close(number, frame):
    with (here / f"heard-{rank}").open("a") as file: file.write(f"{number}\\n")
    time.sleep(0.3)
    os._exit(0)
if rank or not DEAF: signal.signal(signal.SIGTERM, close)
(here / f"set-{rank}").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("deaf", [False, True])
def test_a_stop_reaches_workers_that_listen_and_kills_the_deaf(
    modules: Path, fork_server: ForkServer, deaf: bool
) -> None:
    trial = written(modules, f"stopped_{deaf}", LISTEN.replace("DEAF", str(deaf)))
    ending = trial.run(fork_server, stops=lambda: int(len(list(trial.folder.glob("set-*"))) == 2))
    assert ending.stops == 1
    heard = [file.read_text().split() for file in sorted(trial.folder.glob("heard-*"))]
    if deaf:
        assert [one.exit_code for one in ending.failures if one.rank == 0] == [-signal.SIGKILL]
        assert len(heard) == 1
    else:
        assert ending.failures == ()
        assert heard == [[str(int(signal.SIGTERM))]] * 2
    assert trial.remaining() == []


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
        subprocess.Popen(["setsid", "sleep", "60"])
        if os.fork() == 0:
            (here / f"fork-{rank}").write_text(str(os.getpid()))
            time.sleep(60)
        while not (here / f"fork-{rank}").exists(): time.sleep(0.01)
    """
    trial = written(modules, "leaving", body)
    assert trial.run(fork_server).survivors == ()
    # On no list of process ids: their parents have ended, and the server did not fork them.
    forks = [int(file.read_text()) for file in trial.folder.glob("fork-*")]
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


def test_all_die_with_a_killed_agent(modules: Path) -> None:
    trial = written(modules, "deserted", "time.sleep(60)")
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path\n"
        "from fork_trials import Trial, environment\n"
        "from launchers.node_agent import Patience, supervise\n"
        "from launchers.fork_server.client import ForkServer\n"
        f"modules = Path({str(modules)!r})\n"
        "fork_server = ForkServer((), environment(modules), modules / 'other.log')\n"
        "fork_server.start()\n"
        "assert fork_server.await_ready(60), fork_server.trouble()\n"
        "print(fork_server.pid, flush=True)\n"
        f"trial = Trial(modules, {trial.name!r})\n"
        "supervise(trial.start(fork_server), lambda: 0, lambda: None)\n"
    )
    settings = {**os.environ, **environment(modules)}
    agent = subprocess.Popen([sys.executable, "-c", program], env=settings, stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    with agent.stdout:
        server = processes.find(int(agent.stdout.readline()))
    try:
        assert server is not None
        assert eventually(trial.is_up)
    finally:
        agent.kill()
        agent.wait()
    assert eventually(lambda: trial.remaining() == [])
    assert eventually(lambda: not processes.is_alive(server))
