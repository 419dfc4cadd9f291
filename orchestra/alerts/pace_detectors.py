"""Detectors of a run that stands still, grows slow, falls silent, or ended badly. Pure; see `observed`."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from orchestra.alerts.observed import Finding, Limits, NodeBeat, ObservedRun
from orchestra.recovery.accounting import attempt_times
from orchestra.recovery.hangs import least_advanced, positions_in
from orchestra.report.attempts import slow_ranks
from orchestra.run.events import is_number
from orchestra.run.files import Record
from orchestra.run.heartbeat import Phase
from orchestra.run.record import RunPhase
from orchestra.sizes.topology import batch_ramp
from orchestra.sizes.units import first_few

# Rows whose median is compared, the rows before that it is compared with, and the first rows of an attempt,
# which compile and warm caches.
_NEWEST, _BEFORE, _FEWEST, _WARM = 5, 100, 20, 3
_FEWEST_WAITS = 5
_NAMED = 4
# Phases in which a rank is within a step; the others have their own, longer limits.
_IN_A_STEP = tuple(phase.name for phase in Phase if Phase.step <= phase < Phase.save)
# An evaluation is a record; the first one, like the first save, takes nobody knows how long.
_BETWEEN_STEPS = tuple(phase.name for phase in Phase if phase >= Phase.record)


def stall(run: ObservedRun, limits: Limits) -> Sequence[Finding]:
    """Fire where the next row of metrics is overdue, or steps take twice as long as they did."""
    attempt = run.training
    if attempt is None:
        return []
    rows = run.own_rows
    waits = [later["time"] - earlier["time"] for earlier, later in itertools.pairwise(rows[-_BEFORE:])]
    if len(waits) < _FEWEST_WAITS:
        return [run.cannot_see("stall", f"{len(rows)} of {_FEWEST_WAITS + 1} rows in this attempt so far")]
    usual_s, last = statistics.median(waits) * _growth(run, rows[-_BEFORE:]), rows[-1]
    # By the clock of rank 0's node or by the file server's, whichever is later: they may differ.
    late_s = run.now - max(last["time"], run.rows_heard)
    # After the last step come a save and the end of what the run holds.
    is_last = run.config is not None and last["step"] >= run.config.train.steps
    if is_last or _is_between_steps(run, attempt.num_nodes, limits):
        return _slow_steps(run, rows, limits)
    if late_s > max(limits.stall_factor * usual_s, limits.stall_floor_s) + _pauses_s(run):
        where = _phases(run.nodes)
        evidence = (
            f"step {last['step']} was its last row {late_s:.0f} s ago; rows came every {usual_s:.3g} s"
            f"{f'; {where}' if where else ''}"
        )
        advice = f"{run.command('logs')} shows its last words; its agents end a rank that hangs"
        return [run.alert("stall", evidence, last["time"], advice)]
    return _slow_steps(run, rows, limits)


def _growth(run: ObservedRun, rows: Sequence[Record]) -> float:
    """Return how many times the smallest global batch of some rows the next step's is."""
    if run.config is None or not run.config.train.batch_ramp:
        return 1.0
    ramp = batch_ramp(run.config.train)
    return ramp.at(run.rows[-1]["step"] + 1).global_batch_size / ramp.at(rows[0]["step"]).global_batch_size


def _is_between_steps(run: ObservedRun, num_nodes: int, limits: Limits) -> bool:
    """Whether all nodes are heard of, and all their ranks evaluate, save or end, which has its own limits."""
    return len(run.nodes) >= num_nodes and all(
        run.now - node.heard <= limits.heartbeat_s and node.phases and set(node.phases) <= set(_BETWEEN_STEPS)
        for node in run.nodes
    )


def _pauses_s(run: ObservedRun) -> float:
    """Return for how long saves and evaluations may hold up a row, by the longest so far."""
    saves = [event.get("blocked_s") for event in run.events if event["event"] == "checkpoint_started"]
    evaluations = [event.get("seconds") for event in run.events if event["event"] == "evaluated"]
    longest = [max(filter(is_number, seconds), default=0.0) for seconds in (saves, evaluations)]
    return 2 * sum(longest)


def _slow_steps(run: ObservedRun, rows: Sequence[Record], limits: Limits) -> Sequence[Finding]:
    timed = [row for row in rows[_WARM:] if is_number(row.get("step_time_s"))]
    before, newest = timed[:-_NEWEST][-_BEFORE:], timed[-_NEWEST:]
    if len(before) < _FEWEST:
        return []
    usual_s = statistics.median(row["step_time_s"] for row in before) * _growth(run, before)
    now_s = statistics.median(row["step_time_s"] for row in newest)
    if now_s <= limits.stall_factor * usual_s:
        return []
    evidence = f"a step takes {now_s:.3g} s, where {usual_s:.3g} s were usual{_why_slow(run, before, newest)}"
    advice = f"{run.command('profile')} traces some steps; {run.command('status')} names slow ranks"
    return [run.alert("stall", evidence, newest[0]["time"], advice, "slow_steps")]


def throughput(run: ObservedRun, limits: Limits) -> Sequence[Finding]:
    """Fire where tokens/s fall below the run's own earlier ones on as many ranks, or below its plan's."""
    attempt = run.training
    if attempt is None:
        return []
    timed = [row for row in run.own_rows[_WARM:] if is_number(row.get("tokens_per_s"))]
    if len(timed) < 2 * _NEWEST:
        return [run.cannot_see("throughput", f"{len(timed)} of {2 * _NEWEST} rows with a speed so far")]
    newest = timed[-2 * _NEWEST :]
    speed = statistics.median(row["tokens_per_s"] for row in newest)
    findings: list[Finding] = []
    before = [row for row in _comparable_rows(run) if row["step"] < newest[0]["step"]][-10 * _BEFORE :]
    if len(before) >= _FEWEST:
        usual = statistics.median(row["tokens_per_s"] for row in before)
        if speed < limits.own_speed * usual:
            evidence = (
                f"{speed:,.0f} tokens/s, {speed / usual:.0%} of the {usual:,.0f} that were usual"
                f"{_why_slow(run, before, newest)}"
            )
            since = _below_since(timed, limits.own_speed * usual)
            findings.append(run.alert("throughput", evidence, since, _advice_on_speed(run), "own"))
    planned = run.planned_tokens_per_s
    if planned is None:
        findings.append(run.cannot_see("throughput", f"no plan to compare with: {run.no_plan}"))
    elif speed < limits.planned_speed * planned:
        evidence = f"{speed:,.0f} tokens/s, {speed / planned:.0%} of the {planned:,.0f} of its plan"
        since = _below_since(timed, limits.planned_speed * planned)
        findings.append(run.alert("throughput", evidence, since, _advice_on_speed(run), "plan"))
    return findings


def _comparable_rows(run: ObservedRun) -> list[Record]:
    """Return the rows with a speed of all attempts on as many ranks as the newest, the first of each left
    out.
    """
    sizes = {
        event["attempt"]: event.get("world_size")
        for event in run.events
        if event["event"] == "training_started"
    }
    attempt = run.attempt
    alike = [number for number, size in sizes.items() if attempt and size == sizes.get(attempt.number)]
    rows = []
    for number in alike:
        own = [row for row in run.rows if row.get("attempt") == number]
        rows += [row for row in own[_WARM:] if is_number(row.get("tokens_per_s"))]
    return rows


def _below_since(rows: Sequence[Record], limit: float) -> float:
    """Return when the speed fell below a limit for good: single rows above it do not count."""
    since = rows[-1]["time"]
    for index in range(len(rows) - _NEWEST, -1, -1):
        if statistics.median(row["tokens_per_s"] for row in rows[index : index + _NEWEST]) >= limit:
            break
        since = rows[index]["time"]
    return float(since)


def _advice_on_speed(run: ObservedRun) -> str:
    return (
        f"{run.command('profile')} shows where a step's time goes; {run.command('status')} names slow ranks"
    )


def _why_slow(run: ObservedRun, before: Sequence[Record], newest: Sequence[Record]) -> str:
    """Return what of it the records explain: waits for data, ranks that were found slow."""
    shares = [
        statistics.median(
            row["data_time_s"] / row["step_time_s"]
            for row in rows
            if is_number(row.get("data_time_s")) and is_number(row.get("step_time_s")) and row["step_time_s"]
        )
        if any(is_number(row.get("data_time_s")) and row.get("step_time_s") for row in rows)
        else 0.0
        for rows in (before, newest)
    ]
    words = f"; it waits for data in {shares[1]:.0%} of a step" if shares[1] > shares[0] + 0.1 else ""
    if slow := slow_ranks(run.events):
        words += f"; rank {slow[0].rank} on {slow[0].host} is {slow[0].ratio:.2g} × slower than the others"
    return words


def silence(run: ObservedRun, limits: Limits) -> Sequence[Finding]:
    """Fire where a node's agent or a rank is not heard of any more."""
    attempt = run.attempt
    if run.state is RunPhase.unknown:
        evidence = "its leader is on another host, and none of its files has changed for ten minutes"
        since = _last_sign_of_life(run)
        return [run.alert("silence", evidence, since, f"{run.command('why')} and `squeue` tell more", "all")]
    if run.state is not RunPhase.running or attempt is None or attempt.verdict is not None:
        return []
    if not run.nodes:
        if run.now - attempt.start["time"] < limits.heartbeat_s:
            return []
        return [run.cannot_see("silence", f"no node wrote a heartbeat of attempt {attempt.number}")]
    findings: list[Finding] = []
    if len(run.nodes) < attempt.num_nodes and run.now - attempt.start["time"] > limits.heartbeat_s:
        words = f"{len(run.nodes)} of {attempt.num_nodes} nodes have written heartbeats"
        findings.append(run.cannot_see("silence", words))
    for node in run.nodes:
        age_s = run.now - node.heard
        if age_s > limits.heartbeat_s:
            evidence = f"the agent of node {node.node} on {node.host} was heard of {age_s:.0f} s ago"
            advice = f"see whether {node.host} answers; {run.command('status')} says whether it was replaced"
            findings.append(run.alert("silence", evidence, node.heard, advice, f"node-{node.node}"))
    return [*findings, *_silent_ranks(run, limits)]


def _last_sign_of_life(run: ObservedRun) -> float:
    """Return when the run itself last wrote something; what commands say about it, as alerts, is none."""
    ends = [attempt.end for attempt in attempt_times(run.events, run.rows)[-1:]]
    ends += [event["time"] for event in run.events if event["event"] == "start_failed"]
    submitted = [event["time"] for event in run.events if event["event"] == "submitted"]
    return max(ends or submitted, default=run.now)


def _silent_ranks(run: ObservedRun, limits: Limits) -> Sequence[Finding]:
    """Fire where a rank is silent in a step for longer than steps take; name it where the nodes could."""
    times = [row["step_time_s"] for row in run.own_rows[_WARM:] if is_number(row.get("step_time_s"))]
    usual_s = 10 * statistics.median(times) if times else 0.0
    limit_s = max(limits.stall_floor_s, usual_s) + _pauses_s(run)
    silent = [
        node
        for node in run.nodes
        if node.longest_silence_s > limit_s and node.phases and set(node.phases) <= set(_IN_A_STEP)
    ]
    if not silent:
        return []
    last_row = max((row["time"] for row in run.own_rows), default=0.0)
    stalls = [event for event in run.events if event["event"] == "step_stalled" and event["time"] >= last_row]
    newest = {event.get("node"): positions_in(event) for event in stalls}
    behind = least_advanced([position for positions in newest.values() for position in positions])
    worst = max(silent, key=lambda node: node.longest_silence_s)
    who = f"on {worst.host} {_phases([worst])}"
    if behind:
        ranks = first_few([str(position.rank) for position in behind], _NAMED)
        who = f"the others wait for rank {ranks} on {behind[0].host}, {behind[0].where()}"
    evidence = f"a rank is silent for {worst.longest_silence_s:.0f} s, where {limit_s:.0f} s are much; {who}"
    since = worst.heard - worst.longest_silence_s
    advice = "its agent ends it by recovery.heartbeat_timeout_s; until then `py-spy dump` shows what it does"
    return [run.alert("silence", evidence, since, advice, "rank")]


def _phases(nodes: Sequence[NodeBeat]) -> str:
    """Return which ranks are in which phase, by what their nodes wrote last."""
    ranks: dict[str, list[int]] = {}
    for node in nodes:
        for phase, members in node.phases.items():
            ranks.setdefault(phase, []).extend(members)
    words = [
        f"{phase} {first_few([str(rank) for rank in sorted(members)], _NAMED)}"
        for phase, members in ranks.items()
    ]
    return f"ranks in {', '.join(words)}" if words else ""


def slow_rank(run: ObservedRun, _limits: Limits) -> Sequence[Finding]:
    """Fire for each rank that the run itself found slower than the others."""
    attempt = run.training
    if attempt is None:
        return []
    if run.config is not None and run.config.recovery.straggler_every_steps is None:
        return [run.cannot_see("slow_rank", "recovery.straggler_every_steps=null: nobody times the ranks")]
    findings, ep = [], 1 if run.config is None else run.config.parallelism.ep
    for slow in slow_ranks(run.events)[:_NAMED]:
        found = [
            event["time"] for event in attempt.named("straggler_found") if event.get("rank") == slow.rank
        ]
        evidence = f"rank {slow.rank} on {slow.host} needs {slow.ratio:.2f} × the others' time"
        advice = f"look at {slow.host} (clocks, temperature, other jobs): the whole run has its pace"
        if ep > 1:
            advice = (
                f"see moe/rank_load first: with parallelism.ep={ep} a rank whose experts get more tokens "
                f"needs longer on a healthy host; where it is near 1, {advice}"
            )
        findings.append(run.alert("slow_rank", evidence, found[-1], advice, str(slow.rank)))
    return findings


def ended_badly(run: ObservedRun, _limits: Limits) -> Sequence[Finding]:
    """Fire where a run failed or died, or was never submitted."""
    if run.state is RunPhase.unreadable:
        return [run.cannot_see("ended_badly", run.cause or "its files may not be read")]
    if not run.state.ended_badly:
        return []
    since = _last_sign_of_life(run)
    evidence = f"{run.state}{f': {run.cause}' if run.cause else ''}"
    advice = f"{run.command('why')} tells what ended it, {run.command('resume')} goes on with it"
    return [run.alert("ended_badly", evidence, since, advice)]
