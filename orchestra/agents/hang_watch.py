"""Finds out which ranks of this node hang. *Each node's agent*, one watch for each attempt.

It reads the heartbeats of its ranks once a second from the node's memory, measures their silence on its own
watch, and asks `orchestra.recovery.hangs` how long each may be silent. A hang is written to the events with
the stacks of the ranks; the caller ends them. Where this node's ranks only wait, that is written too
(`step_stalled`): the attempt's first node finds out for whom (`HangWatchOfAllNodes`).

Time in which the agent itself did not run (a suspended job, a starved machine) counts as no silence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from conf.schema import Config
from launchers import processes
from launchers.process_stacks import StackRequest, write_stacks
from launchers.processes import Process
from launchers.torchrun import LaunchSpec
from orchestra.agents.attempt_record import AttemptRecord
from orchestra.agents.stalled_ranks import RecordRequest, keep_records
from orchestra.errors import EXIT_FAILED
from orchestra.recovery.accounting import STOOD_STILL
from orchestra.recovery.collectives import awaited
from orchestra.recovery.hangs import (
    AWAITED,
    LOOK_S,
    LimitRules,
    RankHeartbeats,
    RankPosition,
    RankTimes,
    hanging,
    hanging_on_all_nodes,
    limit_rules,
    limits_on_node,
    positions_in,
    stalled,
    step_limit,
)
from orchestra.report.stalled import recorded_collectives
from orchestra.run.events import EventWriter, is_number, node_writer, read_events
from orchestra.run.files import JsonLinesReader, write_atomically
from orchestra.run.heartbeat import (
    FOLDER_VARIABLE,
    STACKS_SIGNAL,
    Beat,
    Phase,
    beat_file,
    beats_folder,
    collectives_file,
    read_beat,
    remove_records,
    stacks_file,
)
from orchestra.run.paths import RunDir
from orchestra.run.planned_faults import AGENT_VARIABLE

# How long ranks that only wait are not named themselves: so long others take to look, and to say so.
_NAMED_ELSEWHERE_S = 10.0
# A longer pause between two looks was the agent's own.
_LONGEST_PAUSE_S = 3.0
# One as long as this is told: the job was suspended.
_TOLD_PAUSE_S = 10.0
# How often the node's summary is written, and a missing record is looked for in the run's directory.
_SUMMARY_S = 10.0


@dataclass(frozen=True)
class WatchedRanks:
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

    position: RankPosition
    limit_s: float
    process: Process | None
    stacks: Path | None

    @property
    def rank(self) -> int:
        return self.position.rank


@dataclass
class _RankOnNode:
    """One rank as it was seen last: its heartbeats, the folder that they come from, and its process."""

    progress: RankHeartbeats = field(default_factory=RankHeartbeats)
    folder: Path | None = None
    state: str | None = None
    has_ended: bool = False

    @property
    def process(self) -> Process | None:
        beat = self.progress.beat
        return None if beat is None else Process(beat.pid, beat.started)


def heartbeat_environment(run: RunDir) -> dict[str, str]:
    """Return what is added to the environment of a node's ranks, so that they beat. Raises OSError.

    *The node agent*, in the process that is to be killed where a planned fault says so.
    """
    return {FOLDER_VARIABLE: str(beats_folder(run)), AGENT_VARIABLE: str(os.getpid())}


def open_hang_watch(config: Config, record: AttemptRecord, spec: LaunchSpec, ranks: range) -> HangWatch:
    """Return the watch over a node's ranks in an attempt that was just started with `heartbeat_environment`
    in its `spec`.
    """
    folder = Path(spec.environment[FOLDER_VARIABLE])
    watched = WatchedRanks(record.run, record.number, record.node, tuple(ranks), spec.world_size, folder)
    restores = [event for event in read_events(record.run, ("restored",)) if event["event"] == "restored"]
    restores_s = [
        event["seconds"] for event in restores if is_number(event.get("seconds")) and event["seconds"] > 0
    ]
    return HangWatch(watched, limit_rules(config), record.events, restores_s)


class HangWatch:
    """Watches the ranks of one node through one attempt. `look` is called about ten times a second."""

    def __init__(
        self,
        watched: WatchedRanks,
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
        # The watch's own time, which stands still while the agent does.
        self._now = 0.0
        self._ranks = {rank: _RankOnNode() for rank in watched.ranks}
        self._times = {number: rank.progress.times for number, rank in self._ranks.items()}
        for times in self._times.values():
            times.restores_s.extend(restores_s)
        self._host = socket.gethostname()
        # The positions that were written when the ranks fell silent; None while they move.
        self._written: dict[int, tuple[int, ...]] | None = None
        # For the watch over all nodes; None while this node's ranks move.
        self.stall: NodeStall | None = None
        self._found_hanging: set[int] = set()
        # While all of this node only wait, and the one that they wait for is to be named by its own agent.
        self._named_elsewhere_until = 0.0
        self._summary_at = 0.0
        # The processes that the last summary names.
        self._told: dict[int, Process | None] = {}

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
        if passed >= _TOLD_PAUSE_S:
            # A full disk takes the record, not the agent.
            with contextlib.suppress(OSError):
                self._events.write(STOOD_STILL, node=self._watched.node, seconds=round(passed - LOOK_S, 3))
        self._read()
        positions = self._positions()
        self._write_stall(positions)
        alive = {number: rank.process for number, rank in self._ranks.items() if not rank.has_ended}
        if self._now >= self._summary_at or alive != self._told:
            self._summary_at, self._told = self._now + _SUMMARY_S, alive
            self._write_summary(positions)
        limits = limits_on_node(positions, self._times, self._rules, is_whole=self._watched.is_whole)
        new = [rank for rank in hanging(positions, limits) if rank.rank not in self._found_hanging]
        if not new or self._now < self._named_elsewhere_until:
            return ()
        if len(new) == 1 or new[0].is_stopped:
            return self._write_hangs(new, positions, limits)
        self.keep_collectives()
        waited_for = self.awaited()
        named = [rank for rank in new if rank.rank in waited_for]
        if waited_for and not named and not self._watched.is_whole and not self._named_elsewhere_until:
            # All of this node wait for a rank of another one, whose agent is to name it.
            self._named_elsewhere_until = self._now + _NAMED_ELSEWHERE_S
            return ()
        self._found_hanging.update(rank.rank for rank in new)
        return self._write_hangs(named or new, positions, limits, is_awaited=bool(named))

    def awaited(self) -> frozenset[int]:
        """Return the ranks of the run for which others wait in a collective, as those records say that were
        kept so far; empty where they do not tell.
        """
        watched = self._watched
        records = recorded_collectives(watched.run, watched.attempt, watched.world_size, own=True)
        return awaited(records, watched.world_size)

    def record_hangs(self, limits: Mapping[int, float], *, is_awaited: bool = False) -> tuple[Hang, ...]:
        """Write down that ranks of this node hang, as the watch over all nodes found, with their stacks.

        `limits`: for how long each hanging rank of the run might have been silent; those of other nodes are
        passed over. `is_awaited`: their collectives' records name them. Takes up to two seconds.
        """
        positions = self._positions()
        new = [rank for rank in positions if rank.rank in limits and rank.rank not in self._found_hanging]
        return self._write_hangs(new, positions, limits, is_awaited=is_awaited) if new else ()

    def keep_collectives(self) -> None:
        """Keep what the collectives of this node's ranks did last, in the attempt's logs. Takes up to two
        seconds where a rank does not answer.
        """
        watched, requests = self._watched, {}
        for number, rank in self._ranks.items():
            if rank.process is not None and rank.folder is not None:
                requests[number] = RecordRequest(
                    rank.process,
                    answer=collectives_file(rank.folder, watched.attempt, number),
                    target=watched.run.rank_collectives(watched.attempt, number),
                )
        keep_records(requests)

    def _forget_collectives(self) -> None:
        """Remove what was kept of a stall that is over: a rank that cannot answer in the next one must not
        seem to stand where it stood in this one.
        """
        for number in self._ranks:
            with contextlib.suppress(OSError):
                self._watched.run.rank_collectives(self._watched.attempt, number).unlink(missing_ok=True)

    def ended_after(self) -> int | None:
        """Return the step after which all of this node's ranks closed what they held; None where one was not
        heard to. *After the ranks have ended.*
        """
        self._summary_at = self._now
        self._read()
        beats = [rank.progress.beat for rank in self._ranks.values()]
        steps = [beat.step for beat in beats if beat is not None and beat.phase is Phase.stop]
        return min(steps) if steps and len(steps) == len(beats) else None

    def close(self) -> None:
        """Remove the records of this attempt and of older ones. *After the ranks have ended.*"""
        with contextlib.suppress(OSError):
            remove_records(self._watched.folder, range(self._watched.attempt + 1))

    # Reading.

    def _read(self) -> None:
        for number, rank in self._ranks.items():
            beat = self._last_beat(number, rank)
            if beat is not None and beat != rank.progress.beat:
                rank.progress.note(beat, self._now)
            if rank.process is not None:
                rank.state = processes.state(rank.process)
                # torchrun sees the end of its children, and says so.
                rank.has_ended = rank.state in (None, "Z", "X")

    def _last_beat(self, number: int, rank: _RankOnNode) -> Beat | None:
        attempt, here, shared = self._watched.attempt, self._watched.folder, self._watched.run.heartbeats
        if rank.folder is not None:
            return read_beat(beat_file(rank.folder, attempt, number))
        # A rank that could not write here writes there: on a shared file system, which is asked seldom.
        for folder in (here, shared) if self._now >= self._summary_at else (here,):
            if (beat := read_beat(beat_file(folder, attempt, number))) is not None:
                rank.folder = folder
                return beat
        return None

    def _positions(self) -> list[RankPosition]:
        """Return where the ranks are that have not ended."""
        positions = []
        for number, rank in self._ranks.items():
            if not rank.has_ended:
                beat = rank.progress.beat or Beat(0, Phase.setup, 0, 0, 0, 0, 0, 0)
                silent_s, place = (
                    self._now - rank.progress.changed_at,
                    (beat.phase, beat.step, beat.micro_batch),
                )
                position = RankPosition(number, self._host, *place, silent_s, rank.state, beat.turn)
                positions.append(position)
        return positions

    # Writing.

    def _write_stall(self, positions: list[RankPosition]) -> None:
        """Write down that ranks are silent for longer than a step's own work takes, with the positions of all
        of this node, and again when one of them moves: whoever reads all nodes' events finds the culprit.
        """
        first = stalled(positions, self._times, self._rules)
        if first is None:
            if self._written is not None:
                self._forget_collectives()
            if self._written is not None and not self._watched.is_whole:
                self._write_for_other_nodes(WENT_ON)
            self._written = self.stall = None
            return
        times = self._times[first.rank]
        self.stall = NodeStall(tuple(positions), times, self._now)
        now = {rank.rank: rank.position for rank in positions}
        if now != self._written:
            self._written = dict(now)
            self._write(STALLED, first, step_limit(times, self._rules), positions)
            self._write_for_other_nodes()
            self.keep_collectives()

    def _write_for_other_nodes(self, *events: str) -> None:
        """Write events without evidence, and let other nodes see all that was written."""
        # A full disk takes the record, not the agent.
        with contextlib.suppress(OSError):
            for event in events:
                self._events.write(event, node=self._watched.node)
            self._events.sync()

    def _write_hangs(
        self,
        new: list[RankPosition],
        positions: list[RankPosition],
        limits: Mapping[int, float],
        *,
        is_awaited: bool = False,
    ) -> tuple[Hang, ...]:
        files = self._write_stacks({rank.rank for rank in new}, positions)
        self.keep_collectives()
        hangs = []
        for rank in new:
            self._found_hanging.add(rank.rank)
            path, limit_s = files.get(rank.rank), limits[rank.rank]
            stacks = None if path is None else str(path)
            told = {AWAITED: True} if is_awaited else {}
            self._write("hang_detected", rank, limit_s, positions, stacks=stacks, **told)
            self._write_failed(rank, limit_s)
            hangs.append(Hang(rank, limit_s, self._ranks[rank.rank].process, path))
        return tuple(hangs)

    def _write_stacks(self, suspects: set[int], positions: list[RankPosition]) -> dict[int, Path]:
        watched, requests = self._watched, {}
        for position in positions:
            number = position.rank
            process, folder = self._ranks[number].process, self._ranks[number].folder
            if process is None or folder is None:
                continue
            requests[number] = StackRequest(
                process,
                answer=stacks_file(folder, watched.attempt, number),
                target=watched.run.rank_stacks(watched.attempt, number),
                is_suspect=number in suspects,
                title=f"rank {number}, process {process.pid}: "
                f"silent for {position.silent_s:.0f} s {position.where()}",
            )
        return write_stacks(requests, STACKS_SIGNAL)

    def _write(
        self,
        event: str,
        rank: RankPosition,
        limit_s: float,
        positions: list[RankPosition],
        **evidence: object,
    ) -> None:
        process = self._ranks[rank.rank].process
        # A full disk takes the record, not the agent.
        with contextlib.suppress(OSError):
            self._events.write(
                event,
                **{**rank.record(), "pid": None if process is None else process.pid},
                node=self._watched.node,
                limit=round(limit_s, 1),
                ranks=[other.record() for other in positions],
                **evidence,
            )

    def _write_failed(self, rank: RankPosition, limit_s: float) -> None:
        """Write the verdict on a rank that will write none itself."""
        message = f"silent for {rank.silent_s:.0f} s {rank.where()}, where {limit_s:.0f} s are the limit"
        if rank.is_stopped:
            message += "; its process is stopped (SIGSTOP)"
        cause = f"hang in {rank.phase.name}"
        with contextlib.suppress(OSError):
            self._events.write(
                "rank_failed", rank=rank.rank, code=EXIT_FAILED, cause=cause, message=message, step=rank.step
            )

    def _write_summary(self, positions: list[RankPosition]) -> None:
        steps = [rank.step for rank in positions]
        phases: dict[str, list[int]] = {}
        for rank in positions:
            phases.setdefault(rank.phase.name, []).append(rank.rank)
        summary = {
            "time": time.time(),
            "attempt": self._watched.attempt,
            "node": self._watched.node,
            "host": self._host,
            "step": {"min": min(steps, default=None), "max": max(steps, default=None)},
            "phases": phases,
            "longest_silence_s": round(max((rank.silent_s for rank in positions), default=0.0), 1),
            "processes": {
                number: process.pid for number, process in self._told.items() if process is not None
            },
            "ended": [number for number, rank in self._ranks.items() if rank.has_ended],
        }
        path = self._watched.run.heartbeat(self._watched.node)
        with contextlib.suppress(OSError):
            # Not its parents: a run's directory that somebody removed must not come back.
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps(summary) + "\n", is_synced=False)


STALLED, WENT_ON = "step_stalled", "step_went_on"
_WANTED = re.compile(rb'"event"\s*:\s*"(?:' + f"{STALLED}|{WENT_ON}".encode() + rb')"')
# What one node wrote a moment ago may be news on another one: a shared file system shows it late.
_LOOK_S = 2.0
# How many nodes' files are read in a second.
_FILES_PER_S = 500


@dataclass(frozen=True)
class NodeStall:
    """This node's own ranks, all of them silent or waiting, at `now` of its hang watch."""

    positions: tuple[RankPosition, ...]
    times: RankTimes
    now: float


class HangWatchOfAllNodes:
    """Finds out which rank of all nodes the others wait for, through one attempt. *Its first node only*.

    One node reads what all have written, so that thousands of them do not read each other's; it is the first
    one, since it has a rank that all others wait for sooner or later.
    """

    def __init__(
        self, run: RunDir, attempt: int, others: Sequence[int], world_size: int, rules: LimitRules
    ) -> None:
        """`others`: the attempt's other nodes, by their numbers in the job."""
        files = {node: run.event_file(node_writer(attempt, node)) for node in others}
        self._readers = {node: JsonLinesReader(file, _WANTED) for node, file in files.items()}
        self._world_size = world_size
        self._rules = rules
        # By node: where its silent ranks are, and when that was seen, on the hang watch's own time.
        self._reports: dict[int, tuple[list[RankPosition], float]] = {}
        self._suspects: set[int] = set()
        self._looked_at = 0.0

    def look(self, stall: NodeStall | None) -> list[tuple[RankPosition, float]]:
        """Return the ranks that hang, each with the limit in seconds that it is beyond, once two looks found
        the same ones.

        `stall` is None while this node's own ranks move: then nobody hangs, and nothing is read.
        """
        if stall is None or not self._readers:
            self._suspects = set()
            return []
        if stall.now - self._looked_at < max(_LOOK_S, len(self._readers) / _FILES_PER_S):
            return []
        self._looked_at = stall.now
        self._read(stall.now)
        others = [
            dataclasses.replace(rank, silent_s=rank.silent_s + stall.now - seen_at)
            for ranks, seen_at in self._reports.values()
            for rank in ranks
        ]
        positions = [*stall.positions, *others]
        hanging = hanging_on_all_nodes(positions, self._world_size, stall.times, self._rules)
        before, self._suspects = self._suspects, {rank.rank for rank, _ in hanging}
        return hanging if hanging and before == self._suspects else []

    def _read(self, now: float) -> None:
        for node, reader in self._readers.items():
            try:
                events = reader.read_new()
            except OSError:
                continue
            for event in events:
                # Where its ranks move again nothing is known of them.
                is_stall = event.get("event") == STALLED
                self._reports[node] = positions_in(event) if is_stall else [], now
