"""The store of copies and its exchange between nodes: real files, TCP on loopback, and bad neighbours."""

from __future__ import annotations

import json
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launchers.launch_errors import LauncherError
from launchers.memory_store import store
from launchers.memory_store.exchange import (
    Address,
    CopyPusher,
    CopyServer,
    WantedCopy,
    bring_copies,
    connected,
    shared_secret,
)
from launchers.memory_store.store import KEPT, OWN, CopyStore, open_copy_store

SECRET = "of the test"
SIZE = 300_000


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[CopyStore]]:
    found = [open_copy_store("run", f"node{number}", tmp_path) for number in range(2)]
    yield found
    for copy_store in found:
        copy_store.close()


def content_of(step: int, rank: int, size: int = SIZE) -> bytes:
    return bytes((step * 7 + rank * 3 + index) % 251 for index in range(997)) * (size // 997)


def put(copy_store: CopyStore, step: int, rank: int = 0, attempt: int = 0, slot: int | None = None) -> None:
    """Leave a copy as a rank does."""
    record = copy_store.folder / OWN / f"rank-{rank:05d}.slot-{step % 3 if slot is None else slot}.copy"
    record.unlink(missing_ok=True)
    content = content_of(step, rank)
    record.with_suffix(".bin").write_bytes(content)
    head = {"step": step, "attempt": attempt, "rank": rank, "layout": {"dp": 2}, "bytes": len(content)}
    draft = record.with_suffix(".draft")
    draft.write_text(json.dumps(head) + "\n[]\nchecksum\n")
    draft.rename(record)
    copy_store.wake()


def held(copy_store: CopyStore, *kinds: str) -> list[tuple[int, int]]:
    return sorted((it.copy.step, it.copy.rank) for it in copy_store.places(*kinds))


def is_whole(copy_store: CopyStore, kind: str) -> bool:
    """Whether all copies have the bytes of their step and rank."""
    return all(
        it.content.read_bytes() == content_of(it.copy.step, it.copy.rank) for it in copy_store.places(kind)
    )


def await_that(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def server(stores: list[CopyStore]) -> Iterator[CopyServer]:
    found = CopyServer(stores[1], "127.0.0.1", SECRET)
    found.expect(0)
    yield found
    found.close()


@pytest.fixture
def pusher(stores: list[CopyStore], server: CopyServer) -> Iterator[CopyPusher]:
    found = CopyPusher(stores[0], range(2), 0, server.address, SECRET)
    yield found
    found.close()


def test_a_step_is_sent_when_all_ranks_have_it_and_the_last_two_are_kept(
    stores: list[CopyStore], pusher: CopyPusher
) -> None:
    put(stores[0], 1, rank=0)
    time.sleep(0.05)
    assert held(stores[1], KEPT) == []
    for step in range(1, 6):
        put(stores[0], step, rank=0)
        put(stores[0], step, rank=1)
        await_that(lambda step=step: pusher.pushed_step == step)
    assert held(stores[1], KEPT) == [(4, 0), (4, 1), (5, 0), (5, 1)]
    assert is_whole(stores[1], KEPT)
    assert len(list((stores[1].folder / KEPT).glob("*.bin"))) == 6


def test_a_sender_that_is_behind_skips_to_the_newest(stores: list[CopyStore], server: CopyServer) -> None:
    for step in (1, 2, 3):
        for rank in (0, 1):
            put(stores[0], step, rank)
    pusher = CopyPusher(stores[0], range(2), 0, server.address, SECRET)
    await_that(lambda: pusher.pushed_step is not None)
    pusher.close()
    assert held(stores[1], KEPT) == [(3, 0), (3, 1)]


def test_copies_of_another_attempt_are_not_kept(stores: list[CopyStore], server: CopyServer) -> None:
    server.expect(1)
    put(stores[0], 1, rank=0)
    pusher = CopyPusher(stores[0], range(1), 0, server.address, SECRET)
    await_that(lambda: pusher.problem is not None)
    pusher.close()
    assert held(stores[1], KEPT) == []


def test_who_does_not_know_the_secret_gets_and_leaves_nothing(
    stores: list[CopyStore], server: CopyServer
) -> None:
    put(stores[1], 1)
    peer = connected(server.address, "another one")
    peer.ask(verb="get", rank=0, step=1, attempt=0)
    with pytest.raises(OSError, match="left"):
        peer.reply()
    peer.connection.close()
    put(stores[0], 1)
    pusher = CopyPusher(stores[0], range(1), 0, server.address, "another one")
    await_that(lambda: pusher.problem is not None)
    pusher.close()
    assert held(stores[1], KEPT) == []


def test_a_request_cannot_be_sent_again_by_who_saw_it(stores: list[CopyStore], server: CopyServer) -> None:
    put(stores[1], 1)
    peer = connected(server.address, SECRET)
    body = json.dumps({"verb": "get", "rank": 0, "step": 9, "attempt": 0}).encode()
    line = peer._code(body) + b" " + body + b"\n"
    peer.connection.sendall(line)
    assert peer.reply() == {"is_there": False}
    peer.connection.sendall(line)
    with pytest.raises(OSError, match="left"):
        peer.reply()
    peer.connection.close()


def test_a_copy_that_changes_while_it_is_sent_is_not_kept(
    stores: list[CopyStore], server: CopyServer
) -> None:
    put(stores[0], 1)
    (place,) = stores[0].places(OWN)
    record = place.record.read_bytes()
    put(stores[0], 4)  # over the same memory
    peer = connected(server.address, SECRET)
    peer.ask(
        verb="put", copy={**place.copy.to_json(), "bytes": place.copy.num_bytes}, record_bytes=len(record)
    )
    assert not peer.send_copy(place, record)
    assert peer.reply() == {"is_kept": False}
    peer.connection.close()
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


def test_a_neighbour_that_is_gone_is_tried_again(stores: list[CopyStore]) -> None:
    first = CopyServer(stores[1], "127.0.0.1", SECRET)
    first.expect(0)
    pusher = CopyPusher(stores[0], range(1), 0, first.address, SECRET)
    put(stores[0], 1)
    await_that(lambda: pusher.pushed_step == 1)
    first.close()
    put(stores[0], 2)
    await_that(lambda: pusher.problem is not None)
    pusher._neighbour = (second := CopyServer(stores[1], "127.0.0.1", SECRET)).address
    second.expect(0)
    await_that(lambda: pusher.pushed_step == 2)
    pusher.close()
    second.close()


def test_copies_are_fetched_from_a_node_and_taken_over_from_the_neighbours_store(
    stores: list[CopyStore], server: CopyServer, pusher: CopyPusher, tmp_path: Path
) -> None:
    for rank in (0, 1):
        put(stores[0], 3, rank)
    await_that(lambda: pusher.pushed_step == 3)
    spare = open_copy_store("run", "spare", tmp_path)
    bring_copies(spare, range(2), 3, 0, [WantedCopy(rank, server.address) for rank in (0, 1)], SECRET)
    assert held(spare, OWN) == [(3, 0), (3, 1)]
    assert is_whole(spare, OWN)
    bring_copies(stores[1], range(2), 3, 0, [], SECRET)
    assert held(stores[1], OWN) == [(3, 0), (3, 1)]
    assert is_whole(stores[1], OWN)
    with pytest.raises(LauncherError, match=r"rank 1's copy of step 9 cannot be fetched .* no such copy"):
        bring_copies(spare, range(1, 2), 9, 0, [WantedCopy(1, server.address)], SECRET)
    spare.close()


def test_files_of_other_ranks_go_when_an_attempt_has_begun_elsewhere(stores: list[CopyStore]) -> None:
    for rank in (0, 1, 2):
        put(stores[0], 1, rank)
    stores[0].keep_only(own=range(1, 3), kept=range(0))
    assert held(stores[0]) == [(1, 1), (1, 2)]


def test_a_torn_record_or_missing_bytes_are_no_copy(stores: list[CopyStore]) -> None:
    for step in (1, 2, 3):
        put(stores[0], step)
    first, second, _ = sorted((stores[0].folder / OWN).glob("*.copy"))
    first.write_text('{"step": 1')
    second.with_suffix(".bin").write_bytes(b"short")
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
    assert [it.name for it in copy_store.folder.parent.iterdir()] == ["first.node"]
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


def test_all_nodes_get_the_same_secret(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(shared_secret(tmp_path / "secret"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    assert [it.name for it in tmp_path.iterdir()] == ["secret"]
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_no_thread_or_descriptor_stays_behind(tmp_path: Path) -> None:
    def once() -> None:
        copy_store = open_copy_store("run", "node", tmp_path)
        server = CopyServer(copy_store, "127.0.0.1", SECRET)
        server.expect(0)
        pusher = CopyPusher(copy_store, range(1), 0, server.address, SECRET)
        put(copy_store, 1)
        await_that(lambda: pusher.pushed_step == 1)
        pusher.close()
        server.close()
        copy_store.close()

    # Other tests may have left some of theirs.
    others = set(threading.enumerate())
    once()
    await_that(lambda: set(threading.enumerate()) <= others)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        once()
    await_that(lambda: set(threading.enumerate()) <= others)
    await_that(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)
