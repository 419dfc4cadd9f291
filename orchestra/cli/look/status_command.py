"""`orchestra status [RUN…]`: runs and sweeps and how far they are, by their own records, then by Slurm.

Tables show what is alive and what is newest, on a terminal only what fits. It only reads, and asks Slurm once
for all.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import sys
import textwrap
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from orchestra.cli.text import figures
from orchestra.cli.text.describe import (
    attention_lines,
    failed_saves_words,
    invocation,
    note_unanswered,
    resume_line,
    skipped_words,
    spent_lines,
    spent_record,
    sweep_summary,
    unwatched_lines,
    used_lines,
)
from orchestra.cli.text.resolve import (
    TARGET_HELP,
    add_directory_option,
    all_targets,
    elsewhere,
    resolve_target,
)
from orchestra.errors import EXIT_DO_NOT_RESTART, EXIT_DONE, ConfigError
from orchestra.recovery.accounting import AttemptTimes, attempt_times
from orchestra.recovery.history import Attempt, newest_attempt
from orchestra.recovery.incidents import Verdict, node_verdict
from orchestra.recovery.time_slices import in_words, time_slices
from orchestra.report.attempts import RankProcess, rank_processes
from orchestra.report.run_state import MemberState, RunState, SweepState, by_phase, waits_for_storage
from orchestra.report.scheduler import read_states
from orchestra.report.spending import read_spending
from orchestra.report.unwatched import unwatched
from orchestra.run.config_file import read_config
from orchestra.run.events import read_events
from orchestra.run.files import Record
from orchestra.run.metrics_file import FollowedRows, eval_column, repeats_words
from orchestra.run.paths import RunDir
from orchestra.run.record import RunPhase
from orchestra.run.rollback import RollBack, roll_backs

_HEADER = ("RUN", "STATE", "STEP", "LOSS", "TOK/S", "MFU", "SAVED", "ATTEMPTS", "ETA", "AGE")
# Left out first where a terminal is too narrow.
_DROPPED = ("MFU", "ATTEMPTS", "SAVED", "TOK/S", "LOSS")
_MEMBER_HEADER = ("STATE", "STEP", "LOSS", "TOK/S", "SAVED", "ATTEMPTS", "ETA")
# Rows on a terminal.
_LIMIT = 20

# Nodes whose processes are named, and folders.
_HOSTS = 4

# By the decision that another attempt follows: on which nodes.
_NODES = {
    "replace": ", on other nodes where these failed",
    "shrink": ", on fewer nodes",
    "grow": ", on more nodes",
}
_EXPLAINED = """\
  orchestra status            runs and sweeps, newest first
  orchestra status first      one run: why it waits or ended, what to type next
  orchestra status a-sweep    the members of a sweep
  orchestra status a-sweep/3  one member

On a terminal long tables show what is alive and what is newest, and only columns that fit; --all shows all.
"""

Row = TypeVar("Row")


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "orchestra status [RUN…] [--all] [--json] [--dir DIR]"
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{TARGET_HELP} (default: all)")
    parser.add_argument("--all", action="store_true", help="show every row and every column")
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object per run or sweep")
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Print the states and return 0."""
    if arguments.runs:
        chosen = [resolve_target(text, arguments.dir) for text in arguments.runs]
    elif not (chosen := all_targets(arguments.dir)) and (chosen := elsewhere(arguments.dir)):
        folders = list(dict.fromkeys(str(target.path.parent) for target in chosen))
        more = f" and {len(folders) - _HOSTS} more folders" if folders[_HOSTS:] else ""
        where = f"{', '.join(folders[:_HOSTS])}{more}"
        print(f"note: no runs in {arguments.dir}; these lie in {where}", file=sys.stderr)
    states, problems = read_states(list(dict.fromkeys(chosen)), time.time())
    note_unanswered(problems)
    if arguments.json:
        print(json.dumps([_record(state, with_accounts=bool(arguments.runs)) for state in states], indent=2))
    else:
        print("\n".join(_page(states, arguments)))
    return EXIT_DONE


def _record(state: RunState | SweepState, *, with_accounts: bool) -> dict[str, object]:
    if isinstance(state, SweepState):
        return state.to_json()
    more: dict[str, object] = {}
    if with_accounts and state.state is not RunPhase.unreadable:
        run = RunDir(Path(state.path))
        events = read_events(run)
        processes = [dataclasses.asdict(each) for each in _processes(state, run, newest_attempt(events))]
        more = {"processes": processes} if processes else {}
        rows, now = FollowedRows(run.metrics).read(), time.time()
        more |= spent_record(run, events, rows, state.state, now)
        more["used"] = read_spending(run, events, rows, state.state, now).to_json()
    return {"kind": "run", **state.to_json(), **more}


def _page(states: Sequence[RunState | SweepState], arguments: Namespace) -> list[str]:
    is_short = sys.stdout.isatty() and not arguments.all
    width = shutil.get_terminal_size().columns if is_short else None
    if not states:
        return [f"no runs in {arguments.dir}; `orchestra run` makes one"]
    if not arguments.runs:
        return _of_all(states, width, _LIMIT)
    lines: list[str] = []
    runs = [state for state in states if isinstance(state, RunState)]
    if runs:
        lines += _of_all(runs, width, limit=None)
    if len(runs) == 1:
        lines += _of_run(runs[0])
    else:
        stopped = [state for state in runs if state.state is RunPhase.stopped]
        lines += [resume_line(RunDir(Path(state.path)), state.checkpoint_step) for state in stopped]
    for state in states:
        if isinstance(state, SweepState):
            lines += ([""] if lines else []) + _of_sweep(state, width)
    return lines


def _of_run(state: RunState) -> list[str]:
    """Return what a run's row does not say: lines of a word and a text, the command to type next last."""
    run, now = RunDir(Path(state.path)), time.time()
    events = read_events(run) if state.state is not RunPhase.unreadable else []
    attempt = newest_attempt(events)
    of_attempt = () if attempt is None else attempt.events
    hosts = sorted({str(event["host"]) for event in of_attempt if "host" in event and "node" in event})
    never_saved = "nothing yet" if state.attempts else ""
    facts = {
        "reason": _reason(state, None if attempt is None else node_verdict(attempt)),
        "restart": _restart(state, now),
        "skipped": skipped_words(state.nonfinite_steps),
        "data": _data(state, events),
        "train": figures.named_losses(state.train),
        "eval": figures.named_losses(state.eval),
        "job": _job(state),
        # Where Slurm names the nodes they stand with the job.
        "nodes": ", ".join(hosts) if state.state is RunPhase.running and not state.job_nodes else "",
        "pids": _pids(_processes(state, run, attempt)),
        "saved": never_saved if state.checkpoint_step is None else _where_saved(state),
        "waits": (attempt and state.state is RunPhase.running and waits_for_storage(attempt)) or "",
        "unsaved": "" if state.failed_saves is None else failed_saves_words(state.failed_saves),
        "starts": _starts(attempt_times(events, ())),
        "slices": in_words(time_slices(events)),
        "back": _back(roll_backs(events)),
    }
    rows = FollowedRows(run.metrics).read() if events else []
    spent = spent_lines(run, events, rows, state.state, now) if events else []
    lines = [f"{word:<7} {text}" for word, text in facts.items() if text]
    used = used_lines(read_spending(run, events, rows, state.state, now)) if state.attempts else []
    return [*lines, *attention_lines(events), *spent, *used, *_next(state, run)]


def _processes(state: RunState, run: RunDir, attempt: Attempt | None) -> list[RankProcess]:
    return rank_processes(run, attempt.number) if attempt and state.state is RunPhase.running else []


def _pids(processes: Sequence[RankProcess]) -> str:
    """Return the processes of the ranks, in their order, by host."""
    by_host: dict[str, list[str]] = {}
    for each in processes:
        by_host.setdefault(each.host, []).append(str(each.pid))
    hosts = [f"{' '.join(pids)} on {host}" for host, pids in by_host.items()]
    return "; ".join(
        [*hosts[:_HOSTS], *([f"{len(hosts) - _HOSTS} more nodes: --json"] if hosts[_HOSTS:] else [])]
    )


def _reason(state: RunState, verdict: Verdict | None) -> str:
    if state.cause is None or state.state is RunPhase.finished:
        return ""
    message = verdict.message if verdict is not None and verdict.cause == state.cause else ""
    first_line = message.partition("\n")[0]
    return f"{state.cause}: {first_line}" if first_line else state.cause


def _starts(attempts: Sequence[AttemptTimes]) -> str:
    """Return how often the run began again by itself, and how often somebody went on with it."""
    if len(attempts) < 2:
        return ""
    resumes = sum(now.is_resume(before) for before, now in itertools.pairwise(attempts))
    restarts = len(attempts) - 1 - resumes
    kinds = {"restart": restarts, "resume": resumes}
    words = ", ".join(figures.number_of(count, kind) for kind, count in kinds.items() if count)
    return f"{len(attempts)} attempts: {words}"


def _data(state: RunState, events: Sequence[Record]) -> str:
    """Return which epoch a run is in that goes through its data more than once."""
    told = [words for each in events if each["event"] == "data_repeats" and (words := repeats_words(each))]
    if state.epoch is None or not told:
        return ""
    return f"epoch {state.epoch:.2f}; it {told[-1]}"


def _restart(state: RunState, now: float) -> str:
    if state.state is not RunPhase.restarting or state.restart is None:
        return ""
    left = state.restart.due - now
    when = "now" if left < 1 else f"in {figures.duration(left)}"
    return f"{when}{_NODES.get(state.restart.decision, '')}"


def _job(state: RunState) -> str:
    if state.job is None:
        return ""
    if state.job_state in (None, "UNKNOWN"):
        return f"{state.job}, which Slurm on this machine says nothing about"
    where = f" on {state.job_nodes}" if state.job_nodes else ""
    if not state.state.is_alive or state.job_start is None:
        return f"{state.job}, {state.job_state}{where}"
    start = state.job_start.replace("T", " ")
    when = f", expected to start {start}" if state.state.is_before_start else f" since {start}"
    return f"{state.job}, {state.job_state}{where}{when}"


def _back(turns: Sequence[RollBack]) -> str:
    if not turns:
        return ""
    steps = [f"{turn.data_steps[0]} to {turn.data_steps[1]}" for turn in turns if turn.data_steps is not None]
    left_out = f": the data of steps {', '.join(steps)} is left out" if steps else ""
    return f"{figures.number_of(len(turns), 'roll-back')}{left_out}"


def _next(state: RunState, run: RunDir) -> list[str]:
    if state.state.is_alive:
        eta = f"; {figures.duration(state.eta_s)} left" if state.eta_s is not None else ""
        return [f"next    `{invocation('logs', run)} -f`{eta}"]
    asks_why = state.state.ended_badly or state.state is RunPhase.unknown
    lines = [f"next    `{invocation('why', run)}`"] if asks_why else []
    cannot_go_on = state.state in (RunPhase.finished, RunPhase.unknown, RunPhase.unreadable)
    if cannot_go_on or state.code == EXIT_DO_NOT_RESTART:
        return lines
    return [*lines, resume_line(run, state.checkpoint_step)]


def _of_all(states: Sequence[RunState | SweepState], width: int | None, limit: int | None) -> list[str]:
    """Return the table of runs and sweeps, in their order.

    `width` is the terminal's, None: no terminal, so that every row and every column is shown.
    """
    chosen = shortened(states, None if width is None else limit, _is_alive)
    rows = [
        (state.sweep.name, state.problem or sweep_summary(state))
        if isinstance(state, SweepState)
        else (state.name, *_cells(state, _HEADER[1:]))
        for state in chosen
    ]
    lines = figures.fitting_table(_HEADER, rows, width, _DROPPED).splitlines()
    kept = {id(state) for state in chosen}
    rest = [state for state in states if id(state) not in kept]
    if rest:
        runs = figures.counts(by_phase(state for state in rest if isinstance(state, RunState)))
        sweeps = sum(isinstance(state, SweepState) for state in rest)
        kinds = ", ".join(filter(None, (runs, figures.number_of(sweeps, "sweep") if sweeps else "")))
        last = f"and {len(rest)} more ({kinds}): orchestra status --all"
        lines += [last] if width is None else textwrap.wrap(last, width)
    return lines


def shortened(rows: Sequence[Row], limit: int | None, is_wanted: Callable[[Row], bool]) -> list[Row]:
    """Return at most `limit` of the rows, in their order: those that are wanted, then the first ones."""
    indices = range(len(rows))
    # A stable order: what is wanted first.
    by_interest = sorted(indices, key=lambda index: not is_wanted(rows[index]))
    return [rows[index] for index in sorted(by_interest[:limit])]


def _is_alive(state: RunState | SweepState) -> bool:
    phases = state.counts if isinstance(state, SweepState) else [state.state]
    return any(phase.is_alive for phase in phases)


def _cells(state: RunState, titles: Sequence[str]) -> tuple[str, ...]:
    cells = {
        "STATE": state.state,
        "STEP": f"{state.step or 0}/{'?' if state.steps is None else state.steps}",
        "LOSS": figures.loss(state.loss),
        "TOK/S": figures.quantity(state.tokens_per_s),
        "MFU": figures.percent(state.mfu),
        "SAVED": _saved(state),
        "ATTEMPTS": str(state.attempts),
        "ETA": figures.duration(state.eta_s),
        "AGE": figures.age(state.age_s),
    }
    return tuple(cells[title] for title in titles)


def _saved(state: RunState) -> str:
    step = "-" if state.checkpoint_step is None else str(state.checkpoint_step)
    return step if state.failed_saves is None else f"{step} ({state.failed_saves.count} failed)"


def _where_saved(state: RunState) -> str:
    place = "" if state.checkpoint_fallback is None else f" in {state.checkpoint_fallback}"
    return f"step {state.checkpoint_step}{place}"


def _of_sweep(state: SweepState, width: int | None) -> list[str]:
    """Return a sweep's counts, the table of its members, the best of them, and what to type next."""
    if state.problem is not None:
        return [f"{state.sweep.name}: {state.problem}"]
    # In the order in which they were typed.
    typed = (override.partition("=")[0] for each in state.members for override in each.member.overrides)
    keys = list(dict.fromkeys(typed))
    header = ("MEMBER", *_short(keys), *_MEMBER_HEADER)
    limit = None if width is None else 2 * _LIMIT
    chosen = shortened(state.members, limit, lambda member: member.state.state is not RunPhase.finished)
    rows = [
        (f"{each.member.index:03d}", *_values(each, keys), *_cells(each.state, _MEMBER_HEADER))
        for each in chosen
    ]
    table = figures.fitting_table(header, rows, width, ("ATTEMPTS", "SAVED", "TOK/S"))
    lines = [f"{state.sweep.name}: {sweep_summary(state)}", *table.splitlines()]
    if left := len(state.members) - len(chosen):
        lines.append(f"and {left} more: {invocation('status', state.sweep)} --all")
    lines += _best(state)
    alone = unwatched((each.run, each.state) for each in state.members)
    lines += unwatched_lines(state.sweep, alone)
    if any(phase.ended_badly for phase in state.counts):
        lines.append(f"next    `{invocation('why', state.sweep)}`")
    # What goes on only when somebody resumes it.
    if any(phase.ended_badly or phase.ended_early or phase is RunPhase.cancelled for phase in state.counts):
        lines.append(f"resume  `{invocation('resume', state.sweep)}` runs what is missing or failed")
    return lines


def _short(keys: Sequence[str]) -> list[str]:
    """Return the last part of each key, the whole key where two would be the same."""
    last = [key.rpartition(".")[2].lstrip("+") for key in keys]
    taken = {title.lower() for title in _MEMBER_HEADER}
    return [
        key if last.count(tail) > 1 or tail in taken else tail for key, tail in zip(keys, last, strict=True)
    ]


def _values(member: MemberState, keys: Sequence[str]) -> list[str]:
    pairs = (override.partition("=") for override in member.member.overrides)
    values = {key: value for key, _, value in pairs}
    return [values.get(key, "-") for key in keys]


def _best(state: SweepState) -> list[str]:
    """Name the finished member with the lowest last loss, where there are several to compare: on held-out
    data where the members go by that (run.metric), else in training.
    """
    finished = [each for each in state.members if each.state.state is RunPhase.finished]
    source = _source_to_compare(finished)
    of_members = [
        (each.state.loss if source is None else each.state.eval.get(source), each) for each in finished
    ]
    losses = [(loss, each) for loss, each in of_members if loss is not None]
    if len(losses) < 2:
        return []
    loss, best = min(losses, key=lambda pair: pair[0])
    word = "loss" if source is None else eval_column(source)
    return [f"lowest  {best.state.name} ({' '.join(best.member.overrides)}): {word} {figures.loss(loss)}"]


def _source_to_compare(finished: Sequence[MemberState]) -> str | None:
    """Return the held-out source whose loss the members' run.metric is; None where it is none."""
    evaluated = [each.state for each in finished if each.state.eval]
    if not evaluated:
        return None
    try:
        metric = read_config(RunDir(Path(evaluated[0].path)).config).run.metric
    except ConfigError:
        return None
    return next((name for name in evaluated[0].eval if eval_column(name) == metric), None)
