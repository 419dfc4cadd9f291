"""The command `slurm/devcluster`: reads options, calls the operations, prints for a person or a shell.

Exit codes: 0 done or healthy · 1 failed or not healthy · 2 wrong usage · else the code of the command given
to `exec`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slurm.cluster.commands import require_root
from slurm.cluster.errors import ClusterError, UsageError
from slurm.cluster.health import problems, table
from slurm.cluster.hosts import enter
from slurm.cluster.layout import DEFAULT_STATE, ClusterLayout, Settings, load_layout
from slurm.cluster.operations import down, fail_node, heal_node, up

COMMAND = "slurm/devcluster"
DESCRIPTION = """\
A real Slurm cluster of several hosts on this machine: node1 to nodeN, each in network, process, mount and
host-name namespaces of its own, with slurmctld, slurmdbd, MariaDB and munge on a host called controller. It
touches no Slurm, munge or MariaDB that is already here, and `down` leaves nothing. All but status and
env need root."""
EPILOG = """\
examples:
  slurm/devcluster up && eval "$(slurm/devcluster env)"
  srun --nodes=3 hostname
  slurm/devcluster fail-node 2; slurm/devcluster status; slurm/devcluster heal-node 2
  slurm/devcluster exec node1 -- ps ax
  slurm/devcluster down"""


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    options = parser().parse_args(arguments)
    os.umask(0o022)
    # An interrupted `up` removes what it had started.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        return int(options.run(options))
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(
        COMMAND, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    state = os.environ.get("DEVCLUSTER_STATE", str(DEFAULT_STATE))
    top.add_argument(
        "--state",
        type=Path,
        default=Path(state),
        help=f"the cluster's folder ($DEVCLUSTER_STATE, else {DEFAULT_STATE})",
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_up(commands.add_parser("up", help="start the cluster, or what is missing of it"))
    for name, function, text in (
        ("down", run_down, "remove the cluster with everything that runs on it"),
        ("status", run_status, "show hosts, daemons and what is wrong; exit code 0 if nothing is"),
        ("env", run_env, "print the exports that a shell needs"),
    ):
        commands.add_parser(name, help=text).set_defaults(run=function)
    for name, function, text in (
        ("fail-node", run_fail_node, "cut a node off and end everything on it, like a loss of power"),
        ("heal-node", run_heal_node, "start a failed node and wait until Slurm gives it jobs"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("node", help="a number or name: 2 or node2")
        command.set_defaults(run=function)
    command = commands.add_parser("exec", help="run a command on a host as root: exec node1 -- ps ax")
    command.add_argument("host", help="node1 … nodeN or controller")
    command.add_argument("command", nargs=argparse.REMAINDER)
    command.set_defaults(run=run_exec)
    return top


def _add_up(command: argparse.ArgumentParser) -> None:
    default = Settings()
    command.add_argument("--nodes", type=int, default=default.nodes, help="how many nodes (%(default)s)")
    command.add_argument(
        "--gpus", type=int, default=default.gpus, help="pretended GPUs of each node (%(default)s)"
    )
    command.add_argument(
        "--cpus", type=int, default=default.cpus, help="pretended CPUs of each node (%(default)s)"
    )
    command.add_argument("--no-accounting", action="store_true", help="no slurmdbd, so no sacct")
    command.add_argument(
        "--site-defaults", action="store_true", help="Slurm's own times, instead of quick ones"
    )
    command.add_argument(
        "--topology",
        choices=("none", "tree", "block"),
        default=default.topology,
        help="what Slurm knows of the network: two leaf switches under one, or two blocks; nodes with odd "
        "numbers are on the first, the others on the second (%(default)s)",
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further line of slurm.conf; repeatable",
    )
    command.set_defaults(run=run_up)


def run_up(options: argparse.Namespace) -> int:
    require_root("up")
    settings = Settings(
        nodes=options.nodes,
        gpus=options.gpus,
        cpus=options.cpus,
        accounting=not options.no_accounting,
        site_defaults=options.site_defaults,
        slurm_lines=tuple(options.set),
        topology=options.topology,
    )
    start = time.monotonic()
    layout, was_needed = up(_state(options), settings)
    took = f"up after {time.monotonic() - start:.1f} s" if was_needed else "is already up"
    print(
        f"cluster of {settings.nodes} nodes in {layout.state} {took}; "
        f"for this shell: {_for_this_shell(layout)}"
    )
    return 0


def run_down(options: argparse.Namespace) -> int:
    require_root("down")
    was_there = down(_state(options))
    print(f"cluster in {_state(options)} is down" if was_there else f"no cluster in {_state(options)}")
    return 0


def run_status(options: argparse.Namespace) -> int:
    layout = _layout(options)
    seen = problems(layout)
    print(table(layout))
    print("\n".join(f"problem: {problem}" for problem in seen) or "healthy")
    return 1 if seen else 0


def run_env(options: argparse.Namespace) -> int:
    for name, value in _layout(options).environment.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def run_fail_node(options: argparse.Namespace) -> int:
    require_root("fail-node")
    layout = _layout(options)
    node = _node(layout, options.node)
    fail_node(layout, node)
    print(f"{node} is off; Slurm notices after its SlurmdTimeout")
    return 0


def run_heal_node(options: argparse.Namespace) -> int:
    require_root("heal-node")
    layout = _layout(options)
    node = _node(layout, options.node)
    heal_node(layout, node)
    print(f"{node} is back")
    return 0


def run_exec(options: argparse.Namespace) -> int:
    require_root("exec")
    layout = _layout(options)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if options.host not in layout.hosts or not command:
        raise UsageError(f"use: {COMMAND} exec HOST -- COMMAND, with HOST one of {', '.join(layout.hosts)}")
    environment = dict(os.environ) | layout.environment
    return subprocess.run([*enter(layout, options.host), *command], env=environment, check=False).returncode


def _state(options: argparse.Namespace) -> Path:
    return Path(options.state).absolute()


def _layout(options: argparse.Namespace) -> ClusterLayout:
    layout = load_layout(_state(options))
    if layout is None:
        raise ClusterError(f"no cluster in {_state(options)}; start one as root: {COMMAND} up")
    return layout


def _node(layout: ClusterLayout, given: str) -> str:
    node = f"node{given}" if given.isdigit() else given
    if node not in layout.nodes:
        raise UsageError(
            f"{given} is no node of this cluster; it has {layout.nodes[0]} to {layout.nodes[-1]}"
        )
    return node


def _for_this_shell(layout: ClusterLayout) -> str:
    option = "" if layout.state == DEFAULT_STATE else f" --state {layout.state}"
    return f'eval "$({COMMAND}{option} env)"'
