"""An agent's part in the copies through two attempts: the second one begins with what a lost node had."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers.launch_errors import LauncherError
from launchers.memory_store import node_store
from launchers.memory_store.node_store import NodeCopies, NodeCopyPlan
from launchers.memory_store.store import OWN, open_copy_store


def put(node: NodeCopies, step: int, rank: int, attempt: int) -> None:
    """Leave a copy as a rank does."""
    record = node._store.folder / OWN / f"rank-{rank:05d}.slot-{step % 3}.copy"
    record.with_suffix(".bin").write_bytes(b"it" * 500)
    head = {"step": step, "attempt": attempt, "rank": rank, "layout": {"dp": 2}, "bytes": 1000}
    record.write_text(json.dumps(head) + "\n[]\nchecksum\n")
    node._store.wake()


def await_that(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def held(node: NodeCopies) -> list[tuple[int, int, int]]:
    return [(it["attempt"], it["step"], it["rank"]) for it in node.held()]


def test_a_spare_goes_on_with_what_a_lost_node_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_store, "open_copy_store", lambda run, host: open_copy_store(run, host, tmp_path))
    nodes = [NodeCopies("run", f"node{it}", "127.0.0.1", tmp_path / "secret") for it in range(3)]
    for index in (0, 1):
        other = 1 - index
        own, kept = range(index, index + 1), range(other, other + 1)
        nodes[index].begin(NodeCopyPlan(0, own, nodes[other].address, kept))
    for rank in (0, 1):
        put(nodes[rank], 4, rank, attempt=0)
    await_that(lambda: held(nodes[0]) == held(nodes[1]) == [(0, 4, 0), (0, 4, 1)])
    nodes[1].close()
    evidence = nodes[0].end()
    assert (evidence["pushed_step"], evidence["push_problem"]) == (4, None)
    nodes[2].fetch(range(1, 2), 4, 0, {1: nodes[0].address})
    assert held(nodes[2]) == [(0, 4, 1)]
    with pytest.raises(LauncherError, match="rank 1's copy of step 5 cannot be fetched"):
        nodes[2].fetch(range(1, 2), 5, 0, {1: nodes[0].address})
    for index, other in ((0, 2), (2, 0)):
        rank, its = index // 2, other // 2
        nodes[index].begin(NodeCopyPlan(1, range(rank, rank + 1), nodes[other].address, range(its, its + 1)))
        put(nodes[index], 5, rank, attempt=1)
    await_that(lambda: (1, 5, 1) in held(nodes[0]) and (1, 5, 0) in held(nodes[2]))
    for node in (nodes[0], nodes[2]):
        folder = node._store.folder
        node.close()
        assert not folder.exists()


def test_a_spare_keeps_what_a_node_has_that_trains_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_store, "open_copy_store", lambda run, host: open_copy_store(run, host, tmp_path))
    alone, spare, other = (NodeCopies("run", f"node{it}", "127.0.0.1", tmp_path / "secret") for it in "123")
    spare.begin(NodeCopyPlan(3, range(0)))
    alone.begin(NodeCopyPlan(3, range(2), spare.address))
    for rank in (0, 1):
        put(alone, 4, rank, attempt=3)
    await_that(lambda: held(spare) == [(3, 4, 0), (3, 4, 1)])
    alone.close()
    # Whoever decides asks the spare: it had no part whose end it would report.
    told = other.held_at(spare.address)
    assert told == spare.held()
    assert [(it["attempt"], it["step"], it["rank"]) for it in told] == [(3, 4, 0), (3, 4, 1)]
    address = spare.address
    spare.fetch(range(2), 4, 3, {})
    assert [place.record.parent.name for place in spare._store.places()] == [OWN, OWN]
    spare.close()
    with pytest.raises(LauncherError, match="does not say which copies it has"):
        other.held_at(address)
    other.close()


def test_copies_go_to_a_spares_next_agent_when_its_first_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_store, "open_copy_store", lambda run, host: open_copy_store(run, host, tmp_path))
    alone, first = (NodeCopies("run", f"node{it}", "127.0.0.1", tmp_path / "secret") for it in "12")
    addresses = [first.address]
    first.begin(NodeCopyPlan(0, range(0)))
    alone.begin(NodeCopyPlan(0, range(1), first.address, elsewhere=lambda: addresses[-1]))
    put(alone, 1, 0, attempt=0)
    await_that(lambda: held(first) == [(0, 1, 0)])
    first.close()
    second = NodeCopies("run", "node2", "127.0.0.1", tmp_path / "secret")
    second.begin(NodeCopyPlan(0, range(0)))
    addresses.append(second.address)
    put(alone, 2, 0, attempt=0)
    await_that(lambda: held(second) == [(0, 2, 0)])
    for node in (alone, second):
        node.close()


def test_an_address_that_is_not_here_is_told_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_store, "open_copy_store", lambda run, host: open_copy_store(run, host, tmp_path))
    with pytest.raises(LauncherError, match="cannot be exchanged"):
        NodeCopies("run", "node", "192.0.2.1", tmp_path / "secret")
    assert list(next(tmp_path.glob("orchestra-*")).iterdir()) == []
