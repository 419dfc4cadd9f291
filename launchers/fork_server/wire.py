"""The messages between an agent, its fork server and the worker launchers: on Unix stream sockets.

Requests are JSON after its length; file descriptors travel with the first bytes. Answers to a worker launcher
are two numbers. The worker launcher imports this file at every start of a rank: keep its imports few.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

# Name of the server's abstract socket, without the leading zero byte; set for torchrun.
SOCKET_VARIABLE = "LAUNCHERS_FORK_SERVER_SOCKET"

# What an answer to a worker launcher says; the number that follows:
FORKED = 1  # the worker's process id
REFUSED = 2  # none
ENDED = 3  # the worker's exit code, negative: a signal
# What a worker launcher says after its request; the number that follows is a signal for the worker.
SIGNAL = 4

_PEER = struct.Struct("3i")
_LENGTH = struct.Struct("!I")
_PAIR = struct.Struct("!ii")
_MAX_FILES = 3


def peer(channel: socket.socket) -> tuple[int, int]:
    """Return the process and user id of who is at the other end: of a listener, who began to listen."""
    pid, user, _ = _PEER.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, user


def connect(channel: socket.socket, name: str) -> None:
    """Reach the server of this name. Raises OSError, also where another user listens under it: a dead
    server's name is anybody's.
    """
    channel.connect("\0" + name)
    user = peer(channel)[1]
    if user not in (os.getuid(), 0):
        raise PermissionError(f"user {user} listens at the fork server's socket {name}")


def send(channel: socket.socket, message: dict[str, Any], files: tuple[int, ...] = ()) -> None:
    """Send a message with copies of this process's descriptors `files`. Raises OSError."""
    # Names of files may hold bytes that are no UTF-8: JSON's \udcXX escapes carry them.
    payload = json.dumps(message).encode()
    data = _LENGTH.pack(len(payload)) + payload
    sent = socket.send_fds(channel, [data], list(files)) if files else 0
    channel.sendall(data[sent:])


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and the descriptors that came with it; None when the other side is gone.

    Raises OSError; TimeoutError (one of them) after the channel's time-out.
    """
    head, files, _, _ = socket.recv_fds(channel, _LENGTH.size, _MAX_FILES)
    if not head or len(head := head + _exactly(channel, _LENGTH.size - len(head))) < _LENGTH.size:
        return None
    (size,) = _LENGTH.unpack(head)
    payload = _exactly(channel, size)
    return (json.loads(payload), files) if len(payload) == size else None


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size and (part := channel.recv(min(size, 1 << 16))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def send_pair(channel: socket.socket, kind: int, number: int) -> None:
    """Send two numbers at once. Raises OSError."""
    channel.sendall(_PAIR.pack(kind, number))


def receive_pair(channel: socket.socket) -> tuple[int, int] | None:
    """Return the next two numbers, or None when the other side is gone.

    Raises BlockingIOError where the channel does not block and nothing has come yet.
    """
    try:
        data = channel.recv(_PAIR.size)
    except ConnectionError:
        return None
    kind, number = _PAIR.unpack(data) if len(data) == _PAIR.size else (0, 0)
    return (kind, number) if kind else None
