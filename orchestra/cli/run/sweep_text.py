"""`orchestra submit -m` and `orchestra resume SWEEP`: what is going to be submitted, and what became of it.

What is done with a sweep is decided in `orchestra.submit.sweeps`. The results that `--wait` prints, of single
runs too, come from `orchestra.submit.wait`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from orchestra.cli.run.outlook_text import outlook_lines
from orchestra.cli.text import describe, figures
from orchestra.cli.text.figures import number_of
from orchestra.config.machine import Situation
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError, LaunchError
from orchestra.report.carry_over import carried_over
from orchestra.report.run_state import name_of
from orchestra.run.paths import RunDir, SweepDir, read_sweep
from orchestra.run.record import overrides_in_force
from orchestra.run.run_folders import remember
from orchestra.sizes.units import first_few
from orchestra.submit import wait as waiting
from orchestra.submit.claims import exclusively
from orchestra.submit.site import ask, note
from orchestra.submit.sweeps.sweeper import names_sweeper, run_sweeper

if TYPE_CHECKING:
    from orchestra.config.compose import Composed
    from orchestra.run.paths import SweepMember
    from orchestra.submit.fair.outlook import Outlook
    from orchestra.submit.hand_over import SubmitOutcome, SweepLedger
    from orchestra.submit.site import Site
    from orchestra.submit.submission import Submission
    from orchestra.submit.sweeps.arrays import PlannedArray
    from orchestra.submit.sweeps.submit_sweep import SweepAction
    from orchestra.submit.sweeps.sweeper import Trial
    from orchestra.submit.wait import RunResult


@dataclass(frozen=True)
class Beforehand:
    """What is known of a sweep's jobs before they are submitted; None: nothing."""

    # When Slurm expects the first one to start.
    start: str | None = None
    outlook: Outlook | None = None

    def to_json(self) -> dict[str, Any]:
        return {"estimated_start": self.start, **({} if self.outlook is None else self.outlook.to_json())}

    def lines(self) -> list[str]:
        return [] if self.outlook is None else list(outlook_lines(self.outlook))


def _trial(trial: Trial) -> dict[str, Any]:
    row = {"overrides": list(trial.chosen), "state": "refused"}
    return row if trial.result is None else {**row, **result_facts(trial.result)}


def wait(runs: Sequence[RunDir], metric: str, *, as_json: bool) -> int:
    """Wait for runs, print how each ended, and return the code of the worst end."""
    results = waiting.wait_for(runs, metric)
    rows = [result_facts(result) for result in results]
    print(json.dumps({"results": rows}, indent=2) if as_json else results_table(rows))
    if not as_json:
        tell_carried_over(results)
    return waiting.exit_code(results)


def tell_carried_over(results: Sequence[RunResult]) -> None:
    """Print what the best member has found for larger models, where it can be carried over."""
    from orchestra.run.config_file import read_config

    known = [(result.value, result) for result in results if result.is_done and result.value is not None]
    if not known:
        return
    best = min(known, key=lambda pair: pair[0])[1]
    carried = carried_over(read_config(best.run.config))
    if carried is not None:
        lines = figures.wrapped(f"{carried} ({name_of(best.run)})", "carry   ", " " * 8, keeps_words=True)
        print("\n".join(lines))


def result_facts(result: RunResult) -> dict[str, Any]:
    identity = {"name": name_of(result.run), "path": str(result.run.path), "state": result.state}
    value = {"metric": result.metric, "value": result.value, "cause": result.cause}
    return {**identity, "code": result.code, **value}


def results_table(rows: Sequence[dict[str, Any]]) -> str:
    cells = [
        (row.get("name", "–"), row["state"], _value(row), " ".join(row.get("overrides", ()))) for row in rows
    ]
    return "\n".join(figures.columns(cells))


def _value(row: dict[str, Any]) -> str:
    if "metric" not in row:
        return ""
    return f"{row['metric']} {'none' if row['value'] is None else format(row['value'], '.6g')}"


def print_action(action: SweepAction, before: Beforehand, *, as_json: bool) -> None:
    """Print the scripts and the members that would be submitted."""
    scripts = [planned.script() for planned in action.arrays]
    arrays = {index: planned.array.number for planned in action.arrays for index in planned.array.members}
    if action.new is not None:
        members: Sequence[SweepMember] = [member.record for member in action.new.submission.members]
    else:
        members = read_sweep(action.sweep).members
    rows = [{**row, "array": arrays.get(row["index"])} for row in member_rows(action, members)]
    if as_json:
        plan = {
            "name": action.sweep.name,
            "path": str(action.sweep.path),
            "is_new": action.is_new,
            "members": rows,
            "arrays": [
                {"number": planned.array.number, "members": list(planned.array.members), "script": script}
                for planned, script in zip(action.arrays, scripts, strict=True)
            ],
            **before.to_json(),
        }
        print(json.dumps(plan, indent=2))
        return
    print("\n".join(scripts), end="")
    sys.stderr.write("".join(f"# {line}\n" for line in before.lines()))
    for row in rows:
        what = f"array {row['array']}" if row["array"] is not None else left_alone(row)
        note("  ".join(filter(None, (f"{row['index']:03d}", " ".join(row["overrides"]), f"({what})"))))
    newest: dict[int | None, str] = {}
    for planned in action.arrays:
        if awaited := newest.get(planned.lane, ", ".join(f"job {job}" for job in planned.after)):
            note(f"array {planned.array.number} begins when {awaited} is over (cluster.array_throttle)")
        if planned.lane is not None:
            newest[planned.lane] = f"array {planned.array.number}"
    if before.start is not None:
        note(f"Slurm would accept the jobs and expects to start the first one at {before.start}")


def member_rows(action: SweepAction, members: Iterable[SweepMember]) -> list[dict[str, Any]]:
    """Return the members for --json, with the values that they have or get now; those that are left as they
    are with their states.
    """
    states, resume = _kept_states(action), action.resume
    changes = {} if resume is None else {each.member.index: resume.overrides for each in resume.members}
    return [
        {
            "index": member.index,
            "overrides": list(
                overrides_in_force(member.run(action.sweep), member, changes.get(member.index, ()))
            ),
            "adopted": member.adopted,
            "state": states.get(member.index),
        }
        for member in members
    ]


def left_alone(row: Mapping[str, Any]) -> str:
    """Return why a member of `member_rows` gets no job or does not train here, and whose run it is."""
    if row["adopted"] is None:
        return f"{row['state']}, left alone"
    return f"{row['state']}, adopted: it is {name_of(RunDir(Path(row['adopted'])))}"


def _kept_states(action: SweepAction) -> dict[int, str]:
    if action.new is None:
        return {kept.member.index: kept.state.state for kept in action.kept}
    by_path = {str(kept.run.path): kept.state.state for kept in action.kept}
    return {
        member.index: by_path[member.adopted]
        for member in action.new.submission.members
        if member.adopted is not None
    }


def tell(
    action: SweepAction,
    ledger: SweepLedger,
    outcome: SubmitOutcome,
    before: Beforehand,
    *,
    as_json: bool,
    stream: TextIO | None = None,
) -> int:
    """Print what became of a sweep; return 0, or 1 where a limit kept members out."""
    if as_json:
        print(json.dumps(_facts(action, ledger, outcome, before)), file=stream)
    else:
        print("\n".join(_lines(action, ledger, outcome, before)), file=stream, flush=True)
    if outcome.limit is None:
        return EXIT_DONE
    with contextlib.suppress(OSError):
        sys.stderr.write(f"error: {limited(ledger, outcome)}\n")
    return EXIT_FAILED


def limited(ledger: SweepLedger, outcome: SubmitOutcome) -> str:
    """Return how many members a limit kept out, and what to do."""
    return (
        f"{outcome.num_refused} of {len(ledger.record.members)} members were not submitted, for a limit on "
        f"how many jobs there may be ({outcome.limit}); `orchestra resume {ledger.sweep.name}` submits them "
        f"once others have ended"
    )


def _facts(
    action: SweepAction, ledger: SweepLedger, outcome: SubmitOutcome, before: Beforehand
) -> dict[str, Any]:
    members = ledger.record.members
    paths = {member.index: str(ledger.record.run(ledger.sweep, member).path) for member in members}
    return {
        "name": ledger.sweep.name,
        "path": str(ledger.sweep.path),
        "is_new": action.is_new,
        "arrays": [
            {"id": array.id, "members": list(array.members), "nodes": nodes}
            for array, nodes in zip(outcome.accepted, _nodes(action, outcome), strict=True)
        ],
        "num_submitted": outcome.num_accepted,
        "num_not_submitted": outcome.num_refused,
        "limit": outcome.limit,
        **before.to_json(),
        "members": [{**row, "path": paths[row["index"]]} for row in member_rows(action, members)],
    }


def _nodes(action: SweepAction, outcome: SubmitOutcome) -> list[int | None]:
    """Return the nodes of each array's jobs, from its script."""
    from orchestra.submit.sweeps.arrays import num_nodes

    templates = {index: planned.template for planned in action.arrays for index in planned.array.members}
    return [num_nodes(templates[array.members[0]]) for array in outcome.accepted]


def _lines(
    action: SweepAction, ledger: SweepLedger, outcome: SubmitOutcome, before: Beforehand
) -> Iterator[str]:
    from orchestra.submit.sweeps.members import counted

    total = len(ledger.record.members)
    is_same = "" if action.is_new else ", submitted before"
    yield f"sweep   {ledger.sweep.name}: {number_of(total, 'member')}{is_same}"
    for array, nodes in zip(outcome.accepted, _nodes(action, outcome), strict=True):
        shared = f", which {number_of(len(array.packed), 'member')} share" if array.packed else ""
        jobs = f"{number_of(len(array.tasks), 'job')} of {number_of(nodes or 1, 'node')}"
        yield f"array   {array.id}: {jobs}{shared}"
    if action.kept and action.is_new:
        num_members = sum(member.adopted is not None for member in ledger.record.members)
        sweeps = sorted({kept.run.path.parent.name for kept in action.kept})
        yield (
            f"adopted {number_of(num_members, 'member')} from {first_few(sweeps)}: {counted(action.kept)} "
            f"(--force trains them again)"
        )
    elif action.kept:
        yield f"kept    {number_of(len(action.kept), 'member')} as they are: {counted(action.kept)}"
        for owner in sorted({kept.run.path.parent.name for kept in action.kept if kept.needs_job}):
            yield f"        `orchestra resume {owner}` goes on with its own members"
    if not outcome.accepted and outcome.limit is None:
        yield "nothing is missing: nothing was submitted"
    if outcome.accepted:
        yield from before.lines()
    if before.start is not None and outcome.accepted:
        yield f"starts  {before.start}, as Slurm expects of the first one"
    status, resume = (describe.invocation(verb, ledger.sweep) for verb in ("status", "resume"))
    yield f"next    `{status}`, `{resume}`"


def submit_sweep(arguments: Namespace) -> int:
    """Submit the members that overrides give as arrays, and return the exit code.

    1 where a limit kept some of them out. Raises ConfigError before anything exists, LaunchError when Slurm
    is silent.
    """
    from orchestra.config.sweep import compose_members
    from orchestra.submit.submission import plan_sweep, with_cluster
    from orchestra.submit.sweeps.submit_sweep import runs_of

    overrides = with_cluster(arguments.overrides)
    if names_sweeper(overrides):
        return _submit_sweeper(arguments, overrides)
    site, checks_memory = ask(is_dry=arguments.dry_run), not arguments.skip_memory_check
    members = compose_members(overrides, Situation("submit", cluster=site))
    submission = plan_sweep(members, overrides, site, sys.argv, checks_memory=checks_memory)
    if arguments.dry_run:
        action, before = _planned_action(submission, site, force=arguments.force)
        print_action(action, before, as_json=arguments.json)
        return EXIT_DONE
    action, before, ledger, outcome = _submitted(submission, site, force=arguments.force)
    remember(Path(members[0].config.run.dir))
    # With --wait the JSON on standard output is the results'.
    stream = sys.stderr if arguments.json and arguments.wait else sys.stdout
    code = tell(action, ledger, outcome, before, as_json=arguments.json, stream=stream)
    if arguments.wait and code == EXIT_DONE:
        return wait(runs_of(ledger), members[0].config.run.metric, as_json=arguments.json)
    return code


def _planned_action(submission: Submission, site: Site, *, force: bool) -> tuple[SweepAction, Beforehand]:
    """Return what is to be done about the sweep, and what is known of its jobs."""
    from orchestra.submit.fair.outlook import outlook
    from orchestra.submit.sweeps.submit_sweep import submit_action

    action = submit_action(submission, site, time.time(), force=force)
    start = _tested(action.arrays, site)
    cluster = submission.members[0].config.cluster
    return action, Beforehand(start, outlook(action.arrays, cluster, site) if action.arrays else None)


def _tested(arrays: Sequence[PlannedArray], site: Site) -> str | None:
    """Let Slurm judge each kind of job once; return when it expects the first one to start."""
    scripts = {planned.template: planned.script() for planned in reversed(arrays)}
    estimates = [site.tested(script) for script in reversed(scripts.values())]
    starts = [estimate.start for estimate in estimates if estimate is not None]
    return min(starts, default=None)


def _submitted(
    submission: Submission, site: Site, *, force: bool
) -> tuple[SweepAction, Beforehand, SweepLedger, SubmitOutcome]:
    """Submit what is missing of a sweep, while no other command does; see `_planned_action`."""
    from orchestra.submit.submission import parent_of_sweep
    from orchestra.submit.sweeps.submit_sweep import carry_out

    with exclusively(parent_of_sweep(submission.members), submission.signature):
        action, before = _planned_action(submission, site, force=force)
        return action, before, *carry_out(action, sys.argv)


def _submit_sweeper(arguments: Namespace, overrides: Sequence[str]) -> int:
    """Let a sweeper choose, batch after batch; return 0 when all of its trials are done."""
    from orchestra.submit.submission import plan_sweep
    from orchestra.submit.sweeps.submit_sweep import runs_of

    if arguments.dry_run:
        raise ConfigError(
            "--dry-run: what a sweeper chooses depends on the results of the trials before; leave "
            "hydra/sweeper out to see the jobs of a plain sweep"
        )
    site, checks_memory = ask(), not arguments.skip_memory_check
    site.require()

    def train_members(members: list[Composed], name: str) -> list[RunResult]:
        submission = plan_sweep(members, overrides, site, sys.argv, name=name, checks_memory=checks_memory)
        _, _, ledger, outcome = _submitted(submission, site, force=arguments.force)
        if outcome.limit is not None:
            raise LaunchError(limited(ledger, outcome))
        return waiting.wait_for(runs_of(ledger), members[0].config.run.metric)

    return tell_trials(run_sweeper(overrides, Situation("submit", cluster=site), train_members), arguments)


def tell_trials(trials: Sequence[Trial], arguments: Namespace) -> int:
    """Print a sweeper's trials; return 0 when all are done."""
    results = [trial.result for trial in trials if trial.result is not None]
    rows = [_trial(trial) for trial in trials]
    print(json.dumps({"trials": rows}, indent=2) if arguments.json else results_table(rows))
    return waiting.exit_code(results) if len(results) == len(trials) else EXIT_FAILED


def resume_sweep(arguments: Namespace, sweep: SweepDir) -> int:
    """Submit what is missing or failed of a sweep; return the exit code.

    Overrides change the members that are submitted. Raises ConfigError and LaunchError before anything is
    submitted.
    """
    from orchestra.submit.sweeps.members import ExistingSweep
    from orchestra.submit.sweeps.submit_sweep import carry_out, resume_action

    site = ask(is_dry=arguments.dry_run, folder=sweep.path.parent)
    site.require()
    existing = ExistingSweep(sweep, read_sweep(sweep))
    action = resume_action(
        existing,
        site,
        arguments.overrides,
        accepts_jump=arguments.accept_jump,
        checks_memory=not arguments.skip_memory_check,
    )
    if arguments.overrides and not action.arrays:
        note(
            f"{' '.join(arguments.overrides)} changes nothing: no member of {sweep.name} is to be submitted; "
            f"`orchestra resume {sweep.name}/000 …` goes on with one that is finished"
        )
    before = Beforehand(_tested(action.arrays, site))
    if arguments.dry_run:
        print_action(action, before, as_json=arguments.json)
        return EXIT_DONE
    ledger, outcome = carry_out(action, sys.argv)
    return tell(action, ledger, outcome, before, as_json=arguments.json)
