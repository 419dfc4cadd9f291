"""Where alerts go: a terminal, JSON lines, a webhook, mail. Each send is limited in time, and its failure is
told. Called by `orchestra watch`.
"""

from __future__ import annotations

import email.errors
import email.message
import email.utils
import hashlib
import http.client
import json
import re
import shutil
import smtplib
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TextIO
from urllib.parse import urlsplit
from urllib.request import Request

from orchestra.alerts.announced import News
from orchestra.errors import ConfigError, OrchestraError
from orchestra.run.control.stop_requests import user_name
from orchestra.run.files import Record

SEND_S = 10.0
TERMINAL = "terminal"


# What a header of a mail holds as it is: one address, without a name or a comment.
_ADDRESS = re.compile(r"[^\W@][\w.!#$%&'*+/=?^`{|}~-]*@[\w.-]*\w")


class UndeliveredError(OrchestraError):
    """Raised when an outlet could not be told; it is tried again at the next look."""


class Outlet(Protocol):
    """Somewhere to say an alert."""

    @property
    def name(self) -> str:
        """What the events of a run call it."""

    def tell(self, change: News) -> None:
        """Say it. Raises UndeliveredError."""


def record_of(change: News) -> Record:
    """Return a change as JSON has it."""
    alert = change.alert
    return {
        "state": "raised" if change.ended is None else "ended",
        "detector": alert.detector,
        "run": alert.subject,
        "key": alert.key,
        "evidence": alert.evidence,
        "since": alert.since,
        "advice": alert.advice,
        "ended": change.ended,
    }


def printable(text: str) -> str:
    """Replace what would move a terminal's cursor or change colours: the records of a run are anybody's."""
    return "".join(char if char.isprintable() else " " for char in text)


def words_of(change: News) -> str:
    """Return a change in two printable lines, or in one where something is over."""
    alert = change.alert
    subject, key, evidence, advice = map(printable, (alert.subject, alert.key, alert.evidence, alert.advice))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alert.since))
    if change.ended is not None:
        return f"over: {subject}: {key} (since {since}): {evidence}"
    return f"ALERT {subject}: {key}, since {since}: {evidence}\n  -> {advice}"


@dataclass(frozen=True)
class Printed:
    """A terminal, or whatever reads standard output."""

    stream: TextIO
    is_json: bool = False
    name: str = TERMINAL

    def tell(self, change: News) -> None:
        text = json.dumps(record_of(change)) if self.is_json else words_of(change)
        try:
            self.stream.write(f"{text}\n")
            self.stream.flush()
        except BrokenPipeError:
            # Whoever read it has gone: there is no next look.
            raise
        except OSError as error:
            raise UndeliveredError(f"it cannot be printed: {error.strerror}") from error


@dataclass(frozen=True)
class Webhook:
    """An address that takes JSON by POST: `text` for Slack, Mattermost and their like, the fields beside it.

    The address may hold a secret: no message of ours says more of it than its host.
    """

    url: str = field(repr=False)

    @property
    def name(self) -> str:
        return _named("webhook", self.url)

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "?"

    def tell(self, change: News) -> None:
        body = json.dumps({"text": words_of(change), **record_of(change)}).encode()
        headers = {"Content-Type": "application/json"}
        request = Request(self.url, body, headers, method="POST")

        def send() -> None:
            with urllib.request.build_opener(_NoRedirects).open(request, timeout=SEND_S):
                pass

        _within_limit(f"webhook at {self.host}", send)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for the failure that it is: what follows one is a GET, and nobody gets the alert."""

    def redirect_request(self, *_: Any) -> None:
        # Without another request the answer is an HTTPError.
        return None


def _named(kind: str, address: str) -> str:
    """Tell outlets of one kind apart without their addresses, which may be secret."""
    return f"{kind}:{hashlib.sha256(address.encode(errors='replace')).hexdigest()[:8]}"


def webhook(url: str) -> Webhook:
    """Return the outlet of an address. Raises ConfigError where it is none."""
    if not url.isprintable() or " " in url:
        raise ConfigError("--webhook: the address holds a space or a control character; expected none")
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(
            "--webhook: expected an address that begins with https:// or http://, or @FILE with one"
        )
    if not url.isascii() or "@" in parts.netloc:
        # Neither can be sent as it stands.
        raise ConfigError("--webhook: the address holds a user before its host, or letters beyond ASCII")
    return Webhook(url)


@dataclass(frozen=True)
class Mail:
    """A mail to one address, by this machine's `sendmail` program or through an SMTP server."""

    address: str
    server: str | None = None

    @property
    def name(self) -> str:
        return _named("mail", self.address)

    def tell(self, change: News) -> None:
        program = shutil.which("sendmail", path="/usr/sbin:/usr/lib:/usr/bin")
        if self.server is None and program is not None:
            _within_limit("mail by sendmail", lambda: _by_program(program, self._message(change)))
            return
        host, _, port = (self.server or "localhost").partition(":")
        where = f"mail through {self.server or 'localhost (there is no sendmail here)'}"
        _within_limit(where, lambda: _by_server(host, int(port or 25), self._message(change)))

    def _message(self, change: News) -> email.message.EmailMessage:
        """Return the mail: who sends it and from where, directories and name servers are asked for."""
        message = email.message.EmailMessage()
        word = "over" if change.ended is not None else "alert"
        message["Subject"] = printable(f"orchestra {word}: {change.alert.subject}: {change.alert.key}")
        message["From"] = f"{user_name()}@{socket.getfqdn()}"
        message["To"] = self.address
        message["Date"] = email.utils.localtime()
        message.set_content(words_of(change))
        return message


def mail(address: str, server: str | None) -> Mail:
    """Return the outlet of an address. Raises ConfigError where it, or the server, is none."""
    if not _ADDRESS.fullmatch(address):
        raise ConfigError(f"--mail {address}: expected an address such as me@example.org")
    host, _, port = ("localhost" if server is None else server).partition(":")
    if not host or (port and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise ConfigError(f"--smtp {server}: expected HOST or HOST:PORT")
    return Mail(address, server)


def _by_program(program: str, message: email.message.EmailMessage) -> None:
    command = [program, "-t", "-oi"]
    done = subprocess.run(command, input=bytes(message), capture_output=True, timeout=SEND_S, check=False)
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip()
        raise OSError(f"it ended with code {done.returncode}{f': {words}' if words else ''}")


def _by_server(host: str, port: int, message: email.message.EmailMessage) -> None:
    with smtplib.SMTP(host, port, timeout=SEND_S) as server:
        server.send_message(message)


def _answer_of(refusal: smtplib.SMTPResponseException | smtplib.SMTPRecipientsRefused) -> str:
    """Return what a mail server said, without the address."""
    if isinstance(refusal, smtplib.SMTPResponseException):
        code, said = refusal.smtp_code, refusal.smtp_error
    else:
        code, said = next(iter(refusal.recipients.values()))
    text = said if isinstance(said, str) else said.decode(errors="replace")
    return f"it answered {code} {printable(text)}"


def _within_limit(what: str, send: Callable[[], None]) -> None:
    """Send in a thread that is waited for no longer than the limit: a library's own limits are for each read,
    and a server that answers byte by byte never exceeds them.
    """
    problem: list[str] = ["an error that nobody expected, told above"]

    def attempt() -> None:
        try:
            send()
        except urllib.error.HTTPError as error:
            problem[0] = f"it answered {error.code}"
        except urllib.error.URLError as error:
            problem[0] = str(error.reason)
        except (http.client.HTTPException, email.errors.MessageError, LookupError, ValueError) as error:
            # Their words hold the address, or what a server sent.
            problem[0] = type(error).__name__
        except (smtplib.SMTPResponseException, smtplib.SMTPRecipientsRefused) as error:
            problem[0] = _answer_of(error)
        except (OSError, smtplib.SMTPException, subprocess.TimeoutExpired) as error:
            problem[0] = str(error) or type(error).__name__
        else:
            problem.clear()

    thread = threading.Thread(target=attempt, name=what, daemon=True)
    thread.start()
    thread.join(1.5 * SEND_S)
    if thread.is_alive():
        raise UndeliveredError(f"{what}: no answer within {1.5 * SEND_S:g} s")
    if problem:
        raise UndeliveredError(f"{what}: {problem[0]} ({SEND_S:g} s are the limit)")
