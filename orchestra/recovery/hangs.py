"""Which rank holds up the others, when all are silent. Pure: it reads positions, from events or agents.

One hanging rank stalls all ranks in a collective within a step, so that silence alone names nobody. The
culprit is a rank whose process is stopped, else one that has come least far: the others wait for it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from conf.schema import Config
from orchestra.run.events import is_number, is_whole
from orchestra.run.heartbeat import Beat, Phase

# Events that carry positions: `ranks`, a list of `Standing.record`.
EVENTS = ("step_stalled", "hang_detected")


@dataclass(frozen=True)
class Standing:
    """Where one rank stands, as its node's agent sees it. `state` is the process's letter in /proc: T, t:
    stopped; None: nothing is known of the process.
    """

    rank: int
    host: str
    phase: Phase
    step: int
    micro_batch: int
    silent_s: float
    state: str | None

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def position(self) -> tuple[int, int, int, int]:
        return Beat(0, self.phase, self.step, self.micro_batch, 0, 0, 0).position

    def record(self) -> dict[str, Any]:
        """Return what an event says of it."""
        return {
            "rank": self.rank,
            "phase": self.phase.name,
            "step": self.step,
            "micro_batch": self.micro_batch,
            "seconds": round(self.silent_s, 1),
            "state": self.state,
        }

    def where(self) -> str:
        """Say where it stands, for people."""
        if self.phase in (Phase.setup, Phase.restore):
            return f"in {self.phase.name}"
        if self.phase in (Phase.forward, Phase.backward):
            return f"in {self.phase.name} of micro-batch {self.micro_batch} of step {self.step}"
        return f"in {self.phase.name} of step {self.step}"


@dataclass(frozen=True)
class Culprit:
    """The rank to blame; `rank` and `host` are None where nothing tells the ranks apart."""

    rank: int | None
    host: str | None
    why: str


def furthest_behind(standings: Sequence[Standing]) -> list[Standing]:
    """Return those that hold up the others: the stopped ones, else those that have come least far."""
    stopped = [it for it in standings if it.is_stopped]
    if stopped:
        return stopped
    least = min((it.position for it in standings), default=None)
    return [it for it in standings if it.position == least]


def culprit(events: Iterable[Mapping[str, Any]]) -> Culprit | None:
    """Name the rank that one attempt's events accuse of a hang; None where they report none.

    Each node reports its own ranks: the events of all nodes are wanted, and of each rank the last one counts.
    """
    newest: dict[int, Standing] = {}
    for event in events:
        if event.get("event") in EVENTS:
            newest.update({it.rank: it for it in standings_of(event)})
    return among(list(newest.values())) if newest else None


def among(standings: Sequence[Standing]) -> Culprit:
    """Name the rank that holds up the others, and say why."""
    behind = sorted(furthest_behind(standings), key=lambda it: it.rank)
    first = behind[0]
    others = len(standings) - len(behind)
    if first.is_stopped:
        names = ", ".join(str(it.rank) for it in behind)
        return Culprit(first.rank, first.host, f"rank {names} is stopped (SIGSTOP), {first.where()}")
    if others == 0 and len(standings) > 1:
        return Culprit(None, None, f"all {len(standings)} silent ranks stand {first.where()}")
    if others == 0:
        return Culprit(first.rank, first.host, f"rank {first.rank} is silent {first.where()}")
    ahead = min((it for it in standings if it not in behind), key=lambda it: it.position)
    also = f" (and {len(behind) - 1} more)" if len(behind) > 1 else ""
    why = f"rank {first.rank}{also} stands {first.where()}, the next one {ahead.where()}"
    return Culprit(first.rank, first.host, why)


def standings_of(event: Mapping[str, Any]) -> list[Standing]:
    """Return the positions that an event carries; what is damaged is passed over."""
    host, ranks = event.get("host"), event.get("ranks")
    found = []
    for it in ranks if isinstance(ranks, list) else []:
        if not isinstance(it, dict) or it.get("phase") not in Phase.__members__:
            continue
        numbers = [it.get(key) for key in ("rank", "step", "micro_batch")]
        if not all(is_whole(number) for number in numbers) or not is_number(it.get("seconds")):
            continue
        place = (Phase[it["phase"]], it["step"], it["micro_batch"], float(it["seconds"]))
        state = it.get("state")
        found.append(Standing(it["rank"], str(host), *place, state if isinstance(state, str) else None))
    return found


# How long a rank may be silent in each phase before it counts as hung: learned from its own history. Pure.
#
# Steps are learned from: a rank whose steps take 0.2 s is not waited for as long as one whose steps take a
# minute. What a limit never does is fall below a floor (a slow disk, a busy core) or rise above what the
# configuration says. Time comes as numbers from whoever looks; there is no clock here.
#
# | phase | limit | |---|---| | setup, and the attempt's first step | recovery.setup_timeout_s (connections,
# compilation) | | step, forward | learned: 10 × the median step, 3 × the longest silence; 10 s at least | |
# the same, behind fewer than 5 steps | recovery.heartbeat_timeout_s | | backward, reduce, update, agree | as
# a step where all ranks are in sight and none is further behind | | | (`orchestra.recovery.hangs`: those of
# other nodes too, twice as long where all stand at the same place), | | | else recovery.heartbeat_timeout_s:
# the rank may wait for one that is not hung yet | | data, record | recovery.heartbeat_timeout_s: the
# storage's pace is not the rank's | | save (its blocking part), restore | learned: 10 × the longest so far;
# 60 s at least, | | | checkpoint.timeout_s at most | | commit | twice checkpoint.timeout_s: the last save is
# tried twice | | stop | the longest of the times that closing may take |
#
# None of the step's limits exceeds recovery.heartbeat_timeout_s. A stopped process is none that works: its
# limit is that of a step's own work, in any phase.


# Steps after which the median is believed.
_ENOUGH_STEPS = 5
_RECENT_STEPS = 64


@dataclass(frozen=True)
class LimitRules:
    """The bounds of all limits, in seconds, and the phases in which a rank waits for nobody."""

    setup_s: float
    silent_s: float
    storage_s: float
    closing_s: float
    own_work: frozenset[Phase] = frozenset({Phase.step, Phase.forward})
    step_floor_s: float = 10.0
    storage_floor_s: float = 60.0
    median_factor: float = 10.0
    longest_factor: float = 3.0


@dataclass
class History:
    """What was seen of one rank in this attempt, and of saves and restores before it."""

    step_times_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    silences_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    saves_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    restores_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))
    num_steps: int = 0

    def add_steps(self, number: int, seconds: float) -> None:
        """Note that `number` steps took `seconds` together; the attempt's first step counts for nothing."""
        num_taught = number if self.num_steps > 0 else number - 1
        self.step_times_s.extend([seconds / number] * min(num_taught, _RECENT_STEPS))
        self.num_steps += number

    def add_silence(self, seconds: float) -> None:
        """Note how long a rank that moves was silent before, within its steps."""
        if self.num_steps > 1:
            self.silences_s.append(seconds)


def step_limit(history: History, rules: LimitRules) -> float:
    """Return how long a step's own work may take without a beat."""
    if history.num_steps == 0:
        return rules.setup_s
    if len(history.step_times_s) < _ENOUGH_STEPS:
        return rules.silent_s
    usual = rules.median_factor * statistics.median(history.step_times_s)
    longest = rules.longest_factor * max(history.silences_s, default=0.0)
    return min(max(usual, longest, rules.step_floor_s), rules.silent_s)


def storage_limit(durations_s: deque[float], rules: LimitRules) -> float:
    """Return how long a save's blocking part, or a restore, may take."""
    if not durations_s:
        return rules.storage_s
    learned = rules.median_factor * max(durations_s)
    return min(max(learned, rules.storage_floor_s, rules.silent_s), rules.storage_s)


def limit(
    phase: Phase, history: History, rules: LimitRules, *, is_stopped: bool = False, is_last: bool = False
) -> float:
    """Return how long a rank may be silent in `phase`.

    `is_stopped`: its process is (SIGSTOP). `is_last`: all ranks of the run are in sight, and none is behind
    this one.
    """
    if is_stopped:
        return min(rules.silent_s, limit(phase, history, rules), step_limit(history, rules))
    if phase is Phase.setup:
        return rules.setup_s
    if phase is Phase.restore:
        return storage_limit(history.restores_s, rules)
    if phase is Phase.save:
        return storage_limit(history.saves_s, rules)
    if phase is Phase.commit:
        return 2 * rules.storage_s
    if phase is Phase.stop:
        return rules.closing_s
    own = step_limit(history, rules)
    may_wait = phase not in rules.own_work and not is_last
    is_of_storage = phase in (Phase.data, Phase.record)
    return max(rules.silent_s, own) if may_wait or is_of_storage else own


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


# Which ranks hold up a run over several nodes, from what each node reports of its own. Pure.
#
# A rank never goes back within an attempt: what was last reported of it is the least that it has come to.
# So whoever stands no further than the last word of all others is the one that they wait for, however late
# their words came. Only its own word must be true now: whoever moves reports it.


# The network itself may be away, and whom that catches behind the others waits for it as they do: only a
# process that is stopped is known to be at fault. TCP doubles the wait before each new try (RFC 6298, 5.5):
# what was cut off for a while is silent for at most twice as long.
_OF_A_NETWORK = 2.0


def hung_afar(
    standings: Sequence[Standing], world_size: int, history: History, rules: LimitRules
) -> list[tuple[Standing, float]]:
    """Return the ranks that all others wait for, each with the limit that it is beyond.

    Empty until the positions of all `world_size` ranks are known. `history` is that of any rank: steps take
    all of them the same time.
    """
    if len({it.rank for it in standings}) < world_size:
        return []
    least = min(it.position for it in standings)
    behind = [it for it in standings if it.position == least]
    found = []
    for it in behind:
        limit_s = limit(it.phase, history, rules, is_last=True)
        if not it.is_stopped:
            limit_s = max(limit_s, min(_OF_A_NETWORK * limit_s, rules.silent_s))
        if it.silent_s > limit_s:
            found.append((it, limit_s))
    return found
