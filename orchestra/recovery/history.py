"""The history of a run: its events folded into attempts.

Whoever asks what happened to a run asks an `Attempt`: the recovery policy, the accounts, `orchestra status`,
`why` and `rehearse`. What an attempt ended with, and who is to blame, says `orchestra.recovery.incidents`.
Pure. Events are those of `orchestra.run.events.read_events`: checked, and ordered by time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from orchestra.run.events import is_number, is_whole
from orchestra.run.files import Record
from orchestra.run.rollback import RollBack, roll_backs

# The events that say what was decided after an attempt: decision, rule, reason, wait_s and exclude.
_DECISIONS = ("restarting", "requeued")
# The verdict on a whole attempt, where the event names no rank; else that of one rank.
_VERDICTS = ("finished", "failed")
# A rank that was killed wrote no verdict: the agent of its node writes `rank_failed` for it.
_RANK_FAILURES = ("failed", "rank_failed")


@dataclass(frozen=True)
class AttemptSave:
    """A checkpoint that an attempt began to write after `step`."""

    step: int
    # Unix seconds at which it began, and how long the training waited for it.
    time: float
    blocked_s: float


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run: all that anybody wrote about it, in the order of time."""

    number: int
    events: tuple[Record, ...] = ()

    def named(self, *names: str) -> list[Record]:
        """Return the events with these names."""
        return [event for event in self.events if event.get("event") in names]

    @cached_property
    def starts(self) -> list[Record]:
        """What its leader wrote when it began: the hosts, the layout, the job."""
        return self.named("attempt_started")

    @property
    def start(self) -> Record:
        """The first of `starts`; empty where there is none."""
        return self.starts[0] if self.starts else {}

    @property
    def num_nodes(self) -> int:
        """Number of nodes that it began on; 1 where nobody wrote it down."""
        nodes = self.start.get("nodes")
        return nodes if is_whole(nodes) and nodes > 0 else 1

    @cached_property
    def verdicts(self) -> list[Record]:
        """Verdicts of leaders on the whole attempt. One may be written once more, with another code: the last
        one counts.
        """
        return [event for event in self.named(*_VERDICTS) if "rank" not in event]

    @property
    def verdict(self) -> Record | None:
        """The verdict that counts; None while nobody gave one."""
        return self.verdicts[-1] if self.verdicts else None

    @cached_property
    def rank_ends(self) -> list[Record]:
        """What is known of how single ranks ended."""
        return [event for event in self.named("finished", *_RANK_FAILURES) if "rank" in event]

    @property
    def rank_failures(self) -> list[Record]:
        """The ends of ranks that did not finish; a stop on request is among them."""
        return [event for event in self.rank_ends if event["event"] in _RANK_FAILURES]

    @property
    def ended_ranks(self) -> frozenset[int]:
        """The ranks whose end is known."""
        return frozenset(int(event["rank"]) for event in self.rank_ends)

    @property
    def finished_ranks(self) -> frozenset[int]:
        """The ranks that trained to the last step."""
        return frozenset(int(event["rank"]) for event in self.rank_ends if event["event"] == "finished")

    @property
    def decisions(self) -> list[Record]:
        """All that was decided to do after it: a requeue is written twice, as a decision and with its job."""
        return self.named(*_DECISIONS)

    @cached_property
    def last_word(self) -> Record | None:
        """The last verdict on the whole attempt or decision after it; None while there is neither."""
        words = [event for event in self.named(*_VERDICTS, *_DECISIONS) if "rank" not in event]
        return words[-1] if words else None

    @property
    def decision(self) -> Record | None:
        """What was decided to do after it, where no later verdict takes that back."""
        word = self.last_word
        return word if word is not None and word["event"] in _DECISIONS else None

    @property
    def excluded_hosts(self) -> tuple[str, ...]:
        """The hosts that what was decided after it left out; not what a later start left out that ended
        before its attempt began, and is written under this number.
        """
        decided = [event for event in self.decisions if not event.get("before_start")]
        listed = [event["exclude"] for event in decided if isinstance(event.get("exclude"), list)]
        return tuple(dict.fromkeys(host for hosts in listed for host in hosts if isinstance(host, str)))

    @property
    def unfit_hosts(self) -> tuple[str, ...]:
        """The hosts that took part, and found afterwards that they cannot train."""
        return tuple(dict.fromkeys(str(event.get("host")) for event in self.named("node_unfit")))

    @property
    def has_broken_device(self) -> bool:
        """Whether one of them found that a device of it is broken."""
        return any(event.get("device") is True for event in self.named("node_unfit"))

    @cached_property
    def restored(self) -> Record | None:
        """What was restored last, before it trained, with its `step`; None where nothing was."""
        restored = [event for event in self.named("restored") if is_whole(event.get("step"))]
        return restored[-1] if restored else None

    @cached_property
    def training_started(self) -> Record | None:
        return next(iter(self.named("training_started")), None)

    @property
    def saves(self) -> list[AttemptSave]:
        """The checkpoints that it began to write."""
        saves = []
        for event in self.named("checkpoint_started"):
            if is_whole(event.get("step")):
                blocked_s = event.get("blocked_s")
                seconds = float(blocked_s) if is_number(blocked_s) else 0.0
                saves.append(AttemptSave(event["step"], float(event["time"]), seconds))
        return saves

    @property
    def concluded_saves(self) -> list[tuple[int, float]]:
        """Steps whose checkpoint was committed, or could not be written, and when (Unix seconds)."""
        concluded = self.named("checkpoint_committed", "checkpoint_failed")
        return [(event["step"], float(event["time"])) for event in concluded if is_whole(event.get("step"))]

    @property
    def committed_steps(self) -> list[int]:
        """The steps whose checkpoint it committed."""
        committed = self.named("checkpoint_committed")
        return [event["step"] for event in committed if is_whole(event.get("step"))]

    @property
    def roll_back(self) -> RollBack | None:
        """Where the run goes on and without which data, where the attempt said so."""
        return next(iter(roll_backs(self.events)), None)


def read(events: Iterable[Record]) -> list[Attempt]:
    """Return the attempts of a run that were started, oldest first."""
    by_number: dict[int, list[Record]] = {}
    for event in events:
        by_number.setdefault(int(event["attempt"]), []).append(event)
    attempts = [Attempt(number, tuple(own)) for number, own in sorted(by_number.items())]
    return [attempt for attempt in attempts if attempt.starts]


def attempt_of(events: Iterable[Record], number: int) -> Attempt:
    """Return one attempt, also where nobody has written yet that it began."""
    return Attempt(number, tuple(event for event in events if event.get("attempt") == number))


def newest_attempt(events: Sequence[Record]) -> Attempt | None:
    """Return the newest attempt that was started; None before the first one."""
    number = last_attempt(events)
    return None if number is None else attempt_of(events, number)


def last_attempt(events: Iterable[Record]) -> int | None:
    """Return the number of the newest attempt that was started; None before the first one."""
    started = (int(event["attempt"]) for event in events if event.get("event") == "attempt_started")
    return max(started, default=None)


def stored_step(event: Record, before: int) -> int:
    """Return the step of the newest checkpoint on storage after an event; `before`: ahead of it (0: none).

    A restore passes over damaged checkpoints, so it counts whatever had been committed before. One from
    copies in memory (`source`: memory) says nothing of what is on storage.
    """
    says_so = event.get("event") in ("checkpoint_committed", "restored") and event.get("source") != "memory"
    return int(event["step"]) if says_so and is_whole(event.get("step")) else before
