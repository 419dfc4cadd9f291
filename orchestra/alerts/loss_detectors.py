"""Detectors of a loss that leaps or slowly rises. Pure; see `orchestra.alerts.observed`."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

from orchestra.alerts.observed import Finding, Limits, ObservedRun
from orchestra.run.events import is_number, is_whole
from orchestra.run.files import Record
from orchestra.run.run_lineage import lineage_of
from orchestra.sizes.units import first_few

# The standard deviation of a normal distribution over its median absolute deviation, and the least spread
# of a loss: those of orchestra.train.watch.bad_losses, which judges each step on the device.
_NORMAL, _LEAST_SPREAD = 1.4826, 0.01
# Rows that are judged, and those before each that it is judged by.
_JUDGED, _WINDOW, _FEWEST = 100, 50, 20
_NAMED = 3
# Rows over which a trend is looked for, cut into about twenty windows of ten to a hundred rows.
_TREND_ROWS, _NUM_WINDOWS, _SHORTEST, _LONGEST = 2_000, 20, 10, 100
# A median of n values from a normal distribution scatters by 1.25 σ/√n (asymptotically √(π/2)); the lowest
# of twenty windows lies about two of these below their mean, and three more are room.
_MEDIAN_SCATTER, _ROOM = 1.2533, 5.0
# Of the lowest loss: what rises less is not worth a word.
_LEAST_RISE = 0.01


def loss_spikes(run: ObservedRun, limits: Limits) -> Sequence[Finding]:
    """Fire where several of the last rows have a loss far above those before, one has a loss that is not
    finite, or several steps were skipped meanwhile: then a gradient can be all that was not.
    """
    if run.training is None:
        return []
    if len(run.rows) < _FEWEST:
        return [run.cannot_see("loss_spikes", f"{len(run.rows)} of {_FEWEST} rows so far")]
    judged = run.rows[-_JUDGED:]
    first = len(run.rows) - len(judged)
    spikes = [
        (row, usual)
        for index, row in enumerate(judged, first)
        if (usual := _usual_where_it_leaps(run.rows, index, limits.spike_factor)) is not None
    ]
    not_finite = [row for row in judged if not is_number(row.get("loss"))]
    # The run judges every step, the rows only those that are logged.
    told = [event for event in run.events if event["event"] == "loss_spike"]
    # What a roll-back made void counts no more, as its rows do not.
    line = lineage_of(run.events)
    told = [
        event
        for event in told
        if is_whole(event.get("step"))
        and event["step"] >= judged[0]["step"]
        and line.is_on_line(event["step"], event["attempt"])
    ]
    skipped = _newly_skipped(run.rows[max(0, first - 1) :])
    are_many = bool(skipped) and skipped[-1][1] >= limits.spikes
    if len(spikes) < limits.spikes and not not_finite and not told and not are_many:
        return []
    steps = [f"step {row['step']} ({row['loss']:.4g} where {usual:.4g} was usual)" for row, usual in spikes]
    steps += [f"step {row['step']} (not finite)" for row in not_finite]
    steps += [f"step {event.get('step')} ({event.get('loss')}, seen by the run)" for event in told]
    times = [*(row["time"] for row, _ in spikes), *(row["time"] for row in not_finite)]
    times += [event["time"] for event in told]
    evidence = [f"the loss leapt in the last {len(judged)} rows: {first_few(steps, _NAMED)}"] if steps else []
    if are_many:
        times.append(skipped[0][0])
        evidence.append(
            f"{skipped[-1][1]} steps were skipped up to step {judged[-1]['step']}: "
            "their loss or gradient was not finite"
        )
    advice = (
        "recovery.loss_spike.action=skip leaves such steps out and roll_back goes back before them "
        f"({run.command('resume')} recovery.loss_spike.action=roll_back); a lower optim.lr makes them rarer"
    )
    return [run.alert("loss_spikes", "; ".join(evidence), min(times), advice)]


def _newly_skipped(rows: Sequence[Record]) -> list[tuple[float, int]]:
    """Return when steps were found skipped since the first of some rows, and how many by then."""
    counts = [(row["time"], row["nonfinite_steps"]) for row in rows if is_whole(row.get("nonfinite_steps"))]
    return [(time, count - counts[0][1]) for time, count in counts if count > counts[0][1]]


def _usual_where_it_leaps(rows: Sequence[Record], index: int, factor: float) -> float | None:
    """Return the usual loss where that of a row is a spike; None where it is none, or nobody can say."""
    before = [row["loss"] for row in rows[max(0, index - _WINDOW) : index] if is_number(row.get("loss"))]
    loss = rows[index].get("loss")
    if len(before) < _FEWEST or not is_number(loss):
        return None
    median = statistics.median(before)
    spread = _NORMAL * statistics.median(abs(each - median) for each in before)
    return median if loss > median + factor * max(spread, _LEAST_SPREAD * abs(median)) else None


def divergence(run: ObservedRun, _limits: Limits) -> Sequence[Finding]:
    """Fire where the loss, smoothed, has left its lowest level and keeps rising through three windows."""
    if run.training is None:
        return []
    rows = [row for row in run.rows[-_TREND_ROWS:] if is_number(row.get("loss"))]
    size = min(_LONGEST, max(_SHORTEST, len(rows) // _NUM_WINDOWS))
    if len(rows) < 6 * size:
        return [run.cannot_see("divergence", f"{len(rows)} of {6 * size} rows with a loss so far")]
    # Whole windows, the last of which ends with the last row.
    begins = range(len(rows) % size, len(rows), size)
    windows = [rows[begin : begin + size] for begin in begins]
    levels = [statistics.median(row["loss"] for row in window) for window in windows]
    best = min(range(len(levels)), key=levels.__getitem__)
    changes = [abs(later["loss"] - earlier["loss"]) for earlier, later in itertools.pairwise(rows)]
    scatter = _NORMAL * statistics.median(changes) / math.sqrt(2)
    room = max(_ROOM * _MEDIAN_SCATTER * scatter / math.sqrt(size), _LEAST_RISE * abs(levels[best]))
    last = levels[-3:]
    if best >= len(levels) - 3 or last != sorted(last) or last[0] <= levels[best] + room:
        return []
    # The last window that was as low as the lowest: the rise begins after it.
    lowest = max(index for index, level in enumerate(levels) if level <= levels[best] + room)
    low, high = windows[lowest], windows[-1]
    norms = [
        statistics.median(values)
        if (values := [row["grad_norm"] for row in window if is_number(row.get("grad_norm"))])
        else None
        for window in (low, high)
    ]
    evidence = (
        f"the loss rises: median {levels[lowest]:.4g} in steps {low[0]['step']} to {low[-1]['step']}, "
        f"{levels[-1]:.4g} in steps {high[0]['step']} to {high[-1]['step']}"
    )
    if norms[0] is not None and norms[1] is not None:
        evidence += f"; gradient norm {norms[0]:.3g}, then {norms[1]:.3g}"
    saved = [
        event["step"]
        for event in run.events
        if event["event"] == "checkpoint_committed" and event.get("step", math.inf) <= low[-1]["step"]
    ]
    back = f"the checkpoint of step {max(saved)} is from before the rise; " if saved else ""
    advice = (
        f"{back}a lower optim.lr or a longer warm-up; a change in the data from step {low[-1]['step']} on?"
    )
    return [run.alert("divergence", evidence, float(low[-1]["time"]), advice)]
