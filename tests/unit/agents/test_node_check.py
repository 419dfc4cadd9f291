"""What each agent checks of its node, alone and in the ring: real agents, probes, places and sockets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_slurm import FakeSlurm
from support.waiting import eventually

from conf.schema import ClusterConfig, Config, Device
from launchers import processes
from launchers.memory_store.store import OWN, folders_of, open_copy_store
from launchers.node_group import NodeGroup
from orchestra.agents.choose_nodes import are_checked, slow
from orchestra.agents.node_check import probe
from orchestra.agents.node_check.own_check import NodeCheck, ProbeProcess, Ring, copies_name, wishes_of
from orchestra.run.paths import RunDir

GENEROUS_S = 60.0
LOOPBACK = "127.0.0.1"
SECRET = "of the test"
Agent = tuple[NodeGroup, NodeCheck]
Begin = Callable[..., Agent]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Begin]:
    """Make agents of one job that join and begin their checks; they end with the test."""
    agents: list[Agent] = []

    def begin(node: int, num_nodes: int, idle_every_s: float = 60.0, **wishes: Any) -> Agent:
        group = NodeGroup(tmp_path / "crew", node, num_nodes, 15.0)
        asked = {"folder": str(group.folder), "rooms": [], "gpus": 0, **wishes}
        node_check = NodeCheck(group, ProbeProcess(asked), idle_every_s=idle_every_s)
        group.join(f"node{node + 1}", LOOPBACK, {"port": 1, **node_check.offers(LOOPBACK)})
        node_check.begin()
        agents.append((group, node_check))
        return agents[-1]

    yield begin
    for group, node_check in agents:
        node_check.close()
        group.leave()


def tick_until(claim: Callable[[], bool], *agents: Agent, is_idle: bool = False) -> None:
    def holds_after_a_tick() -> bool:
        for _, node_check in agents:
            node_check.tick(is_idle=is_idle)
        return claim()

    assert eventually(holds_after_a_tick, GENEROUS_S)


def await_all(fact: str, *agents: Agent) -> None:
    """Let agents tick until all have published a fact."""
    group = agents[0][0]
    tick_until(lambda: all(fact in group.members()[node].facts for node in range(len(agents))), *agents)


def test_all_nodes_publish_what_they_found(agent: Begin) -> None:
    four_agents = [agent(node, 4) for node in range(4)]
    await_all("checked", *four_agents)
    await_all("ring", *four_agents)
    members = four_agents[0][0].members()
    assert are_checked(members, 4, 0.0)
    for node, member in members.items():
        assert member.facts["unfit"] is None
        assert member.facts["ring"]["to"] == (node + 1) % 4
        assert len(member.facts["ring"]["bytes_per_s"]) == 2
        assert member.facts["ring"]["latency_s"] > 0
        # What was said when it joined stays.
        assert member.facts["port"] == 1
    assert slow(members) == {}


def test_an_idle_node_looks_again_and_a_busy_one_does_not(tmp_path: Path, agent: Begin) -> None:
    place = tmp_path / "scratch"
    place.mkdir()
    group, node_check = one = agent(0, 1, idle_every_s=0.0, rooms=[str(place)])
    await_all("checked", one)
    place.rmdir()
    for _ in range(5):
        node_check.tick(is_idle=False)
    assert not node_check._probe.is_running
    tick_until(lambda: bool(group.members()[0].facts["unfit"]), one, is_idle=True)
    assert "is no folder here" in group.members()[0].facts["unfit"]
    place.mkdir()
    tick_until(lambda: not group.members()[0].facts["unfit"], one, is_idle=True)


def test_the_same_word_again_writes_nothing(agent: Begin) -> None:
    group, node_check = one = agent(0, 1)
    await_all("checked", one)
    file = group.folder / "member-000.json"
    before = file.stat().st_ino
    node_check.look_again()
    node_check._probe.settle(GENEROUS_S)
    node_check.tick(is_idle=False)
    assert file.stat().st_ino == before


def test_a_node_without_neighbour_goes_on_without_a_ring(agent: Begin) -> None:
    group, _ = one = agent(0, 3)
    await_all("checked", one)
    assert "ring" not in group.members()[0].facts
    assert are_checked(group.members(), 3, 0.0)


def taken(ring: Ring) -> dict[str, Any]:
    """Return what a ring measured, once it has."""
    deadline = time.monotonic() + GENEROUS_S
    while (found := ring.taken()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_neighbour_that_hangs_up_or_is_gone_is_an_error_and_no_rate() -> None:
    with socket.create_server((LOOPBACK, 0)) as gone:
        place = (LOOPBACK, int(gone.getsockname()[1]))
    ring = Ring(LOOPBACK, SECRET)
    ring.measure(lambda: place)
    assert "error" in taken(ring)
    with socket.create_server((LOOPBACK, 0)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        port = int(server.getsockname()[1])
        ring.measure(lambda: (LOOPBACK, port))
        assert "error" in taken(ring)
        ring.close()


def test_strangers_that_hold_a_node_keep_its_neighbour_from_nothing() -> None:
    first, second = Ring(LOOPBACK, SECRET), Ring(LOOPBACK, SECRET)
    held = [socket.create_connection((LOOPBACK, second.port)) for _ in range(8)]
    first.measure(lambda: (LOOPBACK, second.port))
    assert min(taken(first)["bytes_per_s"]) > 0
    for ring in (first, second):
        ring.close()
    for connection in held:
        connection.close()


def test_garbage_sent_to_a_node_harms_nobody() -> None:
    first, second = Ring(LOOPBACK, SECRET), Ring(LOOPBACK, SECRET)
    with socket.create_connection((LOOPBACK, second.port)) as connection:
        connection.sendall(bytes(range(256)) * 100)
    first.measure(lambda: (LOOPBACK, second.port))
    assert min(taken(first)["bytes_per_s"]) > 0
    first.close()
    second.close()


# What a node finds when it looks at itself: real places, processes that hang, nvidia-smi's answers.

ROW = {
    "index": "0",
    "memory.total": "81559",
    "memory.used": "4",
    "ecc.errors.uncorrected.volatile.total": "0",
    "retired_pages.pending": "[N/A]",
    "remapped_rows.pending": "No",
    "remapped_rows.failure": "No",
    "clocks_throttle_reasons.hw_slowdown": "Not Active",
    "pcie.link.width.current": "16",
    "pcie.link.width.max": "16",
}


@pytest.fixture
def check(tmp_path: Path) -> ProbeProcess:
    """A look at a node whose only place is the test's folder."""
    return ProbeProcess({"folder": str(tmp_path), "rooms": [str(tmp_path)], "gpus": 0})


def found_by(check: ProbeProcess) -> dict[str, Any]:
    check.begin()
    found = check.settle(GENEROUS_S)
    assert found is not None
    return found


def test_a_sound_node_is_fit_and_says_what_was_measured(tmp_path: Path, check: ProbeProcess) -> None:
    found = found_by(check)
    assert found["unfit"] is None
    assert found["checked"]["core_s"] > 0
    assert abs(found["checked"]["clock_ahead_s"]) < 60
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_missing_or_forbidden_makes_a_node_unfit(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    found = found_by(ProbeProcess({"folder": str(missing), "rooms": [str(missing)], "gpus": 0}))
    reasons = found["unfit"].split("; ")
    assert [reason.partition(" ")[0].rstrip(":") for reason in reasons] == [str(missing)] * 2
    assert "is no folder here" in found["unfit"]
    assert found["broken_device"] is None
    assert "unfit" in probe.keeps_a_file("/proc"), "writing is forbidden there"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.mount
def test_a_full_place_makes_a_node_unfit(place: Path) -> None:
    assert probe.room(str(place)) == {}
    (place / "file").write_bytes(bytes(1020 * 1024))
    assert "free" in probe.room(str(place))["unfit"]
    # Where all nodes write no single one is to blame.
    (place / "more").write_bytes(b"")
    with pytest.raises(OSError, match="No space left"):
        (place / "more").write_bytes(bytes(65536))
    assert "unfit" not in probe.keeps_a_file(str(place))


@pytest.mark.mount
def test_the_runs_own_copies_in_memory_leave_a_place_as_free_as_it_was(tmp_path: Path, place: Path) -> None:
    run = RunDir(tmp_path / "runs" / "mine")
    store = open_copy_store(copies_name(run), "here", place)
    (store.folder / OWN / "rank-00000.slot-0.bin").write_bytes(bytes(1000 * 1024))
    assert "free" in probe.room(str(place))["unfit"]
    assert probe.room(str(place), str(folders_of(copies_name(run), place))) == {}
    other_run = str(folders_of(copies_name(RunDir(tmp_path / "elsewhere" / "mine")), place))
    assert "free" in probe.room(str(place), other_run)["unfit"]
    store.close()


def test_what_hangs_is_found_out_and_does_not_hang_the_agent(tmp_path: Path, fake_slurm: FakeSlurm) -> None:
    # Opening a pipe that nobody writes to waits for ever, as a dead file server does.
    os.mkfifo(tmp_path / "pipe")
    fake_slurm.put("nvidia-smi", f"read line < {tmp_path}/pipe")
    check = ProbeProcess({"folder": str(tmp_path), "rooms": [], "gpus": 2}, limit_s=GENEROUS_S)
    check.begin()
    # All others have answered: memory, kernel log, core, run directory.
    assert eventually(lambda: check.look() is None and check._output.count(b"\n") == 4, GENEROUS_S)
    check._limit_s = 0.5
    found = check.settle(GENEROUS_S)
    assert found is not None
    assert found["unfit"] == found["broken_device"] == "devices: no answer within 0.5 s"
    assert "core_s" in found["checked"]
    assert not check.is_running
    # What it called is gone as well.
    assert eventually(lambda: processes.with_words(str(fake_slurm.folder / "nvidia-smi")) == [], GENEROUS_S)


def test_looking_never_blocks_and_there_is_one_look_at_a_time(check: ProbeProcess) -> None:
    assert check.look() is None
    check.begin()
    first = check._process
    check.begin()
    assert check._process is first
    assert check.settle(0.0) is None
    check.close()
    assert not check.is_running
    assert first is not None
    assert first.returncode is not None


def test_a_look_that_was_killed_says_nothing_against_the_node(check: ProbeProcess) -> None:
    check.begin()
    assert check._process is not None
    check._process.kill()
    found = check.settle(GENEROUS_S)
    assert found is None or found["unfit"] is None


def test_the_probe_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    place = tmp_path / "alone.py"
    place.write_text(Path(probe.__file__).read_text())
    wishes = json.dumps({"folder": str(tmp_path), "rooms": ["/tmp"], "gpus": 0})
    words = [sys.executable, "-I", "-S", str(place), wishes]
    lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [name for name, _ in probe.checks(json.loads(wishes))]
    assert sorted(json.loads(line)["check"] for line in lines) == sorted(names)


@pytest.mark.parametrize(
    ("stamp", "ahead_s"),
    [(1000.5, 0.0), (1000.0, 0.0), (999.2, 0.0), (1001.5, -0.5), (990.0, 9.0), (1031.0, -30.0)],
)
def test_clocks_are_compared_as_finely_as_a_stamp_in_whole_seconds_allows(
    stamp: float, ahead_s: float
) -> None:
    assert probe.clock_ahead_s(1000.0, 1001.0, stamp) == ahead_s


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"ecc.errors.uncorrected.volatile.total": "2"}, "2 uncorrected memory errors"),
        ({"remapped_rows.pending": "Yes"}, "waits for a reset"),
        ({"remapped_rows.failure": "1"}, "waits for a reset"),
        ({"memory.used": "40000"}, "40000 of 81559 MiB in use"),
        ({"clocks_throttle_reasons.hw_slowdown": "Active"}, "slowed down"),
        ({"pcie.link.width.current": "4"}, "4 of 16 PCIe lanes"),
    ],
)
def test_each_sign_of_a_bad_device_is_a_doubt(changed: dict[str, str], word: str) -> None:
    found = probe.judged_devices([ROW, {**ROW, "index": "1", **changed}], 2)
    assert word in found["doubt"]
    assert "device 1" in found["doubt"]
    assert "unfit" not in found


def test_too_few_devices_make_a_node_unfit_but_missing_answers_to_newer_questions_do_not() -> None:
    assert probe.judged_devices([ROW], 2)["unfit"] == "nvidia-smi shows 1 devices, 2 are needed"
    assert probe.judged_devices([ROW], 1) == {"facts": {"devices": 1}}
    bare = {**dict.fromkeys(ROW, "[N/A]"), "index": "0"}
    assert "doubt" not in probe.judged_devices([bare], 1)
    assert "doubt" not in probe.judged_devices([{k: ROW[k] for k in probe._ALWAYS}], 1)


def test_an_older_nvidia_smi_is_asked_what_it_knows(fake_slurm: FakeSlurm) -> None:
    refuses = "case \"$*\" in *remapped*) echo 'Field is not a valid field to query.'; exit 2;; esac"
    fake_slurm.put("nvidia-smi", f"{refuses}\necho '0, 81559, 4, 0'\necho '1, 81559, 4, 3'")
    assert probe.devices(2)["doubt"] == "device 1 has 3 uncorrected memory errors"


def test_only_failures_of_devices_within_the_last_day_are_signs() -> None:
    day_us = 24 * 3600 * 10**6
    now = 10 * day_us
    lines = [
        f"3,1,{now - 5},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n",
        f"3,2,{now - 4},-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n",
        # A program's own mistakes.
        f"3,3,{now - 3},-;NVRM: Xid (PCI:0000:86:00): 31, pid=2, MMU Fault\n",
        f"3,4,{now - 2 * day_us},-;NVRM: Xid (PCI:0000:af:00): 48, pid=3, DBE\n",
        "garbage",
        f"6,5,{now - 1},-;eth0: link up\n",
    ]
    assert probe.signs_of_failure(lines, now) == "Xid 79 of device PCI:0000:3b:00"


def test_devices_are_looked_at_where_the_run_wants_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    on_cuda = Config(cluster=ClusterConfig(device=Device.cuda, gpus_per_node=8))
    assert wishes_of(on_cuda, run)["gpus"] == 8
    assert wishes_of(on_cuda, run)["copies"] == str(folders_of(copies_name(run)))
    assert wishes_of(Config(cluster=ClusterConfig(device=Device.cpu, gpus_per_node=2)), run)["gpus"] == 0
