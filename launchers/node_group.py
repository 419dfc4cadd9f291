"""How the agents of one start of a job know each other, agree on what comes next, and notice who is gone.

Each agent makes a `NodeGroup`. They communicate by files in a folder that all nodes share:

member-003.json        who the agent of node 3 is: host, address, what it offers
beat-003               a counter that moves while that agent lives; clocks are never compared
                       (whose stands still for too long: launchers/silence.py)
lost-003.json          that counter as it stood when node 3 was found silent: who comes later need not wait
                       as long again
orders/0002.json       what all are to do next, numbered without gaps; taken by link(2), so that there is one
orders/0002.broken     left by the first agent that saw that order broken
end-0002-003.json      how node 3's part of order 2 ended
secret                 what only this job's processes know: who does not is none of them
ended-003.json         that node 3's agent cannot come, and why; told by whoever started the agents
room-003-0             zeros, which make room for a report and an order where the disk is full later

The leader, who writes the orders, is the lowest node whose beat moves. Two agents may believe for a moment
that they lead: an order number is taken once, and what a leader needs is in these files, so that any agent
can go on where another one died. The agents say what an order means (`action`, `facts`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers import LauncherError
from launchers.channel import shared_secret
from launchers.processes import waits_for_a_device
from launchers.silence import SilenceWatch, answers

# One small write a second and node is what a shared file system bears from thousands of nodes; some dozen
# nodes may write twice.
_BEAT_S, _BEAT_OF_FEW_S = 1.0, 0.5
_FEW_NODES = 64
# How many nodes' beats the leader reads in a second.
_BEATS_READ_PER_S = 500
# An agent that makes no progress for so many time-outs stands still, and its beat with it; never less than a
# tool that reads a rank's stacks may take for each rank of a node.
_STALL_TIMEOUTS = 12
_LEAST_STALL_S = 120.0
# In the place of the counter, and as long: the beat of an agent that stepped down. And how long it waits for
# its own thread that beats, which storage may hold.
_LAST_BEAT = "stepdown"
_LAST_BEAT_S = 5.0
# A full disk still takes what is written over bytes that lie there: an agent keeps so many files of this size
# for its next report and order, whose drafts need neither blocks nor inodes then.
_NUM_ROOMS, _ROOM_BYTES = 2, 1 << 14
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What storage that fails over may take beyond that: the ranks may train on meanwhile.
_STORAGE_S = 900.0


@dataclass(frozen=True)
class GroupMember:
    """One node's agent. A node whose agent was started again has another incarnation."""

    node: int
    host: str
    address: str
    incarnation: str
    pid: int
    # What it offers and what it measured of its node, as JSON.
    facts: Mapping[str, Any] = field(default_factory=dict)
    # Taken, and nobody listens there: a host that lives refuses connections to it. 0: it has none.
    deaf_port: int = 0


@dataclass(frozen=True)
class Order:
    """What the agents are to do: `action` and `facts` are the caller's; `nodes` take part, in rank order."""

    number: int
    action: str
    nodes: tuple[int, ...] = ()
    # By node, as text: JSON's keys are. A later incarnation of a node's agent has no part in it.
    incarnations: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def is_for(self, member: GroupMember) -> bool:
        """Tell whether this very agent has a part in it."""
        return member.node in self.nodes and self.incarnations.get(str(member.node)) == member.incarnation


class NodeGroup:
    """One agent's view of the others. `join` first, `leave` at last; all else from the agent's own thread."""

    def __init__(
        self,
        folder: Path,
        node: int,
        num_nodes: int,
        timeout_s: float,
        stalled: Callable[[], None] = lambda: None,
        *,
        may_grow: bool = False,
    ) -> None:
        """`num_nodes`: how many there are to be; others may come later where it `may_grow`. `timeout_s`: a
        node whose beat stands still for so long is silent, and sooner where its host does not answer either.
        `stalled` is called, from another thread, when this agent has made no `progress` for so long that its
        beat stands still. Raises LauncherError where the folder cannot be made.
        """
        self.folder = folder
        self._orders = folder / "orders"
        self.node = node
        # The highest number of a node that has come or is to come, and one.
        self.num_nodes = num_nodes
        self._may_grow = may_grow
        self._beat_s = _BEAT_OF_FEW_S if num_nodes <= _FEW_NODES else _BEAT_S
        # Those that were really written: what silence is counted in.
        self._own_beats = 0
        self._last_order: Order | None = None
        # How often the beats of others are read.
        self.look_s = max(self._beat_s, num_nodes / _BEATS_READ_PER_S)
        self._watch = SilenceWatch(timeout_s, self._beat_s, self._host_answers)
        self._looked_at = -math.inf
        self._deaf: socket.socket | None = None
        # Those that `gone` has named and that are still gone.
        self._gone: set[int] = set()
        # The beats at which nodes fell silent, as this agent told of them.
        self._told: dict[int, bytes] = {}
        self._is_over = threading.Event()
        self._beats: threading.Thread | None = None
        self._has_stepped_down = False
        self._stall_s = max(_LEAST_STALL_S, _STALL_TIMEOUTS * timeout_s)
        self._stalled = stalled
        # How often it was time for a beat, and by when of that the agent's own thread must have made
        # progress: where the whole job is suspended neither moves. Never before it has said so once.
        self._num_turns = 0
        self._progress_due = math.inf
        self.member: GroupMember | None = None
        try:
            self._orders.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LauncherError(f"cannot make {folder}: {error.strerror}") from error

    # Who is there.

    def join(self, host: str, address: str, facts: Mapping[str, Any]) -> GroupMember:
        """Say who this node's agent is, and let its beat move from now on. Raises LauncherError."""
        port = self._take_deaf_port(address) if self.num_nodes > 1 or self._may_grow else 0
        who = (secrets.token_hex(6), os.getpid(), dict(facts), port)
        self.member = GroupMember(self.node, host, address, *who)
        try:
            self._beat(_counted(0))
            self._write(self._member_file(self.node), dataclasses.asdict(self.member))
        except OSError as error:
            raise LauncherError(f"cannot write into {self.folder}: {error.strerror}") from error
        self._keep_room()
        self._beats = threading.Thread(target=self._keep_beating, name="beat", daemon=True)
        self._beats.start()
        return self.member

    def _take_deaf_port(self, address: str) -> int:
        """Take a port of this host on which nobody listens; 0 where the address has none to give."""
        self._deaf = socket.socket()
        try:
            self._deaf.bind((address, 0))
        except OSError:
            return 0
        return int(self._deaf.getsockname()[1])

    def _host_answers(self, node: int) -> bool | None:
        """Tell whether a node's host answers over the network, None where that is not known. From any
        thread; takes a second at most.
        """
        member = self.member_of(node)
        return answers(member.address, member.deaf_port) if member is not None and member.deaf_port else None

    @property
    def secret_file(self) -> Path:
        """Where the secret lies, once an agent has asked for it; of use to this job's own processes."""
        return self.folder / "secret"

    def secret(self) -> str:
        """Return what only this job's own processes know, the same on all nodes. Raises OSError."""
        return shared_secret(self.secret_file)

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Change what this agent says of itself. Raises OSError."""
        assert self.member is not None
        self.member = dataclasses.replace(self.member, facts={**self.member.facts, **facts})
        self._write(self._member_file(self.node), dataclasses.asdict(self.member))

    def progress(self) -> None:
        """Say that the agent's own thread goes on: called again and again, or its beat stands still."""
        self.allow(self._stall_s)

    def allow(self, seconds: float) -> None:
        """Let what the agent's own thread does next take so long; the next `progress` ends that."""
        self._progress_due = self._num_turns + max(seconds, self._stall_s) / self._beat_s

    def leave(self) -> None:
        """Let the beat stand still and take the name off the list; the others' orders stay."""
        self._is_over.set()
        self._watch.close()
        if self._deaf is not None:
            self._deaf.close()
        if self._has_stepped_down:
            return
        for file in (self._member_file(self.node), self._beat_file(self.node), *self._rooms()):
            with contextlib.suppress(OSError):
                file.unlink()

    def step_down(self, facts: Mapping[str, Any]) -> None:
        """Let the others go on at once as if this node were lost: its last beat says so. Its name stays on
        the list, with `facts`, the last that it says of itself. Raises OSError, and is a member still.
        """
        assert self._beats is not None
        self.tell(facts)
        self._has_stepped_down = True
        self._is_over.set()
        self._beats.join(_LAST_BEAT_S)
        # Where that thread may still write, and where nothing can be written, it is silent after a while.
        if not self._beats.is_alive():
            with contextlib.suppress(OSError):
                self._beat(_LAST_BEAT)

    def _keep_beating(self) -> None:
        count = 0
        while not self._is_over.wait(self._beat_s):
            self._num_turns += 1
            # An agent gets more turns whose thread waits for storage that does not answer.
            storage_s = _STORAGE_S if waits_for_a_device(os.getpid()) else 0.0
            if self._num_turns > self._progress_due + storage_s / self._beat_s:
                # What moves by itself would say nothing of an agent that hangs.
                self._stalled()
                continue
            count += 1
            # A file system that fails now may answer the next time; if not, the others go on without us.
            with contextlib.suppress(OSError):
                self._beat(_counted(count))
                self._own_beats = count

    def _beat(self, word: str) -> None:
        assert self.member is not None
        # Opened and closed each time: that is what makes NFS send it, and show it to whoever opens it.
        # Written over what was there, which is as long: whoever reads meanwhile finds no empty file.
        file = os.open(self._beat_file(self.node), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(file, f"{self.member.incarnation} {word}\n".encode())
        finally:
            os.close(file)

    def members(self) -> dict[int, GroupMember]:
        """Return who has joined and not left, by node."""
        try:
            names = [entry.name for entry in os.scandir(self.folder) if entry.name.startswith("member-")]
        except OSError:
            return {}
        members = [member for name in names if (member := _member(self.folder / name)) is not None]
        self.num_nodes = max(self.num_nodes, *(member.node + 1 for member in members), 1)
        return {member.node: member for member in sorted(members, key=lambda member: member.node)}

    def tell_ended(self, node: int, host: str, how: str) -> None:
        """Say that what was to be a node's agent has ended, and how. Raises OSError."""
        self._write(self._ended_file(node), {"host": host, "how": how})

    def never_come(self) -> dict[str, str]:
        """Return the hosts whose agents ended before they joined, by their nodes' order, and how."""
        found = {}
        for file in sorted(self.folder.glob("ended-*.json")):
            record, node = _read(file), file.stem.removeprefix("ended-")
            if record is not None and node.isdecimal() and not self._member_file(int(node)).exists():
                found[str(record.get("host"))] = str(record.get("how"))
        return found

    def member_of(self, node: int) -> GroupMember | None:
        """Return who has joined on one node and not left; None where nobody has."""
        return _member(self._member_file(node))

    def leader(self) -> int:
        """Return the lowest node that has joined and is not silent. It looks no further than that one."""
        silent = []
        for node in range(self.node):
            if self._member_file(node).exists():
                if not self._is_silent(node):
                    return node
                silent.append(node)
        self._tell_of_silent(silent)
        return self.node

    @property
    def leads(self) -> bool:
        return self.leader() == self.node

    def silent(self, nodes: Iterable[int]) -> list[int]:
        """Return those of `nodes` whose beat has stood still, or was never there, for too long.

        A node counts from the first call that names it. Reads at most some hundred beats a second.
        """
        now = time.monotonic()
        is_due = now - self._looked_at >= self.look_s
        self._looked_at = now if is_due else self._looked_at
        found = [node for node in nodes if node != self.node and self._is_silent(node, is_read=is_due)]
        self._tell_of_silent(found)
        return found

    def gone(self, nodes: Iterable[int]) -> list[GroupMember]:
        """Return those of `nodes` that are silent and whose hosts do not answer either, each once until it is
        back. `nodes`: all that are silent.
        """
        found = {node for node in nodes if self._watch.is_gone(node, self._own_beats)}
        new, self._gone = found - self._gone, found
        return [member for node in sorted(new) if (member := self.member_of(node)) is not None]

    def _is_silent(self, node: int, *, is_read: bool = True) -> bool:
        if is_read:
            value = None
            with contextlib.suppress(OSError):
                value = self._beat_file(node).read_bytes() or None
            is_lost = value is not None and self._is_known_lost(node, value)
            self._watch.see(node, value, self._own_beats, is_lost=is_lost)
        return self._watch.is_silent(node, self._own_beats)

    def _is_known_lost(self, node: int, value: bytes) -> bool:
        """Tell whether nobody need wait for this beat to move: the node stepped down, or is looked at for the
        first time and was found silent at that beat before.
        """
        if value.split()[-1:] == [_LAST_BEAT.encode()]:
            return True
        if self._watch.last_of(node) is not None:
            return False
        record = _read(self._lost_file(node))
        return record is not None and record.get("beat") == value.decode(errors="replace")

    def _tell_of_silent(self, nodes: Iterable[int]) -> None:
        """Let agents that come later know of silent nodes."""
        for node in nodes:
            value = self._watch.last_of(node)
            if value is not None and self._told.get(node) != value:
                self._told[node] = value
                # Who is not told waits longer.
                with contextlib.suppress(OSError):
                    self._write(self._lost_file(node), {"beat": value.decode(errors="replace")})

    # What comes next.

    def newest_order(self) -> Order | None:
        """Return the order with the highest number; None before the first.

        One that cannot be read at the moment is none yet: the one before it still holds.
        """
        numbers = [int(name[:4]) for name in self._order_names() if name.endswith(".json")]
        newest = _order(self._orders / f"{max(numbers):04d}.json") if numbers else None
        self._last_order = newest or self._last_order
        return self._last_order

    def publish(self, order: Order) -> bool:
        """Give an order; return False where another agent took its number before. Raises OSError."""
        place = self._orders / f"{order.number:04d}.json"
        draft = self._draft(place, dataclasses.asdict(order), is_needed=True)
        try:
            # Exclusive creation of the whole content at once, on every file system that clusters share.
            os.link(draft, place)
        except FileExistsError:
            # An NFS client that asked twice is told "exists" of its own link.
            return draft.stat().st_nlink > 1
        finally:
            draft.unlink(missing_ok=True)
        return True

    def mark_broken(self, number: int, evidence: Mapping[str, Any]) -> None:
        """Let all agents know that an order cannot be carried out to its end; a full disk is passed over."""
        place = self._orders / f"{number:04d}.broken"
        with contextlib.suppress(OSError):
            if not place.exists():
                self._write(place, {"node": self.node, **evidence})

    def broken(self, number: int) -> dict[str, Any] | None:
        """Return why an order broke; None while it has not. It lists the folder: NFS asks for that afresh."""
        name = f"{number:04d}.broken"
        return (_read(self._orders / name) or {}) if name in self._order_names() else None

    def _order_names(self) -> list[str]:
        try:
            return [entry.name for entry in os.scandir(self._orders) if not entry.name.startswith(".")]
        except OSError:
            return []

    # How it ended.

    def report(self, number: int, record: Mapping[str, Any]) -> None:
        """Say how this node's part of an order ended. Raises OSError."""
        self._write(self._end_file(number, self.node), record, is_needed=True)

    def reports(self, number: int, nodes: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Return what the named nodes said about the end of their part, of those that did."""
        try:
            names = {entry.name for entry in os.scandir(self.folder)}
        except OSError:
            return {}
        files = {node: self._end_file(number, node) for node in nodes}
        records = {node: _read(file) for node, file in files.items() if file.name in names}
        return {node: record for node, record in records.items() if record is not None}

    def _member_file(self, node: int) -> Path:
        return self.folder / f"member-{node:03d}.json"

    def _beat_file(self, node: int) -> Path:
        return self.folder / f"beat-{node:03d}"

    def _lost_file(self, node: int) -> Path:
        return self.folder / f"lost-{node:03d}.json"

    def _end_file(self, number: int, node: int) -> Path:
        return self.folder / f"end-{number:04d}-{node:03d}.json"

    def _ended_file(self, node: int) -> Path:
        return self.folder / f"ended-{node:03d}.json"

    def _rooms(self) -> list[Path]:
        return [self.folder / f"room-{self.node:03d}-{number}" for number in range(_NUM_ROOMS)]

    def _keep_room(self) -> None:
        """Keep room for what is to be written when the disk is full; where it is already, do without."""
        for room in self._rooms():
            try:
                if not room.exists():
                    _write_durably(room, "0" * _ROOM_BYTES)
            except OSError:
                # What there is of it would not suffice.
                with contextlib.suppress(OSError):
                    room.unlink()
                return

    def _free_room(self) -> Path | None:
        # One that has two names was given as an order by an agent that died before it took this one back.
        rooms = (room for room in self._rooms() if room.exists() and room.stat().st_nlink == 1)
        return next(rooms, None)

    def _write(self, place: Path, record: Mapping[str, Any], *, is_needed: bool = False) -> None:
        draft = self._draft(place, record, is_needed=is_needed)
        try:
            draft.replace(place)
        finally:
            draft.unlink(missing_ok=True)

    def _draft(self, place: Path, record: Mapping[str, Any], *, is_needed: bool) -> Path:
        """Write what is to stand at `place` into another file; what `is_needed` on a full disk into one that
        was kept for that. Raises OSError.
        """
        draft = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
        text = json.dumps(record) + "\n"
        try:
            _write_durably(draft, text)
        except OSError as error:
            draft.unlink(missing_ok=True)
            # Whoever reads it knows no draft.
            error.filename = str(place)
            is_full = is_needed and error.errno in _FULL
            room = self._free_room() if is_full and len(text.encode()) <= _ROOM_BYTES else None
            if room is None:
                raise
            try:
                _write_over(room, text)
            except OSError as full:
                # On copy-on-write file systems what a file holds takes new room, too.
                full.filename = str(place)
                raise
            return room
        if is_needed:
            self._keep_room()
        return draft


def _counted(count: int) -> str:
    return f"{count:08d}"


def _write_durably(place: Path, text: str) -> None:
    with place.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _write_over(place: Path, text: str) -> None:
    """Let a file hold this text, which is no longer than what it holds."""
    with place.open("r+") as file:
        file.write(text)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _read(file: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _member(file: Path) -> GroupMember | None:
    record = _read(file)
    try:
        return None if record is None else GroupMember(**record)
    except TypeError:
        return None


def _order(file: Path) -> Order | None:
    record = _read(file)
    try:
        return None if record is None else Order(**{**record, "nodes": tuple(record["nodes"])})
    except (TypeError, KeyError):
        return None
