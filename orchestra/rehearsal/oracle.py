"""Whether a run that was hurt ended as if nothing had happened: compared with one to which nothing did.

Its files alone are read, and its newest checkpoint byte for byte. What failed and how it came back is
`recoveries`' part.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.errors import CheckpointError
from checkpointing.format.manifest import Manifest
from checkpointing.shelf.catalog import committed_steps, read_manifest
from checkpointing.shelf.verify import verify
from checkpointing.storage import Storage, open_storage
from orchestra.data.ledger import read_ledger
from orchestra.events import read_events
from orchestra.frozen import read_config
from orchestra.jsonl import Record, read_json_lines
from orchestra.metrics_file import read_metrics
from orchestra.recovery.accounting import account
from orchestra.report.verdict import last_attempt, node_verdict, of_attempt
from orchestra.rundir import RunDir

# Of the wall time.
_ACCOUNTS_MAY_DIFFER = 0.01
_MAX_THREADS = 8
_MOST_TOLD = 3


@dataclass(frozen=True)
class Check:
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


def checks(hurt: RunDir, whole: RunDir) -> list[Check]:
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


def _finished(run: RunDir, claim: str) -> Check:
    events = read_events(run)
    attempt = last_attempt(events)
    verdict = None if attempt is None else node_verdict(of_attempt(events, attempt))
    advice = f"`orchestra why {run.path}` tells what ended it"
    if verdict is None:
        return Check(claim, False, "it never ended by itself", advice)
    if verdict.state != "finished":
        decided = [it.get("reason") for it in events if it["event"] == "restarting"]
        why = f"; the policy's last word: {decided[-1]}" if decided else ""
        return Check(claim, False, f"{verdict.state}: {verdict.message or verdict.cause}{why}", advice)
    return Check(claim, True, f"attempts: {len({it['attempt'] for it in events if _is_start(it)})}")


def _is_start(event: Record) -> bool:
    return bool(event["event"] == "attempt_started")


def _no_step_missing(run: RunDir) -> Check:
    wanted = range(1, read_config(run.config).train.steps + 1)
    got = [row["step"] for row in read_metrics(run)]
    missing = sorted(set(wanted) - set(got))
    advice = "a step that nobody logged may never have been trained; keep the run and report it"
    if missing:
        return Check("no step is missing", False, f"of {len(wanted)} steps: {_listed(missing)}", advice)
    return Check("no step is missing", True, f"{len(wanted)} steps")


def _same_samples(run: RunDir, whole: RunDir) -> Check:
    claim = "each sample was trained exactly once"
    ours, theirs = read_ledger(run), read_ledger(whole)
    unlike = [step for step in sorted(ours.keys() | theirs.keys()) if _ids(ours, step) != _ids(theirs, step)]
    if unlike:
        said = f"steps with other samples than the undisturbed run's: {_listed(unlike)}"
        return Check(claim, False, said, "data.path may have changed meanwhile; else report it")
    return Check(claim, True, f"{sum(map(len, ours.values())):,} samples, as in the undisturbed run")


def _ids(ledger: dict[int, list[int]], step: int) -> list[int]:
    return sorted(ledger.get(step, []))


def _same_state(run: RunDir, whole: RunDir) -> list[Check]:
    """Compare the last states, and read the newest checkpoint's bytes."""
    same, intact = "the final state is the undisturbed run's, bit for bit", "the newest checkpoint is intact"
    try:
        storage, manifest = _newest(run)
        _, expected = _newest(whole)
        report = verify(storage, manifest.step, min(_MAX_THREADS, len(os.sched_getaffinity(0))))
    except CheckpointError as error:
        return [Check(intact, False, str(error), "see checkpoint.dir and `orchestra doctor`")]
    found = [_compared(same, run, whole, manifest, expected)]
    damages = "; ".join(map(str, report.damages[:_MOST_TOLD]))
    advice = "the storage loses or changes bytes; `orchestra checkpoint verify` names them"
    said = damages or f"step {report.step}, {report.num_bytes:,} bytes read"
    return [*found, Check(intact, report.is_intact, said, advice)]


def _newest(run: RunDir) -> tuple[Storage, Manifest]:
    storage = open_storage(read_config(run.config).checkpoint.dir or run.checkpoints)
    steps = committed_steps(storage)
    if not steps:
        raise CheckpointError(f"{run.name} has no checkpoint in {storage.place}")
    return storage, read_manifest(storage, steps[-1])


def _compared(claim: str, run: RunDir, whole: RunDir, ours: Manifest, theirs: Manifest) -> Check:
    layouts = _layouts(run) | _layouts(whole)
    if len(layouts) > 1:
        said = "the layout changed with the number of nodes: sums are added up in another order"
        return Check(claim, None, said)
    if (ours.step, ours.state_digest) == (theirs.step, theirs.state_digest):
        return Check(claim, True, f"step {ours.step}, digest {ours.state_digest[:16]}")
    said = f"step {ours.step}: {ours.state_digest[:16]}, step {theirs.step}: {theirs.state_digest[:16]}"
    advice = (
        "where the undisturbed run itself does not repeat bit for bit (kernels that are not deterministic, "
        "train.micro_batch_size=auto), this says nothing about recovery: rehearse again and compare the two "
        "undisturbed runs"
    )
    return Check(claim, False, said, advice)


def _layouts(run: RunDir) -> set[str]:
    keys = ("nodes", "ranks_per_node", "layout", "micro_batch_size", "accumulation")
    starts = [it for it in read_events(run) if _is_start(it)]
    return {json.dumps({key: it.get(key) for key in keys}, sort_keys=True) for it in starts}


def _published_in_order(run: RunDir) -> Check:
    claim = "no attempt saved anything behind the start of a newer one"
    events = read_events(run)
    began = {it["attempt"]: it["time"] for it in events if it["event"] == "restored"}
    late = [
        it.get("step")
        for it in events
        if it["event"] == "checkpoint_committed"
        and any(number > it["attempt"] and time < it["time"] for number, time in began.items())
    ]
    if late:
        return Check(claim, False, f"steps {_listed(late)}", "report it, with the run's events/")
    return Check(claim, True, f"{sum(it['event'] == 'checkpoint_committed' for it in events)} checkpoints")


def _accounts_sum(run: RunDir) -> Check:
    claim = "the accounts sum to the wall time within 1 %"
    events = read_events(run)
    begins = [it["time"] for it in events if it["event"] in ("submitted", "attempt_started")]
    ends = [it["time"] for it in events if it["event"] in ("finished", "node_ended")]
    wall_s = max(ends) - min(begins)
    booked = account(events, read_json_lines(run.metrics))
    said = f"{booked.wall_s:.1f} s booked of {wall_s:.1f} s"
    if abs(booked.wall_s - wall_s) > _ACCOUNTS_MAY_DIFFER * wall_s:
        return Check(claim, False, said, "the hosts' clocks may differ: see `orchestra doctor`")
    return Check(claim, True, said)


def _listed(numbers: Sequence[Any]) -> str:
    more = f" and {len(numbers) - _MOST_TOLD} more" if len(numbers) > _MOST_TOLD else ""
    return ", ".join(map(str, numbers[:_MOST_TOLD])) + more
