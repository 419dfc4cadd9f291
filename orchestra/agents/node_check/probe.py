"""Checks one node: devices, memory, disks, kernel log, clock, speed of a core. A program of its own.

`python -I -S probe.py WISHES` (JSON) prints a JSON line for each check as soon as it is done, and ends. A
dead file server or device holds a process for ever: the agent that started this one does not wait for it, and
takes a check without a line for one that hangs. It needs the standard library alone, and knows the same signs
of failure as `slurm/healthcheck`, which is independent as well.

A line says what keeps the node from training (`unfit`), what speaks against it where there is another
(`doubt`), and what was measured (`facts`).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

GIB = 1 << 30
# The check of them.
DEVICES = "devices"
# What must be left of a place, unless that is small as a whole.
LEAST_ROOM_BYTES, LEAST_ROOM_SHARE = GIB, 0.05
# Above that somebody else computes on the device: a context without work holds less.
MOST_MEMORY_SHARE = 0.1
# A process that has just ended may hold memory for a moment.
_MEMORY_TRIES, _MEMORY_PAUSE_S = 3, 1.0
_COMMAND_TIMEOUT_S = 30.0
_HASHED_BYTES, _HASHES = 4 << 20, 3
_LOG_BYTES = 8192
_DRIVERS_LIST = "/proc/driver/nvidia/gpus"
# Of a place that all nodes share: no single node is to blame for it.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_DAY_US = 24 * 3600 * 10**6
# NVIDIA's numbers of failures of the device itself, not of what ran on it: double bit errors, rows that could
# not be remapped, NVLink, fallen off the bus, uncontained errors, a system processor that does not answer.
XIDS_OF_DEVICE = frozenset({48, 62, 64, 74, 79, 95, 119, 120, 136, 140, 143})
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+)")
_MEMORY_ERROR = re.compile(r"EDAC \w+: \d+ UE |mce: Uncorrected")

Finding = dict[str, Any]


def main(words: list[str]) -> int:
    """Run all checks at once, print what each found when it is done, and end when all are done."""
    wishes = json.loads(words[0])
    threads = []
    for name, check in checks(wishes):
        thread = threading.Thread(target=_print_finding, args=(name, check), daemon=True)
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    return 0


def checks(wishes: dict[str, Any]) -> list[tuple[str, Callable[[], Finding]]]:
    """Return what is checked: `folder` (shared), `rooms` (places of this node), `gpus` (0: none).

    `copies` is how the paths of the run's own copies in memory begin: what they take the next attempt has.
    """
    named: list[tuple[str, Callable[[], Finding]]] = []
    copies = wishes.get("copies", "")
    rooms = wishes.get("rooms", [])
    named += [(f"room in {place}", functools.partial(room, place, copies)) for place in rooms]
    named += [("memory", functools.partial(host_memory, copies))]
    named += [("kernel log", kernel_log), ("core", core_speed)]
    if wishes.get("folder"):
        named.append(("run directory", lambda: keeps_a_file(wishes["folder"])))
    if wishes.get("gpus"):
        named.append((DEVICES, lambda: devices(int(wishes["gpus"]))))
    return named


def _print_finding(name: str, check: Callable[[], Finding]) -> None:
    begin = time.monotonic()
    try:
        finding = check()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        finding = {"unfit": str(error)}
    seconds = round(time.monotonic() - begin, 3)
    line = json.dumps({"check": name, "seconds": seconds, **finding}) + "\n"
    # One write, so that two checks' lines do not mix.
    os.write(1, line.encode())


def keeps_a_file(folder: str) -> Finding:
    """Write a small file, have it stored, read it back; compare its time with this host's clock."""
    place = os.path.join(folder, f".fitness.{os.uname().nodename}.{os.getpid()}")  # noqa: PTH118
    content = os.urandom(512)
    before = time.time()
    begin = time.monotonic()
    try:
        with open(place, "wb") as file:  # noqa: PTH123
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with open(place, "rb") as file:  # noqa: PTH123
            same = file.read() == content
            stamp = os.fstat(file.fileno()).st_mtime
    except OSError as error:
        return {"doubt" if error.errno in _FULL else "unfit": f"{folder}: {error.strerror}"}
    finally:
        with contextlib.suppress(OSError):
            os.unlink(place)  # noqa: PTH108
    seconds = time.monotonic() - begin
    facts = {"clock_ahead_s": clock_ahead_s(before, before + seconds, stamp), "write_s": round(seconds, 3)}
    if not same:
        return {"unfit": f"a file written in {folder} was read back differently", "facts": facts}
    return {"facts": facts}


def clock_ahead_s(before: float, after: float, stamp: float) -> float:
    """Return by how much this host's clock is ahead of the one that stamped a file in between; 0: no more
    than a stamp in whole seconds tells.
    """
    slow_by = stamp - after
    ahead = before - (stamp + 1.0)
    return round(-slow_by if slow_by > 0 else max(ahead, 0.0), 3)


def room(place: str, copies: str = "") -> Finding:
    """Look at the free bytes and files of a place of this node alone."""
    if not os.path.isdir(place):  # noqa: PTH112
        return {"unfit": f"{place} is no folder here"}
    state = os.statvfs(place)
    free, size = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    least = min(LEAST_ROOM_BYTES, int(size * LEAST_ROOM_SHARE))
    if free < least and copies.startswith(f"{place}/"):
        free += bytes_of(copies)
    if free < least:
        return {"unfit": f"{place} has {_shown(free)} free, at least {_shown(least)} are needed"}
    if state.f_files and not state.f_favail:
        return {"unfit": f"{place} has no inode left"}
    return {}


def bytes_of(beginning: str) -> int:
    """Return what the files take whose paths begin so."""
    total = 0
    for folder, _, names in os.walk(os.path.dirname(beginning)):  # noqa: PTH120
        for name in names:
            # Ranks replace their copies all the time.
            with contextlib.suppress(OSError):
                if (path := os.path.join(folder, name)).startswith(beginning):  # noqa: PTH118
                    total += os.stat(path).st_blocks * 512  # noqa: PTH116
    return total


def host_memory(copies: str = "") -> Finding:
    """Look at the memory that nobody uses."""
    with open("/proc/meminfo") as file:  # noqa: PTH123
        text = file.read()
    size, free = (_kib(text, name) * 1024 for name in ("MemTotal", "MemAvailable"))
    least = min(4 * GIB, int(size * LEAST_ROOM_SHARE))
    if free < least and copies:
        free += bytes_of(copies)
    if free < least:
        return {"doubt": f"{_shown(free)} of host memory are free, at least {_shown(least)} are needed"}
    return {}


def _kib(text: str, name: str) -> int:
    match = re.search(rf"^{name}: +(\d+) kB", text, re.MULTILINE)
    if match is None:
        raise ValueError(f"/proc/meminfo has no {name}")
    return int(match[1])


def core_speed() -> Finding:
    """Measure how long one core needs for a fixed piece of work; waiting for the core does not count."""
    block = bytes(_HASHED_BYTES)
    seconds = []
    for _ in range(_HASHES):
        begin = time.thread_time()
        hashlib.sha256(block).digest()
        seconds.append(time.thread_time() - begin)
    return {"facts": {"core_s": round(min(seconds), 5)}}


def kernel_log() -> Finding:
    """Look for failed devices in the kernel's log of the last day, where this user may read it."""
    try:
        number = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        signs = signs_of_failure(_lines(number), int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6))
    finally:
        os.close(number)
    return {"doubt": signs} if signs else {}


def _lines(number: int) -> list[str]:
    lines = []
    while True:
        try:
            lines.append(os.read(number, _LOG_BYTES).decode(errors="replace"))
        except BlockingIOError:
            return lines
        except OSError as error:
            # Overwritten while it was read: the next read goes on after that.
            if not isinstance(error, BrokenPipeError):
                return lines


def signs_of_failure(lines: list[str], now_us: int) -> str:
    """Return what records of /dev/kmsg (`level,number,microseconds,flags;text`) say of failed devices."""
    signs = []
    for line in lines:
        head, _, text = line.partition(";")
        fields = head.split(",")
        if len(fields) < 3 or not fields[2].isdigit() or now_us - int(fields[2]) > _DAY_US:
            continue
        xid = _XID.search(text)
        if xid is not None and int(xid[2]) in XIDS_OF_DEVICE:
            signs.append(f"Xid {xid[2]} of device {xid[1]}")
        elif _MEMORY_ERROR.search(text):
            signs.append(text.partition("\n")[0].strip())
    return "; ".join(dict.fromkeys(signs))[:300]


# NVIDIA's devices.

# Each on its own where a driver does not know one: it then answers none.
_ALWAYS = ("index", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total")
_PENDING = ("retired_pages.pending", "remapped_rows.pending", "remapped_rows.failure")
_SLOWED = ("clocks_throttle_reasons.hw_slowdown", "pcie.link.width.current", "pcie.link.width.max")


def devices(wanted: int) -> Finding:
    """Count the devices that this job sees, and ask each for errors, memory in use and what slows it down."""
    if shutil.which("nvidia-smi") is None:
        # Images need not have it; the kernel names all devices, also those that are not this job's.
        with contextlib.suppress(OSError):
            num_devices = len(os.listdir(_DRIVERS_LIST))  # noqa: PTH208
            if num_devices < wanted:
                return {"unfit": f"the driver knows {num_devices} devices, {wanted} are needed"}
        return {}
    for attempt in range(_MEMORY_TRIES):
        rows = (
            _queried((*_ALWAYS, *_PENDING, *_SLOWED)) or _queried((*_ALWAYS, *_PENDING)) or _queried(_ALWAYS)
        )
        if rows is None:
            return {"unfit": "nvidia-smi does not answer as it should"}
        finding = judged_devices(rows, wanted)
        if "in use" not in finding.get("doubt", "") or attempt == _MEMORY_TRIES - 1:
            return finding
        time.sleep(_MEMORY_PAUSE_S)
    return {}


def judged_devices(rows: list[dict[str, str]], wanted: int) -> Finding:
    """Return what nvidia-smi's answers mean, one row for each device."""
    if len(rows) < wanted:
        return {"unfit": f"nvidia-smi shows {len(rows)} devices, {wanted} are needed"}
    facts = {"facts": {"devices": len(rows)}}
    doubts = [doubt for row in rows for doubt in _doubts(row)]
    return {"doubt": "; ".join(doubts), **facts} if doubts else facts


def _doubts(row: dict[str, str]) -> list[str]:
    index, doubts = row["index"], []
    errors = row["ecc.errors.uncorrected.volatile.total"]
    if errors.isdigit() and int(errors):
        doubts.append(f"device {index} has {errors} uncorrected memory errors")
    if any(row.get(name, "").lower() in ("yes", "1") for name in _PENDING):
        doubts.append(f"device {index} waits for a reset to repair its memory")
    used, size = row["memory.used"], row["memory.total"]
    if used.isdigit() and size.isdigit() and int(used) > MOST_MEMORY_SHARE * int(size):
        doubts.append(f"device {index} has {used} of {size} MiB in use")
    if row.get(_SLOWED[0], "").lower() == "active":
        doubts.append(f"device {index} is slowed down by its power supply or heat")
    width, widest = row.get(_SLOWED[1], ""), row.get(_SLOWED[2], "")
    if width.isdigit() and widest.isdigit() and int(width) < int(widest):
        doubts.append(f"device {index} uses {width} of {widest} PCIe lanes")
    return doubts


def _queried(names: tuple[str, ...]) -> list[dict[str, str]] | None:
    """Ask nvidia-smi; None where it does not know one of the names, or fails. Raises TimeoutExpired."""
    words = ["nvidia-smi", "--format=csv,noheader,nounits", f"--query-gpu={','.join(names)}"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if visible and not visible.startswith(("MIG", "NoDevFiles", "-")):
        words.append(f"--id={visible}")
    done = subprocess.run(
        words,
        check=False,
        capture_output=True,
        text=True,
        timeout=_COMMAND_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        return None
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return [dict(zip(names, (word.strip() for word in line.split(",")), strict=False)) for line in lines]


def _shown(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # A thread that hangs must not hold the others' end.
    os._exit(code)
