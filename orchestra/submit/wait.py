"""Waits until runs are over, shows how they get on, and returns how each ended, with its metric. Read-only.

A run is over when its own records say so; then Slurm's word counts, and only when it was asked twice: a job
may be on its way back into the queue. A question that fails decides nothing.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.slurm.queue import RUNNING, UNKNOWN, WAITING
from orchestra.errors import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_STOPPED,
    LaunchError,
)
from orchestra.recovery.history import last_attempt
from orchestra.report.run_state import RunState, name_of, read_state
from orchestra.report.scheduler import OPEN, elsewhere, with_scheduler
from orchestra.run.control import stop_requests
from orchestra.run.events import is_number, read_events
from orchestra.run.metrics_file import recent_rows
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.run.run_lineage import read_lineage

# Looks at the records: soon after something happened, rarely where nothing does.
_SHORTEST_S = 0.5
_LONGEST_S = 15.0
_SLOWER = 1.5
# A question to Slurm costs its controller more than a look costs a file server.
_ASK_S = 10.0
# Progress lines while nothing changes but a single run's step.
_SHOW_S = 60.0
_SHOW_SEVERAL_S = 600.0
# From the best end to the worst.
_SEVERITY = (EXIT_DONE, EXIT_STOPPED, EXIT_INTERRUPTED, EXIT_FAILED, EXIT_DO_NOT_RESTART)


@dataclass(frozen=True)
class RunResult:
    """How one run ended."""

    run: RunDir
    # As `orchestra status` calls it: finished, failed, stopped, died, cancelled …
    state: RunPhase
    # Of its verdict; 1 for a run that left none.
    code: int
    # A column of metrics.jsonl, and what the last row says; None where that is no number.
    metric: str
    value: float | None
    cause: str | None = None

    @property
    def is_done(self) -> bool:
        return self.code == EXIT_DONE


def wait_for(runs: Sequence[RunDir], metric: str) -> list[RunResult]:
    """Return how each run ended, in their order, once all are over; tell on stderr how they get on.

    Ctrl-C ends the waiting and leaves the jobs alone: it says so, and KeyboardInterrupt goes on (exit 130).
    """
    watch = _WaitedRuns(runs, metric)
    pause_s = _SHORTEST_S
    try:
        while not watch.look():
            pause_s = _SHORTEST_S if watch.has_changed else min(_LONGEST_S, pause_s * _SLOWER)
            time.sleep(pause_s)
    except KeyboardInterrupt:
        left = len(runs) - len(watch.ended)
        jobs = "its job goes on" if left == 1 else f"the jobs of {left} runs go on"
        _say(f"not waiting any longer: {jobs}; `orchestra status` shows them, `orchestra cancel` ends them")
        raise
    return [watch.ended[run] for run in runs]


def result_of(run: RunDir, state: RunState, metric: str) -> RunResult:
    """Return how a run ended that is in this state."""
    rows = recent_rows(run, read_lineage(run))
    value = rows[-1].get(metric) if rows else None
    # A member of a sweep here may be cancelled while it waits for its turn; others without a verdict failed.
    is_cancelled = state.state is RunPhase.not_started and stop_requests.requested_attempt(run) is not None
    without_verdict = EXIT_STOPPED if is_cancelled else EXIT_FAILED
    code = without_verdict if state.code is None else state.code
    number = float(value) if is_number(value) else None
    return RunResult(run, state.state, code, metric, number, state.cause)


def exit_code(results: Sequence[RunResult]) -> int:
    """Return 0 when all are done, else the code of the worst end: 93, 1 and unknown ones, 130, then 75."""

    def severity(code: int) -> int:
        return _SEVERITY.index(code if code in _SEVERITY else EXIT_FAILED)

    return max((result.code for result in results), key=severity, default=EXIT_DONE)


class _WaitedRuns:
    """What was seen of the runs so far; `look` looks once more."""

    def __init__(self, runs: Sequence[RunDir], metric: str) -> None:
        self.ended: dict[RunDir, RunResult] = {}
        # Whether the last look found anything new.
        self.has_changed = False
        self._runs = list(dict.fromkeys(runs))
        self._metric = metric
        self._states: dict[RunDir, str] = {}
        # Runs whose end Slurm confirmed once, with the word for it.
        self._doubtful: dict[RunDir, str] = {}
        self._asked_at: float | None = None
        self._show = _Lines(len(self._runs))
        self._silence = ""

    def look(self) -> bool:
        """Read what is new of the runs that go on; return whether all are over."""
        going = [run for run in self._runs if run not in self.ended]
        now = time.time()
        before, over_before = dict(self._states), len(self.ended)
        open_runs = []
        for run in going:
            state = read_state(run, now)
            if state.state is RunPhase.finished:
                # Nobody starts it again, and nobody has to confirm it.
                self._end(run, state)
            else:
                open_runs.append((run, state))
        is_time_to_ask = self._asked_at is None or time.monotonic() - self._asked_at >= _ASK_S
        if open_runs and is_time_to_ask:
            self._ask(open_runs)
        elif open_runs:
            self._states.update({run: state.state for run, state in open_runs if run not in self._states})
        self.has_changed = before != self._states or len(self.ended) != over_before
        last = open_runs[0][1] if open_runs else None
        self._show.states(Counter(self._states.values()), last, is_over=len(self.ended) == len(self._runs))
        return len(self.ended) == len(self._runs)

    def _ask(self, open_runs: Sequence[tuple[RunDir, RunState]]) -> None:
        runs, own = [run for run, _ in open_runs], [state for _, state in open_runs]
        states, problems = with_scheduler(runs, own)
        self._asked_at = time.monotonic()
        if problems and problems[0] != self._silence:
            _say(f"note: {problems[0]}; waiting on, by the runs' own records")
        self._silence = problems[0] if problems else ""
        for run, state in zip(runs, states, strict=True):
            self._states[run] = state.state
            self._weigh(run, state, is_answered=not problems)

    def _weigh(self, run: RunDir, state: RunState, *, is_answered: bool) -> None:
        is_alive = state.job_state in RUNNING or state.job_state in WAITING
        if state.state.goes_on or is_alive:
            self._doubtful.pop(run, None)
        elif is_answered and state.job_state != UNKNOWN:
            if self._doubtful.get(run) == state.state:
                self._end(run, state)
            self._doubtful[run] = state.state

    def _end(self, run: RunDir, state: RunState) -> None:
        result = result_of(run, state, self._metric)
        self.ended[run] = result
        self._states[run] = state.state
        self._show.end(result)


class _Lines:
    """Progress on stderr: one line for each end, one for a change of the whole, now and then a step."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._shown = ""
        self._shown_at = 0.0
        _say(f"waiting for {_runs(number)}; Ctrl-C ends the waiting, not the jobs")

    def end(self, result: RunResult) -> None:
        value = "none" if result.value is None else f"{result.value:.6g}"
        cause = f" ({result.cause})" if result.cause and not result.is_done else ""
        _say(f"{name_of(result.run)}: {result.state}{cause}, {result.metric} {value}")

    def states(self, counts: Counter[str], first: RunState | None, *, is_over: bool) -> None:
        """Show how many runs are in which state; of a single one how far it is."""
        words = ", ".join(f"{number} {state}" for state, number in sorted(counts.items()))
        now = time.monotonic()
        same_s = _SHOW_S if self._number == 1 else _SHOW_SEVERAL_S
        wait_s = same_s if words == self._shown else _ASK_S
        is_new = words != self._shown and not self._shown
        if is_over and self._number == 1:
            return
        if is_over or is_new or (first is not None and now - self._shown_at >= wait_s):
            self._shown, self._shown_at = words, now
            if self._number > 1:
                _say(f"{_runs(self._number)}: {words}")
            elif first is not None:
                (state,) = counts or ("waiting",)
                step = "" if first.step is None else f", step {first.step} of {first.steps}"
                _say(f"{first.name}: {state}{step}")


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# Runs that are to go on: a verdict says that an attempt is over, but its job may be queued again in the very
# next moment, and a job that was submitted meanwhile would be a second one. So its end is waited for.

# A job that ends takes KillWait at most, 30 s by default, and the nodes' epilog.
_WAIT_S = 60.0
_POLL_S = 3.0


def settled(runs: Sequence[RunDir], own: Sequence[RunState]) -> tuple[list[RunState], list[str]]:
    """Return the runs' states with Slurm's word, and why it could not be asked if it could not.

    `own` are the states as the runs' records tell them. Waits up to a minute, for all of them together, while
    jobs of attempts that ended are still being ended, and says so. Raises LaunchError where one of the runs
    is cancelled meanwhile.
    """
    states, problems = with_scheduler(runs, own)
    deadline = time.monotonic() + _WAIT_S
    ending = _being_ended(states)
    cancels = {index: _num_cancels(runs[index]) for index in ending}
    if ending and not problems:
        first, more = states[ending[0]], f" and {len(ending) - 1} more" if len(ending) > 1 else ""
        _say(
            f"waiting, for {_WAIT_S:g} s at most: Slurm still ends job {first.job}, which trained "
            f"{first.name}{more}"
        )
    while ending and not problems and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        unsettled = [runs[index] for index in ending]
        answers, problems = with_scheduler(unsettled, [read_state(run, time.time()) for run in unsettled])
        for index, state in zip(ending, answers, strict=True):
            states[index] = state
            if _num_cancels(runs[index]) != cancels[index]:
                raise LaunchError(f"{state.name} was cancelled meanwhile: nothing was submitted")
        ending = _being_ended(states)
    return states, problems


def _num_cancels(run: RunDir) -> int:
    """Return how often `orchestra cancel` asked the run's newest attempt to stop."""
    attempt = last_attempt(read_events(run, ("attempt_started",)))
    requests = [] if attempt is None else stop_requests.read_requests(run, attempt)
    return sum(request.reason == stop_requests.CANCEL for request in requests)


def _being_ended(states: Sequence[RunState]) -> list[int]:
    return [index for index, state in enumerate(states) if is_being_ended(state)]


def is_being_ended(state: RunState) -> bool:
    """Whether an attempt has its verdict, and its job is still on its nodes."""
    return state.state.ended_early and state.job_state in RUNNING


def unclear(state: RunState) -> str | None:
    """Return why nobody can say here whether a run is alive, and where to ask; None where it is known."""
    job = state.submitted
    if job is None or state.job_state != UNKNOWN or state.state not in OPEN:
        return None
    if state.asked_cluster is None and state.state in (RunPhase.running, RunPhase.restarting):
        # It is left alone anyway.
        return None
    if job.cluster is None:
        return f"{state.name}: Slurm was asked before it had the job; nothing was done, try again"
    what = elsewhere(job, state.asked_cluster) or f"Slurm does not say whether this is cluster {job.cluster}"
    return (
        f"{state.name}: {what}. Whether it lives can be told there alone (by its records: {state.state}). "
        f"Nothing was done; go on with it on a login node of cluster {job.cluster}. Where that cluster is no "
        f"more, remove its name from the last job in {RunDir(Path(state.path)).record}"
    )
