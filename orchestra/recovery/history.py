"""What became of each attempt of a run, from its events alone: the log that the policy decides upon.

One attempt, one incident. Where the events leave a doubt the incident says less: a step that nobody wrote
down is unknown, and no host is blamed for an exception. It refuses to know what follows.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath

from orchestra.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    EXIT_USAGE,
)
from orchestra.recovery.hangs import culprit
from orchestra.run import rollback, stop_requests
from orchestra.run.events import is_whole
from orchestra.run.files import Record
from orchestra.run.rollback import RollBack, roll_backs

# What the record of a failed rank says about its cause, in words that are the same each time it happens.
#
# A cause names no address, process id, time, path or step: two attempts that failed for the same reason have
# the same one. It refuses to know what is done about a failure.


BROKEN_PEER = "lost the connection to another rank"
BROKEN_DEVICE = rollback.BROKEN_DEVICE
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
        if stop_requests.CANCEL in reasons:
            return _Found(Kind.stopped, stop_requests.CANCEL)
        if stop_requests.TIME_LIMIT in reasons:
            return _Found(Kind.time_limit, "time limit")
        if stop_requests.PREEMPTED in reasons or any(it["event"] == "requeued" for it in said):
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


# What ended an attempt, from its events alone. It starts, ends and writes nothing.
#
# Every rank writes its own verdict; a rank that was killed could not, so the node agent writes `rank_failed`
# for it. The first failure counts, since the others mostly follow from it: a peer's collective breaks when a
# rank is gone. For the same reason a rank killed by a signal comes before all that had the time to write.


_STATES = {EXIT_DONE: "finished", EXIT_INTERRUPTED: "interrupted", EXIT_STOPPED: "stopped"}
# Ends that no rank is to blame for.
_IN_GOOD_ORDER = (EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED)
_VERDICTS = ("finished", "failed", "rank_failed")


@dataclass(frozen=True)
class Verdict:
    """How an attempt ended, and who was first."""

    # What `orchestra run` exits with: the codes of orchestra.errors.
    code: int
    cause: str
    message: str = ""
    rank: int | None = None
    host: str | None = None
    step: int | None = None
    traceback: str | None = None
    # Whether the message says all that a user needs, and the traceback nothing more.
    explained: bool = False

    @property
    def state(self) -> str:
        """One word: finished, interrupted, stopped (to be continued) or failed."""
        return _STATES.get(self.code, "failed")


def of_attempt(events: Iterable[Record], attempt: int) -> list[Record]:
    """Return the events of one attempt, in their order."""
    return [event for event in events if event.get("attempt") == attempt]


def last_attempt(events: Iterable[Record]) -> int | None:
    """Return the number of the newest attempt that was started."""
    started = [int(event["attempt"]) for event in events if event.get("event") == "attempt_started"]
    return max(started, default=None)


def node_verdict(events: Iterable[Record]) -> Verdict | None:
    """Return what the node agent wrote as the end of an attempt, from its events; None without one."""
    ends = [event for event in events if event.get("event") in ("finished", "failed") and "rank" not in event]
    if not ends:
        return None
    return _with_first_failure(int(ends[-1].get("code", EXIT_FAILED)), ends[-1], events)


def _with_first_failure(code: int, end: Record, events: Iterable[Record]) -> Verdict:
    failure = None if code in _IN_GOOD_ORDER else _seen_from_outside(events) or first_failure(events)
    source = failure or end
    return Verdict(
        code=code,
        cause=str(source.get("cause") or end.get("event", "failed")),
        message=str(source.get("message") or ""),
        rank=source.get("rank"),
        host=source.get("host"),
        step=source.get("step"),
        traceback=source.get("traceback"),
        explained=source.get("explained") is True,
    )


def first_failure(events: Iterable[Record]) -> Record | None:
    """Return the failure of a rank that came first among the events of one attempt."""
    failures = [
        event for event in events if event.get("event") in ("failed", "rank_failed") and "rank" in event
    ]
    return min(failures, key=_order_of_blame, default=None)


def _seen_from_outside(events: Iterable[Record]) -> Record | None:
    """Return what the agents saw that no rank could say: a node that is gone, a rank that hangs.

    What ranks say then follows from it: their peers are gone.
    """
    events = list(events)
    lost = [event for event in events if event.get("event") in ("node_lost", "agent_lost")]
    if lost:
        hosts = ", ".join(dict.fromkeys(str(event.get("host")) for event in lost))
        cause = str(lost[0]["event"]).replace("_", " ")
        return {"cause": cause, "message": f"{hosts}: {lost[0].get('cause')}", "host": lost[0].get("host")}
    hung = [event for event in events if event.get("event") == "hang_detected"]
    found = culprit(events) if hung else None
    if found is None:
        return None
    step = hung[0].get("step")
    return {"cause": "hang", "message": found.why, "rank": found.rank, "host": found.host, "step": step}


def _order_of_blame(event: Record) -> tuple[bool, bool, float]:
    return "signal" not in event, follows_from_another(event), event.get("time") or 0.0


def _only_stopped(events: Iterable[Record]) -> bool:
    failed = [event for event in _of_ranks(events) if event["event"] != "finished"]
    return all(event.get("code") == EXIT_STOPPED for event in failed)


def ranks_with_verdict(events: Iterable[Record]) -> frozenset[int]:
    """Return the ranks whose end is known."""
    return frozenset(int(event["rank"]) for event in _of_ranks(events))


def finished_ranks(events: Iterable[Record]) -> frozenset[int]:
    """Return the ranks that came to the end of the training."""
    return frozenset(int(event["rank"]) for event in _of_ranks(events) if event["event"] == "finished")


def _of_ranks(events: Iterable[Record]) -> list[Record]:
    return [event for event in events if event.get("event") in _VERDICTS and "rank" in event]


def judge(events: Sequence[Record], *, exit_code: int, interruption: str | None) -> Verdict:
    """Judge an attempt that is over from its events, torchrun's exit code and why it was ended at once, if it
    was.

    One rank that stopped on request is enough for that verdict, unless another one failed: ranks write it
    when all of them have saved.
    """
    finished = [event for event in _of_ranks(events) if event["event"] == "finished"]
    if exit_code == EXIT_DONE and finished:
        return Verdict(EXIT_DONE, "finished", step=finished[0].get("step"))
    failure = first_failure(events)
    outside = _seen_from_outside(events)
    if failure is not None and outside is None and _only_stopped(events):
        cause, message = str(failure.get("cause")), str(failure.get("message") or "")
        return Verdict(EXIT_STOPPED, cause, message, step=failure.get("step"))
    if interruption is not None:
        return Verdict(EXIT_INTERRUPTED, "interrupted", interruption)
    if outside is not None or failure is not None:
        code = EXIT_FAILED if failure is None or outside is not None else int(failure.get("code", 1))
        return _with_first_failure(code or EXIT_FAILED, failure or {}, events)
    return Verdict(
        EXIT_FAILED, "no verdict", f"{_ended(exit_code)}, and no rank said why; see the node's log"
    )


def _ended(exit_code: int) -> str:
    if exit_code < 0:
        return f"torchrun was ended by {signal_name(-exit_code)}"
    return f"torchrun ended with code {exit_code}"


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; numbers without a name stay numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
