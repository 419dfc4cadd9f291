"""This host's addresses as other hosts of a job can use them, and free TCP ports. Linux only."""

from __future__ import annotations

import errno
import fcntl
import random
import socket
import struct
from collections import deque

from launchers import LauncherError

# <linux/sockios.h>
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15
# Any port: connecting a datagram socket sends nothing, it only asks the routing table.
_PORT = 9


def address_of_interface(name: str) -> str | None:
    """Return the IPv4 address of a network interface; None when it has none or is not there."""
    request = struct.pack("256s", name[:_NAME_BYTES].encode())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def address_towards(peer: str) -> str | None:
    """Return the address of this host by which packets leave for `peer`; None where there is no way."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, _PORT))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the interface that has this address; None when no interface has it."""
    names = (name for _, name in socket.if_nameindex())
    return next((name for name in names if address_of_interface(name) == address), None)


def reachable_address(interface: str | None, host: str, launch_address: str | None) -> str:
    """Return an address of this host that the other nodes reach.

    That of `interface` where one is configured, else what `host` (Slurm's name of it) means, else the one
    from which srun launched, if that is here. A name that means this machine only to itself (127.0.1.1) does
    not count. Raises LauncherError when none is found.
    """
    if interface is not None:
        address = address_of_interface(interface)
        if address is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise LauncherError(f"interface {interface} has no IPv4 address here; there are {names}")
        return address
    for name in (host, socket.gethostname(), launch_address):
        address = _resolved(name) if name else None
        if address is not None and not address.startswith("127.") and interface_of(address) is not None:
            return address
    raise LauncherError(
        f"no address of {socket.gethostname()} is known that other nodes reach: its name means no address of "
        f"an interface of its own; name the interface to use"
    )


def _resolved(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


# Below Linux's range for outgoing connections (ip_local_port_range starts at 32768), so that none takes it
# meanwhile.
_FIRST, _LAST = 20000, 32767
_TRIES = 100
# Of processes that start together one would find free what another one was given and does not use yet. Bound,
# and not listened on, a port can be had only by who says SO_REUSEADDR, as all do that listen.
_GIVEN: deque[socket.socket] = deque(maxlen=8)


def free_port() -> int:
    """Return a port on which nobody listens on any address of this machine.

    No other call here returns it while this process lives, or until it has asked for some more. Raises
    LauncherError if all tried are taken.
    """
    # Seeded from the system, not from a run's seed: two runs started together must not probe the same
    # ports.
    source = random.SystemRandom()
    for _ in range(_TRIES):
        port = source.randint(_FIRST, _LAST)
        probe = socket.socket()
        try:
            probe.bind(("", port))
        except OSError:
            probe.close()
            continue
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if len(_GIVEN) == _GIVEN.maxlen:
            _GIVEN.popleft().close()
        _GIVEN.append(probe)
        return port
    raise _none_is_free()


def listener(address: str) -> socket.socket:
    """Return a socket that listens on a free port of an address of this machine.

    Raises OSError where the address is none of its own, or nobody may listen there; else as `free_port`.
    """
    for _ in range(_TRIES):
        try:
            return socket.create_server((address, free_port()))
        except OSError as error:
            # Somebody was faster.
            if error.errno != errno.EADDRINUSE:
                raise
    raise _none_is_free()


def _none_is_free() -> LauncherError:
    return LauncherError(
        f"no free TCP port found in {_FIRST}-{_LAST} ({_TRIES} tries); see `ss -ltn` for who listens there"
    )
