"""`orchestra doctor [overrides]`: a checklist of this machine, the cluster and, with --nodes, its nodes.

It starts no training and changes nothing. It has to work where the rest does not, so it loads the
configuration late, and a configuration that cannot be loaded is one more finding.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from orchestra.cli.text.figures import WIDTH, number_of
from orchestra.cli.text.figures import wrapped as wrapped_to
from orchestra.doctor import hardware_checks, host_checks, slurm_checks
from orchestra.doctor.check import Check, Finding, Mark, Subject, perform
from orchestra.errors import EXIT_DONE, EXIT_FAILED, ConfigError

_NAME_WIDTH = 16
_MARK_WIDTH = 7
_WIDEST = 110

_EXPLAINED = """\
  orchestra doctor            this machine, and Slurm where its commands are
  orchestra doctor --nodes 2  also two nodes: one srun of some seconds
  orchestra doctor run.dir=/scratch/me/runs cluster.partition=gpu --nodes 2

Exit code 0 when nothing failed (notes and warnings are no failures), 1 otherwise.
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.usage = "orchestra doctor [overrides] [--nodes N] [--json] [--config-dir DIR]"
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="overrides", help="KEY=VALUE or GROUP=NAME"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="run a probe on so many nodes of the cluster")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    # Nothing of the configuration is imported before the checks: it may be what is broken here.
    parser.add_argument("--config-dir", "-cd", action="append", metavar="DIR", help="a folder with presets")
    parser.epilog = _EXPLAINED


def run(arguments: Namespace) -> int:
    """Check everything, print it, and return 0 when nothing failed."""
    if arguments.nodes is not None and arguments.nodes < 1:
        raise ConfigError(f"--nodes={arguments.nodes}: expected 1 or more")
    subject, findings = _subject(arguments, needs_slurm=arguments.nodes is not None)
    if not arguments.json:
        for finding in findings:
            _print(finding)
    for finding in perform(_checks(arguments.nodes), subject):
        findings.append(finding)
        if not arguments.json:
            _print(finding)
    failed = any(finding.mark is Mark.failed for finding in findings)
    if arguments.json:
        rows = [{**dataclasses.asdict(finding), "mark": finding.mark.value} for finding in findings]
        facts = {"host": socket.gethostname(), "ok": not failed, "findings": rows}
        print(json.dumps(facts, indent=2))
    else:
        print(_counted(findings))
    return EXIT_FAILED if failed else EXIT_DONE


def _checks(num_nodes: int | None) -> list[Check]:
    here = (*host_checks.SOFTWARE_CHECKS, *host_checks.CHECKS, *hardware_checks.CHECKS)
    checks = [*here, *slurm_checks.CHECKS]
    if num_nodes is None:
        return checks
    from orchestra.doctor.node_checks import check_nodes

    return [*checks, check_nodes(num_nodes)]


def _subject(arguments: Namespace, *, needs_slurm: bool) -> tuple[Subject, list[Finding]]:
    """Return what the configuration says; where it cannot be loaded its defaults, and a finding why.

    Raises ConfigError for overrides that are wrong.
    """
    try:
        from orchestra.cli.hydra_options import with_home
        from orchestra.config.home import chooses_cluster

        overrides = with_home(arguments, "doctor")
        is_chosen = any(map(chooses_cluster, overrides))
        # The cluster of the user's home is that of other machines too, which need no Slurm.
        asked_for = needs_slurm or any(map(chooses_cluster, arguments.overrides))
        if not is_chosen and (needs_slurm or shutil.which("sbatch") is not None):
            overrides = ["cluster=slurm", *overrides]
        subject = _configured(list(overrides))
        return dataclasses.replace(subject, needs_slurm=asked_for and subject.launcher == "slurm"), []
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  shadowed and half-installed packages raise anything
        problem = f"cannot be loaded: {type(error).__name__}: {error}"
        finding = Finding("configuration", Mark.failed, problem, "see `imports` and `libraries` below")
        return Subject(launcher="slurm" if needs_slurm else "local", needs_slurm=needs_slurm), [finding]


def _configured(overrides: list[str]) -> Subject:
    from orchestra.config.compose import compose
    from orchestra.config.machine import Situation

    config = compose(overrides, Situation("doctor")).config
    cluster = config.cluster
    options = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "exclude": tuple(cluster.exclude),
        **cluster.slurm_extra,
    }
    ranks = cluster.gpus_per_node
    return Subject(
        launcher=cluster.launcher.value,
        run_dir=Path(os.path.abspath(os.path.expanduser(config.run.dir))),  # noqa: PTH100,PTH111  may not exist
        fallback_dir=config.checkpoint.fallback_dir,
        own_checkpoints=config.checkpoint.dir is not None,
        group=config.run.group,
        interface=cluster.network.interface,
        device=cluster.device.value,
        ranks_per_node=ranks if isinstance(ranks, int) else None,
        numa_binding=cluster.numa_binding.value,
        threads_per_rank=cluster.threads_per_rank,
        wandb_mode=config.wandb.mode.value,
        partition=cluster.partition,
        slurm_options=tuple((name, value) for name, value in options.items() if value or value == 0),
        setup=tuple(cluster.setup),
        in_container=bool(cluster.container.image or cluster.container.prefix),
    )


def _print(finding: Finding) -> None:
    terminal = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    indent = " " * (_MARK_WIDTH + _NAME_WIDTH + 2)
    head = f"{finding.mark.value:<{_MARK_WIDTH}} {finding.name:<{_NAME_WIDTH}} "
    # Paths stay whole, to be copied.
    wrapped = functools.partial(wrapped_to, width=min(max(terminal, WIDTH), _WIDEST), keeps_words=True)
    lines = wrapped(finding.found, head, indent) + wrapped(finding.advice, f"{indent}→ ", f"{indent}  ")
    print("\n".join(lines), flush=True)


def _counted(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.mark for finding in findings)
    notes, warnings = number_of(counts[Mark.note], "note"), number_of(counts[Mark.warning], "warning")
    return f"{counts[Mark.ok]} ok, {notes}, {warnings}, {counts[Mark.failed]} failed"
