"""Rank heartbeats: a small record in the node's memory that says how far a rank has come.

The training thread itself writes it, so that a rank that is stopped, loops, or holds the interpreter's lock
does not beat. A beat is a store into mapped memory: no system call, no file system, no device. The node agent
reads the records of its ranks and asks a silent one for the stacks of its threads. What silence means is not
known here. Standard library only, and imported before torch.

The records lie in the folder that the environment variable ORCHESTRA_BEATS names, which the agent sets; where
it is not set nobody looks, and beats go nowhere.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import mmap
import os
import signal
import stat
import struct
import tempfile
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from orchestra.run.paths import RunDir

FOLDER_VARIABLE = "ORCHESTRA_BEATS"
# Asks a rank for the stacks of its threads. Python, torch and NCCL use no real-time signal.
STACKS_SIGNAL = signal.SIGRTMIN + 3
# Asks it what its collectives did last. Blocked in all threads but for the one that waits for it.
COLLECTIVES_SIGNAL = signal.SIGRTMIN + 4
_SHARED_MEMORY = Path("/dev/shm")


class Phase(IntEnum):
    """What a rank is doing, in the order in which it comes: a smaller one is less progress."""

    setup = 0
    restore = 1
    # An attempt's step, from its begin on.
    step = 2
    data = 3
    forward = 4
    backward = 5
    # Gradients and their norm, over all ranks.
    reduce = 6
    update = 7
    # Whether to stop: rank 0's word.
    agree = 8
    # Reads the device's results and writes them down.
    record = 9
    save = 10
    # A save that is waited for until it is committed, such as the last one.
    commit = 11
    # After the last step: closes what it holds.
    stop = 12


@dataclass(frozen=True)
class Beat:
    """What a rank wrote last. `turn`: the place of the micro-batch's pass among the step's passes, over all
    ranks. `first_step`: of this attempt, 0 before it. `started` (clock ticks since boot) tells its process
    from a later one.
    """

    count: int
    phase: Phase
    step: int
    micro_batch: int
    turn: int
    first_step: int
    pid: int
    started: int

    @property
    def position(self) -> tuple[int, int, int, int]:
        """Where the rank stands; tuples of different ranks compare like their progress."""
        is_micro_batch = self.phase in (Phase.forward, Phase.backward)
        coarse = Phase.forward if is_micro_batch else self.phase
        return self.step, coarse, self.turn if is_micro_batch else 0, self.phase


# Magic, count, phase, step, micro-batch, turn, first step, pid, start, and the count again: a reader that
# finds the two different came in the midst of a beat.
_RECORD = struct.Struct("<8sqqqqqqqqq")
_MAGIC = b"orchbeat"
# The endings of the files that a rank leaves.
_RECORDS = ("beat", "stacks", "collectives")


class Heart:
    """Writes one rank's record. *Training thread only*; made by `open_heart`, or `silent_heart`."""

    def __init__(self, memory: mmap.mmap | bytearray, collectives: Path | None = None) -> None:
        """`collectives`: where this rank writes what its collectives did last when it is asked to."""
        self.collectives = collectives
        self._memory = memory
        self._count = self._first_step = 0
        self._pid, self._started = os.getpid(), _started()

    def beat(self, phase: Phase, step: int = 0, micro_batch: int = 0, turn: int | None = None) -> None:
        """Say where this rank stands. Never waits, never fails."""
        self._count = count = self._count + 1
        if not self._first_step and phase is Phase.step:
            self._first_step = step
        turn = micro_batch if turn is None else turn
        place = (phase, step, micro_batch, turn, self._first_step, self._pid, self._started)
        _RECORD.pack_into(self._memory, 0, _MAGIC, count, *place, count)


def silent_heart() -> Heart:
    """Return a heart whose beats nobody hears."""
    return Heart(bytearray(_RECORD.size))


def open_heart(run: RunDir, attempt: int, rank: int) -> Heart:
    """Return this process's heart, after its first beat, and be ready to show stacks. *Any rank*, once.

    Where the agent's folder cannot be written, the run's `heartbeats/` takes the record: the agent looks
    there too. Without ORCHESTRA_BEATS the heart is silent.
    """
    if FOLDER_VARIABLE not in os.environ:
        return silent_heart()
    for folder in (Path(os.environ[FOLDER_VARIABLE]), run.heartbeats):
        with contextlib.suppress(OSError):
            place = collectives_file(folder, attempt, rank)
            heart = Heart(_mapped(beat_file(folder, attempt, rank)), place)
            heart.beat(Phase.setup)
            # Before there are other threads, which take on what is blocked here.
            signal.pthread_sigmask(signal.SIG_BLOCK, {COLLECTIVES_SIGNAL})
            # faulthandler keeps the file open for as long as the process lives.
            stacks = stacks_file(folder, attempt, rank).open("ab", buffering=0)
            # Written in the handler itself, whoever has the interpreter's lock.
            faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
            return heart
    return silent_heart()


def _mapped(path: Path) -> mmap.mmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A file of its own: an earlier process may still have one of this name mapped.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # Written, not only made longer: a page that a full memory cannot hold would be a SIGBUS later.
        os.write(descriptor, bytes(_RECORD.size))
        return mmap.mmap(descriptor, _RECORD.size)
    finally:
        os.close(descriptor)


def _started() -> int:
    """Return this process's start in clock ticks since boot; 0 where the system does not tell."""
    try:
        text = Path("/proc/self/stat").read_text()
    except OSError:
        return 0
    return int(text[text.rindex(")") + 2 :].split()[19])


def beat_file(folder: Path, attempt: int, rank: int) -> Path:
    """Return where a rank's record lies."""
    return folder / f"attempt-{attempt:03d}.rank-{rank:05d}.beat"


def stacks_file(folder: Path, attempt: int, rank: int) -> Path:
    """Return where a rank shows its stacks when it is asked to."""
    return folder / f"attempt-{attempt:03d}.rank-{rank:05d}.stacks"


def collectives_file(folder: Path, attempt: int, rank: int) -> Path:
    """Return where a rank writes what its collectives did last, each time as a whole."""
    return folder / f"attempt-{attempt:03d}.rank-{rank:05d}.collectives"


def read_beat(path: Path) -> Beat | None:
    """Return a rank's last beat; None where there is none yet."""
    for _ in range(3):
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if len(content) != _RECORD.size:
            return None
        magic, count, phase, *place, count_again = _RECORD.unpack(content)
        # A process that was stopped in the midst of a beat leaves the two different: then as it is.
        if count == count_again:
            break
    if magic != _MAGIC or phase not in Phase.__members__.values():
        return None
    return Beat(count, Phase(phase), *place)


def beats_folder(run: RunDir) -> Path:
    """Return a folder of this node and this user for the run's records, made here. *The node agent*.

    In shared memory, else among the temporary files, else in the run's directory. Raises OSError where none
    of them can be written.
    """
    key = hashlib.sha256(str(run.path).encode()).hexdigest()[:12]
    for place in (_SHARED_MEMORY, Path(tempfile.gettempdir())):
        with contextlib.suppress(OSError):
            return _own_folder(place / f"orchestra-{os.getuid()}", key)
    run.heartbeats.mkdir(parents=True, exist_ok=True)
    return run.heartbeats


def _own_folder(parent: Path, name: str) -> Path:
    """Make a folder below one that nobody else can write: both names can be guessed."""
    parent.mkdir(mode=0o700, exist_ok=True)
    status = parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{parent} is not this user's own")
    folder = parent / name
    folder.mkdir(mode=0o700, exist_ok=True)
    (probe := folder / f"probe-{os.getpid()}").write_bytes(b"x")
    probe.unlink()
    return folder


def remove_records(folder: Path, attempts: range) -> None:
    """Remove what these attempts left. Whoever still has a record mapped is not disturbed."""
    for path in (path for kind in _RECORDS for path in folder.glob(f"attempt-*.rank-*.{kind}")):
        number = path.name.partition(".")[0].removeprefix("attempt-")
        if number.isdigit() and int(number) in attempts:
            path.unlink(missing_ok=True)
    # Another agent's may lie there; in the run's directory other files do.
    with contextlib.suppress(OSError):
        folder.rmdir()
