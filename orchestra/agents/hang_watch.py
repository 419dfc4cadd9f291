"""The node agent's ear: reads the heartbeats of its ranks, and tells which of them hang.

It looks once a second into the node's memory, counts silence on its own watch only, and compares it with the
limits of `orchestra.recovery.hangs`. A hang is written down with its stacks; to kill is the caller's part.
Time in which the agent itself did not run (a suspended job, a starved machine) counts as no silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conf.schema import Config
from launchers import processes
from launchers.processes import Process
from launchers.spec import LaunchSpec
from orchestra.agents.hang_watch_all_nodes import STALLED, WENT_ON, Stall
from orchestra.errors import EXIT_FAILED
from orchestra.recovery.hangs import (
    History,
    LimitRules,
    Standing,
    furthest_behind,
    limit,
    limit_rules,
    step_limit,
)
from orchestra.run.events import EventWriter, is_number, read_events
from orchestra.run.heartbeat import (
    FOLDER_VARIABLE,
    STACKS_SIGNAL,
    Beat,
    Phase,
    beat_file,
    beats_folder,
    read_beat,
    remove_records,
    stacks_file,
)
from orchestra.run.paths import RunDir
from orchestra.run.planned_faults import AGENT_VARIABLE

# What a silent rank is doing, before it is killed: the stacks of its threads, or what the kernel tells.
#
# The rank itself appends its Python stacks to a file of this node when it gets a signal: in the handler, so
# that no lock holds it back. A process that cannot answer is looked at from outside: by py-spy where that is
# installed, and in /proc. It knows no limits and kills nobody.


# How long ranks have to answer. A processor that is busy elsewhere took up to 0.3 s.
_ANSWER_S = 2.0
_POLL_S = 0.05
_PY_SPY_S = 10.0
# Of ranks that only wait, the main thread's stack is kept, up to so many lines.
_SHORT_LINES = 60
# Text per rank: a recursion of a hundred thousand frames would fill a disk, 2,000 nodes at once.
_MAX_BYTES = 256 << 10


@dataclass(frozen=True)
class Asked:
    """One rank that is to show its stacks: the file that it appends them to, and the one they are kept in."""

    rank: int
    process: Process
    answer: Path
    target: Path
    is_suspect: bool
    words: str


def dump(asked: Mapping[int, Asked]) -> dict[int, Path]:
    """Append each rank's stacks to its target; return the targets by rank.

    Waits for two seconds at most, and longer only where py-spy is at work. A file that cannot be written is
    left out.
    """
    sizes = {rank: _size(it.answer) for rank, it in asked.items()}
    answering = [it for it in asked.values() if _can_answer(it.process)]
    processes.send([it.process for it in answering], STACKS_SIGNAL)
    _await_answers({it.rank: it for it in answering}, sizes)
    files = {}
    for rank, it in asked.items():
        text = _answer(it, sizes[rank]) if it in answering else ""
        if not text:
            text = _seen_from_outside(it)
        head = f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank}, process {it.process.pid}: {it.words}\n"
        with contextlib.suppress(OSError):
            it.target.parent.mkdir(parents=True, exist_ok=True)
            with it.target.open("a", errors="replace") as file:
                file.write(f"{head}{text}\n")
            files[rank] = it.target
    return files


def _can_answer(process: Process) -> bool:
    """Tell whether it handles the signal (it would die of it otherwise) and is not stopped."""
    if processes.state(process) in ("T", "t", "Z", None):
        return False
    return processes.catches(process, STACKS_SIGNAL)


def _await_answers(answering: Mapping[int, Asked], sizes: Mapping[int, int]) -> None:
    """Wait until every file has grown and then rests: it is written frame by frame."""
    deadline = time.monotonic() + _ANSWER_S
    before: dict[int, int] = {}
    while answering and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = {rank: _size(it.answer) for rank, it in answering.items()}
        if now == before and all(now[rank] > sizes[rank] for rank in now):
            return
        before = now


def _answer(it: Asked, offset: int) -> str:
    try:
        with it.answer.open("rb") as file:
            file.seek(offset)
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
    return text if it.is_suspect else _main_thread(text)


def _main_thread(text: str) -> str:
    """Return the part of the thread that was interrupted: the main one, which trains."""
    threads = text.split("\n\n")
    current = [it for it in threads if it.startswith("Current thread")] or threads[-1:]
    return "\n".join(current[0].splitlines()[:_SHORT_LINES])


def _seen_from_outside(it: Asked) -> str:
    state = processes.state(it.process)
    reason = {
        "T": "it is stopped (SIGSTOP)",
        "t": "a debugger holds it",
        None: "it is gone",
        "Z": "it is gone",
    }.get(state, "it did not answer")
    words = [f"{reason}: its stacks as seen from outside"]
    if state not in (None, "Z"):
        words += [_py_spy(it.process.pid), _kernel(it.process.pid)]
    return "\n".join(word for word in words if word)


def _py_spy(pid: int) -> str:
    """Return the Python stacks that py-spy reads out of the process's memory, where it is installed."""
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PY_SPY_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"py-spy: {error}"
    return (done.stdout or done.stderr).decode(errors="replace")[:_MAX_BYTES]


def _kernel(pid: int) -> str:
    """Return what /proc tells of the main thread: state, where it sleeps, its system call, kernel stack."""
    lines = []
    for name in ("status", "wchan", "syscall", "stack"):
        with contextlib.suppress(OSError):
            text = (Path("/proc") / str(pid) / name).read_text(errors="replace").strip()
            if name == "status":
                kept = ("State:", "Threads:", "VmRSS:", "voluntary_ctxt_switches:")
                text = "; ".join(
                    " ".join(line.split()) for line in text.splitlines() if line.startswith(kept)
                )
            lines.append(f"{name}: {text or 'nothing'}")
    return "\n".join(lines)


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0


LOOK_S = 1.0
# A longer pause between two looks was the agent's own.
_LONGEST_PAUSE_S = 3.0
# How often the node's summary is written, and a missing record is looked for in the run's directory.
_SUMMARY_S = 10.0
_IN_STEPS = frozenset(range(Phase.step, Phase.save))


@dataclass(frozen=True)
class Node:
    """This node in an attempt: its number in the job, and its place among those that take part."""

    attempt: int
    number: int
    place: int


@dataclass(frozen=True)
class Watched:
    """Whose ranks are watched: those of one node in one attempt. `folder` is what ORCHESTRA_BEATS says."""

    run: RunDir
    attempt: int
    node: int
    ranks: tuple[int, ...]
    world_size: int
    folder: Path

    @property
    def is_whole(self) -> bool:
        """Whether no rank of the run is on another node."""
        return len(self.ranks) == self.world_size


@dataclass(frozen=True)
class Hang:
    """A rank that hangs. `stacks` is the file with what it was doing; None where none could be written."""

    standing: Standing
    limit_s: float
    process: Process | None
    stacks: Path | None

    @property
    def rank(self) -> int:
        return self.standing.rank


@dataclass
class _Rank:
    """One rank as it was seen last. Times are seconds on the pulse's watch."""

    beat: Beat | None = None
    changed_at: float = 0.0
    stepped_at: float = 0.0
    phase_since: float = 0.0
    state: str | None = None
    has_ended: bool = False
    folder: Path | None = None
    history: History = field(default_factory=History)

    @property
    def process(self) -> Process | None:
        return None if self.beat is None else Process(self.beat.pid, self.beat.started)

    def hear(self, beat: Beat, now: float) -> None:
        """Take a new beat, and learn from what lies between it and the one before."""
        before, self.beat = self.beat, beat
        silence_s, self.changed_at = now - self.changed_at, now
        if before is None or (before.pid, before.started) != (beat.pid, beat.started):
            self.stepped_at = self.phase_since = now
            # Fast steps may lie behind it before anybody looked: then this is not its first one.
            if beat.first_step and beat.step > beat.first_step:
                self.history.add_steps(beat.step - beat.first_step, max(now, LOOK_S))
            return
        was_training = before.phase >= Phase.step
        if {before.phase, beat.phase} <= _IN_STEPS:
            self.history.add_silence(silence_s)
        if beat.step != before.step:
            done = beat.step - (before.step if was_training else beat.first_step)
            if done > 0:
                self.history.add_steps(done, now - self.stepped_at)
            self.stepped_at = now
        if beat.phase is not before.phase:
            if before.phase is Phase.save:
                self.history.saves_s.append(now - self.phase_since)
            self.phase_since = now


def pulse_environment(run: RunDir) -> dict[str, str]:
    """Return what is added to the environment of a node's ranks, so that they beat. Raises OSError.

    *The node agent*, in the process that is to be killed where a fault says so.
    """
    return {FOLDER_VARIABLE: str(beats_folder(run)), AGENT_VARIABLE: str(os.getpid())}


def open_pulse(config: Config, run: RunDir, events: EventWriter, spec: LaunchSpec, node: Node) -> Pulse:
    """Return the pulse of this node's ranks in an attempt that has just been started with
    `pulse_environment` in its `spec`.
    """
    count = spec.ranks_per_node
    ranks = tuple(range(node.place * count, (node.place + 1) * count))
    folder = Path(spec.environment[FOLDER_VARIABLE])
    watched = Watched(run, node.attempt, node.number, ranks, spec.world_size, folder)
    past = read_events(run, ("restored",))
    restores = [it["seconds"] for it in past if it["event"] == "restored" and is_number(it.get("seconds"))]
    return Pulse(watched, limit_rules(config), events, [it for it in restores if it > 0])


class Pulse:
    """Watches the ranks of one node through one attempt. `look` is called about ten times a second."""

    def __init__(
        self,
        watched: Watched,
        rules: LimitRules,
        events: EventWriter,
        restores_s: Sequence[float] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to watch, from now on. `restores_s`: how long the run's restores took so far."""
        self._watched = watched
        self._rules = rules
        self._events = events
        self._clock = clock
        self._looked_at = clock()
        # The pulse's own watch, which stands still while the agent does.
        self._now = 0.0
        self._ranks = {rank: _Rank() for rank in watched.ranks}
        for it in self._ranks.values():
            it.history.restores_s.extend(restores_s)
        self._host = socket.gethostname()
        # Of each rank the position that was told when they fell silent; None while they move.
        self._told: dict[int, tuple[int, ...]] | None = None
        self.stall: Stall | None = None
        self._accused: set[int] = set()
        self._summary_at = 0.0

    def look(self) -> tuple[Hang, ...]:
        """Return the ranks that were found to hang just now, each once; their stacks are written by then.

        Once a second it reads the records of the node; when it finds a hang it takes up to two seconds more.
        """
        now = self._clock()
        passed = now - self._looked_at
        if passed < LOOK_S:
            return ()
        self._looked_at = now
        self._now += min(passed, _LONGEST_PAUSE_S)
        self._read()
        living = {rank: it for rank, it in self._ranks.items() if not it.has_ended}
        standings = {rank: self._standing(rank, it) for rank, it in living.items()}
        self._tell_stall(standings)
        if self._now >= self._summary_at:
            self._summary_at = self._now + _SUMMARY_S
            self._write_summary(standings)
        limits = self._limits(standings)
        silent = [it for rank, it in standings.items() if it.silent_s > limits[rank]]
        hung = [it for it in furthest_behind(silent) if it.rank not in self._accused]
        return self._accuse(hung, standings, limits) if hung else ()

    def close(self) -> None:
        """Remove the records of this attempt and of older ones. *After the ranks have ended.*"""
        with contextlib.suppress(OSError):
            remove_records(self._watched.folder, range(self._watched.attempt + 1))

    # Looking.

    def _read(self) -> None:
        for rank, it in self._ranks.items():
            beat = self._last_beat(rank, it)
            if beat is not None and beat != it.beat:
                it.hear(beat, self._now)
            if it.process is not None:
                it.state = processes.state(it.process)
                # torchrun sees the end of its children, and says so.
                it.has_ended = it.state in (None, "Z", "X")

    def _last_beat(self, rank: int, it: _Rank) -> Beat | None:
        attempt, here, far = self._watched.attempt, self._watched.folder, self._watched.run.heartbeats
        if it.folder is not None:
            return read_beat(beat_file(it.folder, attempt, rank))
        # Who could not write here writes there: on a shared file system, which is asked seldom.
        for folder in (here, far) if self._now >= self._summary_at else (here,):
            if (beat := read_beat(beat_file(folder, attempt, rank))) is not None:
                it.folder = folder
                return beat
        return None

    def _standing(self, rank: int, it: _Rank) -> Standing:
        beat = it.beat or Beat(0, Phase.setup, 0, 0, 0, 0, 0)
        silent_s = self._now - it.changed_at
        return Standing(rank, self._host, beat.phase, beat.step, beat.micro_batch, silent_s, it.state)

    def _limits(self, standings: dict[int, Standing]) -> dict[int, float]:
        least = min((it.position for it in standings.values()), default=None)
        return {
            rank: limit(
                it.phase,
                self._ranks[rank].history,
                self._rules,
                is_stopped=it.is_stopped,
                is_last=self._watched.is_whole and it.position == least,
            )
            for rank, it in standings.items()
        }

    # Telling.

    def _tell_stall(self, standings: dict[int, Standing]) -> None:
        """Write down that ranks are silent for longer than a step's own work takes, with the positions of all
        of this node, and again when one of them moves: whoever reads all nodes' events finds the culprit.
        """
        in_steps = [it for it in standings.values() if it.phase in _IN_STEPS]
        over = [it for it in in_steps if it.silent_s > step_limit(self._ranks[it.rank].history, self._rules)]
        if not over:
            if self._told is not None and not self._watched.is_whole:
                self._write_for_others(WENT_ON)
            self._told = self.stall = None
            return
        first = furthest_behind(over)[0]
        history = self._ranks[first.rank].history
        self.stall = Stall(tuple(standings.values()), history, self._now)
        positions = {rank: it.position for rank, it in standings.items()}
        if positions != self._told:
            self._told = dict(positions)
            self._write(STALLED, first, step_limit(history, self._rules), standings)
            self._write_for_others()

    def _write_for_others(self, *events: str) -> None:
        """Write events without evidence, and let other nodes see all that was written."""
        # A full disk takes the record, not the agent.
        with contextlib.suppress(OSError):
            for event in events:
                self._events.write(event, node=self._watched.node)
            self._events.sync()

    def confess(self, limits: Mapping[int, float]) -> tuple[Hang, ...]:
        """Write down that ranks of this node hang, as whoever sees all nodes found, with their stacks.

        `limits`: how long each accused rank of the run might have been silent; those of others are passed
        over. Takes up to two seconds.
        """
        living = {rank: it for rank, it in self._ranks.items() if not it.has_ended}
        standings = {rank: self._standing(rank, it) for rank, it in living.items()}
        hung = [it for rank, it in standings.items() if rank in limits and rank not in self._accused]
        return self._accuse(hung, standings, dict(limits)) if hung else ()

    def _accuse(
        self, hung: list[Standing], standings: dict[int, Standing], limits: dict[int, float]
    ) -> tuple[Hang, ...]:
        files = self._dump({it.rank for it in hung}, standings)
        hangs = []
        for it in hung:
            self._accused.add(it.rank)
            path = files.get(it.rank)
            self._write(
                "hang_detected", it, limits[it.rank], standings, stacks=None if path is None else str(path)
            )
            self._write_failed(it, limits[it.rank])
            hangs.append(Hang(it, limits[it.rank], self._ranks[it.rank].process, path))
        return tuple(hangs)

    def _dump(self, suspects: set[int], standings: dict[int, Standing]) -> dict[int, Path]:
        watched, asked = self._watched, {}
        for rank, standing in standings.items():
            seen = self._ranks[rank]
            if seen.process is None or seen.folder is None:
                continue
            answer = stacks_file(seen.folder, watched.attempt, rank)
            target = watched.run.rank_stacks(watched.attempt, rank)
            words = f"silent for {standing.silent_s:.0f} s {standing.where()}"
            asked[rank] = Asked(rank, seen.process, answer, target, rank in suspects, words)
        return dump(asked)

    def _write(
        self,
        event: str,
        it: Standing,
        limit_s: float,
        standings: dict[int, Standing],
        **evidence: object,
    ) -> None:
        process = self._ranks[it.rank].process
        # A full disk takes the record, not the agent.
        with contextlib.suppress(OSError):
            self._events.write(
                event,
                **{**it.record(), "pid": None if process is None else process.pid},
                node=self._watched.node,
                limit=round(limit_s, 1),
                ranks=[other.record() for other in standings.values()],
                **evidence,
            )

    def _write_failed(self, it: Standing, limit_s: float) -> None:
        """Write the verdict on a rank that will write none itself."""
        message = f"silent for {it.silent_s:.0f} s {it.where()}, where {limit_s:.0f} s are the limit"
        if it.is_stopped:
            message += "; its process is stopped (SIGSTOP)"
        cause = f"hang in {it.phase.name}"
        with contextlib.suppress(OSError):
            self._events.write(
                "rank_failed", rank=it.rank, code=EXIT_FAILED, cause=cause, message=message, step=it.step
            )

    def _write_summary(self, standings: dict[int, Standing]) -> None:
        steps = [it.step for it in standings.values()]
        phases: dict[str, list[int]] = {}
        for it in standings.values():
            phases.setdefault(it.phase.name, []).append(it.rank)
        summary = {
            "time": time.time(),
            "attempt": self._watched.attempt,
            "node": self._watched.node,
            "host": self._host,
            "step": {"min": min(steps, default=None), "max": max(steps, default=None)},
            "phases": phases,
            "longest_silence_s": round(max((it.silent_s for it in standings.values()), default=0.0), 1),
            "ended": [rank for rank, it in self._ranks.items() if it.has_ended],
        }
        path = self._watched.run.heartbeat(self._watched.node)
        draft = path.with_suffix(f".{os.getpid()}.draft")
        with contextlib.suppress(OSError):
            # Not its parents: a run's directory that somebody removed must not come back.
            path.parent.mkdir(exist_ok=True)
            draft.write_text(json.dumps(summary) + "\n")
            draft.replace(path)
