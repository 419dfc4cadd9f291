"""Which ranks hang: how long each may be silent, and which of the silent ones the others wait for. Pure.

The agents read heartbeats and hand positions and times in (`HangWatch` on each node, `HangWatchOfAllNodes`
on the first one, both in `orchestra.agents.hang_watch`); no clock is read here and no file.

**Whom to blame.** One hanging rank stalls all others in a collective within a step, so silence alone names
nobody. To blame is a rank whose process is stopped, else the one that has advanced least: the others wait
for it. Of several at the same place, as in a backward pass with collectives inside, what they recorded of
their collectives tells who waits (`orchestra.recovery.collectives.awaited`). In a pipeline ranks are in
different micro-batches all the time, and go back to earlier ones; there the passes of a step count by their
turns in the schedule (`pipeline_check.turns`).

**How long a rank may be silent** depends on its phase, and is learned from its own history: a rank whose
steps take 0.2 s is not waited for as long as one whose steps take a minute. No limit falls below a floor (a
slow disk, a busy core) or rises above what the configuration says:

| phase | limit |
|---|---|
| setup, and the attempt's first step | recovery.setup_timeout_s (connections, compilation) |
| step, forward | learned: 10 × the median step, 3 × the longest silence; at least 10 s |
| the same before 5 steps were seen | recovery.heartbeat_timeout_s |
| backward, reduce, update, agree | as a step where all ranks' positions are known and none has advanced \
less, else recovery.heartbeat_timeout_s and 3 s more: the rank may wait for one that does not hang yet |
| data, record | recovery.heartbeat_timeout_s: the pace is the storage's, not the rank's |
| save (its blocking part), restore | learned: 10 × the longest so far; at least 60 s, at most \
checkpoint.timeout_s; a restore that waits for its storage beats at each try |
| commit | 2 × checkpoint.timeout_s: the last save is tried twice; also experts that move, and the save \
after that |
| stop | the longest of the times that closing may take |

No limit of a step's own work exceeds recovery.heartbeat_timeout_s. A stopped process does not work, and no
busy core or slow disk stops one: its limit is that of a step's own work with a floor of 5 s, in any phase.
Over several nodes a rank that is not stopped gets twice its limit.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.schema import Config
from orchestra.run.events import is_number, is_whole
from orchestra.run.heartbeat import Beat, Phase

# How often heartbeats are read, in seconds: no shorter time can be measured by them.
LOOK_S = 1.0
# Events that carry positions: `ranks`, a list of `RankPosition.record`.
_EVENTS_WITH_POSITIONS = ("step_stalled", "hang_detected")
# Of the event of a hang: whether others wait for this rank in a collective, as their records say.
AWAITED = "is_awaited"
_STEP_PHASES = frozenset(range(Phase.step, Phase.save))
# Steps after which the median is believed.
_ENOUGH_STEPS = 5
_RECENT_STEPS = 64
# Where the network itself is away, the ranks that were caught behind the others wait for it as those do: only
# a process that is stopped is known to be at fault. TCP doubles the wait before each new try (RFC 6298, 5.5):
# what was cut off for a while is silent for at most twice as long.
_NETWORK_FACTOR = 2.0
# Where a rank's own work is given all of the configured time too, those that wait for it fell silent in the
# same moment: the agent of another node must not blame one of them before its own agent has looked.
_WAITING_S = 3.0
# Of its own limit: from there on a rank is silent for as long as those that wait for it, but for the moment
# by which its last beat came later.
_NEARLY = 0.5


@dataclass(frozen=True)
class RankPosition:
    """How far one rank has come, and for how long it has been silent, as its node's agent sees it.

    `state` is the process's letter in /proc: T and t mean stopped; None: nothing is known of the process.
    `turn` is the place of the micro-batch's pass among those of the step; None: the micro-batch's number.
    """

    rank: int
    host: str
    phase: Phase
    step: int
    micro_batch: int
    silent_s: float
    state: str | None
    turn: int | None = None

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def position(self) -> tuple[int, int, int, int]:
        turn = self.micro_batch if self.turn is None else self.turn
        return Beat(0, self.phase, self.step, self.micro_batch, turn, 0, 0, 0).position

    def record(self) -> dict[str, Any]:
        """Return what an event says of it."""
        return {
            "rank": self.rank,
            "phase": self.phase.name,
            "step": self.step,
            "micro_batch": self.micro_batch,
            "turn": self.turn,
            "seconds": round(self.silent_s, 1),
            "state": self.state,
        }

    def where(self) -> str:
        """Say where it is, for people."""
        if self.phase in (Phase.setup, Phase.restore):
            return f"in {self.phase.name}"
        if self.phase in (Phase.forward, Phase.backward):
            return f"in {self.phase.name} of micro-batch {self.micro_batch} of step {self.step}"
        return f"in {self.phase.name} of step {self.step}"


def positions_in(event: Mapping[str, Any]) -> list[RankPosition]:
    """Return the positions that an event carries; damaged ones are left out."""
    host, ranks = event.get("host"), event.get("ranks")
    positions = []
    for record in ranks if isinstance(ranks, list) else []:
        if not isinstance(record, dict) or record.get("phase") not in Phase.__members__:
            continue
        numbers = [record.get(key) for key in ("rank", "step", "micro_batch")]
        if not all(is_whole(number) for number in numbers) or not is_number(record.get("seconds")):
            continue
        place = (Phase[record["phase"]], record["step"], record["micro_batch"], float(record["seconds"]))
        state = record.get("state")
        known_state = state if isinstance(state, str) else None
        turn = record.get("turn")
        known_turn = turn if is_whole(turn) else None
        positions.append(RankPosition(record["rank"], str(host), *place, known_state, known_turn))
    return positions


def least_advanced(positions: Sequence[RankPosition]) -> list[RankPosition]:
    """Return those that the others wait for: the stopped ones, else those that have advanced least."""
    stopped = [rank for rank in positions if rank.is_stopped]
    if stopped:
        return stopped
    least = min((rank.position for rank in positions), default=None)
    return [rank for rank in positions if rank.position == least]


@dataclass(frozen=True)
class LimitRules:
    """The bounds of all limits, in seconds, and the phases in which a rank waits for nobody."""

    setup_s: float
    silent_s: float
    storage_s: float
    closing_s: float
    own_work: frozenset[Phase] = frozenset({Phase.step, Phase.forward})
    step_floor_s: float = 10.0
    stopped_floor_s: float = 5.0
    storage_floor_s: float = 60.0
    median_factor: float = 10.0
    longest_factor: float = 3.0


def limit_rules(config: Config) -> LimitRules:
    """Return the bounds of a run's limits."""
    recovery, shape = config.recovery, config.parallelism
    waits_in_forward = max(shape.tp, shape.pp, shape.cp, shape.ep) > 1 or shape.zero == 3
    closing = max(recovery.heartbeat_timeout_s, recovery.stop_timeout_s, 2 * config.wandb.finish_timeout_s)
    return LimitRules(
        setup_s=recovery.setup_timeout_s,
        silent_s=recovery.heartbeat_timeout_s,
        storage_s=config.checkpoint.timeout_s,
        closing_s=closing,
        own_work=frozenset({Phase.step} if waits_in_forward else {Phase.step, Phase.forward}),
    )


def _recent() -> deque[float]:
    return deque(maxlen=_RECENT_STEPS)


@dataclass
class RankTimes:
    """How long things took one rank in this attempt, and how long the run's restores took before it."""

    steps_s: deque[float] = field(default_factory=_recent)
    silences_s: deque[float] = field(default_factory=_recent)
    saves_s: deque[float] = field(default_factory=_recent)
    restores_s: deque[float] = field(default_factory=_recent)
    num_steps: int = 0

    def add_steps(self, number: int, seconds: float) -> None:
        """Note that `number` steps took `seconds` together; the attempt's first step counts for nothing."""
        num_counted = number if self.num_steps > 0 else number - 1
        self.steps_s.extend([seconds / number] * min(num_counted, _RECENT_STEPS))
        self.num_steps += number

    def add_silence(self, seconds: float) -> None:
        """Note how long a rank that moves was silent before, within its steps."""
        if self.num_steps > 1:
            self.silences_s.append(seconds)


@dataclass
class RankHeartbeats:
    """What the heartbeats of one rank have shown so far.

    Times are seconds on the watch of whoever reads them, which began with the attempt.
    """

    beat: Beat | None = None
    changed_at: float = 0.0
    stepped_at: float = 0.0
    phase_since: float = 0.0
    times: RankTimes = field(default_factory=RankTimes)

    def note(self, beat: Beat, now: float) -> None:
        """Take a beat that differs from the last one, and learn from the time between them."""
        before, self.beat = self.beat, beat
        silence_s, self.changed_at = now - self.changed_at, now
        if before is None or (before.pid, before.started) != (beat.pid, beat.started):
            self.stepped_at = self.phase_since = now
            # Fast steps may be over before anybody looked: then this is not its first one.
            if beat.first_step and beat.step > beat.first_step:
                self.times.add_steps(beat.step - beat.first_step, max(now, LOOK_S))
            return
        was_training = before.phase >= Phase.step
        if {before.phase, beat.phase} <= _STEP_PHASES:
            self.times.add_silence(silence_s)
        if beat.step != before.step:
            done = beat.step - (before.step if was_training else beat.first_step)
            if done > 0:
                self.times.add_steps(done, now - self.stepped_at)
            self.stepped_at = now
        if beat.phase is not before.phase:
            if before.phase is Phase.save:
                self.times.saves_s.append(now - self.phase_since)
            self.phase_since = now


def step_limit(times: RankTimes, rules: LimitRules, *, is_stopped: bool = False) -> float:
    """Return how long a step's own work may take without a beat. `is_stopped`: the process is (SIGSTOP)."""
    if times.num_steps == 0:
        return rules.setup_s
    if len(times.steps_s) < _ENOUGH_STEPS:
        return rules.silent_s
    usual = rules.median_factor * statistics.median(times.steps_s)
    longest = rules.longest_factor * max(times.silences_s, default=0.0)
    floor = rules.stopped_floor_s if is_stopped else rules.step_floor_s
    return min(max(usual, longest, floor), rules.silent_s)


def storage_limit(durations_s: deque[float], rules: LimitRules) -> float:
    """Return how long a save's blocking part, or a restore, may take."""
    if not durations_s:
        return rules.storage_s
    learned = rules.median_factor * max(durations_s)
    return min(max(learned, rules.storage_floor_s, rules.silent_s), rules.storage_s)


def limit(
    phase: Phase, times: RankTimes, rules: LimitRules, *, is_stopped: bool = False, is_last: bool = False
) -> float:
    """Return how long a rank may be silent in `phase`, in seconds.

    `is_stopped`: its process is (SIGSTOP). `is_last`: the positions of all ranks of the run are known, and
    none has advanced less than this one.
    """
    if is_stopped:
        return min(rules.silent_s, limit(phase, times, rules), step_limit(times, rules, is_stopped=True))
    if phase is Phase.setup:
        return rules.setup_s
    if phase is Phase.restore:
        return storage_limit(times.restores_s, rules)
    if phase is Phase.save:
        return storage_limit(times.saves_s, rules)
    if phase is Phase.commit:
        return 2 * rules.storage_s
    if phase is Phase.stop:
        return rules.closing_s
    own = step_limit(times, rules)
    if phase in (Phase.data, Phase.record):
        return max(rules.silent_s, own)
    may_wait = phase not in rules.own_work and not is_last
    return max(rules.silent_s, own) + _WAITING_S if may_wait else own


# Who is silent for too long: among the ranks of one node, and among those of all nodes.


def limits_on_node(
    positions: Sequence[RankPosition], times: Mapping[int, RankTimes], rules: LimitRules, *, is_whole: bool
) -> dict[int, float]:
    """Return how long each rank of one node may be silent. `is_whole`: no rank of the run is elsewhere."""
    least = min((rank.position for rank in positions), default=None)
    return {
        rank.rank: limit(
            rank.phase,
            times[rank.rank],
            rules,
            is_stopped=rank.is_stopped,
            is_last=is_whole and rank.position == least,
        )
        for rank in positions
    }


def hanging(positions: Sequence[RankPosition], limits: Mapping[int, float]) -> list[RankPosition]:
    """Return the ranks of one node that hang: those silent beyond their limits, and of them only the ones
    that the others wait for.

    Whoever is waited for may have beaten a little after those that wait, and is then beyond its limit a
    little after them: they are blamed for nothing while one that has advanced no further is nearly as long
    silent.
    """
    beyond = least_advanced([rank for rank in positions if rank.silent_s > limits[rank.rank]])
    if not beyond or beyond[0].is_stopped:
        return beyond
    silent = [rank for rank in positions if rank.silent_s > _NEARLY * limits[rank.rank]]
    least = min(rank.position for rank in silent)
    # One that stands where another does may wait for that one: they are named together.
    return beyond if beyond == [rank for rank in silent if rank.position == least] else []


def stalled(
    positions: Sequence[RankPosition], times: Mapping[int, RankTimes], rules: LimitRules
) -> RankPosition | None:
    """Return a rank of one node that is silent within a step for longer than a step's own work takes, the
    least advanced of them; None where none is.

    It need not hang: it may wait for a rank of another node.
    """
    in_steps = [rank for rank in positions if rank.phase in _STEP_PHASES]
    silent = [rank for rank in in_steps if rank.silent_s > step_limit(times[rank.rank], rules)]
    return next(iter(least_advanced(silent)), None)


def hanging_on_all_nodes(
    positions: Sequence[RankPosition], world_size: int, times: RankTimes, rules: LimitRules
) -> list[tuple[RankPosition, float]]:
    """Return the ranks that all others wait for, each with the limit in seconds that it is beyond.

    Empty until the positions of all `world_size` ranks are known. `times` are those of any rank: a step takes
    all of them the same time. A rank never goes back within an attempt, so what was last reported of it is
    the least that it has reached, however late the report came: whoever is no further than the last report of
    all others is the one that they wait for. Only its own report must be true now: whoever moves reports it.
    """
    if len({rank.rank for rank in positions}) < world_size:
        return []
    least = min(rank.position for rank in positions)
    beyond, nearly = [], []
    for rank in positions:
        if rank.position != least:
            continue
        limit_s = limit(rank.phase, times, rules, is_last=True)
        if not rank.is_stopped:
            limit_s = max(limit_s, min(_NETWORK_FACTOR * limit_s, rules.silent_s))
        if rank.silent_s > limit_s:
            beyond.append((rank, limit_s))
        elif rank.silent_s > _NEARLY * limit_s:
            nearly.append(rank)
    # As on one node: those that stand at the same place are named together.
    is_certain = any(rank.is_stopped for rank, _ in beyond) or not nearly
    return beyond if is_certain else []


# Whom an attempt's events blame.


@dataclass(frozen=True)
class Culprit:
    """The rank to blame for a hang; `rank` and `host` are None where nothing tells the ranks apart."""

    rank: int | None
    host: str | None
    why: str


def culprit(events: Iterable[Mapping[str, Any]]) -> Culprit | None:
    """Name the rank that one attempt's events blame for a hang; None where they report none.

    Each node reports its own ranks: the events of all nodes are wanted, and of each rank the last one counts.
    """
    newest: dict[int, RankPosition] = {}
    awaited: set[object] = set()
    for event in events:
        if event.get("event") in _EVENTS_WITH_POSITIONS:
            newest.update({rank.rank: rank for rank in positions_in(event)})
        if event.get("event") == "hang_detected" and event.get(AWAITED) is True:
            awaited.add(event.get("rank"))
    return _culprit_among(list(newest.values()), awaited) if newest else None


def _culprit_among(positions: Sequence[RankPosition], awaited: Collection[object]) -> Culprit:
    blamed = sorted(least_advanced(positions), key=lambda rank: rank.rank)
    if not blamed[0].is_stopped and (others_wait_for := [rank for rank in blamed if rank.rank in awaited]):
        first, names = others_wait_for[0], ", ".join(str(rank.rank) for rank in others_wait_for)
        why = f"others wait in a collective for rank {names}, {first.where()}"
        return Culprit(first.rank, first.host, why)
    first = blamed[0]
    num_others = len(positions) - len(blamed)
    if first.is_stopped:
        names = ", ".join(str(rank.rank) for rank in blamed)
        return Culprit(first.rank, first.host, f"rank {names} is stopped (SIGSTOP), {first.where()}")
    if num_others == 0 and len(positions) > 1:
        return Culprit(None, None, f"all {len(positions)} silent ranks stand {first.where()}")
    if num_others == 0:
        return Culprit(first.rank, first.host, f"rank {first.rank} is silent {first.where()}")
    ahead = min((rank for rank in positions if rank not in blamed), key=lambda rank: rank.position)
    also = f" (and {len(blamed) - 1} more)" if len(blamed) > 1 else ""
    why = f"rank {first.rank}{also} stands {first.where()}, the next one {ahead.where()}"
    return Culprit(first.rank, first.host, why)
