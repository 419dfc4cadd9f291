"""Each agent checks its own node and the way to its neighbour, and publishes what it found.

Before the first attempt the checks have time, since nothing trains yet; after an attempt's end the newest
result is waited for a moment only; spares check themselves while they are idle. The findings go into what the
agent says of itself (`unfit`, `doubt`, `checked`, `ring`); `orchestra.agents.choose_nodes` decides what
follows from them.

The checks themselves are a program of their own (`probe`): whatever hangs there does not hang this agent, and
is found by its silence.
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

# nvidia-smi takes some seconds where the driver is not kept loaded.
LIMIT_S = 20.0
# What a restart may wait for the newest result about a node.
SETTLE_S = 0.3
_POLL_S = 0.01
# How often an idle node checks itself.
_IDLE_EVERY_S = 60.0


def wishes_of(config: Config, run: RunDir) -> dict[str, Any]:
    """Return what is to be checked on each node of a run, as the probe takes it."""
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
    """What one run of the probe found."""

    # What keeps it from training, and what speaks against it where there is another one.
    unfit: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def facts_of_member(self) -> dict[str, Any]:
        """Return it as the agent publishes it."""
        checked = {"seconds": round(self.seconds, 3), **self.facts}
        return {
            "unfit": "; ".join(self.unfit) or None,
            "doubt": "; ".join(self.doubts) or None,
            "checked": checked,
        }


class ProbeProcess:
    """Runs the probe of this node, once at a time. All from the agent's own thread; it never blocks."""

    def __init__(self, wishes: Mapping[str, Any], limit_s: float = LIMIT_S) -> None:
        self._wishes = dict(wishes)
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self._output = b""
        self._began = 0.0
        # One that even SIGKILL did not end: it hangs in the kernel, and a second one would hang beside it.
        self._stuck: subprocess.Popen[bytes] | None = None
        self.last: ProbeFindings | None = None

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def begin(self) -> None:
        """Start the probe, unless one runs, or an earlier one still hangs, or no process can be started."""
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
            self._output, self._began = b"", time.monotonic()

    def look(self) -> ProbeFindings | None:
        """Return the findings of the probe that runs, once, when it is over or took too long; else None."""
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
        findings = _findings(self._output, self._expected, silent, seconds) if self._output else None
        self.last = findings or self.last
        return findings

    def settle(self, at_most_s: float = SETTLE_S) -> ProbeFindings | None:
        """Return the findings of the probe that runs within that time; None where it takes longer."""
        deadline = time.monotonic() + at_most_s
        while self.is_running and time.monotonic() < deadline:
            findings = self.look()
            if findings is not None:
                return findings
            time.sleep(_POLL_S)
        return None

    def close(self) -> None:
        """End the probe that runs."""
        if self._process is not None:
            self._end(self._process)
            self._process = None

    @property
    def _expected(self) -> list[str]:
        return [name for name, _ in probe.checks(self._wishes)]

    def _read(self, process: subprocess.Popen[bytes]) -> bool:
        """Take what it has written meanwhile; return whether that was all."""
        assert process.stdout is not None
        while True:
            try:
                block = os.read(process.stdout.fileno(), 65536)
            except BlockingIOError:
                return False
            if not block:
                return True
            self._output += block

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(OSError):
            # What it called as well, such as nvidia-smi.
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.2)
        self._stuck = process if process.returncode is None else None


def _findings(output: bytes, expected: Sequence[str], silent: str, seconds: float) -> ProbeFindings:
    """Return what the lines say; `silent`: the reason for a check without one, empty where nothing hung."""
    unfit, doubts, facts, missing = [], [], {}, list(expected)
    for line in output.decode(errors="replace").splitlines():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if result["check"] in missing:
            missing.remove(result["check"])
        unfit += [result["unfit"]] if result.get("unfit") else []
        doubts += [result["doubt"]] if result.get("doubt") else []
        facts.update(result.get("facts", {}))
    unfit += [f"{name}: {silent}" for name in missing if silent]
    return ProbeFindings(tuple(unfit), tuple(doubts), facts, seconds)


class NodeCheck:
    """Checks this node for its agent. All calls from the agent's own thread; none blocks for long."""

    def __init__(
        self, group: NodeGroup, probe_process: ProbeProcess, *, idle_every_s: float = _IDLE_EVERY_S
    ) -> None:
        self._group = group
        self._probe = probe_process
        self._idle_every_s = idle_every_s
        self._ring: Ring | None = None
        self._begun_at = time.monotonic()
        # What is still to be published: the file system may have failed the last time.
        self._unpublished: dict[str, Any] = {}

    def offers(self, address: str) -> dict[str, Any]:
        """Return what the agent publishes when it joins: that it checks, and at which port it answers."""
        offered: dict[str, Any] = {"looks": True}
        if self._group.num_nodes > 1:
            # Without a ring no node is found slow, that is all.
            with contextlib.suppress(OSError):
                self._ring = Ring(address)
                offered["ring_port"] = self._ring.port
        return offered

    def begin(self) -> None:
        """Begin the checks of a start of a job. The agent has joined."""
        self._probe.begin()
        self.measure_ring()

    def measure_ring(self, **facts: Any) -> None:
        """Begin to measure the way to the neighbour; `facts` are published with the result."""
        if self._ring is not None:
            self._ring.measure(self._neighbour, **facts)

    def tick(self, *, is_idle: bool) -> None:
        """Publish what was found meanwhile; check again where the node has long been idle."""
        self._take(self._probe.look())
        if self._ring is not None and (measured := self._ring.taken()) is not None:
            self._unpublished["ring"] = {"to": self._next_node, **measured}
        now = time.monotonic()
        if is_idle and now - self._begun_at > self._idle_every_s:
            self._begun_at = now
            self._probe.begin()
        self._publish()

    def look_again(self) -> None:
        """Check the node after an attempt's end, and publish what is found within a moment."""
        self._begun_at = time.monotonic()
        self._probe.begin()
        self._take(self._probe.settle(SETTLE_S))
        self._publish()

    def close(self) -> None:
        """End the checks."""
        self._probe.close()
        if self._ring is not None:
            self._ring.close()

    def _take(self, findings: ProbeFindings | None) -> None:
        if findings is None:
            return
        self._unpublished = {**self._unpublished, **findings.facts_of_member()}

    def _publish(self) -> None:
        member = self._group.member
        if not self._unpublished or member is None:
            return
        news = {
            key: value for key, value in self._unpublished.items() if not _is_old(key, value, member.facts)
        }
        with contextlib.suppress(OSError):
            if news:
                self._group.tell(self._unpublished)
            self._unpublished = {}

    @property
    def _next_node(self) -> int:
        return (self._group.node + 1) % self._group.num_nodes

    def _neighbour(self) -> tuple[str, int] | None:
        member = self._group.member_of(self._next_node)
        if member is None or "ring_port" not in member.facts:
            return None
        return member.address, int(member.facts["ring_port"])


def _is_old(key: str, value: Any, facts: Mapping[str, Any]) -> bool:
    """Tell whether that is published already; how long a check took is no news."""
    return key in facts and (key == "checked" or facts[key] == value)


def node_check_of(config: Config, run: RunDir, group: NodeGroup) -> NodeCheck | None:
    """Return the check of this node; None where it is not wanted (`recovery.preflight`)."""
    return NodeCheck(group, ProbeProcess(wishes_of(config, run))) if config.recovery.preflight else None
