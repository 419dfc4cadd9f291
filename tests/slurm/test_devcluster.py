"""The development cluster is a real one: users' jobs on several hosts, failing nodes, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sites import ROOT, Site, TooLateError, wait_until

from slurm.cluster.hosts import NAMESPACES, host_state, start_ticks
from slurm.cluster.layout import load_layout


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Return a new folder whose path is short enough for a cluster; pytest's own ones are not."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def traces(state: Path) -> dict[str, set[str]]:
    """Return everything on this machine that a cluster could leave, by kind."""
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout)
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    cgroups = Path("/sys/fs/cgroup").rglob("*")
    return {
        "processes": {process for process in commands_by_process() if str(state) in process},
        "namespaces": {path.name for path in NAMESPACES.glob("*")},
        "links": {link["ifname"] for link in links},
        "mounts": {line for line in mounts if str(state) in line or str(NAMESPACES) in line},
        "cgroups": {str(path) for path in cgroups if "slurm" in path.name or "devcluster" in path.name},
        "folders": {str(state)} if state.exists() else set(),
    }


def wait_until_only(before: dict[str, set[str]], state: Path) -> None:
    """Wait until nothing is on this machine that was not there before."""
    with contextlib.suppress(TooLateError):
        wait_until(lambda: traces(state) == before, "nothing is left", within_s=10)
    assert traces(state) == before


def commands_by_process() -> list[str]:
    """Return every running process as its number and command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append(f"{folder.name} {(folder / 'cmdline').read_text()}")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def first_processes(cluster: Site) -> list[int]:
    states = [host_state(cluster.layout, host) for host in cluster.layout.hosts]
    return [state.pid for state in states if state]


def num_running(cluster: Site, host: str, command: str) -> int:
    """Return how many processes on a host run a command; srun puts its whole path before it."""
    running = cluster.processes_on(host).values()
    return sum(line == command or line.endswith(f"/{command}") for line in running)


def test_cluster_is_healthy_and_env_is_all_that_a_shell_needs(cluster: Site) -> None:
    status = cluster.run(str(ROOT / "slurm" / "devcluster"), "--state", str(cluster.state), "status")
    assert status.stdout.endswith("healthy\n")
    assert [line.split()[0] for line in status.stdout.splitlines()[:5]] == list(cluster.layout.hosts)
    command = f'eval "$({ROOT}/slurm/devcluster --state {cluster.state} env)" && sinfo --noheader --format=%D'
    done = subprocess.run(
        ["sh", "-c", command], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["4"]


def test_second_up_changes_nothing_and_is_refused_with_other_settings(cluster: Site) -> None:
    before = first_processes(cluster)
    assert "already up" in cluster.devcluster("up", "--nodes", "4", "--gpus", "4").stdout
    refused = cluster.devcluster("up", "--nodes", "3", check=False)
    assert (refused.returncode, "other settings" in refused.stderr) == (2, True)
    assert first_processes(cluster) == before


def test_up_starts_a_node_again_whose_daemon_has_ended(cluster: Site) -> None:
    before = first_processes(cluster)
    (daemon,) = [pid for pid, line in cluster.processes_on("node4").items() if line.startswith("slurmd -D")]
    os.kill(daemon, signal.SIGKILL)
    wait_until(lambda: cluster.devcluster("status", check=False).returncode == 1, "its end is known")
    assert " up after " in cluster.devcluster("up", "--nodes", "4", "--gpus", "4").stdout
    assert cluster.devcluster("status").stdout.endswith("healthy\n")
    # The controller's and the other nodes' are the same.
    assert len(set(first_processes(cluster)) - set(before)) == 1


def test_ordinary_users_tasks_find_hosts_by_name_and_share_files_but_not_memory(cluster: Site) -> None:
    tasks = cluster.run("srun", "--nodes=3", "sh", "-c", "echo $(hostname) $(id -un)").stdout.splitlines()
    user = cluster.user.pw_name
    assert sorted(tasks) == [f"node{number} {user}" for number in (1, 2, 3)]
    cluster.run("srun", "--nodelist=node1", "sh", "-c", "echo file > file; echo memory > /dev/shm/memory")
    command = "cat file; ls /dev/shm/memory 2>/dev/null; getent hosts node1"
    seen = cluster.run("srun", "--nodelist=node2", "sh", "-c", command).stdout.split()
    assert seen == ["file", str(cluster.layout.address("node1")), "node1"]
    # A name that nobody knows fails at once.
    command = "timeout 3 getent hosts unknown.example; echo $?"
    assert cluster.run("srun", "sh", "-c", command).stdout.split() == ["2"]


def test_gpus_are_counted_and_given_to_one_job_at_a_time(cluster: Site) -> None:
    command = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert cluster.run("srun", "--gres=gpu:2", *command).stdout.split() == ["0,1"]
    refused = cluster.run("srun", "--gres=gpu:5", "true", check=False)
    assert (refused.returncode, "not available" in refused.stderr) == (1, True)
    holder = cluster.submit("--nodes=4", "--gres=gpu:3", "--wrap", "srun sleep 100")
    wait_until(lambda: cluster.job_state(holder) == "RUNNING", "the first job runs")
    waiting = cluster.submit("--gres=gpu:2", "--wrap", "true")
    beside = cluster.submit("--gres=gpu:1", "--wrap", "true")
    wait_until(lambda: cluster.job_state(beside) == "COMPLETED", "a job that fits beside the first one ends")
    assert cluster.job_state(waiting) == "PENDING"


def test_accounting_knows_a_finished_job(cluster: Site) -> None:
    job = cluster.submit("--wrap", "exit 3")
    shape = ("--noheader", "--parsable2", "--allocations", "--format=State,ExitCode,User")
    query = ("sacct", *shape, f"--jobs={job}")
    expected = f"FAILED|3:0|{cluster.user.pw_name}"
    wait_until(lambda: cluster.run(*query).stdout.strip() == expected, "sacct shows the job as failed")


def test_failed_node_goes_down_with_all_its_processes_and_heals(cluster: Site) -> None:
    requeued = cluster.submit("--nodes=3", "--requeue", "--wrap", "srun sleep 2000")
    wait_until(lambda: num_running(cluster, "node3", "sleep 2000"), "the job that will be requeued runs")
    lost = cluster.submit("--nodelist=node3", "--no-requeue", "--wrap", "setsid sleep 1000 & sleep 1000")
    wait_until(lambda: num_running(cluster, "node3", "sleep 1000") == 2, "the job that will be lost runs")
    doomed = {pid: start_ticks(pid) for pid in cluster.processes_on("node3")}

    cluster.devcluster("fail-node", "3")
    assert not [pid for pid, began in doomed.items() if began is not None and start_ticks(pid) == began]
    assert "node3 is off" in cluster.devcluster("status", check=False).stdout
    wait_until(lambda: cluster.is_node_down("node3"), "Slurm says that the node is down")
    wait_until(lambda: cluster.job_state(lost) == "NODE_FAIL", "Slurm says that the job lost its node")
    cluster.start_again_now(requeued)
    wait_until(
        lambda: num_running(cluster, "node4", "sleep 2000"), "the requeued job runs on the other nodes"
    )

    cluster.devcluster("heal-node", "node3")
    assert cluster.about_node("node3", "%T") == "idle"
    assert cluster.run("srun", "--nodelist=node3", "hostname").stdout.strip() == "node3"


def test_cluster_without_accounting_beside_another_leaves_nothing_behind(
    cluster: Site, new_site: Callable[..., Site], tmp_path: Path
) -> None:
    before = traces(tmp_path / "none")
    other = new_site("--nodes", "2", "--gpus", "0", "--no-accounting", "--set", "MaxArraySize=7")
    assert sorted(other.run("srun", "--nodes=2", "hostname").stdout.split()) == ["node1", "node2"]
    assert "MaxArraySize            = 7" in other.run("scontrol", "show", "config").stdout
    assert other.run("sacct", check=False).returncode != 0
    other.submit("--nodes=2", "--wrap", "srun setsid sleep 1000")
    wait_until(lambda: num_running(other, "node2", "sleep 1000"), "the job runs")
    assert traces(other.state) != before
    other.devcluster("down")
    wait_until_only(before, other.state)
    assert "no cluster" in other.devcluster("down").stdout
    assert cluster.devcluster("status").stdout.endswith("healthy\n")


def test_two_clusters_that_come_up_at_once_take_slots_of_their_own(cluster: Site) -> None:
    before = traces(Path("/none"))
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-"))) for _ in range(2)]
        for folder in folders:
            folder.chmod(0o755)
        states = [folder / "c" for folder in folders]
        flags = ("--nodes", "1", "--gpus", "0", "--no-accounting")
        devcluster = str(ROOT / "slurm" / "devcluster")
        ups = [subprocess.Popen([devcluster, "--state", str(state), "up", *flags]) for state in states]
        codes = [up.wait(90) for up in ups]
        slots = {layout.slot for state in states if (layout := load_layout(state))}
        for state in states:
            subprocess.run([devcluster, "--state", str(state), "down"], check=True)
        assert codes == [0, 0]
        assert len(slots) == 2
        assert cluster.layout.slot not in slots
        for state in states:
            wait_until_only(before, state)


def test_interrupted_up_leaves_nothing(cluster: Site, short_path: Path) -> None:
    state = short_path / "c"
    before = traces(state)
    command = [str(ROOT / "slurm" / "devcluster"), "--state", str(state), "up", "--nodes", "2"]
    up = subprocess.Popen(command)
    wait_until(lambda: (state / "hosts" / "controller" / "report.json").exists(), "the controller starts")
    up.terminate()
    assert up.wait(60) != 0
    wait_until_only(before, state)


def test_wrong_use_is_refused_with_what_to_do(short_path: Path) -> None:
    (short_path / "foreign").touch()
    (short_path / "closed").mkdir(mode=0o700)
    for arguments, words in (
        (["--state", str(short_path), "up"], "name a new folder"),
        (["--state", str(short_path / "new"), "up", "--nodes", "0"], "use 1 to"),
        (["--state", str(short_path / "new"), "up", "--set", "MaxArraySize"], "KEY=VALUE"),
        (["--state", str(short_path / ("long" * 20)), "up"], "at most"),
        (["--state", str(short_path / "closed" / "new"), "up"], "closed to other users"),
    ):
        done = subprocess.run([ROOT / "slurm" / "devcluster", *arguments], capture_output=True, text=True)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert sorted(path.name for path in short_path.rglob("*")) == ["closed", "foreign"]
