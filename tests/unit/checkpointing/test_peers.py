"""Ranks that talk through a store: every wait ends, and who is missing is named."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from checkpointing.checkpoint_errors import CheckpointError, FalseWordError, MissingRanksError
from checkpointing.peers import Peers

KEY = b"of the test"


def peers_of(world_size: int, limit_s: float = 20.0) -> list[Peers]:
    """Return peers on TCP connections of their own, as processes have them."""
    server = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20)
    )
    clients = [server] + [
        dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        for _ in range(world_size - 1)
    ]
    return [Peers(rank, world_size, store, limit_s, KEY) for rank, store in enumerate(clients)]


def test_an_exchange_gives_every_rank_all_values_by_rank() -> None:
    values = [{"rank": 0}, {"same": [1, 2]}, {"same": [1, 2]}, None]
    ranks = peers_of(4)
    with ThreadPoolExecutor(4) as pool:
        for round_number in range(3):
            calls = [
                pool.submit(peers.exchange, f"topic/{round_number}", value)
                for peers, value in zip(ranks, values, strict=True)
            ]
            assert [call.result() for call in calls] == [values] * 4


def test_missing_ranks_are_named_on_every_rank_that_waits() -> None:
    ranks = peers_of(4)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(ranks[rank].exchange, "roll call", rank, 0.3) for rank in (0, 2)]
        for call in calls:
            with pytest.raises(MissingRanksError, match=r"roll call: no answer within 0.3 s") as caught:
                call.result()
            assert caught.value.ranks == [1, 3]
    with pytest.raises(MissingRanksError, match="from rank 0"):
        ranks[1].await_answer("verdict", limit_s=0.1)


def test_a_waiting_thread_does_not_hold_up_the_others_of_its_process() -> None:
    coordinator, other = peers_of(2)
    waiting = threading.Thread(target=lambda: coordinator.hear_all("late"))
    waiting.start()
    other.tell("early", 1)
    coordinator.tell("early", 0)
    assert coordinator.hear_all("early") == [0, 1]
    coordinator.tell("late", 0)
    other.tell("late", 1)
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize("how", ["garbage", "bare", "moved", "other key"])
def test_a_word_that_no_rank_wrote_is_never_believed(how: str) -> None:
    coordinator, other = peers_of(2)
    for place in ("turn/1", "answer/answer"):
        false = {"garbage": b"\xff{", "bare": b"true", "other key": b""}.get(how)
        if how == "moved":
            coordinator.tell("before", True)
            false = coordinator._store.get("before/0")
        elif how == "other key":
            Peers(1, 2, other._store, 20.0, b"another one").tell("before", True)
            false = other._store.get("before/1")
        coordinator._store.set(place, false)
    coordinator.tell("turn", True)
    with pytest.raises(FalseWordError, match=r"turn/1 .* docs/security\.md"):
        coordinator.hear_all("turn")
    with pytest.raises(FalseWordError, match="answer/answer"):
        other.await_answer("answer")


def test_all_ranks_learn_of_a_false_word_in_an_exchange() -> None:
    coordinator, other = peers_of(2)
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(coordinator.exchange, "topic", 0)
        coordinator._store.set("topic/1", b"true")
        for error in (mine.exception(30), pool.submit(other.exchange, "topic", 1).exception(30)):
            assert isinstance(error, FalseWordError)


def test_what_was_read_leaves_the_store() -> None:
    peers = Peers.alone()
    for number in range(100):
        assert peers.exchange(f"topic/{number}", number) == [number]
    assert peers._store.num_keys() < 50


def test_a_store_that_is_gone_is_an_error_of_this_package() -> None:
    coordinator, other = peers_of(2)
    del coordinator
    with pytest.raises(CheckpointError):
        other.await_answer("verdict", limit_s=5)
