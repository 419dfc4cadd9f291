"""How long a rank may be silent in each phase before it counts as hung: learned from its own history. Pure.

Steps are learned from: a rank whose steps take 0.2 s is not waited for as long as one whose steps take a
minute. What a limit never does is fall below a floor (a slow disk, a busy core) or rise above what the
configuration says. Time comes as numbers from whoever looks; there is no clock here.

| phase | limit |
|---|---|
| setup, and the attempt's first step | recovery.setup_timeout_s (connections, compilation) |
| step, forward | learned: 10 × the median step, 3 × the longest silence; 10 s at least |
| the same, behind fewer than 5 steps | recovery.heartbeat_timeout_s |
| backward, reduce, update, agree | as a step where all ranks are in sight and none is further behind |
| | (`orchestra.recovery.afar`: those of other nodes too, twice as long where all stand at the same place), |
| | else recovery.heartbeat_timeout_s: the rank may wait for one that is not hung yet |
| data, record | recovery.heartbeat_timeout_s: the storage's pace is not the rank's |
| save (its blocking part), restore | learned: 10 × the longest so far; 60 s at least, |
| | checkpoint.timeout_s at most |
| commit | twice checkpoint.timeout_s: the last save is tried twice |
| stop | the longest of the times that closing may take |

None of the step's limits exceeds recovery.heartbeat_timeout_s. A stopped process is none that works: its
limit is that of a step's own work, in any phase.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from conf.schema import Config
from orchestra.heartbeat import Phase

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
