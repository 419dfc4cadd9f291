"""Whether a run that was hurt ended as if nothing had happened: compared with one to which nothing did.

`judged` reads both runs' files, and the newest checkpoint byte for byte: `recoveries` says what answered each
planned fault, how fast and at what cost, and `checks` holds the end against claims that must be true.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from checkpointing.catalog import committed_steps, read_manifest
from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.manifest import Manifest
from checkpointing.storage import Storage, open_storage
from checkpointing.verify import verify
from orchestra.data.ledger import read_ledger
from orchestra.errors import EXIT_DONE, EXIT_FAILED
from orchestra.recovery.accounting import account
from orchestra.recovery.history import newest_attempt
from orchestra.recovery.incidents import node_verdict
from orchestra.rehearsal.prepare_rehearsal import RehearsalPair
from orchestra.report.attempts import EndedAttempt, ended_attempts
from orchestra.run.config_file import read_config
from orchestra.run.events import is_number, is_whole, read_events
from orchestra.run.files import Record, read_json_lines
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.run.planned_faults import PlannedFault, planned_faults
from orchestra.run.record import RunPhase
from orchestra.sizes.units import first_few

# Of the wall time.
_ACCOUNTS_MAY_DIFFER = 0.01
_MAX_THREADS = 8
_MOST_DAMAGES = 3


@dataclass(frozen=True)
class RehearsalCheck:
    """One claim about the run that was hurt. `is_true` is None where it cannot be held to it."""

    claim: str
    is_true: bool | None
    found: str
    # What a user can do about it.
    advice: str = ""

    def to_json(self) -> Record:
        """Return it for `--json`."""
        advice = self.advice if self.is_true is False else ""
        return {"claim": self.claim, "passed": self.is_true, "found": self.found, "advice": advice}


def checks(hurt: RunDir, whole: RunDir) -> list[RehearsalCheck]:
    """Return all claims, and whether they hold. `whole`: the undisturbed run. Reads a checkpoint's bytes."""
    ended = _finished(hurt, "the hurt run finished")
    whole_ended = _finished(whole, "the undisturbed run finished")
    found = [whole_ended, ended]
    if not (ended.is_true and whole_ended.is_true):
        return found
    return [
        *found,
        _no_step_missing(hurt),
        _same_samples(hurt, whole),
        *_same_state(hurt, whole),
        _published_in_order(hurt),
        _accounts_sum(hurt),
    ]


def _finished(run: RunDir, claim: str) -> RehearsalCheck:
    events = read_events(run)
    attempt = newest_attempt(events)
    verdict = None if attempt is None else node_verdict(attempt)
    advice = f"`orchestra why {run.path}` tells what ended it"
    if verdict is None:
        return RehearsalCheck(claim, False, "it never ended by itself", advice)
    if verdict.state is not RunPhase.finished:
        decided = [event.get("reason") for event in events if event["event"] == "restarting"]
        why = f"; the policy's last word: {decided[-1]}" if decided else ""
        return RehearsalCheck(
            claim, False, f"{verdict.state}: {verdict.message or verdict.cause}{why}", advice
        )
    return RehearsalCheck(
        claim, True, f"attempts: {len({event['attempt'] for event in events if _is_start(event)})}"
    )


def _is_start(event: Record) -> bool:
    return bool(event["event"] == "attempt_started")


def _no_step_missing(run: RunDir) -> RehearsalCheck:
    wanted = range(1, read_config(run.config).train.steps + 1)
    got = [row["step"] for row in read_metrics(run)]
    missing = sorted(set(wanted) - set(got))
    advice = "a step that nobody logged may never have been trained; keep the run and report it"
    if missing:
        return RehearsalCheck(
            "no step is missing", False, f"of {len(wanted)} steps: {first_few(missing)}", advice
        )
    return RehearsalCheck("no step is missing", True, f"{len(wanted)} steps")


def _same_samples(run: RunDir, whole: RunDir) -> RehearsalCheck:
    claim = "each sample was trained exactly once"
    ours, theirs = read_ledger(run), read_ledger(whole)
    unlike = [step for step in sorted(ours.keys() | theirs.keys()) if _ids(ours, step) != _ids(theirs, step)]
    if unlike:
        said = f"steps with other samples than the undisturbed run's: {first_few(unlike)}"
        return RehearsalCheck(claim, False, said, "data.path may have changed meanwhile; else report it")
    return RehearsalCheck(claim, True, f"{sum(map(len, ours.values())):,} samples, as in the undisturbed run")


def _ids(ledger: dict[int, list[int]], step: int) -> list[int]:
    return sorted(ledger.get(step, []))


def _same_state(run: RunDir, whole: RunDir) -> list[RehearsalCheck]:
    """Compare the last states, and read the newest checkpoint's bytes."""
    same, intact = "the final state is the undisturbed run's, bit for bit", "the newest checkpoint is intact"
    try:
        storage, manifest = _newest(run)
        _, expected = _newest(whole)
        report = verify(storage, manifest.step, min(_MAX_THREADS, len(os.sched_getaffinity(0))))
    except CheckpointError as error:
        return [RehearsalCheck(intact, False, str(error), "see checkpoint.dir and `orchestra doctor`")]
    found = [_compared(same, run, whole, manifest, expected)]
    damages = "; ".join(map(str, report.damages[:_MOST_DAMAGES]))
    advice = "the storage loses or changes bytes; `orchestra checkpoint verify` names them"
    said = damages or f"step {report.step}, {report.num_bytes:,} bytes read"
    return [*found, RehearsalCheck(intact, report.is_intact, said, advice)]


def _newest(run: RunDir) -> tuple[Storage, Manifest]:
    storage = open_storage(read_config(run.config).checkpoint.dir or run.checkpoints)
    steps = committed_steps(storage)
    if not steps:
        raise CheckpointError(f"{run.name} has no checkpoint in {storage.place}")
    return storage, read_manifest(storage, steps[-1])


def _compared(claim: str, run: RunDir, whole: RunDir, ours: Manifest, theirs: Manifest) -> RehearsalCheck:
    layouts = _layouts(run) | _layouts(whole)
    if len(layouts) > 1:
        said = "the layout changed with the number of nodes: sums are added up in another order"
        return RehearsalCheck(claim, None, said)
    if (ours.step, ours.state_digest) == (theirs.step, theirs.state_digest):
        return RehearsalCheck(claim, True, f"step {ours.step}, digest {ours.state_digest[:16]}")
    said = f"step {ours.step}: {ours.state_digest[:16]}, step {theirs.step}: {theirs.state_digest[:16]}"
    advice = (
        "where the undisturbed run itself does not repeat bit for bit (kernels that are not deterministic, "
        "train.micro_batch_size=auto), this says nothing about recovery: rehearse again and compare the two "
        "undisturbed runs"
    )
    return RehearsalCheck(claim, False, said, advice)


def _layouts(run: RunDir) -> set[str]:
    keys = ("nodes", "ranks_per_node", "layout", "micro_batch_size", "accumulation")
    starts = [event for event in read_events(run) if _is_start(event)]
    return {json.dumps({key: start.get(key) for key in keys}, sort_keys=True) for start in starts}


def _published_in_order(run: RunDir) -> RehearsalCheck:
    claim = "no attempt saved anything behind the start of a newer one"
    events = read_events(run)
    began = {event["attempt"]: event["time"] for event in events if event["event"] == "restored"}
    late = [
        event.get("step")
        for event in events
        if event["event"] == "checkpoint_committed"
        and any(number > event["attempt"] and time < event["time"] for number, time in began.items())
    ]
    if late:
        return RehearsalCheck(claim, False, f"steps {first_few(late)}", "report it, with the run's events/")
    return RehearsalCheck(
        claim, True, f"{sum(event['event'] == 'checkpoint_committed' for event in events)} checkpoints"
    )


def _accounts_sum(run: RunDir) -> RehearsalCheck:
    claim = "the accounts sum to the wall time within 1 %"
    events = read_events(run)
    begins = [event["time"] for event in events if event["event"] in ("submitted", "attempt_started")]
    ends = [event["time"] for event in events if event["event"] in ("finished", "node_ended")]
    wall_s = max(ends) - min(begins)
    booked = account(events, read_json_lines(run.metrics))
    said = f"{booked.wall_s:.1f} s booked of {wall_s:.1f} s"
    if abs(booked.wall_s - wall_s) > _ACCOUNTS_MAY_DIFFER * wall_s:
        return RehearsalCheck(claim, False, said, "the hosts' clocks may differ: see `orchestra doctor`")
    return RehearsalCheck(claim, True, said)


# The parts of a recovery, each named after its end; the first one begins with the fault. Where a fault and
# what follows it were written on different hosts the seconds are as good as their clocks agree.
STRETCHES = ("noticed", "decided", "begun", "restored", "new step")
MEANING = {
    "noticed": "somebody has written down that something is wrong",
    "decided": "nothing of the old attempt is left, and the policy has said what follows",
    "begun": "the next attempt begins: backoff and queue are over",
    "restored": "its ranks are started and have loaded their state",
    "new step": "what was lost is trained again, and a step that never was before",
}
# The first word that something is wrong.
_NOTICED = ("rank_failed", "failed", "hang_detected", "node_lost", "agent_lost")
_BY_SLURM = "Slurm started the job again"


@dataclass(frozen=True)
class Recovery:
    """What followed one planned fault; None where it is not known or never came."""

    fault: PlannedFault
    # Where it struck; None: it never did.
    host: str | None = None
    # What was decided, and by which rule of the policy.
    decision: str | None = None
    rule: str | None = None
    reason: str | None = None
    # From the fault to the next step that was never trained before, and of what that is made up.
    seconds: float | None = None
    stretches: dict[str, float] = field(default_factory=dict)
    # Steps that were trained again.
    lost_steps: int | None = None
    # What is wrong with it; None: it was answered and training went on.
    problem: str | None = None

    @property
    def is_passed(self) -> bool:
        return self.problem is None

    def to_json(self) -> Record:
        """Return it for `--json`."""
        told = {key: getattr(self, key) for key in ("host", "decision", "rule", "reason", "seconds")}
        more = {"stretches": self.stretches, "lost_steps": self.lost_steps, "problem": self.problem}
        fault = {"fault": self.fault.fault.name, "step": self.fault.at_step, "rank": self.fault.rank}
        return {**fault, "attempt": self.fault.attempt, **told, **more, "passed": self.is_passed}


def recoveries(
    faults: Iterable[PlannedFault], events: Sequence[Record], rows: Sequence[Record]
) -> list[Recovery]:
    """Return what followed each fault, in their order.

    `events` are in the order of time; `rows` all of metrics.jsonl, those that a rollback made void included.
    """
    told = {ended.incident.attempt: ended for ended in ended_attempts(events)}
    return [_recovery(fault, events, rows, told) for fault in faults]


def _recovery(
    fault: PlannedFault, events: Sequence[Record], rows: Sequence[Record], told: dict[int, EndedAttempt]
) -> Recovery:
    struck = next((event for event in events if _is_of(event, fault)), None)
    if struck is None:
        return Recovery(fault, problem=_why_not(fault, events))
    host, since = str(struck.get("host")), float(struck["time"])
    decision, rule, reason = _answer(told.get(int(struck["attempt"])))
    known = Recovery(fault, host, decision, rule, reason)
    begun = [
        event
        for event in events
        if event["event"] == "attempt_started" and event["attempt"] > struck["attempt"]
    ]
    if not begun:
        return replace(known, problem=f"no attempt followed{f': {reason}' if reason else ''}")
    # Ranks may train on for a moment after their agent was killed.
    first = min(float(event["time"]) for event in begun)
    reached = max((row["step"] for row in rows if _is_row(row) and row["time"] <= first), default=0)
    new = next((row for row in rows if _is_row(row) and row["time"] > first and row["step"] > reached), None)
    if new is None:
        return replace(known, problem=f"no step behind {reached} followed")
    start = max(
        (event for event in begun if event["time"] < new["time"]), key=lambda event: int(event["attempt"])
    )
    own = [event for event in events if event["attempt"] == start["attempt"]]
    restored = [event for event in own if event["event"] == "restored" and is_whole(event.get("step"))]
    before = [event for event in events if event["time"] >= since and event["attempt"] < start["attempt"]]
    marks = {
        "noticed": _first(event for event in before if event["event"] in _NOTICED),
        "decided": _last(event for event in before if event["event"] == "restarting"),
        "begun": float(start["time"]),
        "restored": _first(restored or [event for event in own if event["event"] == "training_started"]),
        "new step": float(new["time"]),
    }
    # Where nothing tells what was restored it began with the first step.
    lost = max(0, reached - (restored[-1]["step"] if restored else 0))
    seconds = float(new["time"]) - since
    return replace(known, seconds=seconds, stretches=_stretches(since, marks), lost_steps=lost)


def _is_of(event: Record, fault: PlannedFault) -> bool:
    return (
        event["event"] == "fault_injected"
        and event["attempt"] == fault.attempt
        and event.get("fault") == fault.fault.name
        and event.get("step") == fault.at_step
    )


def _is_row(row: Record) -> bool:
    return is_whole(row.get("step")) and is_number(row.get("time"))


def _why_not(fault: PlannedFault, events: Sequence[Record]) -> str:
    """Say why a fault never struck."""
    starts = {event["attempt"]: event for event in events if event["event"] == "attempt_started"}
    if fault.attempt not in starts:
        return f"it never struck: there was no attempt {fault.attempt}"
    start = starts[fault.attempt]
    nodes, per_node = start.get("nodes"), start.get("ranks_per_node")
    ranks = nodes * per_node if is_whole(nodes) and is_whole(per_node) else None
    if ranks is not None and fault.rank is not None and fault.rank >= ranks:
        return f"it never struck: attempt {fault.attempt} had only {ranks} ranks"
    return f"it never struck: attempt {fault.attempt} ended before step {fault.at_step}"


def _answer(ended: EndedAttempt | None) -> tuple[str | None, str | None, str | None]:
    if ended is None:
        return None, None, None
    if ended.decision is None:
        return _BY_SLURM, None, None
    return ended.decision, ended.rule, ended.reason


def _first(events: Iterable[Record]) -> float | None:
    return min((float(event["time"]) for event in events), default=None)


def _last(events: Iterable[Record]) -> float | None:
    return max((float(event["time"]) for event in events), default=None)


def _stretches(since: float, marks: dict[str, float | None]) -> dict[str, float]:
    """Return the seconds between each mark and the one before it; one that is missing takes none."""
    found, before = {}, since
    for name in STRETCHES:
        mark = marks[name]
        here = before if mark is None else max(before, mark)
        found[name] = here - before
        before = here
    return found


@dataclass(frozen=True)
class Judgement:
    """What a rehearsal showed."""

    pair: RehearsalPair
    recoveries: tuple[Recovery, ...]
    checks: tuple[RehearsalCheck, ...]

    @property
    def is_passed(self) -> bool:
        return all(recovery.is_passed for recovery in self.recoveries) and all(
            check.is_true is not False for check in self.checks
        )

    @property
    def code(self) -> int:
        """What the command ends with."""
        return EXIT_DONE if self.is_passed else EXIT_FAILED

    def to_json(self) -> Record:
        """Return it for `--json`."""
        pair = self.pair
        runs = {"undisturbed": str(pair.undisturbed.path), "faults": str(pair.hurt.path)}
        told = {"faults": [recovery.to_json() for recovery in self.recoveries]}
        held = {"checks": [check.to_json() for check in self.checks]}
        return {"of": pair.of, "runs": runs, **told, **held, "passed": self.is_passed}


def judged(pair: RehearsalPair) -> Judgement:
    """Judge a rehearsal whose two runs are over. Reads every byte of the newest checkpoint.

    Raises ConfigError where a run's configuration cannot be read.
    """
    faults = planned_faults(read_config(pair.hurt.config).recovery.inject)
    rows = list(read_json_lines(pair.hurt.metrics))
    found = recoveries(faults, read_events(pair.hurt), rows)
    return Judgement(pair, tuple(found), tuple(checks(pair.hurt, pair.undisturbed)))
