"""At which addresses a process listens: /proc/PID/net/tcp, of its own network namespace."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

_LISTENING = "0A"
_ALL_V6 = "0" * 32


def addresses(pid: int) -> dict[int, str]:
    """Return the address of each TCP port at which a process listens, "*" for all of the host's; in the order
    in which it opened them, unless it has closed others before.
    """
    inodes: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes[str(entry.readlink()).removeprefix("socket:[").removesuffix("]")] = int(entry.name)
    found: dict[int, tuple[int, str]] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTENING and words[9] in inodes:
                    address, port = words[1].split(":")
                    found[int(port, 16)] = inodes[words[9]], _written(address)
    return {port: address for port, (_, address) in sorted(found.items(), key=lambda item: item[1])}


def _written(address: str) -> str:
    if len(address) > 8:
        return "*" if address == _ALL_V6 else f"v6 {address}"
    text = socket.inet_ntoa(bytes.fromhex(address)[::-1])
    return "*" if text == "0.0.0.0" else text
