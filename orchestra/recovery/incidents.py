"""What became of each attempt of a run, from its events alone: the log that the policy decides upon.

One attempt, one incident. Where the events leave a doubt the incident says less: a step that nobody wrote
down is unknown, and no host is blamed for an exception. It refuses to know what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from orchestra import control
from orchestra.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_USAGE,
)
from orchestra.events import is_whole
from orchestra.jsonl import Record
from orchestra.recovery.causes import (
    BROKEN_DEVICE,
    fingerprint,
    follows_from_another,
    is_of_loss,
    speaks_against_host,
)
from orchestra.recovery.culprit import culprit
from orchestra.roll_backs import RollBack, roll_backs

# The events that say what was decided after an attempt: decision, rule, reason, wait_s and exclude.
DECIDED = ("restarting", "requeued")
# Decisions by which a run does not go on.
_ENDING = ("give_up", "end")


class Kind(Enum):
    """What ended an attempt."""

    finished = "finished"
    # Somebody asked for it.
    stopped = "stopped"
    preempted = "preempted"
    time_limit = "time_limit"
    # A rank or the launcher said that starting again would not help (exit code 93 or 2).
    refused = "refused"
    # The loss was not finite or leapt, and the run is to be rolled back.
    loss = "loss"
    # A step was computed twice with different results.
    replay = "replay"
    rank_failed = "rank_failed"
    hang = "hang"
    node_lost = "node_lost"
    agent_lost = "agent_lost"
    # Its leader went away without a word, and so did all who could have spoken for it.
    lost = "lost"


@dataclass(frozen=True)
class Incident:
    """How one attempt ended."""

    attempt: int
    kind: Kind
    # The same text for the same cause in every attempt.
    cause: str
    # Unix seconds.
    time: float
    # Of orchestra.errors.
    code: int
    rank: int | None = None
    # Where it was first seen; that says nothing against the host.
    host: str | None = None
    # Hosts that the evidence speaks against; none for an exception.
    blamed: tuple[str, ...] = ()
    # The last step that is known to have begun; None: nobody wrote one down.
    step: int | None = None
    # Whether a rank itself said that step; otherwise the true one may be later.
    step_is_exact: bool = False
    # The step behind which the attempt began, or would have.
    began: int = 0
    # The newest committed checkpoint when it ended; 0: none.
    committed: int = 0
    # Whether it is known that no step began.
    before_first_step: bool = False
    num_nodes: int = 1
    # Whether a person started it: what happened before was looked at.
    by_hand: bool = False
    # Hosts that what followed left out.
    excluded: tuple[str, ...] = ()
    # Whether somebody had planned a failure (recovery.inject): it says nothing of the machines.
    rehearsed: bool = False
    # Where the run goes on and without which data, where the attempt said so.
    roll_back: RollBack | None = None

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong, as opposed to an end that was asked for."""
        return self.kind not in (Kind.finished, Kind.stopped, Kind.preempted, Kind.time_limit)


def incidents(events: Iterable[Record], steps: Mapping[int, int] | None = None) -> list[Incident]:
    """Return one incident per ended attempt, oldest first. `events` are in the order of time.

    `steps`: the last logged step of attempts, where metrics tell more than events. An attempt that has
    neither a verdict nor a successor is not over and left out.
    """
    by_attempt: dict[int, list[Record]] = {}
    for event in events:
        by_attempt.setdefault(int(event["attempt"]), []).append(event)
    numbers = sorted(number for number, own in by_attempt.items() if _start(own) is not None)
    found: list[Incident] = []
    committed = 0
    before: list[Record] | None = None
    for number in numbers:
        own = by_attempt[number]
        began, committed = _began(own, committed), _committed(own, committed)
        if _verdict(own) is not None or number != numbers[-1]:
            logged = (steps or {}).get(number)
            found.append(_Reading(number, own, before, began, committed, logged).incident())
        before = own
    return found


def _start(own: Iterable[Record]) -> Record | None:
    return next((event for event in own if event["event"] == "attempt_started"), None)


def _verdict(own: Sequence[Record]) -> Record | None:
    """Return the last word on the whole attempt: a verdict may be written once more, with another code."""
    ends = [it for it in own if it["event"] in ("finished", "failed") and "rank" not in it]
    return ends[-1] if ends else None


def _began(own: Iterable[Record], committed: int) -> int:
    restored = [it["step"] for it in own if it["event"] == "restored" and is_whole(it.get("step"))]
    return int(restored[-1]) if restored else committed


def _committed(own: Iterable[Record], before: int) -> int:
    """Return the newest checkpoint behind these events.

    A restore passes over damaged ones, so it counts whatever had been committed before. One from memory
    (`source`: memory) says nothing of what is on storage.
    """
    step = before
    for event in own:
        is_told = event["event"] == "checkpoint_committed" or (
            event["event"] == "restored" and event.get("source") != "memory"
        )
        if is_told and is_whole(event.get("step")):
            step = event["step"]
    return step


@dataclass(frozen=True)
class _Found:
    """What the evidence comes to."""

    kind: Kind
    cause: str
    first: Record | None = None
    blamed: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Reading:
    """One attempt's events, and what came before it."""

    attempt: int
    own: list[Record]
    before: list[Record] | None
    began: int
    committed: int
    logged: int | None

    def incident(self) -> Incident:
        verdict, start = _verdict(self.own), _start(self.own) or {}
        code = EXIT_FAILED if verdict is None else int(verdict.get("code", EXIT_FAILED))
        found = self._end_in_good_order(code) or self._failure(code)
        first = found.first or {}
        step, is_exact = self._step()
        last = verdict or self.own[-1]
        return Incident(
            attempt=self.attempt,
            kind=found.kind,
            cause=found.cause,
            time=float(last["time"]),
            code=code,
            rank=first.get("rank"),
            host=found.blamed[0] if found.blamed else first.get("host"),
            blamed=found.blamed,
            step=step,
            step_is_exact=is_exact,
            began=self.began,
            committed=self.committed,
            before_first_step=self._is_before_first_step(step, is_exact),
            num_nodes=self._num_nodes(),
            by_hand=self.before is None or not _went_on(self.before, start),
            excluded=_excluded(self.own),
            rehearsed=bool(self._all("fault_injected")),
            roll_back=self._rolled_back(),
        )

    def _all(self, *names: str) -> list[Record]:
        return [event for event in self.own if event["event"] in names]

    def _num_nodes(self) -> int:
        nodes = (_start(self.own) or {}).get("nodes")
        return nodes if is_whole(nodes) and nodes > 0 else 1

    def _end_in_good_order(self, code: int) -> _Found | None:
        if code == EXIT_DONE and _verdict(self.own) is not None:
            return _Found(Kind.finished, "finished")
        if code not in (EXIT_STOPPED, EXIT_INTERRUPTED):
            return None
        # What is written under an attempt's number of a later start that was called off is not its own.
        said = [it for it in self._all("stop_requested", "requeued") if not it.get("before_start")]
        reasons = [str(it.get("reason")) for it in said]
        if control.CANCEL in reasons:
            return _Found(Kind.stopped, control.CANCEL)
        if control.TIME_LIMIT in reasons:
            return _Found(Kind.time_limit, "time limit")
        if control.PREEMPTED in reasons or any(it["event"] == "requeued" for it in said):
            return _Found(Kind.preempted, "preempted")
        return _Found(Kind.stopped, reasons[-1] if reasons else "asked to stop")

    def _failure(self, code: int) -> _Found:
        first = self._first_failure()
        if code in (EXIT_DO_NOT_RESTART, EXIT_USAGE):
            return _Found(Kind.refused, fingerprint(first or _verdict(self.own) or {}), first)
        # Ranks fail and hang because a node is gone, and are killed because they hang: not the other way.
        if lost := self._all("node_lost"):
            return _Found(Kind.node_lost, "node lost", lost[0], self._hosts(lost))
        if lost := self._all("agent_lost"):
            return _Found(Kind.agent_lost, "agent lost", lost[0], self._hosts(lost))
        if hung := self._all("hang_detected"):
            return self._hang(hung)
        if (rolled := self._rolled_back()) is not None:
            return self._of_roll_back(rolled)
        if first is not None:
            kind = Kind.loss if is_of_loss(first) else Kind.rank_failed
            return _Found(kind, fingerprint(first), first, self._against_host(first))
        if _verdict(self.own) is None:
            return _Found(Kind.lost, "its leader went away")
        return _Found(Kind.rank_failed, fingerprint(_verdict(self.own) or {}))

    def _rolled_back(self) -> RollBack | None:
        return next(iter(roll_backs(self.own)), None)

    def _of_roll_back(self, rolled: RollBack) -> _Found:
        """Bad losses are nobody's fault; of a step that was computed again the events may say whose."""
        if rolled.cause != BROKEN_DEVICE:
            return _Found(Kind.loss, rolled.cause)
        broken = [it for it in self._all("replay_differs") if it.get("is_settled") is True and "rank" in it]
        hosts = tuple(dict.fromkeys(self._host_of(it) for it in broken))
        first = {"rank": broken[0]["rank"], "host": hosts[0]} if broken else None
        return _Found(Kind.replay, rolled.cause, first, hosts)

    def _host_of(self, event: Record) -> str:
        """Return the host of an event's rank, by the name that the attempt began with: a rank may call its
        host otherwise.
        """
        hosts = (_start(self.own) or {}).get("hosts")
        sizes = [it.get("world_size") for it in self._all("training_started")]
        size = next((it for it in sizes if is_whole(it) and it > 0), None)
        if not isinstance(hosts, list) or not hosts or size is None or not 0 <= event["rank"] < size:
            return str(event.get("host"))
        return str(hosts[event["rank"] * len(hosts) // size])

    def _first_failure(self) -> Record | None:
        failures = [it for it in self._all("failed", "rank_failed") if "rank" in it]
        return min(
            failures,
            key=lambda it: ("signal" not in it, follows_from_another(it), float(it["time"])),
            default=None,
        )

    def _hang(self, hung: list[Record]) -> _Found:
        """All ranks wait once one hangs: the one that is furthest behind is it, where one is."""
        who = culprit(self.own)
        first = next((it for it in hung if who is not None and it.get("rank") == who.rank), hung[0])
        phase = first.get("phase")
        cause = f"hang in {phase}" if isinstance(phase, str) else "hang"
        if who is None or who.host is None:
            return _Found(Kind.hang, cause)
        # A run on a single host has nothing to compare it with.
        blamed = (who.host,) if self._num_nodes() > 1 else ()
        return _Found(Kind.hang, cause, {"rank": who.rank, "host": who.host}, blamed)

    def _against_host(self, failure: Record) -> tuple[str, ...]:
        host = failure.get("host")
        is_evidence = host is not None and self._num_nodes() > 1 and speaks_against_host(failure)
        return (str(host),) if is_evidence else ()

    def _hosts(self, lost: Iterable[Record]) -> tuple[str, ...]:
        """Return the hosts of lost nodes: as they introduced themselves, else as the event says.

        An event's host may be its writer's, which is none that was lost.
        """
        joined = self._all("attempt_started", "node_started")
        names = {it["node"]: str(it["host"]) for it in joined if is_whole(it.get("node")) and "host" in it}
        hosts = []
        for event in lost:
            if (node := event.get("node")) in names:
                hosts.append(names[node])
            elif "host" in event and event["host"] not in names.values():
                hosts.append(str(event["host"]))
        return tuple(dict.fromkeys(hosts))

    def _step(self) -> tuple[int | None, bool]:
        said = _steps(it for it in self._all(*_OF_RANKS) if "rank" in it)
        seen = _steps(self._all(*_OF_STEPS))
        reached = (_verdict(self.own) or {}).get("reached")
        seen += [step for step in (self.logged, reached) if is_whole(step)]
        step = max([*said, *seen], default=None)
        return step, bool(said) and step == max(said)

    def _is_before_first_step(self, step: int | None, is_exact: bool) -> bool:
        if step is not None and step > self.began:
            return False
        return is_exact or not self._all("training_started")


# By whom a step is told exactly, and what else names one that ran.
_OF_RANKS = ("failed", "rank_failed", "hang_detected", "fault_injected")
_OF_STEPS = ("checkpoint_started", "checkpoint_committed", "checkpoint_failed", "nonfinite_step")


def _steps(events: Iterable[Record]) -> list[int]:
    return [event["step"] for event in events if is_whole(event.get("step"))]


def _went_on(before: Iterable[Record], start: Record) -> bool:
    """Tell whether recovery or Slurm, and no person, let an attempt follow the one before it."""
    before = list(before)
    last_words = [it for it in before if it["event"] in (*DECIDED, "finished", "failed") and "rank" not in it]
    if last_words and last_words[-1]["event"] in DECIDED:
        return last_words[-1].get("decision") not in _ENDING
    job = start.get("job")
    return job is not None and job == (_start(before) or {}).get("job")


def _excluded(own: Iterable[Record]) -> tuple[str, ...]:
    hosts: list[str] = []
    for event in own:
        if event["event"] in DECIDED and isinstance(event.get("exclude"), list):
            hosts += [host for host in event["exclude"] if isinstance(host, str)]
    return tuple(dict.fromkeys(hosts))
