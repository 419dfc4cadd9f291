"""`orchestra run -m`, and `orchestra resume SWEEP` of such a sweep: its members train on this machine."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestra.cli.run.sweep_text import (
    left_alone,
    member_rows,
    result_facts,
    results_table,
    tell_carried_over,
    tell_trials,
)
from orchestra.cli.text import describe
from orchestra.cli.text.figures import number_of
from orchestra.config.machine import this_machine
from orchestra.errors import EXIT_DONE, ConfigError, OrchestraError
from orchestra.report.run_state import read_state
from orchestra.report.unwatched import unwatched
from orchestra.run.paths import Sweep, SweepDir, read_sweep
from orchestra.run.record import overrides_in_force
from orchestra.run.run_folders import remember
from orchestra.submit import wait as waiting
from orchestra.submit.claims import exclusively
from orchestra.submit.submission import parent_of_sweep, planned_members
from orchestra.submit.sweeps.members import ExistingSweep, counted
from orchestra.submit.sweeps.members_here import at_once, output_of, train_members
from orchestra.submit.sweeps.submit_sweep import (
    carry_out,
    resume_action,
    runs_of,
    runs_to_train,
    submit_action,
)
from orchestra.submit.sweeps.sweeper import names_sweeper, run_sweeper

if TYPE_CHECKING:
    from orchestra.config.compose import Composed
    from orchestra.run.paths import RunDir
    from orchestra.submit.hand_over import SweepLedger
    from orchestra.submit.submission import Submission
    from orchestra.submit.sweeps.submit_sweep import SweepAction
    from orchestra.submit.wait import RunResult


class _SweepEndedError(OrchestraError):
    """A signal ended a batch of a sweeper's trials."""

    def __init__(self, code: int) -> None:
        super().__init__("the sweep was ended; the same command again goes on with it")
        self.exit_code = code


def run_sweep(arguments: Namespace) -> int:
    """Train the members that overrides give; return the code of the worst end.

    Raises ConfigError before anything exists.
    """
    from orchestra.config.sweep import compose_members

    overrides = arguments.overrides
    situation = this_machine(starts=not arguments.dry_run)
    if names_sweeper(overrides):
        return _run_sweeper(arguments)
    members = compose_members(overrides, situation)
    submission = planned_members(members, overrides, sys.argv)
    if arguments.dry_run:
        return _print_plan(submit_action(submission, None, time.time(), force=arguments.force), arguments)
    action, ledger = _made(submission, is_forced=arguments.force)
    code = _train(action, ledger, arguments)
    return _tell_results(ledger, code, arguments)


def _made(submission: Submission, *, is_forced: bool) -> tuple[SweepAction, SweepLedger]:
    parent = parent_of_sweep(submission.members)
    with exclusively(parent, submission.signature):
        action = submit_action(submission, None, time.time(), force=is_forced)
        ledger, _ = carry_out(action, sys.argv)
    remember(parent)
    return action, ledger


def resume_sweep_here(arguments: Namespace, sweep: SweepDir) -> int:
    """Train what is missing or failed of a sweep here; return the code of the worst end of all members.

    Overrides change the members that train. Raises ConfigError before anything is started.
    """
    existing = ExistingSweep(sweep, read_sweep(sweep))
    action = resume_action(existing, None, arguments.overrides, accepts_jump=arguments.accept_jump)
    if arguments.dry_run:
        return _print_plan(action, arguments)
    ledger, _ = carry_out(action, sys.argv)
    if arguments.overrides and not runs_to_train(action, ledger):
        sys.stderr.write(
            f"note: {' '.join(arguments.overrides)} changes nothing: no member of {sweep.name} is to be "
            f"trained; `orchestra resume {sweep.name}/000 …` goes on with one that is finished\n"
        )
    code = _train(action, ledger, arguments)
    return _tell_results(ledger, code, arguments)


def _train(action: SweepAction, ledger: SweepLedger, arguments: Namespace) -> int | None:
    """Train what is to be trained; return the exit code where a signal ended it."""
    runs, members = runs_to_train(action, ledger), ledger.record.members
    places = ((member, member.run(ledger.sweep)) for member in members)
    chosen = {run.path: " ".join(overrides_in_force(run, member)) for member, run in places}
    stream = sys.stderr if arguments.json else sys.stdout
    number = at_once(runs)

    def say(text: str) -> None:
        print(text, file=stream, flush=True)

    def begun(run: RunDir) -> None:
        say(f"\n{ledger.sweep.name}/{run.name}  {chosen[run.path]}")

    def ended(run: RunDir) -> None:
        state = read_state(run, time.time())
        cause = f" ({state.cause})" if state.cause and state.code != EXIT_DONE else ""
        say(f"{ledger.sweep.name}/{run.name}  {chosen[run.path]}: {state.state}{cause}")

    order = "one after another" if number <= 1 else f"{number} at a time"
    what = f"{len(runs)} to train, {order}" if runs else "nothing is missing"
    say(f"sweep   {ledger.sweep.name}: {number_of(len(members), 'member')}, {what}")
    if action.kept:
        what = "adopted" if action.is_new else "kept   "
        say(f"{what} {number_of(len(action.kept), 'member')} as they are: {counted(action.kept)}")
    alone = unwatched((kept.run, kept.state) for kept in action.kept)
    for line in describe.unwatched_lines(ledger.sweep, alone):
        say(line + ("; the others train beside it" if runs else ""))
    if number > 1:
        say(f"        what each prints: {describe.shown(output_of(ledger.sweep.member(0)))} and so on")
    return train_members(ledger.sweep, runs, is_shown=not arguments.json, begun=begun, ended=ended)


def _results(ledger: SweepLedger, metric: str) -> list[RunResult]:
    now = time.time()
    return [waiting.result_of(run, read_state(run, now), metric) for run in runs_of(ledger)]


def _tell_results(ledger: SweepLedger, code: int | None, arguments: Namespace) -> int:
    """Print how every member ended; return the given exit code, or that of the worst end."""
    results = _results(ledger, _metric(ledger))
    rows = [
        {**result_facts(result), "overrides": list(overrides_in_force(result.run, member))}
        for result, member in zip(results, ledger.record.members, strict=True)
    ]
    if arguments.json:
        identity = {"name": ledger.sweep.name, "path": str(ledger.sweep.path)}
        print(json.dumps({**identity, "results": rows}, indent=2))
    else:
        status, resume = (describe.invocation(verb, ledger.sweep) for verb in ("status", "resume"))
        is_done = all(result.is_done for result in results)
        print(f"\n{results_table(rows)}")
        tell_carried_over(results)
        print(f"next    `{status}`" + ("" if is_done else f", `{resume}`"))
    return waiting.exit_code(results) if code is None else code


def _metric(ledger: SweepLedger) -> str:
    from orchestra.run.config_file import read_config

    # It is the same in all of them, and somebody may have removed one.
    there = [run for run in runs_of(ledger) if run.config.exists()]
    return read_config((there or runs_of(ledger))[0].config).run.metric


def _print_plan(action: SweepAction, arguments: Namespace) -> int:
    record: Sweep | None = None if action.is_new else read_sweep(action.sweep)
    if action.new is not None:
        rows = member_rows(action, [member.record for member in action.new.submission.members])
        training = {row["index"] for row in rows if row["adopted"] is None}
    else:
        assert record is not None
        assert action.resume is not None
        rows = member_rows(action, record.members)
        training = {resumed.member.index for resumed in action.resume.members}
    if arguments.json:
        facts = {"name": action.sweep.name, "path": str(action.sweep.path), "is_new": action.is_new}
        print(json.dumps({**facts, "members": rows, "to_train": sorted(training)}, indent=2))
        return EXIT_DONE
    print(f"sweep   {action.sweep.name}: {number_of(len(rows), 'member')}, {len(training)} to train")
    for row in rows:
        what = "to train" if row["index"] in training else left_alone(row)
        print(f"{row['index']:03d}  {' '.join(row['overrides'])}  ({what})")
    return EXIT_DONE


def _run_sweeper(arguments: Namespace) -> int:
    """Let a sweeper choose, batch after batch; return 0 when all of its trials are done."""
    overrides: Sequence[str] = arguments.overrides
    if arguments.dry_run:
        raise ConfigError(
            "--dry-run: what a sweeper chooses depends on the results of the trials before; leave "
            "hydra/sweeper out to see the members of a plain sweep"
        )

    def train(members: list[Composed], name: str) -> list[RunResult]:
        submission = planned_members(members, overrides, sys.argv, name=name)
        action, ledger = _made(submission, is_forced=arguments.force)
        if (code := _train(action, ledger, arguments)) is not None:
            raise _SweepEndedError(code)
        return _results(ledger, members[0].config.run.metric)

    return tell_trials(run_sweeper(overrides, this_machine(starts=True), train), arguments)
