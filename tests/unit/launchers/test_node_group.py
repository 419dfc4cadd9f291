"""Agents of one job meet in a folder: one leader, one order a number, and whoever is gone is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers import node_group
from launchers.launch_errors import LauncherError
from launchers.node_group import NodeGroup, Order

TIMEOUT_S = 2.5
# An agent of its own process: joins, says so, and beats until it is killed.
AGENT = """
import sys, time
from pathlib import Path
from launchers.node_group import NodeGroup
group = NodeGroup(Path(sys.argv[1]), int(sys.argv[2]), 3, 2.5)
group.join(f"host{sys.argv[2]}", "127.0.0.1", {})
print("joined", flush=True)
time.sleep(600)
"""


def joined(folder: Path, node: int, num_nodes: int = 3) -> NodeGroup:
    group = NodeGroup(folder, node, num_nodes, TIMEOUT_S)
    group.join(f"host{node}", "127.0.0.1", {"port": 1})
    return group


def wait_until(is_so: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_members_and_what_they_offer_are_seen_by_all(tmp_path: Path) -> None:
    groups = [joined(tmp_path / "group", node) for node in (2, 0, 1)]
    groups[0].tell({"disk": "small"})
    members = groups[1].members()
    assert list(members) == [0, 1, 2]
    assert members[2].facts == {"port": 1, "disk": "small"}
    assert members[2].host == "host2"
    groups[0].leave()
    assert list(groups[1].members()) == [0, 1]
    for group in groups[1:]:
        group.leave()


def test_the_lowest_living_node_leads_and_a_stopped_one_is_silent(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", AGENT, tmp_path, "0"], stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == b"joined\n"
    second, third = joined(tmp_path, 1), joined(tmp_path, 2)
    try:
        assert [group.leader() for group in (second, third)] == [0, 0]
        os.kill(first.pid, signal.SIGSTOP)
        wait_until(lambda: second.leads)
        wait_until(lambda: third.leader() == 1)
        wait_until(lambda: second.silent([0, 1, 2]) == [0])
        os.kill(first.pid, signal.SIGCONT)
        wait_until(lambda: third.leader() == 0)
        assert not second.leads
        wait_until(lambda: second.silent([0, 1, 2]) == [])
    finally:
        first.kill()
        first.wait()
        second.leave()
        third.leave()


@pytest.mark.slow
def test_an_agent_that_makes_no_progress_falls_silent_and_is_told_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_group, "_LEAST_STALL_S", 1.0)
    monkeypatch.setattr(node_group, "_STALL_TIMEOUTS", 0)
    told = threading.Event()
    first = NodeGroup(tmp_path, 0, 2, TIMEOUT_S, told.set)
    first.join("host0", "127.0.0.1", {})
    second = joined(tmp_path, 1, 2)
    try:
        # Never before it has said once that it goes on, and not within what it said it needs.
        assert second.silent([0]) == []
        first.allow(8.0)
        assert not told.wait(4.0)
        # One beat may come late on a busy machine.
        wait_until(lambda: second.silent([0]) == [])
        assert told.wait(30)
        wait_until(lambda: second.silent([0]) == [0])
        assert second.leads
        told.clear()
        first.progress()
        wait_until(lambda: second.silent([0]) == [])
        assert second.leader() == 0
    finally:
        first.leave()
        second.leave()


def test_a_member_that_left_does_not_lead(tmp_path: Path) -> None:
    first, second = joined(tmp_path, 0), joined(tmp_path, 1)
    assert second.leader() == 0
    first.leave()
    assert second.leads
    second.leave()


def test_one_order_a_number_whoever_believes_to_lead(tmp_path: Path) -> None:
    groups = [NodeGroup(tmp_path, node, 8, TIMEOUT_S) for node in range(8)]
    taken: list[tuple[int, int]] = []
    start = threading.Barrier(8)

    def lead(group: NodeGroup) -> None:
        for number in range(20):
            start.wait(30)
            if group.publish(Order(number, "start", (group.node,))):
                taken.append((number, group.node))

    threads = [threading.Thread(target=lead, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(number for number, _ in taken) == list(range(20))
    newest = groups[0].newest_order()
    assert newest is not None
    assert (newest.number, newest.nodes) == (19, (dict(taken)[19],))
    assert not [file for file in (tmp_path / "orders").iterdir() if file.name.startswith(".")]


def test_an_order_is_for_the_agents_of_its_time_alone(tmp_path: Path) -> None:
    before = joined(tmp_path, 1)
    assert before.member is not None
    order = Order(0, "start", (1,), {"1": before.member.incarnation}, {"attempt": 4})
    assert before.publish(order)
    again = joined(tmp_path, 1)
    assert again.member is not None
    assert again.newest_order() == order
    assert order.is_for(before.member)
    assert not order.is_for(again.member)
    before.leave()
    again.leave()


def test_reports_and_the_first_word_about_a_broken_order_stand(tmp_path: Path) -> None:
    groups = [NodeGroup(tmp_path, node, 2, TIMEOUT_S) for node in range(2)]
    assert groups[0].broken(0) is None
    groups[1].mark_broken(0, {"cause": "ranks failed"})
    groups[0].mark_broken(0, {"cause": "nodes lost"})
    assert groups[0].broken(0) == {"node": 1, "cause": "ranks failed"}
    assert groups[0].broken(1) is None
    groups[1].report(0, {"code": 1})
    assert groups[0].reports(0, [0, 1]) == {1: {"code": 1}}
    assert groups[0].reports(1, [0, 1]) == {}


def test_files_that_make_no_sense_are_passed_over(tmp_path: Path) -> None:
    group = joined(tmp_path, 0)
    (tmp_path / "member-001.json").write_text("{")
    (tmp_path / "member-002.json").write_text('{"node": 2}')
    assert list(group.members()) == [0]
    (tmp_path / "orders" / "0000.json").write_text("[]")
    assert group.newest_order() is None
    group.leave()


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError, match="cannot make"):
        NodeGroup(tmp_path / "file" / "group", 0, 1, TIMEOUT_S)
