"""What a forward pass learns from other ranks, kept for its repetition: a block whose activations are
recomputed asks nobody twice how many tokens go where.

`blocks` opens the contexts around a pass and its repetition; what asks goes through `once`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_Found = TypeVar("_Found")


class LearnedInPass:
    """What one forward pass has found out, in its order."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        # Of a repetition, how much of it has been taken; None in the first pass.
        self._num_taken: int | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Let the pass inside be the first one."""
        with _current(self):
            yield

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Let the pass inside, which may end early, be a repetition."""
        self._num_taken = 0
        with _current(self):
            yield

    def find(self, find: Callable[[], _Found]) -> _Found:
        if self._num_taken is None:
            self._found.append(find())
            return self._found[-1]  # type: ignore[no-any-return]
        self._num_taken += 1
        return self._found[self._num_taken - 1]  # type: ignore[no-any-return]


_of_this_pass: LearnedInPass | None = None


@contextmanager
def _current(learned: LearnedInPass) -> Iterator[None]:
    global _of_this_pass
    before, _of_this_pass = _of_this_pass, learned
    try:
        yield
    finally:
        _of_this_pass = before


def once(find: Callable[[], _Found]) -> _Found:
    """Return what `find` finds, in a repetition what it has found in the pass that is repeated. It must be
    small, since it is kept: counts and no rows.
    """
    return find() if _of_this_pass is None else _of_this_pass.find(find)
