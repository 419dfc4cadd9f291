"""Connections between the nodes of a job, on which both ends have proved that they know the run's secret.

    server → client   a nonce
    client → server   a nonce of its own, and a code of both
    server → client   a code of both, another one

Each end talks with a key of its own from then on, made of the secret, the purpose and both nonces, and every
message has a number: nothing can be invented, altered, repeated, turned round or taken to another connection.
Nothing is encrypted. HMAC-SHA256, which takes a core 1.7 GB/s.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

# How long a stranger may take to prove who it is, and how many may try at a time.
GREETING_S = 1.0
_GREETINGS_AT_ONCE = 64
# How long a message may take, or some bytes of a content.
WAIT_S = 10.0
_NONCE_BYTES = _CODE_BYTES = 32
_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 1 << 24
# Counted while it is in the cache.
BLOCK_BYTES = 1 << 18
_PAUSE_S = 1.0
_CLIENT, _SERVER = b"client", b"server"


def shared_secret(file: Path) -> str:
    """Return the secret that a file holds, made by whoever comes first. *Any node*. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        # Whole from its first moment on: each attempt of each node asks for it.
        return file.read_text()
    draft = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(secrets.token_hex(32))
    try:
        with contextlib.suppress(FileExistsError):
            file.hardlink_to(draft)
    finally:
        draft.unlink()
    return file.read_text()


class Channel:
    """One end of a connection whose other end knows the secret. One thread uses it at a time."""

    def __init__(self, connection: socket.socket, sending: bytes, receiving: bytes) -> None:
        self.connection = connection
        self._sending, self._receiving = sending, receiving
        self._num_sent = self._num_received = 0
        connection.settimeout(WAIT_S)

    @classmethod
    def connect(cls, host: str, port: int, secret: str, purpose: str) -> Channel:
        """Reach whoever listens there. Raises ConnectionError where that is not one of ours, and OSError."""
        connection = socket.create_connection((host, port), WAIT_S)
        try:
            return cls._greeted(connection, _Greeting(secret, purpose), WAIT_S, is_server=False)
        except BaseException:
            connection.close()
            raise

    @classmethod
    def accept(cls, connection: socket.socket, secret: str, purpose: str) -> Channel:
        """Let a caller prove itself, within a second in all. Raises ConnectionError and OSError."""
        return cls._greeted(connection, _Greeting(secret, purpose), GREETING_S, is_server=True)

    @classmethod
    def _greeted(
        cls, connection: socket.socket, greeting: _Greeting, limit_s: float, *, is_server: bool
    ) -> Channel:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline = time.monotonic() + limit_s
        own = secrets.token_bytes(_NONCE_BYTES)
        if is_server:
            connection.settimeout(limit_s)
            connection.sendall(own)
            answer = _take_by(connection, _NONCE_BYTES + _CODE_BYTES, deadline)
            nonces = own + answer[:_NONCE_BYTES]
            greeting.check(answer[_NONCE_BYTES:], _CLIENT, nonces)
            connection.sendall(greeting.code(_SERVER, nonces))
            return cls(connection, greeting.key(_SERVER, nonces), greeting.key(_CLIENT, nonces))
        nonces = _take_by(connection, _NONCE_BYTES, deadline) + own
        connection.sendall(own + greeting.code(_CLIENT, nonces))
        greeting.check(_take_by(connection, _CODE_BYTES, deadline), _SERVER, nonces)
        return cls(connection, greeting.key(_CLIENT, nonces), greeting.key(_SERVER, nonces))

    def close(self) -> None:
        """End the connection, also for a thread that waits on it."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError."""
        body = json.dumps(message).encode()
        code = self._sending_code()
        code.update(body)
        self.connection.sendall(_LENGTH.pack(len(body)) + body + code.digest())

    def receive(self) -> dict[str, Any]:
        """Return the other end's next message. Raises ConnectionError where there is no true one."""
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        if length > _MAX_MESSAGE_BYTES:
            raise ConnectionError(f"a message of {length} bytes")
        body = self._take(length)
        code = self._receiving_code()
        code.update(body)
        self._check(code)
        message: dict[str, Any] = json.loads(body)
        return message

    def awaits_message(self) -> bool:
        """Wait for the next message without a limit; return whether one comes."""
        self.connection.settimeout(None)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        is_there = bool(self.connection.recv(1, socket.MSG_PEEK))
        self.connection.settimeout(WAIT_S)
        return is_there

    def send_content(self, blocks: Iterable[bytes]) -> None:
        """Send bytes whose number the other end knows."""
        code = self._sending_code()
        for block in blocks:
            code.update(block)
            self.connection.sendall(block)
        self.connection.sendall(code.digest())

    def take_content(self, *parts: memoryview) -> None:
        """Fill memory with the bytes that `send_content` sends. Raises ConnectionError where they are not
        the other end's own: the memory then holds anything.
        """
        code = self._receiving_code()
        for part in parts:
            for begin in range(0, len(part), BLOCK_BYTES):
                block = part[begin : begin + BLOCK_BYTES]
                self._take_into(block)
                code.update(block)
        self._check(code)

    def _sending_code(self) -> hmac.HMAC:
        self._num_sent += 1
        return hmac.new(self._sending, self._num_sent.to_bytes(8, "big"), "sha256")

    def _receiving_code(self) -> hmac.HMAC:
        self._num_received += 1
        return hmac.new(self._receiving, self._num_received.to_bytes(8, "big"), "sha256")

    def _check(self, code: hmac.HMAC) -> None:
        if not hmac.compare_digest(self._take(_CODE_BYTES), code.digest()):
            raise ConnectionError("what came was not sent by the other end: it was altered on its way")

    def _take(self, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        self._take_into(memoryview(content))
        return bytes(content)

    def _take_into(self, memory: memoryview) -> None:
        while len(memory):
            count = self.connection.recv_into(memory)
            if count == 0:
                raise ConnectionError("the other end left in the middle of a message")
            memory = memory[count:]


class _Greeting:
    """What both ends of a connection compute from the secret."""

    def __init__(self, secret: str, purpose: str) -> None:
        self._secret, self._purpose = secret.encode(), purpose.encode()

    def code(self, who: bytes, nonces: bytes) -> bytes:
        return self._of(b"code", who, nonces)

    def key(self, who: bytes, nonces: bytes) -> bytes:
        return self._of(b"key", who, nonces)

    def _of(self, what: bytes, who: bytes, nonces: bytes) -> bytes:
        return hmac.digest(self._secret, b"\0".join((what, who, self._purpose, nonces)), "sha256")

    def check(self, code: bytes, who: bytes, nonces: bytes) -> None:
        if not hmac.compare_digest(code, self.code(who, nonces)):
            raise ConnectionError("the other end does not know this run's secret: it is not one of its nodes")


def _take_by(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receive so many bytes, all of them by the deadline: one now and then gains nobody time."""
    content = b""
    while len(content) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other end does not say in time who it is")
        connection.settimeout(left_s)
        part = connection.recv(num_bytes - len(content))
        if not part:
            raise ConnectionError("the other end left before it said who it is")
        content += part
    return content


class Gate:
    """A listening socket behind which come only those who know the secret, each in a thread of its own.

    Strangers have a second; when too many try at once the oldest goes. Only who has passed counts against
    the limit of those that are served.
    """

    def __init__(
        self, host: str, secret: str, purpose: str, serve: Callable[[Channel], None], *, max_served: int
    ) -> None:
        """Listen on a free port of `host`, an address of this node. Raises OSError.

        `serve` is called with each channel, which is closed after it. What a broken connection or a message
        of another kind raises there ends that channel alone.
        """
        self._secret, self._purpose, self._serve = secret, purpose, serve
        self._listener = socket.create_server((host, 0), backlog=_GREETINGS_AT_ONCE)
        host, port = self._listener.getsockname()[:2]
        # Address and port at which the other nodes reach it.
        self.place: tuple[str, int] = (host, port)
        self._max_served = max_served
        self._lock = threading.Lock()
        self._greeting: deque[socket.socket] = deque()
        self._served: set[Channel] = set()
        self._is_closed = False
        threading.Thread(target=self._accept, name=purpose, daemon=True).start()

    def close(self) -> None:
        """Listen no more, and end what is under way."""
        with self._lock:
            self._is_closed = True
            open_ones = (self._listener, *self._greeting, *(channel.connection for channel in self._served))
            for connection in open_ones:
                _let_go(connection)

    def _accept(self) -> None:
        with self._listener:
            while not self._is_closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError:
                    if not self._is_closed:
                        time.sleep(_PAUSE_S)  # out of descriptors, perhaps
                    continue
                with self._lock:
                    if len(self._greeting) >= _GREETINGS_AT_ONCE:
                        _let_go(self._greeting.popleft())
                    self._greeting.append(connection)
                    if self._is_closed:
                        _let_go(connection)
                threading.Thread(
                    target=self._greet, args=[connection], name=self._purpose, daemon=True
                ).start()

    def _greet(self, connection: socket.socket) -> None:
        channel = None
        # Whoever called learns of any trouble by the end of the connection, and calls again or elsewhere.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), connection:
            try:
                channel = Channel.accept(connection, self._secret, self._purpose)
            finally:
                with self._lock:
                    if connection in self._greeting:
                        self._greeting.remove(connection)
                    if channel is not None and len(self._served) < self._max_served and not self._is_closed:
                        self._served.add(channel)
            if channel in self._served:
                try:
                    self._serve(channel)
                finally:
                    with self._lock:
                        self._served.discard(channel)


def _let_go(connection: socket.socket) -> None:
    """Let the thread go that waits on a socket: it closes it. Closed here, its number could be another's."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
