"""Runs looks at this node, one at a time, without ever waiting for one.

What is looked at stands in `fitness_probe`, a program of its own: whatever hangs there hangs without this
agent, and is found out by its silence. When to look, and what follows from it, is not known here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.schema import Config, Device
from launchers.copies import folders_of
from orchestra.crew import fitness_probe
from orchestra.rundir import RunDir

# nvidia-smi takes some seconds where the driver is not kept loaded.
LIMIT_S = 20.0
# What a restart may wait for the newest word about a node.
SETTLE_S = 0.3
_POLL_S = 0.01


def wishes_of(config: Config, run: RunDir) -> dict[str, Any]:
    """Return what is to be looked at on each node of a run, as the probe takes it."""
    ranks = config.cluster.gpus_per_node
    on_cuda = config.cluster.device is Device.cuda and isinstance(ranks, int)
    rooms = dict.fromkeys((os.environ.get("TMPDIR") or "/tmp", "/dev/shm"))
    return {
        "folder": str(run.control),
        "rooms": list(rooms),
        "gpus": ranks if on_cuda else 0,
        "copies": str(folders_of(copies_name(run))),
    }


def copies_name(run: RunDir) -> str:
    """Return what a run's folders for copies in memory are called by; no other run of this user has it."""
    return f"{run.name}-{hashlib.sha256(str(run.path).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Findings:
    """What one look at a node found."""

    # What keeps it from training, and what speaks against it where there is another one.
    unfit: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def told(self) -> dict[str, Any]:
        """Return it as an agent says it of itself."""
        checked = {"seconds": round(self.seconds, 3), **self.facts}
        return {
            "unfit": "; ".join(self.unfit) or None,
            "doubt": "; ".join(self.doubts) or None,
            "checked": checked,
        }


class NodeCheck:
    """Looks at this node, one look at a time. All from the agent's own thread; it never blocks."""

    def __init__(self, wishes: Mapping[str, Any], limit_s: float = LIMIT_S) -> None:
        self._wishes = dict(wishes)
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._began = 0.0
        # One that even SIGKILL did not end: it hangs in the kernel, and a second one would hang beside it.
        self._stuck: subprocess.Popen[bytes] | None = None
        self.last: Findings | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def begin(self) -> None:
        """Begin a look, unless one is on or an earlier one still hangs, or no process is to be had."""
        if self._process is not None or (self._stuck is not None and self._stuck.poll() is None):
            return
        self._stuck = None
        # The file itself: nothing of a package is to be read from a slow file system.
        words = [sys.executable, "-I", "-S", str(Path(fitness_probe.__file__)), json.dumps(self._wishes)]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            os.set_blocking(self._process.stdout.fileno(), False)
            self._said, self._began = b"", time.monotonic()

    def look(self) -> Findings | None:
        """Return what the look that is on has found, once, when it is over or took too long; else None."""
        process = self._process
        if process is None:
            return None
        is_over = self._read(process)
        seconds = time.monotonic() - self._began
        if not is_over and seconds < self._limit_s:
            return None
        self._process = None
        self._end(process)
        # Without a line the program itself never ran, which says nothing of the node.
        silent = "" if is_over else f"no answer within {self._limit_s:g} s"
        found = _findings(self._said, self._expected, silent, seconds) if self._said else None
        self.last = found or self.last
        return found

    def settle(self, at_most_s: float = SETTLE_S) -> Findings | None:
        """Return what the look that is on finds within that time; None where it goes on or found nothing."""
        deadline = time.monotonic() + at_most_s
        while self.is_running and time.monotonic() < deadline:
            found = self.look()
            if found is not None:
                return found
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        """End the look that is on."""
        if self._process is not None:
            self._end(self._process)
            self._process = None

    @property
    def _expected(self) -> list[str]:
        return [name for name, _ in fitness_probe.checks(self._wishes)]

    def _read(self, process: subprocess.Popen[bytes]) -> bool:
        """Take what was said meanwhile; return whether that was all."""
        assert process.stdout is not None
        while True:
            try:
                part = os.read(process.stdout.fileno(), 65536)
            except BlockingIOError:
                return False
            if not part:
                return True
            self._said += part

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(OSError):
            # What it called as well, such as nvidia-smi.
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        self._stuck = process if process.returncode is None else None


def _findings(said: bytes, expected: Sequence[str], silent: str, seconds: float) -> Findings:
    """Return what the lines say; `silent`: what is said of a check without one, empty where nothing hung."""
    unfit, doubts, facts, missing = [], [], {}, list(expected)
    for line in said.decode(errors="replace").splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if found["check"] in missing:
            missing.remove(found["check"])
        unfit += [found["unfit"]] if found.get("unfit") else []
        doubts += [found["doubt"]] if found.get("doubt") else []
        facts.update(found.get("facts", {}))
    unfit += [f"{name}: {silent}" for name in missing if silent]
    return Findings(tuple(unfit), tuple(doubts), facts, seconds)
