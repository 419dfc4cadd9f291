"""How copies get from node to node: a server on each, a thread that sends new ones to a neighbour, a fetch.

Training must not wait for any of it: every wait has a limit, a sender that is late skips to the newest copy,
and one whose copy changed while it was read says so at its end. `NodeCopies` is what an agent uses of it.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launchers import LauncherError
from launchers.memory_store.store import KEPT, OWN, Copy, CopyPlace, CopyStore, copy_of, open_copy_store

# How long a message may take, or some bytes of a copy.
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


class CopyConnection:
    """One end of a TCP connection on which two nodes exchange copies.

    The server greets with a random line; each request is a line of JSON with a code made of that line and the
    run's secret (HMAC-SHA256), so that nobody else can read or leave copies. The content is not encrypted.
    """

    def __init__(self, connection: socket.socket, secret: str) -> None:
        connection.settimeout(WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._secret = secret.encode()
        self._greeting = b""
        self._number = 0

    def greet(self) -> None:
        """Send the random line that every code of this connection is made of. *Server*."""
        self._greeting = secrets.token_hex(16).encode()
        self.connection.sendall(self._greeting + b"\n")

    def await_greeting(self) -> None:
        self._greeting = self.line()

    def ask(self, **request: Any) -> None:
        """Send a request with its code."""
        body = json.dumps(request).encode()
        self.connection.sendall(self._code(body) + b" " + body + b"\n")

    def next_request(self) -> dict[str, Any] | None:
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

    def answer(self, **record: Any) -> None:
        """Send a line of JSON."""
        self.connection.sendall(json.dumps(record).encode() + b"\n")

    def reply(self) -> dict[str, Any]:
        """Receive a line of JSON."""
        record: dict[str, Any] = json.loads(self.line())
        return record

    def line(self, *, must: bool = True) -> bytes:
        """Receive a line, without its end; empty where the other end has left and that is allowed."""
        line = b""
        while not line.endswith(b"\n"):
            # Looked at first: what follows the line belongs to the copy.
            seen = self.connection.recv(_LOOK_BYTES, socket.MSG_PEEK)
            if not seen or len(line) > _MAX_LINE_BYTES:
                if must or line:
                    raise ConnectionError("the other end left in the middle of a line")
                return b""
            line += self.take(seen.find(b"\n") + 1 or len(seen))
        return line[:-1]

    def take(self, num_bytes: int) -> bytes:
        """Receive exactly so many bytes."""
        content = bytearray(num_bytes)
        self.take_into(memoryview(content))
        return bytes(content)

    def take_into(self, memory: memoryview) -> None:
        """Fill the memory with the next bytes. Raises ConnectionError where the other end leaves before."""
        while len(memory):
            count = self.connection.recv_into(memory)
            if count == 0:
                raise ConnectionError("the other end left in the middle of a copy")
            memory = memory[count:]

    def send_copy(self, place: CopyPlace, record: bytes) -> bool:
        """Send record and bytes, and whether they were of one copy to the end; return that."""
        self.connection.sendall(record)
        with place.content.open("rb") as content:
            sent = self.connection.sendfile(content, count=place.copy.num_bytes)
        if sent != place.copy.num_bytes:
            raise ConnectionError("the copy was cut off while it was sent")
        is_good = place.is_unchanged()
        self.connection.sendall(_GOOD if is_good else _TORN)
        return is_good

    def take_copy(self, store: CopyStore, where: str, copy: Copy, record_bytes: int) -> bool:
        """Receive what `send_copy` sends; return whether it is there now. Raises OSError without room."""
        if not 0 < record_bytes <= _MAX_RECORD_BYTES:
            raise ConnectionError(f"a record of {record_bytes} bytes")
        record = self.take(record_bytes)
        if copy_of(record.split(b"\n", 1)[0]) != copy:
            raise ConnectionError("the record is that of another copy")
        incoming = store.receive(where, copy)
        self.take_into(memoryview(incoming.memory)[: copy.num_bytes])
        is_good = self.take(1) == _GOOD
        if is_good:
            incoming.commit(record)
        return is_good


def connected(address: Address, secret: str) -> CopyConnection:
    connection = socket.create_connection((address.host, address.port), WAIT_S)
    try:
        peer = CopyConnection(connection, secret)
        peer.await_greeting()
    except BaseException:
        connection.close()
        raise
    return peer


# The server's: one neighbour sends, some nodes fetch.
_MAX_CONNECTIONS = 16
# How often a sender looks for new copies where no rank announces one.
_LOOK_S = 1.0
_LONGEST_PAUSE_S = 30.0
_FETCHES_AT_ONCE = 4


class CopyServer:
    """Takes the neighbour's copies and gives copies to who fetches them, in threads of its own."""

    def __init__(self, store: CopyStore, host: str, secret: str) -> None:
        """Listen on a free port of `host`, an address of this node. Raises OSError."""
        self._store = store
        self._secret = secret
        self._socket = socket.create_server((host, 0), backlog=_MAX_CONNECTIONS)
        self._attempt: int | None = None
        self._connections: set[socket.socket] = set()
        self._is_keeping = threading.Lock()
        self._is_closed = False
        threading.Thread(target=self._accept, name="copies", daemon=True).start()

    @property
    def address(self) -> Address:
        """Where the other nodes reach it."""
        host, port = self._socket.getsockname()[:2]
        return Address(host, port)

    def expect(self, attempt: int | None) -> None:
        """From now on keep copies of this attempt alone: a lost node may still send an older one's."""
        self._attempt = attempt

    def close(self) -> None:
        """Listen no more, and end what is under way."""
        self._is_closed = True
        for connection in (self._socket, *self._connections.copy()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_LOOK_S)  # out of descriptors, perhaps
                continue
            if len(self._connections) >= _MAX_CONNECTIONS:
                connection.close()
                continue
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=[connection], name="copies", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            peer = CopyConnection(connection, self._secret)
            peer.greet()
            # Between two copies a neighbour may be silent as long as it likes.
            while (request := peer.next_request()) is not None:
                self._answer(peer, request)
                connection.settimeout(None)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                if not connection.recv(1, socket.MSG_PEEK):
                    return
                connection.settimeout(WAIT_S)
        except (OSError, ValueError, KeyError, TypeError):
            # Whoever asked learns it by the end of the connection, and asks again or elsewhere.
            return
        finally:
            self._connections.discard(connection)
            connection.close()

    def _answer(self, peer: CopyConnection, request: dict[str, Any]) -> None:
        if request["verb"] == "list":
            peer.answer(copies=[copy.to_json() for copy in self._store.held()])
            return
        if request["verb"] == "put":
            copy = copy_of(json.dumps(request["copy"]).encode())
            if copy.attempt != self._attempt:
                raise ConnectionError("a copy of another attempt")
            record_bytes = int(request["record_bytes"])
            # A connection that broke may still be waiting for the rest of its copy.
            if not self._is_keeping.acquire(timeout=2 * WAIT_S):
                raise ConnectionError("another copy is on its way")
            try:
                peer.answer(is_kept=peer.take_copy(self._store, KEPT, copy, record_bytes))
            finally:
                self._is_keeping.release()
            return
        place = self._store.find(request["rank"], request["step"], request["attempt"])
        if place is None:
            peer.answer(is_there=False)
            return
        record = place.record.read_bytes()
        peer.answer(is_there=True, copy=place.copy.to_record(), record_bytes=len(record))
        peer.send_copy(place, record)


class CopyPusher:
    """Sends each new copy of this node's ranks to a neighbour, in a thread. Whole steps, the newest first."""

    def __init__(
        self,
        store: CopyStore,
        ranks: range,
        attempt: int,
        neighbour: Address,
        secret: str,
        *,
        begun: Callable[[], None] = lambda: None,
        elsewhere: Callable[[], Address | None] = lambda: None,
    ) -> None:
        """`begun` is called once, when the attempt's first copies are there: all its ranks train by then.

        `elsewhere` is asked after a failure where the copies go from then on; None: where they went. Both
        are called from the thread.
        """
        self._store, self._ranks, self._attempt = store, ranks, attempt
        self._neighbour, self._secret = neighbour, secret
        self._begun, self._elsewhere = begun, elsewhere
        self._peer: CopyConnection | None = None
        self._is_closed = False
        self._failures = 0
        self._has_begun = False
        # The newest step that the neighbour has, what sending it took, and what went wrong last.
        self.pushed_step: int | None = None
        self.push_s: float | None = None
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._follow, name="copies' sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send nothing more; waits a moment for the thread."""
        self._is_closed = True
        self._hang_up()
        self._store.wake()
        self._thread.join(1.0)

    def _follow(self) -> None:
        retry_at = 0.0
        while not self._is_closed:
            self._store.await_new_copy(_LOOK_S)
            places = self._newest() if not self._is_closed and time.monotonic() >= retry_at else []
            if not places:
                continue
            if not self._has_begun:
                self._has_begun = True
                self._begun()
            try:
                self._push(places)
                self._failures, self.problem = 0, None
            except (OSError, ValueError, KeyError) as error:
                self._hang_up()
                self._failures += 1
                self.problem = str(error) or type(error).__name__
                retry_at = time.monotonic() + min(2.0**self._failures, _LONGEST_PAUSE_S)

    def _newest(self) -> list[CopyPlace]:
        """Return the copies of the newest step that all ranks here have, where the neighbour lacks it."""
        of_step: dict[int, dict[int, CopyPlace]] = {}
        for place in self._store.places(OWN):
            if place.copy.attempt == self._attempt and place.copy.rank in self._ranks:
                of_step.setdefault(place.copy.step, {})[place.copy.rank] = place
        complete = [step for step, copies in of_step.items() if len(copies) == len(self._ranks)]
        step = max(complete, default=None)
        if step is None or (self.pushed_step is not None and step <= self.pushed_step):
            return []
        return list(of_step[step].values())

    def _push(self, places: list[CopyPlace]) -> None:
        began = time.monotonic()
        if self._peer is None:
            if self._failures:
                self._neighbour = self._elsewhere() or self._neighbour
            self._peer = connected(self._neighbour, self._secret)
        peer = self._peer
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                record = place.record.read_bytes()
                peer.ask(verb="put", copy=place.copy.to_record(), record_bytes=len(record))
                peer.send_copy(place, record)
                if peer.reply()["is_kept"]:
                    continue
            # A rank has begun to write over it: the next copy is whole again.
            return
        self.pushed_step, self.push_s = places[0].copy.step, time.monotonic() - began

    def _hang_up(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)
            peer.connection.close()


def bring_copies(
    store: CopyStore, ranks: range, step: int, attempt: int, sources: Mapping[int, Address], secret: str
) -> None:
    """Bring the copies of a step to where this node's `ranks` look for them: those of `sources`, by rank,
    from other nodes, some at a time, others from those that this node keeps for a neighbour. Raises
    LauncherError where one is not to be had.
    """
    with ThreadPoolExecutor(_FETCHES_AT_ONCE, thread_name_prefix="copies") as pool:
        fetched = [
            pool.submit(_fetch, store, rank, sources[rank], step, attempt, secret)
            for rank in ranks
            if not store.adopt(rank, step, attempt) and rank in sources
        ]
        for future in fetched:
            future.result()


def _fetch(store: CopyStore, rank: int, source: Address, step: int, attempt: int, secret: str) -> None:
    try:
        peer = connected(source, secret)
        with peer.connection:
            peer.ask(verb="get", rank=rank, step=step, attempt=attempt)
            answer = peer.reply()
            if not answer["is_there"]:
                raise ConnectionError("it has no such copy any more")
            copy = copy_of(json.dumps(answer["copy"]).encode())
            if not peer.take_copy(store, OWN, copy, int(answer["record_bytes"])):
                raise ConnectionError("the copy changed while it was read")
    except (OSError, ValueError, KeyError) as error:
        raise LauncherError(
            f"rank {rank}'s copy of step {step} cannot be fetched from {source.host}:{source.port}: {error}"
        ) from error


# A node agent's part in the copies, from a job's start to its end, over any number of attempts. The agents
# decide which step training goes on from and who fetches what.


@dataclass(frozen=True)
class NodeCopyPlan:
    """This node's part in an attempt: its own ranks, where their copies go, and whose come here.

    `neighbour` is the address of the next node, None where there is no other node; `kept` are the
    ranks of the node before this one. A spare has no ranks of its own, and may be the neighbour; `elsewhere`
    is asked, from another thread, for an address where the neighbour takes no more.
    """

    attempt: int
    own: range
    neighbour: Mapping[str, Any] | None = None
    kept: range = range(0)
    elsewhere: Callable[[], Mapping[str, Any] | None] = lambda: None


class NodeCopies:
    """One agent's store of copies, server and sender, used from its own thread. Close it at the run's end."""

    def __init__(self, run: str, host: str, address: str, secret: Path) -> None:
        """Open the folder and listen on `address`; `secret` is a file that all agents of the job share.

        Raises LauncherError where either cannot be done: the run then has its checkpoints alone.
        """
        self._store = open_copy_store(run, host)
        try:
            self._secret = shared_secret(secret)
            self._server = CopyServer(self._store, address, self._secret)
        except OSError as error:
            self._store.close()
            raise LauncherError(f"copies in memory cannot be exchanged: {error}") from error
        self._pusher: CopyPusher | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What the environment of the ranks has to say."""
        return self._store.environment

    @property
    def address(self) -> dict[str, Any]:
        """Where the other nodes reach this one, as JSON."""
        return asdict(self._server.address)

    def held(self) -> list[dict[str, Any]]:
        """Return the complete copies that lie here, as JSON."""
        return [copy.to_json() for copy in self._store.held()]

    def held_at(self, address: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the complete copies on the node with this address, as JSON. Raises LauncherError."""
        source = Address(**address)
        try:
            peer = connected(source, self._secret)
            with peer.connection:
                peer.ask(verb="list")
                return list(peer.reply()["copies"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            where = f"{source.host}:{source.port}"
            raise LauncherError(f"{where} does not say which copies it has: {error}") from error

    def fetch(self, own: range, step: int, attempt: int, sources: Mapping[int, Mapping[str, Any]]) -> None:
        """Bring the copies of a step to this node's ranks: those of `sources` (addresses by rank) from there.

        Raises LauncherError where one cannot be had; the ranks then agree to begin with the checkpoint.
        """
        addresses = {rank: Address(**source) for rank, source in sources.items()}
        bring_copies(self._store, own, step, attempt, addresses, self._secret)

    def begin(self, part: NodeCopyPlan) -> None:
        """Keep and send copies of an attempt from now on. Before its ranks are started."""
        self.end()
        self._server.expect(part.attempt)
        if part.neighbour is not None:
            self._pusher = CopyPusher(
                self._store,
                part.own,
                part.attempt,
                Address(**part.neighbour),
                self._secret,
                begun=lambda: self._store.keep_only(part.own, part.kept),
                elsewhere=lambda: _address(part.elsewhere()),
            )

    def end(self) -> dict[str, Any]:
        """Send no more, and take no more from the neighbour; return how it went, as evidence."""
        self._server.expect(None)
        pusher, self._pusher = self._pusher, None
        if pusher is None:
            return {}
        pusher.close()
        return {"pushed_step": pusher.pushed_step, "push_s": pusher.push_s, "push_problem": pusher.problem}

    def close(self) -> None:
        """End all of it and give the memory back."""
        self.end()
        self._server.close()
        self._store.close()


def _address(record: Mapping[str, Any] | None) -> Address | None:
    return None if record is None else Address(**record)
