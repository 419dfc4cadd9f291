"""Who stands between two nodes, and alters what they say."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from launchers.memory_store.exchange import Address


@contextlib.contextmanager
def altering(target: Address, at: int) -> Iterator[Address]:
    """Pass on what is sent to a server, but flip a bit of byte `at`; answers come back as they are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def carry(source: socket.socket, sink: socket.socket, left: int | None) -> None:
            with contextlib.suppress(OSError):
                while block := bytearray(source.recv(1 << 16)):
                    if left is not None and 0 <= left < len(block):
                        block[left] ^= 1
                    left = None if left is None else left - len(block)
                    sink.sendall(block)
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def stand_between() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    server = socket.create_connection((target.host, target.port))
                    for source, sink, left in ((client, server, at), (server, client, None)):
                        threading.Thread(target=carry, args=[source, sink, left], daemon=True).start()

        threading.Thread(target=stand_between, daemon=True).start()
        host, port = listener.getsockname()
        yield Address(host, port)
        listener.shutdown(socket.SHUT_RDWR)
