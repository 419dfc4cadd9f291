"""`orchestra plan [overrides]`: memory, speed and cost of a configuration before it runs.

Each further mode is asked for by an option and is a module of its own, listed in `MODES`. No cluster is asked
and no torch is loaded.
"""

from __future__ import annotations

import textwrap
from argparse import ArgumentParser, Namespace
from typing import Protocol

from orchestra.cli.plan import (
    calibrate_mode,
    exact_mode,
    explain_mode,
    goodput_mode,
    one_layout,
    scan_mode,
    script_mode,
    search_mode,
    table_mode,
)
from orchestra.errors import ConfigError


class Mode(Protocol):
    """What a module of this list offers: `NAME` is the option that asks for it, `OPTIONS` those that only it
    takes (both as argparse names them), `EXPLAINED` a paragraph of the help.
    """

    NAME: str
    OPTIONS: tuple[str, ...]
    EXPLAINED: str

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the option that asks for it, and those that belong to it; it loads nothing slow."""

    def run(self, arguments: Namespace) -> int:
        """Do it and return the exit code. Raises OrchestraError for what ends it otherwise."""


MODES: tuple[Mode, ...] = (
    *(search_mode, explain_mode, goodput_mode, scan_mode, table_mode),
    *(exact_mode, calibrate_mode, script_mode),
)
_WIDTH = 80

_EXPLAINED = """\
  orchestra plan model=llama3_8b parallelism=zero3 train.seq_len=8192
  orchestra plan experiment=llama3_70b cluster.nodes=128 --json
  orchestra plan --table layouts.csv --output predicted.csv

Where no cluster is chosen it plans for nodes of 8 H100 on Slurm; cluster.nodes, cluster.gpus_per_node and
cluster.hardware say otherwise. The trainer's profile is orchestra's; --framework takes another's.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `orchestra plan` takes."""
    parser.add_argument("overrides", nargs="*", metavar="overrides", help="KEY=VALUE or GROUP=NAME")
    parser.add_argument("--framework", metavar="NAME", help="whose kernels and habits (default: orchestra)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, in bytes and seconds")
    for mode in MODES:
        mode.add_arguments(parser)
    parser.epilog = _wrapped("\n".join([_EXPLAINED, *(mode.EXPLAINED for mode in MODES)]))


def run(arguments: Namespace) -> int:
    """Print the prediction, or do what an option asks for, and return the exit code."""
    _check_empty(arguments)
    asked = [mode for mode in MODES if _is_given(arguments, mode.NAME)]
    if len(asked) > 1:
        names = " and ".join(_option(mode.NAME) for mode in asked)
        raise ConfigError(f"{names} are different things to do; give one of them")
    taken = asked[0].OPTIONS if asked else ()
    for mode in MODES:
        for name in mode.OPTIONS:
            if _is_given(arguments, name) and name not in taken:
                takers = " or ".join(_option(each.NAME) for each in MODES if name in each.OPTIONS)
                raise ConfigError(f"{_option(name)} belongs to {takers}; leave it out or add that")
    return (asked[0] if asked else one_layout).run(arguments)


def _is_given(arguments: Namespace, name: str) -> bool:
    # 0 is given, and equals False.
    value = getattr(arguments, name)
    return value is not None and value is not False


def _check_empty(arguments: Namespace) -> None:
    empty = [_option(name) for name, value in vars(arguments).items() if value == ""]
    if empty:
        raise ConfigError([f"{option} is empty; give a value, or leave it out" for option in empty])


def _wrapped(text: str) -> str:
    """Return paragraphs no wider than a terminal; indented lines are to be typed, and stay as they are."""
    lines: list[str] = []
    paragraph: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line and not line.startswith(" "):
            paragraph.append(line)
            continue
        lines += textwrap.wrap(" ".join(paragraph), _WIDTH, break_on_hyphens=False)
        lines.append(line)
        paragraph = []
    return "\n".join(lines).rstrip()


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
