"""Gives the tests of this folder the rank pools that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pool import RankPool


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[int, RankPool]]:
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """Return a function that gives the shared pool of a size."""

    def pool_of(size: int) -> RankPool:
        if size in _pools and _pools[size].is_broken:
            _pools.pop(size).close()
        if size not in _pools:
            _pools[size] = RankPool(size)
        return _pools[size]

    return pool_of
