"""What an attempt ended with, and who is to blame: the verdict for users, and the incident for the policy.

The node agents `judge` an attempt when its processes are gone; `orchestra status`, `why` and `rehearse` read
the verdict back (`node_verdict`); the recovery policy decides upon `incidents`. All blame in one order, that
of `evidence_of`. Where the events leave a doubt an incident says less: a step that nobody wrote down is
unknown, and no host is blamed for an exception. Pure.
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
from orchestra.recovery.hangs import Culprit, culprit
from orchestra.recovery.history import Attempt, stored_step
from orchestra.run.control import stop_requests
from orchestra.run.events import is_whole
from orchestra.run.files import Record
from orchestra.run.record import RunPhase
from orchestra.run.rollback import BROKEN_DEVICE, RollBack

# Causes. A cause is the same text each time the same thing happens: it names no address, process id, time,
# path or step.
BROKEN_PEER = "lost the connection to another rank"
# Nobody wrote down how it ended.
NO_VERDICT = "no verdict"
# What ended a run whose ranks were heard to come to their end.
UNHEARD = "its last records found no room on the disk"
_KILLED_BY = "killed by "
# Sent to a process by the kernel for want of memory, by Slurm or by a person.
_SIGNALS_FROM_OUTSIDE = frozenset(
    ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
)
# What a file system or a network does that is away for a while. Missing files are none of these.
_ERRORS_FROM_OUTSIDE = frozenset(
    (
        *("OSError", "TimeoutError", "BlockingIOError", "BrokenPipeError", "StorageError", "UnsavedError"),
        *("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError"),
    )
)
# What a rank raises whose storage, of checkpoints or of data, does not answer.
_STORAGE_OUTAGES = ("StorageOutageError", "DataOutageError")
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
# Errors of a rank that gave up because its loss is not finite, or leaps.
_LOSS_ERRORS = ("NonFiniteError", "LossSpikeError", "RollBackError")
_FRAME = re.compile(r'^ *File "(?P<file>[^"]+)", line \d+, in (?P<function>\S+)', re.MULTILINE)
_NOT_OWN = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3|^<|\.zip/")
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")
# Verdicts by which nothing failed.
_ENDS_IN_GOOD_ORDER = (EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED)
_PHASES_OF_CODES = {
    EXIT_DONE: RunPhase.finished,
    EXIT_INTERRUPTED: RunPhase.interrupted,
    EXIT_STOPPED: RunPhase.stopped,
}
# Decisions by which a run does not go on.
_ENDING_DECISIONS = ("give_up", "end")
# Events whose step is exact when a rank wrote them, and others that name a step that ran.
_OF_RANKS = ("failed", "rank_failed", "hang_detected", "fault_injected")
_OF_STEPS = ("checkpoint_started", "checkpoint_committed", "checkpoint_failed", "nonfinite_step")


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
    # A storage did not answer for as long as the begin of an attempt waits for it.
    storage = "storage"
    rank_failed = "rank_failed"
    hang = "hang"
    node_lost = "node_lost"
    agent_lost = "agent_lost"
    # Its leader went away without a word, and so did all who could have spoken for it.
    lost = "lost"


def fingerprint(failure: Record) -> str:
    """Return the cause that a `failed` or `rank_failed` event of a rank tells.

    The signal that ended it; else, where an exception's words tell it, that a device or a peer was gone; else
    its type and the innermost function in its traceback that is not a library's; else the exit code.
    """
    name = failure.get("signal")
    if isinstance(name, str):
        return f"{_KILLED_BY}{name}"
    if _is_of_device(failure):
        return BROKEN_DEVICE
    if follows_from_another(failure):
        return BROKEN_PEER
    cause = str(failure.get("cause") or NO_VERDICT)
    if (frame := _last_own_frame(str(failure.get("traceback") or ""))) is not None:
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


def follows_from_another(failure: Record) -> bool:
    """Tell whether a rank failed because another one was gone."""
    return "signal" not in failure and bool(_WORDS_OF_BROKEN_PEER.search(_words(failure)))


def _is_of_device(failure: Record) -> bool:
    return bool(_WORDS_OF_BROKEN_DEVICE.search(_words(failure)))


def _words(failure: Record) -> str:
    return f"{failure.get('cause') or ''}: {failure.get('message') or ''}"


@dataclass(frozen=True)
class Evidence:
    """What caused an attempt to fail, of all that its events report."""

    kind: Kind
    # The events that say so, the first one to be shown.
    events: tuple[Record, ...]
    # Of a hang: the rank that the others wait for; None where no event carries positions.
    culprit: Culprit | None = None


def evidence_of(attempt: Attempt) -> Evidence | None:
    """Return what an attempt failed of, and nothing of what merely followed; None where no event reports it.

    This is the order of blame. Ranks fail and hang because a node is gone, and are killed because they hang:
    not the other way round. A rank that rolls the run back says what was wrong; any other rank that failed is
    the last that can be blamed.
    """
    # Kinds that are called as the events that tell of them.
    for kind in (Kind.node_lost, Kind.agent_lost):
        if lost := attempt.named(kind.value):
            return Evidence(kind, tuple(lost))
    if hangs := attempt.named("hang_detected"):
        return Evidence(Kind.hang, tuple(hangs), culprit(attempt.events))
    first = first_failure(attempt)
    failures = () if first is None else (first,)
    if (rolled := attempt.roll_back) is not None:
        return Evidence(Kind.replay if rolled.cause == BROKEN_DEVICE else Kind.loss, failures)
    if first is None:
        return None
    if first.get("cause") in _STORAGE_OUTAGES:
        return Evidence(Kind.storage, failures)
    return Evidence(Kind.loss if first.get("cause") in _LOSS_ERRORS else Kind.rank_failed, failures)


def first_failure(attempt: Attempt) -> Record | None:
    """Return the failure of a rank that the others followed from; None where none failed.

    A rank killed by a signal comes before all that had the time to write, and one that lost its connection to
    another rank after that rank, whoever wrote first.
    """
    return min(attempt.rank_failures, key=_order_of_ranks, default=None)


def _order_of_ranks(failure: Record) -> tuple[bool, bool, float]:
    return "signal" not in failure, follows_from_another(failure), float(failure.get("time") or 0.0)


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
    def state(self) -> RunPhase:
        """Finished, interrupted, stopped (to be continued) or failed."""
        return _PHASES_OF_CODES.get(self.code, RunPhase.failed)


def node_verdict(attempt: Attempt) -> Verdict | None:
    """Return what its leader wrote as the end of an attempt, with the failure that caused it.

    None while nothing was written.
    """
    if attempt.verdict is None:
        return None
    return _with_cause(int(attempt.verdict.get("code", EXIT_FAILED)), attempt.verdict, attempt)


def judge(attempt: Attempt, *, exit_code: int, interruption: str | None) -> Verdict:
    """Judge an attempt whose processes are gone from its events, torchrun's exit code and why it was ended at
    once, if it was.

    One rank that stopped on request is enough for that verdict, unless another one failed: ranks write it
    when all of them have saved.
    """
    finished = [event for event in attempt.rank_ends if event["event"] == "finished"]
    if exit_code == EXIT_DONE and finished:
        return Verdict(EXIT_DONE, "finished", step=finished[0].get("step"))
    failure, outside = first_failure(attempt), _seen_from_outside(attempt)
    only_stopped = all(event.get("code") == EXIT_STOPPED for event in attempt.rank_failures)
    if failure is not None and outside is None and only_stopped:
        cause, message = str(failure.get("cause")), str(failure.get("message") or "")
        return Verdict(EXIT_STOPPED, cause, message, step=failure.get("step"))
    if interruption is not None:
        return Verdict(EXIT_INTERRUPTED, "interrupted", interruption)
    if outside is not None:
        return _with_cause(EXIT_FAILED, failure or {}, attempt)
    if failure is not None:
        return _with_cause(int(failure.get("code", EXIT_FAILED)) or EXIT_FAILED, failure, attempt)
    how = f"was ended by {signal_name(-exit_code)}" if exit_code < 0 else f"ended with code {exit_code}"
    return Verdict(EXIT_FAILED, NO_VERDICT, f"torchrun {how}, and no rank said why; see the node's log")


def _with_cause(code: int, end: Record, attempt: Attempt) -> Verdict:
    failure = None
    if code not in _ENDS_IN_GOOD_ORDER:
        failure = _seen_from_outside(attempt) or first_failure(attempt)
        if failure is not None and failure.get("code") in _ENDS_IN_GOOD_ORDER:
            # Its ranks stopped as they were asked to: what is wrong the leader alone knows.
            failure = None
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


def _seen_from_outside(attempt: Attempt) -> Record | None:
    """Return what the agents saw that no rank could say: a node that is gone, a rank that hangs."""
    evidence = evidence_of(attempt)
    if evidence is None:
        return None
    first = evidence.events[0] if evidence.events else {}
    if evidence.kind in (Kind.node_lost, Kind.agent_lost):
        hosts = ", ".join(dict.fromkeys(str(event.get("host")) for event in evidence.events))
        cause = evidence.kind.value.replace("_", " ")
        return {"cause": cause, "message": f"{hosts}: {first.get('cause')}", "host": first.get("host")}
    if (hung := evidence.culprit) is None:
        return None
    return {
        "cause": "hang",
        "message": hung.why,
        "rank": hung.rank,
        "host": hung.host,
        "step": first.get("step"),
    }


def signal_name(number: int) -> str:
    """Return "SIGKILL" for 9; numbers without a name stay numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Incident:
    """How one attempt ended, as the policy needs it."""

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
    # The step after which the attempt began, or would have.
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
    # Hosts that found afterwards that they cannot train, and whether because of a device: neither code nor
    # data is suspected then.
    unfit: tuple[str, ...] = ()
    of_device: bool = False
    # Whether somebody had planned a failure (recovery.inject): it says nothing of the machines.
    rehearsed: bool = False
    # Where the run goes on and without which data, where the attempt said so.
    roll_back: RollBack | None = None

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong, as opposed to an end that was asked for."""
        return self.kind not in (Kind.finished, Kind.stopped, Kind.preempted, Kind.time_limit)


def incidents(attempts: Sequence[Attempt], steps: Mapping[int, int] | None = None) -> list[Incident]:
    """Return one incident per attempt that is over. `attempts`: all of a run, as `history.read` returns them.

    `steps`: the last logged step of attempts, where metrics tell more than events. The last attempt is not
    over, and left out, while nobody gave a verdict.
    """
    ended: list[Incident] = []
    committed = 0
    before: Attempt | None = None
    for attempt in attempts:
        began = committed if attempt.restored is None else int(attempt.restored["step"])
        for event in attempt.events:
            committed = stored_step(event, committed)
        if attempt.verdict is not None or attempt is not attempts[-1]:
            logged = (steps or {}).get(attempt.number)
            by_hand = before is None or not _went_on(before, attempt)
            ended.append(_incident(attempt, began, committed, logged, by_hand=by_hand))
        before = attempt
    return ended


def _incident(attempt: Attempt, began: int, committed: int, logged: int | None, *, by_hand: bool) -> Incident:
    verdict = attempt.verdict
    code = EXIT_FAILED if verdict is None else int(verdict.get("code", EXIT_FAILED))
    end = _end_in_good_order(attempt, code) or _failure(attempt, code)
    step, is_exact = _last_step(attempt, logged)
    return Incident(
        attempt=attempt.number,
        kind=end.kind,
        cause=end.cause,
        time=float((verdict or attempt.events[-1])["time"]),
        code=code,
        rank=end.rank,
        host=end.blamed[0] if end.blamed else end.host,
        blamed=end.blamed,
        step=step,
        step_is_exact=is_exact,
        began=began,
        committed=committed,
        # A step that is known to be the first one or earlier; else whether ranks began to train.
        before_first_step=(step is None or step <= began) and (is_exact or attempt.training_started is None),
        num_nodes=attempt.num_nodes,
        by_hand=by_hand,
        excluded=attempt.excluded_hosts,
        unfit=attempt.unfit_hosts,
        of_device=attempt.has_broken_device,
        rehearsed=bool(attempt.named("fault_injected")),
        roll_back=attempt.roll_back,
    )


def _went_on(before: Attempt, attempt: Attempt) -> bool:
    """Tell whether recovery or Slurm, and no person, let an attempt follow the one before it."""
    job = attempt.start.get("job")
    # The job that was to go on may have begun no attempt, or been cancelled while it waited.
    in_queue = [event for event in attempt.named("cancelled") if event["time"] < attempt.start["time"]]
    words = [*before.named("requeued", "start_failed", "cancelled"), *in_queue]
    # An older one that somebody starts again says nothing of a job that restarts in place.
    is_other = job != before.start.get("job")
    if is_other and words and words[-1]["event"] != "requeued" and words[-1].get("job") != job:
        return False
    if before.decision is not None:
        return before.decision.get("decision") not in _ENDING_DECISIONS
    return job is not None and job == before.start.get("job")


@dataclass(frozen=True)
class _End:
    """What an attempt ended with; the fields are those of `Incident`."""

    kind: Kind
    cause: str
    rank: int | None = None
    host: str | None = None
    blamed: tuple[str, ...] = ()


def _end_in_good_order(attempt: Attempt, code: int) -> _End | None:
    """Return the end that a code tells by which nothing failed; None for other codes."""
    if code == EXIT_DONE and attempt.verdict is not None:
        return _End(Kind.finished, "finished")
    if code not in (EXIT_STOPPED, EXIT_INTERRUPTED):
        return None
    # What is written under an attempt's number of a later start that was called off is not its own.
    asked = [event for event in attempt.named("stop_requested", "requeued") if not event.get("before_start")]
    reasons = [str(event.get("reason")) for event in asked]
    if stop_requests.CANCEL in reasons:
        return _End(Kind.stopped, stop_requests.CANCEL)
    if stop_requests.TIME_LIMIT in reasons:
        return _End(Kind.time_limit, "time limit")
    if stop_requests.PREEMPTED in reasons or any(event["event"] == "requeued" for event in asked):
        return _End(Kind.preempted, "preempted")
    return _End(Kind.stopped, reasons[-1] if reasons else "asked to stop")


def _failure(attempt: Attempt, code: int) -> _End:
    """Return what an attempt failed of, and which hosts that speaks against."""
    if code in (EXIT_DO_NOT_RESTART, EXIT_USAGE):
        first = first_failure(attempt)
        cause = fingerprint(first or attempt.verdict or {})
        return _End(Kind.refused, cause, *_rank_and_host(first))
    evidence = evidence_of(attempt)
    if evidence is None and attempt.verdict is None:
        return _End(Kind.lost, "its leader went away")
    if evidence is None:
        return _End(Kind.rank_failed, fingerprint(attempt.verdict or {}))
    if evidence.kind in (Kind.node_lost, Kind.agent_lost):
        hosts = _hosts_of_nodes(attempt, evidence.events)
        first = evidence.events[0]
        return _End(evidence.kind, evidence.kind.value.replace("_", " "), *_rank_and_host(first), hosts)
    if evidence.kind is Kind.hang:
        return _hang(attempt, evidence)
    if (rolled := attempt.roll_back) is not None:
        return _roll_back(attempt, rolled)
    first = evidence.events[0]
    if evidence.kind is Kind.storage:
        return _End(Kind.storage, "the storage did not answer", *_rank_and_host(first))
    return _End(evidence.kind, fingerprint(first), *_rank_and_host(first), _host_to_blame(attempt, first))


def _rank_and_host(event: Record | None) -> tuple[int | None, str | None]:
    return (None, None) if event is None else (event.get("rank"), event.get("host"))


def _hosts_of_nodes(attempt: Attempt, lost: Iterable[Record]) -> tuple[str, ...]:
    """Return the hosts of lost nodes: as they introduced themselves, else as the event says.

    An event's host may be its writer's, which is none that was lost.
    """
    joined = attempt.named("attempt_started", "node_started")
    names = {
        event["node"]: str(event["host"])
        for event in joined
        if is_whole(event.get("node")) and "host" in event
    }
    hosts = []
    for event in lost:
        if (node := event.get("node")) in names:
            hosts.append(names[node])
        elif "host" in event and event["host"] not in names.values():
            hosts.append(str(event["host"]))
    return tuple(dict.fromkeys(hosts))


def _hang(attempt: Attempt, evidence: Evidence) -> _End:
    """All ranks wait once one hangs: the one that has come least far is it, where one is."""
    hung, events = evidence.culprit, evidence.events
    first = next(
        (event for event in events if hung is not None and event.get("rank") == hung.rank), events[0]
    )
    phase = first.get("phase")
    cause = f"hang in {phase}" if isinstance(phase, str) else "hang"
    if hung is None or hung.host is None:
        return _End(Kind.hang, cause)
    # A run on a single host has nothing to compare it with.
    blamed = (hung.host,) if attempt.num_nodes > 1 else ()
    return _End(Kind.hang, cause, hung.rank, hung.host, blamed)


def _roll_back(attempt: Attempt, rolled: RollBack) -> _End:
    """Bad losses are nobody's fault; of a step that was computed again the events may say whose."""
    if rolled.cause != BROKEN_DEVICE:
        return _End(Kind.loss, rolled.cause)
    differing = attempt.named("replay_differs")
    broken = [event for event in differing if event.get("is_settled") is True and "rank" in event]
    hosts = tuple(dict.fromkeys(_host_of_rank(attempt, event) for event in broken))
    return _End(Kind.replay, rolled.cause, broken[0]["rank"] if broken else None, blamed=hosts)


def _host_of_rank(attempt: Attempt, event: Record) -> str:
    """Return the host of an event's rank, by the name that the attempt began with: a rank may call its host
    otherwise.
    """
    hosts = attempt.start.get("hosts")
    sizes = [started.get("world_size") for started in attempt.named("training_started")]
    size = next((size for size in sizes if is_whole(size) and size > 0), None)
    if not isinstance(hosts, list) or not hosts or size is None or not 0 <= event["rank"] < size:
        return str(event.get("host"))
    return str(hosts[event["rank"] * len(hosts) // size])


def _host_to_blame(attempt: Attempt, failure: Record) -> tuple[str, ...]:
    """Return the host that a rank's failure speaks against: by a signal, or by a device that is broken.

    An exception does not: whoever writes one runs. A run on a single host has nothing to compare it with.
    """
    is_evidence = "signal" in failure or _is_of_device(failure)
    host = failure.get("host")
    return (str(host),) if is_evidence and host is not None and attempt.num_nodes > 1 else ()


def _last_step(attempt: Attempt, logged: int | None) -> tuple[int | None, bool]:
    """Return the last step that is known to have begun, and whether a rank itself said so."""
    said = _steps(event for event in attempt.named(*_OF_RANKS) if "rank" in event)
    seen = _steps(attempt.named(*_OF_STEPS))
    reached = (attempt.verdict or {}).get("reached")
    seen += [step for step in (logged, reached) if is_whole(step)]
    step = max([*said, *seen], default=None)
    return step, bool(said) and step == max(said)


def _steps(events: Iterable[Record]) -> list[int]:
    return [event["step"] for event in events if is_whole(event.get("step"))]
