"""A node whose host is gone is silent within seconds; one that is late or behind a firewall is not."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

from launchers.silence import LEAST_S, SilenceWatch, answers

TIMEOUT_S, BEAT_S = 10.0, 0.5


class Node:
    """A node with a watcher beside it, who has written `now` beats."""

    def __init__(self, ask: Callable[[], bool | None] = lambda: True) -> None:
        self.is_up = True
        self.watch = SilenceWatch(TIMEOUT_S, BEAT_S, lambda _: self.is_up and ask())
        self.now = self.count = 0

    def live(self, seconds: float, *, is_beating: bool = True) -> float | None:
        """Let time pass; return after how many seconds the node was silent, None where it was not."""
        for passed in range(1, round(seconds / BEAT_S) + 1):
            self.now += 1
            self.count += is_beating
            self.watch.see(1, b"agent %d" % self.count, self.now)
            silent = self.watch.is_silent(1, self.now)
            # Whoever is asked answers before the next look.
            while (question := self.watch._watched[1].question) is not None and not question.done():
                time.sleep(0.001)
            if silent:
                return passed * BEAT_S
        return None


def test_a_host_that_is_gone_is_silent_after_three_seconds() -> None:
    node = Node()
    assert node.live(20) is None
    node.is_up = False
    assert node.live(20, is_beating=False) in (LEAST_S, LEAST_S + BEAT_S)
    assert node.watch.is_gone(1, node.now)


def test_an_agent_whose_host_answers_has_the_whole_time_out() -> None:
    node = Node()
    node.live(20)
    assert node.live(TIMEOUT_S, is_beating=False) is None
    assert node.live(1, is_beating=False) == BEAT_S
    assert not node.watch.is_gone(1, node.now)
    # It was only late, and beats on: nobody holds it against it.
    assert node.live(5) is None


def test_one_question_that_is_lost_and_what_is_not_known_say_nothing() -> None:
    said: list[bool | None] = [True]
    node = Node(ask=lambda: said[0])
    node.live(20)
    for number in range(15):
        said[0] = (False, True, None)[number % 3]
        assert node.live(0.5, is_beating=False) is None
    said[0] = False
    found = node.live(5, is_beating=False)
    assert found in (2 * BEAT_S, 3 * BEAT_S)


def test_while_nobody_looks_nobody_falls_silent() -> None:
    """As the leader does while it fetches copies, or reads the beats of some nodes alone."""
    node = Node()
    node.live(20)
    node.now += 100
    assert not node.watch.is_silent(1, node.now)
    node.count += 100
    assert node.live(5) is None


def test_a_beat_that_cannot_be_read_once_after_a_time_in_which_nobody_looked_says_nothing() -> None:
    node = Node()
    node.live(20)
    node.now += 100
    node.watch.see(1, None, node.now)
    assert not node.watch.is_silent(1, node.now)
    node.count += 100
    assert node.live(5) is None
    for _ in range(2 + round(TIMEOUT_S / BEAT_S)):
        node.now += 1
        node.watch.see(1, None, node.now)
    assert node.watch.is_silent(1, node.now)


def test_a_host_that_never_answered_has_the_whole_time_out_too() -> None:
    node = Node(ask=lambda: False)
    node.live(20)
    assert node.live(30, is_beating=False) == TIMEOUT_S + BEAT_S


def test_a_node_that_was_never_seen_to_beat_is_given_time() -> None:
    node = Node()
    node.live(0.5)
    node.is_up = False
    assert node.live(30, is_beating=False) == TIMEOUT_S + BEAT_S


def test_the_limit_grows_with_the_pauses_between_beats_and_shrinks_when_they_are_over() -> None:
    node = Node()
    node.live(20)
    node.live(4, is_beating=False)
    node.live(5)
    # One pause of about 4 s: the limit is about twice that, whoever makes the next one.
    assert 6.0 <= node.watch.limit_s(node.now) <= 8.0
    node.is_up = False
    found = node.live(30, is_beating=False)
    assert found is not None
    assert 6.0 <= found <= 8.5
    node.is_up = True
    assert node.live(70) is None
    assert node.watch.limit_s(node.now) == LEAST_S


def test_a_time_in_which_nobody_looked_is_no_pause() -> None:
    node = Node()
    node.live(20)
    node.now += 16
    node.count += 16
    node.live(1)
    assert node.watch.limit_s(node.now) == LEAST_S


def test_beats_that_come_as_under_load_are_no_alarm_although_nobody_answers_in_time() -> None:
    """Pauses as of a machine that many share: mostly short, some of seconds, and hosts that are mute."""
    source = random.Random(7)
    node = Node()
    node.live(20)
    node.is_up = False
    pause_s = 0.5
    for _ in range(700):
        # Load comes and goes in minutes: a pause is at most half as long again as one of late.
        pause_s = min(6.0, max(0.5, pause_s * source.uniform(0.6, 1.5)))
        assert node.live(pause_s, is_beating=False) is None
        assert node.live(0.5) is None


def test_a_watcher_that_stands_still_itself_takes_nobody_for_lost() -> None:
    node = Node()
    node.live(20)
    node.is_up = False
    for _ in range(100):
        # Its own beat was not written: `now` stands.
        node.watch.see(1, b"agent %d" % node.count, node.now)
        assert not node.watch.is_silent(1, node.now)


def test_a_new_agent_was_not_late_and_its_silence_counts_from_its_first_beat() -> None:
    node = Node()
    node.live(20)
    node.live(8, is_beating=False)
    node.now += 1
    node.watch.see(1, b"another 0", node.now)
    assert not node.watch.is_silent(1, node.now)
    assert node.watch.limit_s(node.now) == LEAST_S


def test_a_host_answers_although_nobody_listens_and_not_where_there_is_none() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        assert answers("127.0.0.1", deaf.getsockname()[1])
        deaf.listen()
        assert answers("127.0.0.1", deaf.getsockname()[1])
    # A full queue of callers is as silent as a host without power.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(8)]
        for caller in waiting:
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        began = time.monotonic()
        assert not answers(*full.getsockname())
        assert 0.5 < time.monotonic() - began < 5
        for caller in waiting:
            caller.close()
