"""What `orchestra doctor --nodes` runs on every node: this file's text, for nodes that share nothing.

Standard library only. It prints one line, its answer in JSON; it judges nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import socket
import struct
import sys
import threading
import time

PREFIX = "ORCHESTRA-PROBE "
MEETING = "meeting.json"
LOGIN = "login"
_CONNECT_S = 5.0
_POLL_S = 0.1
_STAMP = struct.Struct("!d")


class Probe:
    """One node's look around."""

    def __init__(self, wishes: dict[str, object], node: int, num_nodes: int) -> None:
        self.folder = str(wishes["folder"])
        self.interface = wishes["interface"]
        self.deadline = time.monotonic() + float(str(wishes["wait_s"]))
        self.node, self.num_nodes = node, num_nodes
        self.answer: dict[str, object] = {
            "node": node,
            "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            "python": platform.python_version(),
            "executable": sys.executable,
        }

    def look(self) -> dict[str, object]:
        """Answer everything that can be answered here."""
        self._look_for_packages()
        # What another node broke is that node's answer.
        listener = self._meet() if self.node == 0 else None
        self._look_at_folder()
        if listener is not None:
            self._tell_the_time(listener)
        elif self.node:
            self._reach_node_0()
        return self.answer

    def _look_for_packages(self) -> None:
        try:
            import orchestra

            self.answer["orchestra"] = orchestra.__version__
            self.answer["root"] = os.path.dirname(os.path.dirname(os.path.realpath(orchestra.__file__)))  # noqa: PTH120
            self.answer["torch"] = importlib.util.find_spec("torch") is not None
            from orchestra.sizes.hardware import detect_gpus

            self.answer["gpus"] = detect_gpus()
        except Exception as error:  # noqa: BLE001  is the answer
            self.answer["packages_problem"] = f"{type(error).__name__}: {error}"

    def _meet(self) -> socket.socket | None:
        """Listen where ranks would meet, and let the others know through the folder. *Node 0 only*."""
        try:
            from launchers.host_network import listener, reachable_address

            launch = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
            interface = None if self.interface is None else str(self.interface)
            address = reachable_address(interface, str(self.answer["host"]), launch)
            listening = listener(address)
            self.answer["address"] = address
            self._write(MEETING, json.dumps(listening.getsockname()))
        except Exception as error:  # noqa: BLE001  is the answer
            self.answer["address_problem"] = str(error)
            return None
        return listening

    def _look_at_folder(self) -> None:
        """Write a file of one's own, and wait for everybody's."""
        expected = {LOGIN, *(f"node-{node}" for node in range(self.num_nodes))}
        if not os.path.isdir(self.folder):  # noqa: PTH112
            self.answer["folder_problem"] = "it is not there"
            return
        try:
            self._write(f"node-{self.node}", str(self.answer["host"]))
            begin = time.monotonic()
            while not expected <= (found := set(os.listdir(self.folder))) and self._has_time():  # noqa: PTH208
                time.sleep(_POLL_S)
            self.answer["saw"] = sorted(expected & found)
            self.answer["saw_after_s"] = time.monotonic() - begin
        except OSError as error:
            self.answer["folder_problem"] = error.strerror

    def _write(self, name: str, text: str) -> None:
        draft = os.path.join(self.folder, f".{name}.{self.node}")  # noqa: PTH118
        with open(draft, "w") as file:  # noqa: PTH123
            file.write(text)
        os.replace(draft, os.path.join(self.folder, name))  # noqa: PTH105, PTH118

    def _has_time(self) -> bool:
        return time.monotonic() < self.deadline

    def _tell_the_time(self, listener: socket.socket) -> None:
        """Answer every node once with this node's clock. *Node 0 only*."""
        for _ in range(self.num_nodes - 1):
            listener.settimeout(max(_POLL_S, self.deadline + _CONNECT_S - time.monotonic()))
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.sendall(_STAMP.pack(time.time()))

    def _reach_node_0(self) -> None:
        """Connect to node 0 and compare clocks: its stamp was made between two of this node's."""
        try:
            with open(os.path.join(self.folder, MEETING)) as file:  # noqa: PTH118, PTH123
                address, port = json.load(file)
        except (OSError, ValueError):
            return
        try:
            begin = time.time()
            with socket.create_connection((address, port), _CONNECT_S) as connection:
                stamp = _STAMP.unpack(connection.recv(_STAMP.size, socket.MSG_WAITALL))[0]
            self.answer["clock_offset_s"] = (begin + time.time()) / 2 - stamp
            self.answer["reached"] = True
        except (OSError, struct.error) as error:
            self.answer["reached"] = False
            self.answer["reach_problem"] = f"{address}:{port}: {error}"
        self.answer["lookup_s"] = _lookup_s(address)


def _lookup_s(address: str) -> float:
    """Return how long it takes to ask for the name of an address, as torch does; at most some seconds."""

    def ask() -> None:
        with contextlib.suppress(OSError):
            socket.gethostbyaddr(address)

    begin = time.monotonic()
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_CONNECT_S)
    return time.monotonic() - begin


def main(argv: list[str]) -> None:
    """Print this node's answer."""
    node, num_nodes = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    answer = Probe(json.loads(argv[0]), node, num_nodes).look()
    sys.stdout.write(f"{PREFIX}{json.dumps(answer)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
