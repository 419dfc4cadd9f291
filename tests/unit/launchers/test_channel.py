"""Connections between nodes: strangers get nowhere, whatever they send, and keep nobody out."""

from __future__ import annotations

import contextlib
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from fork_trials import eventually
from strangers import altering

from launchers.channel import GREETING_S, Channel, Gate, shared_secret
from launchers.memory_store.exchange import Address

SECRET = "of the test"
CONTENT = bytes(range(256)) * 2000
# Nonce and code of the client, then a message of some 30 bytes and its code, then the content and its code.
GREETING_BYTES = 64
# How the other end's refusal shows.
REFUSED = (ConnectionError, TimeoutError)


class Echo:
    """Says how long a content it has taken."""

    def __init__(self) -> None:
        self.num_taken = 0

    def serve(self, channel: Channel) -> None:
        while channel.awaits_message():
            memory = bytearray(channel.receive()["bytes"])
            channel.take_content(memoryview(memory))
            self.num_taken += 1
            channel.send(is_same=bytes(memory) == CONTENT[: len(memory)])


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def gate(echo: Echo) -> Iterator[Gate]:
    with closing(Gate("127.0.0.1", SECRET, "echo", echo.serve, max_served=2)) as opened:
        yield opened


def reach(gate: Gate, secret: str = SECRET, purpose: str = "echo") -> Channel:
    return Channel.connect(*gate.place, secret, purpose)


def said_of(channel: Channel, num_bytes: int = len(CONTENT)) -> dict[str, object]:
    channel.send(bytes=num_bytes)
    channel.send_content([CONTENT[:num_bytes]])
    return channel.receive()


def test_both_ends_exchange_messages_and_contents(gate: Gate) -> None:
    with closing(reach(gate)) as channel:
        for num_bytes in (0, 1, 100_000, len(CONTENT)):
            assert said_of(channel, num_bytes) == {"is_same": True}


@pytest.mark.parametrize(("secret", "purpose"), [("another one", "echo"), (SECRET, "copies")])
def test_who_does_not_know_the_secret_or_wants_something_else_does_not_get_in(
    gate: Gate, echo: Echo, secret: str, purpose: str
) -> None:
    with pytest.raises(ConnectionError):
        reach(gate, secret, purpose)
    assert echo.num_taken == 0


# A byte of the nonce, of the client's code, of a message's length, body and code, of the content, its code.
@pytest.mark.parametrize("at", [5, 40, 67, 70, 90, 5000, GREETING_BYTES + 4 + 17 + 32 + len(CONTENT) + 20])
def test_what_is_altered_on_its_way_is_never_taken(gate: Gate, echo: Echo, at: int) -> None:
    with altering(Address(*gate.place), at) as address, pytest.raises(REFUSED):
        said_of(Channel.connect(address.host, address.port, SECRET, "echo"))
    assert echo.num_taken == 0


def test_an_answer_that_is_what_was_asked_is_refused() -> None:
    """Each end has a key of its own: what it said cannot be returned to it."""
    ours, other = socket.socketpair()
    with ours, other:
        channel = Channel(ours, sending=b"ours", receiving=b"theirs")
        channel.send(verb="list")
        other.sendall(other.recv(1 << 16))
        with pytest.raises(ConnectionError, match="altered"):
            channel.receive()


def test_a_message_cannot_be_sent_again(gate: Gate) -> None:
    with closing(reach(gate)) as channel:
        said_of(channel)
        channel._num_sent -= 2
        with pytest.raises(REFUSED):
            said_of(channel)


def test_a_hundred_silent_strangers_keep_nobody_out(gate: Gate) -> None:
    strangers = [socket.create_connection(gate.place) for _ in range(100)]
    with closing(reach(gate)) as channel:
        assert said_of(channel) == {"is_same": True}
    for stranger in strangers:
        stranger.close()


def test_a_stranger_that_sends_a_byte_now_and_then_is_let_go_after_a_second(gate: Gate) -> None:
    with socket.create_connection(gate.place) as stranger:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 10 * GREETING_S:
                stranger.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 5 * GREETING_S


def test_no_more_are_served_than_there_is_room_for_and_who_leaves_makes_room(gate: Gate) -> None:
    first, second = reach(gate), reach(gate)
    for channel in (first, second):
        assert said_of(channel) == {"is_same": True}
    third = reach(gate)
    with pytest.raises(REFUSED):
        said_of(third)
    first.close()

    def is_served() -> bool:
        with contextlib.suppress(OSError), closing(reach(gate)) as channel:
            return said_of(channel) == {"is_same": True}
        return False

    assert eventually(is_served)
    second.close()
    third.close()


def test_a_gate_that_closes_ends_all_it_serves_and_leaves_no_thread(echo: Echo) -> None:
    before = set(threading.enumerate())
    gate = Gate("127.0.0.1", SECRET, "echo", echo.serve, max_served=2)
    channel, stranger = reach(gate), socket.create_connection(gate.place)
    said_of(channel)
    gate.close()
    with pytest.raises(REFUSED):
        said_of(channel)
    assert eventually(lambda: set(threading.enumerate()) <= before)
    with pytest.raises(REFUSED):
        reach(gate)
    stranger.close()


def test_all_nodes_get_the_same_secret(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as nodes:
        # All at the same time, as agents of a job start.
        start = threading.Barrier(8)

        def agent(_: int) -> str:
            start.wait(30)
            return shared_secret(tmp_path / "secret")

        secrets = list(nodes.map(agent, range(8)))
    assert len(set(secrets)) == 1
    assert len(secrets[0]) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
