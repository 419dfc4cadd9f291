"""Whether a run with planned faults ended as if nothing had happened: compared with an undisturbed one.

`judged` reads both runs' files, and the newest checkpoint byte for byte: `recoveries` says what answered each
planned fault, how fast and at what cost, and `checks` holds the end against claims that must be true.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from checkpointing.catalog import read_manifest, split, stored_in
from checkpointing.checkpoint_errors import CheckpointError
from checkpointing.manifest import Manifest
from checkpointing.storage import Storage, open_storage
from checkpointing.verify import verify
from orchestra.data.order import read_ledger
from orchestra.errors import EXIT_DONE, EXIT_FAILED
from orchestra.recovery import history
from orchestra.recovery.accounting import account
from orchestra.recovery.incidents import node_verdict
from orchestra.rehearsal.prepare_rehearsal import RehearsalPair
from orchestra.report.attempts import EndedAttempt, ended_attempts
from orchestra.run.config_file import read_config
from orchestra.run.events import is_number, is_whole, read_events
from orchestra.run.files import Record, read_json_lines
from orchestra.run.metrics_file import read_metrics
from orchestra.run.paths import RunDir
from orchestra.run.planned_faults import PlannedFault, planned_faults
from orchestra.run.record import RunPhase, checkpoint_places
from orchestra.run.run_lineage import lineage_of, read_lineage
from orchestra.sizes.units import first_few

# Of the wall time.
_ACCOUNTS_MAY_DIFFER = 0.01
_MAX_THREADS = 8
_MOST_DAMAGES = 3


@dataclass(frozen=True)
class RehearsalCheck:
    """One claim about the run with faults. `is_true` is None where it cannot be held to it."""

    claim: str
    is_true: bool | None
    found: str
    # What a user can do about it where it is false.
    advice: str = ""

    def to_json(self) -> Record:
        """Return it for `--json`."""
        advice = self.advice if self.is_true is False else ""
        return {"claim": self.claim, "passed": self.is_true, "found": self.found, "advice": advice}


def checks(run: RunDir, whole: RunDir) -> list[RehearsalCheck]:
    """Return all claims, and whether they hold. `whole`: the undisturbed run. Reads a checkpoint's bytes."""
    events, events_of_whole = read_events(run), read_events(whole)
    ended = [
        _finished(whole, events_of_whole, "the undisturbed run finished"),
        _finished(run, events, "the run with faults finished"),
    ]
    if not all(check.is_true for check in ended):
        return ended
    return [
        *ended,
        _no_step_missing(run),
        _same_samples(run, whole),
        *_same_state(run, whole, _layouts(events) | _layouts(events_of_whole)),
        _published_in_order(events),
        _accounts_sum(run, events),
    ]


def _finished(run: RunDir, events: Sequence[Record], claim: str) -> RehearsalCheck:
    attempts = history.read(events)
    verdict = node_verdict(attempts[-1]) if attempts else None
    if verdict is None:
        found = "it never ended by itself"
    elif verdict.state is RunPhase.finished:
        found = f"attempts: {len(attempts)}"
    else:
        decided = [event.get("reason") for event in events if event["event"] == "restarting"]
        why = f"; the policy's last word: {decided[-1]}" if decided else ""
        found = f"{verdict.state}: {verdict.message or verdict.cause}{why}"
    is_finished = verdict is not None and verdict.state is RunPhase.finished
    return RehearsalCheck(claim, is_finished, found, f"`orchestra why {run.path}` tells what ended it")


def _no_step_missing(run: RunDir) -> RehearsalCheck:
    wanted = range(1, read_config(run.config).train.steps + 1)
    missing = sorted(set(wanted) - {row["step"] for row in read_metrics(run)})
    found = f"of {len(wanted)} steps: {first_few(missing)}" if missing else f"{len(wanted)} steps"
    advice = "a step that nobody logged may never have been trained; keep the run and report it"
    return RehearsalCheck("no step is missing", not missing, found, advice)


def _same_samples(run: RunDir, whole: RunDir) -> RehearsalCheck:
    ours, theirs = (
        {step: sorted(ids) for step, ids in read_ledger(ledger_of).items() if ids}
        for ledger_of in (run, whole)
    )
    unlike = [step for step in sorted(ours.keys() | theirs.keys()) if ours.get(step) != theirs.get(step)]
    found = f"{sum(map(len, ours.values())):,} samples, as in the undisturbed run"
    if unlike:
        found = f"steps with other samples than the undisturbed run's: {first_few(unlike)}"
    advice = "data.path may have changed meanwhile; else report it"
    return RehearsalCheck("each sample was trained exactly once", not unlike, found, advice)


def _same_state(run: RunDir, whole: RunDir, layouts: set[str]) -> list[RehearsalCheck]:
    """Compare the last states, and read the newest checkpoint's bytes."""
    intact = "the newest checkpoint is intact"
    try:
        storage, manifest = _newest(run)
        _, expected = _newest(whole)
        report = verify(storage, manifest.step, min(_MAX_THREADS, len(os.sched_getaffinity(0))))
    except CheckpointError as error:
        return [RehearsalCheck(intact, False, str(error), "see checkpoint.dir and `orchestra doctor`")]
    damages = "; ".join(map(str, report.damages[:_MOST_DAMAGES]))
    found = damages or f"step {report.step}, {report.num_bytes:,} bytes read"
    advice = "the storage loses or changes bytes; `orchestra checkpoint verify` names them"
    return [_compared(manifest, expected, layouts), RehearsalCheck(intact, report.is_intact, found, advice)]


def _newest(run: RunDir) -> tuple[Storage, Manifest]:
    settings = read_config(run.config).checkpoint
    storages = [open_storage(place) for place in checkpoint_places(run, settings)]
    found, _ = split(stored_in(storages), read_lineage(run))
    if not found:
        raise CheckpointError(f"{run.name} has no checkpoint in {storages[0].place}")
    storage = storages[found[-1].place]
    return storage, read_manifest(storage, found[-1])


def _compared(ours: Manifest, theirs: Manifest, layouts: set[str]) -> RehearsalCheck:
    claim = "the final state is the undisturbed run's, bit for bit"
    if len(layouts) > 1:
        reason = "the layout changed with the number of nodes: sums are added up in another order"
        return RehearsalCheck(claim, None, reason)
    if (ours.step, ours.state_digest) == (theirs.step, theirs.state_digest):
        return RehearsalCheck(claim, True, f"step {ours.step}, digest {ours.state_digest[:16]}")
    found = f"step {ours.step}: {ours.state_digest[:16]}, step {theirs.step}: {theirs.state_digest[:16]}"
    advice = (
        "where the undisturbed run itself does not repeat bit for bit (kernels that are not deterministic, "
        "train.micro_batch_size=auto), this says nothing about recovery: rehearse again and compare the two "
        "undisturbed runs"
    )
    return RehearsalCheck(claim, False, found, advice)


def _layouts(events: Iterable[Record]) -> set[str]:
    keys = ("nodes", "ranks_per_node", "layout", "micro_batch_size", "accumulation")
    return {
        json.dumps({key: event.get(key) for key in keys}, sort_keys=True)
        for event in events
        if event["event"] == "attempt_started"
    }


def _published_in_order(events: Sequence[Record]) -> RehearsalCheck:
    restored = {event["attempt"]: event["time"] for event in events if event["event"] == "restored"}
    committed = [event for event in events if event["event"] == "checkpoint_committed"]
    lineage = lineage_of(events)
    late = [
        event.get("step")
        for event in committed
        if any(number > event["attempt"] and time < event["time"] for number, time in restored.items())
        if lineage.is_on_line(event.get("step", 0), event["attempt"])
    ]
    claim = "no attempt saved anything that counts after the start of a newer one"
    found = f"steps {first_few(late)}" if late else f"{len(committed)} checkpoints"
    return RehearsalCheck(claim, not late, found, "report it, with the run's events/")


def _accounts_sum(run: RunDir, events: Sequence[Record]) -> RehearsalCheck:
    begins = [event["time"] for event in events if event["event"] in ("submitted", "attempt_started")]
    ends = [event["time"] for event in events if event["event"] in ("finished", "node_ended")]
    wall_s = max(ends) - min(begins)
    booked_s = account(events, read_json_lines(run.metrics)).wall_s
    return RehearsalCheck(
        "the accounts sum to the wall time within 1 %",
        abs(booked_s - wall_s) <= _ACCOUNTS_MAY_DIFFER * wall_s,
        f"{booked_s:.1f} s booked of {wall_s:.1f} s",
        "the hosts' clocks may differ: see `orchestra doctor`",
    )


# The parts of a recovery, each named after its end; the first one begins with the fault. Where a fault and
# what follows it were written on different hosts the seconds are as good as their clocks agree.
STRETCHES = (
    # Somebody has written down that something is wrong.
    "noticed",
    # Nothing of the old attempt is left, and the policy has said what follows.
    "decided",
    # The next attempt begins: backoff and queue are over.
    "begun",
    # Its ranks are started and have loaded their state.
    "restored",
    # What was lost is trained again, and a step that never was before.
    "new step",
)
# The first event that says that something is wrong.
_NOTICED = ("rank_failed", "failed", "hang_detected", "node_lost", "agent_lost")


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
        fault = self.fault
        named = {
            "fault": fault.fault.name,
            "step": fault.at_step,
            "rank": fault.rank,
            "attempt": fault.attempt,
        }
        followed = {name: value for name, value in vars(self).items() if name != "fault"}
        return {**named, **followed, "passed": self.is_passed}


def recoveries(
    faults: Iterable[PlannedFault], events: Sequence[Record], rows: Sequence[Record]
) -> list[Recovery]:
    """Return what followed each fault, in their order.

    `events` are in the order of time; `rows` all of metrics.jsonl, those that a rollback made void included.
    """
    attempts = history.read(events)
    ended = {attempt.incident.attempt: attempt for attempt in ended_attempts(events)}
    timed = [row for row in rows if is_whole(row.get("step")) and is_number(row.get("time"))]
    return [_recovery(fault, events, attempts, ended, timed) for fault in faults]


def _recovery(
    fault: PlannedFault,
    events: Sequence[Record],
    attempts: Sequence[history.Attempt],
    ended: Mapping[int, EndedAttempt],
    rows: Sequence[Record],
) -> Recovery:
    struck = next((event for event in events if _is_of(event, fault)), None)
    if struck is None:
        return Recovery(fault, problem=f"it never struck: {_why_not(fault, attempts)}")
    since = float(struck["time"])
    known = Recovery(fault, str(struck.get("host")))
    if (decided := ended.get(int(struck["attempt"]))) is not None:
        decision = decided.decision or "Slurm started the job again"
        known = replace(known, decision=decision, rule=decided.rule, reason=decided.reason)
    begun = [start for attempt in attempts if attempt.number > struck["attempt"] for start in attempt.starts]
    if not begun:
        return replace(known, problem=f"no attempt followed{f': {known.reason}' if known.reason else ''}")
    # Ranks may train on for a moment after their agent was killed.
    first = min(float(start["time"]) for start in begun)
    reached = max((row["step"] for row in rows if row["time"] <= first), default=0)
    new = next((row for row in rows if row["time"] > first and row["step"] > reached), None)
    if new is None:
        return replace(known, problem=f"no step after {reached} followed")
    start = max((start for start in begun if start["time"] < new["time"]), key=lambda start: start["attempt"])
    attempt = next(attempt for attempt in attempts if attempt.number == start["attempt"])
    restored = [event for event in attempt.named("restored") if is_whole(event.get("step"))]
    before = [event for event in events if event["time"] >= since and event["attempt"] < attempt.number]
    # The event that ends each stretch; none where nothing tells it.
    ends = (
        [event for event in before if event["event"] in _NOTICED][:1],
        [event for event in before if event["event"] == "restarting"][-1:],
        [start],
        (restored or attempt.named("training_started"))[:1],
        [new],
    )
    # Where nothing tells what was restored it began with the first step.
    lost = max(0, reached - (restored[-1]["step"] if restored else 0))
    stretches = _stretches(since, ends)
    return replace(known, seconds=float(new["time"]) - since, stretches=stretches, lost_steps=lost)


def _is_of(event: Record, fault: PlannedFault) -> bool:
    return (
        event["event"] == "fault_injected"
        and event["attempt"] == fault.attempt
        and event.get("fault") == fault.fault.name
        and event.get("step") == fault.at_step
    )


def _why_not(fault: PlannedFault, attempts: Sequence[history.Attempt]) -> str:
    """Say why a fault never struck."""
    attempt = next((attempt for attempt in attempts if attempt.number == fault.attempt), None)
    if attempt is None:
        return f"there was no attempt {fault.attempt}"
    nodes, per_node = (attempt.starts[-1].get(key) for key in ("nodes", "ranks_per_node"))
    ranks = nodes * per_node if is_whole(nodes) and is_whole(per_node) else None
    if ranks is not None and fault.rank is not None and fault.rank >= ranks:
        return f"attempt {fault.attempt} had only {ranks} ranks"
    return f"attempt {fault.attempt} ended before step {fault.at_step}"


def _stretches(since: float, ends: Sequence[Sequence[Record]]) -> dict[str, float]:
    """Return the seconds of each stretch; one without an end takes none."""
    stretches = {}
    before = since
    for name, events in zip(STRETCHES, ends, strict=True):
        end = max([before, *(float(event["time"]) for event in events)])
        stretches[name] = end - before
        before = end
    return stretches


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
        return {
            "of": pair.of,
            "runs": {"undisturbed": str(pair.undisturbed.path), "faults": str(pair.with_faults.path)},
            "faults": [recovery.to_json() for recovery in self.recoveries],
            "checks": [check.to_json() for check in self.checks],
            "passed": self.is_passed,
        }


def judged(pair: RehearsalPair) -> Judgement:
    """Judge a rehearsal whose two runs are over. Reads every byte of the newest checkpoint.

    Raises ConfigError where a run's configuration cannot be read.
    """
    run = pair.with_faults
    faults = planned_faults(read_config(run.config).recovery.inject)
    followed = recoveries(faults, read_events(run), list(read_json_lines(run.metrics)))
    return Judgement(pair, tuple(followed), tuple(checks(run, pair.undisturbed)))
