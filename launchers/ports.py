"""Finds a free TCP port. It cannot keep it free: whoever uses it does so soon."""

from __future__ import annotations

import random
import socket

from launchers.errors import LauncherError

# Below Linux's range for outgoing connections (ip_local_port_range starts at 32768), so that none takes it
# meanwhile.
_FIRST, _LAST = 20000, 32767
_TRIES = 100


def free_port() -> int:
    """Return a port on which nobody listens on any address of this machine.

    Raises LauncherError if all tried are taken.
    """
    # Seeded from the system, not from a run's seed: two runs started together must not probe the same
    # ports.
    source = random.SystemRandom()
    for _ in range(_TRIES):
        port = source.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise LauncherError(
        f"no free TCP port found in {_FIRST}-{_LAST} ({_TRIES} tries); see `ss -ltn` for who listens there"
    )
