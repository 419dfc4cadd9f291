"""`orchestra rehearse RUN`: a short copy of a run twice, once undisturbed and once with faults, compared.

What a run does when a rank dies, hangs, or a node goes away is thus seen on one's own cluster, before weeks
of training rest on it. The run itself is only read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from orchestra.cli.hydra_options import add_config_dir, with_presets
from orchestra.cli.run.resume_command import goes_to_cluster
from orchestra.cli.run.run_command import add_output_options, search_path
from orchestra.cli.text import figures
from orchestra.cli.text.describe import invocation, shown, typed_name
from orchestra.cli.text.figures import number_of
from orchestra.cli.text.resolve import add_directory_option, resolve
from orchestra.config.machine import Situation, by_itself, signature, this_machine
from orchestra.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, OrchestraError
from orchestra.rehearsal.judge import STRETCHES, Judgement, Recovery, RehearsalCheck, judged
from orchestra.rehearsal.prepare_rehearsal import (
    Rehearsal,
    RehearsalPair,
    asked_fault,
    planned_rehearsal,
    read_pair,
    rehearsed_config,
    why_no_node_goes_down,
    write_pair,
)
from orchestra.run.config_file import plain_values, read_config
from orchestra.run.metrics_file import recent_rows
from orchestra.run.paths import RunDir
from orchestra.run.planned_faults import NODE_DOWN_VARIABLE
from orchestra.run.run_lineage import read_lineage
from orchestra.submit import wait
from orchestra.submit.hand_over import RunLedger, submit
from orchestra.submit.network_bench import with_measured_network
from orchestra.submit.new_run import RunRequest, planned_run, prepare
from orchestra.submit.site import ask, note
from orchestra.submit.submission import submission_of
from orchestra.submit.sweeps.arrays import placed_run

if TYPE_CHECKING:
    from conf.schema import Config
    from orchestra.run.planned_faults import PlannedFault
    from orchestra.submit.sweeps.arrays import PlacedSubmission

# Lines about a run that does nothing but train.
_SHOW_S = 10.0
_WORDS = {True: "passed", False: "FAILED", None: "open"}


class Follower:
    """Says on stderr what becomes of a run in the foreground."""

    def __init__(self, run: RunDir, steps: int) -> None:
        self._run = run
        self._steps = steps
        self._said_at = time.monotonic()
        self.say("starts")

    def say(self, words: str) -> None:
        """Say something that happened to it."""
        print(f"{self._run.name}: {words}", file=sys.stderr, flush=True)

    def tick(self, _attempt: int, _stops: int) -> None:
        """Say now and then how far it is; called about ten times a second."""
        if time.monotonic() - self._said_at >= _SHOW_S:
            self._said_at = time.monotonic()
            rows = recent_rows(self._run, read_lineage(self._run))
            self.say(f"step {rows[-1]['step']} of {self._steps}" if rows else "starts its ranks")


def plan_lines(plan: Rehearsal) -> list[str]:
    """Return what is about to happen, a line for each fault."""
    cluster, course = plan.with_faults.cluster, plan.schedule
    nodes, ranks = number_of(cluster.nodes, "node"), number_of(int(cluster.gpus_per_node), "rank")
    spares = f", {cluster.spare_nodes} spare" if cluster.spare_nodes else ""
    length = f"{course.steps} steps, a checkpoint every {course.every_steps}"
    return [
        f"rehearsal of {plan.of}: {nodes} × {ranks}{spares}, {length}",
        f"  {plan.undisturbed.run.name}: no faults",
        f"  {plan.with_faults.run.name}:",
        *(f"    step {fault.at_step}: {fault.fault.name} at rank {fault.rank}" for fault in course.faults),
    ]


def judgement_lines(judgement: Judgement) -> list[str]:
    """Return the tables, the claims, and what to do."""
    pair = judgement.pair
    lines = [*_tables(judgement.recoveries), "", *(_claim(check) for check in judgement.checks), ""]
    if judgement.is_passed:
        lines.append(f"{pair.of} comes back from what was rehearsed")
    else:
        lines.append("what to do")
        advice = [
            *(
                _about(recovery, pair.with_faults)
                for recovery in judgement.recoveries
                if not recovery.is_passed
            ),
            *(check.advice for check in judgement.checks if check.is_true is False),
            f"`{invocation('why', pair.with_faults)}` tells what happened to it, attempt by attempt",
        ]
        for words in dict.fromkeys(filter(None, advice)):
            lines += figures.wrapped(words, "  ", "  ", keeps_words=True)
    return [*lines, f"remove  rm -r {shown(pair.undisturbed.path)} {shown(pair.with_faults.path)}"]


def _tables(recoveries: Sequence[Recovery]) -> list[str]:
    head = ("fault", "where", "answer", "rule", "new step", "lost steps", "verdict")
    spent = [
        (_named(recovery.fault), *(_seconds(recovery.stretches.get(name)) for name in STRETCHES))
        for recovery in recoveries
    ]
    lines = figures.columns([head, *(_row(recovery) for recovery in recoveries)])
    return [*lines, "", *figures.table(("seconds until", *STRETCHES), spent).splitlines()]


def _row(recovery: Recovery) -> tuple[str, ...]:
    return (
        _named(recovery.fault),
        f"rank {recovery.fault.rank}" + (f" on {recovery.host}" if recovery.host else ""),
        recovery.decision or "",
        recovery.rule or "",
        "" if recovery.seconds is None else f"{recovery.seconds:.1f} s",
        "" if recovery.lost_steps is None else str(recovery.lost_steps),
        _WORDS[recovery.is_passed] + (f": {recovery.problem}" if recovery.problem else ""),
    )


def _named(fault: PlannedFault) -> str:
    return f"{fault.fault.name}@{fault.at_step}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _claim(check: RehearsalCheck) -> str:
    return f"{_WORDS[check.is_true]:<7} {check.claim}: {check.found}"


def _about(recovery: Recovery, hurt: RunDir) -> str:
    """Return what to do about a fault from which the run did not recover as it must."""
    name = _named(recovery.fault)
    if recovery.host is None:
        return f"{name}: {recovery.problem}; choose another step or rank with --fault"
    if recovery.decision in ("give_up", "end"):
        return (
            f"{name}: the policy gave up by the rule {recovery.rule} ({recovery.reason}); "
            f"see recovery.max_restarts, recovery.min_nodes, cluster.spare_nodes and cluster.requeue"
        )
    log = shown(hurt.attempt_logs((recovery.fault.attempt or 0) + 1))
    return f"{name}: {recovery.problem}; the next attempt's logs are in {log}"


_EXPLAINED = """\
  orchestra rehearse first    what the layout allows, one fault after another
  orchestra rehearse first --dry-run
                              what would happen to it, and the batch script
  orchestra rehearse first --fault sigkill@12:0 --fault exit@30 --steps 50
  orchestra rehearse first cluster.time_limit=30 cluster.partition=test
  orchestra rehearse rehearsal-first-1-faults
                              wait for one that was interrupted, and judge it

KIND is sigkill, sigstop, exit, segfault, exception, oom, hang, gil, agent_kill or node_down (the last two on
a cluster only). Without @STEP the step is chosen, without :RANK the rank. node_down kills every process of
the job on that node; a command in ORCHESTRA_NODE_DOWN takes the node down instead.

Two new runs are made beside RUN: same model, layout, cluster, limits and storage, a few steps, a checkpoint
every few, deterministic, Weights & Biases off. They save the full state: mind the space. On a cluster both
are submitted at once (with ORCHESTRA_NODE_DOWN one after the other), and Ctrl-C leaves them alone. Exit code
0: all passed; 1: something did not.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = (
        "orchestra rehearse RUN [overrides] [--fault KIND[@STEP[:RANK]]]\n"
        "                          [--steps N] [--dry-run] [--json]\n"
        "                          [--config-dir DIR] [--dir DIR]"
    )
    parser.add_argument("run", metavar="RUN", help="name, unique start of one, or path")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="overrides", help="KEY=VALUE or GROUP=NAME"
    )
    parser.add_argument(
        "--fault", action="append", default=[], metavar="KIND[@STEP[:RANK]]", help="repeatable"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="length of each run; default: as needed")
    add_output_options(parser)
    add_config_dir(parser)
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Rehearse, print what was seen, and return 0 where everything passed, else 1.

    Raises ConfigError before anything is started, LaunchError when Slurm is silent.
    """
    target = resolve(arguments.run, arguments.dir)
    arguments.overrides = with_presets(arguments)
    if (pair := read_pair(target)) is not None:
        if arguments.overrides or arguments.fault or arguments.steps is not None or arguments.dry_run:
            raise ConfigError(
                f"{pair.with_faults.name} is itself a rehearsal, which is waited for and judged; leave the "
                f"options out, or name {pair.of} to rehearse again"
            )
        return _wait_and_judge(pair, as_json=arguments.json)
    if goes_to_cluster(target, arguments.overrides):
        return _on_cluster(target, arguments)
    return _here(target, arguments)


def _plan(target: RunDir, config: Config, arguments: Namespace, situation: Situation) -> Rehearsal:
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: expected 1 or more")
    asked = [asked_fault(text) for text in arguments.fault]
    if not asked and (why := why_no_node_goes_down(config)) is not None:
        note(f"the loss of a node is not rehearsed: {why}")
    return planned_rehearsal(target, config, asked, arguments.steps, situation)


def _requests(plan: Rehearsal, arguments: Namespace) -> list[RunRequest]:
    """Return the undisturbed run and the one that faults are injected into, in the order they are started."""
    return [
        RunRequest(config, signature(config), arguments.overrides, sys.argv)
        for config in (plan.undisturbed, plan.with_faults)
    ]


def _here(target: RunDir, arguments: Namespace) -> int:
    situation = this_machine("run", starts=not arguments.dry_run, is_alone=True)
    config = rehearsed_config(target, arguments.overrides, situation)
    plan = _plan(target, config, arguments, situation)
    requests = _requests(plan, arguments)
    planned = [planned_run(request, time.time()) for request in requests]
    if arguments.dry_run:
        _print_plan(plan, {}, as_json=arguments.json)
        return EXIT_DONE
    _announce(plan)
    for request, place in zip(requests, planned, strict=True):
        run = prepare(request, place)
        if request is requests[1]:
            write_pair(_pair(plan, planned))
        code = _trained(request.config, run)
        if code in (EXIT_INTERRUPTED, EXIT_STOPPED):
            note(f"the rehearsal was interrupted; {run.path} keeps what was trained")
            return code
        if code != EXIT_DONE and request is requests[0]:
            raise OrchestraError(
                f"the undisturbed run failed, so no fault was injected: `{invocation('why', run)}` tells "
                f"what ended it"
            )
    return _judge(_pair(plan, planned), as_json=arguments.json)


def _trained(config: Config, run: RunDir) -> int:
    """Train one of the two runs in the foreground, and say now and then how far it is."""
    from orchestra.agents.agent import train_here

    follower = Follower(run, config.train.steps)
    _, verdict = train_here(config, run, 0, tick=follower.tick, search_path=search_path(), say=follower.say)
    return verdict.code


def _on_cluster(target: RunDir, arguments: Namespace) -> int:
    site = ask(is_dry=arguments.dry_run, folder=target.path.parent)
    situation = Situation("submit", cluster=site, is_alone=True)
    config = by_itself(rehearsed_config(target, arguments.overrides, situation))
    site.require()
    plan = _plan(target, with_measured_network(config), arguments, replace(situation, cluster=None))
    share = site.share(config)
    planned = [
        placed_run(submission_of(request, share), time.time()) for request in _requests(plan, arguments)
    ]
    scripts = {placed.place.name: placed.arrays()[0].script() for placed in planned}
    for script in scripts.values():
        site.tested(script)
    if arguments.dry_run:
        _print_plan(plan, scripts, as_json=arguments.json)
        return EXIT_DONE
    _announce(plan)
    runs = _submitted(planned)
    pair = _pair(plan, runs)
    write_pair(pair)
    return _wait_and_judge(pair, as_json=arguments.json)


def _submitted(planned: Sequence[PlacedSubmission]) -> list[RunDir]:
    runs: list[RunDir] = []
    for placed in planned:
        if runs and NODE_DOWN_VARIABLE in os.environ:
            # A node that really goes down takes everything along that runs there.
            wait.wait_for(runs, placed.submission.members[0].config.run.metric)
        try:
            ledger, outcome = submit(placed)
        except OrchestraError:
            for run in runs:
                note(f"{run.name} is submitted: `orchestra cancel {typed_name(run)}` takes it back")
            raise
        assert isinstance(ledger, RunLedger)
        runs.append(ledger.run)
        note(f"{ledger.run.name} is job {outcome.accepted[0].id}")
    return runs


def _wait_and_judge(pair: RehearsalPair, *, as_json: bool) -> int:
    metric = read_config(pair.with_faults.config).run.metric
    try:
        wait.wait_for([pair.undisturbed, pair.with_faults], metric)
    except KeyboardInterrupt:
        note(f"`orchestra rehearse {typed_name(pair.with_faults)}` waits on and judges")
        raise
    return _judge(pair, as_json=as_json)


def _pair(plan: Rehearsal, runs: Sequence[RunDir]) -> RehearsalPair:
    return RehearsalPair(plan.of, runs[0], runs[1])


def _announce(plan: Rehearsal) -> None:
    print("\n".join(plan_lines(plan)), file=sys.stderr, flush=True)


def _print_plan(plan: Rehearsal, scripts: dict[str, str], *, as_json: bool) -> None:
    if as_json:
        faults = plan.with_faults.recovery.inject
        configs = {
            str(config.run.name): plain_values(config) for config in (plan.undisturbed, plan.with_faults)
        }
        facts = {"of": plan.of, "steps": plan.schedule.steps, "faults": faults}
        print(json.dumps({**facts, "scripts": scripts, "configs": configs}, indent=2))
        return
    print("\n".join(plan_lines(plan)))
    for name, script in scripts.items():
        print(f"\n# {name}\n{script}", end="")


def _judge(pair: RehearsalPair, *, as_json: bool) -> int:
    judgement = judged(pair)
    for run in (pair.undisturbed, pair.with_faults):
        if (place := read_config(run.config).checkpoint.dir) is not None:
            note(f"the checkpoints of {run.name} are in {place}")
    if as_json:
        print(json.dumps(judgement.to_json(), indent=2))
    else:
        print("\n".join(judgement_lines(judgement)))
    return judgement.code
