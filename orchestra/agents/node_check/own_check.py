"""One agent's part in the preflight: it looks at its node and its neighbour, and says what it found.

Before the first attempt all looks have time, since nothing trains yet; behind an attempt's end the newest
word is waited for a moment only; spares look while they are idle. What was found goes into what the agent
says of itself (`unfit`, `doubt`, `checked`, `ring`). What follows is `orchestra.agents.choose_nodes`'s to
say.
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
from launchers.memory_store.store import folders_of
from launchers.node_group import NodeGroup
from orchestra.agents.node_check import probe
from orchestra.agents.node_check.ring import Ring
from orchestra.run.paths import RunDir

# Runs looks at this node, one at a time, without ever waiting for one.
#
# What is looked at stands in `fitness_probe`, a program of its own: whatever hangs there hangs without this
# agent, and is found out by its silence. When to look, and what follows from it, is not known here.


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
class ProbeFindings:
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


class ProbeProcess:
    """Looks at this node, one look at a time. All from the agent's own thread; it never blocks."""

    def __init__(self, wishes: Mapping[str, Any], limit_s: float = LIMIT_S) -> None:
        self._wishes = dict(wishes)
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        self._began = 0.0
        # One that even SIGKILL did not end: it hangs in the kernel, and a second one would hang beside it.
        self._stuck: subprocess.Popen[bytes] | None = None
        self.last: ProbeFindings | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def begin(self) -> None:
        """Begin a look, unless one is on or an earlier one still hangs, or no process is to be had."""
        if self._process is not None or (self._stuck is not None and self._stuck.poll() is None):
            return
        self._stuck = None
        # The file itself: nothing of a package is to be read from a slow file system.
        words = [sys.executable, "-I", "-S", str(Path(probe.__file__)), json.dumps(self._wishes)]
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

    def look(self) -> ProbeFindings | None:
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

    def settle(self, at_most_s: float = SETTLE_S) -> ProbeFindings | None:
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
        return [name for name, _ in probe.checks(self._wishes)]

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


def _findings(said: bytes, expected: Sequence[str], silent: str, seconds: float) -> ProbeFindings:
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
    return ProbeFindings(tuple(unfit), tuple(doubts), facts, seconds)


_IDLE_EVERY_S = 60.0


class NodeCheck:
    """Looks at this node for a group's agent. All calls from the agent's own thread; none blocks for long."""

    def __init__(self, group: NodeGroup, check: ProbeProcess, *, idle_every_s: float = _IDLE_EVERY_S) -> None:
        self._group = group
        self._check = check
        self._idle_every_s = idle_every_s
        self._ring: Ring | None = None
        self._begun_at = time.monotonic()
        # What is still to be told: the file system may have failed the last time.
        self._untold: dict[str, Any] = {}

    def offers(self, address: str) -> dict[str, Any]:
        """Return what the agent says when it joins: that it looks, and where its neighbour reaches it."""
        offered: dict[str, Any] = {"looks": True}
        if self._group.num_nodes > 1:
            # Without a ring nobody is found slow, that is all.
            with contextlib.suppress(OSError):
                self._ring = Ring(address)
                offered["ring_port"] = self._ring.port
        return offered

    def begin(self) -> None:
        """Begin the looks of a start of a job. The agent has joined."""
        self._check.begin()
        self.measure_ring()

    def measure_ring(self, **facts: Any) -> None:
        """Begin to measure the way to the neighbour; `facts` stand in what is told of it."""
        if self._ring is not None:
            self._ring.measure(self._neighbour, **facts)

    def tick(self, *, is_idle: bool) -> None:
        """Take what was found meanwhile and tell it; look again where the node has long been idle."""
        self._take(self._check.look())
        if self._ring is not None and (measured := self._ring.taken()) is not None:
            self._untold["ring"] = {"to": self._next_node, **measured}
        now = time.monotonic()
        if is_idle and now - self._begun_at > self._idle_every_s:
            self._begun_at = now
            self._check.begin()
        self._tell()

    def look_again(self) -> None:
        """Look at the node behind an attempt's end, and tell what is found within a moment."""
        self._begun_at = time.monotonic()
        self._check.begin()
        self._take(self._check.settle(SETTLE_S))
        self._tell()

    def close(self) -> None:
        """Look no more."""
        self._check.close()
        if self._ring is not None:
            self._ring.close()

    def _take(self, found: Any) -> None:
        if found is None:
            return
        self._untold = {**self._untold, **found.told()}

    def _tell(self) -> None:
        member = self._group.member
        if not self._untold or member is None:
            return
        news = {key: value for key, value in self._untold.items() if not _is_old(key, value, member.facts)}
        with contextlib.suppress(OSError):
            if news:
                self._group.tell(self._untold)
            self._untold = {}

    @property
    def _next_node(self) -> int:
        return (self._group.node + 1) % self._group.num_nodes

    def _neighbour(self) -> tuple[str, int] | None:
        member = self._group.member_of(self._next_node)
        if member is None or "ring_port" not in member.facts:
            return None
        return member.address, int(member.facts["ring_port"])


def _is_old(key: str, value: Any, facts: Any) -> bool:
    """Tell whether the agent has said so already; how long a look took is no news."""
    return key in facts and (key == "checked" or facts[key] == value)


def node_check_of(config: Config, run: RunDir, group: NodeGroup) -> NodeCheck | None:
    """Return what looks at this node; None where it is not wanted (`recovery.preflight`)."""
    return NodeCheck(group, ProbeProcess(wishes_of(config, run))) if config.recovery.preflight else None
