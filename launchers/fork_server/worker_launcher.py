"""What torchrun starts in place of a worker: has the fork server fork the worker, and ends as that ends.

`python -I -S worker_launcher.py MODULE ARGUMENTS…`: it hands over its environment, working directory and
standard streams. When this process dies, so does the worker. Signals are passed on where torchrun sent them:
whoever signals every process of a job reaches the worker anyway. Where the server refuses, it becomes
`python -u -m MODULE ARGUMENTS…` itself. It imports next to nothing: one of it is started per rank.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
from typing import NoReturn

_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
# Only should the kernel send no SIGIO for the socket.
_LOOK_S = 1.0


def main(arguments: list[str]) -> NoReturn:
    """Start the worker by the server, or become it."""
    # Isolated from the environment, this interpreter does not know where `launchers` lies.
    sys.path.insert(0, __file__.rpartition("/launchers/")[0])
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGIO})
    if (channel := _asked(arguments)) is not None:
        code = _worker_code(channel)
        if code is not None:
            _end_like(code)
        # Or its hang-up could still send a SIGIO, of which the worker would die.
        channel.close()
    _become_the_worker(arguments, mask)


def _asked(arguments: list[str]) -> socket.socket | None:
    """Return the channel on which the server was asked for the worker, or None."""
    from launchers.fork_server import wire

    try:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        wire.connect(channel, os.environ[wire.SOCKET_VARIABLE])
        request = {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),  # noqa: PTH109  pathlib takes 3 of this program's 20 ms
            "torchrun": os.getppid(),
        }
        wire.send(channel, request, (0, 1, 2))
        channel.setblocking(False)
        fcntl.fcntl(channel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(channel, fcntl.F_SETFL, fcntl.fcntl(channel, fcntl.F_GETFL) | os.O_ASYNC)
    except (OSError, KeyError):
        return None
    return channel


def _worker_code(channel: socket.socket) -> int | None:
    """Return the worker's exit code (negative: a signal), or None when the server refused to fork it."""
    from launchers.fork_server import wire

    forked = False
    while True:
        try:
            answer = wire.receive_pair(channel)
        except BlockingIOError:
            received = signal.sigtimedwait({*_PASSED_ON, signal.SIGIO}, _LOOK_S)
            if received is not None and received.si_signo != signal.SIGIO and received.si_pid == os.getppid():
                _pass_on(channel, received.si_signo)
            continue
        kind, number = answer or (0, 0)
        if kind == wire.ENDED:
            return number
        if kind != wire.FORKED:
            # Gone with the server, where it lived already.
            return -signal.SIGKILL if forked else None
        forked = True


def _pass_on(channel: socket.socket, number: int) -> None:
    from launchers.fork_server import wire

    try:
        wire.send_pair(channel, wire.SIGNAL, number)
    except OSError:
        # What came of the worker is read next.
        return


def _end_like(code: int) -> NoReturn:
    if code < 0:
        import resource

        # The worker has written its core already, if it may.
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _become_the_worker(arguments: list[str], mask: set[int]) -> NoReturn:
    # Ignoring discards what is pending; the worker gets the default again.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.execv(sys.executable, [sys.executable, "-u", "-m", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
