"""Gives the tests of this folder the rank pools that they share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from attempts import attempt_of, config_of
from pool import RankPool, Ranks

from tests.support.command_line import orchestra

__all__ = ["alone", "orchestra", "ranks"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Return a function that gives the shared pool of a size."""
    pools: dict[int, RankPool] = {}

    def pool_of(size: int) -> RankPool:
        if size in pools and pools[size].is_broken:
            pools.pop(size).close()
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """Return a run of two ranks that nobody interrupts or stops, and what its ranks hold in the end."""
    path = tmp_path_factory.mktemp("runs") / "alone"
    return path, ranks(2).run(attempt_of, path=path, attempt=0, config=config_of())
