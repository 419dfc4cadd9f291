"""The ranks of a run, talking through a key-value store: JSON only, a limit on every wait, missing ranks
named.

No collective of the training is ever used here, so a save can be voted on by background threads while the
training talks on its own groups. The store asks nobody who they are: with a key, each word carries a code of
itself and of its place (HMAC-SHA256), and a word without the right one is an error, never taken for true.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from checkpointing.checkpoint_errors import CheckpointError, FalseWordError, MissingRanksError

# The pause between two questions is this share of the time that was waited already, within limits: an answer
# is learnt late by a twentieth at most, and a long wait asks little of the store.
_PAUSE_SHARE = 0.05
_SHORTEST_PAUSE_S = 0.0003
_LONGEST_PAUSE_S = 0.1
# Answers are kept for this many topics, for ranks that read them late.
_KEPT_ANSWERS = 32
# Hexadecimal digits of a word's code.
_CODE_LENGTH = 64


class Peers:
    """One rank's end of the conversation. Safe to use from several threads, for different topics.

    A topic is a text that all ranks use alike and only once. `key` is what only these ranks know, another one
    for each store; without it whoever reaches the store can speak for any rank. Whoever hears a false word
    raises FalseWordError.
    """

    def __init__(
        self, rank: int, world_size: int, store: Store, limit_s: float = 600.0, key: bytes | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.limit_s = limit_s
        self._store = store
        self._key = key
        self._answered: deque[str] = deque()
        self._asked: Counter[str] = Counter()

    @classmethod
    def alone(cls) -> Peers:
        """Return the peers of a single process."""
        return cls(0, 1, dist.HashStore())  # type: ignore[attr-defined]

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def unused(self, topic: str) -> str:
        """Return the topic with a number after it, another one at each call; equal on all ranks that ask
        equally often.
        """
        self._asked[topic] += 1
        return f"{topic}/{self._asked[topic]}"

    def tell(self, topic: str, value: Any) -> None:
        """Leave this rank's word on a topic for the coordinator. Never waits."""
        self._say(f"{topic}/{self.rank}", value)

    def hear_all(self, topic: str, limit_s: float | None = None) -> list[Any]:
        """Return every rank's word on a topic, by rank. Coordinator only. Raises MissingRanksError."""
        keys = [f"{topic}/{rank}" for rank in range(self.world_size)]
        self._wait(keys, topic, limit_s)
        with _explained():
            words = self._store.multi_get(keys)
            for key in keys:
                self._store.delete_key(key)
        return self._heard(keys, words)

    def words_of_others(self, topic: str) -> list[Any] | None:
        """Return the newest word of every other rank on a topic, by rank, and leave them there; None as long
        as one has not spoken. Never waits. For topics on which ranks speak again and again.
        """
        keys = [f"{topic}/{rank}" for rank in range(self.world_size) if rank != self.rank]
        if not self._are_there(keys):
            return None
        with _explained():
            words = self._store.multi_get(keys)
        return self._heard(keys, words)

    def answer(self, topic: str, value: Any, *, until_forgotten: bool = False) -> None:
        """Leave the coordinator's answer for all ranks. Coordinator only. Never waits.

        It is there for the next 32 answers, or until `forget`: for ranks that may come very late.
        """
        if not until_forgotten:
            self._answered.append(topic)
        self._say(f"{topic}/answer", value)
        if len(self._answered) > _KEPT_ANSWERS:
            with _explained():
                self._store.delete_key(f"{self._answered.popleft()}/answer")

    def forget(self, topic: str) -> None:
        """Remove an answer that every rank has read. Coordinator only. Never waits."""
        with _explained():
            self._store.delete_key(f"{topic}/answer")

    def await_answer(self, topic: str, limit_s: float | None = None) -> Any:
        """Return the coordinator's answer. Raises MissingRanksError naming rank 0."""
        key = f"{topic}/answer"
        self._wait([key], topic, limit_s)
        with _explained():
            word = self._store.get(key)
        return self._heard([key], [word])[0]

    def exchange(self, topic: str, value: Any, limit_s: float | None = None) -> list[Any]:
        """Return every rank's value, by rank, on every rank. *Collective*. Raises MissingRanksError.

        Equal values travel once.
        """
        self.tell(topic, value)
        if self.is_coordinator:
            try:
                values = self.hear_all(topic, limit_s)
            except MissingRanksError as error:
                self.answer(topic, {"missing": error.ranks})
                raise
            except FalseWordError as error:
                self.answer(topic, {"false": str(error)})
                raise
            self.answer(topic, _without_repeats(values))
        # The coordinator may come just before its limit, and then wait for the others as long again.
        limit = self.limit_s if limit_s is None else limit_s
        answer = self.await_answer(topic, 2 * limit)
        if "missing" in answer:
            raise MissingRanksError(answer["missing"], topic, limit)
        if "false" in answer:
            raise FalseWordError(answer["false"])
        return [answer["values"][index] for index in answer["of_rank"]]

    def _say(self, place: str, value: Any) -> None:
        content = json.dumps(value, separators=(",", ":"))
        with _explained():
            self._store.set(place, self._code(place, content.encode()) + content)

    def _heard(self, places: Sequence[str], words: Sequence[bytes]) -> list[Any]:
        """Return what some words say. Raises FalseWordError."""
        values = []
        for place, word in zip(places, words, strict=True):
            length = 0 if self._key is None else _CODE_LENGTH
            code, content = word[:length], word[length:]
            try:
                if not hmac.compare_digest(code, self._code(place, content).encode()):
                    raise ValueError("its code is not of this run's secret")
                values.append(json.loads(content))
            except ValueError as error:
                raise FalseWordError(
                    f"the word at {place} in the ranks' store was not written by this attempt's ranks "
                    f"({error}): somebody else reaches rank 0's store; see docs/security.md"
                ) from error
        return values

    def _code(self, place: str, content: bytes) -> str:
        if self._key is None:
            return ""
        return hmac.new(self._key, place.encode() + b"\n" + content, "sha256").hexdigest()

    def _wait(self, keys: Sequence[str], topic: str, limit_s: float | None) -> None:
        """Wait by asking: a blocking wait would lock the store's client for this process's other threads."""
        limit = self.limit_s if limit_s is None else limit_s
        began = time.monotonic()
        while not self._are_there(keys):
            waited = time.monotonic() - began
            if waited > limit:
                raise MissingRanksError(self._missing(keys), topic, limit)
            time.sleep(min(max(_SHORTEST_PAUSE_S, waited * _PAUSE_SHARE), _LONGEST_PAUSE_S))

    def _are_there(self, keys: Sequence[str]) -> bool:
        with _explained():
            return bool(self._store.check(list(keys)))

    def _missing(self, keys: Sequence[str]) -> list[int]:
        if keys[0].endswith("/answer"):
            return [0]
        return [rank for rank, key in enumerate(keys) if not self._are_there([key])]


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        raise CheckpointError(f"the ranks' store does not answer, rank 0 may have ended: {error}") from error


def _without_repeats(values: Sequence[Any]) -> dict[str, Any]:
    places: dict[str, int] = {}
    of_rank = [places.setdefault(json.dumps(value), len(places)) for value in values]
    return {"values": [json.loads(text) for text in places], "of_rank": of_rank}
