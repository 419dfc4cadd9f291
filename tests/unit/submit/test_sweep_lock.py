"""One command at a time submits sweeps of the same members: what becomes of claims left by dead processes."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from orchestra.errors import ConfigError
from orchestra.submit.sweeps import lock

NOBODY = 2**22 + 1


def lock_of(parent: Path, pid: int) -> Path:
    """Leave the lock of a process of this host."""
    claim = parent / ".sweep-abc.claim"
    claim.write_text(json.dumps({"host": socket.gethostname(), "pid": pid, "pid_started": None, "time": 0.0}))
    return claim


def test_lock_ends_with_the_command(tmp_path: Path) -> None:
    with lock.exclusively(tmp_path, "abc"):
        assert (tmp_path / ".sweep-abc.claim").exists()
    assert not (tmp_path / ".sweep-abc.claim").exists()


def test_lock_of_a_process_that_is_no_more_is_taken_over(tmp_path: Path) -> None:
    claim = lock_of(tmp_path, NOBODY)
    with lock.exclusively(tmp_path, "abc"):
        assert json.loads(claim.read_text())["pid"] == os.getpid()


def test_lock_of_a_living_process_is_respected_and_stays(tmp_path: Path) -> None:
    claim = lock_of(tmp_path, os.getppid())
    with pytest.raises(ConfigError, match="being submitted already"), lock.exclusively(tmp_path, "abc"):
        pytest.fail("two commands at a time")
    assert claim.exists()


def test_of_two_that_find_a_dead_lock_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_of(tmp_path, NOBODY)
    unlink = Path.unlink

    def unlink_and_lose(self: Path, missing_ok: bool = False) -> None:
        """Let the other command be faster by the time the lock is free."""
        unlink(self, missing_ok)
        lock_of(tmp_path, os.getppid())

    monkeypatch.setattr(Path, "unlink", unlink_and_lose)
    with pytest.raises(ConfigError, match="by another command"), lock.exclusively(tmp_path, "abc"):
        pytest.fail("two commands at a time")
