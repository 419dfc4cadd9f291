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
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from conf.schema import Config, Device
from launchers.channel import Channel, Gate
from launchers.memory_store.store import folders_of
from launchers.node_group import NodeGroup
from orchestra.agents.node_check import probe
from orchestra.run.paths import RunDir

# nvidia-smi takes some seconds where the driver is not kept loaded.
LIMIT_S = 20.0
# What a restart may wait for the newest result about a node; longer with devices, since nvidia-smi takes its
# time, and who is blamed for the attempt depends on it.
SETTLE_S, DEVICES_SETTLE_S = 0.3, 2.0
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
        "gpus": (1 if config.cluster.share_devices else ranks) if on_cuda else 0,
        "copies": str(folders_of(copies_name(run))),
    }


def copies_name(run: RunDir) -> str:
    """Return what a run's folders for copies in memory are called by; no other run of this user has it."""
    return f"{run.name}-{hashlib.sha256(str(run.path).encode()).hexdigest()[:8]}"


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

    def look(self) -> dict[str, Any] | None:
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
        return _findings(self._output, self._wishes, silent, seconds) if self._output else None

    def settle(self, at_most_s: float | None = None) -> dict[str, Any] | None:
        """Return the findings of the probe that runs within that time (default: what a restart may wait);
        None where it takes longer.
        """
        if at_most_s is None:
            at_most_s = DEVICES_SETTLE_S if self._wishes.get("gpus") else SETTLE_S
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


def _findings(output: bytes, wishes: dict[str, Any], silent: str, seconds: float) -> dict[str, Any]:
    """Return what the lines say, as the agent publishes it: what keeps the node from training (`unfit`;
    `broken_device`: that of it which devices do), what speaks against it where there is another one
    (`doubt`), and what was measured (`checked`).

    `silent`: the reason for a check without a line, empty where nothing hung.
    """
    unfit: dict[str, str] = {}
    doubts, facts, missing = [], {}, [name for name, _ in probe.checks(wishes)]
    for line in output.decode(errors="replace").splitlines():
        try:
            result = json.loads(line)
        except ValueError:
            continue
        if result["check"] in missing:
            missing.remove(result["check"])
        unfit |= {result["check"]: result["unfit"]} if result.get("unfit") else {}
        doubts += [result["doubt"]] if result.get("doubt") else []
        facts.update(result.get("facts", {}))
    unfit |= {name: f"{name}: {silent}" for name in missing if silent}
    return {
        "unfit": "; ".join(unfit.values()) or None,
        "broken_device": unfit.get(probe.DEVICES),
        "doubt": "; ".join(doubts) or None,
        "checked": {"seconds": round(seconds, 3), **facts},
    }


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
                self._ring = Ring(address, self._group.secret())
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
        self._unpublished.update(self._probe.look() or {})
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
        self._unpublished.update(self._probe.settle() or {})
        self._publish()

    def close(self) -> None:
        """End the checks."""
        self._probe.close()
        if self._ring is not None:
            self._ring.close()

    def _publish(self) -> None:
        member = self._group.member
        if not self._unpublished or member is None:
            return
        with contextlib.suppress(OSError):
            if not all(_is_old(key, value, member.facts) for key, value in self._unpublished.items()):
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


# The way to the neighbour. Plain sockets, no torch: that finds an interface that fell back to a slower speed
# or loses packets, not what NCCL makes of the network (`orchestra bench network` measures that).

_CHUNK = bytes(1 << 18)
# One measurement ends after that much, or that long.
_MOST_BYTES, _MOST_S = 16 << 20, 0.1
_MEASUREMENTS, _PINGS = 2, 5
# Two rounds apart: what slowed down the first one may be over.
_ROUNDS, _PAUSE_S = 2, 0.3
# For all of a round, and for what one end waits for in it.
_TIMEOUT_S = 10.0
_LOOK_S = 0.5
_PURPOSE = "ring"
# There is one node before this one; what it began and left may still be open.
_NEIGHBOURS = 4
_PING, _DONE = b"p", b"d"


class Ring:
    """Answers the node before and measures the way to the next, on threads of its own; `close` ends them."""

    def __init__(self, address: str, secret: str) -> None:
        """`address`: this node's, at which the others reach it; `secret`: the job's. Raises OSError."""
        self._secret = secret
        self._gate = Gate(address, secret, _PURPOSE, _swallow, max_served=_NEIGHBOURS)
        self._is_over = threading.Event()
        self._result: dict[str, Any] | None = None

    @property
    def port(self) -> int:
        """Where this node answers."""
        return self._gate.place[1]

    def measure(self, neighbour: Callable[[], tuple[str, int] | None], **facts: Any) -> None:
        """Begin to measure the way to the neighbour, as soon as it is known where that is.

        `facts` come back with what is measured.
        """
        threading.Thread(target=self._measure, args=(neighbour, facts), name="ring", daemon=True).start()

    def taken(self) -> dict[str, Any] | None:
        """Return what was measured, once: `bytes_per_s` of each round and `latency_s`, or an `error`."""
        result, self._result = self._result, None
        return result

    def close(self) -> None:
        """Answer and measure no more; the threads end within a second."""
        self._is_over.set()
        self._gate.close()

    def _measure(self, neighbour: Callable[[], tuple[str, int] | None], facts: dict[str, Any]) -> None:
        while (place := neighbour()) is None:
            if self._is_over.wait(_LOOK_S):
                return
        rounds: list[tuple[float, float]] = []
        try:
            for number in range(_ROUNDS):
                self._is_over.wait(_PAUSE_S if number else 0.0)
                rounds.append(_round(place, self._secret))
        except OSError as error:
            self._result = {"error": str(error), **facts}
            return
        self._result = {
            "bytes_per_s": [round(rate) for rate, _ in rounds],
            "latency_s": round(min(seconds for _, seconds in rounds), 6),
            **facts,
        }


def _swallow(channel: Channel) -> None:
    """Take all that comes; where it ends with a ping or a mark of the end, send that byte back."""
    buffer, connection = bytearray(len(_CHUNK)), channel.connection
    deadline = time.monotonic() + _TIMEOUT_S
    while (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        if not (num_bytes := connection.recv_into(buffer)):
            return
        last = bytes(buffer[num_bytes - 1 : num_bytes])
        if last in (_PING, _DONE):
            connection.sendall(last)


def _round(place: tuple[str, int], secret: str) -> tuple[float, float]:
    """Return the best bytes per second and the shortest time to the neighbour and back. Raises OSError."""
    channel = Channel.connect(*place, secret, _PURPOSE)
    with contextlib.closing(channel):
        channel.connection.settimeout(_TIMEOUT_S)
        pings = [_ping(channel.connection, _PING) for _ in range(_PINGS)]
        rates = [_rate(channel.connection) for _ in range(_MEASUREMENTS)]
    return max(rates), min(pings)


def _ping(connection: socket.socket, word: bytes) -> float:
    begin = time.perf_counter()
    connection.sendall(word)
    if connection.recv(1) != word:
        raise OSError("the neighbour hung up")
    return time.perf_counter() - begin


def _rate(connection: socket.socket) -> float:
    """Return the bytes per second of one stream, counted until the neighbour has taken the last one."""
    begin, sent = time.perf_counter(), 0
    while sent < _MOST_BYTES and time.perf_counter() - begin < _MOST_S:
        connection.sendall(_CHUNK)
        sent += len(_CHUNK)
    _ping(connection, _DONE)
    return sent / (time.perf_counter() - begin)
