"""Agents of one job meet in a folder: one leader, one order a number, and whoever is gone is noticed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_trials import eventually

from launchers import LauncherError, node_group
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


Join = Callable[..., NodeGroup]


@pytest.fixture
def joined(tmp_path: Path) -> Iterator[Join]:
    """Make agents of this process that join; they leave at the end."""
    groups: list[NodeGroup] = []

    def join(
        node: int,
        num_nodes: int = 3,
        stalled: Callable[[], None] = lambda: None,
        timeout_s: float = TIMEOUT_S,
    ) -> NodeGroup:
        groups.append(NodeGroup(tmp_path, node, num_nodes, timeout_s, stalled))
        groups[-1].join(f"host{node}", "127.0.0.1", {"port": 1})
        return groups[-1]

    yield join
    for group in groups:
        group.leave()


def test_members_and_what_they_offer_are_seen_by_all_until_they_leave(joined: Join) -> None:
    groups = [joined(node) for node in (2, 0, 1)]
    groups[0].tell({"disk": "small"})
    members = groups[1].members()
    assert list(members) == [0, 1, 2]
    assert members[2].facts == {"port": 1, "disk": "small"}
    assert members[2].host == "host2"
    groups[0].leave()
    assert list(groups[1].members()) == [0, 1]
    assert groups[2].leader() == 0
    groups[1].leave()
    assert groups[2].leads


def test_the_lowest_living_node_leads_and_a_stopped_one_is_silent(tmp_path: Path, joined: Join) -> None:
    first = subprocess.Popen([sys.executable, "-c", AGENT, tmp_path, "0"], stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == b"joined\n"
    second, third = joined(1), joined(2)
    try:
        assert [group.leader() for group in (second, third)] == [0, 0]
        os.kill(first.pid, signal.SIGSTOP)
        assert eventually(lambda: second.leads)
        assert eventually(lambda: third.leader() == 1)
        assert eventually(lambda: second.silent([0, 1, 2]) == [0])
        os.kill(first.pid, signal.SIGCONT)
        assert eventually(lambda: third.leader() == 0)
        assert not second.leads
        assert eventually(lambda: second.silent([0, 1, 2]) == [])
    finally:
        first.kill()
        first.wait()


def test_who_comes_later_does_not_wait_again_for_a_node_that_was_found_silent(
    tmp_path: Path, joined: Join
) -> None:
    first = subprocess.Popen([sys.executable, "-c", AGENT, tmp_path, "0"], stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == b"joined\n"
    second = joined(1)
    try:
        assert second.leader() == 0
        os.kill(first.pid, signal.SIGSTOP)
        assert joined(1).leader() == 0
        assert eventually(lambda: second.leads)
        assert joined(1).leads
        assert joined(2).silent([0]) == [0]
        os.kill(first.pid, signal.SIGCONT)
        assert eventually(lambda: second.leader() == 0)
        assert joined(1).leader() == 0
    finally:
        first.kill()
        first.wait()


def test_an_agent_that_steps_down_is_silent_at_once_and_stays_on_the_list(joined: Join) -> None:
    """Nobody waits: with this time-out it would take an hour."""
    first, second, third = (joined(node, timeout_s=3600.0) for node in range(3))
    assert [group.leader() for group in (second, third)] == [0, 0]
    first.step_down({"cut_off": 4})
    assert second.leads
    assert third.leader() == 1
    assert third.silent([0, 1]) == [0]
    # Nor does who comes later.
    assert joined(1, timeout_s=3600.0).leads
    first.leave()
    assert second.members()[0].facts["cut_off"] == 4


def test_who_reads_a_beat_while_it_is_written_finds_one(tmp_path: Path, joined: Join) -> None:
    group, is_over = joined(0), threading.Event()

    def beat() -> None:
        while not is_over.is_set():
            group._beat("00000007")

    writer = threading.Thread(target=beat)
    writer.start()
    try:
        sizes = {len((tmp_path / "beat-000").read_bytes()) for _ in range(20_000)}
    finally:
        is_over.set()
        writer.join()
    assert sizes == {len(b"0123456789ab 00000007\n")}


def test_a_look_at_some_nodes_says_nothing_of_the_others(joined: Join) -> None:
    first, second = joined(0, 2), joined(1, 2)
    assert second.silent([0]) == []
    time.sleep(TIMEOUT_S + 1)
    assert second.silent([]) == []
    assert second.silent([0]) == []
    assert second.gone([0]) == []
    assert first.leads


@pytest.mark.slow
def test_an_agent_that_makes_no_progress_falls_silent_and_is_told_of_it(
    joined: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_group, "_LEAST_STALL_S", 1.0)
    monkeypatch.setattr(node_group, "_STALL_TIMEOUTS", 0)
    told = threading.Event()
    first, second = joined(0, 2, told.set), joined(1, 2)
    # Never before it has said once that it goes on, and not within what it said it needs.
    assert second.silent([0]) == []
    first.allow(8.0)
    assert not told.wait(4.0)
    # One beat may come late on a busy machine.
    assert eventually(lambda: second.silent([0]) == [])
    assert told.wait(30)
    assert eventually(lambda: second.silent([0]) == [0])
    assert second.leads
    told.clear()
    first.progress()
    assert eventually(lambda: second.silent([0]) == [])
    assert second.leader() == 0


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


def test_an_order_is_for_the_agents_of_its_time_alone(joined: Join) -> None:
    before = joined(1)
    assert before.member is not None
    order = Order(0, "start", (1,), {"1": before.member.incarnation}, {"attempt": 4})
    assert before.publish(order)
    again = joined(1)
    assert again.member is not None
    assert again.newest_order() == order
    assert order.is_for(before.member)
    assert not order.is_for(again.member)


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


def test_files_that_make_no_sense_are_passed_over(tmp_path: Path, joined: Join) -> None:
    group = joined(0)
    (tmp_path / "member-001.json").write_text("{")
    (tmp_path / "member-002.json").write_text('{"node": 2}')
    assert list(group.members()) == [0]
    (tmp_path / "orders" / "0000.json").write_text("[]")
    assert group.newest_order() is None


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LauncherError, match="cannot make"):
        NodeGroup(tmp_path / "file" / "group", 0, 1, TIMEOUT_S)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(folder: Path) -> Path:
    """Leave no block free; return what takes them."""
    ballast = folder / f"ballast-{time.monotonic_ns()}"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(b"0" * 4096):
            pass
    return ballast


@pytest.mark.mount
def test_a_full_disk_takes_a_report_and_an_order_in_the_room_kept_for_them(small_disk: Path) -> None:
    group = NodeGroup(small_disk / "group", 0, 1, TIMEOUT_S)
    group.join("node1", "127.0.0.1", {})
    try:
        ballast = [fill(small_disk)]
        group.report(0, {"code": 0})
        # What the first one left of its room is taken by others.
        ballast.append(fill(small_disk))
        assert group.publish(Order(1, "end", facts={"code": 0}))
        ballast.append(fill(small_disk))
        assert group.reports(0, [0]) == {0: {"code": 0}}
        order = group.newest_order()
        assert order is not None
        assert order.facts == {"code": 0}
        with pytest.raises(OSError, match=r"No space left.*end-0001-000\.json"):
            group.report(1, {"code": 0})
        for file in ballast:
            file.unlink()
        # Room that comes back is kept again.
        group.report(1, {"code": 0})
        fill(small_disk)
        group.report(2, {"code": 75})
        assert group.reports(2, [0]) == {0: {"code": 75}}
    finally:
        group.leave()
