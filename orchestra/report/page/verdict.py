"""The sentence that a page begins with: how a run stands, the evidence, and what to do next. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from orchestra.errors import EXIT_DO_NOT_RESTART
from orchestra.recovery.accounting import Accounts
from orchestra.report.attempts import SlowRank
from orchestra.report.page.own_times import SlowOne
from orchestra.report.run_state import RunState
from orchestra.run.files import Record
from orchestra.run.record import RunPhase

# What is worth a word: a share of the wall time, and a speed beside the plan's.
_NOTABLE_SHARE = 0.02
_BELOW_PLAN = 0.9
_NAMED = 3
_KINDS = {
    "node_lost": "node loss",
    "agent_lost": "lost agent",
    "rank_failed": "failed rank",
    "hang": "hang",
    "loss": "roll-back",
    "replay": "broken device",
    "storage": "storage outage",
    "lost": "attempt that vanished",
    "refused": "refused start",
    "preempted": "preemption",
    "time_limit": "time limit",
}
_PLURALS = {"node loss": "node losses", "attempt that vanished": "attempts that vanished"}
# What takes time beside training, and what to look at where that is much.
_REMEDIES = {
    "queue_s": ("waiting in the queue", "see `orchestra status` for when the job is expected to start"),
    "restart_s": ("starting processes", "see the attempts below for what was started again and why"),
    "checkpoint_s": ("saves that the training waited for", "consider checkpoint.async_save, or rarer saves"),
    "evaluation_s": ("evaluations", "consider rarer ones (eval.every_steps), or shorter ones (eval.steps)"),
    "lost_s": ("steps that were trained again", "save more often: checkpoint.every_steps=auto weighs it"),
    "restore_s": ("reading checkpoints", "consider recovery.memory_copy_every_steps"),
    "idle_s": ("nobody going on with it", "`orchestra resume` goes on where it stopped"),
}


@dataclass(frozen=True)
class Facts:
    """What a verdict is made of."""

    state: RunState
    accounts: Accounts
    attempts: Sequence[Record]
    slow_now: Sequence[SlowRank]
    slow_ever: Sequence[SlowOne]
    tokens_per_s: float | None
    planned_tokens_per_s: float | None
    checkpoints: Sequence[Record]
    # What the gradient's noise says of the batch; None where it was not measured.
    batch: str | None = None


def verdict(facts: Facts) -> Record:
    """Return `sentence`, `tone` (good, warn, bad or none), `evidence` and `next`, which are sentences."""
    state = facts.state
    troubles = [*_incidents(facts.attempts), *_slow(facts), *_speed(facts), *_saves(facts), *_skipped(state)]
    evidence = [*troubles, *_time(facts.accounts), *([facts.batch] if facts.batch else [])]
    goodput = facts.accounts.goodput
    share = "" if goodput is None else f", {goodput:.1%} goodput".replace("%", " %")
    first = f"{_stand(state)}{share}"
    said = "; ".join(evidence[:2])
    return {
        "sentence": f"{first}{'; ' + said if said else ''}.",
        "tone": _tone(state, troubles),
        "evidence": evidence,
        "next": _next(facts),
    }


def _stand(state: RunState) -> str:
    """Return how far it has come and how it stands: "Finished 120 of 120 steps"."""
    if state.state is RunPhase.unreadable:
        return f"Its files cannot be read: {state.cause}"
    word = str(state.state)
    phase = word[0].upper() + word[1:]
    if state.step is None and not state.attempts:
        return f"{phase}: it never trained a step"
    planned = "an unknown number of" if state.steps is None else f"{state.steps:,}"
    steps = f"{state.step or 0:,} of {planned} steps"
    if state.state is RunPhase.finished:
        return f"{phase} {steps}"
    if state.state is RunPhase.running and state.step is not None and state.step == state.steps:
        # As wandb's copy has it, which is made before the run's agent has said its last word.
        return f"Trained {steps}, and is ending"
    cause = f": {state.cause}" if state.cause and state.state.ended_badly else ""
    return f"{phase} after {steps}{cause}"


def _incidents(attempts: Sequence[Record]) -> list[str]:
    failed = [row for row in attempts if row["is_failure"]]
    words = []
    for kind, count in Counter(row["kind"] for row in failed).items():
        of_kind = [row for row in failed if row["kind"] == kind]
        seconds = sum((row["down_s"] or 0.0) + (row["lost_s"] or 0.0) for row in of_kind)
        steps = sum(row["lost_steps"] or 0 for row in of_kind)
        name = _KINDS.get(kind, kind)
        named = f"{count} {name if count == 1 else _PLURALS.get(name, name + 's')}"
        again = f", {steps:,} step{'' if steps == 1 else 's'} trained again" if steps else ""
        planned = " (planned: recovery.inject)" if all(row.get("is_planned") for row in of_kind) else ""
        went_on = any(row["down_s"] is not None for row in of_kind)
        words.append(f"{named}{planned} {f'cost {_seconds(seconds)}{again}' if went_on else 'ended it'}")
    return words


def _slow(facts: Facts) -> list[str]:
    known = {each.rank for each in facts.slow_now}
    words = [f"rank {each.rank} on {each.host} is {_slower(each.ratio)} slow" for each in facts.slow_now]
    words += [
        f"rank {each.rank} on {each.host} was {_slower(each.ratio)} slower than the others"
        for each in facts.slow_ever
        if each.rank not in known
    ]
    more = [f"{len(words) - _NAMED} more ranks are slow"] if len(words) > _NAMED else []
    return [*words[:_NAMED], *more]


def _slower(ratio: float) -> str:
    return f"{100 * (ratio - 1):.0f} %"


def _speed(facts: Facts) -> list[str]:
    rate, planned = facts.tokens_per_s, facts.planned_tokens_per_s
    if rate is None or planned is None or rate >= _BELOW_PLAN * planned:
        return []
    return [f"{rate:,.0f} tokens/s are {rate / planned:.0%} of the plan's {planned:,.0f}".replace("%", " %")]


def _time(accounts: Accounts) -> list[str]:
    if accounts.wall_s <= 0:
        return []
    shares = {key: getattr(accounts, key) / accounts.wall_s for key in _REMEDIES}
    largest = max(shares, key=lambda key: shares[key])
    if shares[largest] < _NOTABLE_SHARE:
        return []
    part = f"{_seconds(getattr(accounts, largest))} ({100 * shares[largest]:.0f} %)"
    return [f"{part} went to {_REMEDIES[largest][0]}"]


def _saves(facts: Facts) -> list[str]:
    failed = sum(row["state"] == "failed" for row in facts.checkpoints)
    skipped = sum(row["state"] == "skipped" for row in facts.checkpoints)
    words = [f"{failed} checkpoint{'' if failed == 1 else 's'} could not be written"] if failed else []
    return words + (["saves were skipped: the one before was still being written"] if skipped else [])


def _skipped(state: RunState) -> list[str]:
    """Steps that were trained for nothing, in the whole run."""
    count = state.nonfinite_steps
    if not count:
        return []
    one = count == 1
    steps, were, their = ("step", "was", "its") if one else ("steps", "were", "their")
    return [f"{count:,} {steps} {were} skipped: {their} loss or gradient was not finite"]


def _tone(state: RunState, troubles: Sequence[str]) -> str:
    if state.state.ended_badly or state.state is RunPhase.unknown:
        return "bad"
    if not state.attempts:
        return "none"
    if state.state is RunPhase.finished or state.state.is_alive:
        return "warn" if troubles else "good"
    return "warn"


def _next(facts: Facts) -> list[str]:
    """Return what to do, the most urgent first; commands stand in backquotes."""
    state, words = facts.state, []
    if state.state.ended_badly or state.state is RunPhase.unknown:
        words.append(f"`orchestra why {state.name}` tells what ended it and how to go on")
    can_go_on = state.state.ended_early or state.state in (RunPhase.cancelled, RunPhase.died)
    if can_go_on and state.code != EXIT_DO_NOT_RESTART:
        words.append(f"`orchestra resume {state.name}` goes on{_from(state)}")
    if state.state.is_alive and state.step != state.steps:
        words.append(f"`orchestra logs {state.name} -f` follows it")
    hosts = [*(each.host for each in facts.slow_now), *(each.host for each in facts.slow_ever)]
    if hosts:
        words.append(f"look at {hosts[0]}: `orchestra doctor` there checks the machine")
    words += _about_time(facts.accounts)
    if not words:
        words.append(f"nothing: `orchestra eval {state.name}` measures its held-out loss")
    return words


def _from(state: RunState) -> str:
    return " from its first step" if state.checkpoint_step is None else f" from step {state.checkpoint_step}"


def _about_time(accounts: Accounts) -> list[str]:
    if accounts.wall_s <= 0:
        return []
    seconds = {key: getattr(accounts, key) for key in _REMEDIES}
    largest = max(seconds, key=lambda key: seconds[key])
    # What a run of a minute spends on its start says nothing.
    is_much = seconds[largest] / accounts.wall_s >= _NOTABLE_SHARE and accounts.wall_s > 600
    return [_REMEDIES[largest][1]] if is_much else []


def _seconds(seconds: float) -> str:
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
