"""What the record of a failed rank says about its cause, in words that are the same each time it happens.

A cause names no address, process id, time, path or step: two attempts that failed for the same reason have
the same one. It refuses to know what is done about a failure.
"""

from __future__ import annotations

import re
from pathlib import PurePath

from orchestra import roll_backs
from orchestra.jsonl import Record

BROKEN_PEER = "lost the connection to another rank"
BROKEN_DEVICE = roll_backs.BROKEN_DEVICE
_KILLED_BY = "killed by "
# Sent to a process by the kernel for want of memory, by Slurm or by a person.
_SIGNALS_FROM_OUTSIDE = frozenset(
    ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
)
# What a file system or a network does that is away for a while. Missing files are none of these.
_ERRORS_FROM_OUTSIDE = frozenset(
    (
        *("OSError", "TimeoutError", "BlockingIOError", "BrokenPipeError", "StorageError"),
        *("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError"),
    )
)
# What a broken connection to another rank looks like (gloo, NCCL, the store): that rank failed first.
_WORDS_OF_BROKEN_PEER = re.compile(
    r"connection (closed|reset|refused) by peer|connection (closed|reset|refused)\b|broken pipe|pair closure"
    r"|socket (has )?timed? ?out|remote process exited|NCCL (communicator|remote)|DistNetworkError"
    r"|failed to (recv|send), got|DistStoreError|MissingRanksError|store.* timed? ?out|wait timeout",
    re.IGNORECASE,
)
# What a broken device or its link says: CUDA's texts for errors 214, 220 and 714, and for lost devices.
_WORDS_OF_BROKEN_DEVICE = re.compile(
    r"uncorrectable (ECC|NVLink)|fallen off the bus|GPU is lost|hardware stack error|ECC error",
    re.IGNORECASE,
)
_LOSS_ERRORS = ("NonFiniteError", "LossSpikeError", "RollBackError")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line \d+, in (?P<function>\S+)', re.MULTILINE)
_NOT_OWN = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|^<|\.zip/")
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")


def fingerprint(record: Record) -> str:
    """Return the cause that a `failed` or `rank_failed` record of a rank tells.

    The signal that ended it; else, where an exception's words tell it, that a device or a peer was gone; else
    its type and the innermost function in its traceback that is not a library's; else the exit code.
    """
    signal = record.get("signal")
    if isinstance(signal, str):
        return f"{_KILLED_BY}{signal}"
    if _is_of_device(record):
        return BROKEN_DEVICE
    if follows_from_another(record):
        return BROKEN_PEER
    cause = str(record.get("cause") or "no verdict")
    if (frame := _last_own_frame(str(record.get("traceback") or ""))) is not None:
        return f"{cause} in {frame}"
    # "exit code 7" is the cause itself.
    return cause if cause.startswith("exit code ") else _CHANGING.sub("#", cause)


def _last_own_frame(traceback: str) -> str | None:
    frames = [match for match in _FRAME.finditer(traceback) if not _NOT_OWN.search(match["file"])]
    if not frames:
        return None
    return f"{'/'.join(PurePath(frames[-1]['file']).parts[-2:])}:{frames[-1]['function']}"


def is_from_outside(cause: str) -> bool:
    """Tell whether a cause lies outside of code and data: a signal that somebody sent, a device, a peer that
    was gone, a file system that was away.
    """
    if cause in (BROKEN_PEER, BROKEN_DEVICE):
        return True
    if cause.startswith(_KILLED_BY):
        return cause.removeprefix(_KILLED_BY) in _SIGNALS_FROM_OUTSIDE
    return cause.partition(" in ")[0] in _ERRORS_FROM_OUTSIDE


def is_of_loss(record: Record) -> bool:
    """Tell whether a rank gave up because of what it computed: a loss that is not finite, or leaps."""
    return record.get("cause") in _LOSS_ERRORS


def follows_from_another(record: Record) -> bool:
    """Tell whether a rank failed because another one was gone."""
    return "signal" not in record and bool(_WORDS_OF_BROKEN_PEER.search(_words(record)))


def speaks_against_host(record: Record) -> bool:
    """Tell whether a rank's failure is evidence against its host: a signal, or a device that is broken.

    An exception is not: whoever writes one runs.
    """
    return "signal" in record or _is_of_device(record)


def _is_of_device(record: Record) -> bool:
    return bool(_WORDS_OF_BROKEN_DEVICE.search(_words(record)))


def _words(record: Record) -> str:
    return f"{record.get('cause') or ''}: {record.get('message') or ''}"
