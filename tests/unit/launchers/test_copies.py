"""The store of copies, its exchange between nodes, and an agent's part in it through several attempts: real
files, TCP on loopback, and bad neighbours.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fork_trials import eventually
from strangers import altering

from launchers import LauncherError
from launchers.memory_store import exchange, store
from launchers.memory_store.exchange import (
    Address,
    CopyPusher,
    CopyServer,
    NodeCopies,
    NodeCopyPlan,
)
from launchers.memory_store.exchange import _connected as connected
from launchers.memory_store.store import KEPT, OWN, CopyStore, open_copy_store

SECRET = "of the test"
SIZE = 300_000


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[CopyStore]]:
    opened = [open_copy_store("run", f"node{number}", tmp_path) for number in range(2)]
    yield opened
    for copy_store in opened:
        copy_store.close()


def content_of(step: int, rank: int) -> bytes:
    return bytes((step * 7 + rank * 3 + index) % 251 for index in range(997)) * (SIZE // 997)


def put(copy_store: CopyStore, step: int, rank: int = 0, attempt: int = 0) -> None:
    """Leave a copy as a rank does."""
    record = copy_store.folder / OWN / f"rank-{rank:05d}.slot-{step % 3}.copy"
    record.unlink(missing_ok=True)
    content = content_of(step, rank)
    record.with_suffix(".bin").write_bytes(content)
    head = {"step": step, "attempt": attempt, "rank": rank, "layout": {"dp": 2}, "bytes": len(content)}
    draft = record.with_suffix(".draft")
    draft.write_text(json.dumps(head) + "\n[]\nchecksum\n")
    draft.rename(record)
    copy_store.wake()


def held(copy_store: CopyStore, *kinds: str) -> list[tuple[int, int]]:
    return sorted((place.copy.step, place.copy.rank) for place in copy_store.places(*kinds))


def is_whole(copy_store: CopyStore, kind: str) -> bool:
    """Whether all copies have the bytes of their step and rank."""
    return all(
        place.content.read_bytes() == content_of(place.copy.step, place.copy.rank)
        for place in copy_store.places(kind)
    )


@pytest.fixture
def server(stores: list[CopyStore]) -> Iterator[CopyServer]:
    with closing(CopyServer(stores[1], "127.0.0.1", SECRET)) as opened:
        opened.expect(0)
        yield opened


def pushing(
    copy_store: CopyStore, address: Address, num_ranks: int = 1, secret: str = SECRET
) -> closing[CopyPusher]:
    """Send the copies of a node's ranks to a neighbour as long as the context lasts."""
    return closing(CopyPusher(copy_store, range(num_ranks), 0, address, secret))


@pytest.fixture
def pusher(stores: list[CopyStore], server: CopyServer) -> Iterator[CopyPusher]:
    with pushing(stores[0], server.address, num_ranks=2) as opened:
        yield opened


def test_a_step_is_sent_when_all_ranks_have_it_and_the_last_two_are_kept(
    stores: list[CopyStore], pusher: CopyPusher
) -> None:
    put(stores[0], 1, rank=0)
    time.sleep(0.05)
    assert held(stores[1], KEPT) == []
    for step in range(1, 6):
        put(stores[0], step, rank=0)
        put(stores[0], step, rank=1)
        assert eventually(lambda step=step: pusher.pushed_step == step)
    assert held(stores[1], KEPT) == [(4, 0), (4, 1), (5, 0), (5, 1)]
    assert is_whole(stores[1], KEPT)
    assert len(list((stores[1].folder / KEPT).glob("*.bin"))) == 6


def test_a_sender_that_is_behind_skips_to_the_newest(stores: list[CopyStore], server: CopyServer) -> None:
    for step in (1, 2, 3):
        for rank in (0, 1):
            put(stores[0], step, rank)
    with pushing(stores[0], server.address, num_ranks=2) as pusher:
        assert eventually(lambda: pusher.pushed_step is not None)
    assert held(stores[1], KEPT) == [(3, 0), (3, 1)]


@pytest.mark.parametrize(("attempt", "secret"), [(1, SECRET), (0, "another one")])
def test_copies_of_another_attempt_or_secret_are_not_kept(
    stores: list[CopyStore], server: CopyServer, attempt: int, secret: str
) -> None:
    server.expect(attempt)
    put(stores[0], 1)
    with pushing(stores[0], server.address, secret=secret) as pusher:
        assert eventually(lambda: pusher.problem is not None)
    assert held(stores[1], KEPT) == []


def test_who_does_not_know_the_secret_gets_nothing(stores: list[CopyStore], server: CopyServer) -> None:
    put(stores[1], 1)
    with pytest.raises(ConnectionError):
        connected(server.address, "another one")
    connected(server.address, SECRET).close()


def test_a_server_that_does_not_know_the_secret_is_neither_believed_nor_given_anything(
    stores: list[CopyStore], node_copies: Callable[..., NodeCopies]
) -> None:
    put(stores[0], 1)
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as false:

        def invent() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = false.accept()
                    with connection:
                        connection.sendall(bytes(32))
                        heard.append(connection.recv(1 << 16))
                        connection.sendall(bytes(32) + json.dumps({"copies": [{"step": 9}]}).encode())

        threading.Thread(target=invent, daemon=True).start()
        host, port = false.getsockname()
        node = node_copies("node9")
        with pytest.raises(LauncherError, match="does not know this run's secret"):
            node.held_at({"host": host, "port": port})
        with pytest.raises(LauncherError, match="does not know this run's secret"):
            node.fetch(range(1), 1, 0, {0: {"host": host, "port": port}})
        with pushing(stores[0], Address(host, port)) as pusher:
            assert eventually(lambda: "secret" in str(pusher.problem))
        node.close()
        assert {len(said) for said in heard} == {64}, "no more than the greeting"
        false.shutdown(socket.SHUT_RDWR)


def test_a_copy_that_is_altered_on_its_way_is_not_kept(stores: list[CopyStore], server: CopyServer) -> None:
    put(stores[0], 1)
    with altering(server.address, at=SIZE // 2) as address, pushing(stores[0], address) as pusher:
        assert eventually(lambda: pusher.problem is not None)
    assert held(stores[1], KEPT) == []


def test_a_copy_that_changes_while_it_is_sent_is_not_kept(
    stores: list[CopyStore], server: CopyServer
) -> None:
    put(stores[0], 1)
    (place,) = stores[0].places(OWN)
    record = place.record.read_bytes()
    put(stores[0], 4)  # over the same memory
    peer = connected(server.address, SECRET)
    with closing(peer):
        peer.send(verb="put", copy=place.copy.to_record(), record_bytes=len(record))
        exchange._send_copy(peer, place, record)
        assert peer.receive() == {"is_kept": False}
    assert held(stores[1], KEPT) == []


def test_a_neighbour_that_reads_nothing_holds_up_neither_the_ranks_nor_the_end(
    stores: list[CopyStore],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        host, port = deaf.getsockname()
        pusher = CopyPusher(stores[0], range(1), 0, Address(host, port), SECRET)
        began = time.monotonic()
        for step in range(1, 10):
            put(stores[0], step)
        pusher.close()
        assert time.monotonic() - began < 9.0, "an answer is awaited for 10 s"
    assert pusher.pushed_step is None


@pytest.fixture
def short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that failed is tried again at once."""
    monkeypatch.setattr(exchange, "_LONGEST_PAUSE_S", 0.05)


def test_a_neighbour_that_is_gone_is_tried_again(stores: list[CopyStore], short_pause: None) -> None:
    first = CopyServer(stores[1], "127.0.0.1", SECRET)
    first.expect(0)
    pusher = CopyPusher(stores[0], range(1), 0, first.address, SECRET)
    put(stores[0], 1)
    assert eventually(lambda: pusher.pushed_step == 1)
    first.close()
    put(stores[0], 2)
    assert eventually(lambda: pusher.problem is not None)
    pusher._neighbour = (second := CopyServer(stores[1], "127.0.0.1", SECRET)).address
    second.expect(0)
    assert eventually(lambda: pusher.pushed_step == 2)
    pusher.close()
    second.close()


def test_torn_records_and_missing_bytes_are_no_copies_and_those_of_other_ranks_go(
    stores: list[CopyStore],
) -> None:
    for rank in range(5):
        put(stores[0], 1, rank)
    # As when an attempt has begun elsewhere.
    stores[0].keep_only(own=range(1, 4), kept=range(0))
    assert held(stores[0]) == [(1, 1), (1, 2), (1, 3)]
    torn, short, _ = sorted((stores[0].folder / OWN).glob("*.copy"))
    torn.write_text('{"step": 1')
    short.with_suffix(".bin").write_bytes(b"short")
    assert held(stores[0]) == [(1, 3)]
    assert len(stores[0].held()) == 1


def test_the_folder_is_the_users_own_and_gone_at_the_end(tmp_path: Path) -> None:
    copy_store = open_copy_store("a run/x", "node", tmp_path)
    for folder in (copy_store.folder, copy_store.folder.parent, copy_store.folder / OWN):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert copy_store.environment == {store.FOLDER_VARIABLE: str(copy_store.folder)}
    with pytest.raises(LauncherError, match="is locked"):
        open_copy_store("a run/x", "node", tmp_path)
    copy_store.close()
    assert not copy_store.folder.exists()


def test_a_killed_agents_folder_is_gone_on_with_and_a_dead_runs_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "import sys, os, signal; from pathlib import Path;"
        "from launchers.memory_store.store import open_copy_store;"
        "copies = open_copy_store(sys.argv[1], 'node', Path(sys.argv[2]));"
        "(copies.folder / 'own' / 'it').touch();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    for run in ("first", "second"):
        subprocess.run([sys.executable, "-c", script, run, str(tmp_path)], check=False)
    monkeypatch.setattr(store, "_ORPHAN_S", 0.0)
    copy_store = open_copy_store("first", "node", tmp_path)
    assert (copy_store.folder / OWN / "it").exists()
    assert [path.name for path in copy_store.folder.parent.iterdir()] == ["first.node"]
    copy_store.close()


def test_folders_that_another_agent_removes_at_the_same_time_are_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dead.node1", "dying.node1"):
        (tmp_path / name / OWN).mkdir(parents=True)
    (tmp_path / "a file").touch()
    monkeypatch.setattr(store, "_ORPHAN_S", 0.0)
    looked = store._last_used

    def removed_meanwhile(folder: Path) -> float:
        if folder.name == "dead.node1":
            shutil.rmtree(folder)
        return looked(folder)

    monkeypatch.setattr(store, "_last_used", removed_meanwhile)
    store.remove_dead(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a file"]


def test_no_thread_or_descriptor_stays_behind(tmp_path: Path) -> None:
    def once() -> None:
        copy_store = open_copy_store("run", "node", tmp_path)
        server = CopyServer(copy_store, "127.0.0.1", SECRET)
        server.expect(0)
        with pushing(copy_store, server.address) as pusher:
            put(copy_store, 1)
            assert eventually(lambda: pusher.pushed_step == 1)
        server.close()
        copy_store.close()

    # Other tests may have left some of theirs.
    others = set(threading.enumerate())
    once()
    assert eventually(lambda: set(threading.enumerate()) <= others)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        once()
    assert eventually(lambda: set(threading.enumerate()) <= others)
    assert eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)


# An agent's part in the copies.


def said(node: NodeCopies) -> list[tuple[int, int, int]]:
    return [(copy["attempt"], copy["step"], copy["rank"]) for copy in node.held()]


@pytest.fixture
def node_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., NodeCopies]:
    monkeypatch.setattr(exchange, "open_copy_store", lambda run, host: open_copy_store(run, host, tmp_path))
    return lambda host, address="127.0.0.1": NodeCopies("run", host, address, SECRET)


def test_a_spare_goes_on_with_what_a_lost_node_had(node_copies: Callable[..., NodeCopies]) -> None:
    nodes = [node_copies(f"node{number}") for number in range(3)]
    for index in (0, 1):
        other = 1 - index
        own, kept = range(index, index + 1), range(other, other + 1)
        nodes[index].begin(NodeCopyPlan(0, own, nodes[other].address, kept))
    for rank in (0, 1):
        put(nodes[rank]._store, 4, rank, attempt=0)
    assert eventually(lambda: said(nodes[0]) == said(nodes[1]) == [(0, 4, 0), (0, 4, 1)])
    # The neighbour has it a moment before its answer is here.
    assert eventually(lambda: getattr(nodes[0]._pusher, "pushed_step", None) == 4)
    nodes[1].close()
    evidence = nodes[0].end()
    assert (evidence["pushed_step"], evidence["push_problem"]) == (4, None)
    assert "unreadable_copies" not in evidence
    nodes[2].fetch(range(1, 2), 4, 0, {1: nodes[0].address})
    assert said(nodes[2]) == [(0, 4, 1)]
    with pytest.raises(LauncherError, match=r"rank 1's copy of step 5 cannot be fetched .* no such copy"):
        nodes[2].fetch(range(1, 2), 5, 0, {1: nodes[0].address})
    for index, other in ((0, 2), (2, 0)):
        rank, its = index // 2, other // 2
        nodes[index].begin(NodeCopyPlan(1, range(rank, rank + 1), nodes[other].address, range(its, its + 1)))
        put(nodes[index]._store, 5, rank, attempt=1)
    assert eventually(lambda: (1, 5, 1) in said(nodes[0]) and (1, 5, 0) in said(nodes[2]))
    for node in (nodes[0], nodes[2]):
        folder = node._store.folder
        node.close()
        assert not folder.exists()


def test_a_spare_keeps_what_a_node_has_that_trains_alone(node_copies: Callable[..., NodeCopies]) -> None:
    alone, spare, other = map(node_copies, ("node1", "node2", "node3"))
    spare.begin(NodeCopyPlan(3, range(0)))
    alone.begin(NodeCopyPlan(3, range(2), spare.address))
    for rank in (0, 1):
        put(alone._store, 4, rank, attempt=3)
    assert eventually(lambda: said(spare) == [(3, 4, 0), (3, 4, 1)])
    alone.close()
    # Whoever decides asks the spare: it had no part whose end it would report.
    assert other.held_at(spare.address) == spare.held()
    address = spare.address
    spare.fetch(range(2), 4, 3, {})
    assert [place.record.parent.name for place in spare._store.places()] == [OWN, OWN]
    spare.close()
    with pytest.raises(LauncherError, match="does not say which copies it has"):
        other.held_at(address)
    other.close()


def test_copies_go_to_a_spares_next_agent_when_its_first_one_is_gone(
    node_copies: Callable[..., NodeCopies], short_pause: None
) -> None:
    alone, first = map(node_copies, ("node1", "node2"))
    addresses = [first.address]
    first.begin(NodeCopyPlan(0, range(0)))
    alone.begin(NodeCopyPlan(0, range(1), first.address, elsewhere=lambda: addresses[-1]))
    put(alone._store, 1, 0, attempt=0)
    assert eventually(lambda: said(first) == [(0, 1, 0)])
    first.close()
    second = node_copies("node2")
    second.begin(NodeCopyPlan(0, range(0)))
    addresses.append(second.address)
    put(alone._store, 2, 0, attempt=0)
    assert eventually(lambda: said(second) == [(0, 2, 0)])
    for node in (alone, second):
        node.close()


def test_an_address_that_is_not_here_is_told_and_leaves_no_folder(
    tmp_path: Path, node_copies: Callable[..., NodeCopies]
) -> None:
    with pytest.raises(LauncherError, match="cannot be exchanged"):
        node_copies("node", "192.0.2.1")
    assert list(next(tmp_path.glob("orchestra-*")).iterdir()) == []


def test_a_record_that_says_nothing_is_told_of(node_copies: Callable[..., NodeCopies]) -> None:
    with closing(node_copies("node0")) as node:
        put(node._store, 4)
        put(node._store, 5)
        record = node._store.folder / OWN / "rank-00000.slot-2.copy"
        record.write_text(record.read_text()[:20])
        assert said(node) == [(0, 4, 0)]
        assert node.end() == {"unreadable_copies": [f"{OWN}/{record.name}"]}
