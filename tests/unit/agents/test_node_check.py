"""What each agent checks of its node: real agents in a folder, real probes, real sockets in the ring."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launchers.node_group import NodeGroup
from orchestra.agents.choose_nodes import are_checked, slow
from orchestra.agents.node_check.own_check import NodeCheck, ProbeProcess
from orchestra.agents.node_check.ring import Ring

GENEROUS_S = 60.0
LOOPBACK = "127.0.0.1"
Agent = tuple[NodeGroup, NodeCheck]


def agent(folder: Path, node: int, num_nodes: int, idle_every_s: float = 60.0, **wishes: Any) -> Agent:
    group = NodeGroup(folder, node, num_nodes, 15.0)
    asked = {"folder": str(folder), "rooms": [], "gpus": 0, **wishes}
    node_check = NodeCheck(group, ProbeProcess(asked), idle_every_s=idle_every_s)
    group.join(f"node{node + 1}", LOOPBACK, {"port": 1, **node_check.offers(LOOPBACK)})
    node_check.begin()
    return group, node_check


@pytest.fixture
def four_agents(tmp_path: Path) -> Iterator[list[Agent]]:
    agents = [agent(tmp_path, node, 4) for node in range(4)]
    yield agents
    for group, node_check in agents:
        node_check.close()
        group.leave()


def await_all(agents: list[Agent], fact: str) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while time.monotonic() < deadline:
        for _, node_check in agents:
            node_check.tick(is_idle=False)
        if all(fact in group.member.facts for group, _ in agents if group.member is not None):
            return
        time.sleep(0.02)
    raise AssertionError(f"not all nodes said {fact}")


def test_all_nodes_publish_what_they_found(four_agents: list[Agent]) -> None:
    await_all(four_agents, "checked")
    await_all(four_agents, "ring")
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


def test_what_is_found_behind_an_attempt_is_told_before_its_report(tmp_path: Path) -> None:
    place = tmp_path / "scratch"
    place.mkdir()
    folder = tmp_path / "crew"
    group, node_check = agent(folder, 0, 1, rooms=[str(place)])
    await_all([(group, node_check)], "checked")
    assert group.member is not None
    assert group.member.facts["unfit"] is None
    place.rmdir()
    # It waits a moment only; what comes later is told by the next tick.
    node_check.look_again()
    _tick_until(node_check, lambda: bool(group.members()[0].facts["unfit"]))
    assert "is no folder here" in group.members()[0].facts["unfit"]
    place.mkdir()
    node_check.look_again()
    _tick_until(node_check, lambda: not group.members()[0].facts["unfit"])
    node_check.close()
    group.leave()


def test_an_idle_node_looks_again_and_a_busy_one_does_not(tmp_path: Path) -> None:
    place = tmp_path / "scratch"
    place.mkdir()
    group, node_check = agent(tmp_path / "crew", 0, 1, idle_every_s=0.0, rooms=[str(place)])
    await_all([(group, node_check)], "checked")
    place.rmdir()
    for _ in range(5):
        node_check.tick(is_idle=False)
    assert not node_check._probe.is_running
    _tick_until(node_check, lambda: bool(group.members()[0].facts["unfit"]), is_idle=True)
    node_check.close()
    group.leave()


def _tick_until(node_check: NodeCheck, is_so: Any, *, is_idle: bool = False) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not is_so():
        assert time.monotonic() < deadline
        node_check.tick(is_idle=is_idle)
        time.sleep(0.02)


def test_the_same_word_again_writes_nothing(tmp_path: Path) -> None:
    group, node_check = agent(tmp_path, 0, 1)
    await_all([(group, node_check)], "checked")
    file = tmp_path / "member-000.json"
    before = file.stat().st_ino
    node_check.look_again()
    node_check._probe.settle(GENEROUS_S)
    node_check.tick(is_idle=False)
    assert file.stat().st_ino == before
    node_check.close()
    group.leave()


def test_a_node_without_neighbour_goes_on_without_a_ring(tmp_path: Path) -> None:
    group, node_check = agent(tmp_path, 0, 3)
    await_all([(group, node_check)], "checked")
    assert "ring" not in group.members()[0].facts
    assert are_checked(group.members(), 3, 0.0)
    node_check.close()
    group.leave()


def test_a_neighbour_that_hangs_up_or_is_gone_is_an_error_and_no_rate() -> None:
    with socket.create_server((LOOPBACK, 0)) as gone:
        place = (LOOPBACK, int(gone.getsockname()[1]))
    ring = Ring(LOOPBACK)
    ring.measure(lambda: place)
    assert "error" in _taken(ring)
    with socket.create_server((LOOPBACK, 0)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        port = int(server.getsockname()[1])
        ring.measure(lambda: (LOOPBACK, port))
        assert "error" in _taken(ring)
        ring.close()


def _taken(ring: Ring) -> dict[str, Any]:
    deadline = time.monotonic() + GENEROUS_S
    while time.monotonic() < deadline:
        found = ring.taken()
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("nothing was measured")


def test_garbage_sent_to_a_node_harms_nobody() -> None:
    first, second = Ring(LOOPBACK), Ring(LOOPBACK)
    with socket.create_connection((LOOPBACK, second.port)) as connection:
        connection.sendall(bytes(range(256)) * 100)
    first.measure(lambda: (LOOPBACK, second.port))
    assert min(_taken(first)["bytes_per_s"]) > 0
    first.close()
    second.close()
