"""`orchestra rehearse RUN`: a short copy of a run twice, once left alone and once hurt on purpose, compared.

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
from typing import TYPE_CHECKING

from orchestra.cli import cluster
from orchestra.cli.attempt import add_output_options
from orchestra.cli.describe import invocation, typed_name
from orchestra.cli.resolve import add_directory_option, resolve
from orchestra.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, OrchestraError
from orchestra.faults import NODE_DOWN_VARIABLE
from orchestra.rundir import RunDir

if TYPE_CHECKING:
    from conf.schema import Config
    from orchestra.config.situation import Situation
    from orchestra.rehearsal.pair import Pair
    from orchestra.rehearsal.plan import Rehearsal
    from orchestra.submit.prepare import RunRequest
    from orchestra.submit.submission import PlannedJob

_EXPLAINED = """\
  orchestra rehearse first                            what the layout allows, one fault after another
  orchestra rehearse first --dry-run                  what would befall it, and the batch script
  orchestra rehearse first --fault sigkill@12:0 --fault node_down@30:9 --steps 50
  orchestra rehearse first cluster.time_limit=30 cluster.partition=test
  orchestra rehearse rehearsal-first-1-faults         wait for a rehearsal that was left, and judge it

KIND is sigkill, sigstop, exit, segfault, exception, oom, hang, gil, agent_kill or node_down (the last two on
a cluster only). Without @STEP the step is chosen, without :RANK the rank. node_down kills every process of
the job on that node; a command in ORCHESTRA_NODE_DOWN takes the node down instead.

Two new runs are made beside RUN: same model, layout, cluster, limits and storage, a few steps, a checkpoint
every few, deterministic, Weights & Biases off. They save the full state: mind the space. On a cluster both
are submitted at once (with ORCHESTRA_NODE_DOWN one after the other), and Ctrl-C leaves them alone. Exit code
0: all passed; 1: something did not.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra rehearse` takes."""
    parser.usage = (
        "orchestra rehearse RUN [overrides] [--fault KIND[@STEP[:RANK]]] [--steps N] [--dry-run] [--json]"
    )
    parser.add_argument("run", metavar="RUN", help="name, unique start of one, or path")
    parser.add_argument("overrides", nargs="*", metavar="overrides", help="KEY=VALUE or GROUP=NAME")
    parser.add_argument(
        "--fault", action="append", default=[], metavar="KIND[@STEP[:RANK]]", help="repeatable"
    )
    parser.add_argument("--steps", type=int, metavar="N", help="length of each run; default: as needed")
    add_output_options(parser)
    add_directory_option(parser)
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Rehearse, print what was seen, and return 0 where everything passed, else 1.

    Raises ConfigError before anything is started, LaunchError when Slurm is silent.
    """
    from orchestra.rehearsal.pair import read_pair

    target = resolve(arguments.run, arguments.dir)
    if (pair := read_pair(target)) is not None:
        return _judge_what_was_left(pair, arguments)
    from orchestra.cli.resume import goes_to_cluster

    if goes_to_cluster(target, arguments.overrides):
        return _on_cluster(target, arguments)
    return _here(target, arguments)


def _judge_what_was_left(pair: Pair, arguments: Namespace) -> int:
    if arguments.overrides or arguments.fault or arguments.steps is not None or arguments.dry_run:
        raise ConfigError(
            f"{pair.hurt.name} is a rehearsal already, which is waited for and judged as it is; name "
            f"{pair.of} to rehearse anew"
        )
    return _wait_and_judge(pair, as_json=arguments.json)


def _plan(target: RunDir, config: Config, arguments: Namespace, situation: Situation) -> Rehearsal:
    from orchestra.rehearsal.faults import why_no_node_goes_down, wish
    from orchestra.rehearsal.plan import planned_rehearsal

    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: expected 1 or more")
    wishes = [wish(text) for text in arguments.fault]
    if not wishes and (why := why_no_node_goes_down(config)) is not None:
        cluster.note(f"the loss of a node is not rehearsed: {why}")
    return planned_rehearsal(target, config, wishes, arguments.steps, situation)


def _request(config: Config, arguments: Namespace) -> RunRequest:
    from orchestra.config.signature import signature
    from orchestra.submit.prepare import RunRequest

    return RunRequest(config, signature(config), arguments.overrides, sys.argv)


# On this machine.


def _here(target: RunDir, arguments: Namespace) -> int:
    from orchestra.config.situation import this_machine
    from orchestra.rehearsal.plan import rehearsed_config
    from orchestra.submit.prepare import planned_run, prepare

    situation = this_machine("run", starts=not arguments.dry_run)
    config = rehearsed_config(target, arguments.overrides, situation)
    plan = _plan(target, config, arguments, situation)
    requests = [_request(it, arguments) for it in (plan.undisturbed, plan.hurt)]
    planned = [planned_run(request, time.time()) for request in requests]
    if arguments.dry_run:
        _print_plan(plan, {}, as_json=arguments.json)
        return EXIT_DONE
    _announce(plan)
    for request, place in zip(requests, planned, strict=True):
        run = prepare(request, place)
        if request is requests[1]:
            _record(plan, planned)
        code = _trained(request.config, run)
        if code in (EXIT_INTERRUPTED, EXIT_STOPPED):
            cluster.note(f"the rehearsal was broken off; {run.path} keeps what was trained")
            return code
        if code != EXIT_DONE and request is requests[0]:
            raise OrchestraError(
                f"the undisturbed run failed, and nothing was hurt: `{invocation('why', run)}` tells what "
                f"ended it"
            )
    return _judge(_pair(plan, planned), as_json=arguments.json)


def _trained(config: Config, run: RunDir) -> int:
    """Train one of the two runs in the foreground, and say now and then how far it is."""
    from orchestra.cli.rehearsal_view import Follower
    from orchestra.crew.foreground import train_here

    follower = Follower(run, config.train.steps)
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    _, verdict = train_here(config, run, 0, tick=follower.tick, search_path=path, say=follower.say)
    return verdict.code


# On a cluster.


def _on_cluster(target: RunDir, arguments: Namespace) -> int:
    from orchestra.rehearsal.plan import rehearsed_config
    from orchestra.submit.measured import with_measured_network
    from orchestra.submit.prepare import planned_run
    from orchestra.submit.submission import planned_job

    partitions = cluster.partitions_or_none(is_needed=not arguments.dry_run)
    config = rehearsed_config(target, arguments.overrides, cluster.SITUATION)
    config, problems = cluster.on_site(config, partitions)
    problems = [*cluster.place_problems(target.path.parent), *problems]
    if problems:
        raise ConfigError(problems)
    plan = _plan(target, with_measured_network(config), arguments, cluster.SITUATION)
    share = cluster.share_of(config, partitions)
    requests = [_request(it, arguments) for it in (plan.undisturbed, plan.hurt)]
    jobs = [planned_job(request, planned_run(request, time.time()), share) for request in requests]
    if partitions is not None:
        for job in jobs:
            cluster.tested(job.script())
    if arguments.dry_run:
        _print_plan(plan, {job.run.name: job.script() for job in jobs}, as_json=arguments.json)
        return EXIT_DONE
    _announce(plan)
    runs = _submitted(jobs)
    _record(plan, runs)
    return _wait_and_judge(_pair(plan, runs), as_json=arguments.json)


def _submitted(jobs: Sequence[PlannedJob]) -> list[RunDir]:
    from orchestra.submit import waiting
    from orchestra.submit.submission import submit

    runs: list[RunDir] = []
    for job in jobs:
        if runs and NODE_DOWN_VARIABLE in os.environ:
            # A node that really goes down takes everything along that runs there.
            waiting.wait_for(runs, job.request.config.run.metric)
        try:
            done = submit(job)
        except OrchestraError:
            for run in runs:
                cluster.note(f"{run.name} is submitted: `orchestra cancel {typed_name(run)}` takes it back")
            raise
        runs.append(done.run)
        cluster.note(f"{done.run.name} is job {done.job}")
    return runs


def _wait_and_judge(pair: Pair, *, as_json: bool) -> int:
    from orchestra.frozen import read_config
    from orchestra.submit import waiting

    metric = read_config(pair.hurt.config).run.metric
    try:
        waiting.wait_for([pair.undisturbed, pair.hurt], metric)
    except KeyboardInterrupt:
        cluster.note(f"`orchestra rehearse {typed_name(pair.hurt)}` waits on and judges")
        raise
    return _judge(pair, as_json=as_json)


# Both.


def _pair(plan: Rehearsal, runs: Sequence[RunDir]) -> Pair:
    from orchestra.rehearsal.pair import Pair

    return Pair(plan.of, runs[0], runs[1])


def _record(plan: Rehearsal, runs: Sequence[RunDir]) -> None:
    from orchestra.rehearsal.pair import write_pair

    write_pair(_pair(plan, runs))


def _announce(plan: Rehearsal) -> None:
    from orchestra.cli.rehearsal_view import plan_lines

    for line in plan_lines(plan):
        print(line, file=sys.stderr, flush=True)


def _print_plan(plan: Rehearsal, scripts: dict[str, str], *, as_json: bool) -> None:
    from orchestra.cli.rehearsal_view import plan_lines
    from orchestra.frozen import to_yaml

    if as_json:
        faults = plan.hurt.recovery.inject
        configs = {str(it.run.name): to_yaml(it) for it in (plan.undisturbed, plan.hurt)}
        facts = {"of": plan.of, "steps": plan.schedule.steps, "faults": faults}
        print(json.dumps({**facts, "scripts": scripts, "configs": configs}, indent=2))
        return
    print("\n".join(plan_lines(plan)))
    for name, script in scripts.items():
        print(f"\n# {name}\n{script}", end="")


def _judge(pair: Pair, *, as_json: bool) -> int:
    from orchestra.cli.rehearsal_view import judgement_lines
    from orchestra.frozen import read_config
    from orchestra.rehearsal.report import judged

    found = judged(pair)
    for run in (pair.undisturbed, pair.hurt):
        if (place := read_config(run.config).checkpoint.dir) is not None:
            cluster.note(f"the checkpoints of {run.name} are in {place}")
    print(json.dumps(found.to_json(), indent=2) if as_json else "\n".join(judgement_lines(found)))
    return found.code
