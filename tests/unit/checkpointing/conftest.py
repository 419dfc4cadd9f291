"""Storages for the tests: a local folder, fsspec's memory, and S3 over real HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest
from sample_checkpoint import memory

from checkpointing.storage import Storage, open_storage, remote
from tests.support.s3_service import bucket, endpoint

__all__ = ["bucket", "endpoint"]

MIB = 1 << 20


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage with renames, then one without."""
    return open_storage(tmp_path / "checkpoints") if request.param == "local" else memory()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send files in the smallest parts that S3 takes."""
    monkeypatch.setattr(remote, "_PART_BYTES", 5 * MIB)
