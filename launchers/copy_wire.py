"""The words that two nodes exchange over a copy, on one TCP connection.

The server greets with a random line; each request is a line of JSON with a code made of it and of the run's
secret (HMAC-SHA256), so that nobody else can read or leave copies; what is sent is not encrypted. Every wait
has a limit. Whose copies they are and who wants them is not known here.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.copies import Copy, CopyShelf, Place, copy_of

# How long a word may take, or some bytes of a copy.
WAIT_S = 10.0
_MAX_LINE_BYTES = 1 << 16
_LOOK_BYTES = 1 << 12
_MAX_RECORD_BYTES = 1 << 27
_GOOD, _TORN = b"1", b"0"


@dataclass(frozen=True)
class Address:
    """Where a node's server listens."""

    host: str
    port: int


def shared_secret(file: Path) -> str:
    """Return the secret that a file holds, made by whoever comes first. *Any node*. Raises OSError."""
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


class Wire:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, secret: str) -> None:
        connection.settimeout(WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._secret = secret.encode()
        self._greeting = b""
        self._number = 0

    def greet(self) -> None:
        self._greeting = secrets.token_hex(16).encode()
        self.connection.sendall(self._greeting + b"\n")

    def be_greeted(self) -> None:
        self._greeting = self.line()

    def ask(self, **request: Any) -> None:
        body = json.dumps(request).encode()
        self.connection.sendall(self._code(body) + b" " + body + b"\n")

    def asked(self) -> dict[str, Any] | None:
        """Return the next request; None where there is none any more, or none of the run's own."""
        line = self.line(must=False)
        code, _, body = line.partition(b" ")
        if not line or not hmac.compare_digest(code, self._code(body)):
            return None
        request: dict[str, Any] = json.loads(body)
        return request

    def _code(self, body: bytes) -> bytes:
        self._number += 1
        words = b"%s %d %s" % (self._greeting, self._number, body)
        return hmac.new(self._secret, words, "sha256").hexdigest().encode()

    def say(self, **words: Any) -> None:
        self.connection.sendall(json.dumps(words).encode() + b"\n")

    def heard(self) -> dict[str, Any]:
        words: dict[str, Any] = json.loads(self.line())
        return words

    def line(self, *, must: bool = True) -> bytes:
        found = b""
        while not found.endswith(b"\n"):
            # Looked at first: what stands behind the line belongs to the copy.
            seen = self.connection.recv(_LOOK_BYTES, socket.MSG_PEEK)
            if not seen or len(found) > _MAX_LINE_BYTES:
                if must or found:
                    raise ConnectionError("the other end left in the midst of a line")
                return b""
            found += self.take(seen.find(b"\n") + 1 or len(seen))
        return found[:-1]

    def take(self, num_bytes: int) -> bytes:
        content = bytearray(num_bytes)
        self.take_into(memoryview(content))
        return bytes(content)

    def take_into(self, memory: memoryview) -> None:
        while len(memory):
            count = self.connection.recv_into(memory)
            if count == 0:
                raise ConnectionError("the other end left in the midst of a copy")
            memory = memory[count:]

    def send_copy(self, place: Place, record: bytes) -> bool:
        """Send record and bytes, and whether they were of one copy to the end; return that."""
        self.connection.sendall(record)
        with place.content.open("rb") as content:
            sent = self.connection.sendfile(content, count=place.copy.num_bytes)
        if sent != place.copy.num_bytes:
            raise ConnectionError("the copy was cut off while it was sent")
        is_good = place.is_unchanged()
        self.connection.sendall(_GOOD if is_good else _TORN)
        return is_good

    def take_copy(self, shelf: CopyShelf, where: str, copy: Copy, record_bytes: int) -> bool:
        """Receive what `send_copy` sends; return whether it is there now. Raises OSError without room."""
        if not 0 < record_bytes <= _MAX_RECORD_BYTES:
            raise ConnectionError(f"a record of {record_bytes} bytes")
        record = self.take(record_bytes)
        if copy_of(record.split(b"\n", 1)[0]) != copy:
            raise ConnectionError("the record is that of another copy")
        incoming = shelf.receive(where, copy)
        self.take_into(memoryview(incoming.memory)[: copy.num_bytes])
        is_good = self.take(1) == _GOOD
        if is_good:
            incoming.commit(record)
        return is_good


def as_record(copy: Copy) -> dict[str, Any]:
    return {**copy.to_json(), "bytes": copy.num_bytes}


def connected(address: Address, secret: str) -> Wire:
    connection = socket.create_connection((address.host, address.port), WAIT_S)
    try:
        wire = Wire(connection, secret)
        wire.be_greeted()
    except BaseException:
        connection.close()
        raise
    return wire
