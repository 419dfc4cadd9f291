"""Serves a page of `orchestra report --serve` on this machine's loopback address, drawn anew for each reader.

A login node has other users: the address has a secret in it, and nobody without it sees anything. Only GET is
answered, and only by the name of the loopback address, so that no web site can make a browser ask (DNS
rebinding).
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from orchestra.errors import ConfigError

_LOOPBACK = "127.0.0.1"


def serve_page(make: Callable[[], str], port: int, announce: Callable[[str], None]) -> None:
    """Serve what `make` returns until Ctrl-C; `announce` is told the address. Port 0: any that is free.

    Raises ConfigError where the port is taken.
    """
    secret = secrets.token_urlsafe(16)

    class PageRequest(BaseHTTPRequestHandler):
        """Answers one request."""

        # Seconds that a reader may be silent for.
        timeout = 30

        def do_GET(self) -> None:
            """Send the page to whoever knows the secret."""
            host = self.headers.get("Host", "").partition(":")[0]
            if host not in (_LOOPBACK, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif not secrets.compare_digest(self.path.encode(), f"/{secret}".encode()):
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                self._send(make().encode())

        def _send(self, body: bytes) -> None:
            self.send_response(HTTPStatus.OK)
            facts = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body))}
            for name, value in (
                facts | {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
            ).items():
                self.send_header(name, value)
            self.end_headers()
            # Whoever closed the window has seen enough.
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing of each request."""

    try:
        server = ThreadingHTTPServer((_LOOPBACK, port), PageRequest)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; use another one, or 0 for a free one") from None
    with server:
        announce(f"http://{_LOOPBACK}:{server.server_address[1]}/{secret}")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
