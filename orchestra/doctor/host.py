"""Checks this host: its name, ports, limits, memory that ranks share, and the way to Weights & Biases."""

from __future__ import annotations

import netrc
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

from launchers.addresses import address_of_interface, interface_of
from launchers.errors import LauncherError
from launchers.ports import free_port
from orchestra.doctor.check import Check, Finding, Mark, Subject, bounded
from orchestra.units import GIB, binary

# Each of torch's look-ups of a peer waits as long.
_SLOW_LOOKUP_S = 1.0
_LOOKUP_LIMIT_S = 15.0
_FEW_FILES = 4096
_SMALL_SHARED_MEMORY_BYTES = GIB
_SHARED_MEMORY = Path("/dev/shm")
_WANDB_HOST = "api.wandb.ai"


def _host_name(_: Subject) -> Iterator[Finding]:
    name = socket.gethostname()
    advice = "put the host's address and name into /etc/hosts, or repair the name server in resolv.conf"
    try:
        answer = bounded(lambda: socket.gethostbyname(name), _LOOKUP_LIMIT_S)
    except OSError as error:
        yield Finding("host name", Mark.warning, f"{name} means no address: {error.strerror}", advice)
        return
    if answer is None:
        silent = f"{name}: no answer from the name server within {_LOOKUP_LIMIT_S:g} s"
        yield Finding("host name", Mark.failed, silent, advice)
        return
    address, seconds = str(answer[0]), answer[1]
    backwards_s = _backwards_s(address)
    interface = interface_of(address)
    found = f"{name} is {address}" + (f" on {interface}" if interface else ", no interface of this host")
    if max(seconds, backwards_s) >= _SLOW_LOOKUP_S:
        slow = f"{found}; looked up in {seconds:.1f} s, backwards in {backwards_s:.1f} s"
        yield Finding("host name", Mark.warning, slow, f"ranks wait as long for each peer: {advice}")
    elif interface is None:
        yield Finding("host name", Mark.warning, found, advice)
    else:
        yield Finding("host name", Mark.ok, f"{found}, looked up in {1000 * seconds:.0f} ms")


def _backwards_s(address: str) -> float:
    """Return how long it takes to ask for the name of an address; whether it has one does not matter."""
    try:
        answer = bounded(lambda: socket.gethostbyaddr(address), _LOOKUP_LIMIT_S)
    except OSError:
        # Refused at once is quick.
        return 0.0
    return _LOOKUP_LIMIT_S if answer is None else answer[1]


def _ports(subject: Subject) -> Iterator[Finding]:
    address = "127.0.0.1"
    if subject.interface is not None:
        configured = address_of_interface(subject.interface)
        if configured is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            advice = "set cluster.network.interface to one that has; nodes may have others than this machine"
            found = f"interface {subject.interface} has no IPv4 address here; there are {names}"
            yield Finding("ports", Mark.failed if subject.launcher == "local" else Mark.note, found, advice)
            return
        address = configured
    try:
        port = free_port()
        with socket.socket() as listener:
            listener.bind((address, port))
            listener.listen()
            with socket.create_connection((address, port), timeout=5):
                yield Finding("ports", Mark.ok, f"{address}:{port} can be listened on and reached")
    except (OSError, LauncherError) as error:
        yield Finding(
            "ports", Mark.failed, f"{address}: {error}", "a firewall or a limit forbids it: ask the site"
        )


def _limits(_: Subject) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found = f"{_shown(soft)} open files (at most {_shown(hard)}), {_locked(locked)} locked memory"
    if 0 <= soft < _FEW_FILES:
        advice = f"many ranks and data files need more: `ulimit -n {_FEW_FILES}`"
        yield Finding("limits", Mark.warning, found, advice)
    else:
        yield Finding("limits", Mark.ok, found)
    if locked != resource.RLIM_INFINITY and Path("/sys/class/infiniband").exists():
        advice = (
            "InfiniBand needs unlimited locked memory: ask the site (limits.conf, PropagateResourceLimits)"
        )
        yield Finding("limits", Mark.warning, f"{_locked(locked)} locked memory", advice)


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _locked(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else binary(limit)


def _shared_memory(_: Subject) -> Iterator[Finding]:
    if not _SHARED_MEMORY.is_dir():
        yield Finding("/dev/shm", Mark.warning, "not there", "NCCL needs it: mount a tmpfs there")
        return
    status = os.statvfs(_SHARED_MEMORY)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    found = f"{binary(size)}, {binary(free)} free"
    if size < _SMALL_SHARED_MEMORY_BYTES:
        advice = "ranks of one node talk through it: start the container with --shm-size=8g or --ipc=host"
        yield Finding("/dev/shm", Mark.warning, found, advice)
    else:
        yield Finding("/dev/shm", Mark.ok, found)


def _wandb(subject: Subject) -> Iterator[Finding]:
    if subject.wandb_mode != "online":
        yield Finding("wandb", Mark.ok, f"mode {subject.wandb_mode}: nothing is sent")
        return
    if not _has_key():
        advice = "type `wandb login`, or use wandb.mode=offline"
        found = f"online, but no WANDB_API_KEY and no key for {_WANDB_HOST} in ~/.netrc"
        yield Finding("wandb", Mark.failed, found, advice)
        return
    try:
        answer = bounded(lambda: socket.create_connection((_WANDB_HOST, 443), 10).close(), 12)
        problem = None if answer is not None else "no answer"
    except OSError as error:
        problem = str(error)
    if problem:
        found = f"a key is there, but {_WANDB_HOST} is not reached from here: {problem}"
        advice = "where the nodes reach it no better use wandb.mode=offline and `wandb sync` later"
        yield Finding("wandb", Mark.warning, found, advice)
    else:
        yield Finding("wandb", Mark.ok, f"online, a key is there, {_WANDB_HOST} is reached")


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(_WANDB_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False


CHECKS = (
    Check("host name", _host_name, limit_s=2 * _LOOKUP_LIMIT_S + 5),
    Check("ports", _ports),
    Check("limits", _limits),
    Check("/dev/shm", _shared_memory),
    Check("wandb", _wandb),
)
