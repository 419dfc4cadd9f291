"""Measures how fast this node reaches the next one: each agent sends a little to its neighbour, in a ring.

Plain sockets, no torch: that finds an interface that fell back to a slower speed or loses packets, not what
NCCL makes of the network (`orchestra bench network` measures that). Which nodes are slow is decided over all
results, in `orchestra.agents.choose_nodes`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

_CHUNK = bytes(1 << 18)
# One measurement ends after that much, or that long.
_MOST_BYTES, _MOST_S = 16 << 20, 0.1
_MEASUREMENTS, _PINGS = 2, 5
# Two rounds apart: what slowed down the first one may be over.
_ROUNDS, _PAUSE_S = 2, 0.3
_TIMEOUT_S = 5.0
_LOOK_S = 0.5
_PING, _DONE = b"p", b"d"


class Ring:
    """Answers the node before and measures the way to the next, on threads of its own; `close` ends them."""

    def __init__(self, address: str) -> None:
        """`address`: this node's, at which the others reach it. Raises OSError."""
        self._listener = socket.create_server((address, 0), backlog=4)
        self._listener.settimeout(_LOOK_S)
        self._is_over = threading.Event()
        self._result: dict[str, Any] | None = None
        threading.Thread(target=self._answer, name="ring", daemon=True).start()

    @property
    def port(self) -> int:
        """Where this node answers."""
        return int(self._listener.getsockname()[1])

    def measure(self, neighbour: Callable[[], tuple[str, int] | None], **facts: Any) -> None:
        """Begin to measure the way to the neighbour, as soon as it is known where that is.

        `facts` come back with what is measured.
        """
        arguments = (neighbour, facts)
        threading.Thread(target=self._measure, args=arguments, name="ring", daemon=True).start()

    def taken(self) -> dict[str, Any] | None:
        """Return what was measured, once: `bytes_per_s` of each round and `latency_s`, or an `error`."""
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """Answer and measure no more; the threads end within a second."""
        self._is_over.set()

    def _answer(self) -> None:
        # Closed where it is used: its number could mean another socket by then.
        with self._listener:
            while not self._is_over.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = self._listener.accept()
                    # One at a time: there is one node before this one.
                    with connection:
                        connection.settimeout(_TIMEOUT_S)
                        _swallow(connection)

    def _measure(self, neighbour: Callable[[], tuple[str, int] | None], facts: dict[str, Any]) -> None:
        place = neighbour()
        while place is None:
            if self._is_over.wait(_LOOK_S):
                return
            place = neighbour()
        rounds: list[tuple[float, float]] = []
        try:
            for number in range(_ROUNDS):
                self._is_over.wait(_PAUSE_S if number else 0.0)
                rounds.append(_round(place))
        except OSError as error:
            self._result = {"error": str(error), **facts}
            return
        self._result = {
            "bytes_per_s": [round(rate) for rate, _ in rounds],
            "latency_s": round(min(seconds for _, seconds in rounds), 6),
            **facts,
        }


def _swallow(connection: socket.socket) -> None:
    """Take all that comes; where it ends with a ping or a mark of the end, send that byte back."""
    buffer = bytearray(len(_CHUNK))
    while num_bytes := connection.recv_into(buffer):
        last = bytes(buffer[num_bytes - 1 : num_bytes])
        if last in (_PING, _DONE):
            connection.sendall(last)


def _round(place: tuple[str, int]) -> tuple[float, float]:
    """Return the best bytes per second and the shortest time to the neighbour and back. Raises OSError."""
    with socket.create_connection(place, timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pings = [_ping(connection, _PING) for _ in range(_PINGS)]
        rates = [_rate(connection) for _ in range(_MEASUREMENTS)]
    return max(rates), min(pings)


def _ping(connection: socket.socket, word: bytes) -> float:
    begin = time.perf_counter()
    connection.sendall(word)
    if connection.recv(1) != word:
        raise OSError("the neighbour hung up")
    return time.perf_counter() - begin


def _rate(connection: socket.socket) -> float:
    """Return the bytes per second of one stream, counted until the neighbour has taken the last one."""
    begin, sent = time.perf_counter(), 0
    while sent < _MOST_BYTES and time.perf_counter() - begin < _MOST_S:
        connection.sendall(_CHUNK)
        sent += len(_CHUNK)
    _ping(connection, _DONE)
    return sent / (time.perf_counter() - begin)
