"""Decides which nodes are silent, from beats that stand still and hosts that do not answer.

Two limits. A beat that stands still for the whole time-out is one of a lost node, whatever else is known.
Much earlier, after twice the longest pause that any beat made lately and no less than three seconds, a node
is lost whose host does not answer over the network either: storage that stalls for one node and a busy
machine delay beats, but the kernel of a host that lives refuses a connection at once. Hosts behind something
that drops such connections are found out while their beats move, and have the long limit alone.

Silence is counted in the watcher's own beats, those that were really written: while the file system stands
still for everybody, or the watcher itself does, nobody is silent.
"""

from __future__ import annotations

import errno
import math
import socket
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

# A host that does not answer is lost after so long at the earliest.
LEAST_S = 3.0
# How often the longest pause of late must fit into a silence.
_SAFETY = 2.0
_LATELY_S = 60.0
# After so long a host is asked, and again while its beat stands still; it must miss so many in a row.
_ASK_AFTER_S = 1.0
_ASK_EVERY_S = 0.5
_MISSES = 2
_ANSWER_TIMEOUT_S = 1.0
_ASKED_AT_ONCE = 16
# What the network says of a host that is not there; every other error is this host's own.
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


def answers(address: str, port: int) -> bool | None:
    """Tell whether a host answers at all, be it that nobody listens there; None where that is not known.
    Takes a second at most.
    """
    try:
        with socket.create_connection((address, port), _ANSWER_TIMEOUT_S):
            return True
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    except TimeoutError:
        return False
    except OSError as error:
        return False if error.errno in _NO_ANSWER else None


@dataclass
class _Watched:
    """A node's beat as it was read last, and what its host said."""

    value: bytes | None
    # The watcher's own beats when it was seen to move, and when it was last seen not to have moved since.
    moved_at: int
    still_at: int
    # Whether the host answered while its beat moved; None: that is not known.
    is_answering: bool | None = None
    # How many questions in a row it left without an answer since its beat stands still.
    num_misses: int = 0
    question: Future[bool | None] | None = None
    asked_at: int = 0
    # How often in a row the beat could not be read.
    num_unread: int = 0


class SilenceWatch:
    """One agent's watch over the beats of others. All from one thread; `ask` is called from threads of its
    own, and tells whether a node's host answers.
    """

    def __init__(self, timeout_s: float, beat_s: float, ask: Callable[[int], bool | None]) -> None:
        """`timeout_s`: the long limit; `beat_s`: how often a beat moves."""
        self._timeout_s = timeout_s
        self._beat_s = beat_s
        self._ask = ask
        self._watched: dict[int, _Watched] = {}
        # Pauses of all nodes that are longer than a beat's: when they ended, and how long they were.
        self._pauses: deque[tuple[int, float]] = deque()
        self._threads: ThreadPoolExecutor | None = None

    def see(self, node: int, value: bytes | None, now: int, *, is_lost: bool = False) -> None:
        """Take note of a beat that was just read (None: it could not be); `now`: the watcher's own beats.

        A node counts from the first time that it is named, and is silent at once where it `is_lost`: it is
        known that nobody need wait for this very beat to move.
        """
        watched = self._watched.get(node)
        if watched is None or is_lost:
            waited = math.floor(self._timeout_s / self._beat_s) + 1 if is_lost else 0
            self._watched[node] = _Watched(value, now - waited, now)
            return
        watched.num_unread = watched.num_unread + 1 if value is None else 0
        if value is None or value == watched.value:
            # One that could not be read once says nothing: after a time in which nobody looked, all of that
            # would count as silence.
            if watched.num_unread != 1:
                watched.still_at = now
            return
        # What is known of the pause: while nobody looked the beat may have moved.
        pause_s = (watched.still_at - watched.moved_at) * self._beat_s
        # An agent that was started again was not late: it was not there.
        is_same = watched.value is not None and value.split()[0] == watched.value.split()[0]
        if is_same and pause_s > self._beat_s:
            self._pauses.append((now, pause_s))
        watched.value, watched.num_misses = value, 0
        watched.moved_at = watched.still_at = now
        self._take_answer(watched)
        if watched.is_answering is None and watched.question is None:
            self._begin_to_ask(node, watched, now)

    def last_of(self, node: int) -> bytes | None:
        """Return a node's beat as it was last read; None where it never was."""
        watched = self._watched.get(node)
        return None if watched is None else watched.value

    def is_silent(self, node: int, now: int) -> bool:
        """Tell whether a node is lost, as far as is known at `now`."""
        watched = self._watched.get(node)
        if watched is None:
            return False
        # As of the last reading: while nobody looks nobody falls silent.
        still_s = (watched.still_at - watched.moved_at) * self._beat_s
        self._take_answer(watched)
        is_to_be_asked = still_s >= _ASK_AFTER_S and bool(watched.is_answering) and watched.question is None
        if is_to_be_asked and (now - watched.asked_at) * self._beat_s >= _ASK_EVERY_S:
            self._begin_to_ask(node, watched, now)
        return still_s > self._timeout_s or (self._is_mute(watched) and still_s >= self.limit_s(now))

    def is_gone(self, node: int, now: int) -> bool:
        """Tell whether a node is silent and its host does not answer: not its agent alone is lost."""
        watched = self._watched.get(node)
        return watched is not None and self._is_mute(watched) and self.is_silent(node, now)

    @staticmethod
    def _is_mute(watched: _Watched) -> bool:
        return watched.num_misses >= _MISSES

    def limit_s(self, now: int) -> float:
        """Return after how long a node is lost whose host does not answer, in seconds."""
        while self._pauses and (now - self._pauses[0][0]) * self._beat_s > _LATELY_S:
            self._pauses.popleft()
        longest_s = max((pause_s for _, pause_s in self._pauses), default=0.0)
        return min(self._timeout_s, max(LEAST_S, _SAFETY * longest_s))

    def _begin_to_ask(self, node: int, watched: _Watched, now: int) -> None:
        self._threads = self._threads or ThreadPoolExecutor(_ASKED_AT_ONCE, "asks-hosts")
        watched.question, watched.asked_at = self._threads.submit(self._ask, node), now

    @staticmethod
    def _take_answer(watched: _Watched) -> None:
        if watched.question is None or not watched.question.done():
            return
        answer, watched.question = watched.question.result(), None
        if watched.is_answering is None:
            watched.is_answering = answer
        elif watched.asked_at > watched.moved_at and answer is not None:
            watched.num_misses = 0 if answer else watched.num_misses + 1

    def close(self) -> None:
        """Ask nobody any more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
