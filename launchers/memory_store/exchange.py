"""How copies get from node to node: a server on each, a thread that sends new ones to a neighbour, a fetch.

Training must not wait for any of it: every wait has a limit, a sender that is late skips to the newest copy,
and one whose copy changed while it was read says so at its end. `NodeCopies` is what an agent uses of it.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from launchers import LauncherError
from launchers.channel import BLOCK_BYTES, WAIT_S, Channel, Gate
from launchers.memory_store.store import KEPT, OWN, Copy, CopyPlace, CopyStore, copy_of, open_copy_store

_PURPOSE = "copies"
_MAX_RECORD_BYTES = 1 << 27
_GOOD, _TORN = b"1", b"0"


@dataclass(frozen=True)
class Address:
    """Where a node's server listens."""

    host: str
    port: int


def _connected(address: Address, secret: str) -> Channel:
    return Channel.connect(address.host, address.port, secret, _PURPOSE)


def _send_copy(channel: Channel, place: CopyPlace, record: bytes) -> None:
    """Send record and bytes, and whether they were of one copy to the end."""

    def blocks() -> Iterator[bytes]:
        yield record
        left = place.copy.num_bytes
        with place.content.open("rb") as content:
            while left:
                block = content.read(min(left, BLOCK_BYTES))
                if not block:
                    raise ConnectionError("the copy was cut off while it was sent")
                left -= len(block)
                yield block
        yield _GOOD if place.is_unchanged() else _TORN

    channel.send_content(blocks())


def _take_copy(channel: Channel, store: CopyStore, where: str, copy: Copy, record_bytes: int) -> bool:
    """Receive what `_send_copy` sends; return whether it is there now. Raises OSError without room."""
    if not 0 < record_bytes <= _MAX_RECORD_BYTES:
        raise ConnectionError(f"a record of {record_bytes} bytes")
    incoming = store.receive(where, copy)
    record, is_good = bytearray(record_bytes), bytearray(1)
    content = memoryview(incoming.memory)[: copy.num_bytes]
    channel.take_content(memoryview(record), content, memoryview(is_good))
    if copy_of(bytes(record).split(b"\n", 1)[0]) != copy:
        raise ConnectionError("the record is that of another copy")
    if is_good != _GOOD:
        return False
    incoming.commit(bytes(record))
    return True


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
        self._attempt: int | None = None
        self._is_keeping = threading.Lock()
        self._gate = Gate(host, secret, _PURPOSE, self._serve, max_served=_MAX_CONNECTIONS)

    @property
    def address(self) -> Address:
        """Where the other nodes reach it."""
        return Address(*self._gate.place)

    def expect(self, attempt: int | None) -> None:
        """From now on keep copies of this attempt alone: a lost node may still send an older one's."""
        self._attempt = attempt

    def close(self) -> None:
        """Listen no more, and end what is under way."""
        self._gate.close()

    def _serve(self, channel: Channel) -> None:
        # Between two copies a neighbour may be silent as long as it likes.
        while channel.awaits_message():
            self._answer(channel, channel.receive())

    def _answer(self, peer: Channel, request: dict[str, Any]) -> None:
        if request["verb"] == "list":
            peer.send(copies=[copy.to_json() for copy in self._store.held()])
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
                peer.send(is_kept=_take_copy(peer, self._store, KEPT, copy, record_bytes))
            finally:
                self._is_keeping.release()
            return
        place = self._store.find(request["rank"], request["step"], request["attempt"])
        if place is None:
            peer.send(is_there=False)
            return
        record = place.record.read_bytes()
        peer.send(is_there=True, copy=place.copy.to_record(), record_bytes=len(record))
        _send_copy(peer, place, record)


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
        self._peer: Channel | None = None
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
            self._peer = _connected(self._neighbour, self._secret)
        peer = self._peer
        for place in places:
            with contextlib.suppress(FileNotFoundError):
                record = place.record.read_bytes()
                peer.send(verb="put", copy=place.copy.to_record(), record_bytes=len(record))
                _send_copy(peer, place, record)
                if peer.receive()["is_kept"]:
                    continue
            # A rank has begun to write over it: the next copy is whole again.
            return
        self.pushed_step, self.push_s = places[0].copy.step, time.monotonic() - began

    def _hang_up(self) -> None:
        peer, self._peer = self._peer, None
        if peer is not None:
            peer.close()


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
        peer = _connected(source, secret)
        with contextlib.closing(peer):
            peer.send(verb="get", rank=rank, step=step, attempt=attempt)
            answer = peer.receive()
            if not answer["is_there"]:
                raise ConnectionError("it has no such copy any more")
            copy = copy_of(json.dumps(answer["copy"]).encode())
            if not _take_copy(peer, store, OWN, copy, int(answer["record_bytes"])):
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

    def __init__(self, run: str, host: str, address: str, secret: str) -> None:
        """Open the folder and listen on `address`; all agents of the job know the `secret`.

        Raises LauncherError where either cannot be done: the run then has its checkpoints alone.
        """
        self._store = open_copy_store(run, host)
        try:
            self._secret = secret
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
            peer = _connected(source, self._secret)
            with contextlib.closing(peer):
                peer.send(verb="list")
                return list(peer.receive()["copies"])
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
        """Send no more, and take no more from the neighbour; return how it went, as evidence, with the
        records that say nothing, where there are some.
        """
        self._server.expect(None)
        unreadable = self._store.unreadable()
        problems = {"unreadable_copies": unreadable} if unreadable else {}
        pusher, self._pusher = self._pusher, None
        if pusher is None:
            return problems
        pusher.close()
        sent = {"pushed_step": pusher.pushed_step, "push_s": pusher.push_s, "push_problem": pusher.problem}
        return {**sent, **problems}

    def close(self) -> None:
        """End all of it and give the memory back."""
        self.end()
        self._server.close()
        self._store.close()


def _address(record: Mapping[str, Any] | None) -> Address | None:
    return None if record is None else Address(**record)
