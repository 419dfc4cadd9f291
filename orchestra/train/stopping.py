"""How all ranks agree on one step to stop after, to save by the clock, or to trace the next steps, without
waiting for a device.

Rank 0 alone looks for requests, in a thread, so that a slow file system holds up no step. It answers in
rounds: after a step it starts to broadcast "stop" or "go on" (two integers from host to host, in the
background), and all ranks read that answer after the same later step. The answer also says how many steps
the next round spans: as many as take about half a second, so that a fast run pays for one tiny broadcast in
that time. Where one step takes longer, the answer is sent and read after the same step, so that the run stops
after the very step in which it was asked. Every rank starts and reads the same broadcasts in the same order,
whenever a request comes: no rank waits for one that is not sent. An answer that was waited for took 0.2 ms
between two gloo ranks and 0.6 ms among four (medians; two busy cores), so it costs at most about a thousandth
of a step; asking between rounds takes 0.1 µs. Called by the training loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from checkpointing.checkpoint_errors import FalseWordError
from checkpointing.peers import Peers
from orchestra.run.control import profile_requests, stop_requests
from orchestra.run.control.profile_requests import MOST_RANKS, ProfileRequest
from orchestra.run.control.stop_requests import StopRequest
from orchestra.run.paths import RunDir
from orchestra.run.removal import RemovalCheck

# How often rank 0 looks into the folder of requests.
LOOK_S = 1.0
# For how long a run's records must be away: what is mounted when it is used may be late.
AWAY_S = 30.0
# What a round is to span.
ROUND_S = 0.5


# Of an answer: whether to stop, the next round's span, whether to save, steps to trace, whose request that
# is, ranks that trace.
_STOP, _SPAN, _SAVE, _TRACE, _TOKEN, _RANKS = range(6)
_NO_RANK = -1


@dataclass(frozen=True)
class TraceOrder:
    """The next so many steps are to be traced on these ranks, empty: on all; `token` is the request's."""

    steps: int
    ranks: tuple[int, ...]
    token: str


class RequestWatch:
    """Looks for requests to stop one attempt, or to trace it, once a second, in a thread. *Rank 0 only*.

    A run whose directory was removed or renamed is known to nobody, and no command finds it to cancel it: it
    saves and stops as if it were asked to.
    """

    def __init__(self, run: RunDir, attempt: int) -> None:
        self._run = run
        self._attempt = attempt
        self._is_over = threading.Event()
        self.seen: StopRequest | None = None
        self._removal_check = RemovalCheck(run)
        # Requests to trace that nobody has taken yet, and the tokens of all that were seen.
        self._traces: deque[ProfileRequest] = deque()
        self._tokens: set[str] = set()
        self._thread = threading.Thread(target=self._follow, name="stop requests", daemon=True)

    def start(self) -> None:
        """Look once now, and from now on once a second."""
        self._look()
        self._thread.start()

    def _follow(self) -> None:
        while self.seen is None and not self._is_over.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        # A file system that fails now may answer the next time; the training does not need it here.
        with contextlib.suppress(OSError):
            self.seen = stop_requests.read_request(self._run, self._attempt) or self._removal()
            for request in profile_requests.read_requests(self._run, self._attempt):
                if request.token not in self._tokens:
                    self._tokens.add(request.token)
                    self._traces.append(request)

    def _removal(self) -> StopRequest | None:
        away_s = self._removal_check.away_s(time.monotonic())
        if away_s is None or away_s < AWAY_S:
            return None
        return stop_requests.new_request(self._attempt, stop_requests.REMOVED)

    def take_trace(self) -> ProfileRequest | None:
        """Return the oldest request to trace that was not taken yet."""
        return self._traces.popleft() if self._traces else None

    def close(self) -> None:
        """End the thread; never waits for it."""
        self._is_over.set()


class SaveClock:
    """Says when `every_s` seconds have passed since it last said so, or was made. *Rank 0 only*."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._since = time.monotonic()

    def has_passed(self) -> bool:
        """Return whether a save is due by the clock, and begin anew where it is."""
        now = time.monotonic()
        if now - self._since < self._every_s:
            return False
        self._since = now
        return True


class PieceCheck:
    """Asks before each piece of work that all ranks do between two steps, such as an evaluation, whether a
    stop was asked for meanwhile. About twice a second all ranks wait for rank 0's word.
    """

    def __init__(self, peers: Peers, watch: RequestWatch | None) -> None:
        """`watch` is rank 0's."""
        self._peers = peers
        self._watch = watch
        # Pieces from one word to the next, and how many of them are still to come.
        self._span = self._num_left = 1
        self._said_at = time.monotonic()

    def is_stop_due(self) -> bool:
        """Return whether all ranks are to leave the work before its next piece. *Collective*, before each
        piece, until it was True.
        """
        self._num_left -= 1
        if self._num_left:
            return False
        word = torch.zeros(2, dtype=torch.int64)
        if self._watch is not None:
            now = time.monotonic()
            pace = self._span / max(now - self._said_at, 1e-9)
            self._said_at = now
            word[_STOP] = int(self._watch.seen is not None)
            word[_SPAN] = max(1, min(2 * self._span, int(pace * ROUND_S)))
        if self._peers.world_size > 1:
            dist.broadcast(word, src=0)
        is_stop, self._span = word.tolist()
        self._num_left = self._span
        return bool(is_stop)


class Stopping:
    """Agrees with the other ranks on when to stop and which steps to save by the clock. All ranks call its
    methods after the same steps.

    `watch` is rank 0's, and so is `clock`, where checkpoint.every_s is given. Waits are limited by the
    process group's time-out and by that of `peers`.
    """

    def __init__(self, peers: Peers, watch: RequestWatch | None, clock: SaveClock | None = None) -> None:
        self._peers = peers
        self._watch = watch
        self._clock = clock
        # Whether the step that `is_due` was last asked about is to be saved by the clock.
        self.is_save_due = False
        # What is to be traced from the step after it on.
        self.trace: TraceOrder | None = None
        self._answer: torch.Tensor | None = None
        self._work: dist.Work | None = None
        self._read_at = 0
        self._sent_after = 0
        self._sent_at = 0.0

    def begin(self, step: int) -> bool:
        """Return whether a stop was asked for before the next step. *Collective*; waits for rank 0."""
        if self._watch is not None:
            self._watch.start()
        self._read_at = self._sent_after = step
        self._sent_at = time.monotonic()
        return self.is_due(step)

    def is_due(self, step: int) -> bool:
        """Return whether all ranks are to stop after `step`. *Collective*, at each step, until it was True.

        It waits for rank 0's host where steps are slow, or where this rank is a whole round ahead of it.
        """
        self.is_save_due, self.trace = False, None
        if step < self._read_at:
            return False
        if self._answer is None:
            self._send(step, span=0)
        is_stop, span, self.is_save_due, self.trace = self._read()
        if is_stop:
            return True
        self._read_at = step + max(1, span)
        if span:
            self._send(step, span)
        return False

    def settle(self) -> None:
        """Wait for the broadcast that is under way. *Any rank*: every rank has begun it."""
        if self._work is not None:
            self._work.wait()

    def _send(self, step: int, span: int) -> None:
        """Start a round of `span` steps; 0: it is read at once, and so is the next, one step later."""
        self._answer = torch.zeros(_RANKS + MOST_RANKS, dtype=torch.int64)
        if self._watch is not None:
            self._answer[_STOP] = int(self._watch.seen is not None)
            self._answer[_SPAN] = self._next_span(step, span)
            self._answer[_SAVE] = int(self._clock is not None and self._clock.has_passed())
            if (asked := self._watch.take_trace()) is not None:
                padded = (*asked.ranks, *[_NO_RANK] * (MOST_RANKS - len(asked.ranks)))
                self._answer[_TRACE] = asked.steps
                self._answer[_TOKEN] = int(asked.token, 16)
                self._answer[_RANKS:] = torch.tensor(padded)
        if self._peers.world_size > 1:
            self._work = dist.broadcast(self._answer, src=0, async_op=True)

    def _read(self) -> tuple[bool, int, bool, TraceOrder | None]:
        """Return rank 0's answer: whether to stop, the next round's span, whether to save, what to trace."""
        answer, self._answer = self._answer, None
        assert answer is not None
        if self._work is not None:
            self._work.wait()
            self._work = None
        is_stop, span, is_save, steps, number, *ranks = answer.tolist()
        order = None
        if steps:
            named = tuple(rank for rank in ranks if rank != _NO_RANK)
            order = TraceOrder(steps, named, profile_requests.token_of(number))
        return bool(is_stop), span, bool(is_save), order

    def _next_span(self, step: int, span: int) -> int:
        """Return how many steps the round after this one is to span: as many as fit, growing step by step."""
        now = time.monotonic()
        num_steps, seconds = step - self._sent_after, now - self._sent_at
        if num_steps == 0:  # the round before was read at once
            return span
        self._sent_after, self._sent_at = step, now
        return min(2 * num_steps, int(num_steps * ROUND_S / max(seconds, 1e-9)))

    def request(self) -> StopRequest:
        """Return the request that all ranks stop for. *Collective*, after `is_due` or `begin` was True."""
        if self._watch is not None:
            assert self._watch.seen is not None
            self._peers.answer("stop", dataclasses.asdict(self._watch.seen))
        try:
            request = stop_requests.from_record(self._peers.await_answer("stop"))
        except FalseWordError as error:
            # That all stop came by the ranks' own group; why is known to rank 0, which records it.
            request = stop_requests.StopRequest(0, f"unknown: {error}", time.time(), "unknown", "unknown", 0)
        assert request is not None
        return request

    def seconds_left(self, stop_timeout_s: float) -> float:
        """Return for how long this rank may still work: until the ranks that were asked to stop are killed.
        *Rank 0*; infinite where nobody has asked, and on the other ranks.
        """
        request = None if self._watch is None else self._watch.seen
        return math.inf if request is None else stop_timeout_s - (time.time() - request.time)

    def piece_check(self) -> PieceCheck:
        """Return what asks, in the midst of work between two steps, whether to leave it for a stop. *Any
        rank.*
        """
        return PieceCheck(self._peers, self._watch)

    def leave(self) -> None:
        """Wait until all ranks have come here: the store, which some may still read, ends with rank 0.

        *Collective*, after a good end; after an exception no rank may wait for the others.
        """
        if self._answer is not None:
            self._read()
        if self._peers.world_size > 1:
            dist.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """End the thread. Never waits."""
        if self._watch is not None:
            self._watch.close()
